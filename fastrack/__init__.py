"""Sealed tensors, from their owner to a device, without a detour through plaintext.

The public names are in `__all__` and `fastrack.errors`. A public name is imported when it is first used, so that
``import fastrack`` costs little and needs no GPU. Packages import only lower ones::

    _cli  >  _training  >  _transfer  >  _files  >  _sealed | _devices  >  _keys  >  _crypto  >  _util  >  errors

``docs/dev/architecture.md`` describes all packages.
"""

from __future__ import annotations

from fastrack import _version, errors  # noqa: F401 - present without `__getattr__`
from fastrack._util import registry as _registry
from fastrack._util.pickles import unpickle as _unpickle  # noqa: F401 - pickles of handles name it
from fastrack._util.public import lazy as _lazy

_NAMES = {
    "_keys.keyring": ("KeyLike", "KeyProvider", "KeyRing", "KeySource", "use_keys"),
    "_keys.keys": ("Key",),
    "_protect.folders": ("write_folder",),
    "_sets.anchor": ("Anchor",),
    "_files.byte_reader": ("open_bytes",),
    "_sets.folder": ("SealedFolder", "load_folder"),
    "_sets.folder_writer": ("seal_folder", "unseal_folder"),
    "_sets.manifest": ("Manifest", "load_manifest"),
    "_sets.publish": ("publish",),
    "_files.reader": ("SealedFile", "check_file", "verify_file"),
    "_sets.load_file": ("load_file",),
    "_files.rekey": ("rekey_file",),
    "_protect.protection": ("protect_checkpoints",),
    "_protect.rehearsal": ("is_rehearsing", "rehearse_save"),
    "_samples.export": ("export_samples",),
    "_samples.sources": ("import_samples",),
    "_samples.dataset_writer": ("DatasetWriter",),
    "_sealed.seal": ("seal", "unseal"),
    "_sealed.tensor": ("SealedRows", "SealedTensor"),
    "_files.seal_file": ("seal_file",),
    "_files.unseal_file": ("unseal_file",),
    "_files.writer": ("save_file",),
    "_training.checkpoints.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "_training.checkpoints.preemption": ("PreemptionNotice",),
    "_training.collate": ("collate",),
    "_training.dataset": ("SealedDataset",),
    "_training.index_dataset": ("index_dataset",),
    "_training.loader": ("wrap",),
    "_models.load": ("load_model", "save_model"),
    "_models.offload": ("offload",),
    "_training.streaming": ("StreamingSealedDataset",),
    "_models.reloadable": ("reloadable",),
    "_transfer.activations": ("sealed_activations",),
    "_transfer.api": ("synchronize", "to_device", "to_host"),
    "_transfer.channel": ("Channel",),
    "_models.mounts": ("mount_folder",),
    "_models.safe_open": ("load_tensors", "safe_open"),
    "_transfer.vault": ("Ticket", "Vault"),
    "_util.trace": ("trace",),
    "_version": ("__version__",),
    "errors": tuple(errors.__all__),
}
_SUBMODULES = ("attest", "distributed", "format", "grants", "kv", "providers", "ray", "tour", "transformers", "vllm")
_HOMES = {name: f"fastrack.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)  # noqa: PLE0605 - from one table
__getattr__, __dir__ = _lazy(__name__, _NAMES, globals(), _SUBMODULES)

_registry.COMPILERS |= {
    "commands": "_devices.cuda.jit_commands:build_commands",
    "module": "_crypto.native.build:compile_here",
}
_registry.WRAPPED |= {
    "load": "_keys.wrapped:WrappedKey.load",
    "id": "_keys.wrapped:wrapped_key_id",
    "source": "_keys.wrapped:open_source",
}
_registry.REMOTE |= {"open": "_remote.remote_file:open_remote", "new": "_remote.upload:new_object"}
_registry.METHODS["to"] = "_transfer.api:to_device"
_registry.PICKLED |= {
    "Binding": "_sealed.contexts:Binding",
    "DatasetRef": "_training.handles:restore_ref",
    "DatasetRows": "_training.handles:restore_rows",
    "EvenColumn": "_training.handles:EvenColumn",
    "EvenLayout": "_training.handles:EvenLayout",
    "JoinedRef": "_training.handles:restore_joined",
    "Lengths": "_training.handles:restore_lengths",
    "NamedTuple": "_training.allowed:restore_named_tuple",
    "MessageContext": "_sealed.contexts:MessageContext",
    "Scale": "_sealed.scales:Scale",
    "Opening": "_training.dataset:SampleTransform",
    "PlainColumns": "_training.plain_columns:PlainColumns",
    "RecordLayout": "_training.handles:RecordLayout",
    "RowPlan": "_sealed.indexing:RowSelection",
    "Samples": "_training.handles:restore_samples",
    "SealedDataset": "_training.dataset:restore_dataset",
    "SealedEntry": "_sets.entries:restore_entry",
    "SealedFile": "_files.reader:SealedFile",
    "SealedTensor": "_sealed.tensor:restore_tensor",
    "Shards": "_training.shards:unpack_shards",
    "StackedRows": "_training.collate:stack",
    "TensorBox": "_sealed.tensor:restore_box",
    "TensorRows": "_sealed.tensor:TensorRows",
}
_registry.KEY_SOURCES |= {
    ".grants": "_keys.grants:open_with_environment",
    "pkcs11": "providers._pkcs11:Pkcs11",
    "tpm": "providers._tpm:Tpm",
    "passphrase": "providers._passphrase:Passphrase",
    "vault-transit": "providers._vault:VaultTransit",
    "aws-kms": "providers._aws:AwsKms",
    "gcp-kms": "providers._gcp:GcpKms",
    "azure-keyvault": "providers._azure:AzureKeyVault",
}
