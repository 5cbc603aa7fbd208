"""Google Tink's streaming AEAD.

Features: Tink's wire format for streaming AEAD (the nonce of a segment holds its number and whether it is the last; a
salt and HKDF give each file its key, with no commitment to it), and the docstring of the Python interface, whose
streams are "readable but not seekable".
"""

import numpy as np

from bench.peers import container
from bench.peers.peer import Features, Peer


class Tink(Peer):
    """The largest segments of its templates, and as much in a call."""

    name, package = "Tink streaming AEAD", "tink"
    settings = "AES256_GCM_HKDF_1MB; unbuffered files, 1 MiB at a time, readinto the arrays' own memory"
    features = Features(
        "not in Python", "refused", "no", "yes", "no", "Tink in other languages", "encrypted with the rest"
    )

    def __init__(self):
        import tink
        from tink import streaming_aead

        streaming_aead.register()
        template = streaming_aead.streaming_aead_key_templates.AES256_GCM_HKDF_1MB
        self._aead = tink.new_keyset_handle(template).primitive(streaming_aead.StreamingAead)

    def seal(self, arrays, path):
        with self._aead.new_encrypting_stream(path.open("xb", buffering=0), b"") as stream:
            for piece in container.pieces(arrays):
                stream.write(piece)

    def open(self, path):
        memory = np.empty(path.stat().st_size, np.uint8)  # the plaintext is somewhat smaller
        view, done = memoryview(memory), 0
        with self._aead.new_decrypting_stream(path.open("rb", buffering=0), b"") as stream:
            while size := stream.readinto(view[done : done + container.PIECE]):
                done += size
        return container.split(memory[:done])
