"""Connections to servers, directly or through proxies, whose answers have bounds for their size and their time."""

from __future__ import annotations

import atexit
import base64
import io
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from threading import Lock, Thread
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlunsplit
from urllib.request import getproxies, proxy_bypass

from fastrack._net.addresses import split_address
from fastrack._net.retries import TransientError
from fastrack._util.fork import register_fork_reset
from fastrack._version import __version__

_log = logging.getLogger("fastrack")
SLOWEST = 128 << 10  # bytes a second that an answer has to come with, once its time is over
_IDLE = 20.0  # seconds after which a connection that is not in use may have been closed by the server
_LATER = 1.0  # seconds after the end of an exchange, for its thread
_HEADERS = 1 << 20  # bytes of an answer without its body


class Connection:
    """A connection to a server, or to the proxy that the environment has for it, and the answer to the last request.

    A `timeout` in seconds holds for each read. `tls` is by default a context with the certificates of the system. With
    `is_direct` no proxy is asked.
    """

    answer: BoundedAnswer

    def __init__(
        self, parts: SplitResult, timeout: float, tls: ssl.SSLContext | None = None, *, is_direct: bool = False
    ) -> None:
        self.key = _key(parts)
        self.used_at = 0.0
        self._prefix, self._headers = "", {"User-Agent": f"fastrack/{__version__}"}
        host, server, port = parts.hostname or "", parts, parts.port
        proxy = None if is_direct or proxy_bypass(host) else getproxies().get(parts.scheme)
        if proxy is not None:
            proxy = proxy if "://" in proxy else f"http://{proxy}"
            server = split_address(proxy, "://".join(self.key), what="a proxy in the environment")
            port = server.port or 80
        kind: Callable[..., HTTPConnection] = HTTPConnection
        if "https" in {parts.scheme, server.scheme}:
            kind = partial(HTTPSConnection, context=tls or _system_tls())
        self._http = kind(server.hostname, port, timeout=timeout)
        credentials = {f"Proxy-{name}": value for name, value in credentials_of(server).items()}
        if server is not parts and parts.scheme == "https":
            self._http.set_tunnel(host, parts.port or 443, credentials)
        elif server is not parts:
            self._prefix, self._headers = f"http://{self.key[1]}", self._headers | credentials

    def ask(
        self, parts: SplitResult, headers: dict[str, str], body: bytes | None = None, *, size: int, end: float
    ) -> None:
        """Send a GET, or a POST of a body, for an answer of a size before `end`. An error closes the connection."""
        target = self._prefix + urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._http.response_class = partial(BoundedAnswer, size=size, end=end)  # type: ignore[assignment]
        try:
            self._http.request("GET" if body is None else "POST", target, body, {**self._headers, **headers})
            self.answer = cast(BoundedAnswer, self._http.getresponse())
            _log.debug("%s://%s answers %s", *self.key, self.answer.status)  # a path or query may have a token
        except BaseException:
            self._http.close()
            raise

    def exchange(
        self, parts: SplitResult, headers: dict[str, str], body: bytes | None = None, *, limit: int, end: float
    ) -> Answer:
        """Ask, return the answer before `end` on the monotonic clock, and close the connection.

        The body of the answer has at most a byte more than `limit`. A thread does the work: the time limit of a socket
        holds only for each read, and name resolution has none.
        """
        outcome: Future[Answer] = Future()

        def run() -> None:
            try:
                # Later than the caller, who tells of the time. It ends an answer that owns its socket, and drips.
                self.ask(parts, headers, body, size=limit, end=end + _LATER)
                with closing(self):
                    found = self.answer.read(limit + 1)
                    if self.answer.length and len(found) <= limit:
                        raise IncompleteRead(found, self.answer.length)  # noqa: TRY301 - the caller raises it
                    names = {name.lower(): value for name, value in self.answer.headers.items()}
                    outcome.set_result(Answer(found, names, self.answer.status))
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                outcome.set_exception(error)

        Thread(target=run, daemon=True).start()
        try:
            return outcome.result(max(end - time.monotonic(), 0.001))
        except TimeoutError as error:
            sock = self._http.sock  # which the thread may set to None meanwhile
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # ends the thread
            raise TimeoutError(str(error) or "the answer came too slowly") from None

    def release(self) -> None:
        """Return the connection to the pool, if all of the answer was read."""
        if self.answer.length == 0 and not self.answer.will_close:
            self.answer.close()
            pool.put(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection, and the answer, which may own it."""
        self.answer.close()
        self._http.close()


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, its headers by their names in lower case, and its status."""

    body: bytes
    headers: Mapping[str, str]
    status: int = 200


class BoundedAnswer(HTTPResponse):
    """An answer that may be neither much longer than requested nor too slow."""

    def __init__(self, connection: Any, *args: Any, size: int, end: float, **options: Any) -> None:
        super().__init__(connection, *args, **options)
        buffered: Any = self.fp
        self._connection, self._bounded = connection, _Bounded(buffered.detach(), size, end)
        self.fp = io.BufferedReader(self._bounded)

    def read_beginning(self, size: int, seconds: float) -> bytes:
        """Return what comes of a body in a time, up to a size. The rest is of no use."""
        body = b""
        self._bounded.end = time.monotonic() + seconds
        with suppress(OSError, HTTPException, ValueError):
            self._connection.settimeout(seconds)
            while len(body) < size and (piece := self.read1(size - len(body))):
                body += piece
        return body


class _Bounded(io.RawIOBase):
    """The bytes of a connection up to the end of an answer with a body of some size, and up to a time."""

    def __init__(self, raw: io.RawIOBase, size: int, end: float) -> None:
        self._raw = raw
        self._left = 2 * size + _HEADERS  # also with the sizes of chunks
        self.end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._left < 0:
            raise TransientError("the server sends more than was asked for")
        if time.monotonic() > self.end:
            raise TransientError(f"the server sends less than {SLOWEST >> 10} KiB a second")
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Pool:
    """Connections that are not in use, which belong only to this process."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[Connection]] = {}
        self.reset_after_fork()
        register_fork_reset(self)
        atexit.register(self.clear)

    def reset_after_fork(self) -> None:
        """Close the child's copies of the parent's connections."""
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Close all connections."""
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def take(self, parts: SplitResult) -> Connection | None:
        with self._lock:
            idle = self._idle.get(_key(parts))
            while idle:
                connection = idle.pop()
                if time.monotonic() - connection.used_at < _IDLE:
                    return connection
                connection.close()
        return None

    def put(self, connection: Connection) -> None:
        connection.used_at = time.monotonic()
        with self._lock:
            self._idle.setdefault(connection.key, []).append(connection)


pool = _Pool()


def credentials_of(parts: SplitResult) -> dict[str, str]:
    """Return the header for the user and the password in an address, if it has them."""
    if parts.username is None:
        return {}
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _key(parts: SplitResult) -> tuple[str, str]:
    return parts.scheme, parts.netloc.rpartition("@")[2]


@cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
