"""`StreamingSealedDataset`: the samples of sealed shards in one order for any number of ranks and workers."""

from __future__ import annotations

import itertools
import operator
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from fastrack._util import extras

extras.require("torch", "StreamingSealedDataset", "torch")

# ruff: noqa: E402 - after the error that says what to install
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastrack._training.collate import collate
from fastrack._training.dataset import SealedDataset
from fastrack._training.order import Order
from fastrack._training.row_tables import identify
from fastrack._util.fork import before_fork
from fastrack._util.public import public
from fastrack._util.shown import shown

if TYPE_CHECKING:
    _Base = IterableDataset[Any]
else:
    _Base = IterableDataset

_FIXED = ("dataset", "global_batch_size", "seed", "shuffle", "window", "drop_last", "batched")
_PLACE = ("consumed", "epoch", "handed")  # of a state: how far the stream is. The rest says which stream it is


@public
class StreamingSealedDataset(_Base):
    """Stream of the batches of a `SealedDataset`, in one order for any number of ranks and workers.

    It is a `torch.utils.data.IterableDataset`, for a `DataLoader` with ``batch_size=None``. Each item is one rank's
    part of a global batch, as `collate` makes it of the samples: nothing is opened, except by the dataset's
    ``transform=``. The sequence of global batches depends only on the files, `seed`, epoch, `window` and
    `global_batch_size`. Each epoch has each sample exactly once.

    Parameters
    ----------
    dataset : SealedDataset
        Samples to stream: those of files, records, or windows on long columns.
    global_batch_size : int
        Number of samples in a batch of all ranks together. Each rank gets an equal part; parts differ by one sample if
        `world_size` does not divide the batch.
    seed : int
        With the epoch and `window`, it determines the order.
    shuffle : bool
        With False, samples have the order of the dataset.
    window : int
        Number of files whose samples are mixed: files are shuffled, and samples within a window of so many files in a
        row. So a batch reads from the files of one window, of two at their border, or of all windows that it spans.
    drop_last : bool
        Leave out the last batch of an epoch if it has fewer samples. Otherwise the ranks divide it like any other.
    rank, world_size : int, optional
        Number of this rank and number of ranks. By default those of `torch.distributed`, asked for when an iteration
        begins; without a process group one rank.
    batched : bool
        With False, items are single samples, and each process gets all: for trainers that make batches and divide them
        among processes themselves, such as Accelerate and the Trainer of transformers. Their batch size times their
        number of processes is then `global_batch_size`.

    Raises
    ------
    TypeError
        If `dataset` is not a `SealedDataset`.
    ValueError
        If a number is out of its range. When an iteration begins: if the last batch has fewer samples than there are
        ranks, as some would get none, `rank` and `world_size` are unknown though ``WORLD_SIZE`` says that there are
        several, or Accelerate would divide the batches a second time.

    Notes
    -----
    Call `set_epoch` before each epoch, on the stream or on what `wrap` returns; persistent workers hear it too. All
    ranks have the same number of batches, ``len(stream)``.

    Memory does not depend on the number of samples: positions are computed, by a Feistel permutation within windows.

    `wrap` gives a loader over a stream ``state_dict`` and ``load_state_dict``, in samples that all ranks together
    consumed: another run may continue from it with other numbers of ranks, workers and samples in a batch.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> from torch.utils.data import DataLoader
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(10)}, "train.safetensors", key)
    >>> data = fastrack.SealedDataset("train.safetensors", keys=key)
    >>> stream = fastrack.StreamingSealedDataset(data, 4, seed=1)
    >>> train = fastrack.wrap(DataLoader(stream, batch_size=None))
    >>> for epoch in range(2):
    ...     train.set_epoch(epoch)
    ...     print([len(batch["x"]) for batch in train])
    [4, 4, 2]
    [4, 4, 2]
    """

    def __init__(
        self,
        dataset: SealedDataset[Any],
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        window: int = 16,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        batched: bool = True,
    ) -> None:
        if not isinstance(dataset, SealedDataset):
            raise TypeError(
                f"dataset: expected a SealedDataset, got {type(dataset).__name__}. Make one: SealedDataset(paths)"
            )
        if (rank is None) != (world_size is None):
            raise ValueError("rank=, world_size=: expected both or neither, got one of them")
        self.dataset = dataset
        self.global_batch_size = _number("global_batch_size=", global_batch_size, 1)
        self.seed = operator.index(seed)
        self.shuffle = bool(shuffle)
        self.window = _number("window=", window, 1)
        self.drop_last = bool(drop_last)
        self.batched = bool(batched)
        self._data: int | None = None  # the identity of the data, once it is asked for
        self._share: tuple[int, int] | None = None
        if rank is not None and world_size is not None:
            self._share = _number("rank=", rank, 0, _number("world_size=", world_size, 1) - 1), world_size
        # Epoch, and samples of it consumed before an iteration begins; shared, so that persistent workers see both.
        self._begin = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._owner = os.getpid()  # which shares it only with its workers; another rank has a position of its own
        # What a process has of them from when it was started: others may be set until its first iteration begins.
        self._first = [0, 0]
        self._resumed: tuple[int, int, int] | None = None  # in a worker: what torchdata gave it to continue
        # Of the iteration of this process or of its workers: the epoch, and samples consumed before.
        self._current = (0, 0)
        self._handed = 0  # items of this process's iteration
        _streams.add(self)
        # At the end of an iteration of this process. `wrap` rewinds as its caller comes to the end.
        self._rewinds = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise AttributeError(f"{name}: expected to stay as it was made, got another value. Make another stream")
        super().__setattr__(name, value)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next iteration has."""
        return self._position()[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, for iterations that begin after the call.

        The epoch of a loaded state is continued; any other begins with its first batch.
        """
        self._is_divided()  # asked here too: Accelerate calls this where torch starts workers, which may not know
        if _number("epoch=", epoch, 0) != self.epoch:
            self._set_position(epoch, 0)
            self._current, self._handed = self._position(), 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch, equal on all ranks; without `batched`, that of its samples."""
        count = self._stop(0)
        return -(-count // self.global_batch_size) if self.batched else count

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        resumed, self._resumed = self._resumed, None  # for one iteration
        epoch, start = self._position()
        if info is not None and self._first:
            (epoch, start), self._first = self._first, []
        epoch, start, handed = resumed or (epoch, start, 0)
        rank, world_size = self._find_share(start)
        self._current, self._handed = (epoch, start), handed
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        items = self._items(epoch, start, handed, range(rank, world_size), range(worker, workers))
        return self._rewinding(items, epoch, start) if info is None and self._rewinds else items

    def __getstate__(self) -> dict[str, Any]:
        self._take_over()
        # A spawned worker has no process group to ask.
        return {**self.__dict__, "_share": self._share or _group()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _streams.add(self)
        if self._owner == os.getpid():
            self._separate()  # a copy

    def _items(self, epoch: int, start: int, handed: int, ranks: range, workers: range) -> Iterator[Any]:
        """Yield the parts or samples of global batches, whole batches for each worker in turn."""
        data, size, stop = self.dataset, self.global_batch_size, self._stop(start)
        layout = data._ref.parts[0].layout  # noqa: SLF001 - of this package
        order = Order(layout.ends, self.seed, epoch, self.window) if self.shuffle else None
        batches, rest = (handed, 0) if self.batched else divmod(handed, size)
        for first in range(start + (workers.start + batches * workers.stop) * size, stop, workers.stop * size):
            count = min(size, stop - first)
            begin, end = (first + count * rank // ranks.stop for rank in (ranks.start, ranks.start + 1))
            rows = np.arange(begin, end) if order is None else order.samples(begin, end)
            samples = data.__getitems__(rows)  # type: ignore[arg-type]  # and arrays
            for item in [collate(samples)] if self.batched else itertools.islice(samples, rest, None):
                handed += 1
                # Both, as `set_epoch` or another iteration may have set others since.
                self._current, self._handed = (epoch, start), handed
                yield item
            rest = 0

    def _rewinding(self, items: Iterator[Any], epoch: int, start: int) -> Iterator[Any]:
        yield from items
        self._rewind(epoch, start)

    def _rewind(self, epoch: int, start: int) -> None:
        """Let the next iteration begin with the first batch, after one that continued from `start` came to its end."""
        if self._position() == (epoch, start):
            self._set_position(epoch, 0)

    def _stop(self, start: int) -> int:
        """Return the position after the last sample of an epoch that is consumed from `start` on."""
        count = len(self.dataset)
        return count - max(0, count - start) % self.global_batch_size if self.drop_last else count

    def _find_share(self, start: int) -> tuple[int, int]:
        """Return this rank's number and the number of ranks, which all get samples of each batch from `start` on."""
        group_rank, group_size = _group() or (0, 1)
        is_divided = self._is_divided()
        if not self.batched:
            if group_size > 1 and not is_divided:
                raise ValueError(
                    f"batched=False: expected a loader that Accelerate prepared for {group_size} processes, got "
                    "another, with which each gets all samples. Use batched=True"
                )
            return 0, 1
        if self._share is None and _group() is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"rank=, world_size=: expected both, or a process group of torch.distributed, got neither, where "
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}. Begin to iterate after init_process_group"
            )
        rank, world_size = self._share or (group_rank, group_size)
        last = max(0, self._stop(start) - start) % self.global_batch_size or self.global_batch_size
        if last < world_size:
            raise ValueError(
                f"global_batch_size=: expected a sample for each of {world_size} ranks in every batch, got "
                f"{last} in the last one. Use drop_last=True or another size"
            )
        return rank, world_size

    def _is_divided(self) -> bool:
        """Return whether Accelerate divides the items among processes. Refuse batches, and samples that it sends."""
        module: Any = sys.modules.get("accelerate.data_loader")
        if module is None or (_group() or (0, 1))[1] == 1:
            return False
        active = module.GradientState().active_dataloader  # set when it begins to iterate
        given = getattr(active, "dataset", None)
        if given is self and isinstance(active, module.DataLoaderDispatcher):
            raise ValueError(
                "stream: expected each process to read its own part, got dispatch_batches=True of Accelerate, with "
                "which one process opens all samples and sends them unencrypted. Use "
                "DataLoaderConfiguration(dispatch_batches=False) and batched=False"
            )
        is_divided = isinstance(given, module.IterableDatasetShard) and given.dataset is self
        if is_divided and self.batched:
            raise ValueError(
                "stream: expected batched=False for a loader that Accelerate prepares, got batches that are divided "
                "already. Or leave the loader unprepared, and wrap it"
            )
        return is_divided

    # State.

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return what `load_state_dict` needs to continue after some batches of an iteration.

        Parameters
        ----------
        batches : int, optional
            Number of batches that were used since the iteration began. By default those that this process has yielded,
            which is how torchdata's StatefulDataLoader asks; a loader or `wrap` may have fetched more than were used.

        Returns
        -------
        dict
            Numbers and a truth value, for JSON or `save_checkpoint`.
        """
        info = get_worker_info()
        if batches is None and info is not None:  # a worker sees its own batches only
            return self._state(*self._current, self._handed)
        if batches is None:
            return self._state_after(self._current, self._handed, self.global_batch_size if self.batched else 1)
        return self._state_after(self._current, _number("batches=", batches, 0))  # the position may be rewound

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from a state with the next iteration, with any number of ranks, workers and samples in a batch.

        Parameters
        ----------
        state_dict : dict
            State of a stream of the same files and columns in their order, with the same `seed`, `shuffle` and
            `window`. It need not be secret, but nothing authenticates it: keep it in a checkpoint that is sealed.

        Raises
        ------
        ValueError
            If it is not the state of such a stream.
        """
        if not isinstance(state_dict, Mapping) or {*state_dict} != {*self._begun, *_PLACE}:
            raise ValueError(f"state_dict: expected the state of a stream, got {shown(state_dict)}")
        if not _is_same(state_dict["data"], self._begun["data"]):
            raise ValueError(
                "state_dict: expected the state of a stream of these files and columns, got that of others. Make the "
                "dataset of the same files, in the same order"
            )
        for name, own in self._begun.items():
            if not _is_same(state_dict[name], own):
                raise ValueError(
                    f"state_dict: expected {name} {own}, as this stream has, got {shown(state_dict[name])}. Make the "
                    f"stream with the {name}= that the state has"
                )
        consumed, epoch, handed = (_number(f"state_dict: {name}", state_dict[name], 0) for name in _PLACE)
        _number("state_dict: consumed", consumed, 0, len(self.dataset))
        if get_worker_info() is not None:
            self._resumed = epoch, consumed, handed
            return
        if handed:
            raise ValueError("state_dict: expected the state of a stream, got that of one worker of a loader")
        caller = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - nothing else tells who loads
        is_late = caller.startswith("torchdata.") and epoch < self.epoch
        if is_late and consumed >= self._stop(consumed):
            return  # StatefulDataLoader loads when an iteration begins: the next epoch has been set since
        self._set_position(epoch, consumed)
        self._current, self._handed = self._position(), 0

    def _position(self) -> tuple[int, int]:
        """Return the epoch that the next iteration has, and the number of its samples consumed before."""
        self._take_over()
        epoch, start = self._begin.tolist()
        return epoch, start

    def _set_position(self, epoch: int, start: int) -> None:
        self._take_over()
        self._begin[:] = torch.tensor([epoch, start])
        self._first[:] = epoch, start

    def _take_over(self) -> None:
        """Separate the position of a process that was begun with the stream, such as a rank, unless it is a worker."""
        if self._owner != os.getpid() and get_worker_info() is None:
            self._separate()

    def _separate(self) -> None:
        self._first, self._owner = [*self._first], os.getpid()
        self._begin = torch.tensor(self._first).share_memory_()  # type: ignore[no-untyped-call]

    def _state_after(self, begun: tuple[int, int], items: int, size: int | None = None) -> dict[str, Any]:
        """Return the state after some items of `size` samples, by default batches, since an iteration began."""
        epoch, start = begun
        consumed = min(start + items * (size or self.global_batch_size), max(start, self._stop(start)))
        return self._state(epoch, consumed, 0)

    def _state(self, epoch: int, consumed: int, handed: int) -> dict[str, Any]:
        return {**self._begun, "consumed": consumed, "epoch": epoch, "handed": handed}

    @property
    def _begun(self) -> dict[str, Any]:
        """Identity of the data and their order."""
        if self._data is None:
            self._data = identify(self.dataset._ref)  # noqa: SLF001 - of this package
        return {"data": self._data, "seed": self.seed, "shuffle": self.shuffle, "window": self.window}


_streams: weakref.WeakSet[StreamingSealedDataset] = weakref.WeakSet()


def _take_over_all() -> None:
    for stream in list(_streams):
        stream._take_over()  # noqa: SLF001 - so that the workers of a rank share its position


before_fork(_take_over_all)


def _group() -> tuple[int, int] | None:
    """Return this process's rank in the process group of torch, and the group's size; None if there is no group."""
    dist = torch.distributed
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None


def _is_same(value: object, own: object) -> bool:
    return type(value) is type(own) and value == own  # arrays have no one truth value


def _number(name: str, value: Any, least: int, most: int = sys.maxsize) -> int:
    with suppress(TypeError):  # of arrays with several values
        if isinstance(value, SupportsIndex) and least <= (number := operator.index(value)) <= most:
            return number
    limits = f"{least} or more" if most == sys.maxsize else f"{least} to {most}"
    raise ValueError(f"{name}: expected an integer, {limits}, got {shown(value)}")
