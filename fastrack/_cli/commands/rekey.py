"""``fastrack rekey``: seal a sealed file or a dataset under another key."""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, pluralize
from fastrack._cli.errors import refuse_options
from fastrack._cli.files import (
    as_location,
    check_new,
    check_sealed,
    check_target,
    is_sealed_folder,
    match_names,
    open_ring,
)
from fastrack._cli.options import KEY_HELP, DryRun, Force, Json, KeyFiles, Silent
from fastrack._cli.run import NEW_FOLDER, NO_FOLDER, Batch, Job, Meter, Report, beginning_again
from fastrack._files.rekey import rekey_file
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._samples.data_set import is_data_set, read_headers, rekey_data_set, warning_of
from fastrack._samples.stored import read_data_set
from fastrack._sets.load_file import load_file
from fastrack._util.locations import Location
from fastrack._util.shown import format_size, list_names


def rekey(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The sealed file, or the folder of a dataset.")],
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="The file to write, with --force also SOURCE; or the folder to make."),
    ],
    *,
    key: KeyFiles = None,
    new: Annotated[str, typer.Option("--new", metavar="KEY", help=f"The new key. {KEY_HELP}")],
    plain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Copy this tensor, which SOURCE stores unencrypted; may be repeated."),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Seal a file or a dataset under another key, without plaintext on disk.

    Grants of the old key do not open the result.
    """
    if is_data_set(source):
        refuse_options({"--plain": plain}, NO_FOLDER)
        refuse_options({"--force": force}, NEW_FOLDER)
        check_new(target)
    elif source.is_dir():
        advice = "unseal it, and seal it again under the new key" if is_sealed_folder(source) else "name a file in it"
        raise IsADirectoryError(
            errno.EISDIR, f"expected a sealed file or a dataset, got a folder; {advice}", str(source)
        )
    else:
        check_target(target, force=force)
    ring, owner = open_ring(key), open_ring(new).first

    def work(job: Job, meter: Meter) -> Report:
        if is_data_set(job.source):
            return _rekey_data_set(source, target, ring, owner, meter)
        return _rekey_file(source, as_location(target), ring, owner, meter, plain=plain or (), overwrite=force)

    Batch.of("rekeying", [source], many=False, as_json=as_json, quiet=quiet, is_dry=dry_run).run(work)


def _rekey_file(
    source: Path, location: Location, ring: KeyRing, owner: Key, meter: Meter, *, plain: Sequence[str], overwrite: bool
) -> Report:
    """Seal the tensors of a file anew, into another file."""
    with load_file(as_location(source)) as file:
        check_sealed(file, ring)
        _, unknown = match_names(plain, file.names)
        if unknown:
            raise typer.BadParameter(
                f"{file.path} has no tensor {unknown[0]!r:.200}; {list_names(unknown[0], file.names)}",
                param_hint="--plain",
            )
        total, names = sum(tensor.nbytes for tensor in file.values()), list(file)
        with meter.run(total) as progress:
            rekey_file(file, location, ring, key=owner, plain=plain, overwrite=overwrite, progress=progress)
    file_id = None
    if not meter.is_dry:
        with load_file(location) as file:
            file_id = file.file_id
    counts, done = pluralize(len(names), "tensor"), "would seal" if meter.is_dry else "sealed"
    line = f"{done} {counts} anew, {format_size(total)}"
    members = {"key_id": owner.id, "file_id": file_id, "tensors": names, "bytes": total}
    return meter.report(as_location(source), location, total, line, members, after=[f"key: {owner.id}"])


def _rekey_data_set(source: Path, target: Path, ring: KeyRing, owner: Key, meter: Meter) -> Report:
    """Seal all shards of a dataset anew, into a new folder."""
    headers = read_headers(source)
    with headers.open(headers.shards[0]) as file:
        check_sealed(file, ring)
    data = read_data_set(source, ring)
    with meter.run(headers.nbytes) as progress, beginning_again(target):
        rekey_data_set(data, target, ring, key=owner, progress=progress)
    counts = f"{pluralize(len(data.shards), 'shard')} anew, {pluralize(data.samples, 'sample')}"
    line = f"{'would seal' if meter.is_dry else 'sealed'} {counts}, {format_size(headers.nbytes)}"
    odd = warning_of(data, source)
    warning = [] if odd is None else [clean(f"warning: {odd}; so it is with {target}")]
    members = {
        "key_id": owner.id,
        "shards": [path.name for path, _ in data.shards],
        "samples": data.samples,
        "complete": data.is_whole,
        "bytes": headers.nbytes,
    }
    after = [f"key: {owner.id}"]
    return meter.report(source, target, headers.nbytes, line, members, before=warning, after=after, brief=warning)
