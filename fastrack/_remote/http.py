"""Read ranges of files over HTTP and HTTPS. Every answer is compared with its request."""

from __future__ import annotations

import contextlib
import errno
import re
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException, HTTPResponse, responses
from typing import TypeVar
from urllib.parse import SplitResult

from fastrack._net import connections
from fastrack._net.addresses import split_address
from fastrack._net.connections import BoundedAnswer, Connection, credentials_of, pool
from fastrack._net.retries import TransientError, read_delay
from fastrack._remote.codes import ENDED, KNOWN, explain
from fastrack._remote.objects import HEAD, Sink, Version, changed, check_size, error_code, require_plain
from fastrack._remote.retries import retry
from fastrack._util.locations import Url
from fastrack.errors import FormatError

_TIMEOUT = 30.0  # seconds without an answer
_PIECE = 1 << 18  # bytes of a body that are received before they are used
_REDIRECTS = 5
_MOVED = {301, 302, 303, 307, 308}
_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
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
        self._condition: dict[str, str] = {}  # by which the server refuses another version
        self.head, self.version = retry(self._open, url)

    def _open(self) -> tuple[bytes, Version]:
        with self._request(0, HEAD) as connection:
            response = connection.answer
            if response.status == 416:  # an empty file has no range
                return b"", Version(0, None)
            first, stop, size = self._content_range(response)
            if first != 0 or stop != min(HEAD, size):
                raise FormatError(f"{self.url}: expected bytes 0 to {min(HEAD, size)}, got {first} to {stop}")
            etag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
            self._condition = {} if modified is None else {"If-Unmodified-Since": modified}
            if etag and not etag.startswith("W/"):
                self._condition = {"If-Match": etag}
            head = bytearray()
            self._receive(connection, 0, stop, lambda _, piece: head.extend(piece))
            return bytes(head), Version(check_size(size, self.url), etag or modified)

    def read(self, start: int, stop: int, sink: Sink) -> None:
        with self._request(start, stop, self._condition) as connection:
            response = connection.answer
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
    def _request(self, start: int, stop: int, headers: dict[str, str] | None = None) -> Iterator[Connection]:
        """Ask for a range, for a block that reads the answer: 206, 412 or 416. Other answers are raised as errors."""
        parts, _, session = self._target if time.monotonic() < self._target[1] else self._sign_anew()
        for is_last in (self._sign is None, True):
            connection = self._send(parts, start, stop, headers)
            if connection.answer.status in {206, 412, 416}:
                break
            code = _read_code(connection.answer)
            connection.close()
            error = self._refusal(connection.answer, code)
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
        self._target = split_address(target, self.url), time.monotonic() + seconds, session
        return self._target

    def _send(self, parts: SplitResult, start: int, stop: int, headers: dict[str, str] | None) -> Connection:
        """Ask for a range, and follow redirections. Return the connection that has the answer."""
        origin = _origin(parts)
        for _ in range(_REDIRECTS + 1):
            user = parts.username is not None and _origin(parts) == origin
            connection = pool.take(parts) or Connection(parts, _TIMEOUT)
            sent = {
                "Range": f"bytes={start}-{stop - 1}",
                "Accept-Encoding": "identity",
                **(credentials_of(parts) if user else {}),
                **(headers or {}),
            }
            end = time.monotonic() + _TIMEOUT + (stop - start) / connections.SLOWEST
            _attempt(partial(connection.ask, parts, sent, size=stop - start, end=end), self.url)
            place = connection.answer.headers.get("Location")
            if connection.answer.status not in _MOVED or not place:  # S3 names none of a bucket in another region
                return connection
            connection.close()
            moved = split_address(place, self.url, parts)
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

    def _receive(self, connection: Connection, start: int, stop: int, sink: Sink) -> None:
        """Give the body of an answer to `sink`, up to the requested size."""
        buffer = memoryview(bytearray(min(_PIECE, stop - start)))
        while start < stop:
            piece = buffer[: stop - start]
            count = _attempt(partial(connection.answer.readinto, piece), self.url)
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
        if isinstance(known, TransientError):
            known.delay = min(read_delay(response.headers.get("Retry-After")), _LONGEST_DELAY)
        answer = f"the server answered {status} {responses.get(status, '')}".rstrip()
        return known or OSError(errno.EPROTO, answer, str(self.url))


def _read_code(answer: BoundedAnswer) -> str:
    """Return the code of a refusal, or its status. A hostile server's body is read in part, and not for long."""
    body = f"<Code>{answer.headers.get('x-ms-error-code', '')}</Code>".encode()
    body += answer.read_beginning(_REASON, _REASON_TIME)
    words = [(match[1] or match[2]).decode() for match in _SAID.finditer(body)]
    return next((word for word in words if word in KNOWN), str(answer.status))  # nothing else may be repeated


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
