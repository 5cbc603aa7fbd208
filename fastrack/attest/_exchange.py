"""Give an owner's keys to a machine that has proved what it is: challenge, offer, verified offer, grants, key ring.

1. The owner makes a `Challenge`.
2. The machine calls `make_offer`: a fresh key pair of HPKE, and evidence that is bound to it and to the challenge.
3. The owner calls `verify_offer`, which verifies everything at one time under a `Policy`, and `issue_grants`, which
   encrypts keys to the public key of the offer and signs the result.
4. The machine calls `PendingOffer.unlock`. Its secret key has never left the process.

Nothing here remembers which challenges were used: the owner does, as the broker and ``fastrack attest grant`` do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hmac import compare_digest
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from fastrack._documents.exchange import decode, encode
from fastrack._documents.fields import ID, binary, list_of
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._util.fork import register_fork_reset
from fastrack._util.gate import most_bytes
from fastrack._util.public import public
from fastrack.attest._cpu.kind import CpuKind
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._device_collateral import DeviceCollateral, require_own_folder
from fastrack.attest._errors import refused, require_in_force, require_time_zone
from fastrack.attest._formats.roots import AMD_ROOTS, INTEL_ROOTS, NVIDIA_RIM_ROOTS, NVIDIA_ROOTS, Roots
from fastrack.attest._gpus.evidence import VerifiedGpuReport, verify_gpu_report
from fastrack.attest._gpus.report import parse_gpu_report
from fastrack.attest._gpus.rim import verify_rim
from fastrack.attest._gpus.rim_match import MatchedGpuReport, match_measurements, report_of
from fastrack.attest._kinds import CpuEvidence, VerifiedCpu, kind_of_evidence, kind_of_verified
from fastrack.attest._offer import (
    ALGORITHM,
    Challenge,
    DeviceEvidence,
    MachineEvidence,
    Offer,
    OfferBinding,
    open_offer,
)
from fastrack.attest._policy import Policy
from fastrack.errors import ClosedError, FormatError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier

GRANTS_KIND = "fastrack/grants"
GRANTS_LIMIT = most_bytes("fastrack grants")
GRANT_LIFETIME = timedelta(minutes=5)

_VERSION = 1
_KEYS_LIMIT = 1024
_ENVELOPES = list_of(binary(most_bytes("grant")), _KEYS_LIMIT)
_EVIDENCE = "offer"
_AGAIN = "Ask the owner for a new challenge, and make a new offer for it."
_ALTERED = "The evidence is about another challenge or key, or was altered; make a new offer."

Collector: TypeAlias = Callable[[OfferBinding], MachineEvidence]
"""The type of ``collect=``: a function that asks a machine for evidence which has the values of a binding."""


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


# The machine's side.


@public
class PendingOffer:
    """An offer with the secret key of the machine that made it, which waits for its grants. `make_offer` makes one.

    It can be neither pickled nor copied, and is empty in a forked child.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> challenge = attest.Challenge.generate(now=datetime(2026, 6, 1, tzinfo=UTC))
    >>> pending = attest.make_offer(challenge, lambda binding: attest.MachineEvidence(attest.TdxEvidence(b"quote")))
    >>> attest.Offer.from_bytes(pending.to_bytes()) == pending.offer
    True
    """

    __slots__ = ("__weakref__", "_identity", "offer")

    def __init__(self, offer: Offer, identity: Identity) -> None:
        self.offer = offer
        self._identity: Identity | None = identity
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the secret key, which stays in the process that made it."""
        self._identity = None

    def to_bytes(self) -> bytes:
        """Return the document of the offer, to be sent to the owner."""
        return self.offer.to_bytes()

    def unlock(self, grants: bytes, *, owner: Verifier | Iterable[Verifier], now: datetime | None = None) -> KeyRing:
        """Return the keys that the owner granted to this offer, and forget the secret key.

        Parameters
        ----------
        grants : bytes
            The document that `issue_grants` made.
        owner : Verifier or iterable of Verifier
            The public keys of the owners that are trusted.
        now : datetime.datetime, optional
            The time to compare the end of the grants with. By default that of the clock.

        Raises
        ------
        SignatureError, GrantError, AttestationError, FormatError
            If no trusted owner signed them; they have expired, or are for another machine; they are for another
            challenge; or they are not a document of grants.
        ClosedError
            If the keys were unlocked before, or this is a forked child.
        """
        if self._identity is None:
            raise ClosedError(
                "unlocking grants failed: expected an offer that waits for its grants, got one whose secret key was "
                "used before or stayed in the parent process. Make a new offer."
            )
        owners = (owner,) if isinstance(owner, Verifier) else tuple(owner)
        found, envelopes = read_envelopes(grants)
        if found != self.offer.challenge_id:
            raise refused("grants", "challenge", wanted=self.offer.challenge_id, found=found, advice=_AGAIN)
        opened = [Grants.from_bytes(envelope, owner=owners) for envelope in envelopes]
        ring = KeyRing([one.unlock(self._identity, now=now) for one in opened])
        self._identity = None
        return ring

    def __reduce__(self) -> NoReturn:
        raise TypeError("an offer with its secret key stays in its process and cannot be pickled or copied")

    def __repr__(self) -> str:
        state = "waiting" if self._identity is not None else "done"
        return f"<PendingOffer for challenge {self.offer.challenge_id}, {state}>"


def read_envelopes(grants: bytes) -> tuple[str, tuple[bytes, ...]]:
    """Return the id of the challenge, and one or more signed grants, in a document of grants. Nothing is verified."""
    document = decode(grants, GRANTS_KIND, _VERSION, ("challenge", "grants"))
    envelopes = document.read("grants", _ENVELOPES)
    if not envelopes:
        raise document.member("grants").refusal("one or more", "none")
    return document.read("challenge", ID), envelopes


@public
def make_offer(challenge: Challenge, collect: Collector) -> PendingOffer:
    """Make a fresh key pair, and collect evidence of this machine that is bound to it and to a challenge.

    Parameters
    ----------
    challenge : Challenge
        The owner's challenge.
    collect : callable
        A function that takes an `OfferBinding` and returns `MachineEvidence`, such as `collect_evidence`, which raises
        `DeviceError` if the machine cannot give any.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> challenge = attest.Challenge.generate(now=datetime(2026, 6, 1, tzinfo=UTC))
    >>> def collect(binding):
    ...     return attest.MachineEvidence(attest.TdxEvidence(b"a quote with " + binding.report_data([])))
    >>> attest.make_offer(challenge, collect).offer.challenge_id == challenge.id
    True
    """
    identity = Identity.generate(ALGORITHM)
    evidence = collect(OfferBinding(challenge, identity.recipient))
    return PendingOffer(Offer(challenge.id, identity.recipient, evidence), identity)


# The owner's side.


@public
@dataclass(frozen=True, slots=True)
class VerifiedOffer:
    """An offer of which everything was verified, and which a policy accepts. `issue_grants` encrypts keys to it.

    It answers the challenge `challenge_id`. The evidence is bound to the public key `recipient`; `cpu` and `devices`
    are what was proved. `fastrack.attest` describes the times, to which the end of the challenge counts.

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

    def describe(self) -> dict[str, object]:
        """Return the main claims as text and numbers, for logs and displays. None is a secret."""
        kind = kind_of_verified(self.cpu)
        return {
            "challenge": self.challenge_id,
            "recipient": self.recipient.id,
            "cpu": {"type": kind.name, **kind.describe(self.cpu)},
            "devices": [_describe_device(device) for device in self.devices],
            "verified_at": self.verified_at.isoformat(),
            "valid_until": self.valid_until.isoformat(),
        }


def _describe_device(device: MatchedGpuReport | VerifiedGpuReport) -> dict[str, object]:
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
    valid_until = min(challenge.expires, cpu.valid_until, *ends)
    return VerifiedOffer(offer.challenge_id, offer.recipient, cpu, devices, now, valid_until)


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
        raise refused(_EVIDENCE, "challenge", wanted=challenge.id, found=offer.challenge_id, advice=_AGAIN)
    if now >= challenge.expires:
        wanted = f"an offer before {challenge.expires.isoformat()}"
        raise refused(_EVIDENCE, "challenge", wanted=wanted, found=f"one at {now.isoformat()}", advice=_AGAIN)
    try:
        offer.recipient.encrypt(b"", b"")
    except ValueError as error:  # as for keys of X25519 of low order
        wanted = "a key that can be encrypted to"
        raise refused(_EVIDENCE, "public key", wanted=wanted, found=str(error), advice=_AGAIN) from None
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
    if hasattr(trusted, kind.vendor):
        roots: Roots = getattr(trusted, kind.vendor)
        return roots
    return trusted.others.get(kind.vendor, kind.roots)


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
    return match_measurements(report, rims)


@public
def issue_grants(
    verified: VerifiedOffer,
    keys: KeyRing | Key | Iterable[Key],
    *,
    signer: Signer,
    now: datetime,
    lifetime: timedelta = GRANT_LIFETIME,
    files: Iterable[str] | None = None,
) -> bytes:
    """Encrypt keys to the public key of a verified offer, sign them, and return the document for the machine.

    Parameters
    ----------
    verified : VerifiedOffer
        The offer, as `verify_offer` returned it.
    keys : KeyRing, Key or iterable of Key
        The keys. Of a ring those that it holds, or else the key that it seals with.
    signer : Signer
        The owner's signing key.
    now : datetime.datetime
        The time, with a time zone.
    lifetime : datetime.timedelta
        The time until which the machine must have opened them.
    files : iterable of str, optional
        The ids of the sealed files that the keys may open. By default all.

    Raises
    ------
    AttestationError, TypeError, ValueError
        If the offer is no longer valid; was not verified; or there is no key, `now` has no time zone, or `lifetime` is
        not positive.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> import fastrack
    >>> from fastrack import attest
    >>> from fastrack.grants import Signer
    >>> attest.issue_grants(b"offer", fastrack.Key.generate(), signer=Signer.generate(), now=datetime.now(UTC))
    Traceback (most recent call last):
        ...
    TypeError: expected VerifiedOffer, got bytes; verify it first, with verify_offer
    """
    given: object = verified  # as callers without a type checker may pass anything
    if not isinstance(given, VerifiedOffer):
        found = type(given).__name__
        raise TypeError(f"expected VerifiedOffer, got {found}; verify it first, with verify_offer")
    require_time_zone(now)
    if lifetime < timedelta(seconds=1):
        raise ValueError(f"expected lifetime= of a second or more, got {lifetime}")
    require_in_force(_EVIDENCE, "validity", verified.verified_at, verified.valid_until, now, _AGAIN)
    granted = [keys] if isinstance(keys, Key) else list(keys)
    if isinstance(keys, KeyRing) and not granted:
        granted = [keys.first]
    if not granted or len(granted) > _KEYS_LIMIT:
        raise ValueError(f"issuing grants failed: expected 1 to {_KEYS_LIMIT} keys, got {len(granted)}")
    expires = (now + lifetime).astimezone(UTC)
    return _write_grants(verified.challenge_id, verified.recipient, granted, signer, files, expires)


def check_files(files: Iterable[str] | None, keys: Iterable[Key], signer: Signer) -> None:
    """Raise ValueError unless a machine could read grants of these keys for these files: make some for no machine."""
    recipient, expires = Identity.generate(ALGORITHM).recipient, datetime.now(UTC).replace(microsecond=0)
    _write_grants("0" * 32, recipient, list(keys), signer, files, expires)


def _write_grants(
    challenge_id: str,
    recipient: Recipient,
    keys: list[Key],
    signer: Signer,
    files: Iterable[str] | None,
    expires: datetime,
) -> bytes:
    files = None if files is None else tuple(files)
    issued = (Grants.issue(key, [recipient], signer=signer, files=files, expires=expires) for key in keys)
    envelopes = _ENVELOPES.write(tuple(grants.envelope for grants in issued))
    document = encode(GRANTS_KIND, _VERSION, {"challenge": challenge_id, "grants": envelopes})
    try:
        read_envelopes(document)  # by the limits of the machine that has to
    except FormatError as error:
        raise ValueError(
            f"issuing grants failed: expected as many keys and files as a machine reads, got {len(keys)} keys for "
            f"{'all' if files is None else len(files)} files: {error} Grant fewer keys, or fewer and larger files"
        ) from None
    return document
