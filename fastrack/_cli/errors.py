"""Conversion of exceptions to one line on stderr and an exit status."""

import contextlib
import errno
import functools
import logging
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, get_args

import typer

from fastrack import errors
from fastrack._cli.console import STDOUT, clean, note, print_error
from fastrack._util.key_text import has_key
from fastrack._util.locations import NO_NAME, NO_PATH, without_password
from fastrack._util.regular_file import not_found
from fastrack._util.shown import HIDDEN
from fastrack.errors import FastrackError

Parameters = ParamSpec("Parameters")

KINDS: dict[str, tuple[int, Any]] = {  # of errors: the exit status and the classes of each; the first that fits counts
    "lease": (8, errors.LeaseError),
    "authentication": (4, (errors.AuthenticationError, errors.SignatureError, errors.AttestationError)),
    "key": (5, (errors.UnknownKeyError, errors.KeyPermissionError, errors.GrantError, errors.ProviderError)),
    "input": (6, (errors.FormatError, FileNotFoundError, IsADirectoryError, NotADirectoryError)),
    "device": (7, errors.DeviceError),
}
_log = logging.getLogger("fastrack")


class Terminated(SystemExit):
    """SIGTERM, as an exception in the command, so that it removes what it has not finished."""


def handle_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Return the command with errors of the data, the key or the system as a line on stderr, without a traceback.

    With ``--json`` (the parameter `as_json`) the error is printed on stdout as a document; but not if the parameter is
    the path of a file, since stdout is for people then.
    """
    _take_paths(command)

    @functools.wraps(command)
    def run(*args: Parameters.args, **options: Parameters.kwargs) -> None:
        as_json = options.get("as_json") in (True, STDOUT)
        failure = _failure_of(functools.partial(command, *args, **options), as_json=as_json)
        # Outside of the handlers: a traceback of what fails meanwhile, as a handler of logs, would have this error's
        # text, and those of its causes, which may tell a secret.
        if failure is not None:
            _fail(*failure, as_json=as_json)

    return run


def _failure_of(command: Callable[[], None], *, as_json: bool) -> tuple[BaseException, int] | None:
    """Run a command, and return the error to tell of, with the exit status, if it fails."""
    try:
        command()
    except BrokenPipeError:  # the program that read the output has ended, as after `| head`
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except (FastrackError, OSError, MemoryError, ImportError, ValueError) as error:
        status = _status_of(error)
        if status is None:
            raise
        return error, status
    except typer.BadParameter as error:
        if not as_json:
            error.message = clean(error.message)
            raise
        return error, 2
    except KeyboardInterrupt as error:
        return error, 130  # like a process that SIGINT ended
    except Terminated as error:
        if not getattr(error, "__notes__", ()):  # its sender knows
            raise
        return error, 143
    return None


@contextlib.contextmanager
def refuse_values(option: str) -> Iterator[None]:
    """Report a value that the library refuses as bad usage of an option."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise typer.BadParameter(str(error), param_hint=option) from None


def refuse_options(given: Mapping[str, object], reason: str) -> None:
    """Refuse options and arguments, by name, whose values are true: given where they do not apply, or wrong."""
    wrong = [option for option, value in given.items() if value]
    if wrong:
        raise typer.BadParameter(reason, param_hint=", ".join(wrong))


def path(given: str | Path) -> Path:
    """Return an argument as a path. Refuse an empty one, for example of an unset variable: it is the current folder."""
    text = os.fspath(given)  # of a default that is a path
    if not text:
        raise typer.BadParameter("expected a path, got an empty text; . is the current folder")
    place = Path(text)
    if text.endswith(os.sep) and place.suffix == ".safetensors" and not place.is_dir():
        raise typer.BadParameter(
            f"expected a file's name, got {text!r:.100}, a folder's. Leave the slash or suffix out"
        )
    return place


def file_path(given: str | Path) -> Path:
    """Return an argument as the path of a file. Refuse an empty one, and that of a folder, which ends in a slash."""
    text = os.fspath(given)
    if text.endswith(os.sep):
        raise typer.BadParameter(f"expected the path of a file, got {text!r:.100}, a folder's. Name a file in it")
    return Path(text) if text else path(text)


def _take_paths(command: Callable[..., None]) -> None:
    """Make a command refuse empty paths, and report unreadable files itself: Typer reports them as bad usage."""
    for annotation in command.__annotations__.values():
        for parameter in getattr(annotation, "__metadata__", ()):
            parameter.readable = False
            if Path in _types_in(annotation):
                parameter.parser = parameter.parser or path


def _types_in(annotation: object) -> set[object]:
    """Return the types in an annotation, such as ``list[Path] | None``."""
    return {annotation}.union(*map(_types_in, get_args(annotation)))


def _status_of(error: Exception) -> int | None:
    """Return the exit status for an error, or None for a defect."""
    if isinstance(error, (FastrackError, OSError, MemoryError, ImportError)):
        return status_of([error])
    return 2 if is_of_location(error) else None


def status_of(failed: Sequence[BaseException]) -> int:
    """Return the exit status for errors: the one of their kind, or 1 if they have none in common."""
    first, *others = {_kind_of(error) for error in failed}
    return KINDS[first][0] if first and not others else 1


def _kind_of(error: BaseException) -> str | None:
    given = vars(error).get("fastrack_kind")
    return given or next((kind for kind, (_, classes) in KINDS.items() if isinstance(error, classes)), None)


@contextlib.contextmanager
def reading_keys() -> Iterator[None]:
    """Call an error about a file in the block, which is missing or no key, one of the keys."""
    try:
        yield
    except Exception as error:
        if _kind_of(error) == "input":
            vars(error)["fastrack_kind"] = "key"
        raise


def is_of_location(error: BaseException) -> bool:
    """Return True if an error is about a URL in the place of a path, or without the name of a file: bad usage."""
    return str(error).endswith((NO_PATH, NO_NAME))


def _fail(error: BaseException, status: int, *, as_json: bool) -> NoReturn:
    notes = getattr(error, "__notes__", ())
    if isinstance(error, (KeyboardInterrupt, Terminated)) and notes:
        lines = [f"error: {message_of(error)}: {'; '.join(notes)}"]
    else:
        lines = [f"error: {message_of(error)}", *(f"note: {text}" for text in notes)]
    log_origin(error)
    print_error(error_document(error), lines, as_json=as_json)
    raise typer.Exit(status) from None


def log_origin(error: BaseException | None) -> None:
    """Log where an error was raised, and what it came of, whose texts are left out: they may tell a secret."""
    while error is not None:
        _log.debug("%s, raised in", type(error).__name__)
        for frame in traceback.extract_tb(error.__traceback__):
            _log.debug("  %s:%s %s", frame.filename, frame.lineno, frame.name)
        error = error.__cause__ or error.__context__


def show_errors(messages: Iterable[str]) -> None:
    """Print messages of errors on stderr, one on each line."""
    for message in messages:
        note(f"error: {message}")


def name_source(error: BaseException, source: str) -> str:
    """Return the message of an error, with the source that it concerns."""
    message, name = message_of(error), re.escape(source)
    # A path may be a word of messages, such as key or file: that names it only before a colon or in quotes.
    is_word = source.isidentifier()
    named = (
        rf"(?:^|: ){name}(?=: )|^{name} (?:is|has) |(['\"`]){name}\1" if is_word else rf"(?<![\w./-]){name}(?![\w/-])"
    )
    return message if re.search(named, message) else f"{source}: {message}"


def error_document(error: BaseException) -> dict[str, Any]:
    """Return an error for JSON. `kind`, `tensor` and `chunk` are null if the error has none."""
    document: dict[str, Any] = {"type": type(error).__name__, "kind": _kind_of(error), "message": message_of(error)}
    document |= {name: getattr(error, name, None) for name in ("tensor", "chunk")}
    notes = list(getattr(error, "__notes__", ()))
    return {**document, "notes": notes} if notes else document


def message_of(error: BaseException) -> str:
    """Return the message of an error, without the name of its class."""
    if isinstance(error, OSError) and error.strerror:
        return _system_message(error)
    if isinstance(error, typer.BadParameter):
        name = _parameter_of(error)
        return f"{name}: {error.message}" if name and error.message else error.message or name
    if isinstance(error, (KeyboardInterrupt, Terminated)):
        return "terminated" if isinstance(error, Terminated) else "interrupted"
    if isinstance(error, MemoryError):
        return "not enough memory"
    # The library names its parameter.
    return str(error).replace("add it to keys=", "name its source with --key")


def _system_message(error: OSError) -> str:
    if error.filename is None:
        return str(error.strerror)
    name = str(error.filename)
    if has_key(name, may_be_id=True):
        return f"{HIDDEN}: {error.strerror}"
    if error.errno == errno.ENOENT and error.strerror == os.strerror(errno.ENOENT):  # without advice
        error = not_found(name)
    return f"{without_password(name)}: {error.strerror}"


def _parameter_of(error: typer.BadParameter) -> str:
    """Return the name of the argument or option that an error of usage concerns, as help names it."""
    if isinstance(error.param_hint, str):
        return error.param_hint
    parameter: Any = error.param
    if parameter is None:
        return ""
    return str(parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name)
