"""The device protocol. Devices know nothing of files, of data loaders or of stored keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrack._crypto.base import Bytes, GatherPlan
from fastrack._crypto.cobblestone import MessageKey
from fastrack._tensors.arrays import Framework
from fastrack._util.trace import Detail

BAD_PLAN = -1  # the result of a gather whose plan was altered on its way to the device


@dataclass(frozen=True, slots=True)
class Slab:
    """A segment of a message: whole chunks for one copy and one kernel launch, or the chunks of a gather.

    `start` and `stop` are the range of its plaintext in that of the message, in bytes. For a gather, `plan` has the
    chunks and the destinations of their bytes; `first_chunk`, `start` and `stop` then describe the whole message.
    """

    first_chunk: int
    start: int
    stop: int
    sealed_size: int  # bytes of its sealed chunks
    plan: GatherPlan | None = None
    is_plain: bool = False  # its bytes are plaintext: a device that works in place seals it and opens it again

    @property
    def detail(self) -> Detail:
        """Its attributes in a timeline."""
        return {"chunk": self.first_chunk, "sealed": self.sealed_size}


class SpanCallback(Protocol):
    """A callback for steps that a device runs on the caller's thread."""

    def __call__(self, name: str, slab: Slab, start: int, stop: int) -> None:
        """Receive the name of a step of a slab, and its start and stop in nanoseconds."""


class StagingBuffer(Protocol):
    """Host memory with room for one slab, for fast copies to and from a device."""

    memory: Bytes

    def ready(self) -> bool:
        """Return whether the device has finished with it."""

    def wait(self) -> None:
        """Wait until the device has finished with it. Call this before the host writes to it.

        Errors of the device are raised by the `Operation` that they belong to.
        """

    def wipe(self) -> None:
        """Overwrite it with zeros on the host and on the device, after the device has finished with it."""


class Operation(Protocol):
    """The opening or sealing of one message on a device. Call `finish` in any case, also after an error."""

    lane: int  # the group of transfers that may delay this one; less than `Device.lanes`

    def open(self, slab: Slab, sealed: Bytes, buffer: StagingBuffer | None) -> None:
        """Authenticate and decrypt a slab, now or with the next `issue`.

        `sealed` is its chunks in host memory: in their source, which for a gather is the whole message without its
        header, or in `buffer.memory`, which for a gather holds only its chunks, one after the other. `buffer`, for a
        device that needs one, is in use until the next `issue`. The result of a chunk whose tag is wrong is zeros.
        """

    def seal(self, slab: Slab, sealed: Bytes, buffer: StagingBuffer | None) -> None:
        """Encrypt a slab into `sealed`, in host memory, which is complete after `finish`."""

    def issue(self) -> None:
        """Start the work on the slabs so far. Their buffers may then be reused after their `wait`."""

    def finish(self, *, wait: bool = False) -> None:
        """End the message after its last slab, and wipe the key as soon as the device no longer needs it.

        Work that the caller gives to the device afterwards runs after the result is complete. With `wait` the result is
        complete when this returns.
        """

    def done(self) -> bool:
        """Return whether `result` would return at once. Valid after `finish`."""

    def result(self) -> int | None:
        """Wait for the end, and return the first chunk whose tag is wrong, `BAD_PLAN`, or None. Valid after `finish`.

        Raise DeviceError if the device failed.
        """


class Device(Protocol):
    """A place for plaintext.

    The first staged slab of a message has up to `first_slab_size` bytes of plaintext, and each that follows is half as
    large again, up to `max_slab_size`: the device starts early, and the next slab is filled before the previous one is
    done. Both are multiples of 16384.
    """

    name: str  # "cpu" or "cuda:N"
    in_place: bool  # the device reads ciphertext from any host memory, so that staging is not needed
    lanes: int  # groups of transfers that do not delay each other; each has its own staging buffers
    max_slab_size: int
    first_slab_size: int

    def framework(self, requested: Framework | None, source: Framework | None) -> Framework:
        """Return the framework of a result: the requested one, else that of the source if possible, else another.

        Raise DeviceError if the requested framework has no arrays on this device.
        """

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, Any]:
        """Return an uninitialized array on the device, and a writable `view` of it."""

    def view(self, array: Any, *, writable: bool) -> Any:
        """Return the bytes of an array on this device, for `begin`. Its `len` is their number."""

    def clear(self, memory: Any) -> None:
        """Overwrite a view with zeros. Complete when this returns."""

    def staging_buffer(self, size: int) -> StagingBuffer:
        """Allocate a buffer for staged slabs of up to `size` bytes, page-locked where that applies."""

    def begin(self, key: MessageKey, memory: Any, note: SpanCallback | None = None) -> Operation:
        """Begin to open a message into `memory`, a view, or to seal it from there.

        The caller may wipe the key when this returns. `note` receives the steps that run on the caller's thread.
        """

    def close(self) -> None:
        """Release all resources, after all operations have finished and all staging buffers were wiped."""
