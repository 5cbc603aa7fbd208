"""``fastrack attest``: give keys to a machine that proves what it is, by files and pipes."""

import typer

from fastrack._cli.attest.exchange import challenge, collect, grant, show, verify
from fastrack._cli.attest.fetch import fetch
from fastrack._cli.attest.policy import policy

app = typer.Typer(no_args_is_help=True, help="Give keys to a machine that proves what it is, by files and pipes.")

for _command in (challenge, collect, verify, show, grant, fetch, policy):
    app.command()(_command)
