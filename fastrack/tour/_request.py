"""A visitor's request: the document that evidence is bound to, for the owner of a model and a holder at once.

Both make a challenge. The visitor puts both into its request, with the plan, the visit, the model, its code and the
public key that it made to sign with. Evidence answers the challenge that is derived from all of it::

    id      = the first 32 hexadecimal digits of SHA-256("fastrack/visit-id@1" || 0 || request)
    nonce   = SHA-256("fastrack/visit@1" || 0 || request)
    expires = the earlier end

Each of the two derives it anew, so that no member can be swapped under the evidence. A device is asked once.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from fastrack._documents import fields
from fastrack._documents.canonical import parsing, require
from fastrack._documents.exchange import decode, encode
from fastrack._documents.fields import DIGEST, Field, Fields
from fastrack._keys.recipients import Identity, Recipient
from fastrack._keys.signing import VERIFIER, Verifier
from fastrack.attest._exchange import Collector
from fastrack.attest._offer import ALGORITHM, CHALLENGE_LIMIT, Challenge, Offer, OfferBinding
from fastrack.errors import RollbackError
from fastrack.tour._chain import Chain
from fastrack.tour._documents import Delegation, ModelVersion, version_of_model

KIND = "fastrack/visit"
_NUMBER = fields.integer(0, (1 << 32) - 1)
_DOCUMENT = fields.binary(CHALLENGE_LIMIT)
_CHALLENGE = Field(
    lambda value: Challenge.from_bytes(_DOCUMENT.read(value)), lambda challenge: _DOCUMENT.write(challenge.to_bytes())
)
_FIELDS: Fields = {
    "challenges": fields.list_of(_CHALLENGE, 2), "code": DIGEST, "head": DIGEST, "plan": DIGEST, "visit": _NUMBER,
    "model": version_of_model(_NUMBER), "signer": VERIFIER,
}  # fmt: skip


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
        return encode(KIND, 1, fields.write_members(self, _FIELDS))

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Parse a document. Raise `FormatError` if it is no canonical request."""
        request = cls(**decode(content, KIND, 1, _FIELDS).read_all(_FIELDS))
        with parsing("reading a request for a visit failed", "make it again"):
            require(request.challenges, "challenges")
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
        self._require(VisitRequest.of(chain, self.challenges, chain.plan.code, self.signer))

    def require_again(self, delegation: Delegation, code: str) -> None:
        """Raise `RollbackError` unless this is another request for the visit of a delegation, by its own key."""
        visit, model = (delegation.plan, delegation.visit, delegation.previous), delegation.before
        self._require(VisitRequest(self.challenges, *visit, model, code, delegation.signer))

    def _require(self, expected: VisitRequest) -> None:
        for name in ("plan", "visit", "head", "model", "code", "signer"):
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
