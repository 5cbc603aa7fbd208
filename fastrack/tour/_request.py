"""A visitor's request: the document that evidence is bound to, for the owner of a model and a holder at once.

Both make a challenge. The visitor puts both into its request, with the plan, the visit, the model, its code and the
public key that it made to sign with. Evidence answers the challenge that is derived from all of it::

    id      = the first 32 hexadecimal digits of SHA-256("fastrack/visit-id@1" || 0 || request)
    nonce   = SHA-256("fastrack/visit@1" || 0 || request)
    expires = the earlier end

Each of the two derives it anew, so that no member can be exchanged under the evidence. A device is asked once.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from fastrack._documents.canonical import DIGEST, matches, parsing, require
from fastrack._keys.recipients import Identity, Recipient
from fastrack._keys.signing import Verifier
from fastrack.attest._exchange import Collector
from fastrack.attest._formats import wire
from fastrack.attest._offer import ALGORITHM, CHALLENGE_LIMIT, Challenge, Offer, OfferBinding
from fastrack.errors import RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._documents import ModelVersion

KIND = "fastrack/visit"
_MEMBERS = ("challenges", "code", "head", "model", "plan", "signer", "visit")
_LIMIT = 64 << 10


@dataclass(frozen=True, slots=True)
class VisitRequest:
    """A visitor's request: untrusted, until evidence that is bound to it was verified."""

    challenges: tuple[Challenge, ...]
    plan: str
    visit: int
    head: str
    model: ModelVersion
    code: str
    signer: Verifier

    @classmethod
    def of(cls, chain: Chain, challenges: tuple[Challenge, ...], code: str, signer: Verifier) -> Self:
        """Make the request for the next visit of a chain."""
        return cls(challenges, chain.plan.digest, len(chain.visits), chain.head, chain.model, code, signer)

    def to_bytes(self) -> bytes:
        """Return the canonical document."""
        members = {
            "challenges": [wire.write_bytes(challenge.to_bytes()) for challenge in self.challenges],
            "code": self.code,
            "head": self.head,
            "model": [self.model.number, self.model.digest],
            "plan": self.plan,
            "signer": str(Verifier(self.signer.algorithm, self.signer.public)),
            "visit": self.visit,
        }
        return wire.encode(KIND, 1, members)

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse a document. Raise `FormatError` if it is no canonical request."""
        reader = wire.decode(content, KIND, 1, _MEMBERS, limit=_LIMIT)
        challenges = tuple(map(Challenge.from_bytes, reader.binaries("challenges", count=2, limit=CHALLENGE_LIMIT)))
        with parsing("reading a request for a visit failed", "make it again"):
            value: Any = reader.value
            number, digest = value["model"]
            code, head, plan, visit = (value[name] for name in ("code", "head", "plan", "visit"))
            require(all(matches(DIGEST, value) for value in (code, head, plan, digest)), "digests")
            require(all(type(value) is int and 0 <= value < 1 << 32 for value in (number, visit)), "numbers")
            signer = Verifier.parse(value["signer"])
            request = cls(challenges, plan, visit, head, ModelVersion(number, digest), code, signer)
            require(challenges and request.to_bytes() == content, "signer")  # without a name
        return request

    @property
    def challenge(self) -> Challenge:
        """The challenge that evidence has to answer."""
        content = self.to_bytes()
        nonce = sha256(b"fastrack/visit@1\0" + content).digest()
        own_id = sha256(b"fastrack/visit-id@1\0" + content).hexdigest()[:32]
        return Challenge(own_id, nonce, min(challenge.expires for challenge in self.challenges))

    @property
    def digest(self) -> str:
        """The SHA-256 of the document, in hexadecimal."""
        return sha256(self.to_bytes()).hexdigest()

    def require_next(self, chain: Chain) -> None:
        """Raise `RollbackError` unless this is a request for the next visit of a chain, by the code of its plan."""
        expected = VisitRequest.of(chain, self.challenges, chain.plan.code, self.signer)
        for name in ("plan", "visit", "head", "model", "code"):
            wanted, found = getattr(expected, name), getattr(self, name)
            if wanted != found:
                raise RollbackError(
                    f"the {name} of a visit: expected {wanted!s:.80}, got {found!s:.80}. Begin with the model and the "
                    "chain of the visit before, and with the code of the plan"
                )


def make_visit_offer(request: VisitRequest, collect: Collector) -> tuple[Offer, Identity]:
    """Make a fresh key pair of HPKE, and evidence that is bound to it and to a request."""
    identity = Identity.generate(ALGORITHM)
    recipient: Recipient = identity.recipient
    return Offer(request.challenge.id, recipient, collect(OfferBinding(request.challenge, recipient))), identity
