"""What a device can do. A device knows nothing of files, frameworks' data loading or keys at rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrack._crypto.base import Bytes, GatherPlan
from fastrack._crypto.cobblestone import MessageKey
from fastrack._tensors.arrays import Framework
from fastrack._util.trace import Detail

BAD_PLAN = -1  # the verdict on a gather whose plan was altered on its way to the device


@dataclass(frozen=True, slots=True)
class Slab:
    """A run of whole chunks that one copy moves and one kernel works, or the chunks of a gather.

    first_chunk : number of its first chunk
    start, stop : the bytes of the message's plaintext that it holds
    sealed_size : bytes it takes when sealed
    plan : for a gather, which chunks it takes and where their bytes go; the other fields then speak of the message,
        but for `sealed_size`
    """

    first_chunk: int
    start: int
    stop: int
    sealed_size: int
    plan: GatherPlan | None = None

    @property
    def detail(self) -> Detail:
        """What a timeline says of it."""
        return {"chunk": self.first_chunk, "sealed": self.sealed_size}


class Note(Protocol):
    """Take what a device did for a slab on the caller's thread: its name, and from when to when in nanoseconds."""

    def __call__(self, name: str, slab: Slab, start: int, stop: int) -> None: ...


class StagingBuffer(Protocol):
    """Host memory that copies to and from a device are fast from, with room for one slab.

    Attributes
    ----------
    memory : numpy.ndarray
        Its bytes.
    """

    memory: Bytes

    def ready(self) -> bool:
        """Whether the device is done with it."""

    def wait(self) -> None:
        """Wait until the device is done with it, before the host writes to it.

        What went wrong is told by the `Work` it went wrong for.
        """

    def wipe(self) -> None:
        """Overwrite it with zeros, here and on the device, once the device is done with it."""


class Operation(Protocol):
    """One message being opened or sealed on a device, under its own key. `finish` it, whatever happens.

    Attributes
    ----------
    lane : int
        Which transfers may hold up this one: below `Device.lanes`.
    """

    lane: int

    def open(self, slab: Slab, sealed: Bytes, slot: StagingBuffer | None) -> None:
        """Authenticate and decrypt a slab into its place, now or with the next `issue`.

        Nothing of a chunk whose tag is wrong is ever seen: its place holds zeros.

        Parameters
        ----------
        sealed : numpy.ndarray
            The slab's chunks, in host memory: where they lie, which for a gather is the whole message without its
            header, or in the slot's memory, where those of a gather follow each other.
        slot : Slot or None
            What the device stages them in, if it does. Until the next `issue` nothing else may use it.
        """

    def seal(self, slab: Slab, sealed: Bytes, slot: StagingBuffer | None) -> None:
        """Encrypt a slab into `sealed`, in host memory. Complete at the end."""

    def issue(self) -> None:
        """Have the device begin with the slabs it was given. Slots may then be used by others, after their `wait`."""

    def finish(self, *, wait: bool = False) -> None:
        """Say that no slab follows. Wipes the key when the device needs it no longer.

        Work that the caller hands to the device from now on finds the result complete. With `wait` it is complete.
        """

    def done(self) -> bool:
        """After `finish`: whether `result` would not wait."""

    def result(self) -> int | None:
        """After `finish`: wait for all of it, and return the first chunk whose tag was wrong, `BAD_PLAN`, or None.

        Raises
        ------
        DeviceError
            If the device failed.
        """


class Device(Protocol):
    """A place where plaintext may exist.

    Attributes
    ----------
    name : str
        "cpu" or "cuda:N".
    in_place : bool
        Whether it can read ciphertext where it lies on the host, so that nothing needs to be staged for it.
    lanes : int
        How many groups of transfers there are that do not hold up each other. Each has slots of its own.
    max_slab_size : int
        Bytes of plaintext of a staged slab at most; a multiple of 16384.
    first_slab_size : int
        The same for the first slab of a message; those that follow are half as large again each, up to
        `max_slab_size`. A device that works while the next slab is filled starts the sooner for it, and the next is
        filled before it is done.
    """

    name: str
    in_place: bool
    lanes: int
    max_slab_size: int
    first_slab_size: int

    def framework(self, wanted: Framework | None, origin: Framework | None) -> Framework:
        """The framework of a result: what is wanted, else the one that came in if it keeps arrays here, else another.

        Raises
        ------
        DeviceError
            If what is wanted keeps no arrays here.
        """

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, Any]:
        """A fresh array on the device, whose contents are undefined, and a `view` of it to write to."""

    def view(self, array: Any, *, writable: bool) -> Any:
        """The bytes of an array that lies on this device, to be given to `begin`. Its `len` counts them."""

    def clear(self, memory: Any) -> None:
        """Overwrite a view with zeros, before this returns."""

    def staging_buffer(self, size: int) -> StagingBuffer:
        """Memory for staged slabs of up to `size` bytes, page-locked where that means something."""

    def begin(self, key: MessageKey, memory: Any, note: Note | None = None) -> Operation:
        """Take a message key to the device, to open a message into `memory`, a view, or to seal it from there.

        The key's material is not looked at after this returns. `note` is told of what happens on the host.
        """

    def close(self) -> None:
        """Give back what the device holds, after all work has ended and the slots were wiped."""
