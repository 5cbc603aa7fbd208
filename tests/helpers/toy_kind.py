"""A third kind of evidence of CPUs, all of it in one file: a report is 64 bytes, its maker's key, and a signature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fastrack._documents import exchange, fields, toml
from fastrack.attest import _errors, _policy_common
from fastrack.attest._cpu.kind import CpuKind, read_collateral

MAKER = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = MAKER.public_key().public_bytes_raw()


def report(report_data, maker=MAKER):
    """Return what the kernel of a toy gives."""
    return report_data + maker.public_key().public_bytes_raw() + maker.sign(report_data)


@dataclass(frozen=True)
class ToyEvidence:
    report: bytes
    model: bytes


@dataclass(frozen=True)
class VerifiedToy:
    report_data: bytes
    model: str
    valid_until: object


def parse(evidence):
    if len(evidence.report) != 160:
        raise _errors.malformed("toy report", "size", None, wanted=160, found=len(evidence.report))
    return evidence.report[:64], evidence.report[64:96], evidence.report[96:]


def verify(evidence, now, roots):
    data, public, signature = parse(evidence)
    if sha256(public).hexdigest() not in roots:
        raise _errors.refused("toy report", "root", wanted="a pinned one", found=public, advice="Pass roots=.")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except InvalidSignature:
        raise _errors.refused(
            "toy report", "signature", wanted="one that holds", found=signature, advice="Ask again."
        ) from None
    return VerifiedToy(data, evidence.model.decode(), now + timedelta(days=1))


TOY = CpuKind(
    name="toy",
    title="toy report",
    document="toy report",
    platform="A toy",
    provider="toy_guest",
    vendor="toys",
    roots=frozenset({sha256(PUBLIC).hexdigest()}),
    evidence=ToyEvidence,
    verified=VerifiedToy,
    fields={"report": fields.binary(exchange.REPORT_LIMIT), "model": fields.binary(exchange.CHAIN_LIMIT)},
    optional=(),
    collect=lambda data, _: ToyEvidence(data, b"none"),
    report_data=lambda evidence: parse(evidence)[0],
    bare=lambda evidence: replace(evidence, model=b"none"),
    complete=lambda evidence, folder: (
        replace(evidence, model=model) if (model := read_collateral(folder / "model")) else evidence
    ),
    verify=verify,
    read_policy=lambda table: table.read("models", toml.TEXTS) or frozenset(),
    check=lambda models, verified, judge: judge.require("model", verified.model, models, "models"),
    draft=lambda verified: [_policy_common.Line("models", {verified.model}, "model")],
    draft_claims=lambda evidence: [_policy_common.Line("models", {evidence.model.decode()}, "model")],
    describe=lambda verified: {"model": verified.model},
)
