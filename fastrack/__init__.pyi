# The public names and the modules that they come from, for type checkers and for `__init__.py`, which reads this file.

from fastrack import (
    attest as attest,
    distributed as distributed,
    format as format,  # noqa: A004
    grants as grants,
    kv as kv,
    providers as providers,
    ray as ray,
    transformers as transformers,
    tour as tour,
    vllm as vllm,
)
from fastrack._files.byte_reader import open_bytes as open_bytes
from fastrack._files.reader import SealedFile as SealedFile
from fastrack._files.rekey import rekey_file as rekey_file
from fastrack._files.seal_file import seal_file as seal_file
from fastrack._files.unseal_file import unseal_file as unseal_file
from fastrack._files.verify import check_file as check_file, verify_file as verify_file
from fastrack._files.writer import save_file as save_file
from fastrack._keys.keyring import (
    KeyLike as KeyLike,
    KeyProvider as KeyProvider,
    KeyRing as KeyRing,
    KeySource as KeySource,
    use_keys as use_keys,
)
from fastrack._keys.keys import Key as Key
from fastrack._protect.rehearsal import is_rehearsing as is_rehearsing
from fastrack._protect.rehearsal import rehearse_save as rehearse_save
from fastrack._samples.dataset_writer import DatasetWriter as DatasetWriter
from fastrack._protect.protection import protect_checkpoints as protect_checkpoints
from fastrack._samples.export import export_samples as export_samples
from fastrack._samples.sources import import_samples as import_samples
from fastrack._sealed.seal import seal as seal, unseal as unseal
from fastrack._sealed.tensor import SealedRows as SealedRows, SealedTensor as SealedTensor
from fastrack._sets.anchor import Anchor as Anchor
from fastrack._sets.folder import SealedFolder as SealedFolder, load_folder as load_folder
from fastrack._sets.folder_writer import seal_folder as seal_folder, unseal_folder as unseal_folder
from fastrack._sets.load_file import load_file as load_file
from fastrack._sets.manifest import Manifest as Manifest, load_manifest as load_manifest
from fastrack._sets.publish import publish as publish
from fastrack._transfer.activations import sealed_activations as sealed_activations
from fastrack._training.checkpoints.checkpoint import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from fastrack._training.checkpoints.preemption import PreemptionNotice as PreemptionNotice
from fastrack._training.collate import collate as collate
from fastrack._training.dataset import SealedDataset as SealedDataset
from fastrack._training.index_dataset import index_dataset as index_dataset
from fastrack._training.loader import wrap as wrap
from fastrack._models.load import load_model as load_model, save_model as save_model
from fastrack._models.offload import offload as offload
from fastrack._training.streaming import StreamingSealedDataset as StreamingSealedDataset
from fastrack._models.reloadable import reloadable as reloadable
from fastrack._transfer.api import synchronize as synchronize, to_device as to_device, to_host as to_host
from fastrack._transfer.channel import Channel as Channel
from fastrack._protect.folders import write_folder as write_folder
from fastrack._models.mounts import mount_folder as mount_folder
from fastrack._models.safe_open import load_tensors as load_tensors, safe_open as safe_open
from fastrack._transfer.vault import Ticket as Ticket, Vault as Vault
from fastrack._transfer.trace_file import trace as trace
from fastrack._version import __version__ as __version__
from fastrack.errors import (
    AttestationError as AttestationError,
    AuthenticationError as AuthenticationError,
    ClosedError as ClosedError,
    DeviceError as DeviceError,
    FastrackError as FastrackError,
    FormatError as FormatError,
    GrantError as GrantError,
    KeyPermissionError as KeyPermissionError,
    LeaseError as LeaseError,
    ProviderError as ProviderError,
    RollbackError as RollbackError,
    SignatureError as SignatureError,
    UnknownKeyError as UnknownKeyError,
)
