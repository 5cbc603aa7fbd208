"""The program ``fastrack`` and its commands, in the order a newcomer needs them."""

import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from fastrack._cli import extension
from fastrack._cli.errors import Terminated, handle_errors
from fastrack._cli.help import TOPICS
from fastrack._cli.program import Command, ExtendedCommand, Program
from fastrack._version import __version__

_SIGNALS: dict[type[BaseException], int] = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}


def main() -> None:
    """Run the command line, and exit with its status."""
    # Raise an exception on SIGTERM, so that temporary files are removed as after Ctrl-C.
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = send_again
    app()


def send_again(lost: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception was lost, as it came in a destructor, such as that of a key."""
    number = _SIGNALS.get(lost.exc_type)
    if number is None:
        sys.__unraisablehook__(lost)
    else:
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # when this function has ended


def _terminate(*_: object) -> None:
    raise Terminated(128 + signal.SIGTERM)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"fastrack {__version__}")
        raise typer.Exit


_TOPICS = {  # the commands, some in pairs, with what they do in a line of 80 columns
    "Every day": {
        "keygen": "Make a key, or a key pair, that only you may read.",
        "import": "Seal images, text, records or tables into a dataset.",
        "seal": "Encrypt files, or a folder such as that of a model.",
        "inspect": "Show what a sealed file or folder holds, without a key.",
        "verify": "Check that all of it is what its owner sealed.",
        "unseal": "Authenticate and decrypt into plain files.",
        "index": "List the shards of a dataset, to open it by one file.",
        "help": f"On COMMAND or {', '.join(TOPICS)}, completion.",
    },
    "Keys and sharing": {
        "key, grant": "Show which keys are here; give one to others, beside the data.",
        "rekey": "Seal a file or a dataset under another key.",
        "publish": "Sign a manifest of files, as their next version.",
        "anchor": "Remember the newest version of such files.",
    },
    "Machines": {
        "run": "Run a server that opens sealed folders by its own code.",
        "doctor": "Examine this machine: what is protected, what is not.",
        "qualify": "Attack a sealed folder here, row by row; sign what was seen.",
        "warmup": "Load the kernels on the GPU of this machine.",
        "bench, demo": "Measure the steps from the bounce path on; run everything once.",
        "plan": "Predict what transfers, epochs and checkpoints take.",
        "attest": "Give keys to a machine that proves what it is, by files.",
        "broker": "Grant keys to such machines, over HTTPS.",
        "tour": "Train one model on the data of several holders in turn.",
    },
}
_UNLISTED = {"completion": "Complete commands, options and paths in a shell."}  # the text on `help` names it
_TEXTS = {name: text for texts in _TOPICS.values() for names, text in texts.items() for name in names.split(", ")}
_TEXTS |= _UNLISTED
_PLACES = {  # of the commands that no file of their name in `commands` has
    "import": "commands.import_:import_",
    "help": "help:help_",
    "completion": "completion:completion",
    "run": "serving.run:run",
    "attest": "attest.app:app",
    "broker": "commands.broker:app",
    **dict.fromkeys(("plan", "qualify"), "extension:stand_in"),
    "tour": "tours.app:app",
}


@functools.cache
def _load(name: str) -> Any:
    """Return a command, or a group of commands, from its file."""
    module, _, attribute = _PLACES.get(name, f"commands.{name}:{name}").partition(":")
    found = getattr(import_module(f".{module}", __package__), attribute)
    parent = typer.Typer()
    if isinstance(found, typer.Typer):
        for command in found.registered_commands:
            assert command.callback is not None
            command.cls, command.callback = Command, handle_errors(command.callback)
        parent.add_typer(found, name=name, cls=Program, no_args_is_help=False)
    else:
        kind = ExtendedCommand if name in extension.COMMANDS else Command
        parent.command(name, cls=kind)(handle_errors(found))
    return typer.main.get_group(parent).commands[name]


class _Commands(Mapping[str, Any]):
    """The commands by their names. Each is loaded when it is asked for, with what it works with."""

    def __getitem__(self, name: str) -> Any:
        if name not in _TEXTS:
            raise KeyError(name)
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_TEXTS)

    def __len__(self) -> int:
        return len(_TEXTS)


class _Fastrack(Program):
    """The program, with the texts of its commands by topic."""

    topics = _TOPICS

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def get_command(self, ctx: Any, name: str) -> Any:
        """Return a command as a list shows it, which loads nothing."""
        return Command(name, short_help=_TEXTS[name]) if name in _TEXTS else None


app = typer.Typer(
    cls=_Fastrack,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,  # its option would edit the files of a shell
    # A traceback with local variables could show a secret.
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Move sealed tensors from their owner to a device, without plaintext on the way."""
