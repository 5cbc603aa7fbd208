"""The command line, one file for each command. Commands import heavy packages when they need them."""

import sys


def main() -> None:
    """Run the command line, and exit with its status; with that of an interruption while it is still being loaded."""
    try:
        from fastrack._cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
