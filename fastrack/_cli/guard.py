"""From exceptions to one clean line and an exit status."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

import typer

from fastrack._cli.console import clean, print_json
from fastrack.errors import AuthenticationError, FastrackError

_INTERRUPTED = 130
_USAGE = 2

Parameters = ParamSpec("Parameters")


def handle_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Let the command end with a line on stderr where the data, the key or the system is at fault, never a traceback.

    With ``--json`` (the parameter `as_json`) the same goes to stdout, as a document.
    """

    @functools.wraps(command)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> None:
        as_json = bool(options.get("as_json"))
        try:
            command(*args, **options)
        except BrokenPipeError:  # whoever read our output has left: typer ends it quietly
            raise
        except (FastrackError, OSError, MemoryError) as error:
            _fail(error, as_json=as_json, status=1)
        except typer.BadParameter as error:
            if not as_json:
                raise
            _fail(error, as_json=True, status=_USAGE)
        except KeyboardInterrupt as error:
            _fail(error, as_json=as_json, status=_INTERRUPTED)

    return run


def _fail(error: BaseException, *, as_json: bool, status: int) -> NoReturn:
    if as_json:
        print_json({"error": describe(error)})
    else:
        lines = [f"error: {message_of(error)}", *(f"note: {note}" for note in _notes(error))]
        sys.stderr.write("".join(f"{clean(line)}\n" for line in lines))
    raise typer.Exit(status) from None


def describe(error: BaseException) -> dict[str, Any]:
    """An error as a program reads it; `tensor` and `chunk` are null where it does not name any."""
    place = (error.tensor, error.chunk) if isinstance(error, AuthenticationError) else (None, None)
    document: dict[str, Any] = {
        "type": type(error).__name__,
        "message": message_of(error),
        "tensor": place[0],
        "chunk": place[1],
    }
    notes = _notes(error)
    return {**document, "notes": notes} if notes else document


def message_of(error: BaseException) -> str:
    """What an error says, without Python's dress."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, typer.BadParameter):
        return error.format_message()
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "not enough memory"
    return str(error)


def _notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", ()))
