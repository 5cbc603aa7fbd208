"""Pickle handles under names that stay the same when modules move."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fastrack.errors import FormatError

# The names in pickles, each with the module and the function or class that takes the values beside it.
_MAKERS = {
    "Binding": ("fastrack._sealed.tensor", "Binding"),
    "Claim": ("fastrack._sealed.tensor", "Claim"),
    "DataRows": ("fastrack._training.handles", "rows_of"),
    "EvenColumn": ("fastrack._training.layout", "EvenColumn"),
    "EvenLayout": ("fastrack._training.layout", "EvenLayout"),
    "JoinedRows": ("fastrack._training.collate", "join"),
    "Lengths": ("fastrack._training.handles", "lengths_of"),
    "Ranges": ("fastrack._sealed.indexing", "Ranges"),
    "RecordLayout": ("fastrack._training.layout", "RecordLayout"),
    "RowPlan": ("fastrack._sealed.indexing", "RowPlan"),
    "Samples": ("fastrack._training.handles", "samples_of"),
    "SealedDataset": ("fastrack._training.dataset", "dataset_of"),
    "SealedFile": ("fastrack._sealed.reader", "SealedFile"),
    "SealedRows": ("fastrack._sealed.tensor", "rows_of_tensor"),
    "SealedTensor": ("fastrack._sealed.tensor", "tensor_of"),
    "Shards": ("fastrack._training.shards", "shards_of"),
    "ShiftedPlans": ("fastrack._training.collate", "ShiftedPlans"),
}


def unpickle(name: str, *values: Any) -> Any:
    """Return the object that a pickle describes. Pickles name this function, as ``fastrack._unpickle``, and no other.

    Raises
    ------
    FormatError
        If the name is unknown, as in a pickle of another version.
    """
    if name not in _MAKERS:
        raise FormatError(
            f"reading a pickle: expected an object of this version of fastrack, got {name!r:.80}. Use the version that "
            "wrote it"
        )
    module, maker = _MAKERS[name]
    return getattr(import_module(module), maker)(*values)


unpickle.__module__, unpickle.__name__, unpickle.__qualname__ = "fastrack", "_unpickle", "_unpickle"
