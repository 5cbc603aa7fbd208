"""The messages of one call on a CUDA device, each an operation of its own."""

from __future__ import annotations

import copy
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import SEALED_CHUNK_SIZE
from fastrack._devices.base import BadChunk, Messages, Segment, Slab, SpanCallback, StagingBuffer
from fastrack._devices.cuda.buffers import CudaStagingBuffer
from fastrack._devices.cuda.operation import CudaOperation, SegmentCallback

if TYPE_CHECKING:
    from fastrack._devices.cuda.device import CudaDevice


class CudaOperations:
    """`Operation` of several messages."""

    def __init__(self, device: CudaDevice, messages: Messages, note: SpanCallback | None) -> None:
        self._messages = messages
        self._operations: list[CudaOperation] = []
        try:
            for number in range(len(messages)):
                key = messages.keys.key(number)
                try:
                    self._operations.append(device.begin_message(key, messages.memories[number], _noting(note)))
                finally:
                    key.wipe()
        except BaseException:
            with suppress(Exception):
                self.finish()
            raise
        self.lane: int = self._operations[0].lane

    def open(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        assert slab is not None
        assert isinstance(buffer, CudaStagingBuffer)
        shared = len(slab.segments) > 1
        # What the caller has staged comes first, as the others take the buffer from its start, one after the other.
        for segment in sorted(slab.segments, key=lambda each: self._messages.plain[each.message] is None):
            number, offset = segment.message, segment.offset
            operation = self._operations[number]
            sealed = self._messages.sealed[number]
            if sealed is None:
                part = _part(buffer, offset)
                operation.open(segment, part.memory[: segment.sealed_size], part)
                buffer.issued = part.issued
            else:
                operation.open(segment, sealed.array if segment.plan else _run(sealed.array, segment), buffer)
            if shared:
                operation.issue()

    def seal(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        assert slab is not None
        assert isinstance(buffer, CudaStagingBuffer)
        for segment in slab.segments:
            sealed = self._messages.sealed[segment.message]
            target = buffer.memory[: segment.sealed_size] if sealed is None else _run(sealed.array, segment)
            self._operations[segment.message].seal(segment, target, buffer)

    def issue(self) -> None:
        for operation in self._operations:
            operation.issue()

    def finish(self, *, wait: bool = False) -> None:
        with ExitStack() as finishing:  # all of them, even if one fails
            for operation in reversed(self._operations):
                finishing.callback(operation.finish, wait=wait)

    def done(self) -> bool:
        return all(operation.done() for operation in self._operations)

    def result(self) -> BadChunk | None:
        bad: list[BadChunk] = []
        with ExitStack() as waiting:
            for number in reversed(range(len(self._operations))):
                waiting.callback(self._collect, number, bad)
        return min(bad, default=None)

    def _collect(self, number: int, bad: list[BadChunk]) -> None:
        chunk = self._operations[number].result()
        if chunk is not None:
            bad.append(BadChunk(number, chunk))


def _noting(note: SpanCallback | None) -> SegmentCallback | None:
    if note is None:
        return None
    return lambda name, segment, start, stop: note(name, Slab([segment], segment.sealed_size), start, stop)


def _run(sealed: Bytes, segment: Segment) -> Bytes:
    return sealed[segment.first_chunk * SEALED_CHUNK_SIZE :][: segment.sealed_size]


def _part(buffer: CudaStagingBuffer, offset: int) -> CudaStagingBuffer:
    """Return the buffer from an offset on."""
    part = copy.copy(buffer)
    part.memory = buffer.memory[offset:]
    part.address = buffer.address + offset
    part.device_ptr = buffer.device_ptr + offset
    return part
