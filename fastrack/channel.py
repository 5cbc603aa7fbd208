"""The transfer loop: source, ring, device, verdict. And `to_device` and `to_host`, its two directions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Self

import numpy as np

from fastrack import aead, arrays, cobblestone
from fastrack.aead import Bytes
from fastrack.arrays import Framework
from fastrack.cobblestone import HEADER
from fastrack.devices import Slab, Work, canonical, open_device
from fastrack.errors import AuthenticationError, ClosedError
from fastrack.forks import renew_after_fork
from fastrack.keys import Key, KeyLike, KeyRing, KeySource
from fastrack.nest import map_leaves
from fastrack.ring import Ring
from fastrack.sealed import Claim, SealedRows, SealedTensor, bad_chunk, new_file_id, write_header
from fastrack.session import Session
from fastrack.sources import PlainSource, RowSource, SealedSource, Source, slabs_of
from fastrack.trace import Recorder, Stats, Transfer

__all__ = ["Channel", "Stats", "to_device", "to_host"]

_DEPTH = 3  # slabs of a ring: one being filled, one on its way, one being opened


class Channel:
    """A device, the keys it may use and a ring. May be shared by threads; close it, or use it in a ``with`` statement.

    Parameters
    ----------
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : Key, path or iterable of these, optional
        Keys of sealed tensors. Absent, the environment variable ``FASTRACK_KEY_FILE`` names a key file, looked up when
        the first sealed tensor comes. Plain tensors need no key.
    threads : int, optional
        How many of the host's threads may work on a transfer: by default as many as it has CPUs.

    Raises
    ------
    DeviceError
        If the device cannot be used.

    Notes
    -----
    After a fork the child has a session secret of its own; the ring is shared by nobody.
    """

    def __init__(self, device: object = None, *, keys: KeySource | None = None, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads= must be 1 or more, not {threads}")
        self._keys = None if keys is None else KeyRing(keys)
        self._device = open_device(canonical(device), threads)
        self._engine = aead.engine(threads=threads)
        self._session = Session()
        self._ring = Ring(self._device, cobblestone.raw_size(self._device.slab), _DEPTH)
        self._stats = Recorder()
        self._open = True

    @property
    def device(self) -> str:
        """The device's name."""
        return self._device.name

    @property
    def stats(self) -> Stats:
        """What went through this channel so far."""
        return self._stats.total

    def to_device(
        self,
        obj: Any,
        *,
        keys: KeySource | None = None,
        framework: Framework | None = None,
        out: Any = None,
        non_blocking: bool = False,
    ) -> Any:
        """Move to the channel's device. Everything is as for `fastrack.to_device`; `keys` default to the channel's."""
        self._require_open()
        ring = _Keys(self._keys if keys is None else keys)
        if out is None:
            return map_leaves(lambda leaf: self._move(leaf, ring, framework, None), obj)
        if framework is not None:
            raise ValueError("give framework= or out=, not both: arrays to fill are of a framework already")
        map_leaves(self._require_fit, obj, out)
        return map_leaves(lambda leaf, place: self._move(leaf, ring, framework, place), obj, out)

    def to_host(self, x: Any, *, key: KeyLike | None = None, name: str = "tensor") -> SealedTensor:
        """Seal a tensor on the channel's device. Everything is as for `fastrack.to_host`."""
        self._require_open()
        key = _Keys(self._keys).ring.first if key is None else Key.of(key)
        dtype, shape = arrays.describe(x)
        claim = Claim(name, dtype, shape, new_file_id())
        salt, message_key = claim.new_key(key)
        source = self._device.view(x, writable=False)
        nbytes = len(source)
        with self._stats.transfer(nbytes) as record:
            message = arrays.empty_bytes(cobblestone.message_size(nbytes))
            write_header(message, salt, message_key)

            def step(work: Work, slab: Slab, slot: Bytes | None) -> None:
                start = HEADER + cobblestone.STRIDE * slab.first
                place = message[start : start + slab.sealed]
                with record.stage("seal"):
                    work.seal(slab, source, place if slot is None else slot[: slab.sealed])
                    if slot is not None:
                        place[:] = slot[: slab.sealed]

            staged = not self._device.in_place
            self._run(message_key, slabs_of(nbytes, self._device.slab if staged else None), step, staged=staged)
        message.flags.writeable = False
        return SealedTensor(claim, message, key.id)

    def close(self) -> None:
        """Wipe the session secret and the ring, and let go of the device."""
        if self._open:
            self._open = False
            self._keys = None
            self._session.wipe()
            self._ring.close()
            self._device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Channel to {self.device}{'' if self._open else ', closed'}>"

    def __reduce__(self) -> str:
        raise TypeError("a channel stays in its process; open another one where it is needed")

    # One leaf.

    def _move(self, leaf: Any, keys: _Keys, framework: Framework | None, out: Any) -> Any:
        if not _is_tensor(leaf):
            return leaf
        if out is None:
            dtype, shape = _describe(leaf)
            origin = arrays.framework_of(leaf)
            out = self._device.empty(dtype, shape, self._device.framework(framework or origin))
        target = self._device.view(out, writable=True)
        with self._stats.transfer(len(target)) as record:
            message_key = self._message_key(leaf, keys, target)
            source = self._source(leaf, message_key)
            _require_apart(target, source.memory)
            try:
                self._receive(source, message_key, target, record)
            except BaseException:
                self._device.clear(target)
                raise
        return out

    def _message_key(self, leaf: Any, keys: _Keys, target: Any) -> cobblestone.MessageKey:
        if not isinstance(leaf, (SealedTensor, SealedRows)):
            return self._session.next_key()
        try:
            return leaf.open_header(keys.ring)
        except AuthenticationError:
            self._device.clear(target)
            raise

    def _require_fit(self, leaf: Any, out: Any) -> None:
        """Find out whether `out` can take `leaf`, before anything is moved."""
        if not _is_tensor(leaf):
            return
        wanted, found = _describe(leaf), arrays.describe(out)
        if found != wanted:
            raise ValueError(
                f"out= must have the dtype and shape of what it receives: {wanted[0]} {list(wanted[1])}, "
                f"not {found[0]} {list(found[1])}"
            )
        self._device.view(out, writable=True)

    def _source(self, leaf: Any, key: cobblestone.MessageKey) -> Source:
        if isinstance(leaf, SealedTensor):
            return SealedSource(leaf)
        if isinstance(leaf, SealedRows):
            return RowSource(leaf)
        return PlainSource(arrays.bytes_of(leaf), key, self._engine)

    def _receive(self, source: Source, key: cobblestone.MessageKey, target: Any, record: Transfer) -> None:
        staged = not (source.in_place and self._device.in_place)

        def step(work: Work, slab: Slab, slot: Bytes | None) -> None:
            with record.stage("fill"):
                filled = source.fill(slab, slot)
            with record.stage("open"):
                work.open(slab, filled, target)

        try:
            bad = self._run(key, source.slabs(self._device.slab if staged else None), step, staged=staged)
        finally:
            source.finish()
        if bad is not None:
            raise bad_chunk(source.name, bad)

    # The loop.

    def _run(
        self,
        key: cobblestone.MessageKey,
        slabs: Iterator[Slab],
        step: Callable[[Work, Slab, Bytes | None], None],
        *,
        staged: bool,
    ) -> int | None:
        work = self._device.begin(key)
        key.wipe()
        try:
            for slab in slabs:
                with self._ring.slot() if staged else nullcontext() as slot:
                    step(work, slab, slot)
        finally:
            bad = work.finish()
        return bad

    def _require_open(self) -> None:
        if not self._open:
            raise ClosedError("this channel was closed; open another one")


def to_device(
    obj: Any,
    device: object = None,
    *,
    keys: KeySource | None = None,
    framework: Framework | None = None,
    out: Any = None,
    non_blocking: bool = False,
) -> Any:
    """Move tensors to a device, sealed on the way.

    A sealed tensor goes as its owner sealed it, and is authenticated and decrypted on the device, chunk by chunk and in
    parallel. A plain tensor is sealed once, in parallel, under a key made for this transfer.

    Parameters
    ----------
    obj : tensor, sealed tensor, rows of one, or a nest of these
        Arrays of NumPy or torch in host memory, `SealedTensor`, `SealedRows`; or any nest of dicts, lists, tuples,
        named tuples and dataclasses that holds them. Other leaves pass untouched.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : Key, path or iterable of these, optional
        Where the keys of sealed tensors are looked for. Absent, the environment variable ``FASTRACK_KEY_FILE`` names a
        key file. Plain tensors need none.
    framework : {"torch", "numpy", "cupy"}, optional
        What the results are arrays of. Absent, the framework that came in; for sealed tensors torch if it is installed,
        else numpy.
    out : array or nest of arrays, optional
        Arrays to fill, built like `obj`: same shapes and dtypes, contiguous, on the device, in memory of their own, and
        not both this and `framework`. They are returned. Fresh memory costs more to touch than the cipher does, so a
        loop that fills the same arrays again is faster.
    non_blocking : bool
        Return before the work is done, where the device can. "cpu" cannot, and finishes first.

    Returns
    -------
    The same nest, with arrays on the device in it.

    Raises
    ------
    AuthenticationError
        If a chunk, a header or the key is not what the owner used. What was to receive the tensor holds zeros; tensors
        of the nest that were moved before it stay.
    UnknownKeyError
        If the key of a sealed tensor was not given.
    DeviceError
        If the device cannot be used.
    TypeError, ValueError
        If a tensor cannot be moved, or `out` does not fit.
    """
    channel = _shared.channel(canonical(device))
    return channel.to_device(obj, keys=keys, framework=framework, out=out, non_blocking=non_blocking)


def to_host(x: Any, *, key: KeyLike, name: str = "tensor") -> SealedTensor:
    """Seal a tensor where it is, and bring it to the host sealed.

    Parameters
    ----------
    x : array
        On any device.
    key : Key or path
        The key to seal it under, or its key file.
    name : str
        What to call it. Part of what is authenticated.

    Returns
    -------
    SealedTensor

    Raises
    ------
    TypeError
        If it is no array, or of a dtype that safetensors lacks.
    """
    return _shared.channel(_device_of(x)).to_host(x, key=key, name=name)


class _Keys:
    """A key ring that is made when the first sealed tensor asks for it."""

    def __init__(self, keys: KeySource | None) -> None:
        self._keys = keys
        self._ring: KeyRing | None = None

    @property
    def ring(self) -> KeyRing:
        if self._ring is None:
            self._ring = KeyRing.resolve(self._keys)
        return self._ring


class _Shared:
    """The channels that the module-level functions use, one a device, opened when first needed."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        self.renew()
        renew_after_fork(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def channel(self, device: str) -> Channel:
        with self._lock:
            if device not in self._channels:
                self._channels[device] = Channel(device)
            return self._channels[device]


_shared = _Shared()


def _device_of(array: Any) -> str:
    return canonical(getattr(array, "device", None)) if arrays.framework_of(array) == "torch" else canonical()


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (SealedTensor, SealedRows)) or arrays.framework_of(leaf) is not None


def _describe(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, (SealedTensor, SealedRows)) else arrays.describe(leaf)


def _require_apart(target: Any, source: Bytes) -> None:
    if isinstance(target, np.ndarray) and np.may_share_memory(target, source):
        raise ValueError("out= lies in the same memory as what it receives; give it memory of its own")
