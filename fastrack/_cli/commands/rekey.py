"""``fastrack rekey``: seal a sealed file under another key."""

from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, format_rate, pluralize
from fastrack._cli.files import as_location, check_sealed, check_target, match_names, open_ring
from fastrack._cli.options import KEY_HELP, Force, Json, KeyFiles
from fastrack._cli.run import Job, Meter, Report, expand, run
from fastrack._util.names import list_names
from fastrack._util.units import format_size


def rekey(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The sealed file.")],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The sealed file to write; with --force also SOURCE.")
    ],
    *,
    key: KeyFiles = None,
    new: Annotated[str, typer.Option("--new", metavar="KEY", help=f"The new key. {KEY_HELP}")],
    plain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Copy this tensor, which SOURCE stores unencrypted; may be repeated."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Seal a sealed file under another key, without plaintext on disk. Grants of the old key do not open the result."""
    from fastrack._files.rekey import rekey_file
    from fastrack._sets.load_file import load_file

    check_target(target, force=force)
    ring, owner = open_ring(key), open_ring(new).first
    location = as_location(target)

    def work(job: Job, meter: Meter) -> Report:
        with load_file(as_location(job.source)) as file:
            check_sealed(file, ring)
            _, unknown = match_names(plain or (), file.names)
            if unknown:
                raise typer.BadParameter(
                    f"{file.path} has no tensor {unknown[0]!r:.200}; {list_names(unknown[0], file.names)}",
                    param_hint="--plain",
                )
            total, names = sum(tensor.nbytes for tensor in file.values()), list(file)
            with meter.run(total) as progress:
                rekey_file(file, location, ring, key=owner, plain=plain or (), overwrite=force, progress=progress)
        with load_file(location) as file:
            file_id = file.file_id
        line = f"{clean(str(location))}: sealed {pluralize(len(names), 'tensor')} anew, {format_size(total)}"
        return Report(
            {
                "source": str(as_location(job.source)),
                "target": str(location),
                "key_id": owner.id,
                "file_id": file_id,
                "tensors": names,
                "bytes": total,
                **meter.describe(total),
            },
            lines=[f"{line}; {format_rate(total, meter.seconds)}", f"key: {owner.id}"],
        )

    run(expand([source], many=False, recursive=False), work, "rekeying", as_json=as_json)
