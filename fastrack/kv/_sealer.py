"""`BlockSealer`: blocks of a KV cache as messages that open as what they were sealed as, and as nothing else."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np

from fastrack._crypto import derivation
from fastrack._crypto.base import check_buffers
from fastrack._crypto.engine import get_engine
from fastrack._documents.canonical import encode
from fastrack._keys.keyring import KeyLike
from fastrack._keys.keys import Key
from fastrack._tensors.arrays import Bytes
from fastrack._util.fork import per_process
from fastrack.errors import AuthenticationError
from fastrack.format import HEADER_SIZE, SALT_SIZE, message_size
from fastrack.kv._settings import block_key

_log = logging.getLogger("fastrack")
REFUSED = "a block was altered, or is of another key, model, layout or tenant"
_BLOCK, _NAME = b"fastrack/kv@1\0", b"fastrack/kv-name@1\0"
_NO_SALT: Final = bytes(SALT_SIZE)  # of names, which are equal for equal blocks


class BlockContext(NamedTuple):
    """Identity of a block of a KV cache. It is authenticated: a block opens only in the place that it was sealed for.

    Attributes
    ----------
    model : str
        Model and version of its weights. Blocks of other weights under the same name are blocks of another model.
    layout : str
        Whatever else decides what the bytes mean: dtype, shape, order, size of a block, groups of layers.
    ranks : str
        Part of the model whose keys and values these are, such as its rank among tensor-parallel ones.
    hash : bytes
        Hash of the tokens up to the end of the block, by which the server finds it.
    salt : str
        Salt of the tenant. A block of one tenant opens for no other.

    Examples
    --------
    >>> from fastrack.kv import BlockContext
    >>> BlockContext("llama@1", "bfloat16 [2, 16, 8, 64]", "0 of 1", b"tokens", "tenant-a").encode()
    b'fastrack/kv@1...{"hash":"746f6b656e73","layout":"bfloat16 [2, 16, 8, 64]","model":"llama@1",...}'
    """

    model: str
    layout: str
    ranks: str
    hash: bytes
    salt: str = ""

    def encode(self) -> bytes:
        """Return the context string of the key derivation: a label, and canonical JSON."""
        return _BLOCK + self._members()

    def _members(self) -> bytes:
        return encode({**self._asdict(), "hash": self.hash.hex()})

    def name(self, key: Key) -> str:
        """Return the name of the block in a store: 64 hexadecimal digits that only a holder of the key can compute.

        Without the key, names do not tell whether a store has the block of a text that can be guessed.
        """
        derived = derivation.derive(key.material(), _NO_SALT, _NAME + self._members())
        derived.wipe()
        return derived.commitment.hex()


class BlockSealer:
    """Seal and open blocks of KV caches, of one key. A block that does not open is a miss, and is counted.

    Each block is a message of its own, with a key that is derived from a fresh salt and from its `BlockContext`. So
    blocks may be stored, swapped, lost or guessed in any order: none opens in the place of another one, in another
    layout, for another tenant or another model, or cut. No call raises for what a store returns.

    A block of the same context that was sealed earlier opens too: it has the keys and values of the same tokens. Where
    weights change under one name, the version in `BlockContext.model` has to change.

    Parameters
    ----------
    key : KeyLike, optional
        As for `fastrack.seal`. All servers that share a store have the same. Blocks of an earlier key are misses.
    threads : int, optional
        Threads for one block, by default as for `fastrack.Channel`.

    Raises
    ------
    UnknownKeyError, FormatError, KeyPermissionError, OSError, TypeError
        As for `fastrack.seal`.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.kv import BlockContext, BlockSealer
    >>> sealer = BlockSealer(fastrack.Key.generate())
    >>> block, here = bytearray(b"keys and values!"), BlockContext("llama@1", "uint8 [16]", "0 of 1", b"tokens")
    >>> sealed = bytearray(sealer.sealed_size(len(block)))
    >>> sealer.seal(here, block, sealed)
    88
    >>> opened = bytearray(len(block))
    >>> sealer.open(here, sealed, opened), bytes(opened)
    (True, b'keys and values!')
    >>> sealer.open(here._replace(salt="another tenant"), sealed, opened), any(opened)
    (False, False)
    >>> sealer.counts["sealed"], sealer.counts["opened"], sealer.counts["refused"]
    (1, 1, 1)
    """

    def __init__(self, key: KeyLike | None = None, *, threads: int | None = None) -> None:
        self.key = block_key(key)
        self._engine = get_engine(threads=threads)
        self._counts: Counter[str] = Counter()
        self._lock = per_process(self, "_lock", threading.Lock)

    @property
    def counts(self) -> Counter[str]:
        """Numbers of blocks so far, by what happened to them: ``sealed``, ``opened``, ``refused`` and others."""
        with self._lock:
            return self._counts.copy()

    @staticmethod
    def sealed_size(nbytes: int) -> int:
        """Return the exact size of a sealed block, in bytes."""
        return message_size(nbytes)

    def seal(self, context: BlockContext, block: Any, target: Any) -> int:
        """Seal a block.

        Parameters
        ----------
        context : BlockContext
            What the block is.
        block, target : buffer
            Contiguous memory: the block, and where its message goes, which needs `sealed_size` bytes or more.

        Returns
        -------
        int
            Bytes of the message, at the beginning of `target`.

        Raises
        ------
        ValueError
            If `target` is too small, or overlaps the block.
        """
        plain, sealed = _apart(block, target)
        size = message_size(plain.size)
        if sealed.size < size:
            raise ValueError(f"sealing a KV block failed: expected {size} bytes for its message, got {sealed.size}")
        salt = os.urandom(SALT_SIZE)
        message_key = derivation.derive(self.key.material(), salt, context.encode())
        schedule = self._engine.expand_key(message_key)
        message_key.wipe()
        try:
            self._engine.seal_run(schedule, plain, sealed[HEADER_SIZE:size], 0)
        finally:
            schedule.wipe()
        sealed[:HEADER_SIZE] = np.frombuffer(salt + message_key.commitment, np.uint8)
        self.count("sealed")
        return size

    def open(self, context: BlockContext, message: Any, target: Any) -> bool:
        """Open a block, or return False, and leave zeros in `target`.

        Parameters
        ----------
        context : BlockContext
            What the block has to be.
        message : buffer
            Its message, to which nothing but zeros of a larger buffer may be added: bytes beyond its size are ignored.
        target : buffer
            Contiguous memory of exactly the size of the block.

        Returns
        -------
        bool
            Whether the block was authentic, and is in `target`.

        Raises
        ------
        ValueError
            If the memory of both overlaps.
        """
        sealed, plain = _apart(message, target)
        size = message_size(plain.size)
        is_open = sealed.size >= size and self._open(context, sealed[:size], plain)
        if is_open:
            self.count("opened")
        else:
            plain.fill(0)
            self.count("refused", REFUSED)
        return is_open

    def _open(self, context: BlockContext, sealed: Bytes, plain: Bytes) -> bool:
        header = sealed[:HEADER_SIZE].tobytes()
        try:
            message_key = derivation.open_header(header, self.key.material(), context.encode())
        except AuthenticationError:
            return False
        schedule = self._engine.expand_key(message_key)
        message_key.wipe()
        try:
            return self._engine.open_run(schedule, sealed[HEADER_SIZE:], plain, 0) is None
        finally:
            schedule.wipe()

    def count(self, outcome: str, problem: str = "", number: int = 1) -> None:
        """Count blocks; say once what was wrong with the first one."""
        with self._lock:
            is_first = not self._counts[outcome]
            self._counts[outcome] += number
        if problem and is_first:
            _log.warning("KV cache: %s. It counts as a miss, and so will others, without a word", problem)


def _apart(source: Any, target: Any) -> tuple[Bytes, Bytes]:
    """Return the bytes of two buffers that do not overlap: a chunk is written before the next ones are read."""
    read, written = view_of(source), view_of(target, writable=True)
    if np.may_share_memory(read, written):
        raise ValueError("a KV block: expected memory apart from its message, got memory of both. Give another")
    return read, written


def view_of(memory: Any, *, writable: bool = False) -> Bytes:
    """Return the bytes of contiguous memory, as uint8 (n,)."""
    view = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    check_buffers(view, view if writable else None)
    return view
