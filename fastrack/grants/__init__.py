"""Grants: one key for a dataset, wrapped for many, and signed by its owner.

An owner issues a grants file for sealed data. Each entry holds the key, encrypted to the public key of a recipient or
to a passphrase. The signed file names the end of the grant and the sealed files that the key may open. Adding or
removing recipients does not change the data.

Examples
--------
>>> import numpy as np
>>> import fastrack
>>> from fastrack.grants import Grants, Identity, Signer
>>> owner, alice, bob = Signer.generate(), Identity.generate(name="alice"), Identity.generate(name="bob")
>>> key = fastrack.Key.generate()
>>> sealed = fastrack.seal(np.arange(3), key)
>>> grants = Grants.issue(key, [alice.recipient, bob.recipient], signer=owner)
>>> fastrack.unseal(sealed, keys=grants.unlock(alice), framework="numpy")
array([0, 1, 2])
"""

from __future__ import annotations

from fastrack._keys.grants import Grant, Grants
from fastrack._keys.recipients import Identity, Recipient
from fastrack._keys.signing import Signer, Verifier
from fastrack._util.public import published as _published

__all__ = ["Grant", "Grants", "Identity", "Recipient", "Signer", "Verifier"]

for _name in __all__:
    globals()[_name] = _published(globals()[_name], "fastrack.grants")  # the path that users import them from
