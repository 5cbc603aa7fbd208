"""The desk of a holder of data: it grants its data's keys to a visitor whose turn it is, and keeps the receipts.

The state is in its database: the consents that it gave, and the receipt of each that came::

    away --begin, at a turn of this holder--> here(t, a) --receipt, or a chain that has it--> away
                                              here(t, a) --begin of a later attempt--> here(t, a + 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from hashlib import sha256

from fastrack._keys.keys import Key
from fastrack._keys.recipients import Identity, Recipient
from fastrack._keys.signing import Signer
from fastrack._util.public import public
from fastrack.attest._offer import ALGORITHM
from fastrack.errors import GrantError, RollbackError
from fastrack.tour._chain import Chain, VerifiedVisit, read_receipt
from fastrack.tour._desk import DeskBase, Terms
from fastrack.tour._documents import Consent, Delegation, Plan, Receipt
from fastrack.tour._ledger import Accepted, Attempt, TourLedger
from fastrack.tour._messages import pack, read_grants, unpack, write_grants
from fastrack.tour._request import VisitRequest

_LEAST = timedelta(seconds=2)  # of a lease


@public
class HolderDesk(DeskBase):
    """The desk of a holder of data, who verifies a visitor by itself before it grants the keys of its data.

    It requires, without asking anyone: that the chain is that of the plan which it accepted, with a receipt of every
    visit before; that its own visits are in it as their receipts say; that the owner delegated this visit after the
    last receipt; that it is this holder's turn; that the code is the plan's; and evidence that is bound to all of it.

    Parameters
    ----------
    plan : Plan
        The plan that the holder accepted.
    keys : iterable of Key
        The keys of its data.
    files : iterable of str
        The ids of the sealed files that may be opened.
    terms : Terms
        The proofs that are asked for.
    signer : fastrack.grants.Signer
        The holder's signing key, whose public half is in the plan.
    ledger : TourLedger
        The database.
    lease : datetime.timedelta, optional
        The time that a visit may use the keys until its machine has proved itself again, from two seconds to 366 days.
        `TourLedger.stop` can end such a visit in progress. By default to the end of the visit.

    Raises
    ------
    ValueError
        If the plan has no holder with this key, there is no key or file, grants of so many could not be read, or
        `lease` is out of range.
    RollbackError
        If the database is that of another plan.

    Examples
    --------
    >>> from datetime import timedelta
    >>> import fastrack
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> owner, clinic, key = Signer.generate(), Signer.generate(), fastrack.Key.generate()
    >>> fastrack.save_checkpoint("model.safetensors", {"step": 0}, key=key)
    >>> _ = fastrack.publish("model.safetensors", signer=owner)
    >>> plan = tour.start("model.safetensors", "start", "json.tool:main", signer=owner,
    ...                   holders={"clinic": clinic.verifier}, order=["clinic"], lifetime=timedelta(hours=1))
    >>> terms = tour.Terms.from_toml("version = 1")  # which accepts no machine
    >>> desk = tour.HolderDesk(plan, [fastrack.Key.generate()], files=["0" * 32], terms=terms, signer=clinic,
    ...                        ledger=tour.TourLedger("clinic.db"))
    >>> desk.name, desk.receipts()
    ('clinic', ())
    """

    role = "holder"

    def __init__(
        self,
        plan: Plan,
        keys: Iterable[Key],
        *,
        files: Iterable[str],
        terms: Terms,
        signer: Signer,
        ledger: TourLedger,
        lease: timedelta | None = None,
    ) -> None:
        names = [name for name, verifier in plan.holders.items() if verifier == signer.verifier]
        if not names:
            raise ValueError(f"opening a holder's desk: expected a plan with {signer.verifier!r}, got one without")
        self.name = names[0]
        self._keys, self._files, self._signer = tuple(keys), tuple(sorted(set(files))), signer
        self._lease = lease
        if not self._keys or not self._files:
            raise ValueError(
                f"opening the desk of {self.name}: expected keys and files, got {len(self._keys)} and "
                f"{len(self._files)}. Name what visits may open"
            )
        if lease is not None and not _LEAST <= lease <= timedelta(days=366):
            raise ValueError(
                f"opening the desk of {self.name}: expected lease= of two seconds to 366 days, got {lease}. Name one"
            )
        # An answer that could not be made or read would use up a consent each time, so one is made and read now.
        recipient = Identity.generate(ALGORITHM).recipient
        try:
            read_grants(unpack("consented", self._answer(b"", recipient, plan.expires, lease))["grants"])
        except ValueError as error:
            raise ValueError(
                f"opening the desk of {self.name}: expected keys and files whose grants fit into its answers, got "
                f"{len(self._keys)} and {len(self._files)} ({error}). Seal fewer and larger files, under one key"
            ) from None
        # Last: it binds the database. Two holders would forget each other's consents in one.
        super().__init__(plan, terms, signer, ledger, f"holder {self.name}")

    def _steps(self) -> Mapping[str, Callable[[bytes], bytes]]:
        return {"challenge": self._challenge, "begin": self._begin, "end": self._end}

    def receipts(self) -> tuple[tuple[Consent, Receipt | None], ...]:
        """Return each consent that was given with its receipt; None if the visit was broken off without one."""
        given = [attempt for visit in range(len(self.plan.order)) for attempt in self._ledger.attempts(visit)]
        return tuple(
            (
                Consent.from_bytes(each.document, signer=self._signer.verifier),
                None if each.receipt is None else read_receipt(each.receipt, self.plan).receipt,
            )
            for each in given
        )

    def _begin(self, body: bytes) -> bytes:
        parts = unpack("begin", body)
        if parts["delegation"] and not parts["chain"]:
            return self._renew(parts)
        now = self._terms.clock()
        self._require_time(now)
        chain = self._read_chain(parts["chain"])
        delegation = Delegation.from_bytes(parts["delegation"], signer=self.plan.owner)
        request, verified = self._verify(parts["request"], parts["offer"], now)
        request.require_next(chain)
        chain.require_turn(delegation)
        self._require_delegated(delegation, request, now)
        self._require_own_visits(chain)
        for visit in chain.visits:  # a receipt may not have come by itself
            if visit.holder == self.name:
                self._keep(visit, now)
        latest = self._require_newer(delegation)
        # By the plan too: the owner who delegated might have given it longer.
        expires = min(delegation.expires, (now + timedelta(seconds=self.plan.seconds)).replace(microsecond=0))
        consent = Consent(
            delegation=delegation.digest,
            policy=self._terms.policy_digest,
            offer=sha256(parts["offer"]).hexdigest(),
            files=self._files,
            issued=now,
            expires=expires,
        ).sign(self._signer)
        lease = self._lease_until(expires, now)
        answer = self._answer(consent.envelope, verified.recipient, expires, lease)
        details = {"claims": verified.describe(), "delegation": delegation.digest, "files": len(self._files)}
        if lease is not None:
            details["lease"] = int(lease.total_seconds())
        begun = Attempt(delegation.visit, delegation.attempt, delegation.previous, consent.envelope, None)
        self._ledger.begin(begun, latest, offer=parts["offer"], now=now, details=details)  # last: it counts
        return answer

    def _renew(self, parts: Mapping[str, bytes]) -> bytes:
        """Grant the keys for another lease to the visit that is here, once it has proved itself anew."""
        now = self._terms.clock()
        delegation = Delegation.from_bytes(parts["delegation"], signer=self.plan.owner)
        latest, place = self._ledger.latest(), f"renewing the keys of visit {delegation.visit}"
        consent = None if latest is None else Consent.from_bytes(latest.document, signer=self._signer.verifier)
        if latest is None or consent is None or latest.receipt or consent.delegation != delegation.digest:
            raise RollbackError(
                f"{place}: expected the visit that is here, got one that is over, or that a later attempt made void. "
                "Begin the visit again"
            )
        lease = self._lease_until(consent.expires, now)
        if lease is None or consent.files != self._files:
            raise GrantError(
                f"{place}: expected a desk that grants the same files on a lease, got one that was opened anew with "
                "others, or without. Begin the visit again"
            )
        request, verified = self._verify(parts["request"], parts["offer"], now)
        request.require_again(delegation, self.plan.code)
        answer = self._answer(latest.document, verified.recipient, consent.expires, lease)
        seconds = int(lease.total_seconds())
        self._ledger.renew(latest, verified.describe(), seconds, offer=parts["offer"], now=now)  # last: it may be over
        return answer

    def _lease_until(self, expires: datetime, now: datetime) -> timedelta | None:
        """Return the lease of keys that are granted now, which ends with the visit at the latest; None for none."""
        if self._lease is not None and expires - now < _LEAST:
            raise GrantError(
                f"granting keys on a lease: expected a visit after {now}, got one until {expires}. It is over"
            )
        return None if self._lease is None else min(self._lease, expires - now)

    def _answer(self, consent: bytes, recipient: Recipient, expires: datetime, lease: timedelta | None) -> bytes:
        grants = self._wrap(recipient, self._keys, files=self._files, expires=expires, lease=lease)
        return pack("consented", consent=consent, grants=write_grants(grants))

    def _require_delegated(self, delegation: Delegation, request: VisitRequest, now: datetime) -> None:
        """Require this holder's turn, and a delegation to the key that the evidence is bound to, in its time."""
        name = self.plan.holder(delegation.visit)
        if name != self.name:
            raise RollbackError(
                f"visit {delegation.visit} of tour {self.plan.tour}: expected a turn of {self.name}, got that of "
                f"{name}. Go there first"
            )
        if delegation.signer != request.signer:
            raise GrantError(
                f"visit {delegation.visit}: expected a delegation to the visitor's key {request.signer.id}, got one to "
                f"{delegation.signer.id}. Ask the owner for one"
            )
        if not now < delegation.expires:
            raise GrantError(
                f"visit {delegation.visit}: expected a delegation in force, got one that expired at "
                f"{delegation.expires}. Begin the visit again"
            )

    def _require_own_visits(self, chain: Chain) -> None:
        """Require that a chain has this holder's own visits as it consented to them, up to the last one."""
        for visit in chain.visits:
            given = {each.document for each in self._ledger.attempts(visit.number)}
            if visit.holder == self.name and visit.receipt.consent not in given:
                raise RollbackError(
                    f"visit {visit.number} in the chain: expected a consent that {self.name} remembers, got another. "
                    "Its database was set back, or its signing key is used elsewhere"
                )
        latest = self._ledger.latest()
        if latest is not None and latest.visit > len(chain.visits):
            raise RollbackError(
                f"the chain of tour {self.plan.tour}: expected the receipt of visit {latest.visit}, which was here, "
                f"got {len(chain.visits)} receipts. It is an older one; get the newest"
            )

    def _require_newer(self, delegation: Delegation) -> Attempt | None:
        """Return the last attempt here; a delegation must be a later one, within the attempts of the plan."""
        latest = self._ledger.latest()
        known = 0 if latest is None or latest.visit != delegation.visit else latest.attempt
        if not known < delegation.attempt <= self.plan.attempts:
            raise RollbackError(
                f"visit {delegation.visit}: expected an attempt after {known}, of {self.plan.attempts} by the plan, "
                f"got attempt {delegation.attempt}. It was granted before, or is void; begin the visit again"
            )
        if known and latest is not None and latest.previous != delegation.previous:
            raise RollbackError(
                f"visit {delegation.visit}: expected it after receipt {latest.previous:.16}…, as at the last attempt, "
                f"got one after {delegation.previous:.16}…. The owner leads two chains; ask it why"
            )
        return latest

    def _end(self, body: bytes) -> bytes:
        """Keep a receipt, also of a visit that was broken off. The same receipt may come again."""
        visit = read_receipt(body, self.plan)
        self._keep(visit, self._terms.clock())
        return b""

    def _keep(self, visit: VerifiedVisit, now: datetime) -> None:
        receipt = visit.receipt
        given = [each for each in self._ledger.attempts(visit.number) if each.document == receipt.consent]
        if not given:
            raise RollbackError(f"a receipt for {self.name}: expected one of a visit that was here, got another")
        if given[0].receipt == receipt.envelope:
            return
        if given[0].receipt is not None:
            raise RollbackError(
                f"a receipt for {self.name}: expected the same as before for visit {visit.number}, got another. Its "
                "machine signed two; do not grant to it again"
            )
        details = {"chunks": receipt.chunks, "receipt": receipt.digest, "scrubbed": receipt.scrubbed}
        self._ledger.end(Accepted(given[0], receipt.envelope, details), now=now)
