"""The command line, one file for each command, which is loaded when it is used."""

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Run the command line, and exit with its status, or the status of an interruption while it is being loaded.

    An unexpected exception is one line on stderr. In Python's development mode, ``-X dev``, it is a traceback.
    """
    if not _has_streams():  # before the work: its result could not be printed
        sys.exit(1)
    sys.stdout, output = _reopened(sys.stdout, "standard output")
    sys.stderr, _ = _reopened(sys.stderr, None)
    try:
        _run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except BrokenPipeError:  # the program that read the output has ended
        sys.exit(128 + signal.SIGPIPE)
    except Exception as error:
        if sys.flags.dev_mode and not isinstance(error, OSError):  # which is of the output
            raise
        sys.stderr.write(f"error: {_describe(error)}\n")
        sys.exit(1)
    finally:
        if output is not None:
            output.title = None  # Python writes once more what could not be written, as it ends


def _run() -> None:
    from fastrack._cli.app import main as run

    try:
        run()
    except SystemExit as ended:
        # A command that has failed has told why.
        with contextlib.suppress(OSError) if ended.code else contextlib.nullcontext():
            sys.stdout.flush()
        raise


def _has_streams() -> bool:
    """Return True if standard output is open, and open the other closed streams.

    The next file would get the number of a closed stream, and messages would be written into the file.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115 - until the end
    if "stdout" in closed:
        advice = "expected one to write to, got a closed one. Send it to a file, such as /dev/null"
        sys.stderr.write(f"error: standard output: {advice}\n")
    return "stdout" not in closed


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):  # of the output: all other errors were printed
        return ": ".join(filter(None, (error.filename, error.strerror))) or str(error)
    what = f"{type(error).__name__}: {error!s:.500}".encode("unicode_escape").decode()
    return f"{what}. This is a defect of fastrack: report it with what `python -X dev -m fastrack` prints in its place"


class _Stream(io.FileIO):
    """Write to a standard stream. Raise its errors under a title, and none without: an exit status says enough."""

    title: str | None = None

    def write(self, data: Any, /) -> int:
        """Write bytes, and return how many."""
        try:
            return os.write(self.fileno(), data)
        except OSError as error:
            if self.title is None:
                return len(data)
            raise OSError(error.errno, error.strerror, self.title) from None


def _reopened(stream: TextIO, title: str | None) -> tuple[TextIO, _Stream | None]:
    """Return a standard stream with a buffer, as without one (``python -u``) a part of the bytes would pass for all."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream.buffer, io.BytesIO):
        return stream, None  # of a program that calls this one
    raw = _Stream(stream.fileno(), "w", closefd=False)
    raw.title = title
    is_prompt = stream.line_buffering or stream.write_through
    # A name that a terminal cannot show must not fail a finished command.
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=is_prompt)
    return text, raw
