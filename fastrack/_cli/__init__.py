"""The command line, one file for each command. Commands import heavy packages when they need them."""

import contextlib
import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line, and exit with its status, or the status of an interruption while it is being loaded.

    An unexpected exception is one line on stderr. In Python's development mode, ``-X dev``, it is a traceback.
    """
    if not _has_streams():  # before the work: its result could not be printed
        sys.exit(1)
    try:
        from fastrack._cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        sys.stderr.write(f"error: {_describe(error)}\n")
        _abandon_output()
        sys.exit(1)


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
        return str(error.strerror or error)
    what = f"{type(error).__name__}: {error!s:.500}".encode("unicode_escape").decode()
    return f"{what}. This is a defect of fastrack: report it with what `python -X dev -m fastrack` prints in its place"


def _abandon_output() -> None:
    """Discard the buffer of standard output, which Python would try to write again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
