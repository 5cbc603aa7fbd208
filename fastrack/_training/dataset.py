"""`SealedDataset`: a data set for PyTorch's `DataLoader`, whose samples are handles on rows of sealed files."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastrack._crypto.keyring import KeyRing, KeySource
from fastrack._sealed.indexing import as_indices
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays
from fastrack._training.collate import collate
from fastrack._training.handles import DatasetRef, Lengths, Samples, refs
from fastrack._training.layout import Layout, record_layout, row_layout, window_layout
from fastrack._training.shards import PathLike, Shards
from fastrack._util.pickles import unpickle
from fastrack._util.public import public

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from fastrack._sealed.anchor import Anchor

    _Base = Dataset[dict[str, Any]]
elif arrays.installed("torch"):
    from torch.utils.data import Dataset as _Base
    from torch.utils.data._utils.collate import default_collate_fn_map

    def _collate_handles(handles: list[Any], **_: object) -> Any:
        return collate(handles)

    # A DataLoader without collate_fn= then makes the same batches, though one handle after the other.
    default_collate_fn_map.update(dict.fromkeys((SealedRows, SealedTensor, Lengths), _collate_handles))
else:
    _Base = object


@public
class SealedDataset(_Base):
    """Data set of samples in sealed files, for `torch.utils.data.DataLoader`. It opens nothing of them.

    ``data[i]`` is a dict with a handle (`SealedRows`) for each column. `fastrack.collate` makes one handle for each
    column of several samples, and `to_device` opens it, out of the chunks that hold the samples. Slices, vectors of
    integers and masks select several samples at once. The class needs no torch; where torch is installed, it is a
    `torch.utils.data.Dataset`.

    Parameters
    ----------
    paths : path or sequence of paths
        Sealed files. Their samples follow each other in the order given.
    columns : sequence of str, optional
        Names of sealed tensors that share their first dimension, which counts the samples. All sealed tensors of the
        first file by default.
    keys : KeySource, optional
        Keys to authenticate the shapes of all columns with, and so the number of samples. Without them the length, the
        shapes and the dtypes are those that the files claim: a column is authenticated when its first samples are
        opened, and a sampler that was made before that may use a false length.
    file_ids : sequence of str, optional
        The ``SealedFile.file_id`` that each file must have, in the order of `paths`. They are authenticated with the
        shapes. Without them, an older or another file of the same owner with the same columns is accepted.
    anchor : Anchor or path, optional
        All files have to be as their owner's newest manifest lists them, of one version, as for `load_file`.

    Raises
    ------
    AuthenticationError, UnknownKeyError
        If `keys` are given, and a shape was altered or the key of a file is not among them.
    ValueError
        If a file lacks a column, or columns differ in length or between files.
    FormatError, OSError
        If a file is not a sealed file, is given twice, has another id than in `file_ids`, or cannot be read.
    RollbackError, SignatureError
        As from `load_file`, with `anchor`.
    TypeError
        If the rows of a column do not fill whole bytes.

    Attributes
    ----------
    columns : tuple of str
        Names of the columns of each sample.

    Notes
    -----
    A data set that claims to have no samples is never opened, so that only `keys` detect a false claim.

    Worker processes send numbers of samples, which the process of this object resolves: keep it while its loader is in
    use.

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

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        columns: Sequence[str] | None = None,
        *,
        keys: KeySource | None = None,
        file_ids: Sequence[str] | None = None,
        anchor: Anchor | PathLike | None = None,
    ) -> None:
        self._ref = DatasetRef(row_layout(Shards(paths, columns, file_ids, anchor)))
        if keys is not None:
            ring = KeyRing.resolve(keys)
            for column in range(len(self.columns)):
                self._ref.check_contexts(column, ring)

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
    ) -> SealedDataset:
        """Make a data set of samples of any length: sample `i` of a file is ``data[offsets[i]:offsets[i + 1]]``.

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
        file_ids : sequence of str, optional
            As for `SealedDataset`.
        anchor : Anchor or path, optional
            As for `SealedDataset`.

        Raises
        ------
        FormatError
            If a file is given twice or has another id, or the offsets do not ascend, or exceed the data.
        AuthenticationError, UnknownKeyError
            If the offsets cannot be unsealed.
        ValueError
            If a file lacks one of the tensors, or `data` is "lengths", which would stand twice in a sample.

        Notes
        -----
        The offsets are unsealed on the host, here. The host learns nothing new from them, as it sees which bytes are
        moved. They are in no pickle: a spawned worker has the number of samples without their lengths. A forked worker
        has a copy of them, as of everything.
        """
        return from_ref(DatasetRef(record_layout(Shards(paths, [data, offsets], file_ids, anchor), keys)))

    def windows(self, column: str, size: int, step: int | None = None) -> SealedDataset:
        """Return a data set of the same files, whose samples are windows on a long column.

        Sample `i` of a file is ``tensor[i * step : i * step + size]``. No window crosses the end of a file; the rows
        that are left there are in none.

        Parameters
        ----------
        column : str
            Name of the column, the only one of the samples.
        size : int
            Number of rows in a window: of elements, if the tensor has one dimension.
        step : int, optional
            Rows from the start of a window to the start of the next. By default `size`, so that none overlap.

        Raises
        ------
        ValueError
            If there is no such column, or `size` or `step` is not positive.
        """
        step = size if step is None else step
        return from_ref(DatasetRef(window_layout(self._ref.layout.shards, column, size, step)))

    @property
    def columns(self) -> tuple[str, ...]:
        return self._ref.layout.names

    def __len__(self) -> int:
        return self._ref.count

    def __getitem__(self, index: Any) -> dict[str, Any]:
        count = self._ref.count
        if isinstance(index, slice):
            return self._ref.sample(np.arange(*index.indices(count)))
        if hasattr(index, "__array__"):
            index = np.asarray(index)
        try:
            row = operator.index(index)
        except TypeError:
            return self._ref.sample(as_indices(index, count))
        if not -count <= row < count:
            raise IndexError(f"sample {row} is out of range: the data set has {count} samples")
        return self._ref.sample(row % count)

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """Return several samples, which `collate` takes as one. `DataLoader` calls this method."""
        return Samples(self._ref, as_indices(indices, self._ref.count))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SealedDataset of {len(self)} samples: {', '.join(self.columns)}>"

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return unpickle, ("SealedDataset", self._ref.dataset_id, self._ref.layout)


def restore_dataset(dataset_id: bytes, layout: Layout) -> SealedDataset:
    """Return the data set that a pickle describes, on the same reference as another of it in this process."""
    return from_ref(refs.get(dataset_id) or DatasetRef(layout, dataset_id))


def from_ref(ref: DatasetRef) -> SealedDataset:
    """Return a data set on a reference."""
    data = SealedDataset.__new__(SealedDataset)
    data._ref = ref  # noqa: SLF001
    return data
