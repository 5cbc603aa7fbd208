"""Verification of attestation evidence of confidential machines, offline.

Evidence, certificates, collateral and the time are all arguments of parsers and verifiers, which open no socket, read
no clock and ask no service; `fetch_collateral` asks the vendors' services, and `fetch_keys` a broker. Parsers return
untrusted values, such as `TdxQuote`; verifiers raise `fastrack.AttestationError`, or return proved claims as another
type, such as `VerifiedTdxQuote`. A `Policy` then judges these claims.

Parsers and verifiers raise `FormatError` for a malformed structure, with the field and its offset. Failed checks raise
`AttestationError`, with the evidence, the field, and the values wanted and found. All verifiers take `now`, the time
with a time zone (else a `ValueError`). Some take `roots`, the SHA-256 fingerprints of the trusted roots, by default the
vendor's; `ocsp`, OCSP responses in DER for all certificates but the root, without which revocation is not checked; and
`evidence`, a name for errors, such as "GPU 3 report". Verified values have `verified_at`, the time of verification, and
`valid_until`, the first time that a certificate or document expires. Some have `revocation_checked_at`, the time of the
oldest revocation list or OCSP response that was used, None if none was passed.

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
__all__ = sorted([*_HOMES, "AttestationError"])  # noqa: PLE0605 - the names of one table
__getattr__, __dir__ = lazy(__name__, _NAMES, globals())
