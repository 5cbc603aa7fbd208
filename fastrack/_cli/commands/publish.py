"""``fastrack publish``: sign a set of files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastrack._cli.commands.grant import Sign, load_signer
from fastrack._cli.console import clean, pluralize, tell
from fastrack._cli.errors import refuse_options, refuse_values
from fastrack._cli.files import check_directory
from fastrack._cli.options import AnchorFile, Json, Silent
from fastrack._sets.anchor import manifest_path
from fastrack._sets.manifest import Manifest
from fastrack._sets.publish import publish as publish_files


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
    signer = load_signer(sign)
    is_unnamed = out is None and len(paths) != 1
    refuse_options({"--out": is_unnamed}, f"expected the manifest of {len(paths)} paths, got none")
    target = manifest_path(paths[0]) if out is None else out
    check_directory(target)
    with refuse_values("PATH"):
        manifest = publish_files(paths, signer=signer, manifest=target, digests=digests, anchor=anchor)
    report(manifest, target, as_json=as_json, quiet=quiet, log_entry=manifest.log_entry.decode())


def report(manifest: Manifest, path: Path, *, as_json: bool, quiet: bool = False, **more: Any) -> None:
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
