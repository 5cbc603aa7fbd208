"""Conversion of exceptions to one line on stderr and an exit status."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec

import typer

from fastrack._cli.console import clean, print_json
from fastrack.errors import FastrackError

Parameters = ParamSpec("Parameters")


def handle_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Return the command with errors of the data, the key or the system as a line on stderr, without a traceback.

    With ``--json`` (the parameter `as_json`) the error is printed on stdout as a document.
    """

    @functools.wraps(command)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> None:
        as_json = bool(options.get("as_json"))
        try:
            command(*args, **options)
        except BrokenPipeError:  # the reader of the output has ended, for which typer exits without a word
            raise
        except (FastrackError, OSError, MemoryError, ImportError) as error:
            _fail(error, as_json=as_json, status=1)
        except typer.BadParameter as error:
            if not as_json:
                raise
            _fail(error, as_json=True, status=2)
        except KeyboardInterrupt as error:
            _fail(error, as_json=as_json, status=130)  # as of a process that SIGINT ended

    return run


def _fail(error: BaseException, *, as_json: bool, status: int) -> NoReturn:
    if as_json:
        print_json(error=describe(error))
    else:
        lines = [f"error: {message_of(error)}", *(f"note: {note}" for note in getattr(error, "__notes__", ()))]
        sys.stderr.write("".join(f"{clean(line)}\n" for line in lines))
    raise typer.Exit(status) from None


def show_errors(errors: Sequence[BaseException]) -> None:
    """Print errors on stderr, one on each line."""
    sys.stderr.write("".join(f"error: {clean(message_of(error))}\n" for error in errors))


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error for JSON. `tensor` and `chunk` are null if the error has none."""
    document: dict[str, Any] = {"type": type(error).__name__, "message": message_of(error)}
    document |= {name: getattr(error, name, None) for name in ("tensor", "chunk")}
    notes = list(getattr(error, "__notes__", ()))
    return {**document, "notes": notes} if notes else document


def message_of(error: BaseException) -> str:
    """Return the message of an error, without the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, typer.BadParameter):
        return error.format_message()
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "not enough memory"
    # The library names its parameter.
    return str(error).replace("add it to keys=", "name its source with --key")
