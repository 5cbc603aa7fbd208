"""`import_samples`: samples of image folders, text, JSON lines, tar archives and tables, sealed into shards."""

from __future__ import annotations

import errno
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

from fastrack._crypto.keyring import KeyLike
from fastrack._sealed import tables
from fastrack._sealed.json_lines import JsonColumns
from fastrack._sealed.sample_blocks import skip_samples
from fastrack._sealed.sample_writer import SealedWriter
from fastrack._util.locations import locate_local
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

Batch = Mapping[str, Any]
Line = TypeVar("Line", tuple[bytes], tuple[bytes, Path, int])

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
          such, and what else there is as JSON.
        - ``.tar``, as of WebDataset: a column for each ending of the files with one name, and "__key__". "cls" is a
          number, all others are bytes.
        - ``.parquet``, ``.arrow`` and ``.feather``, with PyArrow: a column for each of theirs. Numbers stay as they
          are, dates become the integers that Arrow stores, text, bytes and lists of numbers are records.
        - A folder of files of one of these kinds, in the order of their names, or several such files.
        - A ``pyarrow.Table`` or ``RecordBatchReader``, a ``pandas.DataFrame`` or a ``datasets.Dataset``, as a Parquet
          file, or an iterable of samples, as `SealedWriter.write` takes them.
    folder : path
        As for `SealedWriter`.
    key : KeyLike, optional
        The owner's key, as `seal` takes it.
    shard_size : int
        As for `SealedWriter`.
    resume : bool
        Continue in a folder that has shards: skip as many samples of the source as these hold. The source has to be as
        it was when the earlier run read it.
    progress : callable, optional
        Called with the number of samples read since the previous call.

    Returns
    -------
    int
        Number of samples in the folder.

    Raises
    ------
    FileExistsError
        If the folder has shards, and `resume` is False.
    FormatError
        If a file is malformed, of no such kind, or has values that cannot be stored, such as nulls.
    ImportError
        If PyArrow is needed and not installed.
    TypeError, ValueError, OSError, AuthenticationError
        As from `SealedWriter`.

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
    with SealedWriter(folder, key, shard_size=shard_size) as writer:
        skip = writer.stored
        if skip and not resume:
            advice = f"has {skip} samples already. Choose another folder, or resume the run that wrote them (resume=)"
            raise FileExistsError(errno.EEXIST, advice, os.fspath(folder))
        paths = _paths_of(source)
        batches = _open_object(source, skip) if paths is None else _open_files(paths, skip)
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    break
                writer.write_batch(batch)
            except (TypeError, ValueError) as error:
                if paths is None or isinstance(error, FormatError):
                    raise
                raise FormatError(f"{os.fspath(paths[0])}: {error}") from None
            if progress is not None:
                progress(len(next(iter(batch.values()))))
    return writer.stored


def _paths_of(source: Any) -> list[Path] | None:
    """Return the paths that a source is, or None for an object."""
    if isinstance(source, (str, os.PathLike)):
        return [locate_local(source)]
    if isinstance(source, Sequence) and source and all(isinstance(each, (str, os.PathLike)) for each in source):
        return [locate_local(each) for each in source]
    return None


def _open_object(source: Any, skip: int) -> Iterator[Batch]:
    batches = tables.open_table(source)
    if batches is not None:
        is_dataset = type(source).__module__.partition(".")[0] == "datasets"
        return tables.read_batches(batches, skip, follow_paths=is_dataset)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise TypeError(
            f"import_samples: expected paths, a table or an iterable of samples, got {type(source).__name__}. Give "
            "such an object, or write samples with a SealedWriter"
        )
    return ({name: [value] for name, value in sample.items()} for sample in skip_samples(source, skip))


def _open_files(paths: list[Path], skip: int) -> Iterator[Batch]:
    place = paths[0]
    if len(paths) == 1 and place.is_dir():
        entries = sorted(path for path in place.iterdir() if not path.name.startswith("."))
        has_images = any(path.suffix.lower() in _IMAGES for path in entries)
        if has_images or (entries and all(path.is_dir() for path in entries)):
            return _read_images(place, skip, has_classes=not has_images)
        paths = [path for path in entries if path.is_file()]
    kinds = sorted({path.suffix.lower() for path in paths})
    read = _READERS.get(kinds[0]) if len(kinds) == 1 else None
    if read is None:
        raise FormatError(
            f"{place}: expected images, or files that all end with one of {', '.join(_READERS)}, got {kinds!s:.200}. "
            "Name files of one of these kinds"
        )
    return read(paths, skip)


def _read_images(folder: Path, skip: int, *, has_classes: bool) -> Iterator[Batch]:
    """Read the samples of torchvision's ImageFolder, in its order, or without labels if there are no classes."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir()) if has_classes else [""]
    found: list[tuple[int, Path]] = []
    for label, name in enumerate(classes):
        count = len(found)
        for root, _, files in sorted(os.walk(folder / name, followlinks=True)):
            found += [(label, Path(root, file)) for file in sorted(files) if Path(file).suffix.lower() in _IMAGES]
        if len(found) == count:
            raise FormatError(f"{folder / name}: expected images of this class, got none. Remove the folder")
    for label, path in skip_samples(found, skip):
        with io.BufferedReader(open_regular(path)) as file:
            batch = {"image": [file.read()], "path": [str(path.relative_to(folder))]}
        yield {**batch, "label": [label]} if has_classes else batch


def _read_text(paths: list[Path], skip: int) -> Iterator[Batch]:
    lines = skip_samples(((line,) for path in paths for line in _lines_of(path)), skip)
    while batch := _take_lines(lines):
        yield {"text": [line for (line,) in batch]}


def _read_json(paths: list[Path], skip: int) -> Iterator[Batch]:
    numbered = ((line, path, number) for path in paths for number, line in enumerate(_lines_of(path), 1))
    lines = skip_samples(((line, path, number) for line, path, number in numbered if line.strip()), skip)
    columns = JsonColumns()
    while batch := _take_lines(lines):
        yield columns.parse(batch)


def _lines_of(path: Path) -> Iterator[bytes]:
    """Return the lines of a file without their ends."""
    with io.BufferedReader(open_regular(path)) as file:
        for line in file:
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def _take_lines(lines: Iterator[Line]) -> list[Line]:
    """Return the next lines, each first in a tuple: a limited number of them, and of bytes."""
    taken: list[Line] = []
    size = 0
    for line in islice(lines, _LINES):
        taken.append(line)
        size += len(line[0])
        if size >= _BATCH_SIZE:
            break
    return taken


def _read_archives(paths: list[Path], skip: int) -> Iterator[Batch]:
    samples = (sample for path in paths for sample in _samples_of(path))
    return ({name: [value] for name, value in sample.items()} for sample in skip_samples(samples, skip))


def _samples_of(path: Path) -> Iterator[dict[str, Any]]:
    """Return the samples of a tar archive as WebDataset writes it: files that follow each other and have one key."""
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
                    raise FormatError(f"{path}: {member.name!r:.80}: expected a regular file, whole and not sparse")
                opened = archive.extractfile(member)
                assert opened is not None
                yield member.name, opened.read()
            # tarfile takes an invalid header for the end.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise FormatError(f"{path}: expected the end of the archive at byte {archive.offset}; it was cut short")
    except (tarfile.TarError, EOFError, ArithmeticError, UnicodeError) as error:
        raise FormatError(f"{path} is no tar archive that can be read: {error!s:.200}") from None


_READERS: dict[str, Callable[[list[Path], int], Iterator[Batch]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json,
    ".tar": _read_archives,
    ".parquet": tables.read_files,
    ".arrow": tables.read_files,
    ".feather": tables.read_files,
}
