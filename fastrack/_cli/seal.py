"""``fastrack seal``: encrypt the tensors of a file."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, format_rate, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.files import check_source, check_target, load_engine, open_ring
from fastrack._cli.folder import refuse_options, seal_one_folder
from fastrack._cli.grant import Grantees, Sign, To
from fastrack._cli.inspect import read_contents
from fastrack._cli.options import Force, Json, KeyFile
from fastrack._util.units import format_size
from fastrack.errors import FormatError


def seal(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A .safetensors, .npy or .npz file. Any other is sealed as bytes. Or a folder."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The sealed file, usually a .safetensors; or a new folder.")
    ],
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
    to: To = None,
    sign: Sign = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Encrypt the tensors of a file, which may be larger than memory; or a folder, such as that of a model.

    With --to, under a new key that goes to the recipients alone, in TARGET.grants.
    """
    from fastrack._crypto.keys import Key
    from fastrack._sealed.writer import seal_file

    if to and key is not None:
        raise typer.BadParameter("expected --key or --to, got both; `fastrack grant` grants a key", param_hint="--to")
    if source.is_dir():
        refuse_options({"--plain": plain, "--name": name, "--drop-metadata": drop_metadata, "--force": force})
        seal_one_folder(source, target, key=key, to=to, sign=sign, as_json=as_json)
        return
    check_target(target, force=force)
    grantees = Grantees.load(to, sign, target, force=force) if to else None
    owner = Key.generate() if grantees else open_ring(key).first
    total = check_source(source)
    _refuse_same(source, target)
    try:
        _check_names(source, plain or [], name)
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
    contents = read_contents(target)
    sealed = [entry for entry in contents.tensors if entry.sealed]
    left = [entry for entry in contents.tensors if not entry.sealed]
    sealed_bytes, plain_bytes = (sum(entry.plain_bytes for entry in entries) for entries in (sealed, left))
    names, metadata = [entry.name for entry in contents.tensors], list(contents.metadata)
    if grantees:
        grantees.grant(owner, str(contents.file_id), target)
    if as_json:
        print_json(
            source=str(source),
            target=str(target),
            key_id=owner.id,
            grants=str(grantees.path) if grantees else None,
            tensors=[entry.name for entry in sealed],
            bytes=sealed_bytes,
            not_protected=[entry.name for entry in left],
            plain_bytes=plain_bytes,
            target_bytes=contents.file_bytes,
            readable={"names": names, "metadata": metadata},
            seconds=seconds,
            gbps=speed(contents.plain_bytes, seconds),
        )
        return
    line = f"{clean(str(target))}: sealed {pluralize(len(sealed), 'tensor')}, {format_size(sealed_bytes)}"
    if left:
        line += f", and left {pluralize(len(left), 'tensor')} in plain, {format_size(plain_bytes)}"
    console = stdout()
    console.print(f"{line}; {format_rate(contents.plain_bytes, seconds)}")
    console.print(f"key: {owner.id}")
    if grantees:
        granted = f"granted to {pluralize(len(grantees.recipients), 'recipient')}; the key was not kept"
        console.print(f"{clean(str(grantees.path))}: {granted}")
    for subject, texts in (("names, dtypes and shapes of", names), ("metadata", metadata)):
        if texts:
            console.print(f"anyone can read the {subject} {clean(', '.join(map(repr, texts))):.300}")


def _refuse_same(source: Path, target: Path) -> None:
    if source.suffix.lower() != ".safetensors" and target.exists() and target.samefile(source):
        raise typer.BadParameter(
            f"expected another file than SOURCE, got {target} again, which would become a safetensors file under the "
            "name of another format. Name one with the suffix .safetensors",
            param_hint="TARGET",
        )


def _check_names(source: Path, names: list[str], new_name: str | None) -> None:
    if not names:
        return
    from fastrack._sealed.importers import open_plain

    with open_plain(source) as (tensors, _):
        present = list(tensors) if new_name is None else [new_name]
        unknown = sorted(set(names) - set(present))
        if unknown:
            missing, known = ", ".join(map(repr, unknown)), ", ".join(map(repr, present)) or "none"
            raise typer.BadParameter(f"no tensor {missing} in {source}; it has {known}", param_hint="--plain")
