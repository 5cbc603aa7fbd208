"""``fastrack qualify``: attack a sealed folder on the machine that will serve it, row by row."""

import textwrap
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.commands.grant import Sign, load_signer
from fastrack._cli.console import reporter, tell
from fastrack._cli.documents import check_document, write_document
from fastrack._cli.errors import handle_errors, refuse_options
from fastrack._cli.files import open_ring
from fastrack._cli.options import AnchorFile, Json, KeyFiles
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder import load_folder
from fastrack._version import __version__
from fastrack.attest import Policy
from fastrack.attest._policy import read_policy_text
from fastrack.grants import Verifier
from fastrack_bench.qualification.record import FAILED, STATES, Qualification, load_record
from fastrack_bench.qualification.rows import run
from fastrack_bench.qualification.stage import Stage, private_folder

app = typer.Typer(add_completion=False)
_WIDTH, _INDENT = 80, 42  # columns of a line, and those before what a row saw


@app.command()
@handle_errors
def qualify(
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="The sealed folder to serve.")] = None,
    *,
    key: KeyFiles = None,
    policy: Annotated[Path | None, typer.Option(metavar="POLICY", help="The owner's policy, in TOML.")] = None,
    collateral: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The owner's collateral, of `attest fetch`.")
    ] = None,
    anchor: AnchorFile = None,
    sign: Sign = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="RECORD", help="The record to write, signed by --sign.")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="RECORD", help="Verify and show a record, in place of a run.")
    ] = None,
    owner: Annotated[
        Path | None, typer.Option(metavar="PUBLIC", help="With --verify: the public file of who signed it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack a sealed folder on the machine that will serve it, row by row, and sign what was seen.

    Rows change copies, ask a broker of their own, and read settings. Each expects one kind of error about one name; any
    other fails it. The folder is only read.

    Exit status: 0 if no row failed, else 1. What is not here, or not asked, was not shown.
    """
    of_a_run = {"--key": key, "--policy": policy, "--collateral": collateral, "--anchor": anchor, "--out": out}
    if verify is None:
        refuse_options({"--owner": owner}, "expected --verify with it, got none")
        refuse_options({"FOLDER": folder is None}, "expected a sealed folder, or --verify, got neither")
        refuse_options({"--sign": sign is not None and out is None}, "expected --out with it, got none")
        assert folder is not None
        if out is not None:
            check_document(out)
        signer = None if out is None else load_signer(sign)
        found = _run(folder, key, policy, collateral, anchor)
        if signer is not None and out is not None:
            write_document(out, found.sign(signer))
    else:
        refuse_options({"FOLDER": folder, **of_a_run, "--sign": sign}, "it does not go with --verify; leave one out")
        refuse_options({"--owner": owner is None}, "expected the public file of who signed the record, got none")
        assert owner is not None
        found = load_record(verify, Verifier.load(owner))
    document = asdict(found) | {"issued": found.issued.isoformat(), "ok": not found.counts[FAILED]}
    # Rows that failed say more than a reader that has ended.
    with suppress(BrokenPipeError) if found.counts[FAILED] else nullcontext():
        tell(_lines(found), as_json=as_json, **document, counts=found.counts)
    if found.counts[FAILED]:
        raise typer.Exit(1)


def _run(
    path: Path, key: list[str] | None, policy: Path | None, collateral: Path | None, anchor: Path | None
) -> Qualification:
    ring, digest = open_ring(key), None
    if policy is not None:
        text = read_policy_text(policy)
        Policy.from_toml(f"{text}\n")  # which is refused here, and not by each row
        digest = sha256(text.encode()).hexdigest()
    if anchor is not None:
        Anchor(anchor)  # refused here, as is a folder of collateral, which not every machine has a row for
    if collateral is not None:
        next(collateral.iterdir(), None)
    opened = load_folder(path, ring)
    with private_folder(path) as private, reporter("qualifying") as tell_row:
        stage = Stage(opened, path.absolute(), ring, policy, collateral, anchor, private)
        with stage.ends:
            rows = run(stage, tell_row)
    return Qualification(
        datetime.now(UTC).replace(microsecond=0), __version__, opened.file_id, opened.key_id, digest, rows
    )


def _lines(found: Qualification) -> Iterator[str]:
    for row in found.rows:
        start = f"{row.number:2} {row.state:9} {row.name:28} "
        yield textwrap.fill(row.seen, _WIDTH, initial_indent=start, subsequent_indent=" " * _INDENT)
    yield ""
    yield from (f"{count:2} {state:9} {STATES[state]}" for state, count in found.counts.items() if count)
    yield f"folder: {found.folder}"
    yield f"key: {found.key}"
    yield f"policy: {found.policy or 'none'}"
    yield f"fastrack {found.fastrack}, {found.issued.isoformat()}"
