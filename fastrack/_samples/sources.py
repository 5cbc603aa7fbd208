"""`import_samples`: samples of image folders, text, JSON lines, tar archives and tables, sealed into shards."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from fastrack._keys.keyring import KeyLike
from fastrack._samples import tables
from fastrack._samples.imports import Batches, Import
from fastrack._samples.json_lines import JsonColumns
from fastrack._util.locations import locate_local
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

Batch = Mapping[str, Any]
Line = tuple[bytes, Path, int]
"""A line of a file, and its number there."""

_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_IMAGES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}  # as torchvision's ImageFolder
_LINES = 1024  # lines of a batch, at most
_BATCH_SIZE = 8 << 20  # bytes of a batch, but for its last line


@public
def import_samples(
    source: Any,
    folder: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    shard_size: int = 256 << 20,
    resume: bool = False,
    append: bool = False,
    skip_existing: bool = False,
    columns: Sequence[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Seal samples that you have into a folder of shards, which `SealedDataset` opens.

    The samples pass through memory, at most a shard of them, and no plaintext is written.

    Parameters
    ----------
    source : path, sequence of paths, or object
        - A folder of images, or of folders of images by class: the columns "image" (the bytes of the file), "label"
          (the number of the class, in alphabetical order) and "path", in the order of torchvision's ``ImageFolder``.
        - ``.txt``: "text", a record for each line, without its end.
        - ``.jsonl``: a column for each member of the first object. Text, numbers and lists of numbers are stored as
          such, and any other value as JSON.
        - ``.tar``, as of WebDataset: a column for each ending of the files with one name, and "__key__". "cls" is a
          number, all others are bytes.
        - ``.parquet``, ``.arrow`` and ``.feather``, with PyArrow: a column for each of theirs. Numbers are copied,
          dates become the integers that Arrow stores, text, bytes and lists of numbers are records.
        - A folder of files of one of these kinds, in the order of their names, without folders among them, or several
          such files.
        - A ``pyarrow.Table`` or ``RecordBatchReader``, a ``pandas.DataFrame`` or a ``datasets.Dataset``, as a Parquet
          file, or an iterable of samples, as `DatasetWriter.write` takes them.
    folder, key, shard_size
        As for `DatasetWriter`.
    resume : bool
        Continue the last run in a folder that has shards: read its source from the start again, compare its first
        samples with the stored ones, and store the rest. A different source, or one whose stored part was altered, is
        refused, and so is one that has no more than an interrupted run had stored; a source that has grown at its end
        is continued.
    append : bool
        Add all samples of the source to a data set, whose last run came to its end, with the same columns.
    skip_existing : bool
        With `append` or `resume`: leave out the files that the data set has, by their names, after a comparison with
        what it has of them. A file that has changed is refused, and so is one under a new name. All files are read
        before a sample is stored.
    columns : sequence of str, optional
        The columns to store, in this order. By default all that the source has.
    progress : callable, optional
        Called with the number of samples read since the previous call, those that are stored already included.

    Returns
    -------
    int
        Number of samples in the folder.

    Raises
    ------
    FileExistsError
        If the folder has shards, and neither `resume` nor `append` is given; or if it has an import that was
        interrupted, and `append` is given; or if another program writes to the folder at the same time.
    FileNotFoundError
        If the folder has no shards, and `append` is given.
    FormatError
        If a file is malformed, of no such kind, or has values that cannot be stored, such as nulls; or if there is no
        sample; or if files that are resumed do not begin with the samples that the folder has.
    ImportError
        If PyArrow is needed and not installed.
    TypeError, ValueError, OSError, AuthenticationError
        As from `DatasetWriter`.

    Examples
    --------
    >>> import pathlib
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> _ = pathlib.Path("cities.jsonl").write_text('{"name": "Oslo", "size": 709037}')
    >>> fastrack.import_samples("cities.jsonl", "cities", key)
    1
    >>> data = fastrack.SealedDataset("cities", keys=key, transform=lambda city: (city["name"], int(city["size"])))
    >>> data[0]
    (b'Oslo', 709037)
    """
    choices = {"resume": resume, "append": append, "skip_existing": skip_existing, "chosen": columns}
    return open_import(source, folder, **choices).work(key, shard_size, progress)


def open_import(source: Any, folder: str | os.PathLike[str], **choices: Any) -> Import:
    """Return the import of a source of `import_samples` into a folder, with the options of `Import`."""
    target = locate_local(folder)

    def open_source() -> tuple[_Files | None, Batches]:
        files = _files_of(source)
        if files is None:
            return None, ((None, batch) for batch in _open_object(source))
        return files, _with_names(files, _open_files(files, target))

    return Import(open_source, target, **choices)


def _with_names(files: _Files, batches: Iterator[Batch]) -> Batches:
    for batch in batches:
        yield None if "image" in batch and "path" in batch else files.current.name, batch


class _Files:
    """Files of a source, in order. `current` is the file of the last samples, for errors."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths, self.current = paths, paths[0]
        self.skipped: list[tuple[str, str]] = []

    def __iter__(self) -> Iterator[Path]:
        for path in self.paths:
            self.current = path
            yield path


def _files_of(source: Any) -> _Files | None:
    """Return the files of a source given by paths, or None for an object."""
    if isinstance(source, (str, os.PathLike)):
        return _Files([locate_local(source)])
    if isinstance(source, Sequence) and source and all(isinstance(path, (str, os.PathLike)) for path in source):
        return _Files([locate_local(path) for path in source])
    return None


def _open_object(source: Any) -> Iterator[Batch]:
    batches = tables.open_table(source)
    if batches is not None:
        is_dataset = type(source).__module__.partition(".")[0] == "datasets"
        return tables.read_batches(batches, follow_paths=is_dataset)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise TypeError(
            f"import_samples: expected paths, a table or an iterable of samples, got {type(source).__name__}. Give "
            "such an object, or write samples with a DatasetWriter"
        )
    return ({name: [value] for name, value in sample.items()} for sample in source)


def _open_files(files: _Files, target: Path) -> Iterator[Batch]:
    source = files.current
    if len(files.paths) == 1 and source.is_dir():
        here = target.resolve()
        listed = sorted(path for path in source.iterdir() if not (path.is_dir() and path.resolve() == here))
        entries = [path for path in listed if not path.name.startswith(".")]
        folders = [path for path in entries if path.is_dir()]
        has_images = any(path.suffix.lower() in _IMAGES for path in entries)
        if has_images or (entries and folders == entries):
            classes = [path for path in listed if path.is_dir()]  # of any name, like ImageFolder
            return _read_images(files, [] if has_images else classes)
        files.paths = [path for path in entries if path not in folders]
        if folders and files.paths:
            raise FormatError(
                f"{source}: expected files alone, or folders of images alone, got the folder {folders[0].name!r:.80} "
                f"beside {files.paths[0].name!r:.80}. Move one away, or name the files"
            )
    for path in files.paths:
        path.stat()  # raises the error for a missing file
    kinds = {path.suffix.lower(): path.name for path in reversed(files.paths)}
    read = _READERS.get(next(iter(kinds))) if len(kinds) == 1 else None
    if read is None:
        got = ", ".join(f"{name!r:.80}" for name in sorted(kinds.values())) or "none"
        raise FormatError(
            f"{source}: expected images, or files that all end with one of {', '.join(_READERS)}, got {got:.200}. "
            "Name files of one of these kinds, or import a table, such as that of pandas.read_csv"
        )
    return read(files)


def _read_images(files: _Files, classes: list[Path]) -> Iterator[Batch]:
    """Read the samples of torchvision's ImageFolder, in its order, or without labels if there are no classes."""
    folder = files.current
    images: list[tuple[int, Path]] = []
    for label, path in enumerate(classes or [folder]):
        count = len(images)
        for root, names in sorted(_walk_links(path)):
            images += [(label, Path(root, name)) for name in sorted(names) if Path(name).suffix.lower() in _IMAGES]
        if len(images) == count:
            raise FormatError(f"{path}: expected images of this class, got none. Remove the folder")
    for label, path in images:
        files.current = path
        with io.BufferedReader(open_regular(path)) as file:
            batch = {"image": [file.read()], "path": [str(path.relative_to(folder))]}
        yield {**batch, "label": [label]} if classes else batch


def _walk_links(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Return folders and the names in them; follow links like ImageFolder, and refuse a link that leads to itself."""
    status = folder.stat()
    above += ((status.st_dev, status.st_ino),)
    if above[-1] in above[:-1]:
        raise FormatError(f"{folder}: expected a folder of images, got a link to one that it is in. Remove the link")
    with os.scandir(folder) as iterator:  # knows folders without a `stat` for each of millions of images
        entries = list(iterator)
    yield str(folder), [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir():
            yield from _walk_links(Path(entry), above)


def _read_lines(
    files: _Files, parse: Callable[[list[Line]], Batch], keep: Callable[[bytes], object] = lambda _: True
) -> Iterator[Batch]:
    """Parse batches of lines of one file at a time, limited in lines and bytes."""
    numbered = ((line, path, number) for path in files for number, line in enumerate(_lines_of(path), 1) if keep(line))
    for path, lines in groupby(numbered, itemgetter(1)):
        while batch := _take_lines(lines):
            files.current = path
            yield parse(batch)


def _lines_of(path: Path) -> Iterator[bytes]:
    """Return the lines of a file without their ends."""
    with io.BufferedReader(open_regular(path)) as file:
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _take_lines(lines: Iterator[Line]) -> list[Line]:
    taken: list[Line] = []
    size = 0
    for line in islice(lines, _LINES):
        taken.append(line)
        size += len(line[0])
        if size >= _BATCH_SIZE:
            break
    return taken


def _read_archives(files: _Files) -> Iterator[Batch]:
    samples = (sample for path in files for sample in _samples_of(path))
    return ({name: [value] for name, value in sample.items()} for sample in samples)


def _samples_of(path: Path) -> Iterator[dict[str, Any]]:
    """Return the samples of a WebDataset archive: consecutive files with one key."""
    sample: dict[str, Any] = {}
    with io.BufferedReader(open_regular(path)) as file:
        for name, content in _members_of(file, path):
            match = _MEMBER.fullmatch(name)
            if match is None:
                raise FormatError(f"{path}: {name!r:.80}: expected a name of a key, a dot and an ending. Remove it")
            key, ending = match[1], match[2].lower()
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            if ending in sample:
                raise FormatError(
                    f"{path}: {name!r:.80}: expected each file of a sample once, got it twice. Remove one"
                )
            sample["__key__"] = key
            try:
                sample[ending] = int(content) if ending == "cls" else content
            except ValueError:
                raise FormatError(
                    f"{path}: {name!r:.80}: expected the number of a class, got {len(content)} other bytes"
                ) from None
    if sample:
        yield sample


def _members_of(file: IO[bytes], path: Path) -> Iterator[tuple[str, bytes]]:
    """Return the names and contents of the regular files of a tar archive that is not compressed."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would grow with the archive
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse() or member.offset_data + member.size > size:
                    raise FormatError(
                        f"{path}: {member.name!r:.80}: expected a regular file, whole and not sparse. Pack "
                        "the archive again, of such files"
                    )
                opened = archive.extractfile(member)
                assert opened is not None
                yield member.name, opened.read()
            # tarfile takes an invalid header for the end.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise FormatError(
                    f"{path}: expected the end of the archive at byte {archive.offset}; it was cut short. Get it again"
                )
    except (tarfile.TarError, EOFError, ArithmeticError, UnicodeError, RecursionError) as error:
        raise FormatError(f"{path} is no tar archive that can be read: {error!s:.200}") from None


_READERS: dict[str, Callable[[_Files], Iterator[Batch]]] = {
    ".txt": lambda files: _read_lines(files, lambda lines: {"text": [line for line, _, _ in lines]}),
    ".jsonl": lambda files: _read_lines(files, JsonColumns().parse, bytes.strip),
    ".tar": _read_archives,
    ".parquet": tables.read_files,
    ".arrow": tables.read_files,
    ".feather": tables.read_files,
}
