"""Keys wrapped by tokens, TPMs, vaults and passphrases.

A wrapped key file holds an encrypted key. The key that decrypts it never leaves a PKCS#11 token, a TPM 2.0 or a vault.
The file is no secret, but with a passphrase, which can be guessed, and can be used in place of a key file.

Examples
--------
>>> import fastrack
>>> from fastrack.providers import VaultTransit
>>> key = fastrack.Key.generate()
>>> wrapped = VaultTransit("owner").wrap(key)  # doctest: +SKIP
>>> wrapped.save("owner.key.wrapped")  # doctest: +SKIP
>>> fastrack.verify_file("data.safetensors", keys="owner.key.wrapped")  # doctest: +SKIP
"""

from __future__ import annotations

from fastrack._keys.wrapped import KeyWrapper, WrappedKey, open_wrapper
from fastrack._util.public import published as _published
from fastrack.providers._aws import AwsKms
from fastrack.providers._azure import AzureKeyVault
from fastrack.providers._gcp import GcpKms
from fastrack.providers._passphrase import Passphrase
from fastrack.providers._pkcs11 import Pkcs11
from fastrack.providers._tpm import Tpm
from fastrack.providers._vault import VaultTransit

__all__ = [
    "AwsKms",
    "AzureKeyVault",
    "GcpKms",
    "KeyWrapper",
    "Passphrase",
    "Pkcs11",
    "Tpm",
    "VaultTransit",
    "WrappedKey",
    "open_wrapper",
]

for _name in __all__:
    globals()[_name] = _published(globals()[_name], "fastrack.providers")  # the path that users import them from
