"""``fastrack attest fetch`` and ``policy``: an owner's collateral and policy, before the first offer is judged."""

import errno
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastrack._cli.commands.attest import Offered, load_collateral, read_challenge, read_clock, read_offer
from fastrack._cli.console import note, print_json, stdout
from fastrack._cli.documents import check_document, write_document
from fastrack._cli.errors import show_errors
from fastrack._cli.options import Json
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack.attest import CollateralServices, FetchedDocument


class Product(Enum):
    """The products whose reports of version 2 do not tell which they are of."""

    MILAN = "Milan"
    GENOA = "Genoa"


Base = typer.Option(metavar="URL", help="The address of a mirror, in place of the vendor's.")


def fetch(
    source: Offered,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of collateral; made if it is absent.")],
    *,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder that was filled elsewhere: no service is asked.")
    ] = None,
    product: Annotated[
        Product | None, typer.Option(help="For reports of SEV-SNP that do not tell.", case_sensitive=False)
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask for newer lists, though those there are fresh.")
    ] = False,
    ca: Annotated[Path | None, typer.Option(metavar="PEM", help="The authority of a mirror or proxy.")] = None,
    intel: Annotated[str | None, Base] = None,
    intel_roots: Annotated[str | None, Base] = None,
    amd: Annotated[str | None, Base] = None,
    nvidia_rim: Annotated[str | None, Base] = None,
    nvidia_ocsp: Annotated[str | None, Base] = None,
    as_json: Json = False,
) -> None:
    """Fetch the collateral that an offer names: from Intel, AMD and NVIDIA, through the proxy of https_proxy.

    What is there and still holds is not asked for again. Everything is verified before it is kept, byte for byte.

    Exit status: 0 if all documents are there and renewed as they should be; 1 if one could not be had, does not hold,
    or revokes the machine. What an earlier run fetched stays, and holds until the time that is printed.
    """
    from fastrack.attest import CollateralServices, fetch_collateral
    from fastrack.attest._exchange import VENDOR_ROOTS

    if bundle is not None and not bundle.is_dir():
        problem = "expected a folder that `fastrack attest fetch` filled elsewhere, got none. Carry it over first"
        raise NotADirectoryError(errno.ENOTDIR, problem, str(bundle))
    given = {
        "intel": intel,
        "intel_roots": intel_roots,
        "amd": amd,
        "nvidia_rim": nvidia_rim,
        "nvidia_ocsp": nvidia_ocsp,
    }
    services = CollateralServices(**{name: url.rstrip("/") for name, url in given.items() if url is not None})
    _check_addresses(services)
    documents = []
    for document in fetch_collateral(
        read_offer(source).evidence,
        folder,
        services=services,
        roots=VENDOR_ROOTS,
        product=None if product is None else product.value,
        ca=None if ca is None else str(ca),
        bundle=bundle,
        refresh=refresh,
        now=read_clock(),
    ):
        documents.append(document)
        if not as_json:
            stdout().print(_line(document))
        if document.kept_because is not None and not as_json:
            show_errors([f"{document.name} is kept as it was: {document.kept_because}"])
    if as_json:
        print_json(documents=[_members(document) for document in documents])
    if any(document.kept_because is not None for document in documents):
        raise typer.Exit(1)


def _check_addresses(services: "CollateralServices") -> None:
    from fastrack._net.addresses import require_service

    for name, url in asdict(services).items():
        try:
            require_service(url, "fetching", has_path=True)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from None


def _line(document: "FetchedDocument") -> str:
    state = "fetched" if document.is_new else "holds"
    return f"{state:<8}{document.name}: {document.about}, until {document.valid_until:%Y-%m-%d %H:%M} UTC"


def _members(document: "FetchedDocument") -> dict[str, object]:
    until = document.valid_until.isoformat()
    members = {"name": document.name, "about": document.about, "valid_until": until, "fetched": document.is_new}
    return members | {"kept_because": document.kept_because}


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
        Path | None,
        typer.Option("--diff", metavar="OLD", help="Print what differs from a policy; status 1 if any."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft a policy that accepts the machine of an offer, and no other: each value with what it covers.

    Only of evidence that verifies. It says nothing about whether the machine is yours: look at it before you use it.
    Without --challenge the offer may be an old one, or one made for another owner.
    """
    from fastrack.attest import compare_policies, draft_policy, verify_evidence
    from fastrack.attest._exchange import VENDOR_ROOTS, prove_offer

    check_document(target)
    offer, now, given = read_offer(source), read_clock(), load_collateral(collateral)
    if unverified:
        text = draft_policy(offer.evidence)
    elif challenge is None:
        text = draft_policy(*verify_evidence(offer.evidence, now=now, collateral=given, roots=VENDOR_ROOTS))
    else:
        text = draft_policy(*prove_offer(offer, read_challenge(str(challenge)), now, given, VENDOR_ROOTS)[1:])
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
