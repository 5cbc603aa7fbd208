"""``fastrack rekey``: seal a sealed file under another key."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, format_rate, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.files import as_location, check_sealed, check_target, load_engine, match_names, open_ring
from fastrack._cli.options import KEY_HELP, Force, Json, KeyFiles
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
    with load_file(as_location(source)) as file:
        check_sealed(file, ring)
        _, unknown = match_names(plain or (), file.names)
        if unknown:
            raise typer.BadParameter(
                f"{file.path} has no tensor {unknown[0]!r:.200}; {list_names(unknown[0], file.names)}",
                param_hint="--plain",
            )
        total = sum(tensor.nbytes for tensor in file.values())
        names = list(file)
        load_engine("open")
        start = time.perf_counter()
        with progress_bar("rekeying", total) as progress:
            place = as_location(target)
            rekey_file(file, place, ring, key=owner, plain=plain or (), overwrite=force, progress=progress)
        seconds = time.perf_counter() - start
    with load_file(as_location(target)) as file:
        file_id = file.file_id
    if as_json:
        print_json(
            source=str(as_location(source)),
            target=str(as_location(target)),
            key_id=owner.id,
            file_id=file_id,
            tensors=names,
            bytes=total,
            seconds=seconds,
            gbps=speed(total, seconds),
        )
        return
    console = stdout()
    line = f"{clean(str(as_location(target)))}: sealed {pluralize(len(names), 'tensor')} anew, {format_size(total)}"
    console.print(f"{line}; {format_rate(total, seconds)}")
    console.print(f"key: {owner.id}")
