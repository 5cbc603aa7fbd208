"""Connections: TLS, proxies, and which are used again."""

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from helpers.range_server import RangeServer

import fastrack
from fastrack._net import connections


def make_certificate(folder, address):
    """Write a certificate of an address, which signs itself, and return its path and a server's context."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(1))
        .not_valid_after(now + dt.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    path = folder / f"{address}.pem"
    path.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return path, context


@pytest.fixture
def secure(url, served, tmp_path, monkeypatch):  # noqa: ARG001 - it writes the file
    """A server of the same folder over TLS, whose certificate is trusted."""
    path, context = make_certificate(tmp_path, "127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    connections._system_tls.cache_clear()
    with RangeServer(served.folder, tls=context) as server:
        yield server
    connections._system_tls.cache_clear()


def read_all(url, key):
    with fastrack.load_file(url) as file:
        return fastrack.unseal(file["images"], key, framework="numpy")


def test_a_file_is_read_over_tls(secure, key, images):
    np.testing.assert_array_equal(read_all(secure.url("a.safetensors"), key), images)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_certificate_that_is_not_trusted_or_of_another_address_is_refused(address, secure, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    path, context = make_certificate(tmp_path / "other", address)
    if address != "127.0.0.1":
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        connections._system_tls.cache_clear()
    with RangeServer(secure.folder, tls=context) as server, pytest.raises(OSError, match="certificate"):
        fastrack.load_file(server.url("a.safetensors"))
    assert not server.requests


@pytest.fixture
def proxied(secure, monkeypatch, tmp_path):
    """Lines and headers that a proxy is asked with, to which the environment sends all requests."""
    asked = []

    def tunnel(handler):
        asked.append((handler.requestline, dict(handler.headers)))
        host, _, port = handler.path.partition(":")
        handler.wfile.write(b"HTTP/1.1 200 Connected\r\nX: y\r\n\r\n")
        handler.wfile.flush()
        with socket.create_connection((host, int(port))) as server:
            back = threading.Thread(target=copy, args=(server, handler.connection))
            back.start()
            copy(handler.connection, server)
            back.join()
        handler.close_connection = True

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def pass_on(handler, _number):
        asked.append((handler.requestline, dict(handler.headers)))
        handler.path = "/" + handler.path.rpartition("/")[2]
        return False

    monkeypatch.setattr("helpers.range_server._Handler.do_CONNECT", tunnel, raising=False)
    (tmp_path / "proxy").symlink_to(secure.folder)
    with RangeServer(tmp_path / "proxy") as proxy:
        proxy.faults = pass_on
        for scheme in ("http", "https"):
            monkeypatch.setenv(f"{scheme}_proxy", proxy.url("").replace("//", "//user:hunter2@"))
        monkeypatch.setenv("no_proxy", "")
        yield asked
        connections.pool.clear()


def test_a_tunnel_through_a_proxy_shows_it_the_address_alone(proxied, secure, key, images):
    seen = []
    secure.faults = lambda handler, number: bool(seen.append(dict(handler.headers)))
    np.testing.assert_array_equal(read_all(secure.url("a.safetensors"), key), images)
    assert {line.rpartition(" ")[0] for line, _ in proxied} == {f"CONNECT 127.0.0.1:{secure.port}"}
    assert {headers["Proxy-Authorization"] for _, headers in proxied} == {"Basic dXNlcjpodW50ZXIy"}
    assert seen
    assert not any("Proxy-Authorization" in headers for headers in seen)


def test_a_proxy_is_asked_for_the_whole_address_of_a_server_without_tls(proxied, key, images):
    np.testing.assert_array_equal(read_all("http://example.invalid/a.safetensors", key), images)
    for line, headers in proxied:
        assert line == "GET http://example.invalid/a.safetensors HTTP/1.1"
        assert headers["Host"] == "example.invalid"
        assert headers["Proxy-Authorization"] == "Basic dXNlcjpodW50ZXIy"


@pytest.mark.parametrize("flood", [b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, b"HTTP/1.1 100 OK\r\n\r\n" * 200_000])
@pytest.mark.usefixtures("proxied")
def test_a_proxy_that_answers_without_an_end_is_given_up(flood, secure, monkeypatch):
    def answer(handler):
        with contextlib.suppress(OSError):  # the client hangs up
            handler.wfile.write(flood)
        handler.close_connection = True

    monkeypatch.setattr("helpers.range_server._Handler.do_CONNECT", answer)
    with pytest.raises(OSError, match="reading failed"):
        fastrack.load_file(secure.url("a.safetensors"))


@pytest.mark.usefixtures("url")
def test_a_connection_is_used_again_when_all_of_an_answer_was_read(served):
    remote = served.open_remote("a.safetensors")
    for first in range(1 << 20, 2 << 20, 1 << 18):
        remote.fetch([(first, first + 1)])
    assert (served.connections, len(served.requests)) == (1, 5)


ENDS = {"said": (b"HTTP/1.1", b"Connection: Close\r\n"), "an older version": (b"HTTP/1.0", b"")}


@pytest.mark.parametrize("name", ENDS)
def test_a_connection_that_ends_is_not_used_again(name, served):
    version, header = ENDS[name]
    served.write("b", 1000)

    def answer(handler, _number):
        body = (served.folder / "b").read_bytes()
        head = b"%b 206 OK\r\nETag: x\r\nContent-Range: bytes 0-999/1000\r\nContent-Length: 1000\r\n%b\r\n"
        handler.wfile.write(head % (version, header) + body)
        handler.wfile.flush()
        return True

    served.faults = answer
    for _ in range(3):
        served.open_remote("b")
    assert served.connections == 3
