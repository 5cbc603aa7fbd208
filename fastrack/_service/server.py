"""Serve an application by uvicorn, over TLS, with logs of one JSON object a line."""

import asyncio
import json
import logging
import os
import resource
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastrack._keys.keys import read_private
from fastrack._net.addresses import is_loopback
from fastrack._service.handlers import log
from fastrack._service.limits import Quota

_CONNECTIONS = 512
_SHARE = 8  # each address may have 1 / _SHARE of the connections
_DESCRIPTORS = 64  # reserved for the database, the listener and the libraries
_BACKLOG = 4096  # connections that wait to be accepted; most may be refused
_HEAD_SECONDS = 10.0
_REQUEST_SECONDS = 120.0  # from the head of a request to its answer: body, thread queue and work
_PAUSE = 0.5  # seconds without accepting after the system lacks a descriptor or memory
_REPORT = 10.0  # seconds between log lines about connections


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON: time, level, message, and the members of ``extra={"fields": ...}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line)


def serve(
    make_app: Callable[[], Any],
    *,
    host: str,
    port: int,
    certificate: str | os.PathLike[str] | None,
    private_key: str | os.PathLike[str] | None,
    client_ca: str | os.PathLike[str] | None = None,
    head_seconds: float = _HEAD_SECONDS,
) -> None:
    """Serve until the process is asked to end. Without a certificate only on a loopback address.

    A TLS handshake, and then each head of a request, must arrive within `head_seconds`. Other users must neither own
    nor read the private key. With `client_ca` a client must have a certificate of one of its authorities.
    The application is made once the address is taken: a start that fails changes no database that another uses.
    """
    if certificate is None and not is_loopback(host):
        raise ValueError(f"serving failed: expected a certificate, or a loopback address, got none and {host}")
    if private_key is not None:
        with read_private(private_key, 0):  # refuses a key that others may read; uvicorn opens it again
            pass
    _log_as_json()
    config = uvicorn.Config(
        lambda: _with_one_length(make_app()),
        factory=True,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=10,
        ssl_certfile=None if certificate is None else os.fspath(certificate),
        ssl_keyfile=None if private_key is None else os.fspath(private_key),
        ssl_ca_certs=None if client_ca is None else os.fspath(client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=_BACKLOG) as listener:
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
        fields = {"host": host, "port": listener.getsockname()[1], "tls": config.ssl is not None}
        log.info("listening", extra={"fields": fields})
        _Server(config, head_seconds).run(sockets=[listener])


def _with_one_length(app: Any) -> Any:
    """Return an application that refuses requests with two lengths: a proxy before it may go by the other one."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if not names.issuperset({b"content-length", b"transfer-encoding"}):
            await app(scope, receive, send)
            return
        log.info("refused", extra={"fields": {"address": scope["client"][0], "error": "two lengths", "status": 400}})
        body = b'{"error":{"message":"expected Content-Length or Transfer-Encoding, got both"}}\n'
        await Response(body, 400, {"Connection": "close"}, "application/json")(scope, receive, send)

    return run


def _log_as_json() -> None:
    """Write all log records, and warnings, as lines of JSON on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    log.setLevel(logging.INFO)


class _Server(uvicorn.Server):
    """A server that counts connections when accepted; asyncio shows them only after the handshake."""

    def __init__(self, config: uvicorn.Config, head_seconds: float) -> None:
        super().__init__(config)
        self._head_seconds = head_seconds
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        bound = _CONNECTIONS if descriptors == resource.RLIM_INFINITY else max(descriptors - _DESCRIPTORS, _SHARE)
        total = min(_CONNECTIONS, bound)
        self._quota = Quota(total // _SHARE, total)
        self._begun: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()  # events since the last report
        self._report_at: dict[str, float] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._accept(*sockets or ()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        try:
            while True:
                try:
                    connection, address = await loop.sock_accept(listener)
                except OSError as error:
                    self._report("accepting failed", error=os.strerror(error.errno or 0))
                    await asyncio.sleep(_PAUSE)
                    continue
                if self._quota.take(address[0]):
                    task = loop.create_task(self._begin(connection, address[0]))
                    self._begun.add(task)  # the loop has only weak references
                    task.add_done_callback(self._begun.discard)
                else:
                    connection.close()
                    self._report("connection refused", address=address[0])
                await asyncio.sleep(0)  # lets other tasks run while clients keep connecting
        finally:
            self.should_exit = True

    async def _begin(self, connection: socket.socket, address: str) -> None:
        release = partial(self._quota.give_back, address)
        arguments = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        with_tls = {"ssl_handshake_timeout": self._head_seconds, "ssl_shutdown_timeout": self._head_seconds}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Protocol(self._head_seconds, release, **arguments),
                connection,
                ssl=self.config.ssl,
                **(with_tls if self.config.ssl else {}),
            )
        except OSError:  # the handshake failed, so no protocol exists to release it
            release()

    def _report(self, event: str, **fields: str) -> None:
        """Log an event with its count, at most every `_REPORT` seconds."""
        self._counts[event] += 1
        now = asyncio.get_running_loop().time()
        if now >= self._report_at.get(event, 0.0):
            self._report_at[event] = now + _REPORT
            log.warning(event, extra={"fields": {**fields, "count": self._counts.pop(event)}})


class _Protocol(H11Protocol):
    """A connection that ends when a head or an answer takes too long, regardless of the received data."""

    def __init__(self, head_seconds: float, release: Callable[[], None], **given: Any) -> None:
        super().__init__(**given)
        self._head_seconds = head_seconds
        self._release = release
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline(self._head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        self._release()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # a head is complete
            self._set_deadline(_REQUEST_SECONDS)

    def on_response_complete(self) -> None:
        self._set_deadline(self._head_seconds)
        super().on_response_complete()

    def _set_deadline(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
