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
    from fastrack.attest._cpu.snp_report import SnpProduct, SnpReport, SnpTcb, parse_snp_report
    from fastrack.attest._cpu.tdx import TdxTcb, VerifiedTdxQuote, verify_tdx_quote
    from fastrack.attest._cpu.tdx_collateral import TcbLevel, TcbStatus, TdxCollateral
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
        SnpEvidence,
        TdxEvidence,
    )
    from fastrack.attest._policy import Policy
    from fastrack.attest._policy_common import Revocation
    from fastrack.attest._policy_cpu import SnpPolicy, TdxPolicy
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

_HOMES = {
    "AMD_ROOTS": "fastrack.attest._formats.roots",
    "Challenge": "fastrack.attest._offer",
    "DeviceEvidence": "fastrack.attest._offer",
    "GpuArchitecture": "fastrack.attest._gpus.identity",
    "GpuMode": "fastrack.attest._gpus.evidence",
    "GpuPolicy": "fastrack.attest._policy_gpu",
    "GpuReport": "fastrack.attest._gpus.report",
    "INTEL_ROOTS": "fastrack.attest._formats.roots",
    "MachineEvidence": "fastrack.attest._offer",
    "ManifestEvidence": "fastrack.attest._offer",
    "MatchedGpuReport": "fastrack.attest._gpus.rim_match",
    "NVIDIA_RIM_ROOTS": "fastrack.attest._formats.roots",
    "NVIDIA_ROOTS": "fastrack.attest._formats.roots",
    "Offer": "fastrack.attest._offer",
    "OfferBinding": "fastrack.attest._offer",
    "PckIdentity": "fastrack.attest._cpu.tdx_pck",
    "PendingOffer": "fastrack.attest._exchange",
    "Policy": "fastrack.attest._policy",
    "Revocation": "fastrack.attest._policy_common",
    "Rim": "fastrack.attest._gpus.rim",
    "RimMeasurement": "fastrack.attest._gpus.rim",
    "SnpEvidence": "fastrack.attest._offer",
    "SnpPolicy": "fastrack.attest._policy_cpu",
    "SnpProduct": "fastrack.attest._cpu.snp_report",
    "SnpReport": "fastrack.attest._cpu.snp_report",
    "SnpTcb": "fastrack.attest._cpu.snp_report",
    "TcbLevel": "fastrack.attest._cpu.tdx_collateral",
    "TcbStatus": "fastrack.attest._cpu.tdx_collateral",
    "TdReport": "fastrack.attest._cpu.tdx_quote",
    "TdxCollateral": "fastrack.attest._cpu.tdx_collateral",
    "TdxEvidence": "fastrack.attest._offer",
    "TdxPolicy": "fastrack.attest._policy_cpu",
    "TdxQuote": "fastrack.attest._cpu.tdx_quote",
    "TdxTcb": "fastrack.attest._cpu.tdx",
    "TrustedRoots": "fastrack.attest._exchange",
    "VerifiedGpuReport": "fastrack.attest._gpus.evidence",
    "VerifiedOcspResponse": "fastrack.attest._formats.ocsp",
    "VerifiedOffer": "fastrack.attest._exchange",
    "VerifiedRim": "fastrack.attest._gpus.rim",
    "VerifiedSnpReport": "fastrack.attest._cpu.snp",
    "VerifiedTdxQuote": "fastrack.attest._cpu.tdx",
    "collect_evidence": "fastrack.attest._collect",
    "fetch_keys": "fastrack.attest._client",
    "issue_grants": "fastrack.attest._exchange",
    "make_offer": "fastrack.attest._exchange",
    "match_measurements": "fastrack.attest._gpus.rim_match",
    "parse_gpu_report": "fastrack.attest._gpus.report",
    "parse_rim": "fastrack.attest._gpus.rim",
    "parse_snp_report": "fastrack.attest._cpu.snp_report",
    "parse_tdx_quote": "fastrack.attest._cpu.tdx_quote",
    "verify_gpu_report": "fastrack.attest._gpus.evidence",
    "verify_ocsp_response": "fastrack.attest._formats.ocsp",
    "verify_offer": "fastrack.attest._exchange",
    "verify_rim": "fastrack.attest._gpus.rim",
    "verify_snp_report": "fastrack.attest._cpu.snp",
    "verify_tdx_quote": "fastrack.attest._cpu.tdx",
}


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
