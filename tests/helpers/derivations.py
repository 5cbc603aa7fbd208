"""Derivations of message keys, watched or made to fail."""

from functools import partial

from fastrack._crypto import derivation


def replace(patch, derive):
    """Have the keys of rows be derived by a function, which is given the true derivation first."""
    patch.setattr(derivation, "derive_rows", partial(derive, derivation.derive_rows))
