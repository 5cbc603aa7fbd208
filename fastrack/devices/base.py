"""What a device can do. A device knows nothing of files, frameworks' data loading or keys at rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrack.aead import Bytes, Pieces
from fastrack.arrays import Framework
from fastrack.cobblestone import MessageKey

__all__ = ["Device", "Slab", "Work"]


@dataclass(frozen=True, slots=True)
class Slab:
    """A run of whole chunks that one copy moves and one kernel works, or the chunks of a gather.

    first : number of its first chunk
    start, stop : the bytes of the message's plaintext that it holds
    sealed : bytes it takes when sealed
    pieces : for a gather, which chunks it takes and where their bytes go; the other fields then speak of the message
    """

    first: int
    start: int
    stop: int
    sealed: int
    pieces: Pieces | None = None


class Work(Protocol):
    """One message being opened or sealed on a device, under its own key. `finish` it, whatever happens."""

    def open(self, slab: Slab, staged: Bytes, target: Any) -> None:
        """Authenticate and decrypt a slab into its place in `target`, the result's bytes on the device.

        May return before it is done. Nothing of a chunk whose tag is wrong is ever in `target`: its place holds zeros.
        """

    def seal(self, slab: Slab, source: Any, staged: Bytes) -> None:
        """Encrypt the slab's part of `source`, bytes on the device, into `staged`, in host memory."""

    def finish(self) -> int | None:
        """Wait for all of it, wipe the key, and tell the first chunk whose tag was wrong, or None."""


class Device(Protocol):
    """A place where plaintext may exist.

    Attributes
    ----------
    name : str
        "cpu" or "cuda:N".
    in_place : bool
        Whether it can read ciphertext where it lies on the host, so that nothing needs to be staged for it.
    slab : int
        Bytes of plaintext of a staged slab; a multiple of 16384.
    """

    name: str
    in_place: bool
    slab: int

    def framework(self, wanted: Framework | None) -> Framework:
        """The framework of a result: what is wanted, if it keeps arrays here, else the device's own choice."""

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
        """A fresh array on the device; its contents are undefined."""

    def view(self, array: Any, *, writable: bool) -> Any:
        """The bytes of an array that lies on this device, to be given to `Work`."""

    def clear(self, target: Any) -> None:
        """Overwrite a view with zeros."""

    def staging(self, size: int) -> Bytes:
        """Host memory that copies to and from this device are fast from: page-locked where that means something."""

    def begin(self, key: MessageKey) -> Work:
        """Take a message key to the device."""

    def close(self) -> None:
        """Give back what the device holds."""
