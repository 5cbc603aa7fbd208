"""`SealedDataset`: a dataset for PyTorch's `DataLoader`, whose samples are handles on rows of sealed files."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.indexing import Indices, as_indices
from fastrack._sealed.tensor import MessageRanges, SealedRows, SealedTensor
from fastrack._sets.load_file import resolve_anchor
from fastrack._tensors import arrays
from fastrack._training.collate import collate
from fastrack._training.columns import (
    find_shards,
    find_tensors,
    join_columns,
    join_windows,
    read_classes,
    require_files,
    require_places,
    tuple_of_names,
)
from fastrack._training.handles import CombinedDataset, DatasetHandle, Lengths, RecordLayout, Samples
from fastrack._training.shards import PathLike, Shards
from fastrack._transfer.api import to_device
from fastrack._util.pickles import unpickle
from fastrack._util.public import public
from fastrack._util.shown import shown

if TYPE_CHECKING:
    from torch.utils.data import Dataset as _Base
    from typing_extensions import TypeVar

    from fastrack._sets.anchor import Anchor

    Sample_co = TypeVar("Sample_co", default=dict[str, Any], covariant=True)
    Record = TypeVar("Record", default=dict[str, Any])
else:
    from typing import Generic, TypeVar

    Sample_co = TypeVar("Sample_co", covariant=True)
    _Base = Generic
    if arrays.installed("torch"):
        from torch.utils.data import Dataset as _Base
        from torch.utils.data._utils.collate import default_collate_fn_map

        def _collate_handles(handles: list[Any], **_: object) -> Any:
            return collate(handles)

        # A DataLoader without collate_fn= then makes the same batches, though one handle after the other.
        default_collate_fn_map.update(dict.fromkeys((SealedRows, SealedTensor, Lengths), _collate_handles))

Transform = Callable[[dict[str, Any]], Any]


@public
class SealedDataset(_Base[Sample_co]):
    """Dataset of samples in sealed files, for `torch.utils.data.DataLoader`. It does not open them.

    ``data[i]`` is a dict with a handle (`SealedRows`) for each column. `fastrack.collate` makes one handle for each
    column of several samples, and `to_device` opens it, out of the chunks that hold the samples. Slices, vectors of
    integers and masks select several samples. The class needs no torch; where torch is installed, it is a
    `torch.utils.data.Dataset`.

    With `transform` a sample is the result of that function. Samples are then opened in the process that asks for
    them, such as a worker of a `DataLoader`, which needs the keys.

    Parameters
    ----------
    paths : path, URL or sequence of them
        Sealed files; a folder of them, such as that of a `DatasetWriter`, or the URL of one in a store; a pattern, such
        as ``"s3://bucket/train-*.safetensors"``; or an index that `index_dataset` wrote. Samples are numbered in the
        order of the files, those of a folder or a pattern by their names.
    columns : sequence of str, optional
        Names of sealed tensors that share their first dimension, which counts the samples, and of columns of records
        that a `DatasetWriter` wrote. By default all columns of the first file.
    keys : KeySource, optional
        Keys to authenticate the shapes of all columns with, and so the number of samples. Without keys, length, shapes
        and dtypes are claims of the files: a column is authenticated when its first samples are opened, and a sampler
        made earlier may use a false length. With them, the shards of a folder must be those that its `DatasetWriter`
        wrote there, in their places: one that was swapped, is of another dataset or is missing between others is
        refused. Without them, and for a list of files, that is not checked. Samples open with them, in this process
        and while the dataset lives, where a call such as `to_device` names no keys.
    file_ids : sequence of str, optional
        The ``SealedFile.file_id`` that each file must have, in the order of `paths`. They are authenticated with the
        shapes, under one key for all files. Without them, an older or a different file of this owner with equal columns
        is accepted. Of a dataset with an index, only that of the index.
    anchor : Anchor or path, optional
        Require all files to match one version of their owner's newest manifest, as for `load_file`. A folder must have
        all files that the manifest lists in it.
    plain_columns : sequence of str
        Names of tensors that the files store unencrypted and unauthenticated, to be columns as well. A sample has
        copies of their rows. An `anchor` authenticates them.
    transform : callable, optional
        Function of an opened sample: a dict of columns. Records of U8 are `bytes`, other values arrays of torch if it
        is installed, else of NumPy. Samples are opened with `keys`, or its defaults; spawned workers need keys that can
        be pickled, such as the path of a key file or a provider.

    Raises
    ------
    AuthenticationError, UnknownKeyError
        If a shape was altered or a file's key is not among `keys`. Checked if `keys` are given or there are columns of
        records.
    ValueError
        If a file lacks a column, or columns differ in length or between files.
    FormatError, OSError
        If there are none, or a file is not a sealed file, is given twice, has another id than in `file_ids`, cannot be
        read, or, with `keys`, is not the shard that was written in its place of a folder.
    RollbackError, SignatureError
        As from `load_file`, with `anchor`; or if files of a folder are not those in its index. A file that an index
        lists is opened, and compared with it, when a sample of it is used.
    TypeError
        If the rows of a column do not fill whole bytes.

    Warns
    -----
    UserWarning
        If `keys` are given and the last run of the writer of a folder did not come to its end, or its last shards are
        missing.

    Attributes
    ----------
    columns : tuple of str
        Names of the columns of each sample.
    classes : tuple of str
        Names of the classes of images that were imported by class, in the order of their labels: ``classes[label]`` is
        the folder that the "path" of such samples begins with. Read at first use, which opens both columns with `keys`
        or its defaults. Empty unless the samples have both, with one folder for each label from 0 on.

    Notes
    -----
    A column of records, such as ``text``, gives a sample two columns: ``text`` and its length, ``text.lengths``. See
    `records` for several samples.

    A dataset that claims to have no samples is never opened, so only `keys` detect a false claim.

    Worker processes send numbers of samples, which this process resolves: keep the dataset while its loader is in use.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> tensors = {"images": np.arange(12).reshape(4, 3), "labels": np.array([0, 1, 1, 0])}
    >>> fastrack.save_file(tensors, "train.safetensors", key)
    >>> data = fastrack.SealedDataset("train.safetensors", columns=["images", "labels"], keys=key)
    >>> data
    <SealedDataset of 4 samples: images, labels>
    >>> data[1]["images"]
    <SealedRows of 'images' I64 [3]>
    >>> fastrack.unseal(data[1:3]["labels"], key, framework="numpy")
    array([1, 1])
    """

    _classes: tuple[str, ...] | None = None  # once they are asked for

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        columns: Sequence[str] | None = None,
        *,
        keys: KeySource | None = None,
        file_ids: Sequence[str] | None = None,
        anchor: Anchor | PathLike | None = None,
        plain_columns: Sequence[str] = (),
        transform: Callable[[dict[str, Any]], Sample_co] | None = None,
    ) -> None:
        require_files(paths, columns)
        anchor = resolve_anchor(anchor)
        source = find_shards(paths, anchor, keys, file_ids)
        tensors = find_tensors(source, columns)
        shards = source.open([name for names in tensors.values() for name in names] or columns, file_ids, anchor)
        self._set(shards, tensors, keys, plain_columns, transform, is_folder=source.is_folder)

    def _set(
        self,
        shards: Shards,
        tensors: dict[str, tuple[str, ...]],
        keys: KeySource | None,
        plain_columns: Sequence[str],
        transform: Transform | None,
        lengths: str | None = None,
        *,
        is_folder: bool,
    ) -> None:
        ring = None if keys is None else KeyRing.resolve(keys)
        self._shards, self._keys = shards, ring
        self._opening = None if transform is None else SampleTransform(keys, transform)
        self._ref = join_columns(shards, tensors, ring, tuple_of_names(plain_columns, "plain_columns="), lengths)
        if ring is not None:
            for part in self._ref.parts:
                part.authenticate(ring)
                part.keep_keys_of(self)
            if is_folder:
                require_places(shards, ring)

    @classmethod
    def records(
        cls,
        paths: PathLike | Sequence[PathLike],
        data: str = "data",
        offsets: str = "offsets",
        *,
        keys: KeySource | None = None,
        file_ids: Sequence[str] | None = None,
        anchor: Anchor | PathLike | None = None,
        columns: Sequence[str] = (),
        plain_columns: Sequence[str] = (),
        transform: Callable[[dict[str, Any]], Record] | None = None,
    ) -> SealedDataset[Record]:
        """Make a dataset of samples of any length: sample `i` of a file is ``data[offsets[i]:offsets[i + 1]]``.

        A sample also has its length, under "lengths". Several samples are one tensor (n, longest), padded with zeros,
        and an int64 tensor (n,) of their lengths.

        Parameters
        ----------
        paths : path or sequence of paths
            Sealed files.
        data : str
            Name of the sealed tensor that holds the samples one after the other, in one dimension.
        offsets : str
            Name of the sealed tensor of their starts and the end of the last one: int64 (n + 1,) for n samples.
        keys : KeySource, optional
            As for `unseal`.
        file_ids, anchor, plain_columns, transform
            As for `SealedDataset`.
        columns : sequence of str
            Names of further columns: sealed tensors with a row for each sample, such as labels.

        Raises
        ------
        FormatError
            If a file is given twice or has another id, or the offsets do not ascend, or exceed the data.
        AuthenticationError, UnknownKeyError
            If the offsets cannot be unsealed.
        ValueError
            If a file lacks one of the tensors, or `data` is "lengths", the name of another column.

        Notes
        -----
        The offsets are unsealed on the host, by this call. The host learns nothing new: it sees which bytes are moved.
        Pickles have no offsets: a spawned worker knows the number of samples, but not their lengths. A forked worker
        has a copy of the offsets.
        """
        if data == "lengths":
            raise ValueError("data=: expected another name than 'lengths', which the length of a sample has. Rename it")
        anchor = resolve_anchor(anchor)
        source = find_shards(paths, anchor, keys, file_ids)
        names = tuple_of_names(columns, "columns=")
        tensors = {data: (data, offsets), **(find_tensors(source, names) if names else {})}
        shards = source.open([name for names in tensors.values() for name in names], file_ids, anchor)
        dataset: SealedDataset[Any] = cls.__new__(cls)
        dataset._set(shards, tensors, keys, plain_columns, transform, "lengths", is_folder=source.is_folder)
        return dataset

    def windows(self, column: str | Sequence[str], size: int, step: int | None = None) -> SealedDataset[Sample_co]:
        """Return a dataset of the same files, whose samples are windows on long columns.

        Sample `i` of a file is ``tensor[i * step : i * step + size]``. No window crosses the end of a file; the
        remaining rows are in no window.

        Parameters
        ----------
        column : str or sequence of str
            Name of the column, or of several that share their first dimension, such as tokens and a mask. Windows on a
            column of records go from one record into the next.
        size : int
            Number of rows in a window: of elements, if the tensor has one dimension.
        step : int, optional
            Rows from the start of a window to the start of the next. By default `size`, so that none overlap.

        Raises
        ------
        ValueError
            If a column is absent, no column is sealed, or `size` or `step` is not positive.
        """
        step = size if step is None else step
        names = (column,) if isinstance(column, str) else tuple(column)
        plain = () if self._ref.plain is None else self._ref.plain.names
        data = restore_dataset(join_windows(self._shards, names, plain, size, step), self._shards, self._opening)
        data._keys = self._keys  # noqa: SLF001 - its own
        for part in data._ref.parts:  # noqa: SLF001 - its own
            part.keep_keys_of(data)
        return data

    @property
    def columns(self) -> tuple[str, ...]:
        return self._ref.names

    @property
    def classes(self) -> tuple[str, ...]:
        if self._classes is None:
            self._classes = read_classes(self._shards, KeyRing.resolve(self._keys))
        return self._classes

    def __len__(self) -> int:
        return self._ref.count

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample_co: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        count = self._ref.count
        if isinstance(index, slice):
            return self._select(np.arange(*index.indices(count)))
        if hasattr(index, "__array__"):
            index = np.asarray(index)
        try:
            row = operator.index(index)
        except TypeError:
            return self._select(as_indices(index, count))
        if not -count <= row < count:
            raise IndexError(f"sample {row} is out of range: the dataset has {count} samples")
        if self._opening is not None:
            return self._opening.open(self._ref, np.array([row % count]))[0]
        return self._ref.sample(row % count)

    def _select(self, rows: Indices) -> Any:
        if self._opening is not None:
            return self._opening.open(self._ref, rows)
        return self._ref.sample(rows)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return several samples, which `collate` takes as one. `DataLoader` calls this method."""
        rows = as_indices(indices, self._ref.count)
        if self._opening is not None:
            return self._opening.open(self._ref, rows)
        return Samples(self._ref, rows)

    def __iter__(self) -> Iterator[Sample_co]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SealedDataset of {len(self)} samples: {', '.join(self.columns)}>"

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return unpickle, ("SealedDataset", self._ref, self._shards, self._opening)


def restore_dataset(
    ref: DatasetHandle | CombinedDataset, shards: Shards, opening: SampleTransform | None
) -> SealedDataset[Any]:
    """Return the dataset that a pickle describes."""
    data: SealedDataset[Any] = SealedDataset.__new__(SealedDataset)
    data._ref, data._shards, data._opening = ref, shards, opening  # noqa: SLF001
    data._keys = None  # noqa: SLF001
    return data


# Samples that are opened on the host, for a transform.


class SampleTransform:
    """Keys and function that open samples, in the process that asks for them."""

    __slots__ = ("_keys", "_ring", "_transform")

    def __init__(self, keys: KeySource | None, transform: Transform) -> None:
        if not callable(transform):
            raise TypeError(
                f"transform=: expected a function of a sample, got {shown(transform)}. Compose several in one"
            )
        self._keys = keys
        self._transform = transform
        self._ring: KeyRing | None = None  # made when the process opens its first samples

    def open(self, source: DatasetHandle | CombinedDataset, rows: Indices) -> list[Any]:
        """Open samples in one call, and return the results of the transform."""
        if self._ring is None:
            self._ring = KeyRing.resolve(self._keys)
        return [self._transform(sample) for sample in _open_samples(source, rows, self._ring)]

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("Opening", self._keys, self._transform)


def _open_samples(source: DatasetHandle | CombinedDataset, rows: Indices, keys: KeyRing) -> Iterator[dict[str, Any]]:
    handles: dict[str, SealedRows] = {}
    starts: dict[str, list[int]] = {}
    for part in source.parts:
        layout = part.layout
        if isinstance(layout, RecordLayout):
            layout.open_offsets(keys)
            name = layout.names[0]
            handles[name] = _PackedRecords(part, layout, rows)
            starts[name] = [0, *np.cumsum(layout.lengths(rows)).tolist()]
        else:
            handles |= part.sample(rows)
    values: dict[str, Any] = to_device(handles, "cpu", keys=keys)
    values = {name: values[name] for name in source.names if name in values}
    if source.plain is not None:
        values |= source.plain.sample(rows)
    for index in range(rows.size):
        sample = {name: value if name in starts else value[index] for name, value in values.items()}
        for name, ends in starts.items():
            record = sample[name][ends[index] : ends[index + 1]]
            sample[name] = np.asarray(record).tobytes() if handles[name].dtype == "U8" else record
        yield sample


class _PackedRecords(SealedRows):
    """Handle on records, one after the other without padding."""

    __slots__ = ("_layout", "_ref", "_rows")

    def __init__(self, ref: DatasetHandle, layout: RecordLayout, rows: Indices) -> None:
        self.name = layout.names[0]
        self._dtype = layout.dtype(0)
        self.key_id = layout.shards.key_id
        self._ref = ref
        self._layout = layout
        self._rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self._layout.lengths(self._rows).sum()),)

    def slices(self) -> Sequence[MessageRanges]:
        lengths = self._layout.lengths(self._rows)
        return self._layout.slices_at(self._rows, np.cumsum(lengths) - lengths)

    def check_contexts(self, keys: KeyRing) -> None:
        self._ref.check_contexts(0, keys)
