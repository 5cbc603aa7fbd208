# The public names and the modules that they come from, for type checkers and for `__init__.py`, which reads this file.
from fastrack.attest._client import fetch_keys as fetch_keys
from fastrack.attest._collect import collect_evidence as collect_evidence
from fastrack.attest._cpu.event_log import EventLog as EventLog, EventRule as EventRule, MeasuredEvent as MeasuredEvent
from fastrack.attest._cpu.snp import VerifiedSnpReport as VerifiedSnpReport, verify_snp_report as verify_snp_report
from fastrack.attest._cpu.snp_kind import SnpEvidence as SnpEvidence, SnpPolicy as SnpPolicy
from fastrack.attest._cpu.snp_report import (
    SnpProduct as SnpProduct,
    SnpReport as SnpReport,
    SnpTcb as SnpTcb,
    parse_snp_report as parse_snp_report,
)
from fastrack.attest._cpu.tdx import VerifiedTdxQuote as VerifiedTdxQuote, verify_tdx_quote as verify_tdx_quote
from fastrack.attest._cpu.tdx_collateral import (
    TcbLevel as TcbLevel,
    TcbStatus as TcbStatus,
    TdxCollateral as TdxCollateral,
    TdxTcb as TdxTcb,
)
from fastrack.attest._cpu.tdx_kind import TdxEvidence as TdxEvidence, TdxPolicy as TdxPolicy
from fastrack.attest._cpu.tdx_pck import PckIdentity as PckIdentity
from fastrack.attest._cpu.tdx_quote import (
    TdReport as TdReport,
    TdxQuote as TdxQuote,
    parse_tdx_quote as parse_tdx_quote,
)
from fastrack.attest._draft import compare_policies as compare_policies, draft_policy as draft_policy
from fastrack.attest._exchange import (
    PendingOffer as PendingOffer,
    issue_grants as issue_grants,
    make_offer as make_offer,
)
from fastrack.attest._verify_offer import (
    TrustedRoots as TrustedRoots,
    VerifiedOffer as VerifiedOffer,
    verify_evidence as verify_evidence,
    verify_offer as verify_offer,
)
from fastrack.attest._fetch.collateral import (
    CollateralServices as CollateralServices,
    FetchedDocument as FetchedDocument,
    fetch_collateral as fetch_collateral,
)
from fastrack.attest._formats.ocsp import (
    VerifiedOcspResponse as VerifiedOcspResponse,
    verify_ocsp_response as verify_ocsp_response,
)
from fastrack.attest._formats.roots import (
    AMD_ROOTS as AMD_ROOTS,
    INTEL_ROOTS as INTEL_ROOTS,
    NVIDIA_RIM_ROOTS as NVIDIA_RIM_ROOTS,
    NVIDIA_ROOTS as NVIDIA_ROOTS,
)
from fastrack.attest._gpus.evidence import (
    GpuMode as GpuMode,
    VerifiedGpuReport as VerifiedGpuReport,
    verify_gpu_report as verify_gpu_report,
)
from fastrack.attest._gpus.identity import GpuArchitecture as GpuArchitecture
from fastrack.attest._gpus.report import GpuReport as GpuReport, parse_gpu_report as parse_gpu_report
from fastrack.attest._gpus.rim import (
    Rim as Rim,
    RimMeasurement as RimMeasurement,
    VerifiedRim as VerifiedRim,
    parse_rim as parse_rim,
    verify_rim as verify_rim,
)
from fastrack.attest._gpus.rim_match import (
    MatchedGpuReport as MatchedGpuReport,
    match_measurements as match_measurements,
)
from fastrack.attest._lease import Lease as Lease, lease_keys as lease_keys
from fastrack.attest._offer import (
    Challenge as Challenge,
    DeviceEvidence as DeviceEvidence,
    MachineEvidence as MachineEvidence,
    ManifestEvidence as ManifestEvidence,
    Offer as Offer,
    OfferBinding as OfferBinding,
)
from fastrack.attest._policy import Policy as Policy
from fastrack.attest._policy_common import Revocation as Revocation
from fastrack.attest._policy_gpu import GpuPolicy as GpuPolicy, PinnedMeasurements as PinnedMeasurements
from fastrack.errors import AttestationError as AttestationError
