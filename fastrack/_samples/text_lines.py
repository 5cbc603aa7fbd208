"""Files of text: UTF-8 with or without a byte-order mark, and UTF-16 with one."""

from __future__ import annotations

import codecs
import io
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

Line = tuple[bytes, Path, int]
"""A line of a file, and its number there."""

_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
MARKS = tuple(mark for mark, _ in _MARKS)
"""Byte-order marks, with which no text begins."""
_ITEMS = 1024  # of a batch, at most
_BATCH_SIZE = 8 << 20  # bytes of a batch, but for its last item
_Item = TypeVar("_Item")
_NUL = "expected text, got a NUL byte. Save the file as text in UTF-8, or leave it out"


def lines_of(path: Path) -> Iterator[bytes]:
    """Return the lines of a file in UTF-8, without their ends and without a byte-order mark."""
    with io.BufferedReader(open_regular(path)) as file:
        encoding, lines = skip_mark(file), iter(file)
        if encoding != "utf-8":
            lines = map(str.encode, io.TextIOWrapper(file, encoding, newline="\n"))
        with _refusing(path, encoding):
            for line in lines:
                yield line.removesuffix(b"\n").removesuffix(b"\r")


def read_lines(path: Path, *, keep_empty: bool = True) -> Iterator[list[Line]]:
    """Return batches of the lines of a file, limited in lines and bytes."""
    lines = ((line, path, number) for number, line in enumerate(lines_of(path), 1) if keep_empty or line.strip())
    while batch := take(lines, lambda line: len(line[0])):
        yield batch


def take(items: Iterator[_Item], size_of: Callable[[_Item], int]) -> list[_Item]:
    """Return the next items, limited in number and, but for the last one, in size."""
    taken: list[_Item] = []
    size = 0
    for item in islice(items, _ITEMS):
        taken.append(item)
        size += size_of(item)
        if size >= _BATCH_SIZE:
            break
    return taken


def require_text(lines: Sequence[Line]) -> list[bytes]:
    """Return the lines without their files and numbers; raise FormatError if one is no text in UTF-8."""
    content = [line for line, _, _ in lines]
    whole = b"\n".join(content)
    if not whole.isascii() or b"\0" in whole:
        for line, path, number in lines:
            if b"\0" in line:
                raise FormatError(f"{path}, line {number}: {_NUL}")
            try:
                line.decode()
            except UnicodeDecodeError:
                raise _not_encoded(path, number, "utf-8") from None
    return content


@contextmanager
def open_text(path: Path) -> Iterator[tuple[Iterator[str], Callable[[], int]]]:
    """Open a file as lines of text, with their ends. A function tells about how many bytes were read so far."""
    with io.BufferedReader(open_regular(path)) as file:
        encoding = skip_mark(file)
        with _refusing(path, encoding), io.TextIOWrapper(file, encoding, newline="") as lines:
            yield _without_nul(lines, path), file.tell


def skip_mark(file: IO[bytes]) -> str:
    """Return the encoding that the byte-order mark of a file tells, and leave the file after the mark."""
    start = file.read(len(codecs.BOM_UTF8))
    mark, encoding = next(((mark, name) for mark, name in _MARKS if start.startswith(mark)), (b"", "utf-8"))
    file.seek(len(mark))
    return encoding


def _without_nul(lines: Iterator[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise FormatError(f"{path}, line {number}: {_NUL}")
        yield line


@contextmanager
def _refusing(path: Path, encoding: str) -> Iterator[None]:
    """Raise FormatError with the number of the line in the place of an error of the decoder, which reads ahead."""
    try:
        yield
    except UnicodeDecodeError:
        raise _not_encoded(path, _line_of_fault(path, encoding), encoding) from None


def _line_of_fault(path: Path, encoding: str) -> int:
    decoder, number = codecs.getincrementaldecoder(encoding)(), 1
    with io.BufferedReader(open_regular(path)) as file:
        skip_mark(file)
        try:
            while content := file.read(1 << 20):
                number += decoder.decode(content).count("\n")
        except UnicodeDecodeError as error:
            number += error.object[: error.start].decode(encoding).count("\n")
    return number


def _not_encoded(path: Path, number: int, encoding: str) -> FormatError:
    return FormatError(
        f"{path}, line {number}: expected text in {encoding.upper()}, got other bytes. Convert the file to UTF-8: if "
        f"a program of Windows wrote it, by iconv -f windows-1252 -t utf-8 {shlex.quote(path.name)} > "
        f"{shlex.quote('utf8-' + path.name)}"
    )
