"""The transfer loop: source, ring, device, verdict. And `Channel`, which has it in both directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, Self

import numpy as np

from fastrack import aead, arrays, cobblestone
from fastrack.aead import Bytes
from fastrack.arrays import Framework
from fastrack.cobblestone import HEADER, STRIDE, MessageKey
from fastrack.devices import Slab, Slot, Work, canonical, open_device
from fastrack.door import Door
from fastrack.errors import AuthenticationError, DeviceError
from fastrack.keys import Key, KeyLike, KeyRing, KeySource
from fastrack.nest import map_leaves
from fastrack.pending import Pending
from fastrack.ring import Ring
from fastrack.sealed import Claim, SealedRows, SealedTensor, bad_chunk, new_file_id, write_header
from fastrack.session import Session
from fastrack.sources import PlainSource, RowSource, SealedSource, Sizes, Source, slabs_of
from fastrack.stats import Recorder, Stats, Transfer

__all__ = ["Channel", "Stats"]

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
    share : float, optional
        On a GPU, the share of the room for thread blocks that transfers may take, above 0 and at most 1: by default
        all. Without meaning on "cpu".

    Raises
    ------
    DeviceError
        If the device cannot be used.
    ValueError
        If there is no such number of threads, or no such share.

    Notes
    -----
    After a fork the child has a session secret of its own; the ring is shared by nobody.
    """

    def __init__(
        self,
        device: object = None,
        *,
        keys: KeySource | None = None,
        threads: int | None = None,
        share: float | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads= must be 1 or more, not {threads}")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share= must be above 0 and at most 1, not {share}")
        self._keys = None if keys is None else KeyRing(keys)
        self._threads = threads or aead.default_threads()
        self._device = open_device(canonical(device), threads, share)
        self._engine = aead.engine(threads=threads)
        self._session = Session()
        self._sizes = Sizes(self._device.lead, self._device.slab)
        self._ring = Ring(self._device, cobblestone.raw_size(self._device.slab), _DEPTH)
        self._pending = Pending()
        self._stats = Recorder()
        self._door = Door("this channel was closed; open another one")

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
        order = _Order(self._keys if keys is None else keys, framework, non_blocking)
        with self._door:
            if non_blocking:
                self._pending.prune()
            else:
                self._pending.wait()
            if out is None:
                return map_leaves(lambda leaf: self._move(leaf, order, None), obj)
            if framework is not None:
                raise ValueError("give framework= or out=, not both: arrays to fill are of a framework already")
            map_leaves(self._require_fit, obj, out)
            return map_leaves(lambda leaf, place: self._move(leaf, order, place), obj, out)

    def to_host(self, x: Any, *, key: KeyLike | None = None, name: str = "tensor") -> SealedTensor:
        """Seal a tensor on the channel's device. Everything is as for `fastrack.to_host`."""
        with self._door:
            self._pending.wait()
            key = KeyRing.resolve(self._keys).first if key is None else Key.of(key)
            dtype, shape = arrays.describe(x)
            claim = Claim(name, dtype, shape, new_file_id())
            salt, message_key = claim.new_key(key)
            memory = self._device.view(x, writable=False)
            with self._stats.transfer(len(memory), "to_host", name) as record:
                message = arrays.empty_bytes(cobblestone.message_size(len(memory)))
                write_header(message, salt, message_key)
                self._send(message_key, memory, message[HEADER:], record)
        message.flags.writeable = False
        return SealedTensor(claim, message, key.id)

    def synchronize(self) -> None:
        """Wait for every transfer of this channel that was not waited for. As for `fastrack.synchronize`."""
        with self._door:
            self._pending.wait()

    def close(self) -> None:
        """Wait for what is under way, wipe the session secret and the ring, and let go of the device.

        Raises
        ------
        AuthenticationError, DeviceError
            If a transfer that was not waited for has failed. The channel is closed all the same.
        """
        if self._door.shut():
            with ExitStack() as closing:  # each of them, whatever happens to another
                closing.callback(self._device.close)
                closing.callback(self._ring.close)
                closing.callback(self._session.wipe)
                self._keys = None
                self._pending.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Channel to {self.device}{'' if self._door.is_open else ', closed'}>"

    def __reduce__(self) -> str:
        raise TypeError("a channel stays in its process; open another one where it is needed")

    # One leaf.

    def _move(self, leaf: Any, order: _Order, out: Any) -> Any:
        if not _is_tensor(leaf):
            return leaf
        if out is None:
            dtype, shape = _describe(leaf)
            framework = self._device.framework(order.framework, arrays.framework_of(leaf))
            out, target = self._device.empty(dtype, shape, framework)
        else:
            target = self._device.view(out, writable=True)
        with self._stats.transfer(len(target), "to_device", _name_of(leaf)) as record:
            messages = self._messages(leaf, order, target)
            started: list[tuple[Work, str | None]] = []
            try:
                if isinstance(leaf, SealedRows) and leaf.has_gaps:
                    self._device.clear(target)
                for source, message_key in messages:
                    started.append((self._receive(source, message_key, target, record), source.name))
                self._judge(started, order)
            except BaseException:
                for _, message_key in messages:
                    message_key.wipe()
                for work, _ in started:  # none may write to the target once it was cleared
                    with suppress(DeviceError):
                        work.verdict()
                self._clear(target)
                raise
        return out

    def _messages(self, leaf: Any, order: _Order, target: Any) -> list[tuple[Source, MessageKey]]:
        """What a leaf is made of, before anything of it is moved: the key of every message is at hand."""
        messages: list[tuple[Source, MessageKey]]
        try:
            if isinstance(leaf, SealedTensor):
                messages = [(SealedSource(leaf, self._threads), leaf.open_header(order.ring))]
            elif isinstance(leaf, SealedRows):
                leaf.check_claims(order.ring)
                messages = [
                    (RowSource(part, self._threads), part.tensor.open_header(order.ring)) for part in leaf.parts()
                ]
            else:
                key = self._session.next_key()
                messages = [(PlainSource(arrays.bytes_of(leaf), key, self._engine), key)]
        except AuthenticationError:
            self._clear(target)
            raise
        for source, _ in messages:
            _require_apart(target, source.memory)
        return messages

    def _judge(self, started: list[tuple[Work, str | None]], order: _Order) -> None:
        """Wait for work, or leave what is not done for later if the caller does not wait."""
        later = []
        for work, name in started:
            if order.non_blocking and not work.done():
                later.append((work, name))
            else:
                _require_good(work, name)
        for work, name in later:
            self._pending.add(work, name)

    def _clear(self, target: Any) -> None:
        """Leave zeros after an error, which is the one to tell even if the device now has another."""
        with suppress(DeviceError):
            self._device.clear(target)

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

    # The two directions.

    def _receive(self, source: Source, key: MessageKey, target: Any, record: Transfer) -> Work:
        """Open a message into `target`; perhaps it is not done yet."""
        staged = not (source.in_place and self._device.in_place)

        def step(work: Work, slab: Slab, slot: Slot | None) -> None:
            with record.stage("fill", slab, "source"):
                filled = source.fill(slab, None if slot is None else slot.memory)
            with record.stage("open", slab, "open" if self._device.in_place else "submit"):
                work.open(slab, filled, slot)

        try:
            slabs = source.slabs(self._sizes if staged else None)
            return self._run(key, target, slabs, step, None, record, staged=staged)
        finally:
            source.finish()

    def _send(self, key: MessageKey, memory: Any, message: Bytes, record: Transfer) -> None:
        """Seal what is in `memory` into `message`, which has no header."""
        staged = not self._device.in_place

        def place_of(slab: Slab) -> Bytes:
            return message[STRIDE * slab.first :][: slab.sealed]

        def step(work: Work, slab: Slab, slot: Slot | None) -> None:
            with record.stage("seal", slab, "seal" if self._device.in_place else "submit"):
                work.seal(slab, place_of(slab) if slot is None else slot.memory[: slab.sealed], slot)

        def land(slab: Slab, slot: Slot) -> None:
            from fastrack import packing

            with record.stage("seal", slab, "wait"):
                slot.wait()
            with record.stage("seal", slab, "store"):
                packing.copy(place_of(slab), slot.memory[: slab.sealed], self._threads)

        slabs = slabs_of(len(memory), self._sizes if staged else None)
        self._run(key, memory, slabs, step, land, record, staged=staged).verdict()

    # The loop.

    def _run(
        self,
        key: MessageKey,
        memory: Any,
        slabs: Iterator[Slab],
        step: Callable[[Work, Slab, Slot | None], None],
        land: Callable[[Slab, Slot], None] | None,
        record: Transfer,
        *,
        staged: bool,
    ) -> Work:
        """Hand a message to the device, slab by slab, and end it.

        Where the device writes to a slot, `land` takes the slab out of it when it is there. Until then slots are in
        flight, and others that share the ring may have none: so whoever has any does not wait for more.
        """
        try:
            work = self._device.begin(key, memory)
        finally:
            key.wipe()
        flight: deque[tuple[Slab, Slot]] = deque()

        def take(slab: Slab) -> Slot:
            while (slot := self._deal(slab, record, patient=not flight)) is None:
                land_oldest()
            return slot

        def land_oldest() -> None:
            assert land is not None
            land(*flight[0])
            self._ring.put(flight.popleft()[1])

        try:
            with _Ending(work):
                for slab in slabs:
                    slot = take(slab) if staged else None
                    try:
                        step(work, slab, slot)
                    finally:
                        if slot is not None and land is not None:
                            flight.append((slab, slot))
                        elif slot is not None:
                            self._ring.put(slot)  # the device may still read it, and the ring knows
                while flight:
                    land_oldest()
        except BaseException:
            for _, slot in flight:
                self._ring.put(slot)
            with suppress(Exception):  # the first error is the one to tell
                work.verdict()
            raise
        return work

    def _deal(self, slab: Slab, record: Transfer, *, patient: bool) -> Slot | None:
        with record.waiting(slab):
            return self._ring.take(patient=patient)


class _Order:
    """What was asked of one call. The key ring is made when the first sealed tensor asks for it."""

    def __init__(self, keys: KeySource | None, framework: Framework | None, non_blocking: bool) -> None:
        self._keys = keys
        self._ring: KeyRing | None = None
        self.framework = framework
        self.non_blocking = non_blocking

    @property
    def ring(self) -> KeyRing:
        # No `cached_property`: in Python 3.11 it has one lock for all threads, which a fork may find taken.
        if self._ring is None:
            self._ring = KeyRing.resolve(self._keys)
        return self._ring


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (SealedTensor, SealedRows)) or arrays.framework_of(leaf) is not None


def _describe(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return (leaf.dtype, leaf.shape) if isinstance(leaf, (SealedTensor, SealedRows)) else arrays.describe(leaf)


def _name_of(leaf: Any) -> str | None:
    if isinstance(leaf, SealedTensor):
        return leaf.name
    return None


def _require_apart(target: Any, source: Bytes) -> None:
    if isinstance(target, np.ndarray) and np.may_share_memory(target, source):
        raise ValueError("out= lies in the same memory as what it receives; give it memory of its own")


def _require_good(work: Work, name: str | None) -> None:
    bad = work.verdict()
    if bad is not None:
        raise bad_chunk(name, bad)


class _Ending:
    """Ends work, whatever happens. An error from before that is the one to tell."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._work.end()
            return
        with suppress(Exception):
            self._work.end()
