"""Write objects to servers in parts. An object has its name when it is complete."""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

from fastrack._net.retries import TransientError
from fastrack._remote.filesystem import S3, call_store, find_store, renewing
from fastrack._remote.objects import error_code
from fastrack._util.fork import register_fork_reset
from fastrack._util.locations import Url, require_bare
from fastrack._util.trial import end_dry_run

_PART = 16 << 20  # bytes, at least
_PARTS = 9000  # of an object; stores allow 10,000
_CONDITIONAL = {"s3", "gs", "az", "abfs"}  # S3's If-None-Match, a generation of 0, and Azure's If-None-Match


@contextlib.contextmanager
def new_object(url: Url, size: int, *, overwrite: bool = True) -> Iterator[BinaryIO]:
    """Open an object of `size` bytes for writing. It is completed if the block succeeds; otherwise nothing is left.

    If parts are left nevertheless, a note of the error says how to remove them. Without `overwrite` an existing object
    is kept, even one that appears during the write if the store can refuse to replace it.
    """
    store, path = _find_writable(url)
    if not overwrite and _call(url, store, "exists", path):
        raise FileExistsError(errno.EEXIST, "exists and was left as it was; choose another name", str(url))
    end_dry_run(size)
    # A small object of S3 is one request, which is the only one that is conditional in many other servers of S3.
    options = {"autocommit": url.scheme in S3 and size < _PART, "block_size": max(_PART, -(-size // _PARTS))}
    out = _call(url, store, "open", path, "wb" if overwrite else _new_mode(store), **options)
    if url.scheme in S3 and hasattr(out, "_call_s3"):  # each request of s3fs
        out._call_s3 = partial(renewing, url, store, out._call_s3)  # noqa: SLF001
    writer = _Writer(out, url)
    try:
        yield writer  # type: ignore[misc]
        writer.complete()
    except BaseException as error:
        if not writer.is_of_parent:
            _discard(out, url, error)
        raise
    finally:
        with contextlib.suppress(ValueError, AttributeError):
            store.transaction.files.remove(out)


def list_names(folder: Url) -> list[str]:
    """Return the names of the objects below a folder of a store, such as ``a/b``. A folder without any has none."""
    store, path = _find_writable(folder)
    prefix = f"{path.rstrip('/')}/"
    found = _call(folder, store, "find", path)
    store.invalidate_cache()  # gcsfs would not find what other processes add later
    return sorted(name.removeprefix(prefix) for name in found if name.startswith(prefix) and not name.endswith("/"))


def remove_object(url: Url) -> None:
    """Remove an object."""
    store, path = _find_writable(url)
    _call(url, store, "rm_file", path)


def has_object(url: Url) -> bool:
    """Return True if there is an object."""
    store, path = _find_writable(url)
    return bool(_call(url, store, "exists", path))


def list_uploads(folder: Url, names: re.Pattern[str]) -> Iterator[tuple[str, str, str]]:
    """Return bucket, key and id of each upload of an object that was begun and has not ended.

    S3 keeps the parts of one whose process was killed, without an end. Other stores remove them themselves.
    """
    if folder.scheme in S3:
        store, path = _find_writable(folder)
        bucket, key, _ = store.split_path(path)
        prefix = f"{key.rstrip('/')}/" if key else ""
        markers: dict[str, str] = {}
        while True:
            page = _call(folder, store, "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **markers)
            for upload in page.get("Uploads", ()):
                if names.fullmatch(upload["Key"].removeprefix(prefix)):
                    yield bucket, upload["Key"], upload["UploadId"]
            before, markers = markers, {name: page.get(f"Next{name}", "") for name in ("KeyMarker", "UploadIdMarker")}
            if not page.get("IsTruncated") or markers == before:
                return


def remove_uploads(folder: Url, uploads: Iterable[tuple[str, str, str]]) -> None:
    """Remove the parts of uploads of `list_uploads`."""
    store, _ = _find_writable(folder)
    for upload in uploads:
        with contextlib.suppress(OSError):  # it has ended
            _call(folder, store, "abort_mpu", *upload)


def _find_writable(url: Url) -> tuple[Any, str]:
    if url.scheme in {"http", "https"}:
        raise OSError(errno.EROFS, "HTTP servers are read only; give the URL of a store, such as s3://", str(url))
    require_bare(url)
    store, path = find_store(url)
    store.invalidate_cache()  # of names, which other processes have added and removed since
    return store, path


def _new_mode(store: Any) -> str:
    """Return the mode in which a store makes an object that is new, by a condition of the request that completes it."""
    protocols = {store.protocol} if isinstance(store.protocol, str) else {*store.protocol}
    return "xb" if protocols & _CONDITIONAL else "wb"


class _Writer:
    """A file of fsspec, whose errors name the URL. In a forked child the upload stays the parent's."""

    def __init__(self, out: Any, url: Url) -> None:
        self._out = out
        self._url = url
        self._head = b""  # what was written first
        self._size = 0
        self.is_of_parent = False
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        with contextlib.suppress(AttributeError):
            self._out.closed = True  # or its destructor would complete the object, or wait for the parent's threads
        self.is_of_parent = True

    def write(self, data: Any) -> int:
        self._require_own()
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self._head = self._head or bytes(view)
        self._size += len(view)
        return int(_call(self._url, self._out, "write", view))

    def complete(self) -> None:
        self._require_own()
        try:
            _call(self._url, self._out, "close")  # uploads the last part
            if not getattr(self._out, "autocommit", False):
                _call(self._url, self._out, "commit")
        except FileExistsError:
            if not self._is_stored():
                raise

    def _is_stored(self) -> bool:
        """Return True if the object that exists is this one: the answer was lost, and the request repeated.

        A sealed file begins with its header, which is written at once and has the id that was drawn for this file.
        """
        with contextlib.suppress(OSError):
            store, path = _find_writable(self._url)
            if _call(self._url, store, "info", path)["size"] == self._size:
                head = _call(self._url, store, "cat_file", path, start=0, end=len(self._head)) if self._head else b""
                return bytes(head) == self._head
        return False

    def _require_own(self) -> None:
        if self.is_of_parent:
            advice = "the process that began this upload has forked, and only it goes on. Write from that process"
            raise OSError(errno.EPERM, advice, str(self._url))

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
            bucket, _, key = str(url).partition("://")[2].partition("/")
            options = f"--bucket {shlex.quote(bucket)} --key {shlex.quote(key)}"
            command = f"aws s3api abort-multipart-upload {options} --upload-id {shlex.quote(str(upload))}"
            advice = f"Remove the parts of upload {upload}: {command}"
        error.add_note(
            f"{url}: what was sent of it could not be removed: {error_code(failure)}. It is kept, and may be charged "
            f"for. {advice}"
        )
    with contextlib.suppress(AttributeError):
        out.closed = True  # or its destructor would complete the object


def _call(url: Url, owner: Any, operation: str, *args: Any, **options: Any) -> Any:
    """Call an operation of a store or its file, whose errors may hold secrets."""
    try:
        return call_store(url, owner, operation, *args, **options)
    except TransientError as error:
        failure = f"writing failed: {error}; check the connection and the server, and try again"
    raise OSError(errno.EIO, failure, str(url))
