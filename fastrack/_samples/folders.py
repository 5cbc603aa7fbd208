"""Folders of files that are one sample each: images and arrays of NumPy, alone or by class."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._files.importers import read_array_header, refuse_malformed
from fastrack._samples.blocks import LABEL, PATH, Block
from fastrack._tensors import dtypes
from fastrack._util.locations import Location
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

_IMAGES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}  # as torchvision's ImageFolder
_ARRAYS = {".npy"}
_NOTES = re.compile(r"_[^.]*|dataset_info\.json|state\.json")  # of Spark and PyArrow, or of the library datasets
_NO_SAMPLE = "no image or .npy file"

# The first bytes of images, whatever their suffix says: JPEG, PNG, Netpbm, BMP, TIFF, WebP, GIF, AVIF, JPEG 2000.
_IMAGE_STARTS = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|P[1-7][\s#]|BM|II[*+]\0|MM\0[*+]|RIFF....WEBP|GIF8|....ftyp|\0\0\0\x0cjP  ",
    re.DOTALL,
)


@dataclass
class Listing:
    """The files of a folder that are read; the number of the class of each, if there are classes; and the others."""

    paths: list[Path]
    labels: list[int] | None = None
    skipped: list[tuple[Path, str]] = field(default_factory=list)


def list_folder(folder: Path, target: Location | None) -> Listing:
    """List a folder of images, of arrays, of such folders by class, or of other files. Leave out the folder `target`.

    Images and arrays are in the order of torchvision's ``ImageFolder``, and other files beside them are left out. Of
    tables and text, no file is passed over but what their writers note of them.
    """
    here = target.resolve() if isinstance(target, Path) else None
    listed = sorted(path for path in folder.iterdir() if not (path.is_dir() and path.resolve() == here))
    entries = [path for path in listed if not path.name.startswith(".")]
    inner = [path for path in entries if path.is_dir()]
    files = [path for path in entries if path not in inner]
    samples = list(filter(is_one_sample, files))
    notes = [] if samples else [path for path in files if _NOTES.fullmatch(path.name)]
    skipped = [(path, "hidden") for path in listed if path not in entries] + [(path, "no samples") for path in notes]
    files = [path for path in files if path not in notes]
    has_classes = any(
        is_one_sample(Path(name)) for each in inner for _, names in _walk_links(each, here) for name in names
    )
    beside = samples if has_classes else [] if samples else files
    if inner and beside:  # neither the labels nor a file may be lost without a word
        raise FormatError(
            f"{folder}: expected only files, or only folders of images, got the folder {inner[0].name!r:.80} beside "
            f"{beside[0].name!r:.80}. Move one away, or name the files or one folder"
        )
    if samples or inner:
        # Classes have any name, like those of ImageFolder.
        listing = _list_samples(folder, [] if samples else [path for path in listed if path.is_dir()], here)
        listing.skipped += [] if samples else [(path, _NO_SAMPLE) for path in (*notes, *files)]
        return listing
    return Listing(files, skipped=skipped)


def is_one_sample(path: Path) -> bool:
    """Return whether a file is an image or an array, by its suffix."""
    return path.suffix.lower() in _IMAGES | _ARRAYS


def read_files(paths: Iterable[Path], names: Iterable[str], labels: list[int] | None) -> Iterator[Mapping[str, Any]]:
    """Return the batches of images or of arrays, of one sample each. `names` are their values of the column "path"."""
    kinds = {path.suffix.lower() in _ARRAYS: path for path in paths}
    if len(kinds) > 1:
        raise FormatError(
            f"{kinds[True]}: expected only images or only .npy files, got both. Import them into folders of their own"
        )
    read = _read_arrays if True in kinds else _read_images
    for number, (name, columns) in enumerate(zip(names, read(paths), strict=True)):
        yield {**columns, PATH: [name]} | ({} if labels is None else {LABEL: [labels[number]]})


def _list_samples(folder: Path, classes: list[Path], target: Path | None) -> Listing:
    """List images and arrays as `ImageFolder` does, or without labels if there are no classes."""
    labels: list[int] = []
    listing = Listing([])
    for label, path in enumerate(classes or [folder]):
        for root, names in sorted(_walk_links(path, target)):
            for each in (Path(root, name) for name in sorted(names)):
                if is_one_sample(each):
                    listing.paths.append(each)
                    labels.append(label)
                else:
                    listing.skipped.append((each, _NO_SAMPLE))
        if labels[-1:] != [label]:
            advice = "Remove the folder, or name the files"
            if "=" in path.name:  # as Spark and PyArrow partition a table
                advice = f"Of tables, give pyarrow.dataset.dataset({str(folder)!r}, partitioning='hive') in Python"
            raise FormatError(f"{path}: expected images or .npy files of this class, got none. {advice}")
    listing.labels = labels if classes else None
    return listing


def _walk_links(
    folder: Path, target: Path | None, above: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Return folders and the names in them; follow links like ImageFolder, and refuse a link that leads to itself."""
    status = folder.stat()
    above += ((status.st_dev, status.st_ino),)
    if above[-1] in above[:-1]:
        raise FormatError(f"{folder}: expected a folder of images, got a link to one that it is in. Remove the link")
    with os.scandir(folder) as iterator:  # knows folders without a `stat` for each of millions of images
        entries = list(iterator)
    yield str(folder), [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir() and (target is None or Path(entry).resolve() != target):
            yield from _walk_links(Path(entry), target, above)


def _read_images(paths: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    for path in paths:
        with io.BufferedReader(open_regular(path)) as file:
            content = file.read()
        if not _IMAGE_STARTS.match(content):
            got = f"{len(content)} bytes that begin otherwise" if content else "an empty file"
            raise FormatError(f"{path}: expected an image, got {got}. Remove the file, or get it again")
        yield {"image": [content]}


def _read_arrays(paths: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """Read arrays of one dtype and shape, or of one dimension and any length."""
    first: tuple[str, tuple[int, ...]] | None = None
    are_records = False
    for path in paths:
        dtype, shape = _open_array(path)[:2]
        first = first or (dtype, shape)
        are_records = are_records or (len(shape) == 1 and shape != first[1])
        if dtype != first[0] or len(shape) != len(first[1]) or (shape != first[1] and len(shape) != 1):
            raise FormatError(
                f"{path}: expected {first[0]} {list(first[1])}, as in the first file, got {dtype} {list(shape)}. Give "
                "all arrays one dtype and shape, or one dimension"
            )
    for path in paths:
        yield {"array": Block.of([_open_array(path)[2]()], are_records=are_records)}


def _open_array(path: Path) -> tuple[str, tuple[int, ...], Any]:
    """Return the dtype and shape of an .npy file, and a function that reads the array."""
    with open_regular(path) as file, refuse_malformed(path):
        dtype, shape, order = read_array_header(file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        name = dtypes.from_numpy(dtype)
        if start + dtypes.nbytes(name, shape) != size:
            raise ValueError("it is not as long as its header says")

    def read() -> Any:
        with io.BufferedReader(open_regular(path)) as file, refuse_malformed(path):
            file.seek(start)
            return np.ndarray(shape, dtype, file.read(size - start), order=order)

    return name, shape, read
