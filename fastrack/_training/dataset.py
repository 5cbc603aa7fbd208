"""`SealedDataset`: sealed files as a data set for PyTorch's `DataLoader`, whose samples are handles."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastrack._crypto.keys import KeyRing, KeySource
from fastrack._sealed.indexing import as_indices
from fastrack._tensors import arrays
from fastrack._training.handles import DatasetRef, Samples, get_or_create
from fastrack._training.layout import Layout, record_layout, row_layout, window_layout
from fastrack._training.shards import PathLike, Shards
from fastrack._util.pickles import unpickle
from fastrack._util.public import public

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    _Base = Dataset[dict[str, Any]]
elif arrays.installed("torch"):
    from torch.utils.data import Dataset as _Base
else:
    _Base = object


@public
class SealedDataset(_Base):
    """Samples in one sealed file or several, for `torch.utils.data.DataLoader`; nothing of them is opened here.

    ``data[i]`` is a dict with a handle (`SealedRows`) for each column; `fastrack.collate` puts samples together into
    one handle for each column, and `to_device` opens that, out of the chunks that hold the samples. Slices, vectors of
    integers and masks choose several samples at once. Needs no torch; where it is installed, this is one of its
    `torch.utils.data.Dataset`.

    Parameters
    ----------
    paths : path or sequence of paths
        Sealed files, whose samples follow each other in the order given.
    columns : sequence of str, optional
        Names of sealed tensors that share their first dimension, which counts the samples. By default all sealed
        tensors of the first file.
    keys : Key, path or iterable of these, optional
        With them the shapes of all columns are authenticated here, and so how many samples there are. Without them the
        length, the shapes and the dtypes are what the files claim: nothing of a column is authenticated until its first
        samples are opened, so a sampler that was made before that may believe a false length.
    file_ids : sequence of str, optional
        The ``SealedFile.file_id`` that each file must have, in the order of `paths`. They are authenticated with the
        shapes. Without them an older file of the same owner, or one that was made for something else, passes where it
        has the same columns.

    Raises
    ------
    AuthenticationError, UnknownKeyError
        If `keys` are given, and a shape was altered or the key of a file is not among them.
    ValueError
        If the files lack a column, or columns do not go together.
    FormatError, OSError
        If a file is no sealed file, is there twice, has another id than `file_ids` says, or cannot be read.
    TypeError
        If the rows of a column do not fill whole bytes.

    Attributes
    ----------
    columns : tuple of str
        What each sample has.

    Notes
    -----
    A data set that claims to have no samples at all is never opened, so only `keys` would tell that the claim is false.

    Worker processes send numbers of samples, which mean something only where this object is: keep it while its loader
    is in use.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        columns: Sequence[str] | None = None,
        *,
        keys: KeySource | None = None,
        file_ids: Sequence[str] | None = None,
    ) -> None:
        self._ref = DatasetRef(row_layout(Shards(paths, columns, file_ids)))
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
    ) -> SealedDataset:
        """Samples of any length: sample `i` of a file is ``data[offsets[i]:offsets[i + 1]]``.

        A sample also has its length, under "lengths". Put together, they are one tensor (n, longest) with zeros behind
        the shorter ones, and an int64 tensor (n,) of their lengths.

        Parameters
        ----------
        paths : path or sequence of paths
            Sealed files.
        data : str
            The sealed tensor that holds the samples one after the other, in one dimension.
        offsets : str
            The sealed tensor that says where they start: int64, one more than there are samples.
        keys : Key, path or iterable of these, optional
            As for `unseal`.
        file_ids : sequence of str, optional
            As for `SealedDataset`.

        Raises
        ------
        FormatError
            If a file is there twice or has another id, or the offsets do not ascend, or lead outside the data.
        AuthenticationError, UnknownKeyError
            If the offsets cannot be unsealed.

        Notes
        -----
        The offsets are unsealed on the host, here. That tells the host nothing new: it sees which bytes are moved.
        They are in no pickle: a worker that was spawned knows which samples there are, and not how long. One that was
        forked has a copy, as of everything.
        """
        return _from_ref(DatasetRef(record_layout(Shards(paths, [data, offsets], file_ids), keys)))

    def windows(self, column: str, size: int, step: int | None = None) -> SealedDataset:
        """Another data set of the same files, whose samples are windows on a long column.

        Sample `i` of a file is ``tensor[i * step : i * step + size]``. No window reaches from one file into the next;
        what is left at the end of each is in none.

        Parameters
        ----------
        column : str
            The only column of the samples.
        size : int
            Rows of a window: elements, if the tensor has one dimension.
        step : int, optional
            Rows from the start of a window to the start of the next. By default `size`, so that none overlap.

        Raises
        ------
        ValueError
            If there is no such column, or `size` or `step` is not positive.
        """
        return _from_ref(
            DatasetRef(window_layout(self._ref.layout.shards, column, size, size if step is None else step))
        )

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
        """Several samples at once, which `collate` need not look at one by one. `DataLoader` calls this."""
        return Samples(self._ref, as_indices(indices, self._ref.count))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SealedDataset of {len(self)} samples: {', '.join(self.columns)}>"

    def __reduce__(self) -> tuple[object, tuple[Any, ...]]:
        return unpickle, ("SealedDataset", self._ref.dataset_id, self._ref.layout)


def restore_dataset(dataset_id: bytes, layout: Layout) -> SealedDataset:
    """Make the data set that a pickle holds."""
    return _from_ref(get_or_create(dataset_id, layout))


def _from_ref(ref: DatasetRef) -> SealedDataset:
    data = SealedDataset.__new__(SealedDataset)
    data._ref = ref  # noqa: SLF001
    return data
