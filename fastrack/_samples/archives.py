"""Tar archives, as of WebDataset."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

_CLASS = re.compile(rb"\s*-?[0-9]+\s*")
_CLASS_LIMIT = 100  # bytes
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)


def read_files(paths: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    """Return the samples of archives, each as a batch of one."""
    samples = (sample for path in paths for sample in _samples_of(path))
    return ({name: [value] for name, value in sample.items()} for sample in samples)


def _samples_of(path: Path) -> Iterator[dict[str, Any]]:
    """Return the samples of a WebDataset archive: consecutive files with one key."""
    sample: dict[str, Any] = {}
    with io.BufferedReader(open_regular(path)) as file:
        for name, content in _members_of(file, path):
            match = _MEMBER.fullmatch(name)
            if match is None or match[2].lower() == "__key__":
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
            if ending == "cls" and (len(content) > _CLASS_LIMIT or not _CLASS.fullmatch(content)):
                raise FormatError(
                    f"{path}: {name!r:.80}: expected the number of a class, got {len(content)} other bytes. Fix it"
                )
            sample[ending] = int(content) if ending == "cls" else content
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
