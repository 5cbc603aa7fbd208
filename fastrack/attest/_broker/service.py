"""The decisions of a broker, without HTTP: make challenges, and answer offers with grants."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastrack._documents.canonical import encode
from fastrack._keys.keyring import KeyRing
from fastrack._util import gate
from fastrack.attest import Challenge, Policy, TdxCollateral, TrustedRoots, VerifiedOffer, issue_grants, verify_offer
from fastrack.attest._broker.ledger import Ledger
from fastrack.attest._exchange import check_files
from fastrack.attest._log_head import Head
from fastrack.attest._offer import BEGINNING_SIZE, OFFER_KIND, read_challenge_id, read_clock
from fastrack.errors import AttestationError, FormatError
from fastrack.grants import Signer

_MACHINES = 65_536  # that have a lease, with keys and claims as before; each has an entry of its own


@dataclass(frozen=True, slots=True)
class Settings:
    """The parts of a broker's configuration that do not hold secrets.

    `challenge_lifetime` limits the time to an offer, `grant_lifetime` the time to open its grants. `files` are the
    ids of the sealed files that keys may open, None for all; `collateral` replaces the machines' collateral. `lease` is
    the time for which a machine may use the keys, None for ever. `policy_id` names the policy in the log.
    """

    policy: Policy
    challenge_lifetime: timedelta = timedelta(minutes=5)
    grant_lifetime: timedelta = timedelta(minutes=5)
    files: tuple[str, ...] | None = None
    collateral: TdxCollateral | Path | None = None
    roots: TrustedRoots = TrustedRoots()  # noqa: RUF009 - it is frozen
    clock: Callable[[], datetime] = read_clock
    lease: timedelta | None = None
    policy_id: str | None = None


class Broker:
    """An owner's keys, signer, policy and ledger. Several threads may call its methods.

    All keys that a ring holds are granted, or else its sealing key.
    """

    def __init__(self, settings: Settings, keys: KeyRing, signer: Signer, ledger: Ledger) -> None:
        self._settings = settings
        self._keys = list(keys) or [keys.first]
        self._signer = signer
        self._ledger = ledger
        # Before any challenge, which would be used up for no answer.
        check_files(settings.files, self._keys, signer, settings.lease)
        self._leased: dict[bytes, int] = {}  # entries of the log, by the keys and the claims of their machines
        ledger.upgrade()
        self._named = {} if settings.policy_id is None else {"policy": settings.policy_id}
        members = {"keys": [key.id for key in self._keys], "signer": signer.verifier.id, **self._named}
        ledger.append("started", members, now=settings.clock())

    def make_challenge(self) -> Challenge:
        """Make and store a challenge. Raise `BusyError` if too many are open."""
        now = self._settings.clock()
        challenge = Challenge.generate(now=now, lifetime=self._settings.challenge_lifetime)
        self._ledger.add_challenge(challenge, now=now)
        return challenge

    def require_challenge(self, challenge_id: str, address: str) -> None:
        """Require an open challenge, without using it up, before the rest of an offer is read."""
        now = self._settings.clock()
        if not self._ledger.is_open(challenge_id, now=now):
            self._ledger.use_challenge(challenge_id, now=now, details={"address": address})  # logs and raises

    def answer(self, body: bytes, address: str, seen: Head | None = None) -> tuple[str, bytes, Head]:
        """Answer an offer of a machine that was told a head of the log before.

        Return the id of its challenge, the grants, and the head of the log with them.

        The challenge is used up before the offer is parsed, and the grant is logged before it is returned, so a
        challenge gives at most one answer, and one parsing, even after a crash. A body that is larger than an offer may
        be, or holds more than one may, uses none. The log has the reason of a refusal.
        """
        gate.admit(body, OFFER_KIND.replace("/", " "))
        settings = self._settings
        now, challenge_id = settings.clock(), read_challenge_id(body[:BEGINNING_SIZE])
        challenge = self._ledger.use_challenge(challenge_id, now=now, details={"address": address})
        try:
            verified = verify_offer(
                body, challenge, settings.policy, now=now, collateral=settings.collateral, roots=settings.roots
            )
            grants = issue_grants(
                verified,
                self._keys,
                signer=self._signer,
                now=now,
                lifetime=settings.grant_lifetime,
                files=settings.files,
                lease=settings.lease,
            )
            return challenge.id, grants, self._log(verified, challenge.id, address, seen, now)
        except Exception as error:
            self._ledger.append("refused", {"challenge": challenge.id, "address": address, **reason_of(error)}, now=now)
            raise

    def _log(self, verified: VerifiedOffer, challenge_id: str, address: str, seen: Head | None, now: datetime) -> Head:
        """Log a grant, in short if the same machine had the same keys before. Raise what the ledger refuses."""
        claims = {name: value for name, value in verified.describe().items() if name in {"cpu", "devices"}}
        keys = [key.id for key in self._keys]
        details = {"address": address, **self._named, **claims}
        known = b""
        if (lease := self._settings.lease) is not None:
            claims["lease"] = details["lease"] = int(lease.total_seconds())
            known = sha256(encode([keys, claims])).digest()
        if known in self._leased:
            details = {"address": address}
            return self._ledger.add_renewal(challenge_id, self._leased[known], now=now, details=details, seen=seen)
        recipient = verified.recipient.id
        head = self._ledger.add_grant(challenge_id, recipient, keys, now=now, details=details, seen=seen)
        if known and len(self._leased) < _MACHINES:
            self._leased[known] = head.number
        return head


def reason_of(error: BaseException) -> dict[str, Any]:
    """Return why an offer was refused, for the owner's log."""
    if isinstance(error, AttestationError):
        values = {"evidence": error.evidence, "field": error.field, "found": error.found, "wanted": error.wanted}
        return {name: None if value is None else str(value)[:400] for name, value in values.items()}
    if isinstance(error, (FormatError, OSError)):  # of the offer, or of the owner's collateral
        return {"reason": str(error)[:400]}
    return {"reason": f"{type(error).__name__} in the broker"}
