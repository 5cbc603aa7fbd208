"""`Channel`, which has the transfer loops: from a source through staging buffers to a device, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import HEADER_SIZE, SEALED_CHUNK_SIZE, MessageKey
from fastrack._crypto.engine import get_engine
from fastrack._crypto.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._crypto.session import Session
from fastrack._devices import canonical, open_device
from fastrack._devices.base import Device, Operation, Slab
from fastrack._sealed.tensor import MessageContext, SealedRows, SealedTensor, TensorSlice, bad_chunk, new_file_id
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework
from fastrack._transfer.leaf import Leaf
from fastrack._transfer.pending import Owner, Owners, add_notes
from fastrack._transfer.sources import PassedSource, PlainSource, RowSource, SealedSource, Sizes, Source, slabs_of
from fastrack._transfer.staging import Lease, StagingPool
from fastrack._transfer.stats import Recorder, Stats, Transfer
from fastrack._util.fork import register_fork_reset
from fastrack._util.guard import CloseGuard
from fastrack._util.public import public
from fastrack._util.tree import tree_map, tree_path
from fastrack.errors import AuthenticationError, ClosedError, DeviceError

DEPTH = 6  # buffers of a pool: filled, on their way, or waiting for a GPU whose multiprocessors are all taken
_Opened = tuple[TensorSlice | None, MessageKey]  # the part of a leaf that a message holds, or None for all of it
_FIRST_BATCH, _BATCH = 2, 16  # slabs that are issued together: fewer at first, so that the device begins early


@public
class Channel:
    """A connection to a device, with the keys that it may use and staging buffers of its own.

    Thread-safe. Close it, or use it in a ``with`` statement.

    Parameters
    ----------
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : KeySource, optional
        Keys of sealed tensors, as `to_device` takes them. The defaults are looked up at each call with a sealed tensor.
        Plain tensors need no key.
    threads : int, optional
        Number of the host's threads that may work on a transfer, by default the number of its CPUs.
    share : float, optional
        On a GPU, the share of the room for thread blocks that transfers may take, above 0 and at most 1, by default 1.
        Without effect on "cpu".

    Raises
    ------
    DeviceError
        If the device cannot be used.
    UnknownKeyError
        If `keys` names no key.
    ValueError
        If `threads` or `share` is out of range.

    Notes
    -----
    A forked child has a session secret and staging buffers of its own.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(6).reshape(2, 3), key)
    >>> with fastrack.Channel("cpu", keys=key) as channel:
    ...     array = channel.to_device(sealed, framework="numpy")
    ...     print(array)
    ...     print(channel.stats.transfers, channel.stats.bytes)
    [[0 1 2]
     [3 4 5]]
    1 48
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
            raise ValueError(f"opening a channel failed: expected threads= of 1 or more, got {threads}")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"opening a channel failed: expected share= above 0 and at most 1, got {share}")
        ring = None if keys is None else KeyRing.resolve(keys)
        self._set_up(open_device(canonical(device), threads, share), ring, threads, DEPTH)

    @classmethod
    def _from_device(
        cls, device: Device, *, keys: KeySource | None = None, threads: int | None = None, depth: int = DEPTH
    ) -> Self:
        """Return a channel to a device that is open, with up to `depth` staging buffers for each of its lanes."""
        channel = cls.__new__(cls)
        channel._set_up(device, None if keys is None else KeyRing.resolve(keys), threads, depth)  # noqa: SLF001 - its own
        return channel

    def _set_up(self, device: Device, keys: KeyRing | None, threads: int | None, depth: int) -> None:
        self._keys = keys
        self._engine = get_engine(threads=threads)
        self._device = device
        self._session = Session()
        self._sizes = Sizes(device.first_slab_size, device.max_slab_size)
        size = cobblestone.ciphertext_size(device.max_slab_size)
        self._pools = [StagingPool(device, size, depth) for _ in range(device.lanes)]
        if not device.in_place:
            self._pools[0].reserve()  # before the first result takes what memory there is
        self._owners = Owners()
        self._stats = Recorder()
        self._guard = CloseGuard("this channel was closed; open another one")
        # The session and the guard, which are also used alone, register themselves.
        register_fork_reset(*self._pools, self._owners, self._stats)

    @property
    def device(self) -> str:
        """The name of the device: "cpu" or "cuda:N"."""
        return self._device.name

    @property
    def stats(self) -> Stats:
        """Totals of the transfers so far."""
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
        """Move tensors to the channel's device, sealed on the way.

        Parameters and errors are those of `fastrack.to_device`. `keys` default to those of the channel.

        Raises
        ------
        ClosedError
            If the channel was closed.
        """
        return self._start(None, obj, keys=keys, framework=framework, out=out, non_blocking=non_blocking)

    def to_host(self, x: Any, *, key: KeyLike | None = None, name: str = "tensor") -> SealedTensor:
        """Seal a tensor on the channel's device, and copy it to the host sealed.

        Parameters and errors are those of `fastrack.to_host`. `key` defaults to the first key of the channel.

        Raises
        ------
        ClosedError
            If the channel was closed.
        """
        with self._guard:
            self._owners.current().wait()
            key = KeyRing.resolve(self._keys).first if key is None else sealing_key(key)
            dtype, shape = arrays.describe(x)
            context = MessageContext(name, dtype, shape, new_file_id())
            message_key, header = context.new_key(key)
            memory = self._device.view(x, writable=False)
            with self._stats.transfer(len(memory), "to_host", name) as record:
                message = arrays.empty_bytes(cobblestone.message_size(len(memory)))
                message[:HEADER_SIZE] = header
                self._send(message_key, memory, message[HEADER_SIZE:], record)
        message.flags.writeable = False
        return SealedTensor(context, message, key.id)

    def synchronize(self) -> None:
        """Wait for all transfers that this thread started on this channel, and raise their failures.

        Errors are those of `fastrack.synchronize`.
        """
        with self._guard:
            self._owners.current().wait()

    @contextmanager
    def group(self) -> Iterator[Callable[..., Any]]:
        """Collect the failures of the transfers of a ``with`` block apart from those of their thread.

        Yield a `to_device` that does not wait, and that raises the failures in the block that are known. The end of the
        block waits for all of its transfers and raises the first failure; or, if the block raised an error, adds the
        failures to this as notes.
        """
        owner = self._owners.open_group()
        try:
            yield partial(self._start, owner, non_blocking=True)
            with self._guard:
                owner.wait()
        except BaseException as error:
            with suppress(ClosedError), self._guard:  # a channel that is closed has waited for them
                owner.drain()
            add_notes(error, owner.take())
            raise
        finally:
            self._owners.close_group(owner)

    def close(self) -> None:
        """Wait for all transfers, wipe the session secret and the staging buffers, and close the device.

        Raises
        ------
        AuthenticationError, DeviceError
            If a transfer that this thread started, and did not wait for, has failed. The channel is closed even then.
            Failures of other threads' transfers are reported as `ResourceWarning` and to the logger "fastrack".
        """
        if self._guard.close_and_drain():
            with ExitStack() as closing:  # all of them, even if one fails
                closing.callback(self._device.close)
                for pool in self._pools:
                    closing.callback(pool.close)
                closing.callback(self._session.wipe)
                self._keys = None
                self._owners.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Channel to {self.device}{'' if self._guard.is_open else ', closed'}>"

    def __reduce__(self) -> str:
        raise TypeError(
            "pickling a channel failed: its secret stays in its process. Open another one where it is needed"
        )

    # One call.

    def _start(
        self,
        owner: Owner | None,
        obj: Any,
        *,
        keys: KeySource | None = None,
        framework: Framework | None = None,
        out: Any = None,
        non_blocking: bool,
    ) -> Any:
        """Move all tensors in `obj`, unless a transfer that the owner, by default the thread, started has failed."""
        with self._guard:
            if owner is None:
                owner = self._owners.current()
            if non_blocking:
                owner.check()
            else:
                owner.wait()
            request = _Request(self._keys if keys is None else keys, framework, owner, non_blocking)
            if out is None:
                return tree_map(_naming(obj, lambda value: self._move(value, request)), obj)
            if framework is not None:
                raise ValueError("expected framework= or out=, got both; the arrays of out= have a framework already")
            prepared: deque[tuple[Leaf, Any] | None] = deque()  # in the order of the leaves
            tree_map(_naming(obj, lambda value, array: prepared.append(self._prepare(value, array))), obj, out)
            fill = _naming(obj, lambda value, array: self._fill(prepared.popleft(), value, array, request))
            return tree_map(fill, obj, out)

    def _move(self, value: Any, request: _Request) -> Any:
        """Move a tensor to fresh memory. Return any other value as it is."""
        leaf = Leaf.of(value, in_memory_order=True)
        if leaf is None:
            return value
        with ExitStack() as wiping:
            opened = self._open_headers(leaf.value, request, None, wiping)
            # Memory of the claimed size is allocated here, when the claim is authenticated.
            framework = self._device.framework(request.framework, leaf.framework)
            array, target = self._device.empty(leaf.dtype, leaf.shape, framework)
            self._transfer(leaf, opened, request, target)
        return array if leaf.restore is None else leaf.restore(array)

    def _prepare(self, value: Any, out: Any) -> tuple[Leaf, Any] | None:
        """Return a tensor's description and a view of the array that it will fill, before anything is moved."""
        leaf = Leaf.of(value, in_memory_order=False)
        if leaf is None:
            return None
        dtype, shape = arrays.describe(out)
        if (dtype, shape) != (leaf.dtype, leaf.shape):
            raise ValueError(
                f"out= must have the dtype and shape of what it receives: expected {leaf.dtype} {list(leaf.shape)}, "
                f"got {dtype} {list(shape)}"
            )
        return leaf, self._device.view(out, writable=True)

    def _fill(self, prepared: tuple[Leaf, Any] | None, value: Any, out: Any, request: _Request) -> Any:
        """Move a tensor into `out`. Return any other value as it is."""
        if prepared is None:
            return value
        leaf, target = prepared
        with ExitStack() as wiping:
            opened = self._open_headers(leaf.value, request, target, wiping)
            self._transfer(leaf, opened, request, target)
        return out

    def _transfer(self, leaf: Leaf, opened: list[_Opened], request: _Request, target: Any) -> None:
        """Open the messages of a leaf into `target`. After an error this holds zeros."""
        with self._stats.transfer(len(target), "to_device", leaf.name) as record:
            messages = self._messages(leaf.value, opened, target)
            started: list[tuple[Operation, Source]] = []
            try:
                if isinstance(leaf.value, SealedRows) and leaf.value.needs_padding:
                    self._device.clear(target)
                for source, message_key in messages:
                    # What is on one device's stream is done when the last of it is.
                    wait = source is messages[-1][0] and not request.non_blocking
                    started.append((self._receive(source, message_key, target, record, wait=wait), source))
                self._collect_results(started, request)
            except BaseException:
                for operation, _ in started:  # none may write to the target once it was cleared
                    with suppress(DeviceError):
                        operation.result()
                self._clear(target)
                raise

    def _open_headers(self, leaf: Any, request: _Request, target: Any, wiping: ExitStack) -> list[_Opened]:
        """Return the parts of a leaf, and the key of the message of each, before anything is allocated or moved.

        `target` is a view of the array that the caller gave, or None. It is cleared if a header is refused.
        """

        def wiped(key: MessageKey) -> MessageKey:
            wiping.callback(key.wipe)
            return key

        if not isinstance(leaf, (SealedTensor, SealedRows)):
            return [(None, wiped(self._session.next_key()))]
        try:
            if isinstance(leaf, SealedTensor):
                return [(None, wiped(leaf.open_header(request.ring)))]
            leaf.check_contexts(request.ring)
            return [(part, wiped(part.tensor.open_header(request.ring))) for part in leaf.slices()]
        except AuthenticationError:
            if target is not None:
                self._clear(target)
            raise

    def _messages(self, leaf: Any, opened: list[_Opened], target: Any) -> list[tuple[Source, MessageKey]]:
        """Return the source and the key of each message, which fills its part of `target`."""
        messages: list[tuple[Source, MessageKey]] = []
        for part, key in opened:
            source: Source
            if part is not None:
                source = RowSource(part)
            elif isinstance(leaf, SealedTensor):
                source = SealedSource(leaf)
            elif self._device.in_place:
                source = PassedSource(arrays.bytes_of(leaf))
            else:
                source = PlainSource(arrays.bytes_of(leaf), key, self._engine)
            if isinstance(target, np.ndarray) and np.may_share_memory(target, source.memory):
                raise ValueError("expected out= in memory of its own, got the memory of the tensor that it receives")
            messages.append((source, key))
        return messages

    def _collect_results(self, started: list[tuple[Operation, Source]], request: _Request) -> None:
        """Wait for operations, or leave all of them, even those that are done, to an owner that does not wait."""
        for operation, source in started:
            if request.non_blocking and not self._device.in_place:
                request.owner.add(operation, source.name, source.path)
                continue
            bad = operation.result()
            if bad is not None:
                raise bad_chunk(source.name, bad, path=source.path)

    def _clear(self, target: Any) -> None:
        """Overwrite a view with zeros after an error, which is the one to raise even if this fails as well."""
        with suppress(DeviceError):
            self._device.clear(target)

    # The two directions.

    def _receive(self, source: Source, key: MessageKey, target: Any, record: Transfer, *, wait: bool) -> Operation:
        """Open a message into `target`. Without `wait` the operation may go on when this returns."""
        try:
            operation = self._begin(key, target, record)
            if source.in_place and self._device.in_place:
                with _Finishing(operation, wait):
                    for slab in source.slabs(None):
                        sealed = source.fill(slab, None)
                        with record.stage("open", slab, "open"):
                            operation.open(slab, sealed, None)
                return operation
            unissued, limit = 0, _FIRST_BATCH if source.in_place else 1
            with Lease(self._pools, operation.lane) as buffers, _Finishing(operation, wait):
                for slab in source.slabs(self._sizes):
                    with record.waiting(slab):
                        buffer = buffers.acquire()
                        if not source.in_place:
                            buffer.wait()
                    if source.in_place:
                        sealed = source.fill(slab, None)
                    else:
                        with record.stage("fill", slab, "source"):
                            sealed = source.fill(slab, buffer.memory)
                    with record.stage("open", slab, "submit"):
                        operation.open(slab, sealed, buffer)
                    unissued += 1
                    if unissued == limit:
                        operation.issue()
                        unissued, limit = 0, _BATCH if source.in_place else 1
                        buffers.release()
            return operation
        finally:
            source.finish()

    def _send(self, key: MessageKey, memory: Any, message: Bytes, record: Transfer) -> None:
        """Seal what is in `memory` into `message`, which has no header."""
        operation = self._begin(key, memory, record)
        if self._device.in_place:
            with _Finishing(operation, True):
                for slab in slabs_of(len(memory), None):
                    with record.stage("seal", slab, "seal"):
                        operation.seal(slab, _sealed_part(message, slab), None)
        else:
            unissued, limit = 0, _FIRST_BATCH
            # Sealed chunks stay in the buffers until these are used again, or to the end.
            with Lease(self._pools, operation.lane) as buffers, _Finishing(operation, True):
                for slab in slabs_of(len(memory), self._sizes):
                    with record.waiting(slab):
                        buffer = buffers.acquire()
                    with record.stage("seal", slab, "submit"):
                        operation.seal(slab, _sealed_part(message, slab), buffer)
                    unissued += 1
                    if unissued == limit:
                        operation.issue()
                        unissued, limit = 0, _BATCH
        operation.result()

    def _begin(self, key: MessageKey, memory: Any, record: Transfer) -> Operation:
        """Begin an operation, and wipe the key, which the device has then."""
        try:
            return self._device.begin(key, memory, record.note)
        finally:
            key.wipe()


@dataclass(slots=True)
class _Request:
    """The options of one call. The key ring is made for the first sealed tensor."""

    keys: KeySource | None
    framework: Framework | None
    owner: Owner
    non_blocking: bool
    _ring: KeyRing | None = None

    @property
    def ring(self) -> KeyRing:
        # No `cached_property`: in Python 3.11 it has one lock for all threads, which may be held at a fork.
        if self._ring is None:
            self._ring = KeyRing.resolve(self.keys)
        return self._ring


def _naming(nest: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    """Return `change` with the path of the leaf in the pytree added to its errors."""

    def named(leaf: Any, *others: Any) -> Any:
        try:
            return change(leaf, *others)
        except (TypeError, ValueError) as error:
            path = tree_path(leaf, nest)
            if path is not None and len(error.args) == 1:
                error.args = (f"leaf {path}: {error}",)
            raise

    return named


def _sealed_part(message: Bytes, slab: Slab) -> Bytes:
    return message[SEALED_CHUNK_SIZE * slab.first_chunk :][: slab.sealed_size]


@dataclass(slots=True)
class _Finishing:
    """End an operation, whatever happens. After an error, which is the one to raise, also wait for the operation."""

    _operation: Operation
    _wait: bool

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        failed = True
        try:
            if kind is None:
                self._operation.finish(wait=self._wait)
                failed = False
            else:
                with suppress(Exception):
                    self._operation.finish()
        finally:
            if failed:
                with suppress(Exception):
                    self._operation.result()
