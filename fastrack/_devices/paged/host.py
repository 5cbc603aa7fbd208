"""`HostPages`: paged memory of the host, whose blocks the CPU engine seals and opens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from fastrack._crypto.base import Bytes, Engine, address
from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._tensors.arrays import empty_bytes


class HostPages:
    """Paged memory of the host. Each block passes through memory of its size, so that a server reads no bad byte."""

    def __init__(self, groups: Sequence[Sequence[Piece]], engine: Engine) -> None:
        self._groups, self._engine = groups, engine
        self._sizes = [sum(piece.size for piece in pieces) for pieces in groups]
        self._memory = {way: empty_bytes(max(self._sizes)) for way in ("seal", "open")}

    def sizes(self) -> Sequence[int]:
        """Return the bytes of plaintext of a block of each group."""
        return self._sizes

    def mark(self) -> None:
        """Return nothing: work on the host is done when its call returns."""

    def seal(self, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: None) -> None:
        """Seal blocks, block `i` under key `i` into `sealed[i]`."""
        for row, (block, target) in enumerate(zip(blocks, sealed, strict=True)):
            memory = self._memory["seal"][: self._sizes[block.group]]
            end = address(memory)
            for piece in self._groups[block.group]:
                ctypes.memmove(end, piece.address + block.number * piece.stride, piece.size)
                end += piece.size
            schedule = self._engine.expand_key(key := keys.key(row))
            key.wipe()
            try:
                self._engine.seal_run(schedule, memory, target, 0)
            finally:
                schedule.wipe()

    def open(self, keys: MessageKeys, blocks: Sequence[PagedBlock], sealed: Sequence[Bytes], after: None) -> list[bool]:
        """Open blocks into their places, and return which are right. The others hold zeros."""
        return [
            self._open(keys, row, block, source) for row, (block, source) in enumerate(zip(blocks, sealed, strict=True))
        ]

    def _open(self, keys: MessageKeys, row: int, block: PagedBlock, source: Bytes) -> bool:
        memory = self._memory["open"][: self._sizes[block.group]]
        schedule = self._engine.expand_key(key := keys.key(row))
        key.wipe()
        try:
            is_right = self._engine.open_run(schedule, source, memory, 0) is None
        finally:
            schedule.wipe()
        if not is_right:
            memory.fill(0)  # the chunks that are right, too
        end = address(memory)
        for piece in self._groups[block.group]:
            ctypes.memmove(piece.address + block.number * piece.stride, end, piece.size)
            end += piece.size
        return is_right

    def close(self) -> None:
        """Overwrite the memory that blocks pass through."""
        for memory in self._memory.values():
            memory.fill(0)
