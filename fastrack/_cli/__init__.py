"""The command line, one file a command. Heavy packages are imported by the commands that need them."""

from fastrack._cli.app import main

__all__ = ["main"]
