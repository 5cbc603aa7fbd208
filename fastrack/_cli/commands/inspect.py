"""``fastrack inspect``: show the contents of a file that are not encrypted."""

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastrack._cli import batch as many
from fastrack._cli.commands.folder import is_sealed_folder
from fastrack._cli.commands.streams import open_sealed
from fastrack._cli.console import clean, new_table, pluralize, print_json, stdout
from fastrack._cli.files import as_location
from fastrack._cli.options import JsonLines, Recursive
from fastrack._util.units import format_size
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._files.reader import SealedFile


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help=".safetensors files, sealed or not; globs, or - for standard input; a sealed folder.",
        ),
    ],
    *,
    recursive: Recursive = False,
    as_json: JsonLines = False,
) -> None:
    """Show the contents of files, without a key and unauthenticated; `verify` authenticates."""
    if not many.is_one(paths, recursive=recursive):
        _inspect_each(paths, recursive=recursive, as_json=as_json)
        return
    if paths[0].is_dir() and not is_sealed_folder(paths[0]):
        raise IsADirectoryError(errno.EISDIR, many.FOLDER, str(paths[0]))
    contents = read_folder(paths[0]) if paths[0].is_dir() else read_contents(paths[0])
    if as_json:
        print_json(**contents.as_dict())
    else:
        contents.show(stdout())


def _inspect_each(paths: Sequence[Path], *, recursive: bool, as_json: bool) -> None:
    selection = many.select(paths, recursive=recursive, suffix=many.SUFFIX)
    console = stdout()

    def show(source: many.Source, _: object) -> Contents | FolderContents:
        contents = read_folder(source.path) if source.is_sealed_folder else read_contents(source.path)
        if not as_json:
            contents.show(console)
            console.print()
        return contents

    tally = many.run_each("reading", selection.sources, show, member="path", as_json=as_json)
    line = f"{pluralize(tally.files - tally.failed, 'file')} shown"
    many.finish(tally, line, as_json=as_json, quiet=False, selection=selection)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file. If it is sealed, `stored_bytes` and `chunks` are those of its message."""

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

    `samples` and `columns` are those of a data set, and None of another file.
    """

    path: str
    kind: str | None
    format: str | None
    file_id: str | None
    key_id: str | None
    samples: int | None
    columns: tuple[str, ...] | None
    file_bytes: int
    tensors: tuple[Entry, ...]
    metadata: dict[str, str]

    errors = ()

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext of all tensors."""
        return self.plain_bytes

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

    def show(self, console: Console) -> None:
        """Print the contents as a table."""
        show_contents(self, console)


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of a sealed folder, as it is stored."""

    name: str
    bytes: int
    sealed: bool


@dataclass(frozen=True, slots=True)
class FolderContents:
    """The files of a sealed folder, and the header of its index."""

    path: str
    kind: str
    format: str
    file_id: str | None
    key_id: str | None
    files: tuple[FolderFile, ...]

    errors = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        """Return the contents for JSON."""
        return {**asdict(self), "file_bytes": self.nbytes}

    def show(self, console: Console) -> None:
        """Print the files as a table."""
        files = pluralize(len(self.files), "file")
        console.print(f"{clean(self.path)}: a sealed folder of {files}, {format_size(self.nbytes)}")
        console.print(f"format {self.format}, file {self.file_id}, key {self.key_id}\n")
        table = new_table("name", "stored", "", right=("stored",))
        for file in self.files:
            table.add_row(clean(file.name), format_size(file.bytes), "sealed" if file.sealed else "plain")
        console.print(table, soft_wrap=False)
        console.print(f"\n{_UNAUTHENTICATED}")


def read_folder(path: Path) -> FolderContents:
    """Return the files of a sealed folder, and the ids in its index, of which nothing is opened."""
    from fastrack._sets.folder import INDEX

    with open_sealed(path / INDEX) as index:
        if index.kind != "folder":
            raise FormatError(f"{path / INDEX}: expected the index of a sealed folder, got another file")
        files = tuple(
            FolderFile(file.relative_to(path).as_posix(), file.stat().st_size, _is_sealed(file))
            for file in sorted(path.rglob("*"))
            if file.is_file() and file != path / INDEX
        )
        return FolderContents(str(path), index.kind, "1", index.file_id, index.key_id, files)


def _is_sealed(path: Path) -> bool:
    try:
        with open_sealed(path) as file:
            return file.key_id is not None
    except FormatError:
        return False


def read_contents(path: Path) -> Contents:
    """Return the contents of a safetensors file by its header."""
    from fastrack._crypto import cobblestone

    with open_sealed(path) as file:
        entries = []
        for name in file.names:
            dtype, shape, begin, end = file.describe(name)
            nbytes, chunks = end - begin, 0
            if name in file:
                tensor = file[name]
                dtype, shape, nbytes = tensor.dtype, tensor.shape, tensor.nbytes
                chunks = cobblestone.chunk_count(nbytes)
            entries.append(Entry(name, dtype, shape, name in file, nbytes, end - begin, chunks))
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


def _samples_of(path: Path, file: "SealedFile") -> tuple[int | None, tuple[str, ...] | None]:
    """Return the number of samples and the columns of a file of a `SealedWriter`; None of another file."""
    from fastrack._samples.blocks import RECORDS, columns_of
    from fastrack._samples.dataset_writer import SHARD

    if file.kind == "tensor" and (SHARD.fullmatch(path.name) or any(name.endswith(RECORDS) for name in file)):
        with contextlib.suppress(FormatError):
            count, columns = columns_of([tensor.context for tensor in file.values()], path)
            return count, tuple(columns)
    return None, None


def show_contents(contents: Contents, console: Console) -> None:
    """Print the contents as a table."""
    sealed = [entry for entry in contents.tensors if entry.sealed]
    console.print(f"{clean(contents.path)}: {_summary(contents, len(sealed))}")
    if contents.key_id is not None:
        console.print(f"format {contents.format}, file {contents.file_id or 'unknown'}, key {contents.key_id}")
    if contents.samples is not None and contents.columns is not None:
        names = ", ".join(map(clean, contents.columns))
        console.print(f"{pluralize(contents.samples, 'sample')} with the columns {names}")
    if contents.tensors:
        table = new_table(
            "name", "dtype", "shape", "plain", "stored", "chunks", "", right=("plain", "stored", "chunks")
        )
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
        console.print()
        console.print(table, soft_wrap=False)
    if contents.metadata:
        console.print("\nmetadata, neither encrypted nor authenticated:")
        for name, value in contents.metadata.items():
            console.print(f"  {clean(name)}: {clean(value)}")
    if sealed:
        console.print(f"\n{_UNAUTHENTICATED}")


_UNAUTHENTICATED = "Nothing here was authenticated: anyone can write such a header. `fastrack verify` checks it."
_OF_KIND = {"tensor": "", "checkpoint": " of a checkpoint", "folder": " of the index of a sealed folder"}


def _summary(contents: Contents, sealed: int) -> str:
    if not sealed:
        tensors = pluralize(len(contents.tensors), "tensor")
        return f"nothing is sealed; {tensors} in plain, {format_size(contents.file_bytes)}"
    parts = [pluralize(sealed, "sealed tensor") + _OF_KIND[contents.kind or "tensor"]]
    if sealed < len(contents.tensors):
        parts.append(f"{len(contents.tensors) - sealed} in plain")
    parts.append(format_size(contents.file_bytes))
    if contents.overhead_percent is not None:
        parts.append(f"{contents.overhead_percent:.2f} % more than the tensors alone")
    return ", ".join(parts)
