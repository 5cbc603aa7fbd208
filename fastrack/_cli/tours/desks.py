"""``fastrack tour own``, ``hold`` and ``key``: the desks of the owner of a model and of a holder of data."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from fastrack import load_file, tour
from fastrack._cli.attest.exchange import Collateral, UnderPolicy, load_collateral
from fastrack._cli.commands.broker import Certificate, Host, InsecureLoopback, Port, PrivateKey, Signer, check_tls
from fastrack._cli.commands.grant import load_signer
from fastrack._cli.console import clean, tell
from fastrack._cli.documents import parse_period, require_line
from fastrack._cli.errors import refuse_values
from fastrack._cli.files import KEPT, check_new, check_sealed, open_ring
from fastrack._cli.options import Json, KeyFile, KeyFiles
from fastrack._cli.tours.options import OwnerKey, Source, list_shards, load_chain
from fastrack._keys.keyring import KeyRing
from fastrack._util.regular_file import open_regular
from fastrack.attest import _verify_offer
from fastrack.attest._device_collateral import check_folder
from fastrack.attest._offer import read_clock
from fastrack.errors import FormatError
from fastrack.grants import Verifier
from fastrack.tour import HolderDesk, OwnerDesk, Terms, TourLedger, model_key

Database = Annotated[
    Path, typer.Option("--database", metavar="DATABASE", help="The desk's database, in SQLite, of this tour only.")
]
ClientCa = Annotated[
    Path | None, typer.Option("--client-ca", metavar="PEM", help="The authorities of the visitors' certificates.")
]
Rate = Annotated[float, typer.Option(min=0.1, help="Requests a minute that an address may send.")]
Burst = Annotated[int, typer.Option(min=1, help="Requests that an address may send at once.")]


def own(
    source: Source,
    *,
    policy: UnderPolicy,
    signer: Signer,
    key: KeyFile = None,
    database: Database,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    client_ca: ClientCa = None,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    insecure_loopback: InsecureLoopback = False,
    collateral: Collateral = None,
    rate: Rate = 60.0,
    burst: Burst = 30,
) -> None:
    """Serve the desk of the model's owner until the process is asked to end. The log is on stderr, as lines of JSON.

    It grants the model's key to each visit, and delegates the signing of the next version.
    """
    tls = _check(certificate, private_key, client_ca, host, insecure=insecure_loopback)
    terms, ledger, mine = _read_terms(policy, collateral), TourLedger(database), load_signer(signer)
    plan = load_chain(source, mine.verifier).plan
    desk = OwnerDesk(plan, open_ring(key).first, terms=terms, signer=mine, ledger=ledger)
    tour.serve(desk, host=host, port=port, insecure_loopback=insecure_loopback, rate=rate, burst=burst, **tls)


def hold(
    source: Source,
    *,
    owner: OwnerKey,
    plan_digest: Annotated[
        str, typer.Option("--plan-digest", metavar="DIGEST", help="The plan that the holder accepted.")
    ],
    data: Annotated[
        list[Path], typer.Option(metavar="PATH", help="A sealed file to grant, or a folder of them; may be repeated.")
    ],
    policy: UnderPolicy,
    signer: Annotated[
        Path, typer.Option("--signer", metavar="SIGNER", help="The holder's signing key, of `keygen --signer`.")
    ],
    key: KeyFiles = None,
    database: Database,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    client_ca: ClientCa = None,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    insecure_loopback: InsecureLoopback = False,
    collateral: Collateral = None,
    lease: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="Time that a visit may use keys until it is proved again.")
    ] = None,
    rate: Rate = 60.0,
    burst: Burst = 30,
) -> None:
    """Serve the desk of a holder of data until the process is asked to end. The log is on stderr, as lines of JSON.

    It grants the keys of the data to visits at the holder's turns, and keeps their receipts.
    """
    tls = _check(certificate, private_key, client_ca, host, insecure=insecure_loopback)
    plan = load_chain(source, Verifier.load(owner), plan_digest).plan
    ring, mine = open_ring(key), load_signer(signer)
    files = _read_ids(data, ring)
    terms, keys = _read_terms(policy, collateral), list(ring) or [ring.first]
    period = None if lease is None else parse_period(lease, "--lease")
    with refuse_values("--signer or --data" if period is None else "--signer, --data or --lease"):
        desk = HolderDesk(plan, keys, files=files, terms=terms, signer=mine, ledger=TourLedger(database), lease=period)
    tour.serve(desk, host=host, port=port, insecure_loopback=insecure_loopback, rate=rate, burst=burst, **tls)


def stop(
    *,
    database: Database,
    why: Annotated[str, typer.Option(metavar="TEXT", help="The reason, for the holder's own log.")],
    as_json: Json = False,
) -> None:
    """End the visit in progress, whose keys are on a lease: its desk renews them no more. The desk may go on."""
    require_line(why, "--why")
    open_regular(database).close()  # a database that is missing would be made
    with closing(TourLedger(database)) as ledger:
        attempt, seconds = ledger.stop(why, now=read_clock())
    named = f"visit {attempt.visit}, attempt {attempt.attempt}"
    lines = [f"{clean(str(database))}: {named} is ended; its machine loses the keys within {seconds} seconds"]
    tell(lines, as_json=as_json, path=str(database), visit=attempt.visit, attempt=attempt.attempt, seconds=seconds)


def key(
    source: Source,
    target: Annotated[Path, typer.Argument(metavar="KEY", help="The key file to write. It must not exist.")],
    *,
    owner: OwnerKey,
    key: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Write the key of the model in a folder of a tour, for its owner."""
    check_new(target, KEPT)
    made = model_key(load_chain(source, Verifier.load(owner)), open_ring(key).first)
    key_id = made.id
    try:
        made.save(target)
    finally:
        made.wipe()
    lines = [f"{clean(str(target))}: the key of the newest model, that only you may read", f"id: {key_id}"]
    tell(lines, as_json=as_json, path=str(target), key_id=key_id)


def _check(
    certificate: Path | None, private_key: Path | None, client_ca: Path | None, host: str, *, insecure: bool
) -> dict[str, Any]:
    files = {"--certificate": certificate, "--private-key": private_key, "--client-ca": client_ca}
    check_tls(files, host, insecure=insecure)
    return {"certificate": certificate, "private_key": private_key, "ca": client_ca}


def _read_terms(policy: Path, collateral: Path | None) -> Terms:
    given = load_collateral(collateral)
    if isinstance(given, Path):
        check_folder(given)
    return Terms.from_toml(policy, collateral=given, roots=_verify_offer.VENDOR_ROOTS, clock=read_clock)


def _read_ids(data: list[Path], ring: KeyRing) -> list[str]:
    """Return the ids of sealed files. Refuse a file with anything unencrypted, and one that no key opens."""
    ids = []
    for path in list_shards(data):
        with load_file(path) as file:
            check_sealed(file, ring)
            if file.plain:
                raise FormatError(
                    f"{path}: expected a file with everything sealed, got {len(file.plain)} plain tensors. Seal it"
                )
            ids.append(str(file.file_id))
    return ids
