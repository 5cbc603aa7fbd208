"""List the kinds of CPU evidence. Each has a file of its own."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from fastrack.attest._cpu.kind import CpuKind
from fastrack.attest._cpu.snp import VerifiedSnpReport
from fastrack.attest._cpu.snp_kind import SNP, SnpEvidence
from fastrack.attest._cpu.tdx import VerifiedTdxQuote
from fastrack.attest._cpu.tdx_kind import TDX, TdxEvidence

CPU_KINDS: dict[str, CpuKind[Any, Any, Any]] = {kind.name: kind for kind in (TDX, SNP)}
"""All kinds, by their names."""

CpuEvidence: TypeAlias = TdxEvidence | SnpEvidence
"""The type of the evidence of a CPU."""

VerifiedCpu: TypeAlias = VerifiedTdxQuote | VerifiedSnpReport
"""The type of what a CPU has proved."""


def kind_of_evidence(value: object) -> CpuKind[Any, Any, Any]:
    """Return the kind of CPU evidence. Raise `TypeError` for other values."""
    return _find_kind(value, {kind.evidence: kind for kind in CPU_KINDS.values()}, "")


def kind_of_verified(value: object) -> CpuKind[Any, Any, Any]:
    """Return the kind of verified evidence. Raise `TypeError` for other values, such as parsed evidence."""
    return _find_kind(value, {kind.verified: kind for kind in CPU_KINDS.values()}, "; verify the evidence first")


def _find_kind(value: object, kinds: Mapping[type, CpuKind[Any, Any, Any]], advice: str) -> CpuKind[Any, Any, Any]:
    for cls, kind in kinds.items():
        if isinstance(value, cls):
            return kind
    names = " or ".join(cls.__name__ for cls in kinds)
    raise TypeError(f"expected {names}, got {type(value).__name__}{advice}")
