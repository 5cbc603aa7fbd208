"""Read objects of the stores that fsspec knows. Addresses and credentials come from fsspec and the stores."""

from __future__ import annotations

import errno
from typing import Any, cast

from fastrack._remote.objects import HEAD, RemoteObject, Sink, Version, changed, check_size, error_code
from fastrack._remote.retries import TransientError, retry
from fastrack._util.fork import register_fork_reset
from fastrack._util.locations import Url
from fastrack.errors import FormatError

_PIECE = 4 << 20
_SIGNED_FOR = 3600  # seconds
_SIGNING = {
    "s3",
    "s3a",
}  # whose signed URLs `HttpObject` reads: conditional, bounded, and with less work for each range
_GENERATIONS = {"gs", "gcs"}  # whose requests can name the version
_VALIDATORS = ("generation", "ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "updated", "created")


def open_with_fsspec(url: Url) -> RemoteObject:
    """Open an object of any file system that fsspec knows."""
    store = _Store(url)
    if url.scheme in _SIGNING:
        options = dict(store.found().config_kwargs)
        if "signature_version" not in options:  # the older one, which botocore takes for URLs, many stores refuse
            store = _Store(url, config_kwargs={**options, "signature_version": "s3v4"})
        from fastrack._remote.http import HttpObject

        return HttpObject(url, lambda: str(store.call("sign", expiration=_SIGNED_FOR)))
    return _StoreObject(url, store)


class _Store:
    """The store of an object. In a forked child it is found again, as threads and connections are the parent's."""

    def __init__(self, url: Url, **options: Any) -> None:
        self._url, self._options = url, options
        self._found: Any = None
        self._path = ""
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._found = None

    def found(self) -> Any:
        store = self._found
        if store is None:
            store, self._path = find_store(self._url, **self._options)
            self._found = store
        return store

    def call(self, operation: str, **options: Any) -> Any:
        """Call an operation of the store on the object."""
        function = getattr(self.found(), operation)
        return _translated(self._url, function, self._path, **options)


def find_store(url: Url, **options: Any) -> tuple[Any, str]:
    """Return the file system of a URL, and its path there."""
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations
    except ImportError:
        raise ImportError(
            f"{url}: expected fsspec to be installed, got none: pip install 'fastrack-io[remote]'"
        ) from None
    failure: Exception
    try:
        return cast(tuple[Any, str], url_to_fs(url.full, **options))
    except ImportError:
        advice = known_implementations.get(url.scheme, {}).get("err", "Install it")
        failure = ImportError(f"{url}: expected the package that fsspec needs for it, got none. {advice}")
    except ValueError:
        known = url.scheme in known_implementations
        failure = FormatError(
            f"{url}: expected a URL that fsspec knows, got {'another' if known else 'another scheme'}"
        )
    except Exception as error:  # noqa: BLE001 - of any package
        failure = OSError(
            errno.EIO, f"opening the store failed: {error_code(error)}; check its configuration", str(url)
        )
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
        if not self._pinned and self.version.validator is not None and self._find_version() != self.version:
            raise changed(self.url)


def _translated(url: Url, function: Any, *args: Any, **options: Any) -> Any:
    """Call a function of fsspec. Raise `TransientError` for a failure that another attempt may not meet."""
    failure: Exception
    try:
        return function(*args, **options)
    except FileNotFoundError:
        failure = FileNotFoundError(errno.ENOENT, "the server has no such file", str(url))
    except PermissionError:
        failure = PermissionError(errno.EACCES, "the server refuses access; check the credentials", str(url))
    except NotImplementedError:
        name = getattr(function, "__name__", "reading")
        failure = FormatError(
            f"{url}: expected a file system with the operation {name!r}, got one without. Use another"
        )
    except Exception as error:  # noqa: BLE001 - of any package
        failure = TransientError(error_code(error))
        if type(error).__name__ in {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}:
            message = f"no credentials were found ({type(error).__name__}); set them as the store's package says"
            failure = PermissionError(errno.EACCES, message, str(url))
    raise failure
