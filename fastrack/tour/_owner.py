"""The desk of the owner of a model: it moves the model forward by one verified visit at a time.

The state is in its database: the receipts that were accepted, and the attempts at the visit that is open::

    open(t, a)  --begin with t receipts-->      open(t, a + 1)      the attempt before is void: rolled back
                --begin with t + 1 receipts-->  open(t + 1, 1)      the receipt of attempt a is accepted
                --finish with t + 1 receipts--> over

A receipt is accepted when the next visit begins, not when it is made: a visitor that begins it has the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fastrack._keys.keys import Key
from fastrack._keys.signing import Signer, read_unverified_payload, sign_envelope
from fastrack._sets.manifest import HISTORY_LIMIT, PAYLOAD_TYPE, Manifest
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, RollbackError, UnknownKeyError
from fastrack.tour._chain import Chain, VerifiedVisit
from fastrack.tour._desk import DeskBase, Terms
from fastrack.tour._documents import Completion, Delegation, Plan
from fastrack.tour._folder import chain_history, entry_of, require_newest
from fastrack.tour._ledger import Accepted, Attempt, TourLedger
from fastrack.tour._messages import pack, unpack, write_grants

_SALT_SIZE = 32
_LABEL = b"fastrack/tour-key@1\0"
_HISTORY = "history"  # in the log, at the first attempt: the versions before the first model


@dataclass(frozen=True, slots=True)
class _State:
    """The open visit of a tour.

    latest : the last attempt that was begun; accepted : its receipt, if it is yet to be stored
    """

    visit: int
    head: str
    latest: Attempt | None
    accepted: Accepted | None = None

    @property
    def attempt(self) -> int:
        """The number of the next attempt."""
        return 1 if self.latest is None or self.latest.visit != self.visit else self.latest.attempt + 1


@public
class OwnerDesk(DeskBase):
    """The desk of the owner of a model, who grants the model's keys and delegates the signing of its next version.

    At each visit it grants the key of the model as it is, for this version and until the end of the visit, and a fresh
    key for the next version, which is derived, so that the database holds none. An attempt that follows another makes
    that one void.

    Parameters
    ----------
    plan : Plan
        The plan, signed by `signer`.
    key : Key
        The key of the first model, from which the fresh keys are derived.
    terms : Terms
        The proofs that are asked for.
    signer : fastrack.grants.Signer
        The owner's signing key.
    ledger : TourLedger
        The database.

    Raises
    ------
    ValueError
        If the plan was not signed by `signer`.
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
    >>> desk = tour.OwnerDesk(plan, key, terms=terms, signer=owner, ledger=tour.TourLedger("owner.db"))
    >>> desk.role
    'owner'
    """

    role = "owner"

    def __init__(self, plan: Plan, key: Key, *, terms: Terms, signer: Signer, ledger: TourLedger) -> None:
        if plan.owner != signer.verifier:
            raise ValueError(
                f"opening the owner's desk: expected a plan of {signer.verifier!r}, got one of {plan.owner!r}"
            )
        super().__init__(plan, terms, signer, ledger, self.role)
        self._root = key

    def _steps(self) -> Mapping[str, Callable[[bytes], bytes]]:
        return {"challenge": self._challenge, "begin": self._begin, "finish": self._finish}

    def _begin(self, body: bytes) -> bytes:
        parts = unpack("begin", body)
        now = self._terms.clock()
        self._require_time(now)
        chain = self._read_chain(parts["chain"])
        self.plan.holder(len(chain.visits))
        request, verified = self._verify(parts["request"], parts["offer"], now)
        request.require_next(chain)
        state = self._accept(chain)
        manifest = self._check_manifest(chain, parts["manifest"])
        old, salt = model_key(chain, self._root), os.urandom(_SALT_SIZE)
        fresh = _derive(self._root, salt, self.plan)
        expires = min(now + timedelta(seconds=self.plan.seconds), self.plan.expires).replace(microsecond=0)
        if state.attempt > self.plan.attempts:
            raise RollbackError(
                f"visit {state.visit}: expected at most {self.plan.attempts} attempts by the plan, got one more. "
                "Its owner may sign another plan"
            )
        delegation = Delegation(
            plan=self.plan.digest,
            visit=state.visit,
            attempt=state.attempt,
            previous=state.head,
            before=request.model,
            signer=request.signer,
            key=fresh.id,
            salt=salt.hex(),
            expires=expires,
        ).sign(self._signer)
        limits = {"lineage": self.plan.lineage, "least_version": request.model.number}
        grants = self._wrap(verified.recipient, [old], expires=expires, **limits)
        grants += self._wrap(verified.recipient, [fresh], expires=expires)
        answer = pack("delegated", delegation=delegation.envelope, grants=write_grants(grants))
        details: dict[str, Any] = {"code": request.code, "key": fresh.id, "request": request.digest}
        details["signer"] = request.signer.id
        if state.latest is None:
            details[_HISTORY] = list(manifest.history)
        # Last, so that what fails before it uses up no attempt. It makes the attempt before void.
        begun = Attempt(state.visit, state.attempt, state.head, delegation.envelope, None)
        self._ledger.begin(begun, state.latest, accepted=state.accepted, offer=parts["offer"], now=now, details=details)
        return answer

    def _finish(self, body: bytes) -> bytes:
        parts = unpack("finish", body)
        now = self._terms.clock()
        chain = self._read_chain(parts["chain"])
        if len(chain.visits) != len(self.plan.order):
            raise RollbackError(
                f"finishing a tour: expected {len(self.plan.order)} receipts, got {len(chain.visits)}. Go on with it"
            )
        state = self._accept(chain)
        # Also when the receipt was accepted before: the owner signs this manifest.
        self._check_manifest(chain, parts["manifest"])
        # The same manifest, by the owner's own key, so that anchors of the owner accept it.
        manifest = sign_envelope(read_unverified_payload(parts["manifest"]), PAYLOAD_TYPE, [self._signer])
        made = Completion(
            plan=self.plan.digest, head=chain.head, visits=len(chain.visits), model=chain.model, issued=now
        ).sign(self._signer)
        stored = self._ledger.complete(state.latest, made.envelope, accepted=state.accepted, now=now)
        completion = Completion.from_bytes(stored, signer=self._signer.verifier)
        if completion.head != chain.head:
            raise RollbackError(
                f"finishing a tour: expected the chain that it ended with, of {completion.visits} receipts, got one of "
                f"{len(chain.visits)}. Get that chain and its model"
            )
        return pack("finished", completion=completion.envelope, manifest=manifest)

    # The state.

    def _state(self) -> _State:
        """Return the open visit: the one after the last receipt that was accepted."""
        latest = self._ledger.latest()
        if latest is None:
            return _State(0, self.plan.digest, None)
        if latest.receipt is not None:
            visit, accepted = latest.visit + 1, latest
        elif latest.visit == 0:
            return _State(0, self.plan.digest, latest)
        else:
            visit = latest.visit
            accepted = next(each for each in self._ledger.attempts(visit - 1) if each.receipt is not None)
        assert accepted.receipt is not None
        return _State(visit, sha256(read_unverified_payload(accepted.receipt)).hexdigest(), latest)

    def _accept(self, chain: Chain) -> _State:
        """Return the open visit that a chain leads to, with the receipt of the last attempt if it is new."""
        state = self._state()
        if len(chain.visits) == state.visit + 1:
            state = self._following(state, chain.visits[-1])
        if (state.visit, state.head) != (len(chain.visits), chain.head):
            raise RollbackError(
                f"the chain of tour {self.plan.tour}: expected {state.visit} receipts, the last {state.head:.16}…, got "
                f"{len(chain.visits)}, the last {chain.head:.16}…. It is an older or a forked one; get the newest"
            )
        return state

    def _following(self, state: _State, visit: VerifiedVisit) -> _State:
        """Return the visit after one, whose receipt must be that of the last attempt."""
        attempt = state.latest
        if attempt is None or attempt.visit != state.visit or attempt.document != visit.delegation.envelope:
            raise RollbackError(
                f"the receipt of visit {visit.number}: expected that of the last attempt, got that of attempt "
                f"{visit.delegation.attempt}. A later one made it void; begin with the model before"
            )
        details = {"model": [visit.after.number, visit.after.digest], "receipt": visit.receipt.digest}
        accepted = Accepted(attempt, visit.receipt.envelope, details)
        return _State(state.visit + 1, visit.receipt.digest, attempt, accepted)

    def _check_manifest(self, chain: Chain, content: bytes) -> Manifest:
        """Return the manifest of the newest model of a chain, with its whole history and the key that it must have."""
        source = "the manifest of the model"
        signer = chain.visits[-1].delegation.signer if chain.visits else self.plan.owner
        manifest = require_newest(Manifest.from_bytes(content, owner=signer, source=source), chain, source)
        # What is before the tour the desk keeps of its first visit: no receipt names it, and the owner is to sign it.
        before = self._ledger.first_details().get(_HISTORY, ())
        if chain.visits and manifest.history != (*chain_history(chain), *before)[:HISTORY_LIMIT]:
            raise RollbackError(
                f"{source}: expected the versions before the tour as in its first manifest, got others. The visit made "
                "them up; begin it again on another machine"
            )
        self._require_key(chain, entry_of(manifest).key)
        return manifest

    def _require_key(self, chain: Chain, key: str) -> None:
        """Require a model sealed under the owner's key, or, after a visit, under the fresh key of its delegation."""
        if not chain.visits and key != self._root.id:
            raise UnknownKeyError(
                f"the first model: expected key {self._root.id} of this desk, got {key}. Open the desk with the key "
                "that it is sealed under"
            )
        if chain.visits and key != chain.visits[-1].delegation.key:
            raise AuthenticationError(
                f"the model of visit {chain.visits[-1].number}: expected the fresh key "
                f"{chain.visits[-1].delegation.key}, got another. The visit did not rotate it; begin it again"
            )


@public
def model_key(chain: Chain, key: Key) -> Key:
    """Return the key that the newest model of a chain is sealed under: to open it, or to seal it under the owner's own.

    The keys of versions are derived from the owner's key and the salts of delegations, by HKDF (RFC 5869) with SHA-512.

    Parameters
    ----------
    chain : Chain
        The chain, in the folder of the model.
    key : Key
        The owner's key, which the first model is sealed under.

    Raises
    ------
    UnknownKeyError
        If it is not the key of the owner of this tour.

    Examples
    --------
    >>> import tempfile
    >>> from datetime import timedelta
    >>> import fastrack
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> owner, key = Signer.generate(), fastrack.Key.generate()
    >>> fastrack.save_checkpoint("model.safetensors", {"step": 0}, key=key)
    >>> _ = fastrack.publish("model.safetensors", signer=owner)
    >>> plan = tour.start("model.safetensors", "start", "json.tool:main", signer=owner,
    ...                   holders={"clinic": Signer.generate().verifier}, order=["clinic"], lifetime=timedelta(hours=1))
    >>> tour.model_key(tour.Chain.load("start/tour.chain", owner=owner.verifier), key) == key  # before the first visit
    True
    """
    if not chain.visits:
        return key
    delegation = chain.visits[-1].delegation
    derived = _derive(key, bytes.fromhex(delegation.salt), chain.plan)
    if derived.id != delegation.key:
        raise UnknownKeyError(
            f"deriving the key of {chain.model}: expected key {delegation.key}, got {derived.id}. Give the key of the "
            "owner of this tour, which its first model is sealed under"
        )
    return derived


def _derive(key: Key, salt: bytes, plan: Plan) -> Key:
    info = _LABEL + bytes.fromhex(plan.digest)
    return Key.from_bytes(HKDF(SHA512(), 32, salt, info).derive(key.material()))
