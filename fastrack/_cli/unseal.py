"""``fastrack unseal``: authenticate and decrypt a file into a plain one."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastrack._cli.console import clean, format_rate, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.files import check_expected, check_sealed, check_target, load_engine, open_ring
from fastrack._cli.folder import refuse_options, unseal_one_folder
from fastrack._cli.options import AnchorFile, Expect, FileId, Force, Json, KeyFiles
from fastrack._util.units import format_size
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._sealed.reader import SealedFile


def unseal(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The sealed file or folder.")],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="The plain file: .safetensors, .npz or .npy. Any other takes the bytes of one U8 tensor. Or a folder.",
        ),
    ],
    *,
    key: KeyFiles = None,
    tensor: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this tensor; may be repeated. If absent, all.")
    ] = None,
    plain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Copy this tensor, which SOURCE stores unencrypted; may be repeated."),
    ] = None,
    allow_plain: Annotated[
        bool, typer.Option("--allow-plain", help="Copy every tensor that SOURCE stores unencrypted.")
    ] = False,
    expect: Expect = None,
    file_id: FileId = None,
    anchor: AnchorFile = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Authenticate and decrypt a file or a folder into a plain one.

    Tensors of --plain and --allow-plain are copied unchecked.
    """
    from fastrack._sealed.reader import load_file
    from fastrack._sealed.writer import unseal_file

    if source.is_dir():
        given = {"--tensor": tensor, "--plain": plain, "--allow-plain": allow_plain, "--expect": expect}
        refuse_options({**given, "--file-id": file_id, "--force": force})
        unseal_one_folder(source, target, key=key, anchor=anchor, as_json=as_json)
        return
    check_target(target, force=force)
    ring = open_ring(key)
    with load_file(source, file_id=file_id, anchor=anchor) as file:
        check_sealed(file, ring)
        check_expected(file, expect)
        names = _choose(file, tensor, plain)
        total = sum(file[name].nbytes if name in file else file.stored(name)[2].nbytes for name in names)
        load_engine("open")
        start = time.perf_counter()
        allowed = file.plain if allow_plain else plain or ()
        with progress_bar("unsealing", total) as progress:
            unseal_file(file, target, ring, names=names, plain=allowed, overwrite=force, progress=progress)
        seconds = time.perf_counter() - start
    copied = [name for name in names if name in file.plain]
    if as_json:
        print_json(
            source=str(source),
            target=str(target),
            key_id=file.key_id,
            file_id=file.file_id,
            tensors=names,
            bytes=total,
            not_protected=copied,
            seconds=seconds,
            gbps=speed(total, seconds),
        )
        return
    console = stdout()
    if copied:
        console.print(f"not protected, copied as stored: {', '.join(map(clean, copied))}")
    line = f"{clean(str(target))}: {pluralize(len(names), 'tensor')} in plain, {format_size(total)}"
    console.print(f"{line}; {format_rate(total, seconds)}")


def _choose(file: "SealedFile", names: Sequence[str] | None, plain: Sequence[str] | None) -> list[str]:
    unknown = sorted({*(names or ()), *(plain or ())} - set(file.names))
    if unknown:
        raise FormatError(
            f"{file.path} has no tensor {', '.join(map(repr, unknown))}; it has {', '.join(map(repr, file.names))}"
        )
    return [name for name in file.names if not names or name in names]
