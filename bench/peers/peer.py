"""Base of all peers. A peer imports its package when it is made, so that a missing one can be reported."""

from __future__ import annotations

from typing import NamedTuple


class Features(NamedTuple):
    """Properties beyond speed, each in a few words. Every peer's file says where it was read or how it was tried."""

    random_access: str
    order_and_end: str  # the outcome for a cut or reordered file
    key_commitment: str
    bounded_memory: str
    gpu: str  # whether it decrypts on a GPU
    other_tools: str  # other readers of the format
    metadata: str  # names, dtypes and shapes


class Peer:
    """One way to keep tensors in a file.

    Each has a `name`, the `package` whose version is told, `settings` and `features`; a method `seal(arrays, path)`,
    which writes NumPy arrays by name to a path where nothing is yet, as a file or a folder; and `open(path)`, which
    returns all of them, as objects that numpy.asarray takes without a copy.
    """

    is_read = True  # whether `open` brings every byte into memory of the process; a map alone does not
    is_fresh = True  # whether `open` returns newly allocated memory of the process
    is_synced = False  # whether `seal` returns when the file is on disk


def as_torch(arrays):
    """Return the arrays as tensors, by name, with nothing copied."""
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}
