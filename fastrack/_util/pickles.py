"""Pickle handles under names that stay the same when modules move."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fastrack.errors import FormatError

# The names in pickles, each with the module and the function or class that takes the values beside it.
_MAKERS = {
    "Binding": ("fastrack._sealed.contexts", "Binding"),
    "DatasetRows": ("fastrack._training.handles", "restore_rows"),
    "DatasetRef": ("fastrack._training.handles", "restore_ref"),
    "EvenColumn": ("fastrack._training.layout", "EvenColumn"),
    "EvenLayout": ("fastrack._training.layout", "EvenLayout"),
    "JoinedRef": ("fastrack._training.joined", "restore_joined"),
    "Lengths": ("fastrack._training.handles", "restore_lengths"),
    "MessageContext": ("fastrack._sealed.contexts", "MessageContext"),
    "Opening": ("fastrack._training.opening", "Opening"),
    "PlainColumns": ("fastrack._training.joined", "PlainColumns"),
    "RecordLayout": ("fastrack._training.layout", "RecordLayout"),
    "RowPlan": ("fastrack._sealed.indexing", "RowPlan"),
    "Samples": ("fastrack._training.handles", "restore_samples"),
    "SealedDataset": ("fastrack._training.dataset", "restore_dataset"),
    "SealedEntry": ("fastrack._sealed.entries", "restore_entry"),
    "SealedFile": ("fastrack._sealed.reader", "SealedFile"),
    "SealedTensor": ("fastrack._sealed.tensor", "restore_tensor"),
    "Shards": ("fastrack._training.shards", "unpack_shards"),
    "StackedRows": ("fastrack._training.collate", "stack"),
    "TensorBox": ("fastrack._sealed.boxes", "TensorBox"),
    "TensorRows": ("fastrack._sealed.tensor", "TensorRows"),
}


def unpickle(name: str, *values: Any) -> Any:
    """Return the object that a pickle describes. Pickles name only this function, as ``fastrack._unpickle``."""
    if name not in _MAKERS:
        raise FormatError(
            f"reading a pickle: expected an object of this version of fastrack, got {name!r:.80}. Use the version that "
            "wrote it"
        )
    module, maker = _MAKERS[name]
    return getattr(import_module(module), maker)(*values)


unpickle.__module__, unpickle.__name__, unpickle.__qualname__ = "fastrack", "_unpickle", "_unpickle"
