"""``fastrack tour verify``: verify the record of a tour, without any service and at any later time."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastrack._cli.console import clean, new_table, pluralize, tell
from fastrack._cli.options import Json
from fastrack._cli.tours.options import OwnerKey, PlanDigest, Source, load_chain
from fastrack._sets.anchor import manifest_path
from fastrack._sets.manifest import load_manifest
from fastrack.errors import AuthenticationError, FormatError, RollbackError
from fastrack.grants import Verifier
from fastrack.tour import Chain, Consent
from fastrack.tour._chain import VerifiedVisit, read_receipt
from fastrack.tour._documents import MODEL
from fastrack.tour._folder import require_newest
from fastrack.tour._ledger import Attempt, read_kept

_COLUMNS = ("visit", "holder", "attempt", "files", "chunks", "scrubbed", "model", "ended")


def verify(
    source: Source,
    *,
    owner: OwnerKey,
    plan_digest: PlanDigest = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Compare the model in this folder with the last receipt.")
    ] = None,
    database: Annotated[
        Path | None, typer.Option(metavar="DATABASE", help="A holder's: compare its consents and receipts.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept a chain without the owner's completion: the tour goes on.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Verify the chain of a tour, and show its visits.

    Every receipt must be signed by the key that the owner delegated for its visit, with the consent of the holder whose
    turn it was, and follow the receipt before. Nothing is asked of any service.
    """
    chain = load_chain(source, Verifier.load(owner), plan_digest)
    if not partial:
        chain.require_complete()
    if model is not None:
        _check_model(model, chain)
    attempts = [] if database is None else _compare(database, chain)
    table = new_table(*_COLUMNS, right=_COLUMNS[2:6])
    for visit in chain.visits:
        table.add_row(*(clean(cell) for cell in _cells(visit)))
    state = "complete" if chain.completion is not None else "NOT COMPLETE"
    lines: list[str | Table] = [
        *([table] if chain.visits else []),
        f"tour {chain.plan.tour}: {pluralize(len(chain.visits), 'visit')}, all as they were signed; {state}",
        f"plan: {chain.plan.digest}",
        f"head: {chain.head}",
        f"model: {chain.model}",
        *(f"{database}: {clean(_told(each))}" for each in attempts),
    ]
    tell(lines, as_json=as_json, **_document(source, chain), attempts=None if database is None else attempts)


def _cells(visit: VerifiedVisit) -> tuple[str, ...]:
    delegation, receipt = visit.delegation, visit.receipt
    counts = (delegation.attempt, len(receipt.files), receipt.chunks, receipt.scrubbed)
    model = f"{delegation.before.number} → {visit.after.number}"
    ended = receipt.ended.strftime("%Y-%m-%d %H:%M")
    return (str(visit.number), visit.holder, *map(str, counts), model, ended)


def _document(source: Path, chain: Chain) -> dict[str, Any]:
    return {
        "path": str(source),
        "ok": True,
        "complete": chain.completion is not None,
        "tour": chain.plan.tour,
        "plan": chain.plan.digest,
        "head": chain.head,
        "model": {"version": chain.model.number, "digest": chain.model.digest},
        "visits": [
            {
                "visit": visit.number,
                "holder": visit.holder,
                "attempt": visit.delegation.attempt,
                "files": list(visit.receipt.files),
                "chunks": visit.receipt.chunks,
                "scrubbed": visit.receipt.scrubbed,
                "before": visit.delegation.before.digest,
                "after": visit.after.digest,
                "started": visit.receipt.started.isoformat(),
                "ended": visit.receipt.ended.isoformat(),
                "receipt": visit.receipt.digest,
            }
            for visit in chain.visits
        ],
    }


def _check_model(folder: Path, chain: Chain) -> None:
    """Require the model of the last receipt, with the manifest of its visit, or of the owner behind a completion."""
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "expected a model folder, got another", str(folder))
    # The folder of the last visit is not yet signed by the owner, who completed the tour after it.
    signers = [chain.signer, *(visit.delegation.signer for visit in chain.visits[-1:])]
    manifest = require_newest(load_manifest(manifest_path(folder / MODEL), owner=signers), chain, str(folder / MODEL))
    manifest.check(MODEL, folder / MODEL)


def _compare(database: Path, chain: Chain) -> list[dict[str, Any]]:
    """Compare a holder's own database with a chain, and return what it has and the chain has not.

    Each visit of the holder must have a consent in the database; each receipt of the database must be in the chain,
    unless its visit was broken off or a later attempt took its place.
    """
    kept = read_kept(database)
    if not kept.role.startswith("holder ") or kept.plan != chain.plan.digest:
        raise RollbackError(
            f"{database}: expected the database of a holder for plan {chain.plan.digest:.16}…, got that of "
            f"the {kept.role} for {kept.plan:.16}…. Name another"
        )
    names = {chain.plan.holder(attempt.visit) for attempt in kept.attempts}
    if len(names) > 1:
        raise FormatError(f"{database}: expected the visits of one holder, got those of {', '.join(sorted(names))}")
    given = {attempt.document for attempt in kept.attempts}
    for visit in chain.visits:
        if visit.holder in names and visit.receipt.consent not in given:
            raise RollbackError(
                f"visit {visit.number} in the chain: expected a consent of {database}, got another. The database was "
                "set back, or the holder's signing key is used elsewhere"
            )
    pairs = zip(kept.attempts, kept.details, strict=True)
    rest = [_judge(attempt, details, chain, database) for attempt, details in pairs]
    return [each for each in rest if each is not None]


def _judge(attempt: Attempt, details: Mapping[str, Any], chain: Chain, database: Path) -> dict[str, Any] | None:
    """Return an attempt that is not the one in the chain, with its state; None for that of the chain."""
    holder = chain.plan.holders[chain.plan.holder(attempt.visit)]
    consent = Consent.from_bytes(attempt.document, signer=holder)
    if (consent.offer, consent.delegation) != (details["offer"], details.get("delegation")):
        raise AuthenticationError(
            f"{database}: expected the offer and the delegation of its consent to visit {attempt.visit}, got others. "
            "It was altered; restore it from a copy"
        )
    found = chain.visits[attempt.visit] if attempt.visit < len(chain.visits) else None
    is_here = found is not None and found.receipt.consent == attempt.document
    receipt = None if attempt.receipt is None else read_receipt(attempt.receipt, chain.plan).receipt
    is_void = found is not None and found.delegation.attempt > attempt.attempt
    # Of a visit whose visitor did not reach the holder the chain brings the receipt.
    if is_here and found is not None and receipt in {None, found.receipt}:
        if details["stopped"] is None:
            return None
        state = "in the chain"
    elif receipt is None:
        state = "without a receipt"
    elif receipt.after is None:
        state = "broken off"
    elif is_void:
        state = "void by a later attempt"
    else:
        raise RollbackError(
            f"{database}: expected receipt {receipt.digest:.16}… of visit {attempt.visit} in the chain, got none. "
            "Receipts were left out; get the whole chain"
        )
    if details["stopped"] is not None:
        state += f"; ended by its holder: {details['stopped']}"
    files, issued = len(consent.files), consent.issued.isoformat()
    return {"visit": attempt.visit, "attempt": attempt.attempt, "state": state, "files": files, "issued": issued}


def _told(attempt: dict[str, Any]) -> str:
    return f"visit {attempt['visit']}, attempt {attempt['attempt']}, consent of {attempt['issued']}: {attempt['state']}"
