"""The distribution ``fastrack-bench``, whose commands are loaded when they are called.

Any package may claim entry points of any group and name. Only those of this distribution are read.
"""

from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from fastrack._version import __version__
from fastrack.errors import FastrackError

COMMANDS = {  # each with the options that it has only there; none: the whole command
    "bench": "--collectives --ranks --toll --workloads --compute --visits --bucket-cap-mb",
    "plan": "",
    "qualify": "",
}
_NAME = "fastrack-bench"
_GROUP = "fastrack.commands"


def stand_in() -> None:
    """Stand in the list of commands for one that only the distribution has, which takes its place when it is called."""


def load(command: str) -> Any:
    """Return the application that has a command. Raise an error without one of the version of fastrack-io."""
    found = _find()
    try:
        return found.entry_points.select(group=_GROUP)[command].load()
    except (KeyError, ModuleNotFoundError):  # of an installation that did not end
        advice = f"pip install --force-reinstall --no-deps {_NAME}=={__version__}"
        raise FastrackError(f"{_NAME} is installed in part: {advice}") from None


def is_installed() -> bool:
    """Return True if the distribution is installed, in the version of fastrack-io."""
    try:
        _find()
    except FastrackError:
        return False
    return True


def is_absent(command: str) -> bool:
    """Return True for a command that only the distribution has, if that is not installed."""
    return COMMANDS.get(command) == "" and not is_installed()


def _find() -> Distribution:
    advice = f"pip install {_NAME}=={__version__}"
    try:
        found = distribution(_NAME)
    except PackageNotFoundError:
        raise FastrackError(f"{_NAME} is not installed: {advice}") from None
    if (found.name, found.version) != (_NAME, __version__):  # it uses private modules
        raise FastrackError(
            f"{found.name} {found.version} does not fit: expected {_NAME} {__version__}, as fastrack-io has. {advice}"
        )
    return found
