"""`wrap`: the batches of a data loader on a device."""

from __future__ import annotations

import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType
from typing import Any, NoReturn, Self, SupportsIndex

from fastrack._devices import canonical, confidential
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._keys.keys import Key
from fastrack._training.collate import common_ring
from fastrack._training.prefetch import BatchSource, LoaderLock, PrefetchThread, ReadyBatch
from fastrack._training.side_stream import SideStream, side_stream
from fastrack._util.public import public
from fastrack._util.shown import shown

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
    require: str | None = None,
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
        where code of yours makes the batches, which may draw random numbers: a transform, a dataset, a function that
        collates, a sampler, or a sampler's generator. They are drawn as without `wrap`.
    transform : callable, optional
        Function of a batch on the device that returns the batch to use. It is called in the thread that asks for the
        batch, on that thread's current stream.
    require : {"confidential"}, optional
        Refuse any device but a GPU in confidential mode, as for `fastrack.Channel`.

    Returns
    -------
    WrappedLoader
        Iterable with the length and the attributes of `loader`.

    Raises
    ------
    DeviceError
        If the kind of `device` is unknown, or it is not what is required.
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
    confidential.check(canonical(device), require)
    _require_distributed(loader)
    kind = _StatefulLoader if hasattr(_stateful(loader), "state_dict") else WrappedLoader
    keys = _keys_of_data(loader) if keys is None else keys
    ring = KeyRing(_get_environment_key) if keys is None else KeyRing.resolve(keys)
    return kind(loader, canonical(device), ring, keys is None, prefetch, transform)


def _keys_of_data(loader: Any) -> KeyRing | None:
    """Return the keys that the dataset of a loader was made with, or None."""
    module = sys.modules.get("fastrack._training.dataset")  # which needs torch; not imported, there is no such dataset
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

    Samplers of other packages, loaders prepared by Accelerate and iterable datasets distribute samples themselves.
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
            "where each process has a dataset of its own, use DistributedSampler(dataset, num_replicas=1, rank=0)"
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
        self._lock = LoaderLock()

    def __iter__(self) -> _Iterator:
        _require_distributed(self._inner)  # the process group may have been initialised since
        prefetch = self._prefetch if _is_quiet(self._inner) else 0
        # A fresh ring: a ring remembers keys, and `use_keys` may have other keys at the next iteration.
        keys = KeyRing(partial(_get_default_key, self._keys)) if self._is_default else self._keys
        source = BatchSource(self._inner, _stream_of(self._inner), self._lock, self._device, keys, ahead=prefetch > 0)
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
        """Function that calls every ``set_epoch`` of the loader, its samplers and its dataset, each once."""
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
