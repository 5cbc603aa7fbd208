"""The command line, one file for each command. Commands import heavy packages when they need them."""

from fastrack._cli.app import main as main
