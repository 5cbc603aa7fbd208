"""Paged memory of a device: blocks whose bytes lie in pieces, sealed from there and opened into there.

The KV cache of a server is such memory: each layer has an array of all blocks, and a block has a piece in each array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fastrack._crypto.base import Bytes
from fastrack._crypto.message_keys import MessageKeys


class Piece(NamedTuple):
    """A piece of each block of a group: block `n` has `size` bytes at `address` + `n` times `stride`.

    All three are multiples of 16 for a GPU.
    """

    address: int
    stride: int
    size: int


class PagedBlock(NamedTuple):
    """A block: the number of its group, and its number in the arrays of that group."""

    group: int
    number: int


class Pages(Protocol):
    """The blocks of a server's arrays on a device, in groups whose blocks have the same pieces.

    The plaintext of a block is its pieces, one after the other, in the order of its group. Its ciphertext is a message
    without its header: chunks, each with its tag. Two threads may use this: one that seals, and one that opens.
    """

    def sizes(self) -> Sequence[int]:
        """Return the bytes of plaintext of a block of each group."""

    def mark(self) -> Any:
        """Return a mark of all work so far on the caller's current stream, without waiting for it."""

    def seal(self, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: Any) -> None:
        """Seal blocks, block `i` under key `i` into `sealed[i]`, once the work before the mark `after` is done.

        Returns when all are there. Raise DeviceError if the device failed or lost a part of the work; `sealed` then
        holds zeros.
        """

    def open(self, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: Any) -> list[bool]:
        """Open blocks into their places, once the work before the mark `after` is done, and return which are right.

        A block with a wrong tag, and each block if a part of the work was lost, holds zeros only. Raise DeviceError if
        the device failed: then nothing is known of any of their places.
        """

    def close(self) -> None:
        """Wipe and release what the device keeps for this. The arrays are the server's."""
