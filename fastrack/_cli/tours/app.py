"""``fastrack tour``: one model that visits holders of data, from its plan to the verification of its record."""

import typer

from fastrack._cli.tours.desks import hold, key, own, stop
from fastrack._cli.tours.plan import plan
from fastrack._cli.tours.run import run
from fastrack._cli.tours.verify import verify

app = typer.Typer(no_args_is_help=True, help="Train one model on the data of several holders in turn.")

for _command in (plan, own, hold, stop, run, verify, key):
    app.command()(_command)
