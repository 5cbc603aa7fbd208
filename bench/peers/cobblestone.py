"""``cryptography.cobblestone``, the same cipher and format that fastrack uses for each tensor.

Features: c2sp.org/chunked-encryption for the format; the classes' methods (update, update_into, finalize) for the
package's access: from the start to the end only.
"""

import numpy as np

from bench.peers import container
from bench.peers.peer import Features, Peer

CONTEXT = b"fastrack bench"


class Cobblestone(Peer):
    """One message on one thread. More did not help when they were tried: update_into keeps the interpreter's lock."""

    name, package = "cryptography.cobblestone", "cryptography"
    settings = "Cobblestone256; unbuffered files, 1 MiB at a time, update_into memory made for it"
    features = Features(
        "not in this package", "refused", "yes", "yes", "no", "any Cobblestone", "encrypted with the rest"
    )

    def __init__(self):
        from cryptography import cobblestone

        self._encryptor, self._decryptor = cobblestone.Cobblestone256Encryptor, cobblestone.Cobblestone256Decryptor
        self._key = self._encryptor.generate_key()

    def seal(self, arrays, path):
        encryptor, sealed = self._encryptor(self._key, CONTEXT), memoryview(bytearray(2 * container.PIECE))
        with path.open("xb", buffering=0) as file:
            for piece in container.pieces(arrays):
                file.write(sealed[: encryptor.update_into(piece, sealed)])
            file.write(encryptor.finalize())

    def open(self, path):
        decryptor, sealed = self._decryptor(self._key, CONTEXT), memoryview(bytearray(container.PIECE))
        plain = np.empty(path.stat().st_size + container.PIECE, np.uint8)  # update_into wants room to spare
        done = 0
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(sealed):
                done += decryptor.update_into(sealed[:size], plain[done:])
        last = decryptor.finalize()
        plain[done : done + len(last)] = np.frombuffer(last, np.uint8)
        return container.split(plain[: done + len(last)])
