"""Challenges and offers: the documents of a machine's request for keys, and the binding of their parts.

An owner sends a `Challenge`. A machine makes a fresh HPKE key pair, asks its devices for evidence with nonces derived
from the challenge and the public key, asks its CPU for evidence that covers all of it, and sends an `Offer`.

`OfferBinding` defines the hashes. All hashes are over strings of this form, which differ for different inputs::

    label || part 1 || part 2 || ...         each part: its length in 4 bytes, big-endian, and its bytes

Labels are ASCII without a terminator, and no label is a prefix of another. Lists have no label, and these parts::

    device    = list(report, chain, responses, list(manifest 0, manifest 1, ...))
    manifest  = list(data, responses)
    responses = list() if there are none, else list(list(OCSP response 0, OCSP response 1, ...))

The collateral of the CPU is not bound: it may come from the owner, and its issuers sign all of it.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import sha256, sha384, sha512
from typing import Any, Self

from fastrack._documents import exchange, fields
from fastrack._documents.fields import Field, FieldError, Fields
from fastrack._util.gate import most_bytes
from fastrack._util.public import public
from fastrack.attest._errors import malformed, require_time_zone
from fastrack.attest._kinds import CPU_KINDS, CpuEvidence, kind_of_evidence
from fastrack.grants import Recipient

CHALLENGE_KIND, OFFER_KIND = "fastrack/challenge", "fastrack/offer"
ALGORITHM = "MLKEM768_X25519"
OFFER_LIMIT = most_bytes("fastrack offer")
BEGINNING_SIZE = len('{"challenge":"') + 32  # bytes of an offer up to its challenge's id
CHALLENGE_LIMIT = most_bytes("fastrack challenge")
DEVICES_LIMIT = 32  # GPUs and switches of a machine
DEFAULT_LIFETIME = timedelta(minutes=5)
LONGEST_LIFETIME = timedelta(days=7)

_BEGINNING = re.compile(rb'\{"challenge":"([0-9a-f]{32})')
_VERSION = 1
_NONCE_SIZE = 32
_ID_SIZE = 16
_PUBLIC_SIZE = 1216
_OCSP_LIMIT = most_bytes("OCSP response")
_OCSP_COUNT = 16
_MANIFESTS_LIMIT = 2 * DEVICES_LIMIT
_OWN_MANIFESTS_LIMIT = 4  # of a device: each is opened for each device that names it
_CHALLENGE: Fields = {"nonce": fields.binary(_NONCE_SIZE, _NONCE_SIZE), "id": fields.ID, "expires": fields.TIME}


@public
@dataclass(frozen=True, slots=True)
class Challenge:
    """The start of an exchange: 32 random bytes of the owner, which the evidence must cover.

    An offer names it by `id`, 32 hexadecimal digits. It `expires` at a time in whole seconds of UTC.

    Examples
    --------
    >>> from datetime import UTC, datetime, timedelta
    >>> from fastrack import attest
    >>> challenge = attest.Challenge.generate(now=datetime(2026, 6, 1, tzinfo=UTC), lifetime=timedelta(minutes=2))
    >>> challenge.expires.isoformat()
    '2026-06-01T00:02:00+00:00'
    >>> attest.Challenge.from_bytes(challenge.to_bytes()) == challenge
    True
    """

    id: str
    nonce: bytes
    expires: datetime

    @classmethod
    def generate(cls, *, now: datetime, lifetime: timedelta = DEFAULT_LIFETIME) -> Self:
        """Make a new challenge.

        Parameters
        ----------
        now : datetime.datetime
            The time, with a time zone, else a `ValueError`.
        lifetime : datetime.timedelta
            The time limit for an offer: a second to seven days, else a `ValueError`.
        """
        require_time_zone(now)
        if not timedelta(seconds=1) <= lifetime <= LONGEST_LIFETIME:
            raise ValueError(f"expected lifetime= from one second to {LONGEST_LIFETIME}, got {lifetime}")
        expires = (now + lifetime).replace(microsecond=0)
        return cls(os.urandom(_ID_SIZE).hex(), os.urandom(_NONCE_SIZE), expires)

    def to_bytes(self) -> bytes:
        """Return the canonical document."""
        return exchange.encode(CHALLENGE_KIND, _VERSION, fields.write_members(self, _CHALLENGE))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a document. Raise `FormatError` if it is not a canonical challenge."""
        return cls(**exchange.decode(data, CHALLENGE_KIND, _VERSION, _CHALLENGE).read_all(_CHALLENGE))


@public
@dataclass(frozen=True, slots=True)
class ManifestEvidence:
    """A reference manifest, with OCSP responses in DER; None to skip the check of revocation.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.ManifestEvidence(b"<SoftwareIdentity/>").ocsp is None
    True
    """

    data: bytes = field(repr=False)
    ocsp: tuple[bytes, ...] | None = field(default=None, repr=False)


@public
@dataclass(frozen=True, slots=True)
class DeviceEvidence:
    """The report of a GPU or NVSwitch with its certificates in PEM.

    The report's nonce is `OfferBinding.device_nonce`. `manifests` are the reference manifests for this device; an offer
    has equal manifests only once. `ocsp` has OCSP responses in DER; None to skip the check of revocation.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.DeviceEvidence(b"report", b"chain").manifests
    ()
    """

    report: bytes = field(repr=False)
    chain: bytes = field(repr=False)
    manifests: tuple[ManifestEvidence, ...] = ()
    ocsp: tuple[bytes, ...] | None = field(default=None, repr=False)


@public
@dataclass(frozen=True, slots=True)
class MachineEvidence:
    """The evidence of a CPU and of its GPUs and switches, in the order of their indexes.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.MachineEvidence(attest.TdxEvidence(b"quote")).devices
    ()
    """

    cpu: CpuEvidence
    devices: tuple[DeviceEvidence, ...] = ()


@public
@dataclass(frozen=True, slots=True)
class OfferBinding:
    """The values required in the evidence of an offer, for one challenge and one public key.

    Every hash is over a label and parts, each after its length in 4 bytes, big-endian. "challenge" is the canonical
    document of the challenge, "public key" the 1216 raw bytes of the HPKE key (ML-KEM-768, then
    X25519), and "index" 4 bytes, big-endian, counted from 0 in the order of the offer.

    Examples
    --------
    >>> from datetime import UTC, datetime
    >>> from fastrack import attest
    >>> from fastrack.grants import Identity
    >>> challenge = attest.Challenge.generate(now=datetime(2026, 6, 1, tzinfo=UTC))
    >>> binding = attest.OfferBinding(challenge, Identity.generate().recipient)
    >>> len(binding.device_nonce(0)), len(binding.report_data([]))
    (32, 64)
    """

    challenge: Challenge
    recipient: Recipient

    def device_nonce(self, index: int) -> bytes:
        """Return the nonce for the report of a device: SHA-256("fastrack/gpu@1", challenge, public key, index)."""
        parts = (self.challenge.to_bytes(), self.recipient.public, index.to_bytes(4))
        return sha256(_frame(b"fastrack/gpu@1", parts)).digest()

    def report_data(self, devices: Iterable[DeviceEvidence]) -> bytes:
        """Return the 64 bytes for the CPU's evidence, which is collected after the devices.

        They are SHA-512("fastrack/offer@1", challenge, public key, digest), where the digest is
        SHA-384("fastrack/gpus@1", device 0, device 1, ...). A device is the list of its report, its chain, its OCSP
        responses, and its list of manifests with OCSP responses. Lists also have lengths before their parts.
        """
        evidence = _frame(b"fastrack/gpus@1", map(_frame_device, devices))
        parts = (self.challenge.to_bytes(), self.recipient.public, sha384(evidence).digest())
        return sha512(_frame(b"fastrack/offer@1", parts)).digest()


def _frame_device(device: DeviceEvidence) -> bytes:
    manifests = (_frame(b"", (manifest.data, _frame_responses(manifest.ocsp))) for manifest in device.manifests)
    parts = (device.report, device.chain, _frame_responses(device.ocsp), _frame(b"", manifests))
    return _frame(b"", parts)


def _frame_responses(responses: tuple[bytes, ...] | None) -> bytes:
    return b"" if responses is None else _frame(b"", [_frame(b"", responses)])


def _frame(label: bytes, parts: Iterable[bytes]) -> bytes:
    return b"".join([label, *(len(part).to_bytes(4) + part for part in parts)])


@public
@dataclass(frozen=True, slots=True)
class Offer:
    r"""A parsed offer. All values are untrusted: `verify_offer` returns proved values.

    It has the `challenge_id` of its challenge, the machine's public key `recipient`, for encrypting the owner's keys,
    and the `evidence` of CPU and devices.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.Offer.from_bytes(b"{}\n")
    Traceback (most recent call last):
        ...
    fastrack.FormatError: reading the fastrack offer failed: expected a member 'kind' as its content, got none. ...
    """

    challenge_id: str
    recipient: Recipient
    evidence: MachineEvidence

    def to_bytes(self) -> bytes:
        """Return the canonical document. Equal manifests are written once."""
        manifests = tuple(dict.fromkeys(rim for device in self.evidence.devices for rim in device.manifests))
        kind = kind_of_evidence(self.evidence.cpu)
        cpu = fields.write_members(self.evidence.cpu, kind.fields, kind.optional)
        members = {
            "challenge": self.challenge_id,
            "cpu": cpu | {"type": kind.name},
            "devices": _devices(manifests).write(self.evidence.devices),
            "manifests": _MANIFESTS.write(manifests),
            "public": _PUBLIC.write(self.recipient.public),
        }
        return exchange.encode(OFFER_KIND, _VERSION, members)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a document. Raise `FormatError` if it is not a canonical offer of up to 8 MiB."""
        members = ("challenge", "cpu", "devices", "manifests", "public")
        reader = exchange.decode(data, OFFER_KIND, _VERSION, members)
        manifests = reader.read("manifests", _MANIFESTS)
        devices = reader.read("devices", _devices(manifests))
        # Each manifest belongs to a device, and manifests are in the order of first use.
        used = tuple(dict.fromkeys(manifest for device in devices for manifest in device.manifests))
        if used != manifests:
            raise reader.member("manifests").refusal("different ones, each of a device, in their order", "others")
        public = reader.read("public", _PUBLIC)
        evidence = MachineEvidence(reader.read("cpu", _CPU), devices)
        return cls(reader.read("challenge", fields.ID), Recipient(ALGORITHM, public), evidence)


def read_clock() -> datetime:
    """Return the time, by which challenges and grants end."""
    return datetime.now(UTC)


def read_challenge_id(beginning: bytes) -> str:
    """Read the id of the challenge from the first `BEGINNING_SIZE` bytes of an offer, before the rest arrives."""
    match = _BEGINNING.match(beginning)
    if match is None:
        raise malformed("fastrack offer", "beginning", None, wanted="the id of a challenge", found="other text")
    return match[1].decode()


def _read_cpu(value: object) -> CpuEvidence:
    kind = CPU_KINDS.get(name := fields.member_of("type", fields.TEXT).read(value))
    if kind is None:
        raise FieldError(" or ".join(CPU_KINDS), f"{name:.40}", "type")
    members = fields.read_members(value, {**kind.fields, "type": fields.TEXT}, kind.optional)
    del members["type"]
    evidence: CpuEvidence = kind.evidence(**members)
    return evidence


def _devices(manifests: Sequence[ManifestEvidence]) -> Field[tuple[DeviceEvidence, ...]]:
    """Return the field of the devices of an offer, which name its manifests by their numbers."""

    def read(value: object) -> tuple[ManifestEvidence, ...]:
        numbers = _OWN_MANIFESTS.read(value)
        known = all(type(number) is int and 0 <= number < len(manifests) for number in numbers)
        if not known or len(set(numbers)) != len(numbers):
            raise FieldError(f"different integers below {len(manifests)}", list(numbers))
        return tuple(manifests[number] for number in numbers)

    members: Fields = {
        "manifests": Field(read, lambda own: [manifests.index(manifest) for manifest in own]),
        "report": fields.binary(exchange.REPORT_LIMIT),
        "chain": fields.binary(exchange.CHAIN_LIMIT),
        "ocsp": _OCSP,
    }
    return fields.list_of(fields.record(DeviceEvidence, members), DEVICES_LIMIT)


_CPU = Field(_read_cpu)
_PUBLIC = fields.binary(_PUBLIC_SIZE, _PUBLIC_SIZE)
_OCSP = fields.or_none(fields.list_of(fields.binary(_OCSP_LIMIT), _OCSP_COUNT))
_MANIFEST: Fields = {"data": fields.binary(exchange.PART_LIMIT), "ocsp": _OCSP}
_MANIFESTS = fields.list_of(fields.record(ManifestEvidence, _MANIFEST), _MANIFESTS_LIMIT)
_OWN_MANIFESTS: Field[tuple[Any, ...]] = fields.list_of(Field(lambda number: number), _OWN_MANIFESTS_LIMIT)


def open_offer(offer: Offer | bytes) -> Offer:
    """Return a parsed offer. Raise `TypeError` for values other than offers and bytes."""
    if isinstance(offer, Offer):
        return offer
    if isinstance(offer, (bytes, bytearray, memoryview)):
        return Offer.from_bytes(bytes(offer))
    raise TypeError(f"expected an Offer or its bytes, got {type(offer).__name__}")
