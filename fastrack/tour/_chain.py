"""The chain of a tour: its plan, a receipt of each visit, and the owner's completion at the end, one a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fastrack._documents.canonical import decode_bytes, parsing
from fastrack._keys.signing import Verifier, read_unverified_payload
from fastrack._util.atomic import new_file
from fastrack._util.gate import admit, most_bytes
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import AuthenticationError, FormatError, RollbackError, SignatureError
from fastrack.tour._documents import KIND, Completion, Consent, Delegation, ModelVersion, Plan, Receipt

_KIND = "chain of a tour"
_COMPLETION = b"fastrack.tour.completion."


@dataclass(frozen=True, slots=True)
class VerifiedVisit:
    """A receipt whose delegation, consent and place in the chain were verified."""

    number: int
    holder: str
    delegation: Delegation
    consent: Consent
    receipt: Receipt

    @property
    def after(self) -> ModelVersion:
        """The model that the visit made."""
        assert self.receipt.after is not None
        return self.receipt.after


@public
@dataclass(frozen=True, slots=True)
class Chain:
    """The verified record of a tour, as far as it went. `from_bytes` and `load` verify it, without any service.

    Each receipt was signed by the key that the owner delegated for its visit, after the receipt before; its holder, who
    had the turn by the plan, consented to that delegation; the model that it began with is the one before.

    Attributes
    ----------
    plan : Plan
        The plan.
    visits : tuple
        The visits, each with its ``number`` from 0, ``holder``, ``receipt``, ``delegation`` and ``consent``.
    completion : Completion or None
        The owner's statement that the tour ended here.

    Examples
    --------
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> tour.Chain.from_bytes(b"", owner=Signer.generate().verifier)
    Traceback (most recent call last):
        ...
    fastrack.FormatError: the chain of a tour: expected a plan in its first line, got 0 bytes. ...
    """

    plan: Plan
    visits: tuple[VerifiedVisit, ...] = ()
    completion: Completion | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, owner: Verifier, known: Chain | None = None) -> Chain:
        """Read and verify a file that `save` wrote. Raises the errors of `from_bytes`, and OSError."""
        with open_regular(path) as file:
            content = file.read(most_bytes(_KIND) + 1)
        return cls.from_bytes(content, owner=owner, source=str(path), known=known)

    @classmethod
    def from_bytes(
        cls, content: bytes, *, owner: Verifier, source: str = "the chain of a tour", known: Chain | None = None
    ) -> Chain:
        """Verify the record of a tour.

        Parameters
        ----------
        content : bytes
            The record.
        owner : Verifier
            The public key of the owner of the model.
        source : str
            A name for errors.
        known : Chain, optional
            A chain that was verified before. Only the lines behind it are verified again, if it is their beginning.

        Raises
        ------
        SignatureError
            If a document was altered, or signed by a key that may not.
        RollbackError
            If a receipt is missing, doubled, in another place, or of a visit that did not keep to the plan.
        FormatError
            If a document has another form. Each message names the line.
        """
        admit(content, _KIND, name=source)
        lines = content.splitlines(keepends=True)
        if not lines:
            raise FormatError(f"{source}: expected a plan in its first line, got 0 bytes. Get it from the owner")
        if known is not None and known.plan.owner == owner and content.startswith(known.to_bytes()):
            chain = known
        else:
            with _place(f"{source}, line 1, the plan"):
                chain = cls(Plan.from_bytes(lines[0], signer=owner))
        for line in lines[chain._length :]:
            chain = chain.extend(line, source=source)
        return chain

    @property
    def _length(self) -> int:
        """The number of lines."""
        return 1 + len(self.visits) + (self.completion is not None)

    def extend(self, line: bytes, *, source: str = "the chain of a tour") -> Chain:
        """Return this chain with the receipt of the next visit, or the completion. Raises as `from_bytes` does."""
        number = len(self.visits)
        with _place(f"{source}, line {self._length + 1}, after {number} receipts"):
            if self.completion is not None:
                raise FormatError("expected the end behind the owner's completion, got another line")
            if _COMPLETION in line:  # a payload has no dots
                return replace(self, completion=self._check_completion(line))
            return replace(self, visits=(*self.visits, self._check_receipt(line)))

    def _check_receipt(self, line: bytes) -> VerifiedVisit:
        visit = read_receipt(line, self.plan)
        self.require_turn(visit.delegation)
        if visit.receipt.after is None:
            raise RollbackError("expected the receipt of a visit that ended, got that of one that was broken off")
        return visit

    def require_turn(self, delegation: Delegation) -> None:
        """Require that the owner made a delegation for the next visit of this chain and no other, within its plan.

        Raise `RollbackError` otherwise.
        """
        wanted = (self.plan.digest, len(self.visits), self.head, self.model)
        found = (delegation.plan, delegation.visit, delegation.previous, delegation.before)
        names = ("the plan", "the visit", "the receipt before", "the model")
        for name, expected, got in zip(names, wanted, found, strict=True):
            if expected != got:
                raise RollbackError(
                    f"{name} of a delegation: expected {expected!s:.80}, got {got!s:.80}. A receipt was left out, "
                    "doubled or moved; get the whole chain"
                )
        if delegation.expires > self.plan.expires:
            raise RollbackError(
                f"the end of a delegation: expected {self.plan.expires} at the latest, when its plan ends, got "
                f"{delegation.expires}. Its owner signed for longer than all agreed to; ask it for another"
            )

    def _check_completion(self, line: bytes) -> Completion:
        completion = Completion.from_bytes(line, signer=self.plan.owner)
        wanted = (self.plan.digest, self.head, len(self.visits), self.model)
        found = (completion.plan, completion.head, completion.visits, completion.model)
        if wanted != found or len(self.visits) != len(self.plan.order):
            raise RollbackError(
                f"expected the completion after {len(self.plan.order)} visits, got one after {len(self.visits)} of "
                f"{completion.visits}, or of another tour. Receipts were left out; get the whole chain"
            )
        return completion

    @property
    def head(self) -> str:
        """The digest of the last receipt, or of the plan."""
        return self.visits[-1].receipt.digest if self.visits else self.plan.digest

    @property
    def model(self) -> ModelVersion:
        """The model as the last visit left it."""
        return self.visits[-1].after if self.visits else self.plan.start

    @property
    def signer(self) -> Verifier:
        """The public key that signed the manifest of that model: the last visit's, or the owner's before and after."""
        return self.visits[-1].delegation.signer if self.visits and self.completion is None else self.plan.owner

    def require_complete(self) -> None:
        """Raise `RollbackError` unless the owner completed this tour here."""
        if self.completion is None:
            raise RollbackError(
                f"the chain of tour {self.plan.tour}: expected the owner's completion behind receipt "
                f"{len(self.visits)}, got none. The tour goes on, or the chain was shortened; get the whole chain"
            )

    def to_bytes(self) -> bytes:
        """Return the record, which `from_bytes` reads."""
        end = [] if self.completion is None else [self.completion.envelope]
        return b"".join([self.plan.envelope, *(visit.receipt.envelope for visit in self.visits), *end])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a file, atomically. Raise OSError if it cannot be written."""
        with new_file(Path(path)) as file:
            file.write(self.to_bytes())


def read_receipt(content: bytes, plan: Plan) -> VerifiedVisit:
    """Return a receipt of a tour, verified from the inside out, but for its place in the chain.

    The owner's delegation names the key that signed the receipt; the holder whose turn it is consented to that
    delegation; and the visit kept to both.
    """
    with parsing("it is not in the form of a receipt", "get it again"):
        admit(content, KIND)
        payload = read_unverified_payload(content)
        admit(payload, KIND)
        members = json.loads(payload)
        delegation_envelope, consent_envelope = (decode_bytes(members[name]) for name in ("delegation", "consent"))
    delegation = Delegation.from_bytes(delegation_envelope, signer=plan.owner)
    receipt = Receipt.from_bytes(content, signer=delegation.signer)
    holder = plan.holder(delegation.visit)
    consent = Consent.from_bytes(consent_envelope, signer=plan.holders[holder])
    if (delegation.plan, consent.delegation) != (plan.digest, delegation.digest):
        raise RollbackError(f"expected a delegation of this plan and the consent of {holder} to it, got others")
    _check_visit(receipt, delegation, consent, plan)
    return VerifiedVisit(delegation.visit, holder, delegation, consent, receipt)


def _check_visit(receipt: Receipt, delegation: Delegation, consent: Consent, plan: Plan) -> None:
    """Raise `RollbackError` unless a visit kept to its plan, its delegation and its consent."""
    following, end = delegation.before.number + 1, min(delegation.expires, consent.expires)
    # A visit that was broken off may be late: its holder has to hear of it all the same.
    in_time = receipt.after is None or receipt.ended <= end
    kept = {
        f"the training code {plan.code:.16}…": receipt.code == plan.code,
        f"version {following} of the model": receipt.after is None or receipt.after.number == following,
        "files that the holder granted": set(receipt.files) <= set(consent.files),
        f"an attempt up to {plan.attempts}": 0 < delegation.attempt <= plan.attempts,
        f"an end by {plan.expires}": delegation.expires <= plan.expires,
        f"an end by {end}": in_time,
    }
    for wanted, is_kept in kept.items():
        if not is_kept:
            raise RollbackError(
                f"the receipt of visit {delegation.visit}: expected {wanted}, got another. Its machine did not keep to "
                "the plan; begin the visit again on another"
            )


@contextmanager
def _place(place: str) -> Iterator[None]:
    """Name the place in the errors of documents."""
    try:
        yield
    except (FormatError, SignatureError, AuthenticationError) as error:
        raise type(error)(f"{place}: {error}") from None
