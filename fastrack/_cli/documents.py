"""Read and write the documents of an exchange: files, pipes and standard streams, one document on each line."""

import errno
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

from fastrack._cli.errors import refuse_options
from fastrack._cli.files import check_directory
from fastrack._util.atomic import new_file
from fastrack._util.locations import locate_local
from fastrack.errors import FormatError

_PERIOD = re.compile(r"(?P<count>\d{1,6})(?P<unit>[smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_LONGEST = timedelta(days=7)
_LONGEST_LINE = 400
_POLL = 0.1  # seconds


def read_document(path: str, limit: int) -> bytes:
    """Return the document in a file or pipe, or the next line of standard input for ``-``: at most `limit` bytes."""
    if path == "-":
        data = sys.stdin.buffer.readline(limit + 1)
    else:
        file_path = locate_local(path)
        if file_path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "expected a file, got a folder", path)
        with file_path.open("rb") as file:
            data = file.read(limit + 1)
    if not data or len(data) > limit:
        actual = f"more than {limit} bytes" if data else "the end of the input"
        raise FormatError(f"reading {path} failed: expected one document, got {actual}. Check its origin.")
    return data


def await_document(path: str, limit: int, period: timedelta) -> bytes:
    """Return the document in a file or pipe, and wait up to `period` for one that is not there yet, or not whole."""
    file_path = locate_local(path)
    end, found = time.monotonic() + period.total_seconds(), "none"
    while True:
        if file_path.is_file():
            with file_path.open("rb") as file:
                data = file.read(limit + 1)
            if len(data) > limit or _is_whole(data):
                break
            found = f"{len(data)} bytes of one that is not whole"
        elif file_path.exists():  # a pipe waits by itself, and a folder is refused
            break
        if time.monotonic() >= end:
            wanted = f"expected an answer within {period.total_seconds():.0f}s, got {found}"
            advice = "Start again with a new challenge, and copy the answer there while the command waits (--wait)."
            raise TimeoutError(f"waiting for {path} failed: {wanted}. {advice}")
        time.sleep(_POLL)
    return read_document(path, limit)


def _is_whole(data: bytes) -> bool:
    """Return whether a document of grants is not one that is still being copied: it has no other brace.

    An editor or a clipboard may have left it without its newline.
    """
    return data.endswith((b"\n", b"}"))


def check_document(path: str) -> None:
    """Refuse an existing file, which might be a key, and a path that cannot be written, before any work."""
    if path == "-":
        return
    check_directory(Path(path))
    if Path(path).exists() and not Path(path).is_fifo():
        raise FileExistsError(errno.EEXIST, "exists and is left as it was. Choose another name, or move it away", path)


def write_document(path: str, data: bytes) -> None:
    """Write a document into a new file, atomically, into a pipe, or on standard output for ``-``.

    A file that exists might be a key, and raises FileExistsError.
    """
    if path == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.is_fifo():
        target.write_bytes(data)
        return
    with new_file(target, mode=0o644, overwrite=False) as file:  # as a policy that others may write to is refused
        file.write(data)


def parse_period(text: str, option: str, *, longest: timedelta = _LONGEST) -> timedelta:
    """Return the period of an option, such as 90s, 5m or 12h: a second to seven days, or to `longest`."""
    match = _PERIOD.fullmatch(text)
    period = timedelta(0) if match is None else timedelta(**{_UNITS[match["unit"]]: int(match["count"])})
    is_other = not timedelta(0) < period <= longest
    refuse_options({option: is_other}, f"expected a period as 90s, 5m, 12h or {longest.days}d, got {text!r:.40}")
    return period


def require_line(text: str, option: str) -> None:
    """Raise BadParameter unless a text for a log is a line that people can read."""
    is_line = text.strip() and text.isprintable() and len(text) <= _LONGEST_LINE
    refuse_options({option: not is_line}, f"expected a line of up to {_LONGEST_LINE} characters, got another text")
