"""The values that messages are bound to: `MessageContext`, and `Binding` for a message added to a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from fastrack._crypto import cobblestone, derivation
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.message_keys import MessageKeys
from fastrack._keys.keys import Key
from fastrack._sealed.scales import Scale
from fastrack._tensors.arrays import Bytes
from fastrack._util.pickles import unpickle
from fastrack._util.shown import shown
from fastrack.errors import AuthenticationError, FormatError
from fastrack.format import SALT_SIZE

_quote = json.encoder.encode_basestring  # without escapes for characters beyond ASCII
Kind = Literal["tensor", "checkpoint", "folder", "index"]
"""The use that a message is sealed for. It is authenticated, as the first part of the context."""

Edition = tuple[str, int]
"""Lineage and version of a set of files, in which an anchor found a file."""


class MessageContext(NamedTuple):
    """The values that a message is bound to. Its key is derived from them: wrong values fail before a chunk opens."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    kind: Kind = "tensor"
    scale: Scale | None = None  # by which values are widened

    @property
    def scales(self) -> MessageContext | None:
        """The context of the scales. They were sealed for the same file as the values."""
        scale = self.scale
        return scale and MessageContext(scale.name, scale.dtype, scale.shape, self.file, self.kind)

    def encode(self) -> bytes:
        """Return the context string of the key derivation: a label with the kind, and canonical JSON."""
        require_name(self.name)
        before, after = _around_name(self.kind, self.dtype, self.file, self.shape)
        scale = "" if self.scale is None else f',"scale":{self.scale.encode(_quote(self.scale.name))}'
        try:
            return f"{before}{_quote(self.name)}{scale}{after}".encode()
        except UnicodeEncodeError:
            raise FormatError(f"name of a tensor: expected Unicode text, got {shown(self.name, 200)}") from None

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("MessageContext", *(self[:-1] if self.scale is None else self))

    def new_key(self, key: Key) -> tuple[MessageKey, Bytes]:
        """Return the key of a new message, and its header: a fresh salt and the commitment."""
        return _new_key(key, self.encode())

    def new_keys(self, key: Key) -> tuple[MessageKeys, Bytes]:
        """Return the key of a new message, as the only row of `MessageKeys`, which the caller wipes, and its header."""
        salt, secret, keys = os.urandom(SALT_SIZE), key.material(), MessageKeys(1)
        try:  # into the row itself: each copy of a key takes time, here and when it is wiped
            target = keys.reserve((0,), 8 * len(secret))
            derivation.derive_rows(secret, (derivation.new_header(salt),), (self.encode(),), (0,), target)
            return keys, np.frombuffer(salt + keys.commitment(0), np.uint8)
        except BaseException:
            keys.wipe()
            raise

    def mismatch(self) -> AuthenticationError:
        """Return the error for a header that does not match, with the name of the tensor."""
        return AuthenticationError(f"tensor {shown(self.name, 200)}: {cobblestone.MISMATCH}", tensor=self.name)


def require_name(name: object) -> None:
    """Raise TypeError if the name of a tensor is no text, for example where arguments were swapped."""
    if not isinstance(name, str):
        raise TypeError(f"name of a tensor: expected text, got {shown(name, 200)}. Pass a str, after the key")


@lru_cache(maxsize=256)
def _around_name(kind: str, dtype: str, file: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Return the parts of a context before and after the name, which tensors of a file may share."""
    extents = ",".join(map(int.__repr__, shape))
    return f'fastrack/{kind}@1\0{{"dtype":{_quote(dtype)},"file":{_quote(file)},"name":', f',"shape":[{extents}]}}'


@dataclass(frozen=True, slots=True)
class Binding:
    """The file that an earlier message was added to, and a header that authenticates this.

    Without it, tensors from several files of one owner could be recombined into one file unnoticed.
    """

    file: str
    header: bytes

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("Binding", self.file, self.header)

    @classmethod
    def new(cls, context: MessageContext, file: str, key: Key) -> Binding:
        """Bind the message of `context` to a file, by the header of a message without chunks."""
        message_key, header = _new_key(key, _binding_context(context, file))
        message_key.wipe()
        return cls(file, header.tobytes())

    def check(self, context: MessageContext, key: Key) -> None:
        """Authenticate that the message was put into the file under this key."""
        try:
            derivation.open_header(self.header, key.material(), _binding_context(context, self.file)).wipe()
        except AuthenticationError:
            raise AuthenticationError(
                f"tensor {context.name!r:.200}: it was sealed for another file, and its binding to this one does not "
                "match: another key made it, or it was altered; get the file again from its owner",
                tensor=context.name,
            ) from None


def _binding_context(context: MessageContext, file: str) -> bytes:
    """Return the context string of a binding: the file id, and the context of the message."""
    return f"fastrack/binding@1\0{file}\0".encode() + context.encode()


def _new_key(key: Key, context: bytes) -> tuple[MessageKey, Bytes]:
    salt = os.urandom(SALT_SIZE)
    message_key = derivation.derive(key.material(), salt, context)
    return message_key, np.frombuffer(salt + message_key.commitment, np.uint8)


def new_file_id() -> str:
    """Return a random file id, which the messages of a file are bound to: 16 bytes, in hexadecimal."""
    return os.urandom(16).hex()
