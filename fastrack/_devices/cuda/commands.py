"""Lists of commands for a CUDA device, which `Driver.issue` runs by one native call.

A command is a run of 64-bit words: its opcode, how many words it has, and its operands. Addresses, streams, events and
functions are the numbers by which CUDA knows them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from numpy import int64

from fastrack._crypto.base import Bytes

# What goes to the device.
WAIT, RECORD, UPLOAD, DOWNLOAD, FILL, LAUNCH = 1, 2, 3, 4, 5, 6
# What the host does.
SYNCHRONIZE, POLL, COPY, PACK, STAMP = 7, 8, 9, 10, 11
# What stops a list that keeps the interpreter's lock, so that the rest goes on without it; POLL may, too.
REQUIRE_IDLE = 12
# What is only asked.
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
"""The function of the CUDA driver that a command calls."""


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel as the driver launches it.

    handle : its CUfunction
    threads : threads of a block
    shared : bytes of dynamic shared memory of a block
    """

    handle: int
    threads: int
    shared: int


class Commands:
    """Collect commands, in the order in which they are to be issued.

    Streams and events have a `ptr`, the number CUDA gave them. What a command points to is kept alive as long as this
    list is.
    """

    __slots__ = ("_kept", "code", "copies")

    def __init__(self) -> None:
        self.code = array("q")
        self.copies = 0  # bytes that the host copies
        self._kept: list[object] = []

    def __bool__(self) -> bool:
        return bool(self.code)

    def wait(self, stream: Any, event: Any) -> None:
        """Let nothing that is put on `stream` from now on start before `event` happened, as last recorded."""
        self.code.extend((WAIT, 4, stream.ptr, event.ptr))

    def record(self, event: Any, stream: Any) -> None:
        """Have `event` happen when all that is on `stream` so far is done."""
        self.code.extend((RECORD, 4, event.ptr, stream.ptr))

    def upload(self, pointer: int, source: Bytes, stream: Any) -> None:
        """Copy page-locked memory to the device. The caller keeps it as it is until that is done."""
        self._kept.append(source)
        self.code.extend((UPLOAD, 6, pointer, address(source), source.size, stream.ptr))

    def download(self, target: Bytes, pointer: int, stream: Any) -> None:
        """Copy from the device into page-locked memory."""
        self._kept.append(target)
        self.code.extend((DOWNLOAD, 6, address(target), pointer, target.size, stream.ptr))

    def fill(self, pointer: int, value: int, size: int, stream: Any) -> None:
        """Set `size` bytes of device memory to `value`."""
        self.code.extend((FILL, 6, pointer, value, size, stream.ptr))

    def launch(self, function: Function, blocks: int, arguments: Sequence[int], stream: Any) -> None:
        """Start a kernel of `kernels/`. All its arguments are 64 bits wide: pointers and counts."""
        head = (LAUNCH, 7 + len(arguments), function.handle, blocks, function.threads, function.shared, stream.ptr)
        self.code.extend((*head, *arguments))

    def synchronize(self, event: Any) -> None:
        """Block the issuing thread until `event` happened."""
        self.code.extend((SYNCHRONIZE, 3, event.ptr))

    def poll(self, event: Any, nanoseconds: int, *, stop: bool = False) -> None:
        """Spin until `event` happened, but not for longer than that.

        With `stop` a list that keeps the interpreter's lock gives it up if the event did not happen by then.
        """
        self.code.extend((POLL, 5, event.ptr, nanoseconds, int(stop)))

    def require_idle(self, stream: Any) -> None:
        """Let a list that keeps the interpreter's lock give it up here if `stream` has work left.

        What is put on a stream that is full blocks until there is room, which may take a callback that needs the lock.
        """
        self.code.extend((REQUIRE_IDLE, 3, stream.ptr))

    def capturing(self, stream: Any) -> int:
        """Ask whether a stream is captured into a graph: ``code[place]``, for the place returned, is not 0 then."""
        self.code.extend((CAPTURING, 4, stream.ptr, 0))
        return len(self.code) - 1

    def copy(self, target: Bytes, source: Bytes) -> None:
        """Copy host memory to host memory of the same size."""
        self._kept += (target, source)
        self.copies += source.size
        self.code.extend((COPY, 5, address(target), address(source), source.size))

    def pack(self, target: Bytes, source: Bytes, chunks: npt.NDArray[int64]) -> None:
        """Copy the chunks of these numbers next to each other, out of a message without its header."""
        self._kept += (target, source, chunks)
        self.copies += target.size
        self.code.extend((PACK, 7, address(target), address(source), source.size, address(chunks), chunks.size))

    def keep(self, thing: object) -> None:
        """Keep something alive as long as this list."""
        self._kept.append(thing)

    def stamp(self) -> int:
        """Note when this is reached, in `time.perf_counter_ns`: ``code[place]``, for the place returned."""
        self.code.extend((STAMP, 3, 0))
        return len(self.code) - 1


def address(memory: npt.NDArray[Any]) -> int:
    """Return where an array lies."""
    return int(memory.__array_interface__["data"][0])
