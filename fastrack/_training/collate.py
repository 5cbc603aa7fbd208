"""`collate`: samples to a batch, handles to one handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastrack._crypto.base import GatherPlan
from fastrack._crypto.keys import KeyRing
from fastrack._sealed.indexing import Ranges
from fastrack._sealed.tensor import ByteRanges, RowSelection, SealedRows, SealedTensor, TensorRows, TensorSlice
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import framework_of
from fastrack._training.handles import DataRows, Lengths, Samples
from fastrack._util.pickles import unpickle
from fastrack._util.public import public


@public
def collate(samples: Sequence[Any]) -> Any:
    """Put samples together into a batch, for the ``collate_fn=`` of a `torch.utils.data.DataLoader`.

    Handles on sealed rows become one handle, with a first dimension that counts the samples, and nothing is opened.
    Everything else becomes what ``torch.utils.data.default_collate`` makes of it, if torch is installed: numbers and
    tensors a tensor, strings a list; else a NumPy array, or a list. Dicts, lists, tuples and named tuples may hold
    these, to any depth.

    Parameters
    ----------
    samples : sequence
        Samples that are built alike, such as those of a `SealedDataset`.

    Returns
    -------
    The batch: built like one sample, but that tuples become lists.

    Raises
    ------
    ValueError
        If there are none, or they are not built alike.
    """
    if isinstance(samples, Samples):
        return samples.together()
    if not len(samples):
        raise ValueError("a batch needs a sample, and none was given")
    first = samples[0]
    if isinstance(first, (SealedRows, SealedTensor)):
        return join(samples)
    if isinstance(first, Lengths):
        return first.joined(samples)
    if isinstance(first, Mapping):
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (list, tuple)):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError("samples of a batch must be of one length")
        columns = [collate(column) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else columns
    return _collate_plain(list(samples))


def _collate_plain(leaves: list[Any]) -> Any:
    if arrays.installed("torch"):
        from torch.utils.data import default_collate

        return default_collate(leaves)
    if isinstance(leaves[0], (int, float, complex)) or framework_of(leaves[0]) == "numpy":
        return np.array(leaves)
    return leaves


def join(handles: Sequence[Any]) -> SealedRows:
    """Put handles together, one after the other, to one."""
    choices = [_choice_of(handle) for handle in handles]
    first = choices[0]
    if isinstance(first, DataRows):
        joined = first.joined(choices)
        if joined is not None:
            return joined
    for choice in choices:
        if (choice.dtype, choice.shape) != (first.dtype, first.shape):
            raise ValueError(
                f"sealed rows of a batch must be of one dtype and shape, and {choice.dtype} {list(choice.shape)} came "
                f"with {first.dtype} {list(first.shape)}; for samples of any length see SealedDataset.records"
            )
    return SealedRows(ConcatSelection(choices))


def _choice_of(handle: Any) -> RowSelection:
    if isinstance(handle, SealedTensor):
        whole = np.array([0, handle.nbytes, 0])
        return TensorRows(handle, handle.shape, Ranges(whole[:1], whole[1:2], whole[2:]))
    if not isinstance(handle, SealedRows):
        raise TypeError(
            f"samples of a batch must be built alike: sealed rows came together with {type(handle).__name__}"
        )
    return handle.choice


class ConcatSelection:
    """The choice of several others, one after the other, of one dtype and shape."""

    __slots__ = ("_choices",)

    def __init__(self, choices: list[RowSelection]) -> None:
        self._choices = choices

    @property
    def name(self) -> str:
        return self._choices[0].name

    @property
    def dtype(self) -> str:
        return self._choices[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._choices), *self._choices[0].shape)

    @property
    def key_id(self) -> str:
        return self._choices[0].key_id

    @property
    def needs_padding(self) -> bool:
        return any(choice.needs_padding for choice in self._choices)

    def parts(self) -> Sequence[TensorSlice]:
        size = dtypes.nbytes(self.dtype, self._choices[0].shape)
        found: dict[Any, tuple[SealedTensor, list[ByteRanges], list[int]]] = {}
        for index, choice in enumerate(self._choices):
            for part in choice.parts():
                # The same message, even if it was taken out of its file twice.
                same = (part.tensor.chunks.__array_interface__["data"][0], part.tensor.claim)
                _, plans, shifts = found.setdefault(same, (part.tensor, [], []))
                plans.append(part.plan)
                shifts.append(index * size)
        return [TensorSlice(tensor, ShiftedPlans(plans, shifts)) for tensor, plans, shifts in found.values()]

    def check_contexts(self, keys: KeyRing) -> None:
        for choice in self._choices:
            choice.check_contexts(keys)

    def reduce(self) -> tuple[object, tuple[Any, ...]]:
        return unpickle, ("JoinedRows", [SealedRows(choice) for choice in self._choices])


@dataclass(frozen=True, slots=True)
class ShiftedPlans:
    """Several plans for one message, with the places of each moved on by `shifts` bytes. Computed when first used."""

    plans: list[ByteRanges]
    shifts: list[int]

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("ShiftedPlans", self.plans, self.shifts)

    def ranges(self) -> Ranges:
        ranges = [plan.ranges() for plan in self.plans]
        return Ranges(
            np.concatenate([each.starts for each in ranges]),
            np.concatenate([each.sizes for each in ranges]),
            np.concatenate([each.places for each in ranges])
            + np.repeat(np.array(self.shifts), [each.starts.size for each in ranges]),
        )

    def pieces(self) -> GatherPlan:
        return self.ranges().pieces()
