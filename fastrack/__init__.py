"""Sealed tensors, from their owner to a device, without a detour through plaintext.

The public names are loaded when they are first used, so that ``import fastrack`` costs little and needs no GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fastrack._version import __version__
from fastrack.errors import (
    AuthenticationError,
    ClosedError,
    DeviceError,
    FastrackError,
    FormatError,
    KeyPermissionError,
    UnknownKeyError,
)
from fastrack.pickles import unpickle as _unpickle  # noqa: F401 - pickles of handles name it

if TYPE_CHECKING:
    from fastrack.channel import Channel
    from fastrack.checkpoints import load_checkpoint, save_checkpoint
    from fastrack.collation import collate
    from fastrack.data import SealedDataset
    from fastrack.files import SealedFile, load_file, verify_file
    from fastrack.keys import Key, KeyRing
    from fastrack.loader import wrap
    from fastrack.models import load_model, save_model
    from fastrack.sealed import SealedRows, SealedTensor, seal, unseal
    from fastrack.shared import synchronize, to_device, to_host
    from fastrack.timeline import trace
    from fastrack.writer import save_file, seal_file, unseal_file

__all__ = [
    "AuthenticationError",
    "Channel",
    "ClosedError",
    "DeviceError",
    "FastrackError",
    "FormatError",
    "Key",
    "KeyPermissionError",
    "KeyRing",
    "SealedDataset",
    "SealedFile",
    "SealedRows",
    "SealedTensor",
    "UnknownKeyError",
    "__version__",
    "collate",
    "load_checkpoint",
    "load_file",
    "load_model",
    "save_checkpoint",
    "save_file",
    "save_model",
    "seal",
    "seal_file",
    "synchronize",
    "to_device",
    "to_host",
    "trace",
    "unseal",
    "unseal_file",
    "verify_file",
    "wrap",
]

_HOMES = {
    "Channel": "fastrack.channel",
    "Key": "fastrack.keys",
    "KeyRing": "fastrack.keys",
    "SealedDataset": "fastrack.data",
    "SealedFile": "fastrack.files",
    "SealedRows": "fastrack.sealed",
    "SealedTensor": "fastrack.sealed",
    "collate": "fastrack.collation",
    "load_checkpoint": "fastrack.checkpoints",
    "load_file": "fastrack.files",
    "load_model": "fastrack.models",
    "save_checkpoint": "fastrack.checkpoints",
    "save_file": "fastrack.writer",
    "save_model": "fastrack.models",
    "seal": "fastrack.sealed",
    "seal_file": "fastrack.writer",
    "synchronize": "fastrack.shared",
    "to_device": "fastrack.shared",
    "to_host": "fastrack.shared",
    "trace": "fastrack.timeline",
    "unseal": "fastrack.sealed",
    "unseal_file": "fastrack.writer",
    "verify_file": "fastrack.files",
    "wrap": "fastrack.loader",
}


if not TYPE_CHECKING:  # a type checker that saw it would take any misspelt name for one that is there

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        value: object = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
