"""``fastrack publish`` and ``fastrack anchor``: sign a set of files, and remember the newest version of one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastrack._cli.commands.grant import Sign, load_signer
from fastrack._cli.console import clean, pluralize, tell
from fastrack._cli.errors import file_path, refuse_values
from fastrack._cli.files import check_directory
from fastrack._cli.options import AnchorFile, Json, Silent

if TYPE_CHECKING:
    from fastrack._sets.manifest import Manifest


def publish(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="A folder, a file, or several.")],
    *,
    sign: Sign = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="MANIFEST",
            help="The manifest to write. If absent, PATH.manifest, or fastrack.manifest in a folder.",
        ),
    ] = None,
    digests: Annotated[
        bool, typer.Option("--digests", help="List the SHA-256 of all messages, against holders of the key.")
    ] = False,
    anchor: AnchorFile = None,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Sign a manifest of files: the next version, if there is one already."""
    from fastrack._sets.anchor import manifest_path
    from fastrack._sets.publish import publish as publish_files

    signer = load_signer(sign)
    if out is None and len(paths) != 1:
        raise typer.BadParameter(f"expected the manifest of {len(paths)} paths, got none", param_hint="--out")
    target = manifest_path(paths[0]) if out is None else out
    check_directory(target)
    with refuse_values("PATH"):
        manifest = publish_files(paths, signer=signer, manifest=target, digests=digests, anchor=anchor)
    report(manifest, target, as_json=as_json, quiet=quiet, log_entry=manifest.log_entry.decode())


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
    from fastrack._sets.anchor import Anchor
    from fastrack.grants import Verifier

    if owner is not None:
        check_directory(path)
        try:
            made = Anchor.create(path, owner=Verifier.load(owner), lineage=lineage, least_version=least_version)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise typer.BadParameter(str(error), param_hint="--lineage") from None
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


def report(manifest: "Manifest", path: Path, *, as_json: bool, quiet: bool = False, **more: Any) -> None:
    """Print a manifest."""
    lines = [
        f"{clean(str(path))}: version {manifest.version} of {pluralize(len(manifest.files), 'file')}",
        f"lineage: {manifest.lineage}",
        f"digest: {manifest.digest}",
    ]
    tell(
        lines,
        as_json=as_json,
        quiet=quiet,
        path=str(path),
        lineage=manifest.lineage,
        version=manifest.version,
        digest=manifest.digest,
        issued=manifest.issued.isoformat(),
        files=list(manifest.files),
        **more,
    )
