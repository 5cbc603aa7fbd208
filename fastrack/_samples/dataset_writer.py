"""`DatasetWriter`: samples, appended to the shards of a sealed dataset."""

from __future__ import annotations

import errno
import os
import secrets
import threading
from array import array
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import write_sealed
from fastrack._keys.keyring import KeyLike, KeyRing, sealing_key
from fastrack._samples.about import About
from fastrack._samples.blocks import OFFSETS, RECORDS, Block, Column, advise, require_names, require_unicode
from fastrack._samples.stored import DataSet, StoredSamples, read_data_set, with_type_of
from fastrack._sealed.file_header import ABOUT
from fastrack._tensors import arrays, dtypes
from fastrack._util.endings import report_at_end
from fastrack._util.fork import per_process
from fastrack._util.locations import Url, join, locate_target, require_path
from fastrack._util.new_folder import made_parents
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import ClosedError

_SAME = "Give all samples of a column one type, or choose another folder for these"


@public
class DatasetWriter:
    """Write samples to a sealed dataset: a folder of shards, each a sealed file.

    Samples are collected in memory, at most one shard of them. A full shard is sealed into a new file, which gets its
    name when it is complete and on disk; plaintext is never written. A writer continues after existing shards, so a
    new writer resumes a run that ended at any time, even by SIGKILL or a loss of power: `stored` is the number of
    samples that need not be written again.

    Parameters
    ----------
    folder : path or URL
        Folder for the shards, which is made with the first of them if there is none, on this machine or in a store,
        such as ``s3://bucket/train``. `SealedDataset` opens it.
    key : KeyLike, optional
        The owner's key, as for `seal`.
    records : iterable of str
        Columns of arrays of one dimension that differ in length, such as tokens. Columns of bytes and text always do.
    shard_size : int
        Bytes of plaintext in a shard, at most, unless a single sample has more.

    Raises
    ------
    AuthenticationError
        If the header of a shard in the folder was altered.
    FormatError
        If a shard of the folder is missing, is no sealed file, or has other columns than the first one.
    OSError
        If the folder cannot be read or made.
    ValueError
        If the shards of the folder are under another key, or `shard_size` is not positive.

    Attributes
    ----------
    stored : int
        Number of samples in complete shards on disk, including earlier runs.

    Notes
    -----
    In a ``with`` statement, samples that are still in memory are written at its end, but dropped after an exception. A
    writer that ends without it, and without `close`, reports them as a `ResourceWarning` and to the logger "fastrack".
    A forked child does not have them, and cannot write: they are its parent's.

    Values are stored in C order: arrays of samples and batches open contiguous. Column names are not encrypted. A
    column ``x`` of bytes, text or other records is stored as two tensors,
    ``x.records`` and ``x.offsets``: record `i` is ``records[offsets[i]:offsets[i + 1]]``.

    Examples
    --------
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> with fastrack.DatasetWriter("cities", key) as writer:
    ...     writer.write({"name": "Geneva", "label": 3})
    ...     writer.write_batch({"name": ["Oslo", "Lima"], "label": [1, 4]})
    >>> writer.stored
    3
    >>> data = fastrack.SealedDataset("cities", keys=key)
    >>> fastrack.unseal(data[2]["name"], key, framework="numpy").tobytes()
    b'Lima'
    """

    _count: int  # samples in memory
    _size: int  # their bytes
    _data: dict[str, bytearray]  # their values, by column
    _offsets: dict[str, array[int]]  # ends of records, by column
    _files: list[tuple[str, int]]  # the files they are of, in order, each with the number of samples up to its last

    def __init__(
        self,
        folder: str | os.PathLike[str],
        key: KeyLike | None = None,
        *,
        records: Iterable[str] = (),
        shard_size: int = 256 << 20,
    ) -> None:
        if isinstance(records, str):
            raise TypeError(f"records=: expected an iterable of names, got one text. Give [{shown(records, 200)}]")
        if not isinstance(shard_size, int) or shard_size < 1:  # type: ignore[redundant-expr]  # of callers without types
            raise ValueError(
                f"shard_size=: expected 1 byte or more, got {shown(shard_size, 40)}. Give a number of bytes"
            )
        require_path(folder, "DatasetWriter(folder, key)")
        self._key = sealing_key(key)
        self._records = frozenset(records)
        self._shard_size = shard_size
        place = self._folder = locate_target(folder)
        if isinstance(place, Path) and place.exists() and not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "expected a folder to write to, got a file", str(place))
        self._lock = per_process(self, "_lock", threading.Lock)
        self._is_closed = False
        self._process = os.getpid()
        self._expected: StoredSamples | None = None
        there = DataSet((), {})
        if isinstance(place, Url) or place.exists():
            there = read_data_set(place, KeyRing(self._key), key_id=self._key.id)
        self._there = there
        self._columns, self._shards, self.stored = there.columns, len(there.shards), there.samples
        self._has_types = bool(there.id)  # shards of version 0.1 do not tell them
        self._id = there.id or secrets.token_hex(16)
        self._before = there.before
        self._previous = there.shards[-1][1].shard if there.shards else ""
        self._run = there.run if there.is_complete is False else there.samples
        self._leaves_out = False
        self._start_shard()
        own = vars(self)  # which does not refer to the writer
        self._watch = report_at_end(self, lambda: own["_count"] and f"{place}: {own['_count']} samples were not stored")

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample.

        Parameters
        ----------
        sample : mapping of str to bytes, str, bool, int, float, numpy.ndarray or torch.Tensor
            Value of each column. Bytes and text, which is stored as UTF-8, may differ in length from sample to sample.
            Arrays have one dtype and shape in all samples, or one dimension in columns named in `records`. Integers
            are stored as I64, and Python's floats as F64.

        Raises
        ------
        TypeError, ValueError
            If a value has no such type, or the sample differs from earlier samples in columns, dtypes or shapes.
            The sample is dropped then.
        OSError
            If a shard cannot be written. `write` and `close` try it again.
        """
        if not isinstance(sample, Mapping):
            raise TypeError(
                f"sample: expected a mapping of columns to values, got {type(sample).__name__}. Give a dict"
            )
        self._append({name: self._block(name, [value]) for name, value in sample.items()})

    def write_batch(self, batch: Mapping[str, Any], *, file: str | None = None) -> None:
        """Append several samples.

        Parameters
        ----------
        batch : mapping of str to sequence
            Values of each column: an array whose first dimension counts the samples, or a sequence of values that
            `write` takes.
        file : str, optional
            Name of the file that they are of, which the shard keeps, sealed.

        Raises
        ------
        TypeError, ValueError, OSError
            As for `write`; ValueError also if columns differ in their number of samples. After an OSError the samples
            of the batch that `stored` counts are kept, and no others.
        """
        require_unicode(file or "", "file=: ", "surrogateescape")  # as the names of files come
        self._append({name: self._block(name, values) for name, values in batch.items()}, file or "")

    def close(self) -> None:
        """Write the samples that are still in memory, and close. Further calls do nothing."""
        self._watch.detach()  # an error tells of what is not stored
        if self._is_of_parent():  # which may have held the lock, and writes the samples
            self._start_shard()
            return
        with self._lock:
            if not self._is_closed:
                self._write_shard(complete=True)
                self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._is_of_parent():
            self.close()
        else:
            with self._lock:
                self._is_closed = True
                self._start_shard()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a DatasetWriter cannot be pickled, as its key stays in its process. Make one for each folder")

    def __repr__(self) -> str:
        return f"<DatasetWriter to {str(self._folder)!r}: {self.stored} samples stored>"

    def _is_of_parent(self) -> bool:
        return self._process != os.getpid()

    def _block(self, name: str, values: Any) -> Block:
        if isinstance(values, Block):
            return values
        try:
            return Block.of(values, are_records=name in self._records, empty=self._columns.get(name))
        except (TypeError, ValueError) as error:
            raise type(error)(f"sample {self.stored + self._count}: {name!r:.80}: {error}") from None

    def _append(self, blocks: dict[str, Block], file: str = "") -> None:
        if self._is_of_parent():
            raise ClosedError(
                "this DatasetWriter belongs to the process that made it, which has forked. Write its samples there, or "
                "make another one for another folder"
            )
        with self._lock:
            if self._is_closed:
                raise ClosedError("this DatasetWriter was closed. Make another one, which continues its folder")
            counts = {name: block.count for name, block in blocks.items()}
            if len(set(counts.values())) > 1:
                raise ValueError(f"batch: expected as many values in each column, got {counts!s:.300}")
            count = next(iter(counts.values()), None)
            if count == 0:
                return
            self._require_columns({name: block.column for name, block in blocks.items()})
            assert count is not None
            ends = np.cumsum(np.broadcast_to(sum(block.sizes() for block in blocks.values()), count))
            start = 0 if self._expected is None else self._expected.take(blocks, count, file)
            while start < count:
                room = self._shard_size - self._size + (ends[start - 1] if start else 0)
                stop = max(int(np.searchsorted(ends, room, "right")), start if self._count else start + 1)
                kept, size = self._count, self._size
                if stop > start:
                    self._extend(blocks, start, stop, file)
                    self._size += int(ends[stop - 1] - (ends[start - 1] if start else 0))
                if stop < count:
                    try:
                        self._write_shard()
                    except BaseException:  # the caller gives again what `stored` does not count
                        self._drop_after(kept)
                        self._size = size
                        raise
                start = stop

    def _require_columns(self, columns: dict[str, Column]) -> None:
        """Refuse samples with other columns than the first ones."""
        label = f"sample {self.stored + self._count}"
        if not self._columns:
            require_names(columns)
            missing = sorted(self._records - columns.keys())
            if missing or not columns:
                raise ValueError(f"{label}: expected a column for each name in records=, got none for {missing!s:.200}")
            self._columns, self._has_types = columns, True
            self._start_shard()
        if columns.keys() != self._columns.keys():
            raise ValueError(
                f"{label}: expected the columns {list(self._columns)!s:.300}, got {list(columns)!s:.300}. Give all "
                "samples the same"
            )
        for name, column in columns.items():
            if column != self._columns[name]:
                raise ValueError(
                    f"{label}: {name!r:.80}: expected {self._columns[name]}, as in the samples before, got {column}. "
                    f"{advise({column, self._columns[name]}) or _SAME}"
                )
        if not self._has_types:
            self._columns, self._has_types = {name: columns[name] for name in self._columns}, True
        typed = {}
        for name, column in self._columns.items():
            try:
                typed[name] = with_type_of(columns[name], column)
            except ValueError as error:
                raise ValueError(f"{label}: {name!r:.80}: {error}. {_SAME}") from None
        self._columns = typed

    def _extend(self, blocks: dict[str, Block], start: int, stop: int, file: str) -> None:
        try:
            for name, block in blocks.items():
                self._data[name] += block.between(start, stop).data
                if block.ends is not None:
                    offsets, width = self._offsets[name], dtypes.nbytes(block.column.dtype, (1,))
                    ends = (block.ends[start + 1 : stop + 1] - block.ends[start]) // width + offsets[-1]
                    offsets.frombytes(ends.tobytes())
            end = self._count + stop - start
            if not self._files or self._files[-1][0] != file:
                self._files.append((file, end))
            self._files[-1] = (file, end)
            self._count = end
        except BaseException:  # interrupted, or out of memory: no column may be longer than the others
            self._drop_after(self._count)
            raise

    def _drop_after(self, count: int) -> None:
        """Drop the samples in memory after the first `count`."""
        for name, column in self._columns.items():
            width, end = dtypes.nbytes(column.dtype, column.shape or (1,)), count
            if name in self._offsets:
                self._offsets[name] = self._offsets[name][: count + 1]
                end = self._offsets[name][-1]
            self._data[name] = self._data[name][: end * width]  # a copy: a failed call may still refer to the buffer
        before = [end for _, end in self._files if end < count]
        self._files = [(file, min(end, count)) for file, end in self._files[: len(before) + (count > 0)]]
        self._count = count

    def _start_shard(self) -> None:
        self._count = self._size = 0
        self._files = []
        self._data = {name: bytearray() for name in self._columns}
        self._offsets = {name: array("q", [0]) for name, column in self._columns.items() if column.shape is None}

    def _write_shard(self, *, complete: bool = False) -> None:
        if not self._count:
            return
        types = {name: column.type for name, column in self._columns.items()}
        starts = [0, *(end for _, end in self._files)]
        files = tuple((name, end - start) for (name, end), start in zip(self._files, starts, strict=False))
        files = files if any(name for name, _ in files) else ()
        about = About(
            self._id,
            secrets.token_hex(16),
            self._previous,
            self._before,
            self.stored,
            self._count,
            self._run,
            complete,
            self._leaves_out,
            types,
            files,
        )
        tensors = {ABOUT: PlainTensor.of(about.encode())}
        for name, column in self._columns.items():
            memory = np.frombuffer(self._data[name], np.uint8)
            load = partial(arrays.reader, memory)
            if column.shape is None:
                elements = memory.size // dtypes.nbytes(column.dtype, (1,))
                tensors[name + RECORDS] = PlainTensor(column.dtype, (elements,), load)
                tensors[name + OFFSETS] = PlainTensor.of(np.frombuffer(self._offsets[name], np.int64))
            else:
                tensors[name] = PlainTensor(column.dtype, (self._count, *column.shape), load)
        path = join(self._folder, f"shard-{self._shards:06}.safetensors")
        try:
            with made_parents(path) if isinstance(path, Path) else nullcontext():
                write_sealed(tensors, path, self._key, frozenset(), {}, None, overwrite=False)
        except FileExistsError:
            advice = "was written meanwhile: another program writes to this folder. Wait for its end, and continue then"
            raise FileExistsError(errno.EEXIST, advice, str(path)) from None
        self._shards += 1
        self._previous = about.shard
        self.stored += self._count
        self._start_shard()
