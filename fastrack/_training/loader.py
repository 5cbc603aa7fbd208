"""`wrap`: the batches of a data loader on a device, some of them ahead of their time."""

from __future__ import annotations

import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from fastrack._crypto.keys import KeyRing, KeySource
from fastrack._devices import canonical
from fastrack._devices.side_stream import SideStream, side_stream
from fastrack._training.prefetch import Fetched, PrefetchThread, Source
from fastrack._util.fork import register_fork_reset
from fastrack._util.public import public


@public
def wrap(
    loader: Iterable[Any], device: object = None, *, keys: KeySource | None = None, prefetch: int = 2
) -> WrappedLoader:
    """Wrap a data loader, so that its batches come on a device.

    The batches are those of the loader, built as they were, and the caller's to keep. Each goes through `to_device`.

    Parameters
    ----------
    loader : iterable of batches
        A ``torch.utils.data.DataLoader``, or any other iterable. A batch is what `to_device` takes: a tensor, a sealed
        tensor, rows of one, or a nest of these. Other leaves pass untouched.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : Key, path or iterable of these, optional
        Where the keys of sealed tensors are looked for. Absent, the environment variable ``FASTRACK_KEY_FILE`` names a
        key file, which is read when the first sealed tensor comes. The loader and its workers are not given them.
    prefetch : int
        How many batches a thread keeps ready while the caller works on one; while the caller waits, one more. With 0
        there is no thread, and each batch is fetched and moved when it is asked for.

    Returns
    -------
    WrappedLoader
        An iterable with the length and the attributes of `loader`.

    Raises
    ------
    DeviceError
        If there is no such kind of device.
    TypeError, ValueError
        If `loader` is no iterable or wrapped already, or `prefetch` is not 0 or more; or if several processes train
        together, by `torch.distributed`, and `loader` would give all samples to each. Iterating raises that as well.
    FormatError, KeyPermissionError, OSError
        If a key file in `keys` cannot be used.

    Notes
    -----
    What goes wrong with a batch is raised where that batch would have been returned, and ends the iteration.

    On a GPU batches are moved on a stream of their own, beside the model's work, and are complete when they are
    returned: the caller's current stream, of torch or CuPy, waits for nothing. Their memory is used again when that
    stream is done with it, as by `torch.Tensor.record_stream`; use on further streams is for the caller to record.
    Without prefetch a batch is moved on the caller's stream.

    An iteration also ends when the iterator is closed or no longer used, as after ``break``. The thread, the loader's
    own iterator and its workers go with it. A loader that can be iterated only once, such as a generator, has then
    given batches that nobody received; ``prefetch=0`` avoids that.
    """
    if isinstance(loader, WrappedLoader):
        raise TypeError("this loader is wrapped already; wrap the one it was made of")
    if isinstance(loader, (str, bytes, os.PathLike)):
        raise TypeError(f"wrap takes an iterable of batches, not {loader!r:.80}; a SealedDataset reads such a file")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"wrap takes an iterable of batches, not {type(loader).__name__}")
    if operator.index(prefetch) < 0:
        raise ValueError(f"prefetch= must be 0 or more, not {prefetch}")
    _require_distributed(loader)
    kind = _StatefulLoader if hasattr(loader, "state_dict") else WrappedLoader
    return kind(loader, canonical(device), _LazyKeyRing() if keys is None else KeyRing.resolve(keys), prefetch)


def _require_distributed(loader: Any) -> None:
    """Refuse a loader of torch that gives every process of a distributed run all of its samples.

    Samplers of other packages, loaders that Accelerate prepared and iterable data sets share samples out by themselves.
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


class WrappedLoader:
    """What `wrap` returns. Attributes that it does not have are looked up, and set, on the loader it wraps."""

    __slots__ = ("__weakref__", "_device", "_inner", "_iterator", "_keys", "_lock", "_prefetch", "_progress")

    def __init__(self, inner: Any, device: str, keys: KeyRing, prefetch: int) -> None:
        self._inner = inner
        self._device = device
        self._keys = keys
        self._prefetch = prefetch
        self._progress: Fetched | None = None  # whose state is that after the batch returned last
        self._iterator: Callable[[], _Iterator | None] = lambda: None
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Make the lock anew."""
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        _require_distributed(self._inner)  # the processes may have met since
        source = Source(self._inner, self._lock, self._device, self._keys)
        # Ahead of time on a stream of its own, so that neither waits for the other's work.
        side = side_stream(self._device) if self._prefetch else None
        iteration = PrefetchThread(source, self._prefetch, side) if self._prefetch else source
        iterator = _Iterator(iteration, side)
        self._progress = iterator.progress
        self._iterator = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        return len(self._inner)

    def __bool__(self) -> bool:
        return bool(self._inner)

    @property
    def set_epoch(self) -> Callable[[int], None]:
        """Tell the loader, its samplers and its data set, those of them that have a ``set_epoch``, each once."""
        batch_sampler = getattr(self._inner, "batch_sampler", None)
        parts = [self._inner, getattr(self._inner, "sampler", None), batch_sampler]
        parts += [getattr(batch_sampler, "sampler", None), getattr(self._inner, "dataset", None)]
        listeners = {id(part): part for part in parts if hasattr(part, "set_epoch")}
        if not listeners:
            raise AttributeError  # so `__getattr__` asks the loader, whose error says more

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
        return f"<WrappedLoader to {self._device} of {self._inner!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a wrapped loader stays in its process, as its keys do; wrap the loader where it is needed")


class _StatefulLoader(WrappedLoader):
    """A wrapped loader that can be resumed, as the one it wraps can."""

    __slots__ = ()

    def state_dict(self) -> Any:
        """The state of the loader after the batch that was returned last, whatever was fetched since."""
        if self._progress is not None and self._progress.state is not None:
            return self._progress.state
        with self._lock:
            return self._inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from there with the next iteration. The one under way ends."""
        iterator = self._iterator()
        if iterator is not None:
            iterator.close()
        with self._lock:
            self._inner.load_state_dict(state_dict)
        self._progress = None


class _Iterator:
    """One iteration. No thread holds it, so that it ends when its user lets go of it."""

    __slots__ = ("__weakref__", "_side", "_source", "progress")

    def __init__(self, iteration: Source | PrefetchThread, side: SideStream | None) -> None:
        self._source = iteration
        self._side = side
        self.progress = iteration.begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self._source.fetch()
        if item.state is not None:
            self.progress.state = item.state
        if item.is_last:
            raise StopIteration
        return item.batch if self._side is None else self._side.hand_over(item.batch)

    def close(self) -> None:
        """End the iteration, and wait until nothing of it is left."""
        self._source.stop()
        self._source.wait()

    def __del__(self) -> None:
        self._source.stop()  # without waiting: whoever collects garbage may hold what the thread waits for

    def __reduce__(self) -> NoReturn:
        raise TypeError("the iterator of a wrapped loader stays in its process; iterate where the batches are needed")


class _LazyKeyRing(KeyRing):
    """The key that the environment names, read once, when it is first asked for."""

    __slots__ = ()

    def __init__(self) -> None:
        """Leave the slot of the keys empty, so that `__getattr__` is asked for it."""

    def __getattr__(self, name: str) -> Any:
        if name != "_keys":
            raise AttributeError(name)
        self._keys = KeyRing.resolve()._keys  # noqa: SLF001 - of the same class
        return self._keys
