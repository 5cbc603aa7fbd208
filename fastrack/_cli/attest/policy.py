"""``fastrack attest policy``: draft an owner's policy, before the first offer is judged."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.attest.exchange import Offered, load_collateral, read_challenge, read_offer
from fastrack._cli.console import note, print_json, stdout
from fastrack._cli.documents import check_document, write_document
from fastrack._cli.options import Json
from fastrack.attest import _verify_offer, compare_policies, draft_policy, verify_evidence
from fastrack.attest._offer import read_clock
from fastrack.attest._verify_offer import prove_offer
from fastrack.errors import FormatError


def policy(
    source: Offered,
    target: Annotated[str, typer.Argument(metavar="POLICY", help="The policy to write; - for standard output.")] = "-",
    *,
    challenge: Annotated[
        Path | None, typer.Option(metavar="CHALLENGE", help="The challenge that the offer has to answer.")
    ] = None,
    collateral: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The folder of `fetch`, or collateral of TDX in JSON.")
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Draft what the offer claims, though anyone can write that.")
    ] = False,
    diff: Annotated[
        Path | None, typer.Option("--diff", metavar="OLD", help="Print what differs from a policy; status 1 if any.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft a policy that accepts the machine of an offer, and no other: each value with what it covers.

    Only of evidence that verifies. It says nothing about whether the machine is yours: look at it before you use it.
    Without --challenge the offer may be an old one, or one made for another owner.
    """
    check_document(target)
    offer, now, given = read_offer(source), read_clock(), load_collateral(collateral)
    roots = _verify_offer.VENDOR_ROOTS
    if unverified:
        text = draft_policy(offer.evidence)
    elif challenge is None:
        text = draft_policy(*verify_evidence(offer.evidence, now=now, collateral=given, roots=roots))
    else:
        text = draft_policy(*prove_offer(offer, read_challenge(str(challenge)), now, given, roots)[1:])
    if diff is None:
        _write_policy(target, text, as_json=as_json)
        return
    try:
        changes = compare_policies(diff.read_text(), text)
    except ValueError as error:
        raise FormatError(f"reading {diff} failed: expected a policy in TOML, got {error}. Correct it.") from None
    if as_json:
        print_json(changes=list(changes))
    else:
        for change in changes:
            stdout().print(change)
    if changes:
        raise typer.Exit(1)


def _write_policy(target: str, text: str, *, as_json: bool) -> None:
    """Write a drafted policy, and name the keys that are comments in it."""
    comments = list(_list_comments(text))
    if target != "-" or not as_json:
        write_document(target, text.encode())
    if as_json:
        print_json(policy=tomllib.loads(text), path=None if target == "-" else target, comments=comments)
    elif target != "-" and comments:
        advice = "since they would let in more; read each, and decide"
        note(f"drafted as comments in {target}, {advice}: {', '.join(comments)}")


def _list_comments(text: str) -> Iterator[str]:
    """Return the keys that a draft has as comments, each with its section."""
    section = ""
    for line in text.splitlines():
        if found := re.fullmatch(r"\[(?P<section>[\w.]+)\]", line):
            section = f"{found['section']}."
        elif found := re.match(r"# (?P<key>\w+) = ", line):
            yield section + found["key"]
