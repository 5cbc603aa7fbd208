"""``fastrack tour plan``: sign the plan of a tour, and write the folder that it begins with."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from fastrack import tour
from fastrack._cli.attest.exchange import Period
from fastrack._cli.commands.broker import Signer
from fastrack._cli.commands.grant import load_signer
from fastrack._cli.console import clean, pluralize, tell
from fastrack._cli.documents import parse_period
from fastrack._cli.errors import refuse_options
from fastrack._cli.files import check_new, check_source
from fastrack._cli.options import Json
from fastrack._util.shown import shown
from fastrack.attest._offer import read_clock
from fastrack.grants import Verifier

_LONGEST = timedelta(days=366)
_NAME = re.compile(r"[\w.-]+")


def plan(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The model.safetensors of `save_checkpoint`, with its manifest.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write. It must not exist.")],
    *,
    train: Annotated[str, typer.Option(metavar="CODE", help="The training code, as module:function.")],
    signer: Signer,
    holder: Annotated[
        list[str], typer.Option(metavar="NAME=PUBLIC", help="A holder's name and public file; may be repeated.")
    ],
    order: Annotated[str, typer.Option(metavar="NAMES", help="The holder of each visit, as a,b,a.")],
    lifetime: Annotated[
        str, typer.Option(metavar="PERIOD", help="The time until no more visit begins, 366d at most.")
    ] = "7d",
    visit_limit: Period = "1h",
    attempts: Annotated[int, typer.Option(min=1, max=65535, help="How often a visit may be begun in all.")] = 3,
    as_json: Json = False,
) -> None:
    """Sign the plan of a tour, and write the model folder that its first visit begins with."""
    check_source(model)
    check_new(out)
    holders = dict(_read_holder(text) for text in holder)
    made = tour.start(
        model,
        out,
        train,
        signer=load_signer(signer),
        holders=holders,
        order=_read_order(order, holders),
        lifetime=parse_period(lifetime, "--lifetime", longest=_LONGEST),
        visit_limit=parse_period(visit_limit, "--visit-limit"),
        attempts=attempts,
        clock=read_clock,
    )
    visits, names = pluralize(len(made.order), "visit"), pluralize(len(made.holders), "holder")
    lines = [
        f"{clean(str(out))}: tour {made.tour}, {visits} of {names}, until {made.expires.isoformat(timespec='seconds')}",
        f"plan: {made.digest}",
        "Holders accept it by this digest: --plan-digest of `fastrack tour hold`.",
    ]
    tell(
        lines,
        as_json=as_json,
        path=str(out),
        tour=made.tour,
        plan=made.digest,
        code=made.code,
        holders={name: verifier.id for name, verifier in made.holders.items()},
        order=list(made.order),
        expires=made.expires.isoformat(),
    )


def _read_holder(text: str) -> tuple[str, Verifier]:
    name, _, path = text.partition("=")
    is_other = not _NAME.fullmatch(name) or not path
    refuse_options({"--holder": is_other}, f"expected NAME=PUBLIC, got {shown(text)}")
    return name, Verifier.load(path)


def _read_order(text: str, holders: dict[str, Verifier]) -> list[str]:
    names = text.split(",")
    reason = f"expected each of {', '.join(holders)} and no other name, got {shown(text)}"
    refuse_options({"--order": set(names) != set(holders)}, reason)
    return names
