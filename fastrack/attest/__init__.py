"""Verification of attestation evidence of confidential machines, offline.

Evidence, certificates, collateral and the time are all arguments: no function opens a socket, reads a clock or asks a
service. Parsers return values that nothing vouches for, such as `TdxQuote`; verifiers raise
`fastrack.AttestationError`, or return a type of its own, such as `VerifiedTdxQuote`, that says what was proved. A
`Policy` then judges what was proved.

A public name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fastrack.errors import AttestationError

if TYPE_CHECKING:
    from fastrack.attest._client import fetch_keys
    from fastrack.attest._collect import collect_evidence
    from fastrack.attest._cpu.snp import VerifiedSnpReport, verify_snp_report
    from fastrack.attest._cpu.snp_kind import SnpEvidence, SnpPolicy
    from fastrack.attest._cpu.snp_report import SnpProduct, SnpReport, SnpTcb, parse_snp_report
    from fastrack.attest._cpu.tdx import TdxTcb, VerifiedTdxQuote, verify_tdx_quote
    from fastrack.attest._cpu.tdx_collateral import TcbLevel, TcbStatus, TdxCollateral
    from fastrack.attest._cpu.tdx_kind import TdxEvidence, TdxPolicy
    from fastrack.attest._cpu.tdx_pck import PckIdentity
    from fastrack.attest._cpu.tdx_quote import TdReport, TdxQuote, parse_tdx_quote
    from fastrack.attest._exchange import (
        PendingOffer,
        TrustedRoots,
        VerifiedOffer,
        issue_grants,
        make_offer,
        verify_offer,
    )
    from fastrack.attest._formats.ocsp import VerifiedOcspResponse, verify_ocsp_response
    from fastrack.attest._formats.roots import AMD_ROOTS, INTEL_ROOTS, NVIDIA_RIM_ROOTS, NVIDIA_ROOTS
    from fastrack.attest._gpus.evidence import GpuMode, VerifiedGpuReport, verify_gpu_report
    from fastrack.attest._gpus.identity import GpuArchitecture
    from fastrack.attest._gpus.report import GpuReport, parse_gpu_report
    from fastrack.attest._gpus.rim import Rim, RimMeasurement, VerifiedRim, parse_rim, verify_rim
    from fastrack.attest._gpus.rim_match import MatchedGpuReport, match_measurements
    from fastrack.attest._offer import (
        Challenge,
        DeviceEvidence,
        MachineEvidence,
        ManifestEvidence,
        Offer,
        OfferBinding,
    )
    from fastrack.attest._policy import Policy
    from fastrack.attest._policy_common import Revocation
    from fastrack.attest._policy_gpu import GpuPolicy

__all__ = [
    "AMD_ROOTS",
    "INTEL_ROOTS",
    "NVIDIA_RIM_ROOTS",
    "NVIDIA_ROOTS",
    "AttestationError",
    "Challenge",
    "DeviceEvidence",
    "GpuArchitecture",
    "GpuMode",
    "GpuPolicy",
    "GpuReport",
    "MachineEvidence",
    "ManifestEvidence",
    "MatchedGpuReport",
    "Offer",
    "OfferBinding",
    "PckIdentity",
    "PendingOffer",
    "Policy",
    "Revocation",
    "Rim",
    "RimMeasurement",
    "SnpEvidence",
    "SnpPolicy",
    "SnpProduct",
    "SnpReport",
    "SnpTcb",
    "TcbLevel",
    "TcbStatus",
    "TdReport",
    "TdxCollateral",
    "TdxEvidence",
    "TdxPolicy",
    "TdxQuote",
    "TdxTcb",
    "TrustedRoots",
    "VerifiedGpuReport",
    "VerifiedOcspResponse",
    "VerifiedOffer",
    "VerifiedRim",
    "VerifiedSnpReport",
    "VerifiedTdxQuote",
    "collect_evidence",
    "fetch_keys",
    "issue_grants",
    "make_offer",
    "match_measurements",
    "parse_gpu_report",
    "parse_rim",
    "parse_snp_report",
    "parse_tdx_quote",
    "verify_gpu_report",
    "verify_ocsp_response",
    "verify_offer",
    "verify_rim",
    "verify_snp_report",
    "verify_tdx_quote",
]

_NAMES = {
    "_client": ("fetch_keys",),
    "_collect": ("collect_evidence",),
    "_cpu.snp": ("VerifiedSnpReport", "verify_snp_report"),
    "_cpu.snp_kind": ("SnpEvidence", "SnpPolicy"),
    "_cpu.snp_report": ("SnpProduct", "SnpReport", "SnpTcb", "parse_snp_report"),
    "_cpu.tdx": ("TdxTcb", "VerifiedTdxQuote", "verify_tdx_quote"),
    "_cpu.tdx_collateral": ("TcbLevel", "TcbStatus", "TdxCollateral"),
    "_cpu.tdx_kind": ("TdxEvidence", "TdxPolicy"),
    "_cpu.tdx_pck": ("PckIdentity",),
    "_cpu.tdx_quote": ("TdReport", "TdxQuote", "parse_tdx_quote"),
    "_exchange": ("PendingOffer", "TrustedRoots", "VerifiedOffer", "issue_grants", "make_offer", "verify_offer"),
    "_formats.ocsp": ("VerifiedOcspResponse", "verify_ocsp_response"),
    "_formats.roots": ("AMD_ROOTS", "INTEL_ROOTS", "NVIDIA_RIM_ROOTS", "NVIDIA_ROOTS"),
    "_gpus.evidence": ("GpuMode", "VerifiedGpuReport", "verify_gpu_report"),
    "_gpus.identity": ("GpuArchitecture",),
    "_gpus.report": ("GpuReport", "parse_gpu_report"),
    "_gpus.rim": ("Rim", "RimMeasurement", "VerifiedRim", "parse_rim", "verify_rim"),
    "_gpus.rim_match": ("MatchedGpuReport", "match_measurements"),
    "_offer": ("Challenge", "DeviceEvidence", "MachineEvidence", "ManifestEvidence", "Offer", "OfferBinding"),
    "_policy": ("Policy",),
    "_policy_common": ("Revocation",),
    "_policy_gpu": ("GpuPolicy",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


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
