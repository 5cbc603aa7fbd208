"""``fastrack completion``: complete commands, options and paths in a shell."""

from typing import Annotated, Literal

import typer
from typer._completion_shared import get_completion_script
from typer.completion import get_completion_inspect_parameters


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print what has a shell complete commands, options and paths: the shell asks the commands themselves.

    fastrack edits no file of yours. Put it where the shell looks, make the folder first if it is not there, and begin a
    new shell. zsh needs ~/.zfunc in its fpath.
    """
    get_completion_inspect_parameters()  # makes shells known
    script = get_completion_script(prog_name="fastrack", complete_var="_FASTRACK_COMPLETE", shell=shell)
    # zsh loads the file as a function `_fastrack` when it first needs it, and expects its answer then too.
    first = '\n[[ $funcstack[1] = _fastrack ]] && _fastrack_completion "$@"' if shell == "zsh" else ""
    typer.echo(script + first)
