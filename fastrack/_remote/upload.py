"""Write objects to servers in parts. An object has its name when it is complete."""

from __future__ import annotations

import contextlib
import errno
import shlex
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fastrack._remote.filesystem import find_store
from fastrack._remote.objects import error_code
from fastrack._util.locations import Url

_PART = 16 << 20  # bytes, at least
_PARTS = 9000  # of an object; stores allow 10,000


@contextlib.contextmanager
def new_object(url: Url, size: int, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open an object of `size` bytes for writing. It is completed if the block succeeds; otherwise nothing is left.

    If parts are left nevertheless, a note of the error says how to remove them. Without `overwrite` an existing object
    is kept, unless it appears during the write.
    """
    if url.scheme in {"http", "https"}:
        raise OSError(errno.EROFS, "HTTP servers are read only; give the URL of a store, such as s3://", str(url))
    store, path = find_store(url)
    if not overwrite and _call(url, store.exists, path):
        raise _exists(url)
    out = _call(url, store.open, path, "wb", autocommit=False, block_size=max(_PART, -(-size // _PARTS)))
    try:
        writer: Any = _Writer(out, url)
        yield writer
        _call(url, out.close)  # uploads the last part
        _call(url, out.commit)
    except BaseException as error:
        _discard(out, url, error)
        raise
    finally:
        with contextlib.suppress(ValueError, AttributeError):
            store.transaction.files.remove(out)


class _Writer:
    """A file of fsspec, whose errors name the URL."""

    def __init__(self, out: Any, url: Url) -> None:
        self._out = out
        self._url = url

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        return int(_call(self._url, self._out.write, view))

    def flush(self) -> None:
        """Do nothing: a part is sent once it is full."""


def _discard(out: Any, url: Url, error: BaseException) -> None:
    """Remove the sent parts of an incomplete object, or add a note on their removal to the error."""
    upload = (getattr(out, "mpu", None) or {}).get("UploadId")
    try:
        out.discard()
    except Exception as failure:  # noqa: BLE001 - of any package
        advice = "Remove unfinished uploads of that name with the tools of the store"
        if upload is not None:
            options = f"--bucket {shlex.quote(str(out.bucket))} --key {shlex.quote(str(out.key))}"
            command = f"aws s3api abort-multipart-upload {options} --upload-id {shlex.quote(str(upload))}"
            advice = f"Remove the parts of upload {upload}: {command}"
        error.add_note(
            f"{url}: what was sent of it could not be removed: {error_code(failure)}. It is kept, and may be charged "
            f"for. {advice}"
        )
    with contextlib.suppress(AttributeError):
        out.closed = True  # or its destructor would complete the object


def _call(url: Url, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of fsspec, whose errors may hold secrets."""
    failure: OSError
    try:
        return function(*args, **options)
    except FileExistsError:
        failure = _exists(url)
    except PermissionError:
        failure = PermissionError(errno.EACCES, "the server refuses to write; check the credentials", str(url))
    except FileNotFoundError:
        failure = FileNotFoundError(errno.ENOENT, "the server has no such bucket or folder; make it", str(url))
    except Exception as error:  # noqa: BLE001 - of any package
        failure = OSError(errno.EIO, f"writing failed: {error_code(error)}. Try again", str(url))
    raise failure


def _exists(url: Url) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "exists and was left as it was. Choose another name", str(url))
