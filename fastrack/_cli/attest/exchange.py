"""``fastrack attest``: give keys to a machine that proves what it is, by files and pipes."""

import errno
import os
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fastrack import attest
from fastrack._cli.commands.grant import Sign, load_signer
from fastrack._cli.console import clean, note, pluralize, print_json, stdout
from fastrack._cli.documents import await_document, check_document, parse_period, read_document, write_document
from fastrack._cli.errors import refuse_options, refuse_values, show_errors
from fastrack._cli.files import KEPT, check_new, open_ring
from fastrack._cli.options import Json, KeyFile
from fastrack._cli.proofs import lacking_states
from fastrack._devices.graphics import read_graphics
from fastrack._util.atomic import sync_directory
from fastrack._util.gate import most_bytes
from fastrack._util.locations import locate_local
from fastrack._util.rights import make_own, require_own
from fastrack.attest import Challenge, Offer, Policy, TdxCollateral, VerifiedOffer, _verify_offer, issue_grants
from fastrack.attest._draft import list_claims
from fastrack.attest._exchange import GRANTS_KIND, GRANTS_LIMIT, read_envelopes
from fastrack.attest._kinds import kind_of_evidence
from fastrack.attest._offer import CHALLENGE_KIND, CHALLENGE_LIMIT, OFFER_KIND, OFFER_LIMIT, read_clock
from fastrack.attest._verify_offer import accept_offer, prove_offer
from fastrack.errors import AttestationError, FormatError
from fastrack.grants import Verifier

Document = "A file or a pipe; - for standard input or output, where each document is one line."
Challenged = Annotated[str, typer.Argument(metavar="CHALLENGE", help="The owner's challenge.")]
Offered = Annotated[str, typer.Argument(metavar="OFFER", help=f"The machine's offer. {Document}")]
ForChallenge = Annotated[
    Path, typer.Option("--challenge", metavar="CHALLENGE", help="The challenge that the offer has to answer.")
]
UnderPolicy = Annotated[Path, typer.Option("--policy", metavar="POLICY", help="The policy, in TOML.")]
Collateral = Annotated[
    Path | None, typer.Option(metavar="PATH", help="The folder of `attest fetch`, or collateral of TDX in JSON.")
]
FileIds = Annotated[
    list[str] | None, typer.Option("--file-id", metavar="ID", help="Grant this sealed file only; may be repeated.")
]
Period = Annotated[str, typer.Option(metavar="PERIOD", help="The time until it ends, such as 90s, 5m or 12h.")]

_MARKED = 8 * 86_400  # seconds: a challenge ends within seven days
_REFUSED = 3  # the exit status for evidence that verifies, of a machine that the policy does not accept


def challenge(
    target: Annotated[str, typer.Argument(metavar="CHALLENGE", help=f"The file to write. {Document}")] = "-",
    *,
    lifetime: Period = "5m",
) -> None:
    """Make a challenge, to be sent to a machine."""
    check_document(target)
    write_document(
        target, Challenge.generate(now=read_clock(), lifetime=parse_period(lifetime, "--lifetime")).to_bytes()
    )


def collect(
    source: Challenged,
    target: Annotated[str, typer.Argument(metavar="OFFER", help=f"The offer to write. {Document}")] = "-",
    *,
    grants: Annotated[
        str | None, typer.Option(metavar="GRANTS", help="The owner's answer, which is waited for. If absent, no key.")
    ] = None,
    owner: Annotated[
        list[Path] | None, typer.Option(metavar="PUBLIC", help="The public file of an owner; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="KEY", help="The key file to write, or a folder for them.")
    ] = None,
    collateral: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Collateral to send with it.")] = None,
    gpus: Annotated[
        bool | None, typer.Option("--gpus/--no-gpus", help="Require GPUs, or do not ask them. If absent, as found.")
    ] = None,
    wait: Period = "10m",
) -> None:
    """Make an offer with evidence of this machine, wait for the owner's answer, and store the key.

    The secret key that opens the answer stays in this process, so the answer must come while it runs. What it waits for
    is said on stderr, unless OFFER is standard output.
    """
    is_less = grants is not None and (not owner or out is None)
    refuse_options({"--grants": is_less}, "expected --owner and --out with it, got less")
    check_document(target)
    owners = [Verifier.load(path) for path in owner or ()]
    if grants is not None and grants != "-":  # an answer that is there is to an earlier offer
        check_document(str(locate_local(grants)))
    if out is not None and not out.is_dir():
        check_new(out, KEPT)
    period = parse_period(wait, "--wait")
    say = note if target != "-" else lambda _: None  # another command reads the offer, and a person its output
    gather = partial(attest.collect_evidence, collateral=collateral, gpus=gpus)
    pending = attest.make_offer(read_challenge(source), gather)
    write_document(target, pending.to_bytes())
    for state, advice in lacking_states(read_graphics()).items() if gpus is not False else ():
        note(f"{state}: {advice}")
    if grants is None or out is None:
        say(f"offer written to {target}")
        return
    end = (datetime.now().astimezone() + period).strftime("%H:%M")
    say(f"offer written to {target}; waiting for {grants} until {end}")
    answer = read_document(grants, GRANTS_LIMIT) if grants == "-" else await_document(grants, GRANTS_LIMIT, period)
    ring = pending.unlock(answer, owner=owners, now=read_clock())
    keys = list(ring)
    if len(keys) > 1 and not out.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"expected a folder for {len(keys)} keys; make it first", str(out))
    for key in keys:
        path = out / f"{key.id}.key" if out.is_dir() else out
        key.save(path)
        say(f"key {key.id} stored in {path}")


def verify(
    source: Offered,
    *,
    challenge: ForChallenge,
    policy: UnderPolicy,
    collateral: Collateral = None,
    as_json: Json = False,
) -> None:
    """Verify an offer under a policy, and show what it proves. No challenge is used up.

    Exit status: 0 if it is accepted, 4 if the evidence does not verify, 3 if the policy does not accept what it proves.
    """
    found = _judge(read_offer(source), read_challenge(str(challenge)), policy, collateral)
    if isinstance(found, tuple):
        if as_json:
            print_json(verified=True, accepted=False, mismatches=[_mismatch(error) for error in found])
        else:
            show_errors(map(str, found))
        raise typer.Exit(_REFUSED)
    if as_json:
        print_json(verified=True, accepted=True, mismatches=[], **found.describe())
        return
    _show("offer", found.describe(), "verified, and accepted by the policy")


def _mismatch(error: AttestationError) -> dict[str, object]:
    members = {"evidence": error.evidence, "field": error.field}
    return {**members, "wanted": str(error.wanted), "found": str(error.found), "message": str(error)}


def show(source: Annotated[str, typer.Argument(metavar="FILE", help=Document)], *, as_json: Json = False) -> None:
    """Show a challenge, an offer or grants, of which nothing is verified."""
    kind, members = _describe_document(read_document(source, OFFER_LIMIT), source)
    if as_json:
        print_json(kind=kind, verified=False, **members)
        return
    _show(kind, members, "NOT VERIFIED")


def grant(
    source: Offered,
    *,
    challenge: ForChallenge,
    policy: UnderPolicy,
    sign: Sign = None,
    key: KeyFile = None,
    out: Annotated[str, typer.Option("--out", "-o", metavar="GRANTS", help=f"The answer to write. {Document}")] = "-",
    file_id: FileIds = None,
    collateral: Collateral = None,
    lifetime: Period = "5m",
) -> None:
    """Verify an offer, use up its challenge, and encrypt keys to the machine.

    Before anything is granted, the challenge is marked as used, by its id, which holds for all copies of its file. The
    file CHALLENGE is renamed to CHALLENGE.used-ID, with the first 16 digits.

    Exit status: 0 if keys are granted; 4 if the evidence does not verify; 3 if the policy does not accept what it
    proves, and then nothing is used up.
    """
    check_document(out)  # before the challenge is used up
    signer, ring = load_signer(sign), open_ring(key)
    found = _judge(read_offer(source), read_challenge(str(challenge)), policy, collateral)
    if isinstance(found, tuple):
        show_errors(map(str, found))
        raise typer.Exit(_REFUSED)
    period = parse_period(lifetime, "--lifetime")
    with refuse_values("--file-id, --key"):
        grants = issue_grants(found, ring, signer=signer, now=read_clock(), lifetime=period, files=file_id)
    _use_up(challenge, found.challenge_id)
    write_document(out, grants)


def _use_up(path: Path, challenge_id: str) -> None:
    """Mark a challenge as used, which succeeds once, and rename its file: copies and links of it are that challenge."""
    base = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")  # noqa: PTH111 - it may raise
    if base.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "no folder to mark challenges in; name one with XDG_STATE_HOME", base)
    marks = Path(base).absolute() / "fastrack" / "challenges"
    with suppress(OSError):
        make_own(marks)
    if not os.access(marks, os.W_OK):
        advice = "expected a folder to mark challenges in, got none to write to; name one with XDG_STATE_HOME"
        raise PermissionError(errno.EACCES, advice, str(marks))
    require_own(marks)
    for mark in marks.iterdir():
        with suppress(FileNotFoundError):  # which another run has removed
            if time.time() - mark.stat().st_mtime > _MARKED:
                mark.unlink()
    real = path.resolve()
    used = real.with_name(f"{real.name}.used-{challenge_id[:16]}")  # the next may have the name of this one
    mark = used if os.path.lexists(used) else marks / challenge_id  # the folder of marks may be a container's
    try:
        mark.touch(0o600, exist_ok=False)
    except FileExistsError:
        message = f"using the challenge {path} failed: expected one that was not used, got {mark}. Make a new one."
        raise AttestationError(message, evidence="challenge", field="use", wanted="none", found=str(mark)) from None
    sync_directory(mark.parent)  # before anything is granted, for the mark counts after a crash too
    with suppress(OSError):  # the mark counts: of a pipe, or in a folder of another user, there is nothing to rename
        real.rename(used)


def read_challenge(path: str) -> Challenge:
    """Read a challenge."""
    return Challenge.from_bytes(read_document(path, CHALLENGE_LIMIT))


def load_collateral(path: Path | None) -> TdxCollateral | Path | None:
    """Return the collateral in a file, if one is named, or the folder that is."""
    if path is None or path.is_dir():
        return path
    return TdxCollateral.from_json(read_document(str(path), most_bytes("TDX collateral")))


def read_offer(source: str) -> Offer:
    """Read an offer."""
    return Offer.from_bytes(read_document(source, OFFER_LIMIT))


def _judge(
    offer: Offer, challenge: Challenge, policy: Path, collateral: Path | None
) -> VerifiedOffer | tuple[AttestationError, ...]:
    """Judge an offer under the policy in a file, with the collateral in a file or folder."""
    rules, given, now = Policy.from_toml(policy), load_collateral(collateral), read_clock()
    proved = prove_offer(offer, challenge, now, given, _verify_offer.VENDOR_ROOTS)
    # Judged again by what raises, so that only one way leads to a verified offer.
    return rules.find_mismatches(*proved[1:], now=now) or accept_offer(proved, challenge, rules, now)


def _describe_document(data: bytes, source: str) -> tuple[str, dict[str, object]]:
    """Return the kind of a document, and what it claims."""
    if _is(data, CHALLENGE_KIND):
        found = Challenge.from_bytes(data)
        return "challenge", {"challenge": found.id, "expires": found.expires.isoformat()}
    if _is(data, OFFER_KIND):
        offer = Offer.from_bytes(data)
        cpu = {"type": kind_of_evidence(offer.evidence.cpu).name}
        members: dict[str, object] = {"challenge": offer.challenge_id, "recipient": offer.recipient.id, "cpu": cpu}
        members["devices"] = len(offer.evidence.devices)
        with suppress(FormatError, ValueError):  # what it claims that a policy can name, if it can be read
            members["claims"] = list_claims(offer.evidence)
        return "offer", members
    if _is(data, GRANTS_KIND):
        challenge_id, envelopes = read_envelopes(data)
        return "grants", {"challenge": challenge_id, "grants": len(envelopes)}
    raise FormatError(
        f"reading {source} failed: expected a challenge, an offer or grants, got another. Check its name."
    )


def _is(data: bytes, kind: str) -> bool:
    return f'"kind":"{kind}"'.encode() in data


def _show(kind: str, members: dict[str, object], state: str) -> None:
    console = stdout()
    console.print(f"{kind}: {state}")
    for name, value in members.items():
        if name == "devices" and isinstance(value, list):
            console.print(f"devices: {pluralize(len(value), 'device')}")
            for index, device in enumerate(value):
                claims = ", ".join(f"{key} {'none' if part is None else part}" for key, part in device.items())
                console.print(f"device {index}: {clean(claims)}")
        elif name == "claims":
            _show_claims(value)
        elif name == "cpu" and isinstance(value, dict):
            kind_of_cpu = value["type"]
            console.print(f"cpu: {clean(str(kind_of_cpu))}")
            _show_claims({key: part for key, part in value.items() if key != "type"}, f"cpu.{kind_of_cpu}.")
        else:
            console.print(f"{name}: {clean(str(value))}")


def _show_claims(claims: object, path: str = "") -> None:
    """Print all that a policy can name, each key with its value on a line."""
    for name, value in claims.items() if isinstance(claims, dict) else ():
        if isinstance(value, dict):
            _show_claims(value, f"{path}{name}.")
        else:
            text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            stdout().print(f"{path}{name}: {clean(text)}")
