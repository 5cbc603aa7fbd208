"""``fastrack inspect``: show the contents of a file that are not encrypted."""

import contextlib
import errno
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastrack._cli import run as runner
from fastrack._cli.console import clean, new_table, pluralize
from fastrack._cli.files import as_location, is_sealed_folder
from fastrack._cli.options import JsonLines, Recursive
from fastrack._cli.run import Batch, Job, Report
from fastrack._cli.streams import open_sealed
from fastrack._files.reader import SealedFile
from fastrack._samples.blocks import RECORDS, columns_of
from fastrack._samples.data_set import is_data_set, read_headers
from fastrack._samples.stored import SHARD
from fastrack._sets.folder import INDEX
from fastrack._util.shown import format_size
from fastrack.errors import FormatError
from fastrack.format import chunk_count


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=".safetensors files, sealed or not; globs, or - for standard input; a sealed folder or a dataset.",
        ),
    ],
    *,
    recursive: Recursive = False,
    as_json: JsonLines = False,
) -> None:
    """Show the contents of files, without a key and unauthenticated; `verify` authenticates."""
    many = not runner.is_one(paths, recursive=recursive)
    if not many and paths[0].is_dir() and not is_sealed_folder(paths[0]) and not is_data_set(paths[0]):
        raise IsADirectoryError(errno.EISDIR, runner.A_FOLDER, str(paths[0]))

    def work(job: Job, _: object) -> Report:
        if is_data_set(job.source):
            return _report_data_set(job.source)
        return _report_folder(job.source) if is_sealed_folder(job.source) else _report(job.source)

    told: dict[str, Any] = {"as_json": as_json, "member": "path"}
    batch = Batch.of("reading", paths, many=many, recursive=recursive, suffix=runner.SUFFIX, **told)
    in_full = len(batch.jobs) <= _IN_FULL
    batch.run(work, partial(_summarize, in_full=in_full), in_full=in_full)


def _summarize(reports: Sequence[Report], *, in_full: bool) -> str:
    """Return the number of files, and of many the first lines of some."""
    sound = [report for report in reports if not report.errors]
    shown = f"{runner.count_sound(reports)} shown"
    if in_full or not sound:
        return shown
    kept = sound if len(sound) <= _LISTED else sound[: _LISTED // 2]
    lines = [str(report.lines[0]) for report in kept]
    if len(kept) < len(sound):
        lines.append(f"and {len(sound) - len(kept)} more: name fewer files, or --json for each")
    keys = Counter(report.document["key_id"] for report in sound)
    under = [f"{pluralize(count, 'file')} under key {key}" for key, count in keys.items() if key is not None]
    plain = [f"{pluralize(keys[None], 'file')} with nothing sealed"] if keys[None] else []
    counts = [*under, *plain] if len(keys) <= _LISTED else [f"under {len(keys) - bool(plain)} keys", *plain]
    return "\n".join([*lines, "", *counts, _UNAUTHENTICATED, shown])


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A tensor of a file. If it is sealed, `stored_bytes` and `chunks` describe its message."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sealed: bool
    plain_bytes: int
    stored_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Contents:
    """The header of a file. `kind`, `format`, `file_id` and `key_id` are None if no tensor is sealed.

    `samples` and `columns` describe a dataset; None for any other file.
    """

    path: str
    kind: str | None
    format: str | None
    file_id: str | None
    key_id: str | None
    samples: int | None
    columns: tuple[str, ...] | None
    file_bytes: int
    tensors: tuple[ListedTensor, ...]
    metadata: dict[str, str]

    @property
    def plain_bytes(self) -> int:
        """Bytes of plaintext of all tensors."""
        return sum(entry.plain_bytes for entry in self.tensors)

    @property
    def overhead_percent(self) -> float | None:
        """Size of the file beyond its tensors, in percent of these; None if they are empty."""
        plain = self.plain_bytes
        return 100 * (self.file_bytes - plain) / plain if plain else None

    def as_dict(self) -> dict[str, Any]:
        """Return the contents for JSON."""
        computed = {"plain_bytes": self.plain_bytes, "overhead_percent": self.overhead_percent}
        return {**asdict(self), **computed, "metadata_authenticated": False}


def _report(path: Path) -> Report:
    contents = read_contents(path)
    return Report(contents.as_dict(), lines=describe_contents(contents), nbytes=contents.plain_bytes)


def _report_folder(path: Path) -> Report:
    """Return the files of a sealed folder, and the ids in its index, which is not decrypted."""
    with open_sealed(path / INDEX) as index:
        if index.kind != "folder":
            raise FormatError(f"{path / INDEX}: expected the index of a sealed folder, got another file")
        files: list[dict[str, Any]] = [
            {"name": file.relative_to(path).as_posix(), "bytes": file.stat().st_size, "sealed": _is_sealed(file)}
            for file in sorted(path.rglob("*"))
            if file.is_file() and file != path / INDEX
        ]
    total = sum(file["bytes"] for file in files)
    table = new_table("name", "stored", "", right=("stored",))
    for file in files[:_LISTED]:
        table.add_row(clean(file["name"]), format_size(file["bytes"]), "sealed" if file["sealed"] else "plain")
    more = [f"... {len(files) - table.row_count:,} more; --json has all"] if table.row_count < len(files) else []
    sealed = sum(file["sealed"] for file in files)
    counts = f"{pluralize(len(files), 'file')}, {format_size(total)}: {sealed:,} sealed, {len(files) - sealed:,} plain"
    ids = {"kind": index.kind, "format": "1", "file_id": index.file_id, "key_id": index.key_id}
    return Report(
        {"path": str(path), **ids, "files": files, "file_bytes": total},
        lines=[
            f"{clean(str(path))}: a sealed folder of {pluralize(len(files), 'file')}, {format_size(total)}",
            f"format 1, file {index.file_id}, key {index.key_id}\n",
            table,
            *more,
            f"\n{_UNAUTHENTICATED}",
            *([counts] if more else ()),
        ],
        nbytes=total,
    )


def _report_data_set(path: Path) -> Report:
    """Return the shards of a dataset, and the columns that all of them have."""
    data = read_headers(path)
    table = new_table("column", "dtype", "shape", "plain", right=("plain",))
    columns: list[dict[str, Any]] = []
    for name, column in data.columns.items():
        shape, nbytes = column.shape, data.sizes[name]
        kind = str(list(shape)) if shape is not None else "text or bytes" if column.dtype == "U8" else "lists"
        table.add_row(clean(name), column.dtype, kind, format_size(nbytes))
        columns.append({"name": name, "dtype": column.dtype, "shape": shape, "plain_bytes": nbytes})
    shards = [
        {"name": shard.path.name, "file_id": shard.file_id, "samples": shard.samples, "file_bytes": shard.size}
        for shard in data.shards
    ]
    counts = f"{pluralize(data.samples, 'sample')} in {pluralize(len(shards), 'shard')}, {format_size(data.size)}"
    members = {"samples": data.samples, "columns": columns, "shards": shards}
    return Report(
        {
            "path": str(path),
            "kind": "data set",
            "format": "1",
            "key_id": data.key_id,
            **members,
            "plain_bytes": data.nbytes,
            "file_bytes": data.size,
        },
        lines=[
            f"{clean(str(path))}: a dataset of {counts}",
            f"format 1, key {data.key_id}\n",
            table,
            f"\n{_UNAUTHENTICATED}",
        ],
        nbytes=data.nbytes,
    )


def _is_sealed(path: Path) -> bool:
    try:
        with open_sealed(path) as file:
            return file.key_id is not None
    except FormatError:
        return False


def read_contents(path: Path) -> Contents:
    """Return the contents of a safetensors file by its header."""
    with open_sealed(path) as file:
        entries = []
        for name in file.names:
            dtype, shape, begin, end = file.describe(name)
            nbytes, chunks = end - begin, 0
            if name in file:
                tensor = file[name]
                dtype, shape, nbytes = tensor.dtype, tensor.shape, tensor.nbytes
                chunks = chunk_count(nbytes)
            entries.append(ListedTensor(name, dtype, shape, name in file, nbytes, end - begin, chunks))
        samples, columns = _samples_of(path, file)
        return Contents(
            path=str(as_location(path)),
            kind=file.kind if file else None,
            format=None if file.key_id is None else "1",
            file_id=file.file_id,
            key_id=file.key_id,
            samples=samples,
            columns=columns,
            file_bytes=file.size,
            tensors=tuple(entries),
            metadata=dict(file.metadata),
        )


def _samples_of(path: Path, file: SealedFile) -> tuple[int | None, tuple[str, ...] | None]:
    """Return the number of samples and the columns of a file of a `DatasetWriter`; None for any other file."""
    if file.kind == "tensor" and (SHARD.fullmatch(path.name) or any(name.endswith(RECORDS) for name in file)):
        with contextlib.suppress(FormatError):
            count, columns = columns_of([tensor.context for tensor in file.values()], path)
            return count, tuple(columns)
    return None, None


def describe_contents(contents: Contents) -> list[str | Table]:
    """Return the contents as lines and a table."""
    sealed = [entry for entry in contents.tensors if entry.sealed]
    lines: list[str | Table] = [f"{clean(contents.path)}: {_summary(contents, len(sealed))}"]
    if contents.key_id is not None:
        lines.append(f"format {contents.format}, file {contents.file_id or 'unknown'}, key {contents.key_id}")
    if contents.samples is not None and contents.columns is not None:
        names = ", ".join(map(clean, contents.columns))
        lines.append(f"{pluralize(contents.samples, 'sample')} with the columns {names}")
    if contents.tensors:
        right = ("plain", "stored", "chunks")
        table = new_table("name", "dtype", "shape", *right, "", right=right)
        for entry in contents.tensors:
            table.add_row(
                clean(entry.name),
                entry.dtype,
                str(list(entry.shape)),
                format_size(entry.plain_bytes),
                format_size(entry.stored_bytes),
                str(entry.chunks) if entry.sealed else "",
                "sealed" if entry.sealed else "plain",
            )
        lines += ["", table]
    if contents.metadata:
        lines.append("\nmetadata, neither encrypted nor authenticated:")
        lines += [f"  {clean(name)}: {clean(value)}" for name, value in contents.metadata.items()]
    if sealed:
        lines.append(f"\n{_UNAUTHENTICATED}")
    return lines


_IN_FULL = 4  # files whose tensors are listed, at most
_LISTED = 20  # files that have a line, at most; those of a sealed folder too
_UNAUTHENTICATED = "Nothing here was authenticated: anyone can write such a header. `fastrack verify` checks it."
_OF_KIND = {
    "tensor": "",
    "checkpoint": " of a checkpoint",
    "folder": " of the index of a sealed folder",
    "index": " of the index of a dataset",
}


def _summary(contents: Contents, sealed: int) -> str:
    if not sealed:
        tensors = pluralize(len(contents.tensors), "tensor")
        return f"nothing is sealed; {tensors}, unencrypted, {format_size(contents.file_bytes)}"
    parts = [pluralize(sealed, "sealed tensor") + _OF_KIND[contents.kind or "tensor"]]
    if sealed < len(contents.tensors):
        parts.append(f"{len(contents.tensors) - sealed} unencrypted")
    parts.append(format_size(contents.file_bytes))
    if contents.overhead_percent is not None:
        parts.append(f"{contents.overhead_percent:.2f} % more than the tensors alone")
    return ", ".join(parts)
