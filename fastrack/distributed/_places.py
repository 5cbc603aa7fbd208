"""The places of tensors, host memory and GPUs: a group seals and opens messages where its tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from fastrack._crypto.base import Bytes, Engine, HostMemory, Messages, address
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices import open_device
from fastrack._devices.base import NO_VERDICT, Segment, Slab
from fastrack.errors import DeviceError
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

SLAB_CHUNKS = 256  # 4 MiB: fewer sends, and still in cache from the cipher to the sum


class HostPlace:
    """The place of tensors in host memory, with the runs of an engine of the host."""

    devices: list[Any] | None = None  # the GPU, required by futures of its tensors

    def __init__(self, engine: Engine) -> None:
        self.expand_key, self.seal_run, self.open_run = engine.expand_key, engine.seal_run, engine.open_run
        self._buffers: dict[str, torch.Tensor] = {}

    def bytes_of(self, tensor: torch.Tensor) -> Bytes:
        """Return the bytes of a contiguous tensor, for slicing."""
        memory: Bytes = _flat(tensor).numpy()
        return memory

    def buffer(self, name: str, size: int) -> torch.Tensor:
        """Return uint8 (size,) for plaintext. Operations share it, and `close` wipes it."""
        return reuse(self._buffers, name, size, "cpu")

    def order(self, work: Callable[[], None], tensor: torch.Tensor) -> Callable[[], None]:
        """Return `work` for another thread, ordered after this thread's pending work on the tensor.

        Raise DeviceError if ordering fails.
        """
        return work

    def synchronize(self) -> None:
        """Wait until all pending work is done, of which there is none here."""

    def clear(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with zeros, unless the device has failed."""
        tensor.detach().zero_()

    def close(self) -> None:
        """Wipe all buffers, and release the device."""
        for buffer in self._buffers.values():
            buffer.zero_()
        self._buffers.clear()


class CudaPlace:
    """The place of tensors on a GPU, whose kernels seal and open, so that host memory holds only sealed chunks.

    Each run is one `DeviceOperation`, and is authenticated when it returns. Torch adds. One stream orders the work
    of a group on the GPU and waits for the caller's stream; the host waits for its end, so that every stream
    sees the results.

    A run has at most `SLAB_CHUNKS` chunks. Raise DeviceError if the GPU cannot be used.
    """

    def __init__(self, device: torch.device) -> None:
        self._name = str(device)
        self.devices: list[Any] | None = [self._name]
        self._device = open_device(self._name)
        try:
            self._staging = self._device.staging_buffer(SLAB_CHUNKS * SEALED_CHUNK_SIZE + self._device.segment_overhead)
        except BaseException:
            self._device.close()
            raise
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[str, torch.Tensor] = {}

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return _flat(tensor)

    def buffer(self, name: str, size: int) -> torch.Tensor:
        return reuse(self._buffers, name, size, self._name)

    def expand_key(self, key: MessageKey) -> MessageKeys:
        """Return the expanded key for the runs of a message. Wipe it after use; `key` may be wiped now."""
        return MessageKeys.of([key])

    def seal_run(self, schedule: MessageKeys, plain: torch.Tensor, sealed: Bytes, first_chunk: int) -> None:
        """Seal up to one slab of the bytes of a tensor into chunks."""
        self._run("seal", schedule, plain, sealed, first_chunk)

    def open_run(self, schedule: MessageKeys, sealed: Bytes, target: torch.Tensor, first_chunk: int) -> int | None:
        """Open chunks into bytes of a tensor. Return the first bad chunk, which is zeros in `target`."""
        return self._run("open", schedule, target, sealed, first_chunk)

    def _run(self, direction: str, key: MessageKeys, plain: torch.Tensor, sealed: Bytes, first: int) -> int | None:
        view = self._device.view(plain, writable=direction == "open")
        # Both describe a whole message, though only this run is in memory.
        start, before = first * CHUNK_SIZE, first * SEALED_CHUNK_SIZE
        stop = start + view.size
        whole = replace(view, address=view.address - start, size=stop)
        chunks = HostMemory(address(sealed) - before, before + sealed.size, sealed)
        operation = self._device.begin(Messages(key, [stop], [whole], [chunks], [None], [None], [None]))
        try:
            slab = Slab([Segment(0, first, start, stop, sealed.size)], sealed.size)
            (operation.open if direction == "open" else operation.seal)(slab, self._staging)
        finally:
            operation.finish(wait=True)
        bad = operation.result()
        if bad is not None and bad.chunk == NO_VERDICT:
            self.clear(plain)
            raise DeviceError(f"{self._name} failed: it has not run, or not told, all that opens a message")
        return None if bad is None else bad.chunk

    def order(self, work: Callable[[], None], tensor: torch.Tensor) -> Callable[[], None]:
        self._device.view(_flat(tensor), writable=False)  # refuses a stream that a CUDA graph captures
        with self._calls():
            begun = torch.cuda.current_stream(tensor.device).record_event()

        def run() -> None:
            with self._calls(), torch.cuda.stream(self._stream):
                self._stream.wait_event(begun)
                work()

        return run

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Turn errors of torch into DeviceError."""
        try:
            yield
        except RuntimeError as error:
            raise DeviceError(f"{self._name} failed: {error}") from error

    def synchronize(self) -> None:
        self._stream.synchronize()

    def clear(self, tensor: torch.Tensor) -> None:
        with suppress(RuntimeError), torch.cuda.stream(self._stream):
            tensor.detach().zero_()
            self._stream.synchronize()

    def close(self) -> None:
        with ExitStack() as closing:  # closes everything, even if one step fails
            closing.callback(self._device.close)
            closing.callback(self._staging.wipe)
            while self._buffers:
                closing.callback(self.clear, self._buffers.popitem()[1])


Place = HostPlace | CudaPlace
"""The place of tensors. Both have the same methods; sealed chunks are always in host memory."""


def reuse(buffers: dict[str, torch.Tensor], name: str, size: int, device: str) -> torch.Tensor:
    """Return uint8 (size,) on a device. Reuse the buffer of this name if it is large enough."""
    buffer = buffers.get(name)
    if buffer is None or buffer.numel() < size:
        buffer = buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer[:size]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)
