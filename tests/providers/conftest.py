"""Servers on loopback that answer as the documentation of a vendor says. None of them is the real service."""

import base64
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM


class Box:
    """An AES key of a vault that is in this process."""

    def __init__(self):
        self._aes = AESGCM(os.urandom(32))

    def encrypt(self, plaintext, data=b""):
        nonce = os.urandom(12)
        return nonce + self._aes.encrypt(nonce, plaintext, data)

    def decrypt(self, ciphertext, data=b""):
        try:
            return self._aes.decrypt(ciphertext[:12], ciphertext[12:], data)
        except (InvalidTag, ValueError):
            return None


class Server(ThreadingHTTPServer):
    """A server on loopback. `answer(method, path, headers, document)` returns a status, a document and headers."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked = []

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _respond(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        document = json.loads(body) if body else {}
        self.server.asked.append((self.command, self.path, dict(self.headers), document))
        status, answer, headers = self.server.answer(self.command, self.path, self.headers, document)
        content = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _respond  # noqa: N815 - names that http.server looks for


@pytest.fixture
def serve():
    """Start servers, which are stopped when the test ends."""
    servers = []

    def start(answer, wrap=None):
        server = Server(answer)
        if wrap is not None:
            server.socket = wrap(server.socket)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def box():
    return Box()


def encode(data):
    return base64.b64encode(data).decode()


decode = base64.b64decode
