"""Verify offers and evidence of machines for their owner: everything at one time, under a policy and its roots."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeAlias

from fastrack._util.public import public
from fastrack.attest._cpu.kind import CpuKind
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._device_collateral import DeviceCollateral, require_own_folder
from fastrack.attest._errors import refused, require_time_zone
from fastrack.attest._formats.roots import AMD_ROOTS, INTEL_ROOTS, NVIDIA_RIM_ROOTS, NVIDIA_ROOTS, Roots
from fastrack.attest._gpus.evidence import VerifiedGpuReport, verify_gpu_report
from fastrack.attest._gpus.report import parse_gpu_report
from fastrack.attest._gpus.rim import verify_rim
from fastrack.attest._gpus.rim_match import MatchedGpuReport, match_firmware, match_measurements, report_of
from fastrack.attest._kinds import CpuEvidence, VerifiedCpu, kind_of_evidence, kind_of_verified
from fastrack.attest._offer import Challenge, DeviceEvidence, MachineEvidence, Offer, OfferBinding, open_offer
from fastrack.attest._policy import Policy
from fastrack.attest._policy_gpu import GpuPolicy, find_pinned
from fastrack.grants import Recipient

_EVIDENCE = "offer"
AGAIN = "Ask the owner for a new challenge, and make a new offer for it."
_ALTERED = "The evidence is about another challenge or key, or was altered; make a new offer."


@public
@dataclass(frozen=True, slots=True)
class TrustedRoots:
    """The roots that evidence of each vendor must lead to, as SHA-256 fingerprints, for tests and private PKIs.

    `others` has those of other vendors of CPUs, by their names. By default all are the vendors' own.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.TrustedRoots().intel == attest.INTEL_ROOTS
    True
    """

    intel: Roots = INTEL_ROOTS
    amd: Roots = AMD_ROOTS
    nvidia: Roots = NVIDIA_ROOTS
    nvidia_rim: Roots = NVIDIA_RIM_ROOTS
    others: Mapping[str, Roots] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        # They would be passed over, and the vendor's own roots trusted.
        if wrong := self.others.keys() & {"intel", "amd", "nvidia", "nvidia_rim"}:
            raise ValueError(
                f"others=: expected other vendors, got {', '.join(sorted(wrong))}. Pass these by their names"
            )
        if None in (self.intel, self.amd, self.nvidia, self.nvidia_rim):
            raise ValueError(
                "trusted roots: expected a set of digests of each vendor, got None. An empty one trusts none"
            )


VENDOR_ROOTS = TrustedRoots()


@public
@dataclass(frozen=True, slots=True)
class VerifiedOffer:
    """An offer of which everything was verified, and which a policy accepts. `issue_grants` encrypts keys to it.

    It answers the challenge `challenge_id`. The evidence is bound to the public key `recipient`; `cpu` and `devices`
    are what was proved. `fastrack.attest` describes the times, to which the end of the challenge counts. `require` is
    that of the policy's section ``[gpu]``: which GPUs the keys will open on. `pinned` has the chips whose measurements
    the policy knows by itself, as NVIDIA's manifest of their driver was not there.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.VerifiedOffer.__match_args__
    ('challenge_id', 'recipient', 'cpu', 'devices', 'verified_at', 'valid_until')
    """

    challenge_id: str
    recipient: Recipient
    cpu: VerifiedCpu = field(repr=False)
    devices: tuple[MatchedGpuReport | VerifiedGpuReport, ...] = field(repr=False)
    verified_at: datetime
    valid_until: datetime
    require: str | None = field(default=None, kw_only=True)
    pinned: frozenset[str] = field(default=frozenset(), kw_only=True)

    def describe(self) -> dict[str, object]:
        """Return the main claims as text and numbers, for logs and displays. None is a secret."""
        kind = kind_of_verified(self.cpu)
        return {
            "challenge": self.challenge_id,
            "recipient": self.recipient.id,
            "cpu": {"type": kind.name, **kind.describe(self.cpu)},
            "devices": [_describe_device(device, self.pinned) for device in self.devices],
            "verified_at": self.verified_at.isoformat(),
            "valid_until": self.valid_until.isoformat(),
        }


def _describe_device(device: MatchedGpuReport | VerifiedGpuReport, pinned: Collection[str]) -> dict[str, object]:
    """Return the claims of a device, those that NVIDIA has for its own tokens (EAT, RFC 9711) by its names."""
    report = report_of(device)
    claims: dict[str, object] = {
        "chip": report.chip,
        "chip_id": report.chip_id,
        "driver": report.driver_version,
        "vbios": report.vbios_version,
        "mode": None if report.mode is None else str(report.mode),
        "hwmodel": report.model,
        "ueid": str(report.ueid),
    }
    if isinstance(device, MatchedGpuReport):
        claims["measres"] = "success"  # compared with reference manifests, and equal
    elif report.chip_id in pinned:
        claims["measres"] = "pinned"  # no word of NVIDIA's
    return claims


@public
def verify_offer(
    offer: Offer | bytes,
    challenge: Challenge,
    policy: Policy,
    *,
    now: datetime,
    collateral: TdxCollateral | str | os.PathLike[str] | None = None,
    roots: TrustedRoots = VENDOR_ROOTS,
) -> VerifiedOffer:
    """Verify an offer: its binding to the challenge and the key, all evidence in it, and the policy.

    The report data of the CPU is that of this challenge, this key and these reports of devices; each device's nonce is
    its own; evidence and collateral are signed by the vendors and in force at `now`; the policy accepts the machine.
    Whether the challenge was used before, the caller has to know. `fastrack.attest` describes the other parameters and
    the errors.

    Parameters
    ----------
    offer : Offer or bytes
        The offer.
    challenge : Challenge
        The challenge that it has to answer, as the owner made it.
    policy : Policy
        The proofs that are asked for.
    collateral : TdxCollateral or path-like, optional
        The owner's collateral, or a folder of it, as `fetch_collateral` fills it. It is used in place of the machine's:
        a machine that is refused by a new document could send an older one. Of the CPU nothing else counts but the leaf
        of SEV-SNP; of a GPU what the folder lacks is the machine's. By default all is the machine's.
    roots : TrustedRoots
        The roots that are trusted; the vendors' by default.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> import fastrack
    >>> from fastrack import attest
    >>> now = datetime(2026, 6, 1, tzinfo=UTC)
    >>> challenge, other = (attest.Challenge.generate(now=now) for _ in range(2))
    >>> pending = attest.make_offer(other, lambda binding: attest.MachineEvidence(attest.TdxEvidence(b"quote")))
    >>> try:
    ...     attest.verify_offer(pending.offer, challenge, attest.Policy(), now=now)
    ... except fastrack.AttestationError as error:
    ...     print(error.evidence, error.field)
    offer challenge
    """
    return accept_offer(prove_offer(offer, challenge, now, collateral, roots), challenge, policy, now)


ProvedOffer: TypeAlias = tuple[Offer, VerifiedCpu, tuple[MatchedGpuReport | VerifiedGpuReport, ...]]
"""An offer, and what its CPU and its devices have proved. Whether a policy accepts it is open."""


def accept_offer(proved: ProvedOffer, challenge: Challenge, policy: Policy, now: datetime) -> VerifiedOffer:
    """Return an offer that a policy accepts; raise AttestationError of the first thing that it does not accept."""
    offer, cpu, devices = proved
    policy.check_cpu(cpu, now=now)
    policy.check_gpus(devices, now=now)
    rims = [rim for device in devices if isinstance(device, MatchedGpuReport) for rim in device.rims]
    ends = [*(report_of(device).valid_until for device in devices), *(rim.valid_until for rim in rims)]
    rules = policy.gpu or GpuPolicy()
    pins = {report_of(device).chip_id: pin for device in devices if (pin := find_pinned(rules, device)) is not None}
    valid_until = min(challenge.expires, cpu.valid_until, *ends, *(pin.until for pin in pins.values()))
    return VerifiedOffer(
        offer.challenge_id,
        offer.recipient,
        cpu,
        devices,
        now,
        valid_until,
        require=rules.require,
        pinned=frozenset(pins),
    )


def prove_offer(
    offer: Offer | bytes,
    challenge: Challenge,
    now: datetime,
    collateral: TdxCollateral | str | os.PathLike[str] | None,
    roots: TrustedRoots,
) -> ProvedOffer:
    """Verify all of an offer but whether a policy accepts it."""
    require_time_zone(now)
    offer = open_offer(offer)
    if offer.challenge_id != challenge.id:
        raise refused(_EVIDENCE, "challenge", wanted=challenge.id, found=offer.challenge_id, advice=AGAIN)
    if now >= challenge.expires:
        wanted = f"an offer before {challenge.expires.isoformat()}"
        raise refused(_EVIDENCE, "challenge", wanted=wanted, found=f"one at {now.isoformat()}", advice=AGAIN)
    try:
        offer.recipient.encrypt(b"", b"")
    except ValueError as error:  # as for keys of X25519 of low order
        wanted = "a key that can be encrypted to"
        raise refused(_EVIDENCE, "public key", wanted=wanted, found=str(error), advice=AGAIN) from None
    binding = OfferBinding(challenge, offer.recipient)
    kind, report_data = kind_of_evidence(offer.evidence.cpu), binding.report_data(offer.evidence.devices)
    _require_report_data(kind.title, kind.report_data(offer.evidence.cpu), report_data)  # first, as that is cheap
    cpu: VerifiedCpu = kind.verify(complete_cpu(offer.evidence.cpu, collateral), now, _roots_of(kind, roots))
    _require_report_data(kind.title, cpu.report_data, report_data)
    devices = tuple(
        _verify_device(device, index, binding.device_nonce(index), now, roots)
        for index, device in enumerate(complete_devices(offer.evidence.devices, collateral))
    )
    return offer, cpu, devices


@public
def verify_evidence(
    evidence: MachineEvidence,
    *,
    now: datetime,
    collateral: TdxCollateral | str | os.PathLike[str] | None = None,
    roots: TrustedRoots = VENDOR_ROOTS,
) -> tuple[VerifiedCpu, tuple[MatchedGpuReport | VerifiedGpuReport, ...]]:
    """Verify evidence by itself, to look at it or to draft a policy: not whether it is fresh, or of one machine.

    Nothing is compared with a challenge, so this is no reason to give anyone a key: `verify_offer` is. Parameters and
    errors are those of `verify_offer`.

    Returns
    -------
    tuple
        What the CPU has proved, and a tuple of what GPUs and switches have.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> import fastrack
    >>> from fastrack import attest
    >>> evidence = attest.MachineEvidence(attest.TdxEvidence(b"quote"))
    >>> try:
    ...     attest.verify_evidence(evidence, now=datetime(2026, 6, 1, tzinfo=UTC))
    ... except fastrack.AttestationError as error:
    ...     print(error.field)
    TDX collateral
    """
    require_time_zone(now)
    kind = kind_of_evidence(evidence.cpu)
    cpu: VerifiedCpu = kind.verify(complete_cpu(evidence.cpu, collateral), now, _roots_of(kind, roots))
    return cpu, tuple(
        _verify_device(device, index, parse_gpu_report(device.report).nonce, now, roots)
        for index, device in enumerate(complete_devices(evidence.devices, collateral))
    )


def complete_cpu(evidence: CpuEvidence, collateral: TdxCollateral | str | os.PathLike[str] | None) -> CpuEvidence:
    """Return a CPU's evidence with the owner's collateral in place of all of the machine's, if there is an owner's."""
    if collateral is None:
        return evidence
    kind = kind_of_evidence(evidence)
    if not isinstance(collateral, TdxCollateral):
        collateral = Path(collateral)
        if not collateral.is_dir():  # which would be the machine's collateral, unheard
            problem = "expected a folder of collateral, got none. Name that of `fastrack attest fetch`"
            raise NotADirectoryError(errno.ENOTDIR, problem, str(collateral))
        require_own_folder(collateral)
    bare = kind.bare(evidence)
    cpu: CpuEvidence = kind.complete(bare, collateral)
    if cpu is bare:  # its owner would believe that it decides
        advice = "Fetch for this machine: fastrack attest fetch."
        raise refused(kind.title, "collateral", wanted="some of the owner's for it", found="none", advice=advice)
    return cpu


def complete_devices(
    devices: tuple[DeviceEvidence, ...], collateral: TdxCollateral | str | os.PathLike[str] | None
) -> tuple[DeviceEvidence, ...]:
    """Return the evidence of devices with the manifests and responses of the owner's folder in place of theirs.

    What lacks there is looked for in those that the machine sent, which are opened for it: its CPU has to be verified.
    """
    if not devices or collateral is None or isinstance(collateral, TdxCollateral):
        return devices
    return tuple(map(DeviceCollateral(Path(collateral)).complete, devices))


def _roots_of(kind: CpuKind[Any, Any, Any], trusted: TrustedRoots) -> Roots:
    """Return the roots of a kind of CPU. An empty set trusts none, and does not stand for the default."""
    roots: Roots = getattr(trusted, kind.vendor, trusted.others.get(kind.vendor, kind.roots))
    return roots


def _require_report_data(evidence: str, found: bytes, wanted: bytes) -> None:
    if not compare_digest(found, wanted):
        raise refused(evidence, "report data", wanted=wanted, found=found, advice=_ALTERED)


def _verify_device(
    device: DeviceEvidence, index: int, nonce: bytes, now: datetime, roots: TrustedRoots
) -> MatchedGpuReport | VerifiedGpuReport:
    report = verify_gpu_report(
        device.report,
        device.chain,
        nonce=nonce,
        now=now,
        roots=roots.nvidia,
        ocsp=device.ocsp,
        evidence=f"GPU {index} report",
    )
    if not device.manifests:
        return report
    evidence = f"reference manifest of GPU {index}"
    rims = [
        verify_rim(one.data, now=now, roots=roots.nvidia_rim, ocsp=one.ocsp, evidence=evidence)
        for one in device.manifests
    ]
    if report.is_switch or any(one.rim.version.upper() == str(report.driver_version).upper() for one in rims):
        return match_measurements(report, rims)
    return match_firmware(report, rims)
