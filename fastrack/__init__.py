"""Sealed tensors, from their owner to a device, without a detour through plaintext.

Public is what `__all__` and `fastrack.errors` hold. A public name is imported when it is first used, so that
``import fastrack`` costs little and needs no GPU. Packages import only those below them::

    _cli  >  _bench  >  _training  >  _transfer  >  _sealed | _devices  >  _crypto  >  _tensors  >  _util  >  errors

``docs/dev/architecture.md`` describes each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fastrack._util import registry as _registry
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
    from fastrack._crypto.tlog import TransparencyLog
    from fastrack._files.byte_reader import open_bytes
    from fastrack._files.reader import SealedFile, verify_file
    from fastrack._files.rekey import rekey_file
    from fastrack._files.writer import save_file, seal_file, unseal_file
    from fastrack._keys.keyring import KeyLike, KeyProvider, KeyRing, use_keys
    from fastrack._keys.keys import Key
    from fastrack._samples.dataset_writer import SealedWriter
    from fastrack._samples.sources import import_samples
    from fastrack._sealed.seal import seal, unseal
    from fastrack._sealed.tensor import SealedRows, SealedTensor
    from fastrack._sets.anchor import Anchor
    from fastrack._sets.folder import SealedFolder, load_folder
    from fastrack._sets.folder_writer import seal_folder, unseal_folder
    from fastrack._sets.load_file import load_file
    from fastrack._sets.manifest import Manifest, load_manifest
    from fastrack._sets.publish import publish
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
    "_keys.keyring": ("KeyLike", "KeyProvider", "KeyRing", "use_keys"),
    "_keys.keys": ("Key",),
    "_crypto.tlog": ("TransparencyLog",),
    "_sets.anchor": ("Anchor",),
    "_files.byte_reader": ("open_bytes",),
    "_sets.folder": ("SealedFolder", "load_folder"),
    "_sets.folder_writer": ("seal_folder", "unseal_folder"),
    "_sets.manifest": ("Manifest", "load_manifest"),
    "_sets.publish": ("publish",),
    "_files.reader": ("SealedFile", "verify_file"),
    "_sets.load_file": ("load_file",),
    "_files.rekey": ("rekey_file",),
    "_samples.sources": ("import_samples",),
    "_samples.dataset_writer": ("SealedWriter",),
    "_sealed.seal": ("seal", "unseal"),
    "_sealed.tensor": ("SealedRows", "SealedTensor"),
    "_files.writer": ("save_file", "seal_file", "unseal_file"),
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

_registry.COMPILERS |= {
    "commands": "_devices.cuda.jit_commands:build_commands",
    "module": "_crypto.native.build:compile_here",
}
_registry.METHODS["to"] = "_transfer.api:to_device"
_registry.PICKLED |= {
    "Binding": "_sealed.contexts:Binding",
    "DatasetRef": "_training.handles:restore_ref",
    "DatasetRows": "_training.handles:restore_rows",
    "EvenColumn": "_training.layout:EvenColumn",
    "EvenLayout": "_training.layout:EvenLayout",
    "JoinedRef": "_training.joined:restore_joined",
    "Lengths": "_training.handles:restore_lengths",
    "MessageContext": "_sealed.contexts:MessageContext",
    "Opening": "_training.opening:Opening",
    "PlainColumns": "_training.joined:PlainColumns",
    "RecordLayout": "_training.layout:RecordLayout",
    "RowPlan": "_sealed.indexing:RowPlan",
    "Samples": "_training.handles:restore_samples",
    "SealedDataset": "_training.dataset:restore_dataset",
    "SealedEntry": "_sets.entries:restore_entry",
    "SealedFile": "_files.reader:SealedFile",
    "SealedTensor": "_sealed.tensor:restore_tensor",
    "Shards": "_training.shards:unpack_shards",
    "StackedRows": "_training.collate:stack",
    "TensorBox": "_sealed.tensor:TensorBox",
    "TensorRows": "_sealed.tensor:TensorRows",
}
_registry.KEY_SOURCES |= {
    ".grants": "_keys.grants:open_with_environment",
    "pkcs11": "providers._pkcs11:Pkcs11",
    "tpm": "providers._tpm:Tpm",
    "vault-transit": "providers._vault:VaultTransit",
    "aws-kms": "providers._aws:AwsKms",
    "gcp-kms": "providers._gcp:GcpKms",
    "azure-keyvault": "providers._azure:AzureKeyVault",
}


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
