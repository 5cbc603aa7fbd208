"""What a run found: as a document for programs, and as tables for people."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from bench.gpu import needs
from bench.gpu.plan import size_of
from bench.gpu.targets import targets
from bench.gpu.timeline import Timeline
from bench.gpu.transfers import BOUNCE

ROOT = Path(__file__).resolve().parents[2]
VERSION = 1
DONE, SKIPPED, FAILED = "done", "skipped", "FAILED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended. A failed check is worse than a figure that is missing."""

    name: str
    outcome: str
    why: str = ""
    seconds: float = 0.0
    is_check: bool = False


class Report:
    """Everything found so far. `save` it as often as you like."""

    def __init__(self, gpu, plan, *, quick, folder):
        self.rows, self.outcomes, self.timeline = [], [], None
        self._plan, self._quick = plan, quick
        self._now = datetime.now(UTC)
        self._machine = read_machine(gpu)
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
        self.path = folder / f"{self._now:%Y-%m-%d}-{slug}-{self._machine['cpu']['threads']}cores.json"

    def add(self, found):
        """A row, or the timeline."""
        if isinstance(found, Timeline):
            self.timeline = found
        else:
            self.rows.append(found)

    @property
    def targets(self):
        return targets(self.rows)

    @property
    def is_wrong(self):
        """Whether a check failed."""
        return any(each.outcome == FAILED and each.is_check for each in self.outcomes)

    def as_dict(self):
        return {
            "version": VERSION,
            "suite": "gpu",
            "date": self._now.isoformat(timespec="seconds"),
            "quick": self._quick,
            "plan": asdict(self._plan),
            "machine": self._machine,
            "steps": [asdict(each) for each in self.outcomes],
            "targets": [each.as_dict() for each in self.targets],
            "timeline": self.timeline and self.timeline.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }

    def save(self):
        """Write it, so that nothing is lost if a later step ends the process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)

    def tables(self):
        """All of it for people; what has to be reached comes last."""
        parts = [show(self.rows) for show in (_kernels, _transfers, _ablation, _sweep, _slowdown)]
        if self.timeline is not None:
            parts.append(_timeline(self.timeline))
        parts += [_outcomes(self.outcomes), _targets(self.targets)]
        return "\n\n".join(part for part in parts if part)


def read_machine(gpu):
    """What is to be known of the machine besides its figures."""
    machine, graphics = _room("machine"), None
    if needs.lacks("pynvml") is None:
        graphics = asdict(_room("nvml").read_graphics())
    return {
        "software": {**machine.read_software(), **needs.versions()},
        "system": f"{platform.system()} {platform.release()}",
        "cpu": asdict(machine.read_cpu()),
        "memory": asdict(machine.read_memory()),
        "gpu": gpu.describe(),
        "graphics": graphics,
    }


def _room(name):
    """A module of the command line, whether or not what the rest of that needs is installed."""
    full = f"fastrack.cli.{name}"
    try:
        return import_module(full)
    except ImportError:
        spec = importlib.util.spec_from_file_location(full, ROOT / "fastrack" / "cli" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
        return module


def table(title, head, rows):
    """Columns, the first to the left and the others to the right."""
    if not rows:
        return ""
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    drawn = [
        "  ".join(cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return os.linesep.join([title, *(f"  {line.rstrip()}" for line in drawn)])


def _ms(seconds):
    return f"{1e3 * seconds:.3f}"


def _spread(times):
    return f"{_ms(times.lower)} to {_ms(times.upper)}"


def _kernels(rows):
    mine = [row for row in rows if row.step == "kernels"]
    lines = [
        (
            f"{row.path}, AES-{row.settings['bits']}" if "share" in row.settings else row.path,
            size_of(row.size),
            row.settings.get("share", ""),
            f"{row.gbps:.1f}",
            _ms(row.times.median),
            _spread(row.times),
        )
        for row in mine
    ]
    return table("kernels, on memory of the device", ("", "size", "share", "GB/s", "ms", "quartiles"), lines)


def _transfers(rows):
    mine = [row for row in rows if row.step == "transfers"]
    lines = [
        (row.path, size_of(row.size), f"{row.gbps:.2f}", _ms(row.times.median), _spread(row.times)) for row in mine
    ]
    return table("transfers", ("", "size", "GB/s", "ms", "quartiles"), lines)


def _ablation(rows):
    """Each step next to the bounce path of its direction and size."""
    mine = [row for row in rows if row.step == "ablation"]
    bounce = {(row.settings["direction"], row.size): row.times.median for row in mine if row.path == BOUNCE}
    lines = [
        (
            f"{row.settings['direction']}, {row.path}",
            size_of(row.size),
            f"{row.gbps:.2f}",
            _ms(row.times.median),
            _spread(row.times),
            f"{bounce[row.settings['direction'], row.size] / row.times.median:.2f}",
        )
        for row in mine
    ]
    return table("one idea after another", ("", "size", "GB/s", "ms", "quartiles", "x bounce"), lines)


def _sweep(rows):
    lines = []
    for row in (row for row in rows if row.step == "sweep"):
        name = row.settings["varied"]
        value = row.settings[name]
        told = size_of(value) if name in {"slab", "lead"} else str(value)
        lines.append((name, told, f"{row.gbps:.2f}", _ms(row.times.median), _spread(row.times)))
    return table("to_device(sealed), one setting changed", ("", "value", "GB/s", "ms", "quartiles"), lines)


def _slowdown(rows):
    mine = [row for row in rows if row.step == "slowdown"]
    lines = [
        (
            row.settings["beside"],
            _ms(row.times.median),
            _spread(row.times),
            f"{row.settings['slowed']:.3f}",
            f"{row.settings['beside_gbps']:.1f}",
        )
        for row in mine
    ]
    return table("a bf16 matrix product beside", ("", "ms", "quartiles", "slowed", "beside, GB/s"), lines)


def _timeline(timeline):
    return (
        f"timeline of {size_of(timeline.size)}\n"
        f"  {len(timeline.copies)} slabs in {_ms(timeline.seconds)} ms; during {100 * timeline.overlap:.0f} % of the "
        f"opening something was being copied; the host filled slabs during {100 * timeline.fill:.0f} % of it"
    )


def _outcomes(outcomes):
    lines = [(each.name, each.outcome, f"{each.seconds:.0f} s", each.why.partition("\n")[0]) for each in outcomes]
    text = table("steps", ("", "", "", ""), [(name, how, taken, "") for name, how, taken, _ in lines]).splitlines()
    whys = [why for *_, why in lines]
    return "\n".join([text[0], *(f"{line}  {why}".rstrip() for line, why in zip(text[2:], whys, strict=True))])


def _targets(found):
    lines = []
    for each in found:
        value = "" if each.value is None else f"{each.value:.3g} {each.unit}"
        reach = f"{'<=' if each.at_most else '>='} {each.reach:g} {each.unit}"
        verdict = {None: "not measured", True: "met", False: "MISSED"}[each.is_met]
        lines.append((each.name, value, reach, "" if each.aim is None else f"{each.aim:g}", verdict))
    return table("targets", ("", "measured", "to reach", "aim", ""), lines)
