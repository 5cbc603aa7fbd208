"""`Channel`, which has the transfer loops: from a source through staging buffers to a device, and back."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from fastrack._crypto.base import HostMemory, Messages
from fastrack._crypto.engine import get_engine
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.session import Session
from fastrack._devices import canonical, open_device
from fastrack._devices.base import Device, DeviceOperation, Slab
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext, new_file_id
from fastrack._sealed.handle import Options, Out
from fastrack._sealed.message_headers import is_remote, open_local_headers
from fastrack._sealed.messages import bad_chunk
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Array, Bytes, Framework
from fastrack._transfer.inputs import Inputs, Opened, are_apart, view_output
from fastrack._transfer.pending import Name, Owner, Owners, add_notes
from fastrack._transfer.slabs import Sizes, slabs_of
from fastrack._transfer.staging import BufferLease, PlainSealer, StagingPool
from fastrack._transfer.stats import Recorder, Stats
from fastrack._util import trace
from fastrack._util.fork import register_fork_reset
from fastrack._util.public import public
from fastrack._util.trace import Steps
from fastrack.errors import AuthenticationError, ClosedError, DeviceError
from fastrack.format import HEADER_SIZE, message_size

if TYPE_CHECKING:
    import torch

    # Where torch is not installed, torch.Tensor is Any for a type checker, as the result may be NumPy's then.
    Tensors = SealedTensor | SealedRows | torch.Tensor

DEPTH = 6  # buffers of a pool: filled, on their way, or waiting for a GPU whose multiprocessors are all taken
_STAGED = 96 << 20  # bytes of a pool: three of the larger buffers that confidential mode has
_OPENING = {"source": "fill", "issue": "open", "store": "open", "wait": "wait"}  # the stage of a step
_SEALING = {"source": "fill", "issue": "seal", "store": "seal", "wait": "wait"}
_Result = TypeVar("_Result")
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
        Number of host threads that work on a transfer, by default the number of CPUs.
    share : float, optional
        On a GPU, the share of the room for thread blocks that transfers may take, above 0 and at most 1, by default 1.
        Without effect on "cpu".
    require : {"confidential"}, optional
        Refuse any device but a GPU in confidential mode, in production, ready and without dev-tools mode. The driver is
        asked once a process. By default what ``FASTRACK_REQUIRE`` says holds for GPUs, and what a key was granted for.

    Raises
    ------
    DeviceError
        If the device cannot be used, or is not what is required.
    UnknownKeyError
        If `keys` names no key.
    ValueError
        If `threads` or `share` is out of range, or `require` is another text.

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
        require: str | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"opening a channel failed: expected threads= of 1 or more, got {threads}")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"opening a channel failed: expected share= above 0 and at most 1, got {share}")
        ring = None if keys is None else KeyRing.resolve(keys)
        self._set_up(open_device(canonical(device), threads, share, require or ""), ring, threads, DEPTH)

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
        self._sizes = Sizes(device.first_slab_size, device.max_slab_size, device.segment_overhead)
        depth = min(depth, max(1, _STAGED // device.max_slab_size))
        self._pools = [StagingPool(device, self._sizes.buffer_size, depth) for _ in range(device.lanes)]
        if not device.in_place:
            self._pools[0].reserve()  # before the first result takes the memory
        self._owners = Owners()
        self._stats = Recorder()
        self._guard = CloseGuard("this channel was closed; open another one")
        # The session and the guard, which are also used alone, register themselves.
        register_fork_reset(*self._pools, self._owners)

    @property
    def device(self) -> str:
        """The name of the device: "cpu" or "cuda:N"."""
        return self._device.name

    @property
    def stats(self) -> Stats:
        """Totals of the transfers so far."""
        return self._stats.total

    @overload
    def to_device(
        self, obj: Tensors, *, framework: Literal["torch"] | None = None, **options: Unpack[Options]
    ) -> torch.Tensor: ...
    @overload
    def to_device(self, obj: Tensors | Array, *, framework: Literal["numpy"], **options: Unpack[Options]) -> Array: ...
    @overload
    def to_device(self, obj: object, *, framework: Framework | None = None, **options: Unpack[Options]) -> Any: ...
    @overload
    def to_device(self, obj: object, *, framework: None = None, out: Out, **options: Unpack[Options]) -> Out: ...
    def to_device(
        self,
        obj: Any,
        *,
        keys: KeySource | None = None,
        framework: Framework | None = None,
        out: Any = None,
        non_blocking: bool = False,
        dtype: object = None,
    ) -> Any:
        """Move tensors to the channel's device, sealed on the way.

        Parameters and errors as for `fastrack.to_device`. `keys` defaults to the keys of the channel.

        Raises
        ------
        ClosedError
            If the channel was closed.
        """
        return self._transfer(None, obj, keys, framework, out, non_blocking, dtype)

    def to_host(self, x: Any, key: KeyLike | None = None, *, name: str = "tensor") -> SealedTensor:
        """Seal a tensor on the channel's device, and copy it to the host sealed.

        Parameters and errors as for `fastrack.to_host`. `key` defaults to the first key of the channel.

        Raises
        ------
        ClosedError
            If the channel was closed.
        """
        with self._guard:
            if not self._device.in_place:  # else every earlier transfer is done
                self._owners.current().wait()
            key = sealing_key(self._keys if key is None else key)
            context = MessageContext(name, *arrays.dtype_and_shape(x), new_file_id())
            message = self._seal(x, context, key)
        message.flags.writeable = False
        return SealedTensor(context, message, key.id)

    def seal_message(self, x: Any, context: MessageContext, key: Key, message: Bytes | None = None) -> Bytes:
        """Seal a tensor on the channel's device, and return its message, in memory of its size if any is given.

        The context must describe `x`.
        """
        with self._guard:
            self._owners.current().wait()
            return self._seal(x, context, key, message)

    def synchronize(self) -> None:
        """Wait for all transfers that this thread started on this channel, and raise their failures.

        Errors as for `fastrack.synchronize`.
        """
        with self._guard:
            self._owners.current().wait()

    @contextmanager
    def group(self) -> Iterator[Group]:
        """Keep the failures of a ``with`` block's transfers apart from other failures of the thread.

        The end of the block waits for its transfers and raises the first failure. If the block raised an error, the
        failures become notes of that error.
        """
        owner = self._owners.open_group()
        try:
            yield Group(self, owner)
            with self._guard:
                owner.wait()
        except BaseException as error:
            with suppress(ClosedError), self._guard:  # a closed channel has waited for all transfers
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
            with ExitStack() as closing:  # every step runs, even if one fails, the last one first
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

    def _transfer(
        self,
        owner: Owner | None,
        obj: Any,
        keys: KeySource | None = None,
        framework: Framework | None = None,
        out: Any = None,
        non_blocking: bool = True,
        dtype: object = None,
    ) -> Any:
        """Move all tensors in `obj`, unless an earlier transfer of `owner`, by default the thread, has failed."""
        if out is not None and framework is not None:
            raise ValueError("expected framework= or out=, got both; the arrays of out= have a framework already")
        with self._guard:
            if not self._device.in_place:  # else every earlier transfer is done
                owner = owner or self._owners.current()
                if non_blocking:
                    owner.check()
                else:
                    owner.wait()
                    owner = None
            keys = self._keys if keys is None else keys
            if type(obj) is SealedTensor and dtype is None and self._device.in_place and not is_remote(obj):
                return self._open_leaf(obj, keys, framework, out)
            inputs = Inputs(obj, framework, self._device, out, None if dtype is None else dtypes.name_of(dtype))
            opened = None
            try:
                opened = Opened(inputs, keys, self._session)
                return self._open(opened, owner)
            except AuthenticationError:
                if opened is None:
                    self._clear(inputs.targets)
                if opened is None or not opened.discard():
                    raise
            # The wrong bytes may be in the cache of a remote file, which was discarded: download them again.
            return self._open(Opened(inputs, keys, self._session), owner)

    def _open_leaf(self, sealed: SealedTensor, keys: KeySource | None, framework: Framework | None, out: Any) -> Any:
        """Open one sealed tensor in place, like `_open`, whose lists take longer than the cipher of a small tensor."""
        device, context, source, target = self._device, sealed.context, sealed.memory, None
        if framework == "torch":
            arrays.require_installed(framework)
        if out is not None:
            target = view_output(device, out, context.dtype, context.shape)
            if target.size and not are_apart(source, target):
                raise ValueError("expected out= in memory of its own, got the memory of a tensor that is moved")
        message_keys = MessageKeys(1)
        try:
            open_local_headers((sealed,), KeyRing.resolve(keys), message_keys)
            if target is None:  # not before the header, which authenticates the size
                out, target = device.empty(context.dtype, context.shape, device.framework(framework, None))
            messages = Messages(message_keys, [sealed.nbytes], [target], [source], [None], [None], [None])
            with Transfer(self._stats, 1, target.size, "to_device", context.name) as record:
                self._fill((target,), messages, record, ((context.name, sealed.path),).__getitem__)
        except AuthenticationError:
            self._clear((target,))
            raise
        finally:
            message_keys.wipe()
        return out

    def _open(self, opened: Opened, owner: Owner | None) -> Any:
        """Open all messages and return the pytree of results. With `owner`, do not wait."""
        inputs = opened.inputs
        outputs: Sequence[Any] = ()
        try:
            if inputs.tensors:
                messages, outputs, targets, nbytes = opened.allocate(self._device)
                with Transfer(self._stats, len(outputs), nbytes, "to_device", inputs.name) as record:
                    owner = None if self._device.in_place else owner
                    self._fill(targets, messages, record, opened.name, owner, opened.padded)
        finally:
            opened.keys.wipe()
        return inputs.results(outputs)

    def _fill(
        self,
        targets: Sequence[Any],
        messages: Messages,
        record: Transfer,
        name: Callable[[int], Name],
        owner: Owner | None = None,
        padded: Sequence[int] = (),
    ) -> None:
        """Open messages into arrays. With `owner`, do not wait. After any error all the arrays hold zeros.

        A part of a tensor could pass for all of it, and what the device wrote before an error is not authentic.
        """
        operation: DeviceOperation | None = None
        try:
            for number in padded:  # no message fills all of these
                self._device.clear(targets[number])
            if messages.nbytes:
                operation = self._move(messages, record, "open", wait=owner is None)
                if owner is not None:
                    owner.add(operation, list(map(name, range(len(messages.nbytes)))))  # which keep no tensor alive
                elif (bad := operation.result()) is not None:
                    tensor, path = name(bad.message)
                    raise bad_chunk(tensor, bad.chunk, path=path)  # noqa: TRY301 - for the handler below
        except BaseException:
            try:
                if operation is not None:  # which must not write to cleared arrays
                    with suppress(DeviceError):
                        operation.result()
            finally:
                self._clear(targets)
            raise

    def _clear(self, targets: Sequence[Any]) -> None:
        """Overwrite arrays with zeros after an error. Device errors are suppressed: the caller raises."""
        remaining = [target for target in reversed(targets) if target is not None]
        try:
            while remaining:
                with suppress(DeviceError):
                    self._device.clear(remaining[-1])
                remaining.pop()  # not before it is cleared: an interrupt leaves it to the call below
        finally:
            if remaining:  # an interrupt ended the loop
                self._clear(remaining)

    def _seal(self, x: Any, context: MessageContext, key: Key, message: Bytes | None = None) -> Bytes:
        keys, header = context.new_keys(key)
        try:
            memory = self._device.view(x, writable=False)
            nbytes = dtypes.nbytes(context.dtype, context.shape)
            with Transfer(self._stats, 1, nbytes, "to_host", context.name) as record:
                if message is None:
                    message = arrays.empty_bytes(message_size(nbytes))
                message[:HEADER_SIZE] = header
                sealed = HostMemory.of(message[HEADER_SIZE:], writable=True)
                messages = Messages(keys, [nbytes], [memory], [sealed], [None], [None], [None])
                self._move(messages, record, "seal").result()
        finally:
            keys.wipe()
        return message

    def _move(self, messages: Messages, record: Transfer, stage: str, *, wait: bool = True) -> DeviceOperation:
        """Open messages into their memories, or seal these. Without `wait` the device may still work on return."""
        operation = self._device.begin(messages, record.note)
        step = operation.open if stage == "open" else operation.seal
        if self._device.in_place:
            try:
                record.run(stage, messages, stage, step, None, None)
            finally:
                operation.finish()
            return operation
        unissued, limit = 0, _FIRST_BATCH
        with (
            PlainSealer(self._engine, messages) as sealer,
            BufferLease(self._pools, operation.lane) as buffers,
            _finishing(operation, wait),
        ):
            for slab in slabs_of(messages.nbytes, messages.plans, self._sizes):
                has_plain = sealer.concerns(slab)
                if has_plain and unissued:  # or this thread waits for a buffer of the list that it has not issued
                    operation.issue()
                    unissued = 0
                buffer = record.run("wait", slab, "wait", buffers.acquire, has_plain)
                if has_plain:
                    record.run("fill", slab, "source", sealer.fill, slab, buffer.memory)
                record.run(stage, slab, "submit", step, slab, buffer)
                unissued += 1
                if has_plain or unissued == limit:
                    operation.issue()
                    unissued, limit = 0, _BATCH
                    if stage == "open":  # when sealing, a buffer holds its chunks until it is reused
                        buffers.release()
        return operation


class CloseGuard:
    """A context manager around calls of a closeable object. It refuses calls once the object is closed.

    Thread-safe. A caller after `close_and_drain` gets a `ClosedError` with `closed_message`.
    """

    def __init__(self, closed_message: str) -> None:
        self._closed_message = closed_message
        self.is_open = True
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget all callers: none of their threads exists in a forked child."""
        self._callers = 0
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    def close_and_drain(self) -> bool:
        """Refuse new callers, wait for current ones, and return whether it was open."""
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self._left.wait_for(lambda: not self._callers)
        return was_open

    def __enter__(self) -> None:
        with self._lock:
            if not self.is_open:
                raise ClosedError(self._closed_message)
            self._callers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._callers -= 1
            if not self.is_open:
                self._left.notify_all()


@dataclass(slots=True)
class Transfer:
    """The measurement of a call that moves `count` tensors, as a ``with`` block. A block that raises is not counted.

    `steps` is filled if a trace is recorded.
    """

    recorder: Recorder
    count: int
    nbytes: int
    direction: str
    name: str | None
    timeline: trace.Timeline | None = None
    start: int = 0
    current_span: str = ""
    steps: Steps = field(default_factory=list)
    stage_ns: dict[str, int] = field(default_factory={"fill": 0, "open": 0, "seal": 0, "wait": 0}.copy)

    def __enter__(self) -> Self:
        self.timeline = trace.active
        if self.timeline is not None:
            self.timeline.local.transfer = self
        self.start = time.perf_counter_ns()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        start, stop = self.start, time.perf_counter_ns()
        if self.timeline is not None:
            self.timeline.local.transfer = None
            self.timeline.add_transfer(self.direction, start, stop, self.nbytes, self.name, self.steps)
        if kind is None:
            recorder, stages = self.recorder, self.stage_ns
            moved = self.count, self.nbytes, stop - start, stages["fill"], stages["open"], stages["seal"]
            with recorder.lock:
                recorder.totals = tuple(map(operator.add, recorder.totals, moved))

    def run(
        self, stage: str, slab: Slab | Messages, label: str, function: Callable[..., _Result], *arguments: Any
    ) -> _Result:
        """Call a function, and add its time to a stage, unless it raises. A trace shows the call under `label`.

        `slab` is the function's input: a slab, or all messages.
        """
        self.current_span = label
        start = time.perf_counter_ns()
        try:
            result = function(*arguments)
            self.stage_ns[stage] += time.perf_counter_ns() - start
        finally:
            if self.timeline is not None:
                self.steps += (label, start, time.perf_counter_ns(), slab.first_chunk, slab.sealed_size)
        return result

    def note(self, name: str, slab: Slab, start: int, stop: int) -> None:
        """Add the time of a step that a device did for a slab on this thread."""
        stages = _SEALING if self.direction == "to_host" else _OPENING
        self.stage_ns[stages[name]] += stop - start
        if self.timeline is not None:
            self.steps += (name, start, stop, slab.first_chunk, slab.sealed_size)


class Group:
    """The non-blocking transfers of a ``with`` block."""

    def __init__(self, channel: Channel, owner: Owner) -> None:
        self._channel = channel
        self._owner = owner

    def __call__(self, obj: Any, **options: Any) -> Any:
        """Move all tensors in `obj`, like `Channel.to_device`. Raise the known failures of the block."""
        return self._channel._transfer(self._owner, obj, **options)  # noqa: SLF001 - its own

    def prepare(
        self,
        obj: Any,
        *,
        keys: KeySource | None = None,
        framework: Framework | None = None,
        out: Any = None,
        dtype: str | None = None,
    ) -> Callable[[], Any]:
        """Authenticate the headers of all tensors in `obj`, and return a function that moves them.

        The function allocates and writes; nothing does before. An `ALLOCATE` in `out` requests fresh memory.
        """
        channel, owner = self._channel, self._owner
        with channel._guard:  # noqa: SLF001 - its own
            inputs = Inputs(obj, framework, channel._device, out, dtype)  # noqa: SLF001 - its own
            opened = Opened(inputs, channel._keys if keys is None else keys, channel._session)  # noqa: SLF001 - its own

        def move() -> Any:
            with channel._guard:  # noqa: SLF001 - its own
                owner.check()
                return channel._open(opened, owner)  # noqa: SLF001 - its own

        return move


@contextmanager
def _finishing(operation: DeviceOperation, wait: bool) -> Iterator[None]:
    """Finish an operation, even after an error. Then also wait for it, and raise the error of the block."""
    try:
        try:
            yield
        except BaseException:
            with suppress(Exception):
                operation.finish()
            raise
        operation.finish(wait=wait)
    except BaseException:
        with suppress(Exception):
            operation.result()
        raise
