"""``fastrack attest fetch``: an owner's collateral, before the first offer is judged."""

import errno
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from fastrack._cli.attest.exchange import Offered, read_offer
from fastrack._cli.console import print_json, stdout
from fastrack._cli.errors import refuse_values, show_errors
from fastrack._cli.options import Json
from fastrack._net.addresses import require_service
from fastrack.attest import CollateralServices, FetchedDocument, _verify_offer, fetch_collateral
from fastrack.attest._offer import read_clock

Product = Literal["Milan", "Genoa"]  # whose reports of version 2 do not tell which they are of
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
    for name, url in asdict(services).items():
        with refuse_values(f"--{name.replace('_', '-')}"):
            require_service(url, "fetching", has_path=True)
    documents = []
    for document in fetch_collateral(
        read_offer(source).evidence,
        folder,
        services=services,
        roots=_verify_offer.VENDOR_ROOTS,
        product=product,
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


def _line(document: FetchedDocument) -> str:
    state = "fetched" if document.is_new else "holds"
    return f"{state:<8}{document.name}: {document.about}, until {document.valid_until:%Y-%m-%d %H:%M} UTC"


def _members(document: FetchedDocument) -> dict[str, object]:
    until = document.valid_until.isoformat()
    members = {"name": document.name, "about": document.about, "valid_until": until, "fetched": document.is_new}
    return members | {"kept_because": document.kept_because}
