"""``fastrack help``: the help of commands, and short texts on topics.

A line of a topic that is indented is a term, and behind two spaces what it means; with four spaces, code to copy.
"""

import difflib
from typing import Annotated, Any

import typer

from fastrack._cli.console import print_lines
from fastrack._cli.options import RULE
from fastrack._cli.program import describe, lay_out, missing_command, whole

TOPICS = {
    "keys": """\
Name a key by its source, with --key or in FASTRACK_KEY_FILE; never by the key itself, which other users could read.

  PATH  a key file, a folder of them, or a .grants file
  -  standard input
  fd:N  a file descriptor
  kbs:///REPOSITORY/TYPE/TAG  a resource of a Key Broker Service, by the Confidential Data Hub of this guest
  SCHEME:REST  an installed key provider, such as pkcs11:

`fastrack keygen owner.key` makes one; with --passphrase, owner.key.wrapped. Keep a copy: without it, what it seals \
cannot be opened.
`fastrack key *` shows which keys are here, `fastrack inspect` which key a sealed file needs.""",
    "files": f"""\
{RULE}

  seal a.npy a.safetensors  one file, of this name
  seal a.npy sealed  sealed/a.npy.safetensors
  seal 'data/*.npy' sealed  as many as there are; quoted, fastrack matches them itself
  seal -r data sealed  the files in a folder and below, each by itself
  seal model sealed-model  a folder that belongs together, as one
  seal - -  standard input to standard output

A file that fails does not end the work on the others. What a run that was interrupted has sealed is whole: \
--skip-existing goes on after it. --force replaces targets instead.""",
    "status": """\
The exit status of every command but `run`, which ends as its program does:

  0  success
  1  an error of no kind below, or of several kinds
  2  bad usage: nothing was done
  3  `attest verify` and `attest grant`: the policy refuses the machine
  4  authentication: altered, not what its owner sealed or signed, or older than expected
  5  key: missing, another one, refused, or no key
  6  input: missing, damaged, or of another format
  7  device: absent, busy or not capable
  8  lease: the time that a key was given for is over
  130  interrupted by Ctrl-C
  141  the program that reads the output has ended, as after `| head`
  143  terminated

Errors are lines on standard error, and -v says where each arose. What failed is not left in part; what was there is \
unchanged.""",
    "json": """\
With --json a command prints one JSON document on standard output, also on failure; of several files, one on each line.

Sizes are in bytes, times in seconds, gbps in 1e9 bytes a second. A failure is the member "error", with "type", \
"kind", "message", "tensor" and "chunk". docs/cli.md lists the members of each command.""",
    "environment": """\
Variables that fastrack reads:

  FASTRACK_KEY_FILE  the key, where no --key names one
  FASTRACK_KEY_MODE  a mode that key files may have, such as 0440, where a platform mounts them so
  FASTRACK_IDENTITY  the secret file of a recipient, for .grants files
  FASTRACK_OWNER  the owner's public file, for .grants files
  FASTRACK_PASSPHRASE_FILE  a private file with the passphrase of a key, or a new one
  FASTRACK_REQUIRE  "confidential", to refuse GPUs that are not in confidential mode
  FASTRACK_ENGINE  the host engine, if not the fastest of this machine
  FASTRACK_CACHE_DIR  where blocks of remote files are kept, still sealed
  FASTRACK_CACHE_SIZE  the bound of these, such as 100G
  FASTRACK_PKCS11_MODULE  the module of a token
  FASTRACK_PKCS11_PIN  the PIN of a token
  FASTRACK_PKCS11_TRY  low or final, to send it after a wrong one, or though it is the last try
  CDH_ADDR  the Confidential Data Hub, if not at http://127.0.0.1:8006
  NO_COLOR, FORCE_COLOR  no colours for what failed, or colours in files and pipes too
  COLUMNS  the width of text, where standard output is no terminal""",
}
ALIASES = {
    **dict.fromkeys(("key-files", "keyfile"), "keys"),
    **dict.fromkeys(("targets", "target", "many", "many-files", "sources", "glob", "globs", "patterns"), "files"),
    **dict.fromkeys(("exit", "exit-status", "exit status", "errors"), "status"),
    **dict.fromkeys(("env", "variables", "environment-variables", "environment variables"), "environment"),
}


def help_(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND | TOPIC]", help=f"A command; or one of {', '.join(TOPICS)}.")
    ] = None,
) -> None:
    """Show the help of a command, or a short text on a topic."""
    program: Any = ctx.find_root().command
    given = list(words or ())
    topic = ALIASES.get(" ".join(given).lower(), " ".join(given).lower())
    if topic in TOPICS:
        typer.echo(lay_out(TOPICS[topic]))  # not folded again: it fits, but for code
        return
    command, path = program, "fastrack"
    for word in given:
        members = getattr(command, "commands", None)
        if members is None:
            raise typer.BadParameter(
                f"expected one command, got {word!r:.60} behind it: `{path.replace(' ', ' help ', 1)}`"
            )
        if word not in members:
            near = difflib.get_close_matches(word.lower(), [*TOPICS, *ALIASES], n=1, cutoff=0.75)
            if near and command is program:
                raise typer.BadParameter(f"no topic {word!r:.60}: did you mean `fastrack help {near[0]}`?")
            raise typer.BadParameter(missing_command(word, list(members), path))
        command, path = whole(members[word]), f"{path} {word}"
    print_lines([describe(command, path)])
