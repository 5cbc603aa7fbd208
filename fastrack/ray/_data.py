"""`SealedDatasource` and `SealedCollateFn`, on the classes of Ray Data."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.data.collate_fn import NumpyBatchCollateFn

from fastrack._devices import canonical
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._keys.keys import Key
from fastrack._training.dataset import SealedDataset
from fastrack._training.row_tables import ROW_BYTES, RowTable, divide, make_table
from fastrack._transfer.api import to_device
from fastrack._util.key_text import refuse_key_text

if TYPE_CHECKING:
    import pyarrow as pa


class SealedDatasource(Datasource):  # type: ignore[misc]  # of untyped bases
    """Source of the samples of a `SealedDataset` as rows of numbers, for ``ray.data.read_datasource``.

    A row has two columns: ``dataset``, an id of the files and columns, and ``row``, the number of the sample. Keep both
    until a `SealedCollateFn` opens the rows; other columns may be added to them.

    Parameters
    ----------
    data : SealedDataset
        The samples. Windows and records may be samples.

    Raises
    ------
    TypeError
        If `data` is no `SealedDataset`.

    Notes
    -----
    Opening rows in ``map_batches`` or in a user's task puts their plaintext into the object store. Open them in the
    process that trains.
    """

    def __init__(self, data: SealedDataset) -> None:
        super().__init__()
        self._samples = RowTable(data)

    def get_name(self) -> str:
        """Return the name of the read tasks."""
        return "Sealed"

    def estimate_inmemory_data_size(self) -> int:
        """Return the size of all tables in bytes."""
        return ROW_BYTES * len(self._samples)

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, *_: Any, **__: Any) -> list[Any]:
        """Return the tasks that make the tables, one for each of `parallelism` ranges of samples."""
        return [
            ReadTask(
                partial(_read, self._samples.dataset_id, start, stop),
                BlockMetadata(
                    num_rows=stop - start, size_bytes=ROW_BYTES * (stop - start), input_files=None, exec_stats=None
                ),
                per_task_row_limit=per_task_row_limit,
            )
            for start, stop in divide(len(self._samples), parallelism)
        ]


class SealedCollateFn(NumpyBatchCollateFn):  # type: ignore[misc]  # of untyped bases
    """Function that opens the rows of a batch on a device, for the ``collate_fn=`` of ``iter_torch_batches``.

    Parameters
    ----------
    data : SealedDataset
        The samples that the rows were read from, or a dataset of the same files that was made in another process.
    device : str or torch.device, optional
        As for `to_device`. By default the device that Ray Train assigned to the worker, and "cpu" elsewhere.
    keys : KeySource, optional
        As for `to_device`, looked up in the process that opens the first batch. A `Key` cannot be pickled: make this
        object in the training function, or give a path of a key file, a provider, or a function that finds a key.

    Raises
    ------
    TypeError
        If `data` is no `SealedDataset`; and on pickling, if `keys` holds a key.
    FormatError
        If `keys` is the text of a key. Calls raise it, if a batch has rows of other files.
    AuthenticationError, UnknownKeyError, DeviceError
        From calls, as from `to_device`.

    Notes
    -----
    Ray chooses the samples of a worker and their order, unauthenticated; each sample and its number are authenticated.
    """

    def __init__(self, data: SealedDataset, device: object = None, *, keys: KeySource | None = None) -> None:
        super().__init__()
        if isinstance(keys, str):
            refuse_key_text(keys)
        self._samples = RowTable(data)
        self._device = None if device is None else canonical(device)
        self._keys = keys
        self._ring: KeyRing | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the columns of the dataset in place of its numbers, as tensors of torch."""
        if self._ring is None:
            ring = KeyRing.resolve(self._keys)
            self._samples = self._samples.with_lengths(ring)
            self._ring = ring  # last, as Ray calls this on several threads
        device = self._device or _train_device()
        opened: dict[str, Any] = to_device(self._samples.handles(batch), device, keys=self._ring, framework="torch")
        return opened

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._keys, (Key, KeyRing)):
            raise TypeError(
                "pickling a SealedCollateFn failed: expected keys= that another process can look up, got "
                f"{type(self._keys).__name__}, which stays in its process. Make the object in the training function, "
                "or give the path of a key file there"
            )
        return {**self.__dict__, "_ring": None}


def _read(dataset_id: int, start: int, stop: int) -> list[pa.Table]:
    import pyarrow as pa

    return [pa.table(make_table(dataset_id, start, stop))]


def _train_device() -> str:
    """Return the device of a Ray Train worker, or "cpu" in another process."""
    from ray.train.torch import get_device

    try:
        return canonical(get_device())
    except RuntimeError:  # not in a worker
        return "cpu"
