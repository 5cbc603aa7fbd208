"""The device protocol. Devices know nothing of files, of data loaders or of stored keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fastrack._crypto.base import Bytes, Messages
from fastrack._crypto.gather import GatherPlan
from fastrack._tensors.arrays import Framework

NO_VERDICT = -2  # the `chunk` of a `BadChunk` if something of a call was lost: nothing is known of any of its messages
BAD_PLAN = -1  # the `chunk` of a `BadChunk` if a plan or a table was altered on its way to the device
MAX_MESSAGES = 1 << 25  # per operation: a message number and a chunk number of 38 bits fit into one signed word


class Segment(NamedTuple):
    """Consecutive chunks of one message, or the chunks of a gather.

    `start` and `stop` are a range in the plaintext of the message, in bytes. `start` is `first_chunk` times 16384. Only
    the last segment of a message has the last chunk, which is shorter. For a gather, `plan` has the chunks and the
    destinations of their bytes; `first_chunk`, `start` and `stop` then describe the whole message.
    """

    message: int  # its number in `Messages`
    first_chunk: int
    start: int
    stop: int
    sealed_size: int  # bytes of its sealed chunks
    offset: int = 0  # in the staging buffer: a multiple of 16. The chunks of a gather are contiguous
    plan: GatherPlan | None = None


@dataclass(frozen=True, slots=True)
class Slab:
    """One or more segments for one copy and one kernel launch. They do not overlap in the staging buffer.

    Segments are in the order of messages, and of chunks within a message. A message may have segments in several slabs,
    which the operation receives in this order. A gather with many chunks or ranges is divided, too.
    """

    segments: Sequence[Segment]
    sealed_size: int  # bytes of the staging buffer up to the end of the last segment; the rest is free for the device

    @property
    def first_chunk(self) -> int:
        """The first chunk of the first segment."""
        return self.segments[0].first_chunk


class BadChunk(NamedTuple):
    """The first chunk with a wrong tag: the lowest such chunk of the lowest such message.

    `chunk` is `BAD_PLAN` if a plan or a table of segments was altered on its way to the device. `message` is then a
    message of that plan or table.
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
        """Return whether the device has finished with the buffer."""

    def wait(self) -> None:
        """Wait until the device has finished with the buffer. Call this before the host writes to it.

        The `DeviceOperation` that caused an error of the device raises it.
        """

    def wipe(self) -> None:
        """Wait until the device has finished with the buffer, and overwrite it with zeros on host and device."""


class DeviceOperation(Protocol):
    """The opening or sealing of the messages of one call. Always call `finish`, also after an error.

    All messages share one verdict. The result holds zeros in place of every chunk that failed.
    """

    lane: int  # the group of transfers that may delay this transfer; less than `Device.lanes`

    def open(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        """Authenticate and decrypt a slab, now or with the next `issue`.

        A device with staging copies the chunks of each segment from `Messages.sealed` to their offset in the buffer,
        unless the caller has written them there. The buffer is in use until the next `issue`. A device that works in
        place takes None for both, and opens all messages in place.
        """

    def seal(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        """Encrypt a slab into `Messages.sealed`, which is complete after `finish`. See `open` for None."""

    def issue(self) -> None:
        """Start the work on the slabs so far. Their buffers may then be reused after their `wait`."""

    def finish(self, *, wait: bool = False) -> None:
        """End the messages after their last slab, and wipe expanded keys as soon as the device no longer needs them.

        The caller wipes those of `Messages`. Later work of the caller on the device runs after the results are
        complete. With `wait` this method returns after the results are complete.
        """

    def done(self) -> bool:
        """Return whether `result` would return without waiting. Valid after `finish`."""

    def result(self) -> BadChunk | None:
        """Wait for the end, and return the first chunk with a wrong tag, or None. Valid after `finish`.

        Raise DeviceError if the device failed.
        """


class Device(Protocol):
    """A place for plaintext.

    The first staged slab of an operation has up to `first_slab_size` bytes of plaintext, and each later slab is half as
    large again, up to `max_slab_size`: the device starts early, and the next slab is filled before the previous slab
    is done. Both sizes are multiples of 16384. A slab of many small segments holds less plaintext: its staging buffer
    also has `segment_overhead` bytes for each segment, padding of chunks to multiples of 16 bytes, two copies of a
    gather's plan, and the tags of chunks and plan.
    """

    name: str  # "cpu" or "cuda:N"
    in_place: bool  # the device reads ciphertext from any host memory, so that staging is not needed
    lanes: int  # groups of transfers that do not delay each other; each group has its own staging buffers
    max_slab_size: int
    first_slab_size: int
    segment_overhead: (
        int  # bytes of a staging buffer that the device needs for each segment of a slab, for its own tables
    )

    def framework(self, requested: Framework | None, source: Framework | None) -> Framework:
        """Return the requested framework, else the framework of the source if the device has it, else another.

        Raise DeviceError if the requested framework has no arrays on this device.
        """

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, Any]:
        """Return an uninitialized array on the device, and a writable `view` of its bytes."""

    def view(self, array: Any, *, writable: bool) -> Any:
        """Return the memory of an array on this device, for `begin`: `size` bytes at `address`."""

    def clear(self, memory: Any) -> None:
        """Overwrite a view with zeros before returning."""

    def staging_buffer(self, size: int) -> StagingBuffer:
        """Allocate a buffer for staged slabs of up to `size` bytes, page-locked for a GPU."""

    def begin(self, messages: Messages, note: SpanCallback | None = None) -> DeviceOperation:
        """Begin to open messages into their memories, or to seal them from there.

        `note` receives the steps that run on the caller's thread.
        """

    def close(self) -> None:
        """Release all resources, after all operations have finished and all staging buffers were wiped."""
