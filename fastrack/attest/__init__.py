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
    from fastrack.attest._gpu import GpuMode, VerifiedGpuReport, verify_gpu_report
    from fastrack.attest._gpu_identity import GpuArchitecture
    from fastrack.attest._gpu_report import GpuReport, parse_gpu_report
    from fastrack.attest._match import MatchedGpuReport, match_measurements
    from fastrack.attest._ocsp import VerifiedOcspResponse, verify_ocsp_response
    from fastrack.attest._pck import PckIdentity
    from fastrack.attest._policy import Policy
    from fastrack.attest._policy_common import Revocation
    from fastrack.attest._policy_cpu import SnpPolicy, TdxPolicy
    from fastrack.attest._policy_gpu import GpuPolicy
    from fastrack.attest._rim import Rim, RimMeasurement, VerifiedRim, parse_rim, verify_rim
    from fastrack.attest._roots import AMD_ROOTS, INTEL_ROOTS, NVIDIA_RIM_ROOTS, NVIDIA_ROOTS
    from fastrack.attest._snp import VerifiedSnpReport, verify_snp_report
    from fastrack.attest._snp_report import SnpProduct, SnpReport, SnpTcb, parse_snp_report
    from fastrack.attest._tdx import TdxTcb, VerifiedTdxQuote, verify_tdx_quote
    from fastrack.attest._tdx_collateral import TcbLevel, TcbStatus, TdxCollateral
    from fastrack.attest._tdx_quote import TdReport, TdxQuote, parse_tdx_quote

__all__ = [
    "AMD_ROOTS",
    "INTEL_ROOTS",
    "NVIDIA_RIM_ROOTS",
    "NVIDIA_ROOTS",
    "AttestationError",
    "GpuArchitecture",
    "GpuMode",
    "GpuPolicy",
    "GpuReport",
    "MatchedGpuReport",
    "PckIdentity",
    "Policy",
    "Revocation",
    "Rim",
    "RimMeasurement",
    "SnpPolicy",
    "SnpProduct",
    "SnpReport",
    "SnpTcb",
    "TcbLevel",
    "TcbStatus",
    "TdReport",
    "TdxCollateral",
    "TdxPolicy",
    "TdxQuote",
    "TdxTcb",
    "VerifiedGpuReport",
    "VerifiedOcspResponse",
    "VerifiedRim",
    "VerifiedSnpReport",
    "VerifiedTdxQuote",
    "match_measurements",
    "parse_gpu_report",
    "parse_rim",
    "parse_snp_report",
    "parse_tdx_quote",
    "verify_gpu_report",
    "verify_ocsp_response",
    "verify_rim",
    "verify_snp_report",
    "verify_tdx_quote",
]

_HOMES = {
    "AMD_ROOTS": "fastrack.attest._roots",
    "GpuArchitecture": "fastrack.attest._gpu_identity",
    "GpuMode": "fastrack.attest._gpu",
    "GpuPolicy": "fastrack.attest._policy_gpu",
    "GpuReport": "fastrack.attest._gpu_report",
    "INTEL_ROOTS": "fastrack.attest._roots",
    "MatchedGpuReport": "fastrack.attest._match",
    "NVIDIA_RIM_ROOTS": "fastrack.attest._roots",
    "NVIDIA_ROOTS": "fastrack.attest._roots",
    "PckIdentity": "fastrack.attest._pck",
    "Policy": "fastrack.attest._policy",
    "Revocation": "fastrack.attest._policy_common",
    "Rim": "fastrack.attest._rim",
    "RimMeasurement": "fastrack.attest._rim",
    "SnpPolicy": "fastrack.attest._policy_cpu",
    "SnpProduct": "fastrack.attest._snp_report",
    "SnpReport": "fastrack.attest._snp_report",
    "SnpTcb": "fastrack.attest._snp_report",
    "TcbLevel": "fastrack.attest._tdx_collateral",
    "TcbStatus": "fastrack.attest._tdx_collateral",
    "TdReport": "fastrack.attest._tdx_quote",
    "TdxCollateral": "fastrack.attest._tdx_collateral",
    "TdxPolicy": "fastrack.attest._policy_cpu",
    "TdxQuote": "fastrack.attest._tdx_quote",
    "TdxTcb": "fastrack.attest._tdx",
    "VerifiedGpuReport": "fastrack.attest._gpu",
    "VerifiedOcspResponse": "fastrack.attest._ocsp",
    "VerifiedRim": "fastrack.attest._rim",
    "VerifiedSnpReport": "fastrack.attest._snp",
    "VerifiedTdxQuote": "fastrack.attest._tdx",
    "match_measurements": "fastrack.attest._match",
    "parse_gpu_report": "fastrack.attest._gpu_report",
    "parse_rim": "fastrack.attest._rim",
    "parse_snp_report": "fastrack.attest._snp_report",
    "parse_tdx_quote": "fastrack.attest._tdx_quote",
    "verify_gpu_report": "fastrack.attest._gpu",
    "verify_ocsp_response": "fastrack.attest._ocsp",
    "verify_rim": "fastrack.attest._rim",
    "verify_snp_report": "fastrack.attest._snp",
    "verify_tdx_quote": "fastrack.attest._tdx",
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
