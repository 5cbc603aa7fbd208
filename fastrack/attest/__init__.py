"""Verification of attestation evidence of confidential machines, offline.

Evidence, certificates, collateral and the time are all arguments: no function opens a socket, reads a clock or asks a
service. Parsers return values that nothing vouches for, such as `TdxQuote`; verifiers raise
`fastrack.AttestationError`, or return a type of its own, such as `VerifiedTdxQuote`, that says what was proved. A
`Policy` then judges what was proved.

Parsers and verifiers raise `FormatError` if a structure is malformed; the message has the field and its offset. What
does not hold is an `AttestationError`, which has the evidence, the field, and the values wanted and found. All
verifiers take `now`, the time with a time zone (else a `ValueError`), and where they have them `roots`, the SHA-256
fingerprints of the roots that are trusted, by default the vendor's, `ocsp`, OCSP responses in DER that all certificates
but the root must have, without which revocation is not checked, and `evidence`, a name for errors, such as "GPU 3
report". All that was verified has `verified_at`, the time at which everything was valid, and `valid_until`, the first
time at which a certificate or document is no longer; and some have `revocation_checked_at`, the time of the oldest
revocation list or OCSP response that was used, None if none was passed.

A public name is imported when it is first used.
"""

from fastrack._util.public import lazy
from fastrack.errors import AttestationError  # noqa: F401

_NAMES = {
    "_client": ("fetch_keys",),
    "_collect": ("collect_evidence",),
    "_cpu.event_log": ("EventLog", "EventRule", "MeasuredEvent"),
    "_cpu.snp": ("VerifiedSnpReport", "verify_snp_report"),
    "_cpu.snp_kind": ("SnpEvidence", "SnpPolicy"),
    "_cpu.snp_report": ("SnpProduct", "SnpReport", "SnpTcb", "parse_snp_report"),
    "_cpu.tdx": ("VerifiedTdxQuote", "verify_tdx_quote"),
    "_cpu.tdx_collateral": ("TcbLevel", "TcbStatus", "TdxCollateral", "TdxTcb"),
    "_cpu.tdx_kind": ("TdxEvidence", "TdxPolicy"),
    "_cpu.tdx_pck": ("PckIdentity",),
    "_cpu.tdx_quote": ("TdReport", "TdxQuote", "parse_tdx_quote"),
    "_draft": ("compare_policies", "draft_policy"),
    "_exchange": (
        "PendingOffer",
        "TrustedRoots",
        "VerifiedOffer",
        "issue_grants",
        "make_offer",
        "verify_evidence",
        "verify_offer",
    ),
    "_fetch.collateral": ("CollateralServices", "FetchedDocument", "fetch_collateral"),
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
__all__ = sorted([*_HOMES, "AttestationError"])  # noqa: PLE0605 - one table has them
__getattr__, __dir__ = lazy(__name__, _NAMES, globals())
