import ipaddress
import json
import os
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from http.client import HTTPSConnection
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from helpers.foundry.authority import Authority, new_key

import fastrack
from fastrack.grants import Signer


def make_certificate(folder):
    """Write an authority (ca.pem), and a certificate of it for 127.0.0.1 with its key (tls.pem, tls.key)."""
    ca_key, key = new_key(), new_key()
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())

    def make(name, issuer, key, *extensions):
        extensions = (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), of_issuer, *extensions)
        written = [(extension.oid.dotted_string, extension.public_bytes()) for extension in extensions]
        return Authority(name, issuer, key=key, ca=issuer is None, extensions=written)

    ca = make("Test CA", None, ca_key)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    (folder / "ca.pem").write_bytes(ca.pem)
    (folder / "tls.pem").write_bytes(make("broker", ca, key, x509.SubjectAlternativeName([address])).pem)
    (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "tls.key").chmod(0o600)


def find_port():
    """Return a free port below those that the kernel gives to clients, one of which could take it while it is free."""
    for port in random.sample(range(15_000, 30_000), 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no free port")


class Server:
    """A broker in a process of its own, which can be killed and started again."""

    def __init__(self, folder, offset, policy, roots, *, database=None, **limits):
        self.folder = folder
        self.offset = offset
        make_certificate(folder)
        self.signer, self.key = Signer.generate(), fastrack.Key.generate()
        self.signer.save(folder / "owner.signer")
        self.key.save(folder / "data.key")
        (folder / "policy.toml").write_text(policy)
        self.given = {
            "offset": offset.total_seconds(),
            "roots": {name: sorted(found) for name, found in asdict(roots).items() if name != "others"},
            "per_minute": 1e6,
            "burst": 10**6,
            "body_seconds": 30,
            "head_seconds": 10,
            "request_seconds": 120,
            "lease": None,
            "rest": None,
            **limits,
            "port": find_port(),
            "database": str(database or folder / "broker.db"),
        }
        self.context = ssl.create_default_context(cafile=folder / "ca.pem")
        self.log = folder / "broker.log"
        self.start()

    def start(self):
        (self.folder / "served.json").write_text(json.dumps(self.given))
        command = [sys.executable, "-W", "error", Path(__file__).with_name("served.py"), self.folder / "served.json"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        while not (written := self.log.read_bytes()[before:]).endswith(b"\n"):
            assert self.process.poll() is None, written
            time.sleep(0.01)
        line = json.loads(written.splitlines()[0])
        assert (line["event"], line["port"]) == ("listening", self.given["port"])
        self.port = line["port"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        assert self.process.wait(30) in {0, -15}

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"

    def now(self):
        return datetime.now(UTC) + self.offset

    def lines(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def connect(self):
        """Return a connection that opens when it is first used, and again after it was closed."""
        return HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.context)

    def post(self, path, body=b"", *, headers=None, connection=None):
        """Return the status, the body and the headers of an answer."""
        if connection is None:
            with closing(self.connect()) as own:
                return self.post(path, body, headers=headers, connection=own)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"} | (headers or {}))
            with connection.getresponse() as response:
                return response.status, response.read(), response.headers
        except BaseException:
            connection.close()
            raise

    def open(self):
        """Open a connection of TLS."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self.context.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture
def serve():
    """Return a function that starts a server, which ends with the test. Its database is in memory."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    started = []
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fastrack-broker-", dir=memory) as folder:

        def start(*arguments, **options):
            started.append(Server(Path(folder), *arguments, **options))
            return started[-1]

        yield start
        for server in started:
            if server.process.poll() is None:
                server.stop()
