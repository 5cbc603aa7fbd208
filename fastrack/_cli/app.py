"""The program ``fastrack`` and its commands, in the order a newcomer needs them."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import typer

from fastrack._cli.commands import collateral
from fastrack._cli.commands.attest import app as attest_app
from fastrack._cli.commands.bench import bench
from fastrack._cli.commands.broker import app as broker_app
from fastrack._cli.commands.demo import demo
from fastrack._cli.commands.doctor import doctor
from fastrack._cli.commands.grant import grant
from fastrack._cli.commands.importing import import_, index
from fastrack._cli.commands.inspect import inspect
from fastrack._cli.commands.key import key
from fastrack._cli.commands.keygen import keygen
from fastrack._cli.commands.publish import anchor, publish
from fastrack._cli.commands.rekey import rekey
from fastrack._cli.commands.seal import seal
from fastrack._cli.commands.unseal import unseal
from fastrack._cli.commands.verify import verify
from fastrack._cli.commands.warmup import warmup
from fastrack._cli.errors import Terminated, handle_errors
from fastrack._cli.help import TOPICS, help_
from fastrack._cli.program import Command, ExtendedCommand, Program
from fastrack._cli.tours.app import app as tour_app
from fastrack._version import __version__

_SIGNALS: dict[type[BaseException], int] = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}

app = typer.Typer(
    cls=Program,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,  # its option would edit the files of a shell
    # A traceback with local variables could show a secret.
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


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


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Move sealed tensors from their owner to a device, without plaintext on the way."""


def plan() -> None:
    """Predict what transfers, epochs, checkpoints and loading will take."""


_COMMANDS: dict[str, dict[Callable[..., None], str]] = {  # by topic, each with what it does in a line of 80 columns
    "Every day": {
        keygen: "Make a key, or a key pair, that only you may read.",
        import_: "Seal images, text, records or tables into a data set.",
        seal: "Encrypt files, or a folder such as that of a model.",
        inspect: "Show what a sealed file or folder holds, without a key.",
        verify: "Check that all of it is what its owner sealed.",
        unseal: "Authenticate and decrypt into plain files.",
        index: "List the shards of a data set, to open it by one file.",
        help_: f"On a COMMAND or {', '.join(TOPICS)}.",
    },
    "Keys and sharing": {
        key: "Show which keys are here, by their ids; nothing secret.",
        grant: "Give a key to others, in a signed file beside the data.",
        rekey: "Seal a file or a data set under another key.",
        publish: "Sign a manifest of files, as their next version.",
        anchor: "Remember the newest version of such files.",
    },
    "Machines": {
        doctor: "Examine this machine: what is protected, what is not.",
        warmup: "Load the kernels on the GPU of this machine.",
        bench: "Measure the steps from the bounce path to fastrack.",
        demo: "Seal, open, train, refuse a forgery, and measure speeds.",
        plan: "Predict what transfers, epochs and checkpoints take.",
    },
}
for _panel, _members in _COMMANDS.items():
    for _command, _text in _members.items():
        _name = _command.__name__.removesuffix("_")
        _cls = ExtendedCommand if _command in {bench, plan} else Command
        app.command(_name, cls=_cls, short_help=_text, rich_help_panel=_panel)(handle_errors(_command))

attest_app.command()(handle_errors(collateral.fetch))
attest_app.command()(handle_errors(collateral.policy))
for _name, _group, _text in (
    ("attest", attest_app, "Give keys to a machine that proves what it is, by files."),
    ("broker", broker_app, "Grant keys to such machines, over HTTPS."),
    ("tour", tour_app, "Train one model on the data of several holders in turn."),
):
    for _registered in _group.registered_commands:
        _registered.cls = Command
    app.add_typer(_group, name=_name, cls=Program, no_args_is_help=False, short_help=_text, rich_help_panel="Machines")
