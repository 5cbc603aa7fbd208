"""The driver protocol of the CUDA device: memory, streams, events, and lists of commands.

The seam at which tests put a driver of their own. Streams and events have a `ptr`, the number the driver knows them by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.commands import Commands, Function
from fastrack._tensors.arrays import Framework

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

    Attributes
    ----------
    name : str
        "cuda:N".
    multiprocessors : int
        How many it has.
    confidential : bool
        Whether asynchronous copies block the thread that issues them, as they do in confidential mode.
    functions : mapping of str to Function
        The kernels, by name.
    """

    name: str
    multiprocessors: int
    confidential: bool
    functions: Mapping[str, Function]

    def host(self, size: int) -> Bytes:
        """Page-locked host memory of exactly `size` bytes, given back when nothing refers to it."""

    def memory(self, size: int) -> Memory:
        """Device memory of `size` bytes."""

    def stream(self, *, high_priority: bool) -> Stream:
        """A fresh stream that does not wait for the default stream; of the lowest priority unless it is urgent."""

    def event(self, *, timed: bool = False) -> Event:
        """A fresh event, that counts as done until it is recorded. A thread that waits for it sleeps.

        With `timed` it notes when it happens, for `elapsed`.
        """

    def issue(self, commands: Commands, *, threads: int = 1, hold: bool = False) -> None:
        """Run a list of commands, by one native call without the interpreter's lock.

        Parameters
        ----------
        threads : int
            How many of the host's threads may copy host memory.
        hold : bool
            Keep the lock, unless a command of the list says otherwise.
        """

    def done(self, event: Event) -> bool:
        """Return whether an event happened. Keeps the interpreter's lock."""

    def elapsed(self, start: Event, stop: Event) -> float:
        """Seconds between two timed events that have happened."""

    def reclaim(self) -> None:
        """Give back the memory, streams and events that nothing refers to any more."""

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
        """A fresh array of that framework on the device.

        Raises
        ------
        DeviceError
            If there is no memory for it, or the caller's stream is captured into a graph.
        """

    def view(self, array: Any, *, writable: bool) -> View:
        """The bytes of an array on this device.

        One that is not contiguous is copied there first, which `writable` refuses.

        Raises
        ------
        TypeError
            If it is no array on this device.
        ValueError
            If it is to be written and is not contiguous or is read-only.
        DeviceError
            If the caller's stream is captured into a graph.
        """
