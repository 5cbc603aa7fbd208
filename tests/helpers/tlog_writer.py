"""A transparency log and witnesses, written after RFC 6962 and the C2SP documents, and apart from fastrack."""

import base64
import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey


def b64(data):
    return base64.b64encode(data).decode()


# RFC 6962, section 2.1: the definitions, as they stand there.


def split(count):
    """Return the largest power of two that is smaller than `count`."""
    return 1 << (count - 1).bit_length() - 1


def tree_hash(entries):
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\0" + entries[0]).digest()
    k = split(len(entries))
    return hashlib.sha256(b"\1" + tree_hash(entries[:k]) + tree_hash(entries[k:])).digest()


def path(index, entries):
    if len(entries) == 1:
        return []
    k = split(len(entries))
    if index < k:
        return [*path(index, entries[:k]), tree_hash(entries[k:])]
    return [*path(index - k, entries[k:]), tree_hash(entries[:k])]


class NoteSigner:
    """A key of signed notes. Type 1 signs as a log does, 4 and 6 as witnesses do."""

    def __init__(self, name, kind, seed=0):
        secret = bytes([seed]) * 32
        self.name, self.kind = name, kind
        self.key = (MLDSA44PrivateKey.from_seed_bytes if kind == 6 else Ed25519PrivateKey.from_private_bytes)(secret)
        public = bytes([kind]) + self.key.public_key().public_bytes_raw()
        self.id = hashlib.sha256(name.encode() + b"\n" + public).digest()[:4]
        self.verifier = f"{name}+{self.id.hex()}+{b64(public)}"

    def sign(self, text, time=1_700_000_000):
        """Return the signature line of a checkpoint."""
        stamp = time.to_bytes(8, "big")
        if self.kind == 1:
            signature = self.key.sign(text.encode())
        elif self.kind == 4:
            signature = stamp + self.key.sign(f"cosignature/v1\ntime {time}\n{text}".encode())
        else:
            origin, size, root = text.split("\n")[:3]
            names = [bytes([len(one.encode())]) + one.encode() for one in (self.name, origin)]
            size, root = int(size).to_bytes(8, "big"), base64.b64decode(root)
            signature = stamp + self.key.sign(b"subtree/v1\n\0" + names[0] + stamp + names[1] + bytes(8) + size + root)
        return f"— {self.name} {b64(self.id + signature)}\n"


def checkpoint(origin, entries, signers, extension=""):
    text = f"{origin}\n{len(entries)}\n{b64(tree_hash(entries))}\n{extension}"
    return text + "\n" + "".join(signer.sign(text) for signer in signers)


def proof(index, entries, signers, origin=None, extra=None, extension=""):
    """Return the content of a `.tlog-proof` file."""
    lines = ["c2sp.org/tlog-proof@v1"]
    lines += [] if extra is None else [f"extra {b64(extra)}"]
    lines += [f"index {index}", *map(b64, path(index, entries))]
    origin = signers[0].name if origin is None else origin
    return (
        "".join(f"{line}\n" for line in [*lines, ""]).encode()
        + checkpoint(origin, entries, signers, extension).encode()
    )
