"""How handles pickle: under names that stay as they are when modules move."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fastrack.errors import FormatError

__all__ = ["unpickle"]

# A name in a pickle: the module and the function or class that takes the values beside it.
_MAKERS = {
    "Binding": ("fastrack.sealed", "Binding"),
    "Claim": ("fastrack.sealed", "Claim"),
    "DataRows": ("fastrack.origin", "rows_of"),
    "EvenColumn": ("fastrack.layouts", "EvenColumn"),
    "EvenLayout": ("fastrack.layouts", "EvenLayout"),
    "JoinedRows": ("fastrack.collation", "join"),
    "Lengths": ("fastrack.origin", "lengths_of"),
    "Ranges": ("fastrack.rows", "Ranges"),
    "RecordLayout": ("fastrack.layouts", "RecordLayout"),
    "RowPlan": ("fastrack.rows", "RowPlan"),
    "Samples": ("fastrack.origin", "samples_of"),
    "SealedDataset": ("fastrack.data", "dataset_of"),
    "SealedFile": ("fastrack.files", "SealedFile"),
    "SealedRows": ("fastrack.sealed", "rows_of_tensor"),
    "SealedTensor": ("fastrack.sealed", "tensor_of"),
    "Shards": ("fastrack.shards", "shards_of"),
    "ShiftedPlans": ("fastrack.collation", "ShiftedPlans"),
}


def unpickle(name: str, *values: Any) -> Any:
    """Make the object that a pickle describes. Pickles name this function, as ``fastrack._unpickle``, and no other.

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
