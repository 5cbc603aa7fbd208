"""What a peer is. It imports its package when it is made, so that one that is not installed can still be told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

Arrays = Mapping[str, Any]  # names to numpy arrays, or to what numpy.asarray makes an array of without a copy


@dataclass(frozen=True, slots=True)
class Features:
    """What holds beyond speed, each in a few words. Every peer's file says where it was read or how it was tried."""

    random_access: str
    order_and_end: str
    key_commitment: str
    bounded_memory: str
    gpu: str
    other_tools: str
    metadata: str


TITLES = {
    "random_access": "random access",
    "order_and_end": "cut or reordered",
    "key_commitment": "commits to its key",
    "bounded_memory": "bounded memory",
    "gpu": "decrypts on the GPU",
    "other_tools": "read by other tools",
    "metadata": "names, dtypes, shapes",
}
assert [field.name for field in fields(Features)] == list(TITLES)


class Peer(Protocol):
    """One way to keep tensors in a file."""

    name: str
    package: str  # the distribution whose version is told
    settings: str
    features: Features
    is_read: bool  # whether `open` brings every byte into memory of the process; a map alone does not
    is_fresh: bool  # whether what `open` gives is memory of the process that it did not have before
    is_synced: bool  # whether `seal` returns when the file is on disk

    def seal(self, arrays: Arrays, path: Path) -> None:
        """Write the arrays to a path where nothing is yet: a file, or a folder."""

    def open(self, path: Path) -> Arrays:
        """Bring all of them back."""
