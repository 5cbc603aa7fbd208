"""Sealed tensors, from their owner to a device, without a detour through plaintext.

Public is what `__all__` and `fastrack.errors` hold. A public name is imported when it is first used, so that
``import fastrack`` costs little and needs no GPU. Packages import only those below them::

    _cli  >  _bench  >  _training  >  _transfer  >  _sealed | _devices  >  _crypto  >  _tensors  >  _util  >  errors

``docs/dev/architecture.md`` describes each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fastrack._util.pickles import unpickle as _unpickle  # noqa: F401 - pickles of handles name it
from fastrack._version import __version__
from fastrack.errors import (
    AttestationError,
    AuthenticationError,
    ClosedError,
    DeviceError,
    FastrackError,
    FormatError,
    GrantError,
    KeyPermissionError,
    ProviderError,
    RollbackError,
    SignatureError,
    UnknownKeyError,
)

if TYPE_CHECKING:
    from fastrack._crypto.keyring import KeyLike, KeyProvider, KeyRing, use_keys
    from fastrack._crypto.keys import Key
    from fastrack._crypto.tlog import TransparencyLog
    from fastrack._sealed.anchor import Anchor
    from fastrack._sealed.byte_reader import open_bytes
    from fastrack._sealed.folder import SealedFolder, load_folder
    from fastrack._sealed.folder_writer import seal_folder, unseal_folder
    from fastrack._sealed.manifest import Manifest, load_manifest
    from fastrack._sealed.publish import publish
    from fastrack._sealed.reader import SealedFile, load_file, verify_file
    from fastrack._sealed.rekey import rekey_file
    from fastrack._sealed.sample_sources import import_samples
    from fastrack._sealed.sample_writer import SealedWriter
    from fastrack._sealed.tensor import SealedRows, SealedTensor, seal, unseal
    from fastrack._sealed.writer import save_file, seal_file, unseal_file
    from fastrack._training.checkpoint import load_checkpoint, save_checkpoint
    from fastrack._training.collate import collate
    from fastrack._training.dataset import SealedDataset
    from fastrack._training.loader import wrap
    from fastrack._training.model import load_model, save_model
    from fastrack._transfer.api import synchronize, to_device, to_host
    from fastrack._transfer.channel import Channel
    from fastrack._transfer.safe_open import load_tensors, safe_open
    from fastrack._util.trace import trace

__all__ = [
    "Anchor",
    "AttestationError",
    "AuthenticationError",
    "Channel",
    "ClosedError",
    "DeviceError",
    "FastrackError",
    "FormatError",
    "GrantError",
    "Key",
    "KeyLike",
    "KeyPermissionError",
    "KeyProvider",
    "KeyRing",
    "Manifest",
    "ProviderError",
    "RollbackError",
    "SealedDataset",
    "SealedFile",
    "SealedFolder",
    "SealedRows",
    "SealedTensor",
    "SealedWriter",
    "SignatureError",
    "TransparencyLog",
    "UnknownKeyError",
    "__version__",
    "collate",
    "import_samples",
    "load_checkpoint",
    "load_file",
    "load_folder",
    "load_manifest",
    "load_model",
    "load_tensors",
    "open_bytes",
    "publish",
    "rekey_file",
    "safe_open",
    "save_checkpoint",
    "save_file",
    "save_model",
    "seal",
    "seal_file",
    "seal_folder",
    "synchronize",
    "to_device",
    "to_host",
    "trace",
    "unseal",
    "unseal_file",
    "unseal_folder",
    "use_keys",
    "verify_file",
    "wrap",
]

_NAMES = {
    "_crypto.keyring": ("KeyLike", "KeyProvider", "KeyRing", "use_keys"),
    "_crypto.keys": ("Key",),
    "_crypto.tlog": ("TransparencyLog",),
    "_sealed.anchor": ("Anchor",),
    "_sealed.byte_reader": ("open_bytes",),
    "_sealed.folder": ("SealedFolder", "load_folder"),
    "_sealed.folder_writer": ("seal_folder", "unseal_folder"),
    "_sealed.manifest": ("Manifest", "load_manifest"),
    "_sealed.publish": ("publish",),
    "_sealed.reader": ("SealedFile", "load_file", "verify_file"),
    "_sealed.rekey": ("rekey_file",),
    "_sealed.sample_sources": ("import_samples",),
    "_sealed.sample_writer": ("SealedWriter",),
    "_sealed.tensor": ("SealedRows", "SealedTensor", "seal", "unseal"),
    "_sealed.writer": ("save_file", "seal_file", "unseal_file"),
    "_training.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "_training.collate": ("collate",),
    "_training.dataset": ("SealedDataset",),
    "_training.loader": ("wrap",),
    "_training.model": ("load_model", "save_model"),
    "_transfer.api": ("synchronize", "to_device", "to_host"),
    "_transfer.channel": ("Channel",),
    "_transfer.safe_open": ("load_tensors", "safe_open"),
    "_util.trace": ("trace",),
}
_HOMES = {name: f"fastrack.{module}" for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # with it, type checkers would accept misspelt names

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
