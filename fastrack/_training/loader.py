"""`wrap`: the batches of a data loader on a device, prefetched by a thread."""

from __future__ import annotations

import atexit
import copy
import functools
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import FunctionType
from typing import Any, NoReturn, Self, SupportsIndex

from fastrack._devices import canonical
from fastrack._devices.side_stream import SideStream, side_stream
from fastrack._keys.keyring import KeyRing, KeySource, common_ring
from fastrack._keys.keys import Key
from fastrack._sealed.message_headers import authenticate_remote
from fastrack._sealed.message_headers import prefetch as begin_downloads
from fastrack._sealed.tensor import SealedTensor
from fastrack._transfer.api import to_device
from fastrack._transfer.inputs import wanted_of
from fastrack._util.fork import per_process, register_fork_reset
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import ClosedError, FastrackError

_EXIT_TIMEOUT = 5  # seconds that the exit of the process waits for prefetch threads
_AHEAD = 64  # batches with parts on servers that are taken from the loader before they are opened
_AHEAD_BYTES = 128 << 20  # of downloads begun for these batches
_END = object()
# The modules of what draws no random numbers once it has begun. Draws of two threads have no order: the generators of
# torch, NumPy and Python are one for all threads.
_QUIET = {
    *("fastrack", "torch"),
    *(f"torch.utils.data.{name}" for name in ("_utils.collate", "dataloader", "dataset", "distributed", "sampler")),
    *(f"torchdata.stateful_dataloader.{name}" for name in ("sampler", "stateful_dataloader")),
}


@public
def wrap(
    loader: Iterable[Any],
    device: object = None,
    *,
    keys: KeySource | None = None,
    prefetch: int = 2,
    transform: Callable[[Any], Any] | None = None,
) -> WrappedLoader:
    """Wrap a data loader, so that its batches arrive on a device.

    Each batch of the loader goes through `to_device` and keeps its structure.

    Parameters
    ----------
    loader : iterable of batches
        A ``torch.utils.data.DataLoader``, or any other iterable. A batch is an argument of `to_device`: a tensor, a
        sealed tensor, rows of one, or a pytree of these. Other leaves are passed through.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : KeySource, optional
        Keys of the sealed tensors, as `to_device` takes them. If absent, those that the `SealedDataset` of the loader
        was made with, else the defaults, which are looked up at the first sealed tensor. The loader and its workers do
        not get them.
    prefetch : int
        Number of batches that a thread keeps ready while the caller works on a batch; one more while the caller waits.
        With 0 there is no thread, and each batch is fetched and moved on request. So it is, too, with ``num_workers=0``
        where code of yours makes the batches, which may draw random numbers: a transform, a data set, a function that
        collates, a sampler, or a sampler's generator. They are drawn as without `wrap`.
    transform : callable, optional
        Function of a batch on the device that returns the batch to use. It is called in the thread that asks for the
        batch, on that thread's current stream.

    Returns
    -------
    WrappedLoader
        Iterable with the length and the attributes of `loader`.

    Raises
    ------
    DeviceError
        If the kind of `device` is unknown.
    TypeError, ValueError
        If `loader` is not iterable or is wrapped already, or `prefetch` is negative; or if several processes of
        `torch.distributed` would each get all samples, which iterating checks again.
    FormatError, KeyPermissionError, OSError
        If a key file in `keys` cannot be used.

    Notes
    -----
    An error in a batch is raised in place of that batch, and ends the iteration.

    On a GPU, batches are moved on a stream of their own, concurrently with the model's work, and are complete when they
    are returned: the caller's current stream, of torch or CuPy, need not wait. Their memory is reused after the work on
    that stream, like with `torch.Tensor.record_stream`; the caller records use on further streams. Without prefetch a
    batch is moved on the caller's stream.

    An iteration also ends when its iterator is closed or garbage, for example after ``break``; its thread, the
    loader's iterator and its workers end too. A loader that can be iterated only once, such as a generator, then loses
    the prefetched batches; ``prefetch=0`` avoids this.

    With remote files, more batches are taken from the loader in advance, so that their parts are downloaded in
    parallel: up to 64 batches, or 128 MiB of downloads.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(6, dtype=np.float32), key)
    >>> batches = [{"x": sealed[:3], "step": 0}, {"x": sealed[3:], "step": 1}]
    >>> for batch in fastrack.wrap(batches, "cpu", keys=key):
    ...     print(batch["step"], batch["x"].tolist())
    0 [0.0, 1.0, 2.0]
    1 [3.0, 4.0, 5.0]

    With PyTorch:

    >>> from torch.utils.data import DataLoader
    >>> fastrack.save_file({"x": np.arange(8), "y": np.arange(8) % 2}, "train.safetensors", key)
    >>> data = fastrack.SealedDataset("train.safetensors", keys=key)
    >>> loader = fastrack.wrap(DataLoader(data, batch_size=4, collate_fn=fastrack.collate), keys=key)
    >>> len(loader), sum(batch["y"].sum().item() for batch in loader)
    (2, 4)
    """
    if isinstance(loader, WrappedLoader):
        raise TypeError("wrap: expected a loader, got one that is wrapped already. Wrap the loader that it was made of")
    if isinstance(loader, (str, bytes, os.PathLike)):
        raise TypeError(f"wrap: expected an iterable of batches, got {shown(loader)}. Read a file with a SealedDataset")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"wrap: expected an iterable of batches, got {type(loader).__name__}")
    if not isinstance(prefetch, SupportsIndex):
        raise TypeError(f"prefetch=: expected a number of batches, got {type(prefetch).__name__}. Pass 2, or 0")
    if operator.index(prefetch) < 0:
        raise ValueError(f"prefetch=: expected 0 or more, got {prefetch}")
    if transform is not None and not callable(transform):
        raise TypeError(f"transform=: expected a function of a batch, got {shown(transform)}. Compose several in one")
    _require_distributed(loader)
    kind = _StatefulLoader if hasattr(_stateful(loader), "state_dict") else WrappedLoader
    keys = _keys_of_data(loader) if keys is None else keys
    ring = KeyRing(_get_environment_key) if keys is None else KeyRing.resolve(keys)
    return kind(loader, canonical(device), ring, keys is None, prefetch, transform)


def _keys_of_data(loader: Any) -> KeyRing | None:
    """Return the keys that the data set of a loader was made with, or None."""
    module = sys.modules.get("fastrack._training.dataset")  # which takes torch; not imported, there is no such data set
    data = loader
    while module is not None and data is not None:
        if isinstance(data, module.SealedDataset):
            keys: KeyRing | None = data._keys  # noqa: SLF001 - of this package
            return keys
        several = getattr(data, "datasets", None)  # as a ConcatDataset has them
        if isinstance(several, (list, tuple)):
            return common_ring([_keys_of_data(each) for each in several])
        data = getattr(data, "dataset", None)  # as loaders have it, and subsets of torch
    return None


def _stateful(loader: Any) -> Any:
    """Return what has the state of a loader: its stream, or the loader itself."""
    stream = _stream_of(loader)
    return loader if stream is None else stream


def _stream_of(loader: Any) -> Any:
    """Return the `StreamingSealedDataset` whose batches a loader returns, if it has no state itself, or None."""
    module = sys.modules.get("fastrack._training.streaming")
    stream = getattr(loader, "dataset", None)
    if module is None or not isinstance(stream, module.StreamingSealedDataset):
        return None
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "wrap: expected a loader of a stream with in_order=True, got in_order=False, with which the order depends "
            "on time, and a state loses samples. Leave it out"
        )
    if hasattr(loader, "state_dict"):
        return None
    if stream.batched and getattr(loader, "batch_size", None) is not None:
        raise ValueError(
            f"wrap: expected DataLoader(stream, batch_size=None), as the items of the stream are batches, got "
            f"batch_size={shown(loader.batch_size)}. Give the size as global_batch_size= to the stream"
        )
    return stream if stream.batched else None


def _require_distributed(loader: Any) -> None:
    """Refuse a loader of torch that gives every process of a distributed run all of its samples.

    Samplers of other packages, loaders prepared by Accelerate and iterable data sets distribute samples themselves.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() == 1:
        return
    from torch.utils import data

    if not isinstance(loader, data.DataLoader) or isinstance(loader.dataset, data.IterableDataset):
        return
    unsharded = (data.SequentialSampler, data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is data.BatchSampler:
        sampler = sampler.sampler
    if type(sampler) in unsharded:
        raise ValueError(
            f"wrap: expected a loader that gives each of {distributed.get_world_size()} processes its share, got one "
            f"with a {type(sampler).__name__}, which gives all samples to each. Give the DataLoader "
            "sampler=DistributedSampler(dataset), or give it to Accelerate, Lightning or Fabric unwrapped; "
            "where each process has a data set of its own, use DistributedSampler(dataset, num_replicas=1, rank=0)"
        )


def _is_quiet(loader: Any) -> bool:
    """Return whether a loader may be used on another thread: no code of the caller's draws random numbers in here."""
    parts = [loader] if getattr(loader, "num_workers", None) == 0 else []
    while parts:
        part = parts.pop()
        kind: Any = part if isinstance(part, FunctionType) else type(part)
        if not (kind.__module__ in _QUIET or kind in {list, range, tuple}):
            return False
        # A generator that was given may be the caller's, too. That of torchdata is its own.
        draws = getattr(part, "replacement" if str(kind.__module__).startswith("torchdata.") else "generator", None)
        several = getattr(part, "datasets", ())
        if draws or getattr(part, "_opening", None) or type(several) not in {list, tuple}:  # an iterator is used up
            return False
        held = [getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset", "collate_fn")]
        parts += [each for each in (*held, *several) if each is not None]
    return True


class WrappedLoader:
    """Iterable of the batches of a loader on a device. Other attributes are read and set on the loader itself."""

    __slots__ = (
        "__weakref__",
        "_device",
        "_inner",
        "_is_default",
        "_iterator",
        "_keys",
        "_lock",
        "_prefetch",
        "_progress",
        "_transform",
    )

    def __init__(
        self,
        inner: Any,
        device: str,
        keys: KeyRing,
        is_default: bool,
        prefetch: int,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._inner = inner
        self._device = device
        self._keys = keys
        self._is_default = is_default
        self._prefetch = prefetch
        self._transform = transform
        self._progress: ReadyBatch | None = None  # holds the state after the batch returned last
        self._iterator: Callable[[], _Iterator | None] = lambda: None
        self._lock = _Lock()

    def __iter__(self) -> _Iterator:
        _require_distributed(self._inner)  # the process group may have been initialised since
        prefetch = self._prefetch if _is_quiet(self._inner) else 0
        # A fresh ring: a ring remembers keys, and `use_keys` may have other keys at the next iteration.
        keys = KeyRing(partial(_get_default_key, self._keys)) if self._is_default else self._keys
        source = BatchSource(self._inner, self._lock, self._device, keys, ahead=prefetch > 0)
        # Batches are prefetched on a stream of their own, so that neither stream waits for the other's work.
        side = side_stream(self._device) if prefetch else None
        iteration = PrefetchThread(source, prefetch, side) if prefetch else source
        iterator = _Iterator(iteration, side, self._transform)
        self._progress = iterator.progress
        self._iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        return len(self._inner)

    def __bool__(self) -> bool:
        return bool(self._inner)

    @property
    def set_epoch(self) -> Callable[[int], None]:
        """Function that calls every ``set_epoch`` of the loader, its samplers and its data set, each once."""
        batch_sampler = getattr(self._inner, "batch_sampler", None)
        parts = [self._inner, getattr(self._inner, "sampler", None), batch_sampler]
        parts += [getattr(batch_sampler, "sampler", None), getattr(self._inner, "dataset", None)]
        listeners = {id(part): part for part in parts if hasattr(part, "set_epoch")}
        if not listeners:
            raise AttributeError  # `__getattr__` then asks the loader, which raises its error

        def set_epoch(epoch: int) -> None:
            for part in listeners.values():
                part.set_epoch(epoch)

        return set_epoch

    def __getattr__(self, name: str) -> Any:
        if name in WrappedLoader.__slots__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in WrappedLoader.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._inner)})

    def __repr__(self) -> str:
        # Without the loader's text, in which a tensor or a list would have its values.
        return f"<WrappedLoader to {self._device} of a {type(self._inner).__qualname__}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a wrapped loader cannot be pickled, as its keys stay in this process. Wrap it in the other process"
        )


class _StatefulLoader(WrappedLoader):
    """Wrapped loader with the state of the loader, to resume it."""

    __slots__ = ()

    def state_dict(self) -> Any:
        """Return the state of the loader after the last returned batch, regardless of prefetched batches."""
        if self._progress is not None and self._progress.state is not None:
            return self._progress.state
        with self._lock.own:
            return _stateful(self._inner).state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a state with the next iteration. The current iteration ends."""
        iterator = self._iterator()
        if iterator is not None:
            iterator.close()
        with self._lock.own:
            _stateful(self._inner).load_state_dict(state_dict)
        self._progress = None


class _Iterator:
    """Iterator over the batches of one iteration. No thread refers to it, so the iteration ends when it is garbage."""

    __slots__ = ("__weakref__", "_side", "_source", "_transform", "progress")

    def __init__(
        self,
        iteration: BatchSource | PrefetchThread,
        side: SideStream | None,
        transform: Callable[[Any], Any] | None,
    ) -> None:
        self._source = iteration
        self._side = side
        self._transform = transform
        self.progress = iteration.begin()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self._source.fetch()
        if item.state is not None:
            self.progress.state = item.state
        if item.is_last:
            rewind, item.rewind = item.rewind, None
            if rewind is not None:
                rewind()
            raise StopIteration
        batch = item.batch if self._side is None else self._side.hand_over(item.batch)
        if self._transform is None:
            return batch
        try:
            return self._transform(batch)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the iteration, and wait until its thread has ended."""
        self._source.stop()
        self._source.wait()

    def __del__(self) -> None:
        self._source.stop()  # without waiting: the thread may wait for a lock that is held while this runs

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "the iterator of a wrapped loader cannot be pickled. Iterate in the process that uses the batches"
        )


def _get_default_key(others: KeyRing, key_id: str) -> Key:
    default = KeyRing.default()
    return (others if default is None else default)[key_id]


def _get_environment_key(key_id: str) -> Key:
    return KeyRing.resolve()[key_id]


# The sources of an iteration: its batches, on request or fetched in advance.


class _Lock:
    """The lock of a loader, which its iterations have too, without the wrapper: in a forked child it is another one."""

    __slots__ = ("__weakref__", "own")

    def __init__(self) -> None:
        self.own = per_process(self, "own", threading.Lock)


class BatchSource:
    """The batches of one iteration, each fetched and moved on request.

    The loader's lock is held while the loader is used: once another caller has it, a stopped iteration no longer
    uses the loader.
    """

    def __init__(self, loader: Any, lock: _Lock, device: str, keys: KeyRing, *, ahead: bool) -> None:
        self._loader = loader
        self._downloads = ahead  # begin downloads in advance, until a batch has no remote parts
        self._ahead: deque[ReadyBatch] = deque()
        # Only authenticated sizes are downloaded.
        self._authenticated: weakref.WeakSet[SealedTensor] = weakref.WeakSet()
        self._lock = lock
        self._device = device
        self._keys = keys
        self.batches: Iterator[Any] | None = None  # released to end the loader's workers
        self._has_state = hasattr(loader, "state_dict")
        self._stream = _stream_of(loader)
        self._taken = 0  # batches
        self.is_stopped = False

    def begin(self) -> ReadyBatch:
        with self._lock.own:
            if self._stream is not None:  # its loader's workers may be ahead: batches are counted here
                self._begun = self._stream._position()  # noqa: SLF001 - of this package
                self._stream._rewinds = False  # noqa: SLF001 - a thread may come to the end before the caller
            try:
                self.batches = iter(self._loader)
            finally:
                if self._stream is not None:
                    self._stream._rewinds = True  # noqa: SLF001 - of this package
            try:
                state = self._state()
            except AttributeError:  # from a method without an implementation, as in Accelerate's loaders
                state, self._has_state = None, False
            return ReadyBatch(state=state)

    def fetch(self) -> ReadyBatch:
        try:
            with self._lock.own:
                item = self._next()
            if not item.is_last:
                item.batch = to_device(item.batch, self._device, keys=self._keys)
                return item
        except BaseException:
            self.batches = None
            raise
        self.batches = None
        return item

    def _next(self) -> ReadyBatch:
        """Return the next batch, or the end, with the state after it. Begin downloads for later batches."""
        batches = None if self.is_stopped else self.batches  # read once: another thread may call `stop`
        if batches is None:
            return ReadyBatch(is_last=True)
        ahead = self._ahead
        if not ahead:
            ahead.append(self._take(batches))
        while (
            self._downloads
            and len(ahead) <= _AHEAD
            and not ahead[-1].is_last
            and sum(item.nbytes for item in ahead) < _AHEAD_BYTES
        ):
            ahead.append(self._take(batches))
        item = ahead.popleft()
        if item.error is not None:
            raise item.error
        return item

    def _take(self, batches: Iterator[Any]) -> ReadyBatch:
        try:
            batch = next(batches, _END)
            self._taken += batch is not _END
            state = self._state()
        except BaseException as error:
            if not self._ahead:
                raise
            return ReadyBatch(error=error, is_last=True)
        if batch is _END:
            rewind = None if self._stream is None else partial(self._stream._rewind, *self._begun)  # noqa: SLF001
            return ReadyBatch(state=state, is_last=True, rewind=rewind)
        item = ReadyBatch(batch, state)
        if self._downloads:
            with suppress(OSError, FastrackError):  # opening the batch raises them again
                messages = list(wanted_of(batch))
                new = [tensor for tensor, _ in messages if tensor not in self._authenticated]
                if new and authenticate_remote(new, self._keys):
                    self._authenticated.update(new)
                nbytes = begin_downloads(messages)
                if self._stream is not None:  # the rest of a window's shards follows, in large requests
                    begin_downloads((tensor, None) for tensor in new)
                self._downloads = nbytes is not None
                item.nbytes = nbytes or 0
        return item

    def _state(self) -> Any:
        """Return the state after the batches that were taken."""
        if self._stream is not None:
            return self._stream._state_after(self._begun, self._taken)  # noqa: SLF001 - of this package
        # A copy, since the state may be a part of the loader, which continues.
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None

    def stop(self) -> None:
        self.is_stopped = True
        self.batches = None

    def wait(self) -> None:
        pass


class PrefetchThread(threading.Thread):
    """BatchSource that fetches batches in advance, on a thread. The loader's iterator is used and released there.

    The iterator is made in the caller's thread. Workers forked from this thread would destroy torch's caches of the
    other threads, and hang if such a cache is a process group.

    The queues between the threads are written in C: no polling, and `stop` may be called from a destructor.
    """

    def __init__(self, source: BatchSource, prefetch: int, side: SideStream | None) -> None:
        super().__init__(name="fastrack-loader", daemon=True)
        self._source = source
        self._side = side
        self._context = copy_context()  # of the caller, whose block of `use_keys` may have the keys
        self._permits: SimpleQueue[bool] = SimpleQueue()  # a semaphore: True for each batch to fetch, False to stop
        self._ready: SimpleQueue[ReadyBatch] = SimpleQueue()
        self._early = prefetch  # permits that the first call gives with its own, as a sampler draws at its start
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Let the iteration raise in a forked child, which lacks this thread."""
        self._finish_with(
            ReadyBatch(error=ClosedError("this iteration belongs to the parent process. Begin another one here"))
        )

    def begin(self) -> ReadyBatch:
        _stop_at_exit()
        first = self._source.begin()
        self.start()
        return first

    def fetch(self) -> ReadyBatch:
        if self._source.is_stopped:
            return ReadyBatch(is_last=True)
        for _ in range(1 + self._early):  # before an interrupt can occur: a lost permit would never be replaced
            self._permits.put(True)
        self._early = 0
        item = self._ready.get()
        if item.is_last:
            self._ready.put(item)  # for further calls
            self.join()
        if item.error is not None:
            self.join()
            try:
                raise item.error
            finally:
                del item  # breaks the cycle of the error, its traceback and this frame
        return item

    def stop(self) -> None:
        self._source.is_stopped = True
        self._permits.put(False)

    def wait(self) -> None:
        if threading.current_thread() is not self:
            self.join()
        self._finish_with()

    def run(self) -> None:
        self._context.run(self._fetch_all)

    def _fetch_all(self) -> None:
        ready = self._ready
        try:
            with nullcontext() if self._side is None else self._side.current():
                while self._source.batches is not None and self._permits.get():
                    if self._side is not None:
                        self._side.reclaim()
                    ready.put(self._source.fetch())
        except BaseException as error:  # noqa: BLE001  (raised where the batch is asked for)
            ready.put(ReadyBatch(error=error))
        finally:
            self._source.batches = None
            if self._side is not None:
                self._side.reclaim()
            ready.put(ReadyBatch(is_last=True))

    def _finish_with(self, *items: ReadyBatch) -> None:
        self._ready = SimpleQueue()
        for item in (*items, ReadyBatch(is_last=True)):
            self._ready.put(item)


@dataclass(slots=True)
class ReadyBatch:
    """A batch, of the loader or on the device, with the loader's state after it; an error in its place; or the end."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None
    is_last: bool = False
    rewind: Callable[[], None] | None = None  # of the stream, once the caller has come to this end
    nbytes: int = 0  # of its downloads


@functools.cache
def _stop_at_exit() -> None:
    """Register the exit handler late: it runs before torch's handlers, which must still be able to end workers."""
    atexit.register(_stop_all)


def _stop_all() -> None:
    deadline = time.monotonic() + _EXIT_TIMEOUT
    threads = [thread for thread in threading.enumerate() if isinstance(thread, PrefetchThread)]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
