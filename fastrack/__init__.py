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

__getattr__, __dir__ = _lazy(globals())

_registry.WRAPPED |= {"load": "_keys.wrapped:WrappedKey.load", "id": "_keys.wrapped:wrapped_key_id"}
_registry.PLACES |= {"check": "_devices.confidential:check", "bind": "_devices.confidential:bind_key"}
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
_registry.WRAPPERS |= {
    "pkcs11": "providers._pkcs11:Pkcs11",
    "tpm": "providers._tpm:Tpm",
    "passphrase": "providers._passphrase:Passphrase",
    "vault-transit": "providers._vault:VaultTransit",
    "aws-kms": "providers._aws:AwsKms",
    "gcp-kms": "providers._gcp:GcpKms",
    "azure-keyvault": "providers._azure:AzureKeyVault",
}
_registry.KEY_SOURCES |= dict.fromkeys(_registry.WRAPPERS, "_keys.wrapped:open_source")
_registry.KEY_SOURCES |= {".grants": "_keys.grants:open_with_environment", "kbs": "providers._kbs:KbsResource"}
_registry.KEY_SOURCES["lease"] = "_keys.leases:open_page"
_registry.IRREPLACEABLE |= {
    "a key": rb"# fastrack key\b|fastrack-key-1:",
    "the secret key of a key pair": rb"# fastrack secret key\b|fastrack-secret-1:",
    "a public key": rb"fastrack-public-1:",
    "an anchor": rb'\{\s*"anchor"\s*:',
    "a wrapped key": rb'\{(?=.*?"ciphertext"\s*:)(?=.*?"key"\s*:)(?=.*?"parameters"\s*:)(?=.*?"provider"\s*:)',
    "grants": rb'\{(?=.*?"payload"\s*:)(?=.*?application/vnd\.fastrack\.grants)'
    rb'|\{\s*"challenge"\s*:[^,]*,\s*"grants"\s*:',
}
