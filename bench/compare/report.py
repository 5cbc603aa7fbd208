"""A comparison as a table and as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.compare.verdicts import Row, Verdict

_FAILURES = {Verdict.SLOWER, Verdict.GONE, Verdict.BROKEN}
_STYLES = {Verdict.FASTER: "green", Verdict.UNDECIDED: "yellow"}
_STYLES |= dict.fromkeys(_FAILURES, "bold red")
_BUSY = 0.25  # of the CPUs, on average over the last minute


@dataclass(frozen=True, slots=True)
class Report:
    base: str
    head: str
    rows: list[Row]
    notes: list[str]  # for the reader of the rows
    seconds: float  # that the measuring took

    @property
    def code(self) -> int:
        """The exit code: 1 if a benchmark is slower, or a guard fails."""
        return int(any(row.verdict in _FAILURES for row in self.rows))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self) | {"exit_code": self.code}, indent=1) + "\n")

    def print(self, console: Console) -> None:
        table = Table(title=f"{self.head}, against {self.base}", title_justify="left")
        for name in ("benchmark", "base", "head", "ratio [99 %]", "pairs", "verdict"):
            table.add_column(name, justify="left" if name in {"benchmark", "verdict"} else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*_cells(row), style=_STYLES.get(row.verdict))
        console.print(table)
        for row in self.rows:
            if row.why:
                console.print(f"{row.verdict}: {row.name}\n  {row.why}", markup=False)
        for note in self.notes:
            console.print(f"note: {note}", markup=False)
        console.print(f"{self.summary()}, in {self.seconds:.0f} s", markup=False)

    def summary(self) -> str:
        counts = {kind: sum(row.verdict is kind for row in self.rows) for kind in Verdict}
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def load_note() -> list[str]:
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    note = f"the load was {load:.1f} on {cpus} CPUs before the start: intervals are wider, and rows may be undecided"
    return [note] if load > _BUSY * cpus else []


def _cells(row: Row) -> list[str]:
    name = escape(short(row.name))
    if row.interval is None:
        return [name, "", "", "", "", row.verdict]
    interval = row.interval
    ratio = f"{interval.ratio:.2f} \\[{interval.low:.2f}, {interval.high:.2f}]"
    return [name, _time(row.base), _time(row.head), ratio, str(row.pairs), row.verdict]


def short(name: str) -> str:
    """`bench/bench_files.py::test_one_row` as `files: one_row`."""
    return name.rpartition("/")[2].removeprefix("bench_").replace(".py::test_", ": ")


def _time(seconds: float | None) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds and seconds >= 1e-3 else f"{1e6 * (seconds or 0):.1f} µs"
