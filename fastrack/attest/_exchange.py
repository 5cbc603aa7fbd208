"""Give an owner's keys to a machine that has proved what it is: challenge, offer, verified offer, grants, key ring.

1. The owner makes a `Challenge`.
2. The machine calls `make_offer`: a fresh key pair of HPKE, and evidence that is bound to it and to the challenge.
3. The owner calls `verify_offer` of `_verify_offer.py`, which verifies everything at one time under a `Policy`, and
   `issue_grants`, which encrypts keys to the public key of the offer and signs the result.
4. The machine calls `PendingOffer.unlock`. Its secret key has never left the process.

Nothing here remembers which challenges were used: the owner does, as the broker and ``fastrack attest grant`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, TypeAlias

from fastrack._documents.exchange import decode, encode
from fastrack._documents.fields import ID, binary, list_of
from fastrack._keys.grants import open_later
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._util.fork import register_fork_reset
from fastrack._util.gate import most_bytes
from fastrack._util.public import public
from fastrack.attest._errors import refused, require_in_force, require_time_zone
from fastrack.attest._gpus.rim_match import report_of
from fastrack.attest._offer import ALGORITHM, Challenge, MachineEvidence, Offer, OfferBinding
from fastrack.attest._verify_offer import AGAIN, VerifiedOffer
from fastrack.errors import ClosedError, FormatError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier

GRANTS_KIND = "fastrack/grants"
GRANTS_LIMIT = most_bytes("fastrack grants")
GRANT_LIFETIME = timedelta(minutes=5)

_VERSION = 1
_KEYS_LIMIT = 1024
_ENVELOPES = list_of(binary(most_bytes("grant")), _KEYS_LIMIT)
_EVIDENCE = "offer"

Collector: TypeAlias = Callable[[OfferBinding], MachineEvidence]
"""The type of ``collect=``: a function that asks a machine for evidence which has the values of a binding."""


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
        DeviceError
            If they are for confidential GPUs, or certain ones, and this process has opened another GPU.
        ClosedError
            If the keys were unlocked before, or this is a forked child.
        """
        return KeyRing([each.unlock(identity, now=now) for each, identity in self._read(grants, owner)])

    def _read(self, grants: bytes, owner: Verifier | Iterable[Verifier]) -> Iterator[tuple[Grants, Identity]]:
        """Yield the grants with the secret key, which is forgotten once all were opened."""
        if self._identity is None:
            raise ClosedError(
                "unlocking grants failed: expected an offer that waits for its grants, got one whose secret key was "
                "used before or stayed in the parent process. Make a new offer."
            )
        owners = (owner,) if isinstance(owner, Verifier) else tuple(owner)
        found, envelopes = read_envelopes(grants)
        if found != self.offer.challenge_id:
            raise refused("grants", "challenge", wanted=self.offer.challenge_id, found=found, advice=AGAIN)
        for opened in [Grants.from_bytes(envelope, owner=owners) for envelope in envelopes]:
            yield opened, self._identity
        self._identity = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an offer with its secret key stays in its process and cannot be pickled or copied")

    def __repr__(self) -> str:
        state = "waiting" if self._identity is not None else "done"
        return f"<PendingOffer for challenge {self.offer.challenge_id}, {state}>"


def open_lease(
    pending: PendingOffer, grants: bytes, *, owner: Verifier | Iterable[Verifier], now: datetime | None = None
) -> list[tuple[Grants, Callable[[], Key]]]:
    """Return the grants that answer an offer, by `open_later`. The errors are those of `unlock`."""
    read = list(pending._read(grants, owner))  # noqa: SLF001 - of this module
    return [found for each, identity in read for found in open_later([each], identity, now=now)]


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


@public
def issue_grants(
    verified: VerifiedOffer,
    keys: KeyRing | Key | Iterable[Key],
    *,
    signer: Signer,
    now: datetime,
    lifetime: timedelta = GRANT_LIFETIME,
    files: Iterable[str] | None = None,
    lease: timedelta | None = None,
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
    lease : datetime.timedelta, optional
        The time for which the machine may use the keys; it has to take them by `lease_keys`. By default for ever.

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
    require_in_force(_EVIDENCE, "validity", verified.verified_at, verified.valid_until, now, AGAIN)
    granted = [keys] if isinstance(keys, Key) else list(keys)
    if isinstance(keys, KeyRing) and not granted:
        granted = [keys.first]
    if not granted or len(granted) > _KEYS_LIMIT:
        raise ValueError(f"issuing grants failed: expected 1 to {_KEYS_LIMIT} keys, got {len(granted)}")
    expires = (now + lifetime).astimezone(UTC)
    chips = [report.chip_id for report in map(report_of, verified.devices) if not report.is_switch]
    place = {"require": verified.require and "confidential", "gpus": chips if verified.require == "proved" else None}
    terms = {"lease": lease, **place}
    return _write_grants(verified.challenge_id, verified.recipient, granted, signer, files, expires, **terms)


def check_files(
    files: Iterable[str] | None, keys: Iterable[Key], signer: Signer, lease: timedelta | None = None
) -> None:
    """Raise ValueError unless a machine could read grants of these keys for these files: make some for no machine."""
    recipient, expires = Identity.generate(ALGORITHM).recipient, datetime.now(UTC).replace(microsecond=0)
    _write_grants("0" * 32, recipient, list(keys), signer, files, expires, lease=lease)


def _write_grants(
    challenge_id: str,
    recipient: Recipient,
    keys: list[Key],
    signer: Signer,
    files: Iterable[str] | None,
    expires: datetime,
    **terms: Any,
) -> bytes:
    files = None if files is None else tuple(files)
    issued = (Grants.issue(key, [recipient], signer=signer, files=files, expires=expires, **terms) for key in keys)
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
