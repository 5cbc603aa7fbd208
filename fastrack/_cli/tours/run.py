"""``fastrack tour run``: make the visits of a tour in their order, in folders of this machine.

It drives tests and tours whose accelerators share a disk. Where machines are apart, NVFlare brings the model from one
to the next.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fastrack import attest, tour
from fastrack._cli.console import clean, note, pluralize, tell
from fastrack._cli.errors import refuse_values
from fastrack._cli.options import Json, Silent
from fastrack._cli.tours.options import list_shards
from fastrack._documents.fields import SECONDS, TEXT, Field, list_of, record
from fastrack._documents.toml import Table
from fastrack._util.rights import open_own
from fastrack.attest._offer import read_clock
from fastrack.errors import FormatError, RollbackError
from fastrack.grants import Verifier
from fastrack.tour import Chain, RemoteDesk
from fastrack.tour._folder import CHAIN, Folder

_LIMIT = 1 << 20  # bytes of a configuration


def run(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="The model folder of `tour plan`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for visit-0, visit-1 and so on, and final.")],
    *,
    config: Annotated[
        Path, typer.Option("--config", metavar="TOML", help="Where desks and data are, and the training code.")
    ],
    quiet: Silent = False,
    as_json: Json = False,
) -> None:
    """Make the visits of a tour in their order, and have the owner complete it.

    What is in OUT is not made again: a run that was interrupted goes on with the next visit.
    """
    given = _read_config(config)
    owner = Verifier.load(given["owner_key"])
    first = _load(source, owner)
    if missing := [name for name in first.plan.holders if name not in given["holders"]]:
        raise FormatError(f"the configuration: expected holder {missing[0]} by the plan, got none. Add it as a table")
    out.mkdir(exist_ok=True)
    folder, before = source, first
    for number in range(len(first.visits), len(first.plan.order)):
        target = out / f"visit-{number}"
        if not target.exists():
            _visit(given, folder, target, before)
            if not quiet:
                note(f"visit {number} of {first.plan.holder(number)}: {target}")
        before = _following(target, owner, before)
        folder = target
    final = out / "final"
    if not final.exists():
        tour.finish(folder, final, owner=owner, owner_desk=_desk(given, given["owner"]))
    chain = _load(final, owner)
    chain.require_complete()
    if chain.plan != before.plan or chain.visits != before.visits:
        raise RollbackError(f"{final}: expected the end of tour {before.plan.tour}, got another. Name an empty folder")
    Folder.read(final, owner).check()
    _bring_receipts(given, chain)
    lines = [
        f"{clean(str(final))}: the model after {pluralize(len(chain.visits), 'visit')}, complete",
        f"model: {chain.model}",
    ]
    members = {"visits": len(chain.visits), "plan": chain.plan.digest, "head": chain.head}
    tell(lines, as_json=as_json, quiet=quiet, path=str(final), **members)


def _visit(given: dict[str, Any], folder: Path, target: Path, before: Chain) -> None:
    name = before.plan.holder(len(before.visits))
    tour.visit(
        folder,
        target,
        given["train"],
        owner=before.plan.owner,
        owner_desk=_desk(given, given["owner"]),
        holder_desk=_desk(given, given["holders"][name]["desk"]),
        data=list_shards(given["holders"][name]["data"]),
        collect=attest.collect_evidence,
        device=given.get("device"),
        clock=read_clock,
    )


def _desk(given: dict[str, Any], url: str) -> RemoteDesk:
    names = ("certificate", "private_key", "ca", "timeout")
    with refuse_values("--config"):
        return RemoteDesk(url, **{name: given[name] for name in names if name in given})


def _following(target: Path, owner: Verifier, before: Chain) -> Chain:
    """Return the chain of a folder, which must follow another chain by one visit."""
    chain = _load(target, owner)
    if chain.visits[:-1] != before.visits or chain.plan != before.plan:
        raise RollbackError(
            f"{target}: expected the visit after receipt {len(before.visits)} of tour {before.plan.tour}, got another. "
            "Name an empty folder"
        )
    return chain


def _bring_receipts(given: dict[str, Any], chain: Chain) -> None:
    """Send the last receipt of each holder, which its visitor may have failed to send. Earlier ones came by visits.

    A desk that is off does not keep the tour from its end: the chain has its receipt. Another run sends it again.
    """
    last = {visit.holder: visit.receipt for visit in chain.visits}
    problems = []
    for name, receipt in last.items():
        try:
            _desk(given, given["holders"][name]["desk"]).ask("end", receipt.envelope)
        except OSError as error:
            problems.append(f"{name} ({error})")
    if problems:
        raise ConnectionError(
            f"the tour is complete, but the last receipt did not reach {', '.join(problems)}. Run this again when it "
            "answers, or give it the chain"
        )


def _load(folder: Path, owner: Verifier) -> Chain:
    return Chain.load(folder / CHAIN, owner=owner)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a configuration, with its paths, which are relative to its folder."""
    with open_own(path) as file:
        table = Table.parse(file.read(_LIMIT), f"configuration {path}")
    values = {name: table.needed(name, TEXT) for name in _NEEDED} | table.read_all(_OPTIONS)
    holders = table.table("holders")
    if holders is None:
        raise table.refusal("holders", "a table", "none")
    values["holders"] = {name: holders.needed(name, _HOLDER) for name in holders.names()}
    table.done()
    for holder in values["holders"].values():
        holder["data"] = [path.parent / name for name in holder["data"]]
    return values | {name: path.parent / values[name] for name in _PATHS if name in values}


_NEEDED = ("train", "owner", "owner_key")
_OPTIONS = {"certificate": TEXT, "private_key": TEXT, "ca": TEXT, "timeout": SECONDS, "device": TEXT}
_PATHS = ("owner_key", "certificate", "private_key", "ca")
_HOLDER: Field[dict[str, Any]] = record(dict, {"desk": TEXT, "data": list_of(TEXT)})
