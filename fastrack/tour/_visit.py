"""One visit, from the visitor's side: `visit` takes a model folder and makes the next one, or nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fastrack._files.reader import SealedFile
from fastrack._keys.grants import Grants, open_later
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._keys.recipients import Identity
from fastrack._keys.signing import Signer, Verifier
from fastrack._sets.anchor import manifest_path
from fastrack._sets.load_file import load_file
from fastrack._sets.manifest import HISTORY_LIMIT, Manifest, load_manifest, sign_manifest
from fastrack._sets.publish import describe
from fastrack._training.checkpoints.checkpoint import open_checkpoint, save_checkpoint
from fastrack._util.new_folder import new_folder
from fastrack._util.public import public
from fastrack.attest._collect import collect_evidence
from fastrack.attest._exchange import Collector
from fastrack.attest._lease import Lease
from fastrack.attest._offer import Challenge, read_clock
from fastrack.errors import FormatError, GrantError
from fastrack.tour._buffer import DataBuffer, find_places
from fastrack.tour._chain import Chain
from fastrack.tour._code import Shards, Train, load_code
from fastrack.tour._documents import FILES_LIMIT, MODEL, Consent, Delegation, ModelVersion, Plan, Receipt
from fastrack.tour._folder import CHAIN, Folder, entry_of, write_file
from fastrack.tour._messages import Desk, pack, read_grants, unpack
from fastrack.tour._request import VisitRequest, make_visit_offer

Location = str | os.PathLike[str]

log = logging.getLogger("fastrack")


@public
def visit(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    train: str | Train,
    *,
    owner: Verifier,
    owner_desk: Desk,
    holder_desk: Desk,
    data: Sequence[Location],
    collect: Collector = collect_evidence,
    device: object = None,
    buffer_size: int | None = None,
    clock: Callable[[], datetime] = read_clock,
) -> Chain:
    """Make the next visit of a tour: train the model of a folder on one holder's data, and write it to another folder.

    The machine proves what it is, to the owner of the model and to the holder. Both grant their keys only to this
    process. The model and all state that `train` returns are sealed under a fresh key. Whatever fails, the buffer with
    the holder's data is scrubbed, the keys are wiped, `folder` stays as it is, and `out` is whole or absent: the model
    before can begin the visit again.

    Parameters
    ----------
    folder : path
        The model folder that `start`, or the visit before, wrote.
    out : path
        The new folder. It must not exist.
    train : str or callable
        ``module:function``, or the function. It takes the state, as `load_checkpoint` returns it, and an iterator of
        the holder's shards, each a dict of tensors that is valid until the next is asked for; it returns the new state,
        which `save_checkpoint` can save. `code_digest` of it must be the plan's.
    owner : Verifier
        The public key of the owner of the model.
    owner_desk, holder_desk : Desk
        Where the owner and the holder answer: `RemoteDesk`, or the desk itself in the same process.
    data : sequence of paths or URLs
        The holder's sealed files.
    collect : callable
        A function that takes an `fastrack.attest.OfferBinding` and returns `fastrack.attest.MachineEvidence`.
    device : str or torch.device, optional
        Device of the buffer and of the model's tensors: "cpu", the default, or "cuda:N".
    buffer_size : int, optional
        The size of the buffer in bytes. By default that of the largest file.
    clock : callable
        Returns the time, with a time zone.

    Returns
    -------
    Chain
        The verified chain with the new receipt, as it is in `out`.

    Raises
    ------
    RollbackError
        If the model is not the one of the last receipt, or the code not the plan's.
    AttestationError
        If the owner or the holder does not accept the evidence.
    GrantError, SignatureError, AuthenticationError, FormatError
        If an answer, the model or the data do not verify.
    LeaseError
        If the holder's keys are on a lease, and the holder ended the visit, or its desk did not renew them in time.
    OSError
        If a desk cannot be reached, or a file not be read or written.

    Examples
    --------
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> desk = tour.RemoteDesk("http://127.0.0.1:9")
    >>> tour.visit("visit-0", "visit-1", "json.tool:main", owner=Signer.generate().verifier, owner_desk=desk,
    ...            holder_desk=desk, data=["shard.safetensors"])
    Traceback (most recent call last):
        ...
    FileNotFoundError: ...
    """
    given = Folder.read(Path(folder), owner)
    chain = given.chain
    code = chain.plan.code
    function, _ = load_code(train, code)
    given.check()
    begun = work = None
    try:
        with new_folder(Path(out)) as target:  # it and the buffer before the visit is begun, which counts as an attempt
            buffer = _new_buffer(data, buffer_size, device)
            begun = _begin(given, code, owner_desk, holder_desk, collect, clock)
            work = _Work(begun, code, device, clock)
            after = work.train(given, function, data, buffer, target)
            following = work.end(chain, after)
            write_file(target / CHAIN, following.to_bytes())
    except BaseException:
        if work is not None:
            work.wipe()
            with suppress(Exception):  # the error of the visit is the one to hear of
                holder_desk.ask("end", work.last_receipt().envelope)
        elif begun is not None:
            begun.unlocked.close()
        raise
    work.wipe()
    try:
        holder_desk.ask("end", work.last_receipt().envelope)
    except Exception as error:  # noqa: BLE001 - whatever it is, the model is whole, and another attempt would void it
        # The receipt is in the chain, which brings it to the holder's next visit and to `fastrack tour verify`.
        log.warning("sending the receipt of visit %d to its holder failed: %s", len(chain.visits), error)
    return following


@dataclass(frozen=True, slots=True)
class _Begun:
    """A visit that owner and holder have granted, with the key that signs for it."""

    signer: Signer
    delegation: Delegation
    consent: Consent
    model: KeyRing
    fresh: Key
    data: KeyRing
    unlocked: ExitStack

    @property
    def end(self) -> datetime:
        """The time when the visit has to be over."""
        return min(self.delegation.expires, self.consent.expires)


def _new_buffer(data: Sequence[Location], size: int | None, device: object) -> DataBuffer:
    """Return a buffer that holds any of the holder's files. More than a receipt may name are refused."""
    if len(data) > FILES_LIMIT:
        raise GrantError(
            f"beginning a visit failed: expected at most {FILES_LIMIT} files, got {len(data)}. Seal larger ones"
        )
    if size is None:
        size = 1
        for path in data:
            with load_file(path) as file:
                size = max(size, find_places(file)[1])
    return DataBuffer(size, device)


def _begin(
    given: Folder, code: str, owner_desk: Desk, holder_desk: Desk, collect: Collector, clock: Callable[[], datetime]
) -> _Begun:
    """Prove what this machine is to both, and unlock what they grant."""
    chain, plan = given.chain, given.chain.plan
    holder = plan.holders[plan.holder(len(chain.visits))]
    signer = Signer.generate()
    challenges = tuple(Challenge.from_bytes(desk.ask("challenge")) for desk in (owner_desk, holder_desk))
    request = VisitRequest.of(chain, challenges, code, signer.verifier)
    offer, identity = make_visit_offer(request, collect)
    shown = {"request": request.to_bytes(), "offer": offer.to_bytes(), "chain": chain.to_bytes()}
    answer = unpack("delegated", owner_desk.ask("begin", pack("begin", manifest=given.manifest.envelope, **shown)))
    delegation = Delegation.from_bytes(answer["delegation"], signer=plan.owner)
    chain.require_turn(delegation)
    if delegation.signer != signer.verifier:
        raise GrantError("beginning a visit failed: expected a delegation to the key of this visit, got one to another")
    with ExitStack() as unlocked:  # all keys are wiped unless the visit begins
        model, fresh = _unlock(answer["grants"], identity, plan.owner, clock(), unlocked, count=2)
        wanted = entry_of(given.manifest).key
        # Before the holder is asked, whose consent a wrong key would use up.
        if (model.id, fresh.id) != (wanted, delegation.key) or fresh == model:
            raise GrantError(
                f"beginning a visit failed: expected key {wanted} of the model and a fresh key "
                f"{delegation.key}, got {model.id} and {fresh.id}. Ask the owner to open its desk with the right key"
            )
        consents: list[Consent] = []

        def exchange(_: float) -> list[tuple[Grants, Callable[[], Key]]]:
            """Have the holder grant the keys of its data: with the consent, and then for each lease of them."""
            message, own, is_first = shown, identity, not consents
            if not is_first:
                challenge = Challenge.from_bytes(holder_desk.ask("challenge"))
                again = VisitRequest.of(chain, (challenge,), code, signer.verifier)
                proof, own = make_visit_offer(again, collect)
                message = {"request": again.to_bytes(), "offer": proof.to_bytes()}  # the desk knows the chain
            asked = pack("begin", delegation=delegation.envelope, **message)
            answer = unpack("consented", holder_desk.ask("begin", asked))
            consent = Consent.from_bytes(answer["consent"], signer=holder)
            if consent.delegation != delegation.digest:
                raise GrantError(
                    "beginning a visit failed: expected the holder's consent to this visit, got that to another"
                )
            granted = open_later(_read(answer["grants"], holder), own, now=clock())
            if is_first:
                consents.append(consent)
            return granted

        data = Lease(exchange)
        for key in data:
            unlocked.callback(key.wipe)
        unlocked.callback(data.close)
        return _Begun(signer, delegation, consents[0], KeyRing([model]), fresh, data, unlocked.pop_all())


def _unlock(
    content: bytes, identity: Identity, issuer: Verifier, now: datetime, unlocked: ExitStack, count: int
) -> tuple[Key, ...]:
    """Return granted keys, which `unlocked` wipes when it is closed. Only a holder's may be on a lease."""
    keys = []
    for grants in _read(content, issuer, count):
        keys.append(grants.unlock(identity, now=now).first)
        unlocked.callback(keys[-1].wipe)
    return tuple(keys)


def _read(content: bytes, issuer: Verifier, count: int | None = None) -> list[Grants]:
    """Return verified grants."""
    envelopes = read_grants(content)
    if not envelopes or count not in {None, len(envelopes)}:
        raise FormatError(f"unlocking grants failed: expected {count or 'one or more'} keys, got {len(envelopes)}")
    return [Grants.from_bytes(envelope, owner=issuer) for envelope in envelopes]


class _Work:
    """The work of a visit so far, for its receipt."""

    def __init__(self, begun: _Begun, code: str, device: object, clock: Callable[[], datetime]) -> None:
        self._begun = begun
        self._code = code
        self._device = device
        self._clock = clock
        self._files: list[str] = []
        self._chunks = 0
        self._scrubbed = 0
        self._started = clock()
        self._signed: Receipt | None = None

    def train(
        self, given: Folder, function: Train, data: Sequence[Location], buffer: DataBuffer, target: Path
    ) -> ModelVersion:
        """Train the model of one folder, and seal it in another as its next version."""
        state = self._open_model(given)
        with self._shards(data, buffer) as shards:
            state = function(state, shards)
        save_checkpoint(target / MODEL, state, key=self._begun.fresh)
        previous = given.manifest
        envelope = sign_manifest(
            {MODEL: describe(target / MODEL, digests=True)},  # so that who carries it can verify it
            self._begun.signer,
            previous.lineage,
            (previous.digest, *previous.history)[:HISTORY_LIMIT],
            previous.version + 1,
        )
        write_file(manifest_path(target / MODEL), envelope)
        signed = Manifest.from_bytes(envelope, owner=self._begun.signer.verifier)
        return ModelVersion(signed.version, signed.digest)

    def _open_model(self, given: Folder) -> Any:
        """Open the model, whose key opens only what is of its lineage and version."""
        pinned = replace(entry_of(given.manifest), edition=(given.manifest.lineage, given.manifest.version))
        with SealedFile(given.path / MODEL, entry=pinned) as file:
            return open_checkpoint(file, self._begun.model, self._device)

    @contextmanager
    def _shards(self, data: Sequence[Location], buffer: DataBuffer) -> Iterator[Shards]:
        """Open the holder's files into one buffer, one after another, and scrub it at the end."""
        shards = self._open(data, buffer)
        try:
            yield shards
        finally:
            try:
                shards.close()  # which fails while another thread asks for the next shard
            finally:
                self._chunks = buffer.chunks
                self._scrubbed = buffer.scrub()

    def _open(self, data: Sequence[Location], buffer: DataBuffer) -> Any:
        for path in data:
            with load_file(path) as file:
                # A URL is named without its query, which may have a signature.
                if file.file_id not in self._begun.consent.files:
                    raise GrantError(
                        f"{file.path}: expected a file that the holder granted, got {file.file_id}. Name its own files"
                    )
                if self._clock() > self._begun.end:
                    raise GrantError(f"{file.path}: expected to open it by {self._begun.end}, got later. Begin again")
                self._begun.data.first.material()  # before the buffer, whose end the receipt counts
                self._files.append(file.file_id)
                yield buffer.open(file, self._begun.data)

    def end(self, chain: Chain, after: ModelVersion) -> Chain:
        """Sign the receipt with the new model, and return the chain with it."""
        self._begun.data.first.material()  # so that a visit that its holder ended fails, though it has all data
        following = chain.extend(self._sign(after).envelope)
        self._signed = following.visits[-1].receipt
        return following

    def last_receipt(self) -> Receipt:
        """Return the receipt that was signed, or one that says that the visit was broken off.

        Only one ever leaves this process: the folder may have its name already when the visit is interrupted.
        """
        return self._signed or self._sign(None)

    def wipe(self) -> None:
        """Overwrite all keys of the visit."""
        self._begun.unlocked.close()

    def _sign(self, after: ModelVersion | None) -> Receipt:
        return Receipt(
            delegation=self._begun.delegation.envelope,
            consent=self._begun.consent.envelope,
            code=self._code,
            after=after,
            files=tuple(self._files),
            chunks=self._chunks,
            scrubbed=self._scrubbed,
            started=self._started,
            ended=max(self._started, self._clock()),  # which may be set back meanwhile
        ).sign(self._begun.signer)


@public
def start(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    train: str | Train,
    *,
    signer: Signer,
    holders: Mapping[str, Verifier],
    order: Sequence[str],
    lifetime: timedelta,
    visit_limit: timedelta = timedelta(hours=1),
    attempts: int = 3,
    clock: Callable[[], datetime] = read_clock,
) -> Plan:
    """Sign the plan of a tour, and write the model folder that its first visit begins with.

    Parameters
    ----------
    model : path
        A checkpoint that `save_checkpoint` made and `publish` signed with `signer`, named ``model.safetensors``.
    out : path
        The new folder. It must not exist.
    train : str or callable
        The training code, as for `visit`.
    signer : Signer
        The signing key of the owner of the model.
    holders : mapping of str to Verifier
        The names of the holders, and their public keys.
    order : sequence of str
        The holder of each visit.
    lifetime, visit_limit : datetime.timedelta
        The time limits of the tour, and of each visit.
    attempts : int
        How often a visit may be begun in all.
    clock : callable
        Returns the time, with a time zone.

    Returns
    -------
    Plan
        The plan. Holders accept it by its digest.

    Raises
    ------
    SignatureError, RollbackError, AuthenticationError
        If the model has no manifest of `signer`, or is not as it says.
    FormatError
        If the plan would not be valid, such as with a holder that has no turn.

    Examples
    --------
    >>> from datetime import timedelta
    >>> import fastrack
    >>> from fastrack import tour
    >>> from fastrack.grants import Signer
    >>> owner, clinic = Signer.generate(), Signer.generate()
    >>> fastrack.save_checkpoint("model.safetensors", {"step": 0}, key=fastrack.Key.generate())
    >>> _ = fastrack.publish("model.safetensors", signer=owner)
    >>> plan = tour.start("model.safetensors", "start", "json.tool:main", signer=owner,
    ...                   holders={"clinic": clinic.verifier}, order=2 * ["clinic"], lifetime=timedelta(days=7))
    >>> plan.order
    ('clinic', 'clinic')
    """
    source = Path(model)
    manifest = load_manifest(manifest_path(source), owner=signer.verifier)
    manifest.check(source.name, source)
    if source.name != MODEL or list(manifest.files) != [MODEL]:
        raise FormatError(f"{source}: expected {MODEL} with a manifest of its own, got another. Rename and publish it")
    now = clock()
    plan = Plan(
        tour=os.urandom(16).hex(),
        lineage=manifest.lineage,
        start=ModelVersion(manifest.version, manifest.digest),
        holders=dict(holders),
        order=tuple(order),
        seconds=int(visit_limit.total_seconds()),
        attempts=attempts,
        code=load_code(train)[1],
        issued=now,
        expires=now + lifetime,
    ).sign(signer)
    with new_folder(Path(out)) as target:
        for path in (source, manifest_path(source)):
            write_file(target / path.name, path.read_bytes())
        write_file(target / CHAIN, plan.envelope)
    return plan
