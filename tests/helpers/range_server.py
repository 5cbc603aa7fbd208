"""A loopback HTTP server of ranges, which delays, cuts, refuses and alters its answers as a test says."""

from __future__ import annotations

import hashlib
import os
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self

import numpy as np

from fastrack._remote.remote_file import RemoteFile, open_remote
from fastrack._util.locations import Url


class RangeServer:
    """Serve the files of a folder. `faults` is called for each request, with its number, and may answer itself."""

    def __init__(self, folder: Path, latency: float = 0.0, tls: ssl.SSLContext | None = None) -> None:
        self.folder = folder
        self.latency = latency
        self.faults: Callable[[_Handler, int], bool] = lambda handler, number: False
        self.requests: list[tuple[str, str | None]] = []
        self.connections = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            server_state = owner

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 128

            def handle_error(self, request, client_address):
                """Say nothing: clients hang up on answers that are wrong."""

            def verify_request(self, request, client_address):
                owner.connections += 1
                return True

        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._scheme = "http" if tls is None else "https"
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def url(self, name: str) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}/{name}"

    def write(self, name: str, size: int) -> bytes:
        """Write random bytes into a file of the folder, and return them."""
        data = np.random.default_rng(size).bytes(size)
        (self.folder / name).write_bytes(data)
        return data

    def open_remote(self, name: str) -> RemoteFile:
        """Return a file of the folder as a client has it."""
        return open_url(self.url(name))

    def count(self, path: str, requested: str | None) -> int:
        with self._lock:
            self.requests.append((path, requested))
            return len(self.requests) - 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_url(url: str) -> RemoteFile:
    """Return the file at a URL as a client has it."""
    return open_remote(Url(url))[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: RangeServer
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        state = self.server_state
        self.number = state.count(self.path, self.headers.get("Range"))
        if state.latency:
            time.sleep(state.latency)
        if not state.faults(self, self.number):
            self.answer()

    def answer(
        self,
        *,
        status: int = 206,
        content_range: str | None = None,
        etag: str | None = None,
        length: int | None = None,
        body: bytes | None = None,
        cut: int | None = None,
    ) -> None:
        """Answer with the range that was asked for, or with what the arguments say in its place."""
        path = self.server_state.folder / self.path.lstrip("/").partition("?")[0]
        try:
            file = path.open("rb")
        except OSError:
            self.refuse(404)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            etag = etag or etag_of(path)
            if self.headers.get("If-Match", etag) != etag:
                self.refuse(412)
                return
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            if first >= size:
                self.refuse(416)
                return
            last = min(last, size - 1)
            count = last + 1 - first
            self.send_response(status)
            self.send_header("ETag", etag)
            self.send_header("Content-Range", content_range or f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(count if length is None else length))
            self.end_headers()
            self.wfile.flush()
            if body is not None:
                self.wfile.write(body)
            elif cut is not None or isinstance(self.connection, ssl.SSLSocket):
                self.wfile.write(os.pread(file.fileno(), min(cut or count, count), first))
            else:
                sent = 0
                while sent < count:
                    sent += os.sendfile(self.connection.fileno(), file.fileno(), first + sent, count - sent)
            self.wfile.flush()
            if cut is not None:
                self.hang_up()

    def refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of the standard library
        """Say nothing."""


def etag_of(path: Path) -> str:
    status = path.stat()
    return (
        '"' + hashlib.sha256(f"{status.st_ino} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16] + '"'
    )


if __name__ == "__main__":  # python -m helpers.range_server FOLDER LATENCY, for benchmarks
    import sys

    with RangeServer(Path(sys.argv[1]), float(sys.argv[2])) as server:
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        sys.stdin.read()
