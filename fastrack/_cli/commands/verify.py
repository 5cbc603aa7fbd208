"""``fastrack verify``: authenticate every chunk of a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastrack._cli import run as runner
from fastrack._cli.commands.publish import report as show_manifest
from fastrack._cli.console import clean, format_rate, new_table, pluralize
from fastrack._cli.errors import refuse_options
from fastrack._cli.files import as_location, check_expected, check_sealed, is_sealed_folder, open_ring
from fastrack._cli.options import AnchorFile, Expect, FileId, JsonLines, KeyFiles, Quiet, Recursive
from fastrack._cli.run import Batch, Job, Meter, Report
from fastrack._cli.streams import open_sealed, require_one_stream
from fastrack._files.reader import SealedFile
from fastrack._files.verify import TensorCheck, check_file
from fastrack._keys.keyring import KeyRing
from fastrack._samples.about import About, read_about
from fastrack._samples.data_set import is_data_set, read_headers
from fastrack._samples.stored import read_data_set
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder import FileCheck, SealedFolder, load_folder
from fastrack._sets.load_file import resolve_anchor
from fastrack._util.shown import format_size
from fastrack.errors import AuthenticationError, FormatError

_LIMIT = "not checked: whether later imports were removed from the end; --anchor checks that"


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Sealed files, globs, or - for standard input; a sealed folder or a dataset; with --anchor any "
            "folder.",
        ),
    ],
    *,
    key: KeyFiles = None,
    expect: Expect = None,
    file_id: FileId = None,
    anchor: AnchorFile = None,
    recursive: Recursive = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
) -> None:
    """Check that every chunk of files or a folder is what its owner sealed; or that a folder is as its manifest says.

    Writes nothing but the anchor.
    """
    anchored = resolve_anchor(anchor)
    require_one_stream(*paths, *(key or ()))
    path, many = paths[0], not runner.is_one(paths, recursive=recursive)
    if many:
        refuse_options({"--file-id": file_id}, runner.ONE)
    elif is_sealed_folder(path) and (key or anchored is None):
        refuse_options({"--expect": expect, "--file-id": file_id}, runner.NO_FOLDER)
    elif is_data_set(path) and (key or anchored is None):
        refuse_options({"--file-id": file_id}, runner.NO_FOLDER)
    elif path.is_dir():
        _verify_set(path, anchored, key=key or expect or file_id, as_json=as_json)
        return
    ring = open_ring(key)

    def work(job: Job, meter: Meter) -> Report:
        if is_sealed_folder(job.source):
            return _verify_folder(job.source, ring, meter, anchored)
        if is_data_set(job.source):
            return _verify_data_set(job.source, ring, meter, expect, anchored)
        return verify_contents(job.source, ring, meter, expect=expect, file_id=file_id, anchor=anchored)

    told: dict[str, Any] = {"as_json": as_json, "quiet": quiet, "member": "path"}
    batch = Batch.of("verifying", paths, many=many, recursive=recursive, suffix=runner.SUFFIX, anchor=anchored, **told)
    batch.run(work, _summarize, in_full=False)


def _summarize(reports: Sequence[Report]) -> str:
    sound = [report.document for report in reports if not report.errors]
    counts = [len(document["tensors"]) for document in sound if "tensors" in document]
    tensors, files = pluralize(sum(counts), "sealed tensor"), pluralize(len(counts), "file")
    line = f"every chunk of {tensors} in {files} is authentic"
    for member, noun in (("files", "sealed folder"), ("shards", "dataset")):
        whole = sum(member in document for document in sound)
        if whole:
            line += f", and all {member} of {pluralize(whole, noun)}"
    plain = sum(len(report.plain) for report in reports)
    if plain:
        line += f"; not protected, so not checked: {pluralize(plain, 'unencrypted tensor')}"
    return line


def _verify_set(path: Path, anchor: Anchor | None, *, key: object, as_json: bool) -> None:
    if anchor is None:
        raise typer.BadParameter(
            "expected a file, a sealed folder, or an anchor to compare this folder with its manifest, got only a "
            "folder; --recursive takes the files in it",
            param_hint="FILE",
        )
    reason = "expected none with a folder, which is compared with its manifest; verify its files one by one"
    refuse_options({"--key, --expect, --file-id": key}, reason)
    show_manifest(anchor.verify(path), path, as_json=as_json, ok=True)


def verify_contents(
    path: Path,
    ring: KeyRing,
    meter: Meter,
    *,
    expect: Sequence[str] | None = None,
    file_id: str | None = None,
    anchor: Anchor | None = None,
) -> Report:
    """Return the report on a file, which is opened once."""
    with open_sealed(path, file_id=file_id, anchor=anchor) as file:
        check_sealed(file, ring)
        check_expected(file, expect)
        with meter.run(sum(tensor.nbytes for tensor in file.values())) as progress:
            checks = check_file(file, ring, progress=progress)
        if anchor is not None:
            for name in file.plain:
                file.stored(name)  # compares it with the manifest
        plain = () if anchor is not None else tuple(file.plain)
    table = new_table("", "name", "dtype", "shape", "size", "failed at", right=("size",))
    tensors = []
    for check in checks:
        chunk = getattr(check.error, "chunk", None)
        position = "" if check.error is None else "header" if chunk is None else f"chunk {chunk}"
        shape, size = list(check.shape), format_size(check.nbytes)
        table.add_row(_state(check), clean(check.name), check.dtype, str(shape), size, position)
        members = {"name": check.name, "dtype": check.dtype, "shape": shape, "bytes": check.nbytes}
        tensors.append({**members, "ok": check.error is None, "chunk": chunk, "message": _message(check)})
    count = pluralize(len(checks), "sealed tensor")
    members = {"tensors": tensors, "not_protected": list(plain), "bytes": meter.nbytes}
    verdict = f"every chunk of {count} is authentic"
    return _report(path, file, checks, meter, members, table, count, verdict, plain)


def _verify_folder(path: Path, ring: KeyRing, meter: Meter, anchor: Anchor | None) -> Report:
    """Return the report on all files of a sealed folder."""
    folder = load_folder(path, ring, anchor=anchor)
    with meter.run(folder.nbytes) as progress:
        checks = folder.check(ring, progress=progress)
    table = new_table("", "name", "", "size", right=("size",))
    files = []
    for check in checks:
        table.add_row(
            _state(check), clean(check.name), "sealed" if check.sealed else "plain", format_size(check.nbytes)
        )
        members = {"name": check.name, "sealed": check.sealed, "bytes": check.nbytes}
        files.append({**members, "ok": check.error is None, "message": _message(check)})
    count = pluralize(len(checks), "file")
    members = {"files": files, "bytes": folder.nbytes}
    return _report(
        path, folder, checks, meter, members, table, count, f"{count}, each as its owner sealed or copied it"
    )


def _verify_data_set(
    path: Path, ring: KeyRing, meter: Meter, expect: Sequence[str] | None, anchor: Anchor | None
) -> Report:
    """Return the report on all shards of a dataset: each of their chunks, and that each is in its place."""
    data = read_headers(path, anchor)
    for name in expect or ():
        if name not in data.columns:
            columns = ", ".join(map(repr, data.columns))
            raise AuthenticationError(f"{path}: expected the column {name!r:.200}, got {columns:.300}. Get it again")
    shards: list[dict[str, Any]] = []
    errors: list[Exception] = []
    said: list[About | None] = []
    table = new_table("", "shard", "samples", "size", right=("samples", "size"))
    with meter.run(data.nbytes) as progress:
        for shard in data.shards:
            with data.open(shard) as file:
                check_sealed(file, ring)
                failed = [check.error for check in check_file(file, ring, progress=progress) if check.error]
                if not failed:
                    said.append(read_about(file, ring))
            errors += failed
            name, nbytes = shard.path.name, shard.nbytes
            if failed:
                table.add_row("FAILED", name, str(shard.samples), format_size(nbytes))
            members = {"name": name, "file_id": shard.file_id, "samples": shard.samples, "bytes": nbytes}
            shards.append({**members, "ok": not failed, "message": str(failed[0]) if failed else None})
    count, samples = pluralize(len(shards), "shard"), pluralize(data.samples, "sample")
    complete: bool | None = None
    verdict = f"every chunk of {samples} in {count} is authentic"
    if errors:
        verdict = f"{len(shards) - len(said)} of {count} FAILED"
    else:
        try:
            complete, limit, wrong = _require_places(path, ring, said, anchored=anchor is not None)
            verdict, errors = verdict + limit, [wrong] if wrong else []
        except (AuthenticationError, FormatError) as error:
            verdict, errors = f"{count} FAILED: they are not in order", [error]
    return Report(
        {
            "path": str(path),
            "key_id": data.key_id,
            "ok": not errors,
            "complete": complete,
            "samples": data.samples,
            "shards": shards,
            "bytes": data.nbytes,
            **meter.describe(data.nbytes),
        },
        lines=[
            f"{clean(str(path))}: {verdict}; {format_size(data.nbytes)} in {format_rate(data.nbytes, meter.seconds)}",
            f"key: {data.key_id}",
            *([_LIMIT] if anchor is None and not errors else []),
            *(("", table, "") if table.row_count else ()),
            *(clean(str(error)) for error in errors),
        ],
        nbytes=data.nbytes,
        errors=errors,
    )


def _require_places(
    path: Path, ring: KeyRing, said: list[About | None], *, anchored: bool
) -> tuple[bool | None, str, FormatError | None]:
    """Return whether a dataset is complete, None if not all shards tell; the words for that; and what is wrong."""
    data = read_data_set(path, ring)
    if [about if about.data_set else None for _, about in data.shards] != said:
        raise FormatError(f"{path} changed while it was read. Verify it again")
    if data.is_whole is False:
        return False, ", but NOT COMPLETE", _unfinished(path, data.samples)
    if data.before and not anchored:
        return None, ", but NOT SEEN TO BE IN ORDER AND COMPLETE", _untold(path, data.before)
    return data.is_whole, ", in order and complete" if data.is_whole else "", None


def _untold(path: Path, before: int) -> FormatError:
    """Return the error for a dataset whose first shards, or all, do not say their place."""
    return FormatError(
        f"{path}: expected shards that say their order and number, got some that do not, of the first "
        f"{pluralize(before, 'sample')}: version 0.1 wrote them, or someone removed it. `fastrack verify -r` checks "
        "only the files; if you know their samples to be right, `fastrack unseal` and `import` them into a new folder"
    )


def _unfinished(path: Path, samples: int) -> FormatError:
    """Return the error for a dataset whose last run did not come to its end."""
    return FormatError(
        f"{path}: expected the end of the last run of `import`, got {samples} samples and no end: the run was "
        "interrupted, or the last shards are missing. `fastrack import --resume` continues it; else get them from "
        "the owner"
    )


def _state(check: TensorCheck | FileCheck) -> str:
    return "ok" if check.error is None else "FAILED"


def _message(check: TensorCheck | FileCheck) -> str | None:
    return None if check.error is None else str(check.error)


def _report(
    path: Path,
    opened: SealedFile | SealedFolder,
    checks: Sequence[TensorCheck | FileCheck],
    meter: Meter,
    members: dict[str, Any],
    table: Table,
    count: str,
    verdict: str,
    plain: Sequence[str] = (),
) -> Report:
    """Return the report on a file or a folder. `verdict` is its text if no check failed."""
    errors = [check.error for check in checks if check.error is not None]
    location, nbytes = str(as_location(path)), members["bytes"]
    if errors:
        verdict = f"{len(errors)} of {count} FAILED"
    warning = [f"not protected, so not checked: {', '.join(map(clean, plain))} (stored unencrypted)"] if plain else []
    ids = {"path": location, "key_id": opened.key_id, "file_id": opened.file_id}
    return Report(
        {**ids, "ok": not errors, **members, **meter.describe(nbytes)},
        lines=[
            table,
            "",
            *(clean(str(error)) for error in errors),
            *warning,
            f"key: {opened.key_id}",
            f"file id: {opened.file_id}",
            f"{clean(location)}: {verdict}; {format_size(nbytes)} in {format_rate(nbytes, meter.seconds)}",
        ],
        nbytes=nbytes,
        plain=plain,
        errors=errors,
    )
