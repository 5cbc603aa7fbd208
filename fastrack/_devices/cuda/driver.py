"""The driver protocol of the CUDA device: memory, streams, events, and lists of commands.

Tests substitute their own drivers. The `ptr` of a stream or an event is its CUDA handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.commands import Commands, Function
from fastrack._tensors.arrays import Framework
from fastrack.errors import DeviceError

Stream = Any
Event = Any

SMALL, LARGE = 64 << 10, 4 << 20  # bytes of the copies that are compared
_NOISE = 1.05  # pageable memory has to be faster by more

RECLAIMERS: list[Callable[..., None]] = []
"""Functions of higher modules that keep memory of GPUs until streams have used it, as `SideStream` does.

Each is called with the number of a GPU. It frees the memory that no stream uses, or with ``wait=True`` all of it.
"""


class Memory(Protocol):
    """Device memory, freed after its last reference is dropped."""

    @property
    def pointer(self) -> int:
        """The address on the device, a multiple of 256."""


@dataclass(frozen=True, slots=True)
class View:
    """The bytes of an array on the device."""

    address: int  # of any alignment
    size: int
    stream: Stream  # the caller's current stream in the framework of the array, when the view was made
    array: Any  # the owner of the memory


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of copies one way, of 64 KiB and of 4 MiB, in 1e9 bytes a second, by the kind of host memory."""

    page_locked: tuple[float, float]
    pageable: tuple[float, float]

    def prefers_pageable(self, size: int) -> bool:
        """Return whether a copy of `size` bytes is to be of pageable memory.

        A copy takes a fixed toll, which decides for small ones, and a time for each byte.
        """
        share = min(max((size - SMALL) / (LARGE - SMALL), 0.0), 1.0)
        # Seconds by which pageable memory is slower. This is asked for each slab.
        small = SMALL * (_NOISE / self.pageable[0] - 1 / self.page_locked[0])
        large = LARGE * (_NOISE / self.pageable[1] - 1 / self.page_locked[1])
        return (1 - share) * small + share * large < 0


@dataclass(frozen=True, slots=True)
class CopySpeeds:
    """Speeds of copies to the GPU and back."""

    uploads: Speeds
    downloads: Speeds


class PageLockedMemoryError(DeviceError):
    """The host has no more page-locked memory for this process."""


class Driver(Protocol):
    """One CUDA device.

    Any thread may call any method, with any current device. Failures raise `DeviceError`.
    """

    name: str  # "cuda:N"
    multiprocessors: int
    confidential: bool  # in confidential mode an asynchronous copy blocks the thread that issues it
    copy_speeds: CopySpeeds | None  # in confidential mode, if known
    functions: Mapping[str, Function]  # the kernels, by name
    compiled_by: str  # who compiled them, and why what comes with fastrack was not used

    def host(self, size: int) -> Bytes:
        """Allocate `size` bytes of page-locked host memory, freed after its last reference is dropped.

        Raise PageLockedMemoryError if there is no more of it.
        """

    def memory(self, size: int) -> Memory:
        """Allocate `size` bytes of device memory."""

    def stream(self, *, high_priority: bool) -> Stream:
        """Create a stream of the highest or the lowest priority, which does not wait for the default stream."""

    def event(self, *, timed: bool = False) -> Event:
        """Create an event, which counts as done until it is recorded. Waiting threads sleep.

        With `timed` the event records its time, for `elapsed`.
        """

    def issue(self, commands: Commands, *, threads: int = 1, hold: bool = False) -> None:
        """Run a list of commands by one native call, without the GIL.

        `threads` is the maximum number of threads of the host for copies within host memory. With `hold` the GIL is
        kept until a command of the list releases it.
        """

    def done(self, event: Event) -> bool:
        """Return whether an event is done. Keeps the GIL."""

    def elapsed(self, start: Event, stop: Event) -> float:
        """Return the seconds between two timed events that are done."""

    def reclaim(self) -> None:
        """Free memory, streams and events without references."""

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
        """Return an uninitialized array of a framework on the device.

        Raise DeviceError if the device is out of memory, or a CUDA graph captures the caller's stream.
        """

    def view(self, array: Any, *, writable: bool) -> View:
        """Return the bytes of an array on this device.

        A non-contiguous array is copied on the device first, unless `writable`. Raise TypeError if it is no array on
        this device, ValueError if `writable` and it is non-contiguous or read-only, and DeviceError if a CUDA graph
        captures the caller's stream.
        """
