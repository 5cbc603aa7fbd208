"""What the CUDA device asks of a driver: memory, copies, launches, streams and events, and nothing else.

The seam at which tests put a driver of their own. Streams and events are opaque here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrack.aead import Bytes
from fastrack.arrays import Framework

__all__ = ["Driver", "Memory", "View"]

Stream = Any
Event = Any


class Memory(Protocol):
    """Device memory, given back when nothing refers to it."""

    @property
    def pointer(self) -> int:
        """Its address on the device, a multiple of 256."""


@dataclass(frozen=True, slots=True)
class View:
    """The bytes of an array on the device.

    pointer : where they start; of any alignment
    nbytes : how many there are
    stream : the current stream of the caller in the array's framework, when the view was made
    array : what keeps them
    """

    pointer: int
    nbytes: int
    stream: Stream
    array: Any

    def __len__(self) -> int:
        return self.nbytes


class Driver(Protocol):
    """One CUDA device.

    Every method may be called from any thread, whichever device is current there. What fails raises `DeviceError`.
    Copies and launches are put on a stream; they may block, as they do in confidential mode, and need not overlap.

    Attributes
    ----------
    name : str
        "cuda:N".
    multiprocessors : int
        How many it has.
    state : int
        Bytes that the kernel `prepare` makes of a key.
    """

    name: str
    multiprocessors: int
    state: int

    def adopt(self) -> None:
        """Make this the current device of the calling thread for good, so that calls need not switch to it."""

    def host(self, size: int) -> Bytes:
        """Page-locked host memory of exactly `size` bytes, given back when nothing refers to it."""

    def memory(self, size: int) -> Memory:
        """Device memory of `size` bytes."""

    def stream(self, *, urgent: bool) -> Stream:
        """A fresh stream that does not wait for the default stream; of the lowest priority unless it is urgent."""

    def event(self) -> Event:
        """A fresh event, that counts as done until it is recorded."""

    def upload(self, pointer: int, source: Bytes, stream: Stream) -> None:
        """Copy page-locked memory to the device. The caller keeps it alive, and as it is, until that is done."""

    def download(self, target: Bytes, pointer: int, stream: Stream) -> None:
        """Copy from the device into page-locked memory."""

    def fill(self, pointer: int, value: int, size: int, stream: Stream) -> None:
        """Set `size` bytes of device memory to `value`."""

    def launch(self, kernel: str, blocks: int, arguments: Sequence[int], stream: Stream) -> None:
        """Start a kernel of `kernels/`, by its name. All its arguments are 64 bits wide: pointers and counts."""

    def record(self, event: Event, stream: Stream) -> None:
        """Have `event` happen when all that is on `stream` so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let nothing that is put on `stream` from now on start before `event` happened, as last recorded."""

    def done(self, event: Event) -> bool:
        """Whether it happened."""

    def synchronize(self, event: Event) -> None:
        """Block this thread, and no other, until it happened."""

    # What only a timeline needs.

    def stamp(self, stream: Stream) -> Event:
        """A fresh event that is recorded on `stream` now, and notes the time when it happens."""

    def elapsed(self, start: Event, stop: Event) -> float:
        """Seconds between two stamps that have happened."""

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
        """A fresh array of that framework on the device."""

    def view(self, array: Any, *, writable: bool) -> View:
        """The bytes of an array on this device.

        One that is not contiguous is copied there first, which `writable` refuses.

        Raises
        ------
        TypeError
            If it is no array on this device.
        ValueError
            If it is to be written and is not contiguous or is read-only.
        """
