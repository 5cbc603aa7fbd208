"""`collate`: makes a batch of samples, and one handle of several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fastrack._crypto.gather import ByteRanges, LazyRanges
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.tensor import MessageRanges, SealedRows, SealedTensor, TensorRows
from fastrack._tensors import arrays
from fastrack._training.handles import DatasetRows, Lengths, Samples
from fastrack._util.pickles import unpickle
from fastrack._util.public import public


@public
def collate(samples: Sequence[Any]) -> Any:
    """Collate samples into a batch, for the ``collate_fn=`` of a `torch.utils.data.DataLoader`.

    Handles on sealed rows become one handle, with a new first dimension that counts the samples, and nothing is opened.
    Other values go through ``torch.utils.data.default_collate`` if torch is installed: numbers and tensors become a
    tensor, strings a list. Without torch they become a NumPy array, or a list. Dicts, lists, tuples and named tuples
    may nest.

    Parameters
    ----------
    samples : sequence
        Samples of one structure, such as samples of a `SealedDataset`.

    Returns
    -------
    dict, list, SealedRows, torch.Tensor or numpy.ndarray
        The batch, with the structure of one sample, except that tuples become lists.

    Raises
    ------
    ValueError
        If there are no samples, or sealed rows differ in dtype or shape.
    TypeError
        If sealed rows are mixed with other values.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(12).reshape(4, 3), key, name="x")
    >>> batch = fastrack.collate([{"x": sealed[0]}, {"x": sealed[2]}])
    >>> batch
    {'x': <SealedRows of 'x' I64 [2, 3]>}
    >>> fastrack.unseal(batch["x"], key, framework="numpy")
    array([[0, 1, 2],
           [6, 7, 8]])
    """
    if isinstance(samples, Samples):
        return samples.stack()
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise TypeError(f"batch: expected a list of samples, got {type(samples).__name__}. Call collate(samples)")
    if not len(samples):
        raise ValueError("batch: expected one sample or more, got none")
    first = samples[0]
    if isinstance(first, (SealedRows, SealedTensor)):
        return stack(samples)
    if isinstance(first, Lengths):
        return first.stack(samples)
    if isinstance(first, Mapping):
        try:
            named = {name: [sample[name] for sample in samples] for name in first}
        except (KeyError, TypeError, IndexError):
            raise ValueError(
                "batch: expected samples with the keys of the first one, got another. Give all of them the same keys"
            ) from None
        return {name: collate(column) for name, column in named.items()}
    if isinstance(first, (list, tuple)):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError("batch: expected samples of one length, got several lengths")
        columns = [collate(column) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    return _collate_plain(list(samples))


def _collate_plain(leaves: list[Any]) -> Any:
    if arrays.installed("torch"):
        from torch.utils.data import default_collate

        return default_collate(leaves)
    if isinstance(leaves[0], (int, float, complex)) or arrays.framework_of(leaves[0]) == "numpy":
        return np.array(leaves)
    return leaves


def stack(handles: Sequence[Any]) -> SealedRows:
    """Return one handle on several, with a new first dimension that counts them."""
    several = [TensorRows.of(handle) if isinstance(handle, SealedTensor) else handle for handle in handles]
    first = several[0]
    if isinstance(first, DatasetRows) and (stacked := first.stack(several)) is not None:
        return stacked
    for rows in several:
        if not isinstance(rows, SealedRows):
            raise TypeError(f"sealed rows of a batch: expected sealed rows in every sample, got {type(rows).__name__}")
        if (rows.dtype, rows.shape) != (first.dtype, first.shape):
            raise ValueError(
                f"sealed rows of a batch: expected {first.dtype} {list(first.shape)}, as in the first sample, got "
                f"{rows.dtype} {list(rows.shape)}. For samples of any length see SealedDataset.records"
            )
    return StackedRows(several)


class StackedRows(SealedRows):
    """Handle on the rows of several handles of one dtype and shape, stacked along a new first dimension."""

    __slots__ = ("_handles", "needs_padding")

    def __init__(self, handles: list[SealedRows]) -> None:
        first = handles[0]
        self.name = first.name
        self._dtype = first._dtype  # noqa: SLF001 - of the same class
        self.key_id = first.key_id
        self.needs_padding = any(rows.needs_padding for rows in handles)
        self._handles = handles

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._handles), *self._handles[0].shape)

    @property
    def _own_keys(self) -> KeyRing | None:  # type: ignore[override]
        return common_ring(rows._own_keys for rows in self._handles)  # noqa: SLF001 - of the same class

    def slices(self) -> Sequence[MessageRanges]:
        size = self._handles[0].nbytes
        slices: dict[Any, tuple[SealedTensor, list[LazyRanges], list[int]]] = {}
        for index, rows in enumerate(self._handles):
            for tensor, ranges in rows.slices():
                # A message is opened once, even if its file has two handles on it.
                message = (*tensor.location, tensor.context)
                _, parts, shifts = slices.setdefault(message, (tensor, [], []))
                parts.append(ranges)
                shifts.append(index * size)
        return [
            MessageRanges(tensor, partial(ByteRanges.concatenate, parts, shifts))
            for tensor, parts, shifts in slices.values()
        ]

    def check_contexts(self, keys: KeyRing) -> None:
        for rows in self._handles:
            rows.check_contexts(keys)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("StackedRows", self._handles)


def common_ring(rings: Iterable[KeyRing | None]) -> KeyRing | None:
    """Return the ring of several datasets, or one of the keys that all of them have. None if one has no ring."""
    first, *others = dict.fromkeys(rings)  # by identity
    if not others or first is None or None in others:
        return None if others else first
    return KeyRing(key for key in first if all(ring is not None and key in ring for ring in others))
