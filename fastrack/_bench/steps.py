"""What fastrack is made of, switched on one idea after another: the steps that `fastrack._bench.runner` measures.

The same tensor, under keys of the same size, in both directions. Every step is as good as it can be without the ideas
that come after it: what it needs besides its result was made and touched beforehand, whoever copies does so by all
threads, one long chain is OpenSSL's, and nothing is handed out before its tag was found right.

The result of `to_device` goes to memory that is there, as with ``out=``. That of `to_host` is new memory in every step
on "cpu", the plain copy included, since whoever asks for it keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import numpy as np

from fastrack._bench.measure import BOUNCE, COPY
from fastrack._bench.paths import BouncePath, OneBlockPath, OneSlab, copy, touched
from fastrack._crypto import cobblestone
from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import HEADER_SIZE
from fastrack._crypto.keys import Key, KeyRing
from fastrack._devices.base import Device
from fastrack._devices.cpu import CpuDevice
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import Driver
from fastrack._sealed.tensor import MessageContext, SealedTensor, new_file_id, seal, unseal, write_header
from fastrack._tensors import arrays
from fastrack._transfer.channel import Channel
from fastrack.errors import AuthenticationError

DIRECT = "+ direct"
PARALLEL = "+ parallel authentication"
OVERLAP = "+ overlap"
STEPS = (BOUNCE, DIRECT, PARALLEL, OVERLAP, COPY)

Direction = Literal["to_device", "to_host"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

_PIECE = 16 << 20  # bytes that are compared at a time
_OTHER = 0x5A  # what no tensor of random bytes consists of


@dataclass(frozen=True, slots=True)
class Step:
    """One way to move the tensor.

    name : one of `STEPS`
    run : moves it once, and gives the result if that is new memory
    read : what the owner of the tensor has then, given that result
    passes : each time that all bytes are read and written again, in order
    """

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Bytes]
    passes: tuple[str, ...]

    @property
    def traffic(self) -> int:
        """Bytes of memory read and written for each byte of plaintext, as estimated and not measured.

        The model: a pass reads every byte once and writes it once, from and to memory. It leaves out caches, which
        spare small tensors most of it; tags, a thousandth; lines that a CPU reads in order to write them; and zeros
        that the kernel puts into new memory. With a GPU, both memories count.
        """
        return 2 * len(self.passes)


class Steps:
    """The steps of one direction, over one tensor. They share its memory, so one runs at a time."""

    def __init__(self, steps: Sequence[Step], plain: Bytes, forget: Callable[[], None]) -> None:
        self.steps = tuple(steps)
        self._plain = plain
        self._forget = forget

    def check(self) -> None:
        """Run every step once and compare what arrives, byte by byte. Warms up, too.

        Raises
        ------
        RuntimeError
            If something else arrives than was sent.
        """
        for step in self.steps:
            self._forget()
            if not _same(step.read(step.run()), self._plain):
                raise RuntimeError(f"{step.name!r} delivered something else than it was given; please report this")


@contextmanager
def open_steps(
    direction: Direction, nbytes: int, *, device: object = None, bits: int = 256, driver: Driver | None = None
) -> Iterator[Steps]:
    """Prepare all steps of one direction for a tensor of random bytes.

    Parameters
    ----------
    direction : {"to_device", "to_host"}
        Which way the tensor goes.
    nbytes : int
        Its size. Eight times as much memory is taken meanwhile.
    device : str, optional
        "cpu", the default, or "cuda:N".
    bits : {256, 128}
        The size of all keys.
    driver : Driver, optional
        For "cuda:N": the GPU, if it is open already.

    Raises
    ------
    DeviceError
        If the device cannot be used.
    """
    key = Key.generate(bits)
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    with ExitStack() as stack:
        if driver is None:
            channel = stack.enter_context(Channel(device, keys=key))
        else:
            opened = Channel._from_device(CudaDevice(driver), keys=key)  # noqa: SLF001 - of a driver that is open
            channel = stack.enter_context(opened)
        end: _End
        if channel.device == "cpu":
            end = _CpuEnd(plain, bits)
        else:
            end = _CudaEnd(driver or _open_driver(channel.device), plain, bits)
        stack.callback(end.close)
        whole = OneSlab(end.device, nbytes)
        stack.callback(whole.close)
        make = _to_device if direction == "to_device" else _to_host
        yield Steps(make(end, whole, channel, plain, key), plain, partial(end.forget, direction))


def notes(device: str) -> list[str]:
    """What must be known to read the figures of a device, a sentence or two each."""
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


def _to_device(end: _End, whole: OneSlab, channel: Channel, plain: Bytes, key: Key) -> list[Step]:
    ring, chain = KeyRing(key), end.chain
    sealed, message = seal(plain, key), chain.seal(plain)

    def parallel() -> None:
        message_key = sealed.open_header(ring)
        copy(whole.sealed, sealed.chunks)
        whole.open(message_key, end.view(writable=True))

    def step(name: str, run: Callable[[], Any]) -> Step:
        return Step(name, partial(_or_nothing, run, end), lambda _: end.read(), end.passes("to_device", name))

    return [
        step(BOUNCE, lambda: chain.sealed_to_device(message, end.view(writable=True))),
        step(DIRECT, lambda: chain.direct_to_device(message, end.view(writable=True))),
        step(PARALLEL, parallel),
        step(OVERLAP, lambda: channel.to_device(sealed, out=end.place)),
        step(COPY, end.put),
    ]


def _to_host(end: _End, whole: OneSlab, channel: Channel, plain: Bytes, key: Key) -> list[Step]:
    chain = end.chain
    end.put()

    def parallel() -> SealedTensor:
        claim = MessageContext("tensor", "U8", plain.shape, new_file_id())
        salt, message_key = claim.new_key(key)
        message = arrays.empty_bytes(cobblestone.message_size(plain.size))
        write_header(message, salt, message_key)
        whole.seal(message_key, end.view(writable=False))
        copy(message[HEADER_SIZE:], whole.sealed)
        return SealedTensor(claim, message, key.id)

    def opened(sealed: SealedTensor) -> Bytes:
        found: Bytes = unseal(sealed, key, framework="numpy")
        return found

    def step(name: str, run: Callable[[], Any], read: Callable[[Any], Bytes]) -> Step:
        return Step(name, run, read, end.passes("to_host", name))

    return [
        step(BOUNCE, lambda: chain.to_host(end.view(writable=False)), chain.open),
        step(DIRECT, lambda: chain.direct_to_host(end.view(writable=False)), chain.open),
        step(PARALLEL, parallel, opened),
        step(OVERLAP, lambda: channel.to_host(end.place, key=key), opened),
        step(COPY, end.get, lambda found: found),
    ]


def _or_nothing(run: Callable[[], Any], end: _End) -> None:
    """Run it, and leave zeros if it refuses the message."""
    try:
        run()
    except AuthenticationError:
        end.clear()
        raise


def _same(found: Bytes, wanted: Bytes) -> bool:
    """Compare piece by piece, since a comparison takes as much memory as its operands."""
    pieces = (slice(start, start + _PIECE) for start in range(0, wanted.size, _PIECE))
    return found.shape == wanted.shape and all(np.array_equal(found[piece], wanted[piece]) for piece in pieces)


# The two kinds of device.


class _Chain(Protocol):
    """One long chain, with the detour and without. Targets are views."""

    def seal(self, plain: Bytes) -> Bytes: ...
    def open(self, message: Bytes) -> Bytes: ...
    def sealed_to_device(self, message: Bytes, out: Any) -> None: ...
    def direct_to_device(self, message: Bytes, out: Any) -> None: ...
    def to_host(self, there: Any) -> Bytes: ...
    def direct_to_host(self, there: Any) -> Bytes: ...


class _End(Protocol):
    """Where the tensor is on the device.

    Attributes
    ----------
    place : array
        The tensor there.
    device : Device
        For `OneSlab`, which closes it.
    """

    @property
    def place(self) -> Any: ...
    @property
    def device(self) -> Device: ...
    @property
    def chain(self) -> _Chain: ...

    def passes(self, direction: Direction, step: str) -> tuple[str, ...]: ...
    def view(self, *, writable: bool) -> Any: ...

    def put(self) -> None:
        """The plain copy to the device."""

    def get(self) -> Bytes:
        """The plain copy to the host."""

    def read(self) -> Bytes:
        """What is there, whatever that takes."""

    def forget(self, direction: Direction) -> None:
        """Put something else where a result will be, if that is memory that is there."""

    def clear(self) -> None: ...
    def close(self) -> None: ...


_DETOUR = {
    "to_device": ("host opens", "host seals", "copy", "device opens"),
    "to_host": ("device seals", "copy", "host opens", "host seals"),
}


class _CpuEnd:
    """Host memory, with OpenSSL for a chain."""

    def __init__(self, plain: Bytes, bits: int) -> None:
        self.place = touched(plain.size)
        self.device = CpuDevice()
        self.chain = BouncePath(plain.size, bits)
        self._plain = plain

    def passes(self, direction: Direction, step: str) -> tuple[str, ...]:
        apart = ("copy", "device opens") if direction == "to_device" else ("device seals", "copy")
        together = "opened while copied" if direction == "to_device" else "sealed while copied"
        return {BOUNCE: _DETOUR[direction], OVERLAP: (together,), COPY: ("copy",)}.get(step, apart)

    def view(self, *, writable: bool) -> Bytes:
        return self.place

    def put(self) -> None:
        copy(self.place, self._plain)

    def get(self) -> Bytes:
        result = arrays.empty_bytes(self.place.size)
        copy(result, self.place)
        return result

    def read(self) -> Bytes:
        return self.place

    def forget(self, direction: Direction) -> None:
        if direction == "to_device":
            self.place.fill(_OTHER)

    def clear(self) -> None:
        self.place.fill(0)

    def close(self) -> None:
        """Nothing is held."""


class _CudaEnd:
    """A GPU, with one thread block for a chain."""

    def __init__(self, driver: Driver, plain: Bytes, bits: int) -> None:
        self.place = driver.empty("U8", plain.shape, "cupy")
        self.device = CudaDevice(driver)
        self.chain = OneBlockPath(driver, plain.size, bits)
        self._pointer = self.device.view(self.place, writable=True).pointer
        self._driver = driver
        self._stream = driver.stream(high_priority=True)
        self._locked = driver.host(plain.size)
        self._locked[:] = plain

    def passes(self, direction: Direction, step: str) -> tuple[str, ...]:
        apart = {
            "to_device": ("to page-locked memory", "copy", "device opens"),
            "to_host": ("device seals", "copy", "out of page-locked memory"),
        }
        return {BOUNCE: _DETOUR[direction], COPY: ("copy",)}.get(step, apart[direction])

    def view(self, *, writable: bool) -> Any:
        return self.device.view(self.place, writable=writable)

    def put(self) -> None:
        commands = Commands()
        commands.upload(self._pointer, self._locked, self._stream)
        self._run(commands)

    def get(self) -> Bytes:
        return self._download(self._locked)

    def read(self) -> Bytes:
        return self._download(self._driver.host(self._locked.size))

    def forget(self, direction: Direction) -> None:
        if direction == "to_device":
            self._fill(_OTHER)
        else:
            self._locked.fill(_OTHER)

    def clear(self) -> None:
        self._fill(0)

    def close(self) -> None:
        self.chain.close()

    def _download(self, target: Bytes) -> Bytes:
        commands = Commands()
        commands.download(target, self._pointer, self._stream)
        self._run(commands)
        return target

    def _fill(self, value: int) -> None:
        commands = Commands()
        commands.fill(self._pointer, value, self._locked.size, self._stream)
        self._run(commands)

    def _run(self, commands: Commands) -> None:
        event = self._driver.event()
        commands.record(event, self._stream)
        commands.synchronize(event)
        self._driver.issue(commands)


def _open_driver(name: str) -> Driver:
    from fastrack._devices.cuda.cupy_driver import CupyDriver

    return CupyDriver(int(name.removeprefix("cuda:")))
