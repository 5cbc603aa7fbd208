"""The program and its commands: help that breaks lines between words, and errors of usage as one line with advice."""

import difflib
import functools
import logging
import os
import platform
import re
import shutil
import sys
import textwrap
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.completion import get_completion_inspect_parameters
from typer.core import TyperCommand, TyperGroup

from fastrack._cli import extension
from fastrack._cli.console import note, print_error
from fastrack._cli.errors import error_document, handle_errors, message_of
from fastrack._cli.examples import EXAMPLES
from fastrack._util.key_text import has_key
from fastrack._util.shown import HIDDEN
from fastrack._version import __version__

_ROWS, _COLUMNS = 24, 80  # of a terminal, which the help of a command fits
_WIDEST = 100  # columns: longer lines of text are hard to read
_NARROW = 60  # columns, below which a definition stands under its term
_TERMS = 24  # columns of the terms of definitions, at most
_CODE = " " * 4  # before a line to copy
BEHIND = "fastrack.behind"  # of a context's meta: the words behind --, which arguments have, too
_DEFINITION = re.compile(r"  (\S.*?)(?:  +(.*))?")
_ClickException: Any = typer.BadParameter.__mro__[2]  # the base of its errors, which Typer does not export
# What other programs call a command, and what the command does.
_SYNONYMS = {
    "seal": ("encrypts", "encrypt enc encode encipher lock protect pack wrap save store add archive compress tar zip"),
    "unseal": ("decrypts", "decrypt dec decode decipher unlock open extract unpack unwrap export restore cat read get"),
    "inspect": ("shows what a file holds", "info show ls list stat describe view print dump head display file ll dir"),
    "verify": ("authenticates files", "check validate test audit authenticate fsck verity"),
    "import": ("makes a dataset", "convert ingest dataset load-data prepare create-dataset"),
    "keygen": ("makes a key", "generate gen genkey gen-key key-gen init new create newkey generate-key setup"),
    "key": ("shows the ids of keys", "keys id ids fingerprint whoami keyid key-id"),
    "grant": ("gives a key to others", "share give allow permit access recipients invite revoke ungrant"),
    "publish": ("signs a set of files", "sign manifest release push upload"),
    "rekey": ("seals a file under another key", "rotate re-encrypt reencrypt reseal change-key rewrap passwd"),
    "doctor": ("examines this machine", "diagnose status env system gpu report health selftest"),
    "bench": ("measures this machine", "benchmark perf speed measure time"),
    "plan": ("predicts how long it will take", "predict estimate forecast model simulate capacity eta how-long"),
    "completion": ("has a shell complete words", "complete shell bash zsh fish autocomplete"),
    "help": ("lists commands and topics", "man usage commands topics docs manual tutorial ?"),
}
_WORDS = {  # of Typer and pydantic on a value, and ours
    "Value error, ": "",
    r"Input should be greater than or equal to (\S+)": r"expected \1 or more, got less",
    r"Input should be less than or equal to (\S+)": r"expected \1 or less, got more",
    r"Input should be a valid integer\b.*": "expected a whole number, got another text",
    r"Input should be a valid number\b.*": "expected a number, got another text",
    r"('.*') is not one of (.*)": r"expected one of \2, got \1",
}
_NOT_COMMANDS = {
    "load": "`fastrack.load_file` loads a file in Python, and `fastrack unseal` decrypts one",
    "train": "training is Python: `fastrack.SealedDataset` opens a dataset, which `fastrack import` makes",
    "version": "`fastrack --version` shows it",
    "update": "pip updates fastrack",
    "upgrade": "pip updates fastrack",
    "install": "pip installs fastrack; `fastrack doctor` examines the machine",
}
_OPTIONS = {  # what other programs call an option
    "--out": "--output --destination --dest --target --to-file -O",
    "--force": "--overwrite --replace --yes -y --clobber",
    "--quiet": "--silent -s",
    "--key": "--keyfile --key-file --keys --password --pass -p",
    "--to": "--recipient --recipients --for",
    "--recursive": "--recurse -R",
    "--skip-existing": "--no-clobber -n --resume --continue --skip",
    "--json": "--format-json -j",
    "--verbose": "--debug --log-level --trace",
}


class _Lines(logging.Handler):
    """Print the log of fastrack on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print an entry."""
        note(f"{record.levelname.lower()}: {record.getMessage()}")


def _show_log(ctx: typer.Context, requested: bool) -> None:
    log = logging.getLogger("fastrack")
    if not requested or ctx.resilient_parsing or any(isinstance(handler, _Lines) for handler in log.handlers):
        return
    handler = _Lines()
    log.addHandler(handler)
    ctx.call_on_close(functools.partial(log.setLevel, log.level))
    ctx.call_on_close(functools.partial(log.removeHandler, handler))
    log.setLevel(logging.DEBUG)
    log.debug("fastrack %s, Python %s, %s", __version__, platform.python_version(), platform.platform())


def _show_all(ctx: typer.Context, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        typer.echo(describe(ctx.command, ctx.command_path, in_full=True))
        raise typer.Exit


def _eager(callback: Any, *names: str, text: str) -> Any:
    return typer.Option(*names, help=text, callback=callback, is_eager=True, expose_value=False)


@functools.cache
def common_options() -> list[Any]:
    """Return the options of all commands, beside `--help`."""
    told = "Say on stderr what is done, and where an error arose."

    def options(
        *,
        verbose: Annotated[bool, _eager(_show_log, "--verbose", "-v", text=told)] = False,
        help_all: Annotated[bool, _eager(_show_all, "--help-all", text="Show all options.")] = False,
    ) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(options)
    return typer.main.get_command(app).params


class Command(TyperCommand):
    """A command whose help fits the terminal."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += common_options()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Refuse what begins with one dash in the place of two, or is a file."""
        options = _options_of(self)
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[BEHIND] = args[end + 1 :]
        for word in args[:end]:
            if re.fullmatch(r"-[^-].+", word, re.DOTALL) and not ctx.resilient_parsing:
                name = f"-{word.partition('=')[0]}"
                if name in options:
                    ctx.fail(f"no option {word:.60}: expected two dashes, as in {name}")
                if word[:2] not in options and os.path.lexists(word):
                    ctx.fail(f"no option {word:.60}: expected ./ before the name of a file that begins with a dash")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(describe(self, ctx.command_path))


class ExtendedCommand(Command):
    """A command that `fastrack-bench` adds options to, or adds."""

    @property
    def added(self) -> list[str]:
        """The options that it adds. Where there are none it adds the whole command."""
        return extension.COMMANDS[str(self.name)].split()

    def whole(self) -> Any:
        """Return the command as it is installed. Raise an error if no part of it is."""
        if self.added and not extension.is_installed():
            return self
        app = extension.load(str(self.name))
        for registered in app.registered_commands:
            registered.cls = Command
        return typer.main.get_command(app)

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Begin the command. What `fastrack-bench` has is loaded if it is asked for, by help, or by completion."""
        words = {word.partition("=")[0] for word in args}
        is_asked = not self.added or bool(words & {*self.added})
        is_completion = extra.get("resilient_parsing", False)
        is_wanted = (is_completion or words & {"--help", "--help-all", "-h"}) and extension.is_installed()
        if (is_asked or is_wanted) and not is_completion:
            as_json = ("--json", "-") in pairwise(args) if self.added else "--json" in args
            handle_errors(lambda **_: extension.load(str(self.name)))(as_json=as_json)
        if is_wanted or (is_asked and not is_completion):
            return self.whole().make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def whole(command: Any) -> Any:
    """Return a command with the options that `fastrack-bench` adds, if it is installed."""
    return command.whole() if isinstance(command, ExtendedCommand) else command


class Program(TyperGroup):
    """A program, or one of its groups of commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.params += common_options()[:1]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write(describe(self, ctx.command_path))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line. Of an empty one, write the help to stderr, and exit as after bad usage."""
        if not args and not ctx.resilient_parsing:
            sys.stderr.write(f"{describe(self, ctx.command_path)}\n")
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line. The error for an unknown one names the one that was meant."""
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing and not args[0].startswith("-"):
            ctx.fail(missing_command(args[0], list(self.commands), ctx.command_path))
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else self.commands[name], rest

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line. Print an error of usage as one line, and exit with the status of the command."""
        if "_FASTRACK_COMPLETE" in os.environ:
            get_completion_inspect_parameters()  # makes shells known, which Typer does only for its own options
        try:
            status = super().main(*args, **{**options, "prog_name": "fastrack", "standalone_mode": False})
        except _ClickException as error:
            given = next(iter(args), options.get("args")) or sys.argv[1:]
            said, as_json = _usage(error), "--json" in given and _has_flag(error, "--json")
            print_error({**error_document(error), "message": said}, [f"error: {said}"], as_json=as_json)
            status = 2
        sys.exit(status or 0)


def describe(command: Any, path: str, *, in_full: bool = False) -> str:
    """Return the help of a command, in lines that fit the terminal. `path` is how the command is called.

    What a terminal of 24 lines does not hold is left out, unless it is asked for `in_full`: first what texts say behind
    their first sentence, and then the last options, which are named.
    """
    if path == "fastrack":
        return _describe_all(command)
    options = [param for param in command.params if param.param_type_name == "option" and param.name != "help_all"]
    text = _page(command, path, options)
    if not in_full and _rows(text) > _ROWS:
        pages = (_page(command, path, options[:count], options[count:]) for count in range(len(options), -1, -1))
        text = next((page for page in pages if _rows(page) <= _ROWS), text)
    return lay_out(text)


def _rows(text: str) -> int:
    return len(lay_out(text, _COLUMNS).splitlines())


def _page(command: Any, path: str, options: list[Any], others: list[Any] | None = None) -> str:
    """Return the help of a command. Where others are left out, texts are their first sentence."""
    told = str if others is None else _first_sentence
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    words = ["[OPTIONS]", *(param.metavar for param in arguments)]
    if isinstance(command, TyperGroup):
        words = ["COMMAND", "..."]
    lines = [f"Usage: {path} {' '.join(words)}", "", told(re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or ""))]
    if arguments:
        lines += ["", *(f"  {param.metavar}  {told(param.help)}" for param in arguments)]
    if isinstance(command, TyperGroup):
        lines += ["", "Commands:"]
        lines += [
            f"  {name}  {(member.help or '').partition(chr(10) * 2)[0]}" for name, member in command.commands.items()
        ]
    lines += ["", "Options:", *(f"  {_term(param)}  {told(param.help or '')}{_default(param)}" for param in options)]
    lines += ["  --help, -h  Show this text."]
    if others is not None:
        names = ", ".join(param.opts[0] for param in others)
        lines += [f"  --help-all  Show all of this{', and ' * bool(names)}{names}."]
    if examples := EXAMPLES.get(path.removeprefix("fastrack ")):
        lines += ["", "Examples:", *(_example(path, example) for example in examples)]
    return "\n".join(lines)


def _example(path: str, words: str) -> str:
    """Return a line to copy, in several for a shell if it is longer than the terminal is wide."""
    line = re.sub(r"(--\S+) (?=\w)", "\\1\0", f"{path} {words}".rstrip())  # options stay with their values
    return f" \\\n{_CODE}{_CODE}".join(_wrap(line, _COLUMNS - 10, _CODE, "")).replace("\0", " ")


def _first_sentence(text: str) -> str:
    return text and text.partition("\n\n")[0].partition(". ")[0].removesuffix(".") + "."


def _describe_all(program: Any) -> str:
    """Return the help of the program, which fits a terminal of 24 rows: a line for each command, by topic."""
    # One line of 24, as the commands take the others, and no heading over the first topic.
    lines = ["Usage: fastrack [--version | --help] COMMAND ..., to move sealed tensors"]
    for topic, commands in program.topics.items():
        lines += [f"{topic}:"] if len(lines) > 1 else []
        lines += [f"  {name}  {text}" for name, text in commands.items() if not extension.is_absent(name)]
    return lay_out("\n".join(lines))


def lay_out(text: str, columns: int | None = None) -> str:
    """Return a text in lines as wide as the terminal, or of so many columns, broken between words.

    A line that begins with two spaces is a definition: a term, two spaces or more, and what it means. One that begins
    with four is code to copy, and is not folded.
    """
    width = columns or max(20, min(shutil.get_terminal_size().columns, _WIDEST))
    lines = list[str]()
    terms = [len(match[1]) for match in map(_DEFINITION.fullmatch, text.splitlines()) if match and match[2]]
    column = min(_TERMS, max(terms, default=0)) + 4
    for line in text.splitlines():
        match = _DEFINITION.fullmatch(line)
        if line.startswith(_CODE):
            lines.append(line)
            continue
        if match is None:
            hanging = len("Usage: ") if line.startswith("Usage: ") else 0
            lines += _wrap(line, width, "", " " * hanging)
            continue
        term, meaning = match[1], match[2] or ""
        lead = f"  {term}"
        if width >= _NARROW and len(lead) <= column - 2:
            lines += _wrap(meaning, width, lead.ljust(column), " " * column)
        else:
            indent = " " * (column if width >= _NARROW else 6)
            lines += [*_wrap(term, width, "  ", "    "), *(_wrap(meaning, width, indent, indent) if meaning else [])]
    return "\n".join(lines)


def _wrap(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    ) or [first.rstrip()]


def _term(option: Any) -> str:
    """Return the names of an option, and what it takes."""
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag or option.count:
        return names
    kind = getattr(option, "type_descriptor", None) or option.type
    choices = getattr(kind, "choices", None)
    return f"{names} {option.metavar or ('|'.join(map(str, choices)) if choices else option.name.upper())}"


def _default(option: Any) -> str:
    value = option.default
    if option.is_flag or not option.show_default or value in (None, 0, "") or callable(value):
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    return f" [default: {', '.join(map(str, values))}]" if values else ""


def missing_command(name: str, commands: list[str], path: str) -> str:
    """Return the error for a command that there is not, with the one that was meant."""
    missing, word = "no such command" if has_key(name) else f"no command {name!r:.60}", name.lower()
    if path == "fastrack":
        meant = {other: command for command, (_, words) in _SYNONYMS.items() for other in words.split()}
        if os.path.lexists(name) and word not in meant:
            return f"{missing}, which is a file: `fastrack inspect` shows what it holds, `fastrack seal` encrypts it"
        known = {**{command: command for command in commands}, **meant, **dict.fromkeys(_NOT_COMMANDS, "")}
    else:
        known = {command: command for command in commands}
    if word not in known:
        near = difflib.get_close_matches(word, commands, n=1) or difflib.get_close_matches(word, known, n=1, cutoff=0.8)
        if not near:
            return f"{missing}. `{path} --help` lists the commands"
        word = near[0]
    if path == "fastrack" and word in _NOT_COMMANDS:
        return f"{missing}: {_NOT_COMMANDS[word]}"
    command = known[word]
    if command == word:
        return f"{missing}: did you mean `{path} {command}`?"
    return f"{missing}: `{path} {command}` {_SYNONYMS[command][0]}"


def _usage(error: Any) -> str:
    """Return an error of usage as one line, which says where to look on."""
    ctx = getattr(error, "ctx", None)
    path = "fastrack" if ctx is None else ctx.command_path
    option = getattr(error, "option_name", None)
    if option is not None and "argument" in message_of(error):
        return f"{option}: expected a value, got none"
    if option is not None and ctx is not None:
        return _missing_option(option, ctx.command, path)
    text = message_of(error).rstrip(".")
    if isinstance(error, typer.BadParameter) and not error.message:
        return f"expected {text}, got none. `{path} --help` tells more"
    if re.search(r"\bexpected\b|`", text):  # one of fastrack's, and complete
        return text
    for found, said in _WORDS.items():
        text = re.sub(found, said, text)
    text = HIDDEN if has_key(error.message) else text
    text = text if text[:2].isupper() else f"{text[0].lower()}{text[1:]}"  # except the name of an argument
    return f"{text}. `{path} --help` tells more"


def _has_flag(error: Any, name: str) -> bool:
    """Return True if the command of an error of usage has this option, without a value."""
    ctx = getattr(error, "ctx", None)
    params = [] if ctx is None else ctx.command.params
    return any(name in param.opts and param.is_flag for param in params if param.param_type_name == "option")


def _options_of(command: Any) -> list[str]:
    options = (param for param in command.params if param.param_type_name == "option")
    names = (name for param in options for name in (*param.opts, *param.secondary_opts))
    return ["--help", "-h", *names, *getattr(command, "added", ())]


def _missing_option(name: str, command: Any, path: str) -> str:
    options = _options_of(command)
    meant = {other: option for option, words in _OPTIONS.items() if option in options for other in words.split()}
    # Without dashes, which make --to like --json.
    words = [option.removeprefix("--") for option in options if option.startswith("--")]
    near = [f"--{word}" for word in difflib.get_close_matches(name.lstrip("-"), words, n=1)]
    found = [meant[name]] if name in meant else near
    members = getattr(command, "commands", {})
    if not near and any(name in _options_of(member) for member in members.values()):
        return f"no option {name:.60} of {path}: expected it behind the command"
    missing = "no such option" if has_key(name.lstrip("-")) else f"no option {name:.60}"
    is_close = name in meant or difflib.get_close_matches(name, near, cutoff=0.8)
    if not is_close and members and (told := missing_command(name.lstrip("-"), [*members], path).partition(": ")[2]):
        return f"{missing}: {told}"
    if command.name == "import" and name in {"--force", "-f", *_OPTIONS["--force"].split()}:
        return f"{missing}: no dataset is replaced. Name a new folder, or add to it with --append"
    return f"{missing}: " + (f"did you mean {found[0]}?" if found else f"`{path} --help` lists the options")
