"""Draft a policy from evidence: every value that a policy can name, each with a comment about what it covers."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fastrack._util.public import public
from fastrack.attest._gpus.evidence import VerifiedGpuReport, read_claims
from fastrack.attest._gpus.rim_match import MatchedGpuReport
from fastrack.attest._kinds import VerifiedCpu, kind_of_evidence, kind_of_verified
from fastrack.attest._offer import DeviceEvidence, MachineEvidence
from fastrack.attest._policy_common import Line, to_claims
from fastrack.attest._policy_gpu import draft_gpus


@public
def draft_policy(
    source: VerifiedCpu | MachineEvidence, devices: Sequence[MatchedGpuReport | VerifiedGpuReport] = ()
) -> str:
    """Draft a policy, in TOML, that accepts a machine with this evidence, and no other.

    Each value has a comment about what it covers. Loosen what may vary: ``"any"``, a longer list, or no such line. What
    opens a machine to its host, and what was not checked, is a comment too.

    Parameters
    ----------
    source : VerifiedTdxQuote, VerifiedSnpReport or MachineEvidence
        What the CPU has proved; or evidence that was not verified, whose claims anyone can write: the draft says so.
    devices : sequence of MatchedGpuReport or VerifiedGpuReport
        What GPUs and switches have proved.

    Raises
    ------
    TypeError
        If `source` is of another type, such as a quote that was only parsed.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.draft_policy(b"a quote")
    Traceback (most recent call last):
        ...
    TypeError: expected VerifiedTdxQuote or VerifiedSnpReport, got bytes; verify the evidence first
    """
    if isinstance(source, MachineEvidence):
        claimed = kind_of_evidence(source.cpu)
        warning = "# NOT VERIFIED: anyone can write what is claimed here.\n"
        return warning + _write(claimed.name, claimed.draft_claims(source.cpu), _draft_claims(source.devices))
    kind = kind_of_verified(source)
    return _write(kind.name, kind.draft(source), draft_gpus(devices) if devices else ())


def list_claims(evidence: MachineEvidence) -> dict[str, object]:
    """Return what evidence claims that a policy can name, by section. Nothing is verified: it is for displays."""
    kind = kind_of_evidence(evidence.cpu)
    claims: dict[str, object] = {"cpu": {kind.name: to_claims(kind.draft_claims(evidence.cpu))}}
    return claims | {"gpu": to_claims(_draft_claims(evidence.devices))} if evidence.devices else claims


def _draft_claims(evidence: Sequence[DeviceEvidence]) -> Iterator[Line]:
    """Draft what devices claim: each key once, with the lines of all."""
    devices = [read_claims(device.report, device.chain) for device in evidence]
    if not devices:
        return
    yield Line("count", sum("driver" in device for device in devices), "GPUs")
    for key, name in (("chips", "chip"), ("chip_ids", "chip_id"), ("modes", "mode")):
        if values := {device[name] for device in devices if name in device}:
            yield Line(key, values, name.replace("_", " "))
    for key, name in (("min_driver", "driver"), ("min_vbios", "vbios")):
        for value in sorted({device[name] for device in devices if name in device}):
            yield Line(key, value, name, is_open=True)


def _write(section: str, cpu: Iterable[Line], gpus: Iterable[Line]) -> str:
    parts = ["version = 1", f"\n[cpu.{section}]", *map(str, cpu)]
    if lines := [str(line) for line in gpus]:
        parts += ["\n[gpu]", *lines]
    return "\n".join(parts) + "\n"


@public
def compare_policies(old: str, new: str) -> tuple[str, ...]:
    r"""Return the keys of two policies, in TOML, that differ: each with its old and its new value.

    Examples
    --------
    >>> from fastrack import attest
    >>> attest.compare_policies("[gpu]\ncount = 4", "[gpu]\ncount = 8")
    ('gpu.count: 4 -> 8',)
    """
    before, after = (dict(_flatten(tomllib.loads(text))) for text in (old, new))
    changed = {name: (before.get(name, "absent"), after.get(name, "absent")) for name in sorted({*before, *after})}
    return tuple(f"{name}: {was} -> {became}" for name, (was, became) in changed.items() if was != became)


def _flatten(table: Mapping[str, object], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{path}{name}.")
        elif isinstance(value, list):
            items = [str(item) for item in value]
            in_order = any(isinstance(item, dict) for item in value)  # events are, and what is allowed is not
            yield f"{path}{name}", ", ".join(items if in_order else sorted(items))
        else:
            yield f"{path}{name}", str(value)
