"""A second implementation of fastrack's formats, from only docs/format.md.

It takes the standard library, safetensors, numpy and cryptography. Nothing here imports fastrack.
"""

from helpers.by_hand.documents import RefusedError, described
from helpers.by_hand.messages import seal, unseal
from helpers.by_hand.sealed import container, context, drop_guard, marks

__all__ = ["RefusedError", "container", "context", "described", "drop_guard", "marks", "seal", "unseal"]
