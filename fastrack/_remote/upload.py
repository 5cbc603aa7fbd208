"""Write objects to servers in parts. An object has its name when it is complete."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any, BinaryIO

from fastrack._remote.filesystem import find_store
from fastrack._util.locations import Url

_PART = 16 << 20  # bytes, at least
_PARTS = 9000  # of an object; stores allow 10,000


@contextlib.contextmanager
def new_object(url: Url, size: int, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open an object of `size` bytes for writing. It is completed when the block ends well, and else nothing is left.

    Without `overwrite` an existing object is kept, unless it appears meanwhile.
    """
    if url.scheme in {"http", "https"}:
        raise OSError(errno.EROFS, "HTTP servers are read only; give the URL of a store, such as s3://", str(url))
    store, path = find_store(url)
    with _explained(url):
        if not overwrite and store.exists(path):
            raise FileExistsError(errno.EEXIST, "exists and was left as it was. Choose another name", str(url))
        out = store.open(path, "wb", autocommit=False, block_size=max(_PART, -(-size // _PARTS)))
    try:
        writer: Any = _Writer(out, url)
        yield writer
        with _explained(url):
            out.close()  # which uploads the last part
            out.commit()
    except BaseException:
        with contextlib.suppress(Exception):
            out.discard()
        out.closed = True  # or its destructor would complete the object
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
        with _explained(self._url):
            return int(self._out.write(view))

    def flush(self) -> None:
        """Do nothing: parts are sent as they are filled."""


@contextlib.contextmanager
def _explained(url: Url) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except PermissionError:
        raise PermissionError(errno.EACCES, "the server refuses to write; check the credentials", str(url)) from None
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "the server has no such bucket or folder; make it", str(url)) from None
    except Exception as error:
        message = f"writing failed, and nothing was left of it: {type(error).__name__}: {error!s:.200}. Try again"
        raise OSError(errno.EIO, message, str(url)) from error
