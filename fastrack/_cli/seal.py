"""``fastrack seal``: encrypt the tensors of a file."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, format_rate, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.files import check_source, check_target, load_engine, open_ring
from fastrack._cli.options import Force, Json, KeyFile
from fastrack._util.units import format_size
from fastrack.errors import FormatError


def seal(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .safetensors, .npy or .npz file. Any other is sealed as bytes.")
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The sealed file, usually a .safetensors.")],
    *,
    key: KeyFile = None,
    plain: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Store this tensor unencrypted; may be repeated.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the tensor, for a SOURCE of one tensor. If absent, the name of the file."
        ),
    ] = None,
    drop_metadata: Annotated[
        bool, typer.Option("--drop-metadata", help="Leave out the metadata of SOURCE, which is stored unencrypted.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Encrypt the tensors of a file, which may be larger than memory."""
    from fastrack._sealed.reader import load_file
    from fastrack._sealed.writer import seal_file

    check_target(target, force=force)
    owner = open_ring(key).first
    total = check_source(source)
    _refuse_same(source, target)
    try:
        if plain:
            _check_names(source, plain, name)
        load_engine("seal")
        start = time.perf_counter()
        with progress_bar("sealing", total) as progress:
            seal_file(
                source,
                target,
                owner,
                plain=plain or (),
                name=name,
                metadata={} if drop_metadata else None,
                overwrite=force,
                progress=progress,
            )
    except TypeError as error:  # an error of the data, such as an array of text
        raise FormatError(f"{source}: {error}") from None
    seconds = time.perf_counter() - start
    with load_file(target) as file:
        sealed = [tensor.nbytes for tensor in file.values()]
        left = sum(file.stored(name)[2].nbytes for name in file.plain)
        count = len(file.plain)
        readable = [*map(repr, file.names)], [*map(repr, file.metadata)]
    size = sum(sealed) + left
    if as_json:
        print_json(
            source=str(source),
            target=str(target),
            key_id=owner.id,
            tensors=len(sealed),
            bytes=sum(sealed),
            plain_tensors=count,
            plain_bytes=left,
            target_bytes=target.stat().st_size,
            readable={"names": list(file.names), "metadata": list(file.metadata)},
            seconds=seconds,
            gb_per_s=speed(size, seconds),
        )
        return
    line = f"{clean(str(target))}: sealed {pluralize(len(sealed), 'tensor')}, {format_size(sum(sealed))}"
    if count:
        line += f", and left {pluralize(count, 'tensor')} in plain, {format_size(left)}"
    console = stdout()
    console.print(f"{line}; {format_rate(size, seconds)}")
    console.print(f"key: {owner.id}")
    for subject, texts in zip(("the names, dtypes and shapes of", "the metadata"), readable, strict=True):
        if texts:
            console.print(f"anyone can read {subject} {clean(', '.join(texts)):.300}")


def _refuse_same(source: Path, target: Path) -> None:
    if source.suffix.lower() != ".safetensors" and target.exists() and target.samefile(source):
        raise typer.BadParameter(
            f"expected another file than SOURCE, got {target} again, which would become a safetensors file under the "
            "name of another format. Name one with the suffix .safetensors",
            param_hint="TARGET",
        )


def _check_names(source: Path, names: list[str], new_name: str | None) -> None:
    from fastrack._sealed.importers import open_plain

    with open_plain(source) as (tensors, _):
        present = list(tensors) if new_name is None else [new_name]
        unknown = sorted(set(names) - set(present))
        if unknown:
            known = ", ".join(map(repr, present)) or "none"
            raise typer.BadParameter(
                f"no tensor {', '.join(map(repr, unknown))} in {source}; it has {known}", param_hint="--plain"
            )
