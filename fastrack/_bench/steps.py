"""The steps from the bounce path to fastrack. Each adds one idea. `fastrack._bench.runner` measures them.

All steps move the same tensor, under keys of the same size. Every step is as fast as possible without the ideas that
follow: its buffers are allocated and touched beforehand, all threads copy, one long chain is one call of OpenSSL, and
nothing is released before its tag was verified.

`to_device` fills memory that exists, as with ``out=``. `to_host` returns new memory in every step on "cpu", the plain
copy included, since the caller keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fastrack._bench.endpoints import OVERLAP, CpuEndpoint, CudaEndpoint, Direction, Endpoint, open_driver
from fastrack._bench.measure import BOUNCE, COPY
from fastrack._bench.paths import OneSlab, copy
from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import Driver
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext, new_file_id
from fastrack._sealed.message_headers import open_header
from fastrack._sealed.seal import seal, unseal
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays
from fastrack._transfer.channel import Channel
from fastrack.errors import AuthenticationError
from fastrack.format import HEADER_SIZE, message_size

DIRECT = "+ direct"
PARALLEL = "+ parallel authentication"
STEPS = (BOUNCE, DIRECT, PARALLEL, OVERLAP, COPY)

# A line each, of what a step does that the one before does not.
MEANINGS = {
    BOUNCE: "the host opens each message, and seals it anew for the other side",
    DIRECT: "messages pass as they were sealed: the host opens nothing",
    PARALLEL: "chunks have tags of their own: all threads work",
    OVERLAP: "a chunk is opened or sealed while it is copied: fastrack",
}

_BLOCK = 16 << 20  # bytes that are compared at a time


@dataclass(frozen=True, slots=True)
class Step:
    """One way to move the tensor."""

    name: str  # one of `STEPS`
    run: Callable[[], Any]  # moves the tensor once, and returns the result if that is new memory
    read: Callable[[Any], Bytes]  # returns the plaintext that arrived, from the result of `run`
    passes: tuple[str, ...]  # the passes over all bytes, in order

    @property
    def traffic(self) -> int:
        """Bytes of memory read and written for each byte of plaintext, estimated and not measured.

        The model: a pass reads every byte once from memory and writes it once. It leaves out caches, which hold most
        of a small tensor; tags, a thousandth; lines that a CPU reads in order to write them; and zeros that the kernel
        writes into new memory. With a GPU, both memories count.
        """
        return 2 * len(self.passes)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one direction, over one tensor. They share memory, so that one runs at a time."""

    steps: Sequence[Step]
    _plain: Bytes
    _forget: Callable[[], None]

    def check(self) -> None:
        """Run every step once, which also warms up, and raise `RuntimeError` if the bytes that arrive differ."""
        for step in self.steps:
            self._forget()
            if not _equal(step.read(step.run()), self._plain):
                raise RuntimeError(f"{step.name!r} delivered other bytes than it was given; please report this")


@contextmanager
def open_steps(
    direction: Direction, nbytes: int, *, device: object = None, bits: int = 256, driver: Driver | None = None
) -> Iterator[Steps]:
    """Prepare all steps of one direction for a tensor of random bytes. They take eight times its memory.

    `driver` is the GPU's, if it is open already.
    """
    key = Key.generate(bits)
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    with ExitStack() as stack:
        if driver is None:
            channel = stack.enter_context(Channel(device, keys=key))
        else:
            opened = Channel._from_device(CudaDevice(driver), keys=key)  # noqa: SLF001 - of a driver that is open
            channel = stack.enter_context(opened)
        end: Endpoint
        if channel.device == "cpu":
            end = CpuEndpoint(plain, bits)
        else:
            end = CudaEndpoint(driver or open_driver(channel.device), plain, bits)
            stack.callback(end.chain.close)
        whole = OneSlab(end.device, nbytes)
        stack.callback(whole.close)
        make = _to_device if direction == "to_device" else _to_host
        yield Steps(make(end, whole, channel, plain, key), plain, partial(end.forget, direction))


def notes(device: str) -> list[str]:
    """Return notes on the measurements of a device, of a sentence or two each."""
    return [_DERIVED, *(_OF_CPU if device == "cpu" else _OF_CUDA)]


_DERIVED = (
    "From '+ parallel authentication' on, every message has a key of its own, derived from its owner's, which small "
    "tensors feel."
)
_IN_PLACE = (
    "On cpu the device is host memory. There, '+ overlap' is one pass: each chunk is opened or sealed on its way, "
    "where the steps before copy all of the message and then open it, or seal it and then copy."
)
_STAND_IN = (
    "On a GPU no kernel opens one long chain. In 'bounce' and '+ direct' a chain is stood for by chunks that are "
    "worked in order, by one thread on the host and by one thread block on the GPU. That is a model: what a GPU does "
    "with a chain in hardware may be quicker, so factors over these two steps are no speed-up over today's "
    "confidential GPUs."
)
_LOCKED = (
    "The plain copy is of page-locked memory. The other steps take the sealed message from ordinary memory, and "
    "to_host brings it there."
)
_ENGINES = (
    "In '+ parallel authentication' the cipher is fastrack's own on all threads, where the steps before have OpenSSL's "
    "on one: it is chunks that make either possible."
)
_OF_CPU = (_ENGINES, _IN_PLACE, "to_host gives new memory, in every step.")
_OF_CUDA = (_STAND_IN, _LOCKED)


# The two directions.


def _to_device(end: Endpoint, whole: OneSlab, channel: Channel, plain: Bytes, key: Key) -> list[Step]:
    ring, chain = KeyRing(key), end.chain
    sealed, message = seal(plain, key), chain.seal(plain)

    def parallel() -> None:
        message_key = open_header(sealed, ring)
        copy(whole.sealed, sealed.chunks)
        whole.open(message_key, end.view(writable=True))

    def step(name: str, run: Callable[[], Any]) -> Step:
        def run_or_clear() -> None:
            try:
                run()
            except AuthenticationError:
                end.clear()
                raise

        return Step(name, run_or_clear, lambda _: end.read(), end.passes("to_device", name))

    return [
        step(BOUNCE, lambda: chain.sealed_to_device(message, end.view(writable=True))),
        step(DIRECT, lambda: chain.direct_to_device(message, end.view(writable=True))),
        step(PARALLEL, parallel),
        step(OVERLAP, lambda: channel.to_device(sealed, out=end.array)),
        step(COPY, end.put),
    ]


def _to_host(end: Endpoint, whole: OneSlab, channel: Channel, plain: Bytes, key: Key) -> list[Step]:
    chain = end.chain
    end.put()

    def parallel() -> SealedTensor:
        context = MessageContext("tensor", "U8", plain.shape, new_file_id())
        message_key, header = context.new_key(key)
        message = arrays.empty_bytes(message_size(plain.size))
        message[:HEADER_SIZE] = header
        whole.seal(message_key, end.view(writable=False))
        copy(message[HEADER_SIZE:], whole.sealed)
        return SealedTensor(context, message, key.id)

    def opened(sealed: SealedTensor) -> Bytes:
        plaintext: Bytes = unseal(sealed, key, framework="numpy")
        return plaintext

    def step(name: str, run: Callable[[], Any], read: Callable[[Any], Bytes]) -> Step:
        return Step(name, run, read, end.passes("to_host", name))

    return [
        step(BOUNCE, lambda: chain.to_host(end.view(writable=False)), chain.open),
        step(DIRECT, lambda: chain.direct_to_host(end.view(writable=False)), chain.open),
        step(PARALLEL, parallel, opened),
        step(OVERLAP, lambda: channel.to_host(end.array, key=key), opened),
        step(COPY, end.get, lambda copied: copied),
    ]


def _equal(a: Bytes, b: Bytes) -> bool:
    """Return whether two arrays are equal. Compare block by block, since a comparison allocates memory."""
    blocks = (slice(start, start + _BLOCK) for start in range(0, b.size, _BLOCK))
    return a.shape == b.shape and all(np.array_equal(a[block], b[block]) for block in blocks)
