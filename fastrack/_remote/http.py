"""Read ranges of files over HTTP and HTTPS. Every answer is compared with its request."""

from __future__ import annotations

import atexit
import base64
import contextlib
import errno
import io
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, responses
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from fastrack._remote.codes import ENDED, KNOWN, explain
from fastrack._remote.objects import HEAD, Sink, Version, changed, check_size, error_code, require_plain
from fastrack._remote.retries import TransientError, retry
from fastrack._util.fork import register_fork_reset
from fastrack._util.locations import Url
from fastrack._version import __version__
from fastrack.errors import FormatError

_TIMEOUT = 30.0  # seconds without an answer
_SLOWEST = 128 << 10  # bytes a second, after that time
_IDLE = 20.0  # seconds after which a connection that is not in use may have been closed by the server
_PIECE = 1 << 18  # bytes of a body that are received before they are used
_HEADERS = 1 << 20  # bytes of an answer without its body
_REDIRECTS = 5
_MOVED = {301, 302, 303, 307, 308}
_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_PRINTABLE = re.compile(r"[!-~]*")
_REFUSED_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3})\b")  # of http.client
_LONGEST_DELAY = 10.0  # seconds that a server may ask for
_REASON, _REASON_TIME = 4096, 5.0  # bytes of a refusal that are read for its code, and seconds that they may take
_SAID = re.compile(rb'<Code>\s*([A-Za-z]{3,40})\s*</Code>|"reason"\s*:\s*"([A-Za-z]{3,40})"')  # or Google's JSON

T = TypeVar("T")
Sign = Callable[[object], tuple[str, float, object]]  # URL, seconds of its use, session; takes one that has ended


class HttpObject:
    """`RemoteObject` on an HTTP server that gives ranges.

    Each request is conditional on the version that was opened, by its entity tag or its time of modification, and
    each answer has to confirm it.

    `sign` returns the URL to request, if it differs from the object's, such as a presigned URL.
    """

    def __init__(self, url: Url, sign: Sign | None = None) -> None:
        self.url = url
        self._sign = sign
        self._target = retry(self._sign_anew, url)
        self._etag: str | None = None
        self._modified: str | None = None
        self.head = b""
        self.version = Version(0, None)
        self.head, self.version = retry(self._open, url)

    def _open(self) -> tuple[bytes, Version]:
        with self._request(0, HEAD) as connection:
            response = connection.response
            if response.status == 416:  # an empty file has no range
                return b"", Version(0, None)
            first, stop, size = self._content_range(response)
            if first != 0 or stop != min(HEAD, size):
                raise FormatError(f"{self.url}: expected bytes 0 to {min(HEAD, size)}, got {first} to {stop}")
            etag, self._modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
            self._etag = etag if etag and not etag.startswith("W/") else None
            head = bytearray()
            self._receive(connection, 0, stop, lambda _, piece: head.extend(piece))
            return bytes(head), Version(check_size(size, self.url), etag or self._modified)

    def read(self, start: int, stop: int, sink: Sink) -> None:
        condition = {}
        if self._etag is not None:
            condition["If-Match"] = self._etag
        elif self._modified is not None:
            condition["If-Unmodified-Since"] = self._modified
        with self._request(start, stop, condition) as connection:
            response = connection.response
            if response.status in {412, 416}:
                raise changed(self.url)
            first, last, size = self._content_range(response)
            validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
            if validator != self.version.validator or (validator is None and size != self.version.size):
                raise changed(self.url)
            if (first, last, size) != (start, stop, self.version.size):
                raise TransientError(f"expected bytes {start} to {stop}, got {first} to {last} of {size}")
            self._receive(connection, start, stop, sink)

    @contextlib.contextmanager
    def _request(self, start: int, stop: int, headers: dict[str, str] | None = None) -> Iterator[_Connection]:
        """Ask for a range, for a block that reads the answer: 206, 412 or 416. Other answers are raised as errors."""
        parts, _, session = self._target if time.monotonic() < self._target[1] else self._sign_anew()
        for is_last in (self._sign is None, True):
            connection = self._send(parts, start, stop, headers)
            if connection.response.status in {206, 412, 416}:
                break
            code = connection.response.read_code()
            connection.close()
            error = self._refusal(connection.response, code)
            if is_last or not (isinstance(error, PermissionError) or code in ENDED):
                raise error
            parts, _, session = self._sign_anew(session if code in ENDED else None)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        connection.release()

    def _sign_anew(self, ended: object = None) -> tuple[SplitResult, float, object]:
        """Return the URL to ask for, until when, and the session that signed it. Another one than `ended` signs it."""
        target, seconds, session = (self.url.full, float("inf"), None) if self._sign is None else self._sign(ended)
        self._target = _split(target, self.url), time.monotonic() + seconds, session
        return self._target

    def _send(self, parts: SplitResult, start: int, stop: int, headers: dict[str, str] | None) -> _Connection:
        """Ask for a range, and follow redirections. Return the connection that has the answer."""
        origin = _origin(parts)
        for _ in range(_REDIRECTS + 1):
            user = parts.username is not None and _origin(parts) == origin
            connection = _pool.take(parts, self.url)
            connection.get(
                urlunsplit(("", "", parts.path or "/", parts.query, "")),
                {
                    "Range": f"bytes={start}-{stop - 1}",
                    "Accept-Encoding": "identity",
                    "User-Agent": f"fastrack/{__version__}",
                    **(_credentials(parts) if user else {}),
                    **(headers or {}),
                },
                stop - start,
                self.url,
            )
            place = connection.response.headers.get("Location")
            if connection.response.status not in _MOVED or not place:  # S3 names none of a bucket in another region
                return connection
            connection.close()
            moved = _split(place, self.url, parts)
            if parts.scheme == "https" != moved.scheme:
                raise FormatError(f"{self.url}: expected a redirection to https, got one to http. Give the final URL")
            parts = moved
        raise FormatError(f"{self.url}: expected up to {_REDIRECTS} redirections, got more. Give the final URL")

    def _content_range(self, response: HTTPResponse) -> tuple[int, int, int]:
        """Return first byte, end and size of the file by the headers of an answer."""
        require_plain(response.headers.get("Content-Encoding"), self.url)
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if match is None:
            raise TransientError("expected Content-Range: bytes FIRST-LAST/SIZE, got another")
        first, last, size = map(int, match.groups())
        if not first <= last < size:
            raise TransientError(f"expected a Content-Range within the file, got {first} to {last} of {size}")
        if response.length is not None and response.length != last + 1 - first:
            raise TransientError(f"expected {last + 1 - first} bytes by Content-Range, got {response.length}")
        return first, last + 1, size

    def _receive(self, connection: _Connection, start: int, stop: int, sink: Sink) -> None:
        """Give the body of an answer to `sink`, up to the requested size."""
        while start < stop:
            piece = connection.buffer[: stop - start]
            count = _attempt(partial(connection.response.readinto, piece), self.url)
            if not count:
                raise TransientError(f"expected {stop - start} bytes more, got the end of the answer")
            sink(start, piece[:count])
            start += count

    def _refusal(self, response: HTTPResponse, code: str) -> Exception:
        status = response.status
        if status == 200:
            return FormatError(
                f"{self.url}: expected a server that gives ranges, got the whole file. Copy it to this machine, or "
                "serve it from one that does"
            )
        known = explain(code, self.url)
        if isinstance(known, TransientError) and (delay := response.headers.get("Retry-After", "")).isdecimal():
            known.delay = min(float(delay), _LONGEST_DELAY)
        answer = f"the server answered {status} {responses.get(status, '')}".rstrip()
        return known or OSError(errno.EPROTO, answer, str(self.url))


class _Connection:
    """A connection to a server, or to a proxy, and the answer to the last request."""

    response: _BoundedResponse

    def __init__(self, parts: SplitResult, url: Url) -> None:
        host, port = parts.hostname, parts.port
        assert host is not None
        self.key = _key(parts)
        self.used_at = 0.0
        self.buffer = memoryview(bytearray(_PIECE))
        self._prefix = ""
        self._headers: dict[str, str] = {}
        proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
        if proxy is None:
            self._http = _connect(parts.scheme, host, port)
            return
        through = _split(proxy if "://" in proxy else f"http://{proxy}", url, what="a proxy in the environment")
        assert through.hostname is not None
        credentials = {f"Proxy-{name}": value for name, value in _credentials(through).items()}
        if parts.scheme == "https":
            self._http = HTTPSConnection(through.hostname, through.port or 80, timeout=_TIMEOUT, context=_tls())
            self._http.set_tunnel(host, port or 443, credentials)
        else:
            self._http = _connect(through.scheme, through.hostname, through.port or 80)
            self._prefix, self._headers = f"http://{parts.netloc.rpartition('@')[2]}", credentials

    def get(self, target: str, headers: dict[str, str], size: int, url: Url) -> None:
        """Ask for `size` bytes. The connection is closed after an error."""

        def exchange() -> _BoundedResponse:
            self._http.response_class = partial(_BoundedResponse, limit=size)  # type: ignore[assignment]
            self._http.request("GET", self._prefix + target, headers={**headers, **self._headers})
            return cast(_BoundedResponse, self._http.getresponse())

        try:
            self.response = _attempt(exchange, url)
        except BaseException:
            self._http.close()
            raise

    def release(self) -> None:
        """Return the connection to the pool, if all of the answer was read."""
        if self.response.length == 0 and not self.response.will_close:
            self.response.close()
            _pool.put(self)
        else:
            self.close()

    def close(self) -> None:
        self.response.close()  # it may own the connection
        self._http.close()


class _BoundedResponse(HTTPResponse):
    """An answer that may be neither much longer than requested nor too slow."""

    def __init__(self, connection: Any, *args: Any, limit: int, **options: Any) -> None:
        super().__init__(connection, *args, **options)
        buffered: Any = self.fp
        self._connection, self._bounded = connection, _Bounded(buffered.detach(), limit)
        self.fp = io.BufferedReader(self._bounded)

    def read_code(self) -> str:
        """Return the code of a refusal, or its status. A hostile server's body is read in part, and not for long."""
        body = f"<Code>{self.headers.get('x-ms-error-code', '')}</Code>".encode()
        self._bounded.deadline = time.monotonic() + _REASON_TIME
        with contextlib.suppress(OSError, HTTPException, ValueError):
            self._connection.settimeout(_REASON_TIME)
            while len(body) < _REASON and (piece := self.read1(_REASON - len(body))):
                body += piece
        words = [(match[1] or match[2]).decode() for match in _SAID.finditer(body)]
        return next((word for word in words if word in KNOWN), str(self.status))  # nothing else may be repeated


class _Bounded(io.RawIOBase):
    """The bytes of a connection up to the end of an answer with a body of `limit` bytes."""

    def __init__(self, raw: io.RawIOBase, limit: int) -> None:
        self._raw = raw
        self._left = 2 * limit + _HEADERS  # also with the sizes of chunks
        self.deadline = time.monotonic() + _TIMEOUT + limit / _SLOWEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._left < 0:
            raise TransientError("the server sends more than was asked for")
        if time.monotonic() > self.deadline:
            raise TransientError(f"the server sends less than {_SLOWEST >> 10} KiB a second")
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Pool:
    """Connections that are not in use, which belong to this process alone."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[_Connection]] = {}
        self.reset_after_fork()
        register_fork_reset(self)
        atexit.register(self.clear)

    def reset_after_fork(self) -> None:
        """Close the child's copies of the parent's connections."""
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Close all connections."""
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def take(self, parts: SplitResult, url: Url) -> _Connection:
        with self._lock:
            idle = self._idle.get(_key(parts))
            while idle:
                connection = idle.pop()
                if time.monotonic() - connection.used_at < _IDLE:
                    return connection
                connection.close()
        return _Connection(parts, url)

    def put(self, connection: _Connection) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            self._idle.setdefault(connection.key, []).append(connection)


_pool = _Pool()


def _key(parts: SplitResult) -> tuple[str, str]:
    return parts.scheme, parts.netloc.rpartition("@")[2]


def _connect(scheme: str, host: str, port: int | None) -> HTTPConnection:
    if scheme == "https":
        return HTTPSConnection(host, port, timeout=_TIMEOUT, context=_tls())
    return HTTPConnection(host, port, timeout=_TIMEOUT)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _credentials(parts: SplitResult) -> dict[str, str]:
    if parts.username is None:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _split(target: str, url: Url, base: SplitResult | None = None, *, what: str = "a URL") -> SplitResult:
    """Return the parts of a URL, or of one relative to `base`; refuse one that needs quoting."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(target if base is None else urljoin(base.geturl(), target))
        _ = parts.port  # raises if it is no number
        if parts.scheme in {"http", "https"} and parts.hostname and _PRINTABLE.fullmatch(target):
            return parts
    what = what if base is None else "a redirection to one"
    raise FormatError(
        f"{url}: expected {what} of printable ASCII characters, with http:// or https://, a host, and a number as its "
        "port if it has one; got another. Encode other characters with %"
    )


def _origin(parts: SplitResult) -> tuple[str | None, int | None]:
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _attempt(function: Callable[[], T], url: Url) -> T:
    """Call a function on the connection. Errors reveal no data that it sends or receives."""
    failure: OSError
    try:
        return function()
    except TransientError as error:
        failure = TransientError(str(error))
    except ssl.SSLCertVerificationError as error:
        message = f"the certificate of the server is not trusted: {error.verify_message}"
        failure = OSError(errno.EPROTO, message, str(url))
    except (OSError, HTTPException, ValueError) as error:
        failure = TransientError(error_code(error))
        if refused := _REFUSED_TUNNEL.match(str(error)):
            failure = TransientError(f"the proxy answered {refused[1]}")
    raise failure
