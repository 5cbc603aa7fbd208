"""``fastrack anchor``: remember the newest version of a set of files."""

from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, tell
from fastrack._cli.errors import file_path, refuse_values
from fastrack._cli.files import check_directory
from fastrack._cli.options import Json, Silent
from fastrack._sets.anchor import Anchor
from fastrack.grants import Verifier


def anchor(
    path: Annotated[Path, typer.Argument(parser=file_path, metavar="ANCHOR", help="The anchor file.")],
    *,
    owner: Annotated[
        Path | None, typer.Option(metavar="PUBLIC", help="Make the anchor, of the owner with this public file.")
    ] = None,
    lineage: Annotated[
        str | None, typer.Option(metavar="ID", help="The id of the set. If absent, that of the first manifest.")
    ] = None,
    least_version: Annotated[int, typer.Option(min=0, help="The least version that is accepted.")] = 0,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Make an anchor, which remembers the newest version of a set that was seen; or show one."""
    if owner is not None:
        check_directory(path)
        with refuse_values("--lineage"):
            made = Anchor.create(path, owner=Verifier.load(owner), lineage=lineage, least_version=least_version)
    elif lineage is not None or least_version:
        raise typer.BadParameter("expected the owner's public file, to make an anchor, got none", param_hint="--owner")
    else:
        made = Anchor(path)
    seen = "no manifest yet, and then version" if made.digest is None else "version"
    lines = [
        f"{clean(str(made.path))}: {seen} {made.version} or later",
        f"owner: {made.owner.id}",
        f"lineage: {made.lineage or 'that of the first manifest'}",
    ]
    tell(
        lines,
        as_json=as_json,
        quiet=quiet,
        path=str(made.path),
        owner=made.owner.id,
        lineage=made.lineage,
        version=made.version,
        digest=made.digest,
    )
