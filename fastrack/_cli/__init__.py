"""The command line, one file for each command. Commands import heavy packages when they need them."""

import contextlib
import os
import sys


def main() -> None:
    """Run the command line, and exit with its status; with that of an interruption while it is still being loaded.

    An exception that no command expects is a line too. In Python's development mode, ``-X dev``, it is a traceback.
    """
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


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):  # of the output, as all others were told
        return str(error.strerror or error)
    what = f"{type(error).__name__}: {error!s:.500}".encode("unicode_escape").decode()
    return f"{what}. This is a defect of fastrack: report it with what `python -X dev -m fastrack` prints in its place"


def _abandon_output() -> None:
    """Leave out what is in the buffer of standard output, which Python would try to write again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
