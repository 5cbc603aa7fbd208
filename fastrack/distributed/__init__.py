"""Sealed training on several machines: collectives for DDP and FSDP2."""

from __future__ import annotations

from fastrack.distributed._group import SecureGroup
from fastrack.distributed._hooks import seal_fsdp, sealed_allreduce

__all__ = ["SecureGroup", "seal_fsdp", "sealed_allreduce"]

for _name in __all__:
    globals()[_name].__module__ = "fastrack.distributed"  # the path that users import them from
