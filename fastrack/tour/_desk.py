"""The part that both desks have: terms, challenges, verified requests, and wrapped keys."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from fastrack._keys.grants import Grants
from fastrack._keys.keys import Key
from fastrack._keys.recipients import Recipient
from fastrack._keys.signing import Signer
from fastrack._util.fork import per_process
from fastrack._util.public import public
from fastrack.attest._cpu.tdx_collateral import TdxCollateral
from fastrack.attest._offer import DEFAULT_LIFETIME, Challenge, read_clock
from fastrack.attest._policy import Policy, read_policy_text
from fastrack.attest._verify_offer import VENDOR_ROOTS, TrustedRoots, VerifiedOffer, verify_offer
from fastrack.errors import FormatError, RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._documents import Plan
from fastrack.tour._ledger import TourLedger
from fastrack.tour._request import VisitRequest

_CHALLENGES_LIMIT = 10_000


@public
@dataclass(frozen=True, slots=True)
class Terms:
    """The proofs that a desk asks of a visitor. `from_toml` reads its policy.

    Attributes
    ----------
    policy : fastrack.attest.Policy
        The policy that a visitor's evidence must fulfil.
    policy_digest : str
        The SHA-256 of the policy's text, which consents name.
    collateral : TdxCollateral or path, optional
        The desk's own collateral, as for `fastrack.attest.verify_offer`.
    roots : fastrack.attest.TrustedRoots
        The roots that evidence must lead to; the vendors' by default.
    challenge_lifetime : datetime.timedelta
        The time limit from a challenge to its answer.
    clock : callable
        Returns the time, with a time zone.

    Examples
    --------
    >>> from fastrack import tour
    >>> terms = tour.Terms.from_toml("version = 1")
    >>> terms.policy_digest[:16]
    '4eab33c0b9ba9ded'
    """

    policy: Policy
    policy_digest: str
    collateral: TdxCollateral | Path | None = None
    roots: TrustedRoots = VENDOR_ROOTS
    challenge_lifetime: timedelta = DEFAULT_LIFETIME
    clock: Callable[[], datetime] = read_clock

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str], **others: Any) -> Self:
        """Read the policy from a file, if it is given by its path, or from text. `others` are the other attributes.

        Raises the errors of `fastrack.attest.Policy.from_toml`.
        """
        text = source if isinstance(source, str) else read_policy_text(source)
        return cls(Policy.from_toml(text), sha256(text.encode()).hexdigest(), **others)


class _Challenges:
    """The challenges that wait for an answer, in memory: a restart forgets them, and so makes none answerable twice."""

    def __init__(self) -> None:
        self._lock = per_process(self, "_lock", threading.Lock)
        self._open: dict[str, Challenge] = {}

    def add(self, challenge: Challenge, now: datetime) -> None:
        """Remember a challenge. The oldest ones are forgotten first, once too many wait."""
        with self._lock:
            self._open[challenge.id] = challenge
            for old in list(self._open.values())[: max(len(self._open) - _CHALLENGES_LIMIT, 1)]:
                if len(self._open) > _CHALLENGES_LIMIT or now >= old.expires:
                    del self._open[old.id]

    def use(self, answered: Iterable[Challenge], now: datetime) -> None:
        """Use up the one of these challenges that was made here. Raise `RollbackError` unless it waits."""
        with self._lock:
            own = [self._open.pop(each.id) for each in answered if self._open.get(each.id) == each]
        if not own or now >= own[0].expires:
            raise RollbackError(
                "the challenge of a visit: expected one that waits for its answer, got one that was used, has expired, "
                "or is of before a restart. Begin the visit again"
            )


class DeskBase:
    """The challenges of a desk, and the verification of what visitors send. Several threads may call its methods."""

    role: str

    def __init__(self, plan: Plan, terms: Terms, signer: Signer, ledger: TourLedger, party: str) -> None:
        self.plan = plan
        self._terms = terms
        self._signer = signer
        self._ledger = ledger
        self._challenges = _Challenges()
        self._known: Chain | None = None
        ledger.bind(party, plan.digest)

    def ask(self, step: str, body: bytes = b"") -> bytes:
        """Answer a step of a visitor. Raise `FormatError` for a step that this desk does not have.

        Each answer is on the disk of the desk before it is returned.
        """
        steps: Mapping[str, Callable[[bytes], bytes]] = self._steps()
        if step not in steps:
            raise FormatError(f"asking the {self.role}: expected a step of {', '.join(steps)}, got {step!r:.40}")
        return steps[step](body)

    def _steps(self) -> Mapping[str, Callable[[bytes], bytes]]:
        raise NotImplementedError

    def _challenge(self, body: bytes) -> bytes:
        if body:
            raise FormatError(f"asking the {self.role} for a challenge: expected no content, got {len(body)} bytes")
        now = self._terms.clock()
        challenge = Challenge.generate(now=now, lifetime=self._terms.challenge_lifetime)
        self._challenges.add(challenge, now)
        return challenge.to_bytes()

    def _read_chain(self, content: bytes) -> Chain:
        chain = Chain.from_bytes(content, owner=self.plan.owner, known=self._known)
        if chain.plan.digest != self.plan.digest:
            raise RollbackError(
                f"the chain of a tour: expected plan {self.plan.digest:.16}…, got {chain.plan.digest:.16}…. "
                f"The {self.role} accepted another plan; agree on one"
            )
        self._known = chain
        return chain

    def _verify(self, content: bytes, offer: bytes, now: datetime) -> tuple[VisitRequest, VerifiedOffer]:
        """Return a request and the verified offer that is bound to it. This uses the desk's challenge up."""
        request = VisitRequest.from_bytes(content)
        self._challenges.use(request.challenges, now)
        try:
            policy, collateral, roots = self._terms.policy, self._terms.collateral, self._terms.roots
            verified = verify_offer(offer, request.challenge, policy, now=now, collateral=collateral, roots=roots)
        except Exception as error:
            self._ledger.append("refused", {"reason": str(error)[:400], "request": request.digest}, now=now)
            raise
        return request, verified

    def _require_time(self, now: datetime) -> None:
        if not self.plan.issued <= now < self.plan.expires:
            advice = "Set the clocks" if now < self.plan.issued else "The plan is over; its owner may sign another"
            raise RollbackError(
                f"beginning a visit: expected a time from {self.plan.issued} to {self.plan.expires}, got {now}. "
                f"{advice}"
            )

    def _wrap(self, recipient: Recipient, keys: Iterable[Key], **limits: Any) -> list[bytes]:
        return [Grants.issue(key, [recipient], signer=self._signer, **limits).envelope for key in keys]
