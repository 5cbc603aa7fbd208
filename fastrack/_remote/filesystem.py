"""Read objects of the stores that fsspec knows. Addresses and credentials come from fsspec and the stores."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

from fastrack._net.retries import TransientError
from fastrack._remote.codes import ENDED, explain, find_code
from fastrack._remote.objects import HEAD, RemoteObject, Sink, Version, changed, check_size, error_code, require_plain
from fastrack._remote.retries import retry
from fastrack._util.fork import per_process
from fastrack._util.locations import Url
from fastrack.errors import FormatError

_PIECE = 4 << 20
_SIGNED_FOR, _USED_FOR = 3600, 1800.0  # seconds of a signed URL, at most
_IN_FLIGHT = 60.0  # seconds that its credentials live longer than it is used
S3 = {"s3", "s3a"}  # whose signed URLs `HttpObject` reads: conditional, bounded, and with less work for each range
_INSTALL = "pip install 'fastrack-io[remote]'"
_renewal = per_process(sys.modules[__name__], "_renewal", threading.Lock)
_GENERATIONS = {"gs", "gcs"}  # whose requests can name the version
_VALIDATORS = ("generation", "ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "updated", "created")


def open_with_fsspec(url: Url) -> RemoteObject:
    """Open an object of any file system that fsspec knows."""
    store = _Store(url)
    if url.scheme in S3 and hasattr(store.found(), "config_kwargs"):  # s3fs, and no other that is registered for it
        options = dict(store.found().config_kwargs)
        if "signature_version" not in options:  # the older one, which botocore takes for URLs, many stores refuse
            store = _Store(url, config_kwargs={**options, "signature_version": "s3v4"})
        from fastrack._remote.http import HttpObject

        return HttpObject(url, store.sign)
    return _StoreObject(url, store)


class _Store:
    """The store of an object. In a forked child it is found again, as threads and connections are the parent's."""

    def __init__(self, url: Url, **options: Any) -> None:
        self._url, self._options = url, options
        self._found: Any = per_process(self, "_found", lambda: None)
        self._path = ""

    def found(self) -> Any:
        store = self._found
        if store is None:
            store, self._path = find_store(self._url, **self._options)
            self._found = store
        return store

    def call(self, operation: str, **options: Any) -> Any:
        """Call an operation of the store on the object."""
        return call_store(self._url, self.found(), operation, self._path, **options)

    def sign(self, ended: object) -> tuple[str, float, object]:
        """Sign a URL as `fastrack._remote.http.Sign`, for no longer than the credentials live."""
        store = self.found()
        _renew(store, ended)
        signed = self.call("sign", expiration=_SIGNED_FOR)  # which renews credentials that end soon
        signer = getattr(getattr(store, "_s3", None), "_request_signer", None)  # of botocore
        end = getattr(getattr(signer, "_credentials", None), "_expiry_time", None)
        seconds = (end - dt.datetime.now(dt.UTC)).total_seconds() if isinstance(end, dt.datetime) else float("inf")
        if seconds < _SIGNED_FOR:
            signed = self.call("sign", expiration=max(int(seconds), 1))
        return str(signed), min(_USED_FOR, seconds - _IN_FLIGHT), getattr(store, "session", None)


def call_store(url: Url, owner: Any, operation: str, *args: Any, **options: Any) -> Any:
    """Call an operation of a store or its file. Raise `TransientError` for a failure that may pass."""
    try:
        return renewing(url, owner, getattr(owner, operation), *args, **options)
    except Exception as error:  # noqa: BLE001 - of any package
        failure = explain(find_code(error), url) or TransientError(error_code(error))
    raise failure


def renewing(url: Url, store: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of a store, and again in a new session if credentials of S3 have ended: nothing was done then."""
    session = getattr(store, "session", None) if url.scheme in S3 else None
    try:
        return function(*args, **options)
    except Exception as error:
        if session is None or find_code(error) not in ENDED:
            raise
    _renew(store, session)
    return function(*args, **options)


def _renew(store: Any, ended: object) -> None:
    """Have s3fs read its credentials anew, unless another thread has done so, or the session is the caller's own."""
    with _renewal, contextlib.suppress(Exception):  # the next request fails as well then, and is heard
        if ended is not None and store.session is ended and store.storage_options.get("session") is None:
            store.session = None  # it keeps the credentials
            store.connect(refresh=True)


def find_store(url: Url, **options: Any) -> tuple[Any, str]:
    """Return the file system of a URL, and its path there."""
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError:
        raise ImportError(f"{url}: expected fsspec to be installed, got none: {_INSTALL}") from None
    failure: Exception
    try:
        found = cast(tuple[Any, str], url_to_fs(url.full, **options))
        version = re.match(r"(\d+)\.(\d+)", str(getattr(sys.modules.get("s3fs"), "__version__", "")))
        if url.scheme not in S3 or version is None or (int(version[1]), int(version[2])) >= (2025, 5):
            return found  # of the version that the extra demands; beside boto3 pip may choose one of 2020
        failure = ImportError(f"{url}: expected s3fs 2025.5 or later, got {version[0]}: {_INSTALL}")
    except ImportError:
        advice = known_implementations.get(url.scheme, {}).get("err", "Install it")
        failure = ImportError(f"{url}: expected the package that fsspec needs for it, got none. {advice}")
    except ValueError:
        failure = FormatError(f"{url}: expected a URL that fsspec knows, and credentials if it needs them, got another")
    except Exception as error:  # noqa: BLE001 - of any package
        failure = OSError(errno.EIO, f"opening the store failed: {error_code(error)}; see its configuration", str(url))
    raise failure


class _StoreObject:
    """`RemoteObject` of a file system of fsspec."""

    def __init__(self, url: Url, store: _Store) -> None:
        self.url = url
        self._store = store
        self.version = retry(self._find_version, url)
        told = self.version.validator or ""
        self._pinned = {"generation": told} if url.scheme in _GENERATIONS and told.isdecimal() else {}
        self.head = b""
        if self.version.size:
            pieces: list[bytes] = []
            retry(lambda: self.read(0, min(HEAD, self.version.size), lambda _, piece: pieces.append(bytes(piece))), url)
            self.head = b"".join(pieces[-1:])

    def _find_version(self) -> Version:
        info = self._store.call("info", refresh=True)
        coding = getattr(info.get("content_settings"), "content_encoding", None)  # of Azure, beside Google's
        require_plain(info.get("contentEncoding") or coding, self.url)
        size = info.get("size")
        if info.get("type") == "directory" or type(size) is not int:
            raise IsADirectoryError(errno.EISDIR, "expected a file of known size, got none; name one", str(self.url))
        told = next((str(info[name]) for name in _VALIDATORS if info.get(name)), None)
        return Version(check_size(size, self.url), told)

    def read(self, start: int, stop: int, sink: Sink) -> None:
        for first in range(start, stop, _PIECE):
            last = min(first + _PIECE, stop)
            try:
                piece = self._store.call("cat_file", start=first, end=last, **self._pinned)
            except FileNotFoundError:
                raise changed(self.url) from None
            if len(piece) != last - first:
                self._require_same_version()
                raise TransientError(f"expected {last - first} bytes, got {len(piece)}")
            sink(first, piece)
        self._require_same_version()

    def _require_same_version(self) -> None:
        # Pinned or not: gcsfs before 2026.10 passes over `generation`.
        if self.version.validator is not None and self._find_version() != self.version:
            raise changed(self.url)
