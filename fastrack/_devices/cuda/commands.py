"""Lists of commands for a CUDA device, which `Driver.issue` runs by one native call.

A command is a sequence of 64-bit words: its opcode, its number of words, and its operands, such as addresses and CUDA
handles of streams, events and functions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from numpy import int64

from fastrack._crypto.base import Bytes, address

# Commands to the device.
WAIT, RECORD, UPLOAD, DOWNLOAD, FILL, LAUNCH = 1, 2, 3, 4, 5, 6
# Work of the host.
SYNCHRONIZE, POLL, COPY, PACK, TIMESTAMP = 7, 8, 9, 10, 11
# Stops a list that holds the interpreter's lock, so that the rest runs without it. POLL can do so, too.
REQUIRE_IDLE = 12
# Queries.
CAPTURING = 13

NAMES = {
    WAIT: "cuStreamWaitEvent",
    RECORD: "cuEventRecord",
    UPLOAD: "cuMemcpyHtoDAsync",
    DOWNLOAD: "cuMemcpyDtoHAsync",
    FILL: "cuMemsetD8Async",
    LAUNCH: "cuLaunchKernel",
    SYNCHRONIZE: "cuEventSynchronize",
    POLL: "cuEventQuery",
    REQUIRE_IDLE: "cuStreamQuery",
    CAPTURING: "cuStreamIsCapturing",
}
"""The function of the CUDA driver API that each command calls."""


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel and its launch configuration."""

    handle: int  # CUfunction
    threads: int  # per block
    shared: int  # bytes of dynamic shared memory per block
    local: int = 0  # bytes per thread of its registers that are spilled to device memory, which nothing wipes


class Commands:
    """A list of commands as the words `code`, in the order of their issue.

    Streams and events have a `ptr`, their CUDA handle. The list keeps the memory that its commands refer to alive.
    `copies` is the number of bytes that the host copies within host memory.
    """

    __slots__ = ("_keepalive", "code", "copies")

    def __init__(self) -> None:
        self.code = array("q")
        self.copies = 0
        self._keepalive: list[object] = []

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work on `stream` wait for `event`, as last recorded."""
        self.code.extend((WAIT, 4, stream.ptr, event.ptr))

    def record(self, event: Any, stream: Any) -> None:
        """Complete `event` when all earlier work on `stream` is done."""
        self.code.extend((RECORD, 4, event.ptr, stream.ptr))

    def upload(self, pointer: int, source: Bytes, stream: Any) -> None:
        """Copy host memory to the device. The caller must not change it before that is done."""
        self._keepalive.append(source)
        self.code.extend((UPLOAD, 6, pointer, address(source), source.size, stream.ptr))

    def download(self, target: Bytes, pointer: int, stream: Any) -> None:
        """Copy from the device to host memory."""
        self._keepalive.append(target)
        self.code.extend((DOWNLOAD, 6, address(target), pointer, target.size, stream.ptr))

    def fill(self, pointer: int, value: int, size: int, stream: Any) -> None:
        """Set `size` bytes of device memory to `value`."""
        self.code.extend((FILL, 6, pointer, value, size, stream.ptr))

    def launch(
        self, function: Function, blocks: int, arguments: Sequence[int], stream: Any, table: bytes = b""
    ) -> None:
        """Launch a kernel of `kernels/`. All its arguments, pointers and counts, have 64 bits; a table comes last."""
        words = 7 + len(arguments) + len(table) // 8
        self.code.extend((LAUNCH, words, function.handle, blocks, function.threads, function.shared, stream.ptr))
        self.code.extend(arguments)
        self.code.frombytes(table)

    def synchronize(self, event: Any) -> None:
        """Block the issuing thread until `event` is done."""
        self.code.extend((SYNCHRONIZE, 3, event.ptr))

    def drain(self, stream: Any, event: Any) -> None:
        """Block the issuing thread until all earlier work on `stream` is done, which completes `event`."""
        self.record(event, stream)
        self.synchronize(event)

    def poll(self, event: Any, nanoseconds: int, *, stop: bool = False) -> None:
        """Spin until `event` is done, at most for this time.

        With `stop` a list that holds the interpreter's lock releases it here if the event is not done by then.
        """
        self.code.extend((POLL, 5, event.ptr, nanoseconds, int(stop)))

    def require_idle(self, stream: Any) -> None:
        """Release the interpreter's lock here, in a list that holds it, if `stream` has work left.

        A call that adds work to a full stream blocks until there is room, which may depend on a callback into Python.
        """
        self.code.extend((REQUIRE_IDLE, 3, stream.ptr))

    def capturing(self, stream: Any) -> int:
        """Query whether a CUDA graph captures a stream. Return an index: ``code[index]`` is then not 0."""
        self.code.extend((CAPTURING, 4, stream.ptr, 0))
        return len(self.code) - 1

    def copy(self, target: Bytes, source: Bytes) -> None:
        """Copy within host memory, between arrays of the same size."""
        self.copy_memory(address(target), address(source), source.size, (target, source))

    def copy_memory(self, target: int, source: int, size: int, owner: object) -> None:
        """Copy within host memory, between addresses. The list keeps `owner` alive."""
        self._keepalive.append(owner)
        self.copies += size
        self.code.extend((COPY, 5, target, source, size))

    def pack(self, target: Bytes, source: Bytes, chunks: npt.NDArray[int64]) -> None:
        """Copy the chunks of these numbers out of a message without its header, one after the other."""
        self._keepalive += (target, source, chunks)
        self.copies += target.size
        self.code.extend((PACK, 7, address(target), address(source), source.size, address(chunks), chunks.size))

    def keep_alive(self, owner: object) -> None:
        """Keep an object alive as long as this list."""
        self._keepalive.append(owner)

    def timestamp(self) -> int:
        """Store the time, as `time.perf_counter_ns`. Return an index: ``code[index]`` then holds it."""
        self.code.extend((TIMESTAMP, 3, 0))
        return len(self.code) - 1
