"""The device protocol. Devices know nothing of files, of data loaders or of stored keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fastrack._crypto.base import Bytes, Messages
from fastrack._crypto.gather import GatherPlan
from fastrack._tensors.arrays import Framework
from fastrack._util.trace import Detail

BAD_PLAN = -1  # the `chunk` of a `BadChunk` if what decides where bytes go was altered on its way to the device
MAX_MESSAGES = 1 << 25  # of an operation: the numbers of a message and of a chunk, 38 bits, fit into one signed word


class Segment(NamedTuple):
    """Whole chunks of one message, one after the other, or the chunks of a gather.

    `start` and `stop` are the range of their plaintext in that of the message, in bytes; `start` is `first_chunk` times
    16384, and only the last segment of a message has its last chunk, which is shorter. For a gather, `plan` has the
    chunks and the destinations of their bytes; `first_chunk`, `start` and `stop` then describe the whole message.
    """

    message: int  # its number in `Messages`
    first_chunk: int
    start: int
    stop: int
    sealed_size: int  # bytes of its sealed chunks
    offset: int = 0  # of its chunks in the staging buffer: a multiple of 16. The chunks of a gather lie side by side
    plan: GatherPlan | None = None

    @property
    def detail(self) -> Detail:
        """Its attributes in a timeline."""
        return {"chunk": self.first_chunk, "sealed": self.sealed_size}


@dataclass(frozen=True, slots=True)
class Slab:
    """Segments for one copy and one kernel launch, at least one. None overlaps another in the staging buffer.

    Segments are in the order of messages, and of chunks within a message. A message may have segments in several slabs,
    which are given to the operation in this order; a gather with many chunks or ranges is divided, too.
    """

    segments: Sequence[Segment]
    sealed_size: int  # bytes of the staging buffer up to the end of the last segment; the rest is free for the device

    @property
    def first_chunk(self) -> int:
        """That of its first segment."""
        return self.segments[0].first_chunk

    @property
    def detail(self) -> Detail:
        """Its attributes in a timeline."""
        return {"chunk": self.first_chunk, "sealed": self.sealed_size}


class BadChunk(NamedTuple):
    """The first chunk whose tag is wrong: the lowest chunk of the lowest message that has one.

    `chunk` is `BAD_PLAN` if a plan or a table of segments was altered on its way to the device; `message` is then one
    of those whose bytes it directs.
    """

    message: int
    chunk: int


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

        Errors of the device are raised by the `DeviceOperation` that they belong to.
        """

    def wipe(self) -> None:
        """Overwrite it with zeros on the host and on the device, after the device has finished with it."""


class DeviceOperation(Protocol):
    """The opening or sealing of the messages of one call. Call `finish` in any case, also after an error.

    There is one verdict on all of them. In place of every chunk that failed the result holds zeros.
    """

    lane: int  # the group of transfers that may delay this one; less than `Device.lanes`

    def open(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        """Authenticate and decrypt a slab, now or with the next `issue`.

        A device with staging copies the chunks of each segment from `Messages.sealed` to their offset in the buffer,
        unless the caller has written them there. The buffer is in use until the next `issue`. For a device that works
        in place both are None, and stand for all messages, where they lie.
        """

    def seal(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        """Encrypt a slab into `Messages.sealed`, which is complete after `finish`. None means as for `open`."""

    def issue(self) -> None:
        """Start the work on the slabs so far. Their buffers may then be reused after their `wait`."""

    def finish(self, *, wait: bool = False) -> None:
        """End the messages after their last slab, and wipe the keys as soon as the device no longer needs them.

        Work that the caller gives to the device afterwards runs after the results are complete. With `wait` the results
        are complete when this returns.
        """

    def done(self) -> bool:
        """Return whether `result` would return at once. Valid after `finish`."""

    def result(self) -> BadChunk | None:
        """Wait for the end, and return the first chunk whose tag is wrong, or None. Valid after `finish`.

        Raise DeviceError if the device failed.
        """


class Device(Protocol):
    """A place for plaintext.

    The first staged slab of an operation has up to `first_slab_size` bytes of plaintext, and each that follows is half
    as large again, up to `max_slab_size`: the device starts early, and the next slab is filled before the previous one
    is done. Both are multiples of 16384. A slab of many small segments holds less: beside its chunks, padded to
    multiples of 16 bytes, its staging buffer has room for `segment_overhead` bytes for each segment, for a
    gather's plan twice, and for the tags of both.
    """

    name: str  # "cpu" or "cuda:N"
    in_place: bool  # the device reads ciphertext from any host memory, so that staging is not needed
    lanes: int  # groups of transfers that do not delay each other; each has its own staging buffers
    max_slab_size: int
    first_slab_size: int
    segment_overhead: (
        int  # bytes of a staging buffer that the device needs for each segment of a slab, for its own tables
    )

    def framework(self, requested: Framework | None, source: Framework | None) -> Framework:
        """Return the framework of a result: the requested one, else that of the source if possible, else another.

        Raise DeviceError if the requested framework has no arrays on this device.
        """

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, Any]:
        """Return an uninitialized array on the device, and a writable `view` of it."""

    def view(self, array: Any, *, writable: bool) -> Any:
        """Return the bytes of an array on this device, for `begin`: `size` of them from `address` on."""

    def clear(self, memory: Any) -> None:
        """Overwrite a view with zeros. Complete when this returns."""

    def staging_buffer(self, size: int) -> StagingBuffer:
        """Allocate a buffer for staged slabs of up to `size` bytes, page-locked where that applies."""

    def begin(self, messages: Messages, note: SpanCallback | None = None) -> DeviceOperation:
        """Begin to open messages into their memories, or to seal them from there.

        `note` receives the steps that run on the caller's thread.
        """

    def close(self) -> None:
        """Release all resources, after all operations have finished and all staging buffers were wiped."""
