"""``fastrack broker``: serve the owner's side of the exchange, and verify its log."""

import getpass
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

import typer

from fastrack._cli.attest.exchange import Collateral, FileIds, Period, UnderPolicy, load_collateral
from fastrack._cli.commands.grant import load_signer
from fastrack._cli.console import clean, new_table, pluralize, tell
from fastrack._cli.documents import check_document, parse_period, require_line, write_document
from fastrack._cli.errors import refuse_options, refuse_values
from fastrack._cli.files import open_ring
from fastrack._cli.options import Json, KeyFiles
from fastrack._documents.canonical import parsing
from fastrack._service.journal import LogRecord
from fastrack._service.limits import RateLimit
from fastrack.attest import Policy
from fastrack.attest._broker.heads import compare_heads, read_head, sign_head
from fastrack.attest._broker.ledger import Ledger, read_log
from fastrack.attest._broker.machines import ID, MARKS, Holder, find_holders, find_quarantined, names_of
from fastrack.attest._broker.service import Broker, Settings
from fastrack.attest._device_collateral import check_folder
from fastrack.attest._offer import read_clock
from fastrack.attest._policy import read_policy_text
from fastrack.errors import FastrackError
from fastrack.grants import Verifier

Database = Annotated[Path, typer.Option("--database", metavar="DATABASE", help="The broker's database, in SQLite.")]
Signer = Annotated[
    Path, typer.Option("--signer", metavar="SIGNER", help="The owner's signing key, of `keygen --signer`.")
]
Certificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="PEM", help="The certificate of the server, with its chain.")
]
PrivateKey = Annotated[Path | None, typer.Option("--private-key", metavar="PEM", help="Its private key.")]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for any.")]
InsecureLoopback = Annotated[
    bool, typer.Option("--insecure-loopback", help="Serve without TLS, on a loopback address only.")
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A PPID, chip id or UEID; the id of a key; or the SHA-256 of a policy.")
]
Why = Annotated[str, typer.Option(metavar="TEXT", help="The reason, for the log.")]
By = Annotated[str | None, typer.Option(metavar="NAME", help="Who decided it, for the log; by default the user.")]

app = typer.Typer(no_args_is_help=True, help="Grant keys to machines that prove what they are, over HTTPS.")


def serve(
    *,
    policy: UnderPolicy,
    signer: Signer,
    key: KeyFiles = None,
    database: Database,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    host: Host = "127.0.0.1",
    port: Port = 8443,
    insecure_loopback: InsecureLoopback = False,
    collateral: Collateral = None,
    file_id: FileIds = None,
    challenge_lifetime: Period = "5m",
    grant_lifetime: Period = "5m",
    lease: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="Time that a machine may use keys until it is proved again.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a minute that an address may send.")] = 60.0,
    burst: Annotated[int, typer.Option(min=1, help="Requests that an address may send at once.")] = 30,
) -> None:
    """Serve challenges and offers until the process is asked to end. The log is on stderr, as lines of JSON."""
    check_tls({"--certificate": certificate, "--private-key": private_key}, host, insecure=insecure_loopback)
    try:
        from fastrack._service.server import serve as serve_app
        from fastrack.attest._broker.app import make_app
    except ImportError as error:
        raise FastrackError(
            f"starting the broker failed: expected starlette and uvicorn, got {error}. "
            "Run: pip install 'fastrack-io[broker]'"
        ) from None

    given = load_collateral(collateral)
    if isinstance(given, Path):
        check_folder(given)
    period = None if lease is None else parse_period(lease, "--lease")
    is_short = period is not None and period.total_seconds() < 2
    refuse_options({"--lease": is_short}, f"expected two seconds or more, got {lease!r}")
    text = read_policy_text(policy)
    settings = Settings(
        Policy.from_toml(text),
        challenge_lifetime=parse_period(challenge_lifetime, "--challenge-lifetime"),
        grant_lifetime=parse_period(grant_lifetime, "--grant-lifetime"),
        files=tuple(file_id) if file_id else None,
        collateral=given,
        lease=period,
        policy_id=sha256(text.encode()).hexdigest(),
    )
    ring, owner = open_ring(key), load_signer(signer)

    def make() -> Any:
        with refuse_values("--file-id, --key"):
            return make_app(Broker(settings, ring, owner, Ledger(database)), limit=RateLimit(rate, burst))

    serve_app(make, host=host, port=port, certificate=certificate, private_key=private_key)


def check_tls(files: Mapping[str, Path | None], host: str, *, insecure: bool) -> None:
    """Require all files of TLS, by the options that name them, or a loopback address on demand."""
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:
        raise typer.BadParameter(f"expected an IP address, got {host!r:.80}", param_hint="--host") from None
    is_other = insecure and (any(files.values()) or not is_loopback)
    reason = "expected a loopback address and no certificate with it, got others"
    refuse_options({"--insecure-loopback": is_other}, reason)
    *names, last = files
    reason = (
        f"expected {', '.join(names)} and {last}, got less; machines send their evidence over TLS only. "
        "Behind a proxy of this machine, which ends TLS: --insecure-loopback"
    )
    refuse_options({"--certificate": not insecure and None in files.values()}, reason)


def log(
    *,
    database: Database,
    head: Annotated[
        str | None, typer.Option(metavar="HASH", help="Fail unless the log has the entry with this hash.")
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="The number of entries to show; 0 for all.")] = 20,
    as_json: Json = False,
) -> None:
    """Verify the log of a broker, and show its last entries."""
    try:
        expected_head = None if head is None else bytes.fromhex(head)
    except ValueError:
        raise typer.BadParameter(f"expected a hash in hexadecimal, got {head!r:.80}", param_hint="--head") from None
    entries = read_log(database, head=expected_head)
    newest = entries[-1].hash.hex() if entries else None
    shown = entries[-last:]
    table = new_table("entry", "time", "event", "challenge", "details", right=("entry",))
    for entry in shown:
        details = {name: value for name, value in entry.details.items() if name != "challenge" and value is not None}
        text = ", ".join(f"{name} {value}" for name, value in details.items())
        cells = (str(entry.number), entry.time, entry.event, str(entry.details.get("challenge", "")), text)
        table.add_row(*(clean(cell) for cell in cells))
    rows = [asdict(entry) | {"hash": entry.hash.hex()} for entry in shown]
    lines: list[Any] = [
        table,
        f"{pluralize(len(entries), 'entry')}, all as they were written",
        f"head: {newest or 'none'}",
    ]
    tell(lines, as_json=as_json, path=str(database), ok=True, entries=rows, count=len(entries), head=newest)


def head(
    target: Annotated[str, typer.Argument(metavar="HEAD", help="The file to write; - for standard output.")] = "-",
    *,
    database: Database,
    signer: Signer,
) -> None:
    """Verify the log of a broker, and sign its head: the number, time and hash of its last entry.

    Keep it elsewhere, or publish it: `compare` tells by it whether a later log goes on from this one.
    """
    check_document(target)
    write_document(target, sign_head(read_log(database), load_signer(signer)))


def compare(
    known: Annotated[Path, typer.Argument(metavar="KNOWN", help="A head that was signed, or a copy of the database.")],
    now: Annotated[Path, typer.Argument(metavar="NOW", help="The database, or a head that was signed later.")],
    *,
    owner: Annotated[
        list[Path] | None, typer.Option(metavar="PUBLIC", help="The public file of an owner; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two logs of a broker, each by a signed head or its database.

    Exit status: 0 if the second is the same, or newer: it goes on from the first. 1 if it is older, as a database that
    was set back; if it is forked: it has another entry in a place of the first; or if it is a later head, which does
    not tell: name the database.
    """
    owners = [Verifier.load(path) for path in owner or ()]
    logs = read_head(known, owners), read_head(now, owners)
    state = compare_heads(*logs)
    first, second = (max(log, default=0) for log in logs)
    line = f"{state}: {clean(str(now))} has {second} entries, {clean(str(known))} {first}"
    tell([line], as_json=as_json, state=state, known=first, now=second)
    if state not in {"same", "newer"}:
        raise typer.Exit(1)


def machines(*, database: Database, as_json: Json = False) -> None:
    """Verify the log, and list which machines hold which keys until when, and what is in quarantine."""
    held, marked, _ = _read(database)
    table = new_table("machine", "GPUs, with UEIDs", "keys", "renewed", "until", "quarantine")
    for one in held:
        gpus = ", ".join(f"{gpu['chip_id']} {gpu['ueid']}" for gpu in one.gpus)
        cells = str(one.cpu or ""), gpus, ", ".join(one.keys), one.renewed, one.until or "for ever"
        table.add_row(*map(clean, cells), ", ".join(one.quarantined))
    told = (f"quarantined: {name} since {one.time}: {one.details.get('why')}" for name, one in marked.items())
    rows, marks = [*map(asdict, held)], [{"time": one.time, **one.details} for one in marked.values()]
    tell([table, *map(clean, told)], as_json=as_json, path=str(database), machines=rows, quarantined=marks)


def quarantine(
    name: Name,
    *,
    database: Database,
    why: Why,
    by: By = None,
    answer: Annotated[
        str | None, typer.Option("--tell", metavar="TEXT", help="What refused machines are told beside that.")
    ] = None,
    unseen: Annotated[bool, typer.Option("--unseen", help="Take a name that the log does not have.")] = False,
    as_json: Json = False,
) -> None:
    """Refuse a machine, a key or all that a policy admits, from now on: no grant, and no renewal of a lease.

    A running machine loses its keys when it next renews their lease. Keys that were granted for ever it keeps.
    """
    (holders, _, kinds), name = _read(database), name.lower()
    if name not in kinds and not (unseen and ID.fullmatch(name)):
        problem = "expected a name of this log, got another. `fastrack broker machines` lists machines and keys"
        raise typer.BadParameter(f"{problem}; others need --unseen", param_hint="NAME")
    held = sum(name in holder.names for holder in holders)
    given = {} if answer is None else {"tell": answer}
    _mark(MARKS[0], name, database, by, why, as_json=as_json, kind=kinds.get(name, "unseen"), held=held, **given)


def lift(name: Name, *, database: Database, why: Why, by: By = None, as_json: Json = False) -> None:
    """End a quarantine: machines are judged by the policy again. A lease that ended meanwhile does not come back."""
    _read(database)
    _mark(MARKS[1], name.lower(), database, by, why, as_json=as_json)


def _read(database: Path) -> tuple[list[Holder], dict[str, LogRecord], dict[str, str]]:
    """Return the machines that hold keys, what is in quarantine, and all names in a log, which is verified."""
    entries = read_log(database)
    with parsing(f"reading {database} failed: expected entries of a broker, got others", "restore it from a copy"):
        kinds = {name: kind for entry in entries for name, kind in names_of(entry.details).items()}
        return find_holders(entries, read_clock()), find_quarantined(entries), kinds


def _mark(event: str, name: str, database: Path, by: str | None, why: str, *, as_json: bool, **details: Any) -> None:
    if by is None:
        by = str(os.getuid())
        with suppress(KeyError, OSError):  # of a user without a name
            by = getpass.getuser()
    told = {"by": by, "why": why, **details}
    for option, text in told.items():
        if isinstance(text, str):
            require_line(text, f"--{option}")
    with closing(Ledger(database)) as ledger:
        ledger.mark(event, name, now=read_clock(), details=told)
    tell([f"{event}: {clean(name)}"], as_json=as_json, event=event, name=name, **told)


for _command in (serve, machines, quarantine, lift, log, head, compare):
    app.command()(_command)
