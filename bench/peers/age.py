"""age, by pyrage.

Features: c2sp.org/age (the payload is STREAM over ChaCha20-Poly1305 in chunks of 64 KiB, which orders them and marks
the last; the header's HMAC is under the file key and so commits to it). The format could be read from any place, but
pyrage has no call for it.
"""

import io

import numpy as np

from bench.peers import container
from bench.peers.peer import Features, Peer


class Age(Peer):
    """Its calls on file objects, which are faster here than those on bytes and need no copy of everything."""

    name, package = "age (pyrage)", "pyrage"
    settings = "X25519; encrypt_io and decrypt_io, from and into the arrays' own memory"
    features = Features("not in this package", "refused", "yes", "yes", "no", "every age", "encrypted with the rest")

    def __init__(self):
        import pyrage

        self._age, self._identity = pyrage, pyrage.x25519.Identity.generate()

    def seal(self, arrays, path):
        with path.open("xb") as file:
            self._age.encrypt_io(_Reader(container.pieces(arrays)), file, [self._identity.to_public()])

    def open(self, path):
        memory = np.empty(path.stat().st_size, np.uint8)  # the plaintext is somewhat smaller
        writer = _Writer(memory)
        with path.open("rb") as file:
            self._age.decrypt_io(file, writer, [self._identity])
        return container.split(memory[: writer.size])


class _Reader(io.RawIOBase):
    """The pieces as a file to read."""

    def __init__(self, pieces):
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self):
        return True

    def read(self, size=-1):
        if not self._left:
            self._left = next(self._pieces, memoryview(b""))
        size = len(self._left) if size < 0 else size
        data, self._left = bytes(self._left[:size]), self._left[size:]
        return data


class _Writer(io.RawIOBase):
    """Memory as a file to write."""

    def __init__(self, memory):
        self._memory, self.size = memoryview(memory), 0

    def writable(self):
        return True

    def write(self, data):
        self._memory[self.size : self.size + len(data)] = data
        self.size += len(data)
        return len(data)
