"""Standard input and output in the place of files."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import typer

from fastrack._cli.errors import refuse_options
from fastrack._cli.files import as_location, is_stream
from fastrack._files.reader import SealedFile
from fastrack._sealed.file_header import parse_header
from fastrack._sealed.storage import HEADER_LIMIT, HEADER_PREFIX
from fastrack._sets.anchor import Anchor
from fastrack._sets.load_file import load_file
from fastrack.errors import FastrackError, FormatError

_NAME = "standard input"


def require_one_stream(*paths: object) -> None:
    """Refuse to read standard input twice."""
    if sum(map(is_stream, paths)) > 1:
        raise typer.BadParameter("expected standard input once, got it as a key too. Put the key into a file")


def require_files(*paths: object, is_dry: bool) -> None:
    """Refuse a dry run with a stream, which can be read once and is written as it is read."""
    is_wrong = is_dry and any(map(is_stream, paths))
    refuse_options({"--dry-run": is_wrong}, "expected files, got standard input or output")


def standard_output() -> IO[bytes]:
    """Return standard output for bytes, or refuse it if it is a terminal."""
    refuse_options({"TARGET": sys.stdout.isatty()}, "expected a pipe or a file as standard output, got a terminal")
    return sys.stdout.buffer


@contextmanager
def open_sealed(path: Path, *, file_id: str | None = None, anchor: Anchor | Path | None = None) -> Iterator[SealedFile]:
    """Open a sealed file. Standard input is first copied into an unnamed file, still sealed."""
    if not is_stream(path):
        with load_file(as_location(path), file_id=file_id, anchor=anchor) as file:
            yield file
        return
    refuse_options({"--anchor": anchor is not None}, "expected a file, which the manifest lists by its name, got -")
    with tempfile.TemporaryFile() as copy:
        copy.write(_read_sealed_header(sys.stdin.buffer))
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        name = f"/proc/self/fd/{copy.fileno()}"
        try:
            file = load_file(name, file_id=file_id)
        except FastrackError as error:
            error.path = None
            error.args = (str(error).replace(name, _NAME),)
            raise
    file.path = Path(_NAME)
    with file:
        yield file


def _read_sealed_header(stream: IO[bytes]) -> bytes:
    """Return the header of a sealed file. Refuse any other file: plaintext is not copied to a disk."""
    prefix = stream.read(HEADER_PREFIX)
    head = prefix + stream.read(min(int.from_bytes(prefix, "little"), HEADER_LIMIT))
    metadata, _ = parse_header(head, None, Path(_NAME))
    if "fastrack.version" not in metadata:
        raise FormatError(f"{_NAME}: expected sealed tensors, got none; plaintext is not copied to a disk. Name a file")
    return head
