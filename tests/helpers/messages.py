"""Messages as an engine or a device takes them, of keys and arrays."""

import numpy as np

from fastrack._crypto import base, cobblestone, message_keys


def raw_key(key, nonce=bytes(12)):
    """Make the key of a message of its bytes, which elsewhere are derived."""
    return cobblestone.MessageKey.raw(key, nonce)


def messages_of(keys, nbytes, memories, *, sealed=None, plain=None, plans=None, scalings=None):
    """Make messages of keys, sizes and memories. Arrays become memory; a column that is left out has no entry."""
    none = [None] * len(nbytes)
    if not isinstance(keys, message_keys.MessageKeys):
        keys = message_keys.MessageKeys.of(keys)
    memories = [_memory_of(each, writable=True) for each in memories]
    sealed, plain = ([_memory_of(each) for each in column or none] for column in (sealed, plain))
    return base.Messages(keys, nbytes, memories, sealed, plain, plans or none, scalings or none)


def _memory_of(given, *, writable=False):
    return base.HostMemory.of(given, writable=writable) if isinstance(given, np.ndarray) else given
