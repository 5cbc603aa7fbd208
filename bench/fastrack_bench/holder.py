"""A holder of tokens, in a process of its own, which sends them through TLS, or sealed through plain TCP.

Both are loopback connections with the same options, one for each way. A request names a range of plaintext, whose
pieces come back one after the other. Neither way seals or opens anything else than pieces.
"""

from __future__ import annotations

import datetime as dt
import os
import socket
import ssl
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray

from fastrack._crypto.base import Bytes
from fastrack._keys.keys import Key
from fastrack._sealed.seal import seal
from fastrack.errors import FastrackError

Tokens = NDArray[np.uint16]

_NAME = "holder"
_CERTIFICATE, _KEY = "holder.pem", "owner.key"
_REQUEST = struct.Struct("<QQ")  # the first byte of plaintext, and how many of them
_LENGTH = struct.Struct("<Q")  # before each sealed piece
_READ = 1 << 20  # bytes of TLS that are read at once
_TIMEOUT = 120.0  # seconds: for making and sealing the tokens, and for a connection


@dataclass(frozen=True, slots=True)
class Load:
    """The data of a holder: `total` bytes of tokens, a multiple of `piece`, which are sealed and sent in pieces."""

    total: int
    piece: int
    bits: int = 256

    def tokens(self) -> Tokens:
        """Return the tokens, which are the same in each process."""
        return np.random.default_rng(0).integers(0, 50_257, self.total // 2, dtype=np.uint16)


class TlsLink:
    """The visitor's end of TLS 1.3.

    It decrypts from memory: `ssl.SSLSocket` makes two system calls for each record of 16 KiB, which takes longer.
    """

    def __init__(self, port: int, certificate: Path) -> None:
        context = ssl.create_default_context(cafile=certificate)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._received, self._sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._sent, server_hostname=_NAME)
        self._read = memoryview(bytearray(_READ))
        self._socket = _connect(port)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._fetch()
        self._flush()

    @property
    def cipher(self) -> tuple[str, str, int] | None:
        """The name of the cipher, the protocol, and the bits of the key."""
        return self._tls.cipher()

    def request(self, first: int, nbytes: int) -> None:
        """Ask for a range of plaintext."""
        self._tls.write(_REQUEST.pack(first, nbytes))
        self._flush()

    def receive(self, target: Bytes) -> None:
        """Fill `target` with the next bytes."""
        view, filled = target.data, 0
        while filled < len(view):
            try:
                filled += int(self._tls.read(len(view) - filled, view[filled:]))  # of bytes, by their number
            except ssl.SSLWantReadError:
                self._fetch()

    def _flush(self) -> None:
        self._socket.sendall(self._sent.read())

    def _fetch(self) -> None:
        size = self._socket.recv_into(self._read)
        if not size:
            raise _gone()
        self._received.write(self._read[:size])

    def close(self) -> None:
        self._socket.close()


class SealedLink:
    """The visitor's end of plain TCP, through which sealed pieces come."""

    def __init__(self, port: int) -> None:
        self._socket = _connect(port)

    def request(self, first: int, nbytes: int) -> None:
        """Ask for a range of plaintext."""
        self._socket.sendall(_REQUEST.pack(first, nbytes))

    def receive(self) -> bytes:
        """Return the next sealed piece."""
        return _exactly(self._socket, *_LENGTH.unpack(_exactly(self._socket, _LENGTH.size)))

    def close(self) -> None:
        self._socket.close()


@contextmanager
def open_links(load: Load) -> Iterator[tuple[TlsLink, SealedLink, Key]]:
    """Start a holder, and yield a connection of each kind and the key of its pieces. The process ends with them."""
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as name:
        folder, key = Path(name), Key.generate(load.bits)
        key.save(folder / _KEY)
        _write_certificate(folder / _CERTIFICATE)
        process = get_context("spawn").Process(target=_hold, args=(load, folder, sender), daemon=True)
        process.start()
        sender.close()  # so that a holder that fails ends the wait
        try:
            if not receiver.poll(_TIMEOUT):
                raise _gone()
            port = receiver.recv()
            with closing(SealedLink(port)) as sealed, closing(TlsLink(port, folder / _CERTIFICATE)) as tls:
                yield tls, sealed, key
        except EOFError:
            raise _gone() from None
        finally:
            process.terminate()
            process.join()
            receiver.close()


def _gone() -> FastrackError:
    return FastrackError("the holder's process: expected it to send its data, got none. Memory may be short; try again")


def _connect(port: int) -> socket.socket:
    return _set(socket.create_connection(("127.0.0.1", port), _TIMEOUT))


def _set(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # With a timeout the socket would not block, and MSG_WAITALL not wait for all.
    connection.settimeout(None)
    return connection


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Return so many bytes, which `SealedTensor.from_bytes` then need not copy."""
    data = connection.recv(nbytes, socket.MSG_WAITALL)
    if len(data) != nbytes:
        raise _gone()
    return data


# The holder.


def _hold(load: Load, folder: Path, sender: Connection) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / _CERTIFICATE)
    tokens = load.tokens()
    file, starts = _seal_pieces(tokens, load, Key.load(folder / _KEY))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT)
        sender.send(server.getsockname()[1])
        sealed, tls = (_set(server.accept()[0]) for _ in range(2))
    thread = Thread(target=_send_sealed, args=(sealed, file, starts, load.piece), daemon=True)
    thread.start()
    _send_plain(context.wrap_socket(tls, server_side=True), tokens.view(np.uint8))
    thread.join()


def _seal_pieces(tokens: Tokens, load: Load, key: Key) -> tuple[int, list[int]]:
    """Seal the pieces into a file in memory, each after its length. Return its descriptor, and where pieces start."""
    file = os.memfd_create("sealed")
    starts = [0]
    for piece in tokens.reshape(-1, load.piece // tokens.itemsize):
        data = seal(piece, key, "tokens").to_bytes()
        starts.append(starts[-1] + os.write(file, _LENGTH.pack(len(data))) + os.write(file, data))
    return file, starts


def _send_plain(connection: ssl.SSLSocket, data: Bytes) -> None:
    while asked := connection.recv(_REQUEST.size):  # a request is one record
        first, nbytes = _REQUEST.unpack(asked)
        connection.sendall(data[first : first + nbytes].data)


def _send_sealed(connection: socket.socket, file: int, starts: list[int], piece: int) -> None:
    while asked := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
        first, nbytes = _REQUEST.unpack(asked)
        start, stop = starts[first // piece], starts[(first + nbytes) // piece]
        while start < stop:
            start += os.sendfile(connection.fileno(), file, start, stop - start)


def _write_certificate(path: Path) -> None:
    """Write a certificate that signs itself, and its private key, for as long as a measurement takes."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now, day = dt.datetime.now(dt.UTC), dt.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.touch(0o600)
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + secret)
