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
from fastrack.attest import Challenge, Policy, TdxCollateral, TrustedRoots, issue_grants, verify_offer
from fastrack.attest._broker.ledger import Ledger
from fastrack.attest._exchange import check_files
from fastrack.attest._offer import BEGINNING_SIZE, OFFER_KIND, read_challenge_id, read_clock
from fastrack.errors import AttestationError, FormatError
from fastrack.grants import Signer

_MACHINES = 65_536  # that have a lease, with keys and claims as before; each has an entry of its own


@dataclass(frozen=True, slots=True)
class Settings:
    """The parts of a broker's configuration that do not hold secrets.

    `challenge_lifetime` limits the time to an offer, `grant_lifetime` the time to open its grants. `files` are the
    ids of the sealed files that keys may open, None for all; `collateral` replaces the machines' collateral. `lease` is
    the time for which a machine may use the keys, None for ever.
    """

    policy: Policy
    challenge_lifetime: timedelta = timedelta(minutes=5)
    grant_lifetime: timedelta = timedelta(minutes=5)
    files: tuple[str, ...] | None = None
    collateral: TdxCollateral | Path | None = None
    roots: TrustedRoots = TrustedRoots()  # noqa: RUF009 - it is frozen
    clock: Callable[[], datetime] = read_clock
    lease: timedelta | None = None


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
        members = {"keys": [key.id for key in self._keys], "signer": signer.verifier.id}
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

    def answer(self, body: bytes, address: str) -> tuple[str, bytes]:
        """Answer an offer: return the challenge's id, and the grants.

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
        except Exception as error:
            self._ledger.append("refused", {"challenge": challenge.id, "address": address, **reason_of(error)}, now=now)
            raise
        claims = {name: value for name, value in verified.describe().items() if name in {"cpu", "devices"}}
        keys = [key.id for key in self._keys]
        details = {"address": address, **claims}
        known = b""
        if settings.lease is not None:
            claims["lease"] = details["lease"] = int(settings.lease.total_seconds())
            known = sha256(encode([keys, claims])).digest()
        if known in self._leased:
            self._ledger.add_renewal(challenge.id, self._leased[known], now=now, details={"address": address})
            return challenge.id, grants
        number = self._ledger.add_grant(challenge.id, verified.recipient.id, keys, now=now, details=details)
        if known and len(self._leased) < _MACHINES:
            self._leased[known] = number
        return challenge.id, grants


def reason_of(error: BaseException) -> dict[str, Any]:
    """Return why an offer was refused, for the owner's log."""
    if isinstance(error, AttestationError):
        values = {"evidence": error.evidence, "field": error.field, "found": error.found, "wanted": error.wanted}
        return {name: None if value is None else str(value)[:400] for name, value in values.items()}
    if isinstance(error, (FormatError, OSError)):  # of the offer, or of the owner's collateral
        return {"reason": str(error)[:400]}
    return {"reason": f"{type(error).__name__} in the broker"}
