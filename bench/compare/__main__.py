"""The command line: ``python -m bench.compare [BASE] [--json FILE] [--self-test N]``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.compare import CannotCompareError, environments
from bench.compare.comparison import SIDES, Plan, Row, Verdict, compare

_FAILURES = {Verdict.SLOWER, Verdict.GONE, Verdict.BROKEN}
_STYLES = {Verdict.FASTER: "green", Verdict.UNDECIDED: "yellow", **dict.fromkeys(_FAILURES, "bold red")}
_BUSY = 0.25  # of the CPUs, on average over the last minute
# What the self-test appends to the package, and the comparison has to find. It uses public names alone.
SLOW_DOWN = """

def _slowed(run):
    from time import perf_counter

    def slow(*arguments, **options):
        start = perf_counter()
        try:
            return run(*arguments, **options)
        finally:
            now = perf_counter()
            while perf_counter() < now + 0.2 * (now - start):
                pass

    return slow


def _slow_down():
    from fastrack import Channel

    Channel.to_device, Channel.to_host = _slowed(Channel.to_device), _slowed(Channel.to_host)


_slow_down()
"""


def main(arguments: list[str], plan: Plan = Plan(), root: Path = environments.ROOT) -> int:  # noqa: B008
    """Return the exit code: 0 nothing is slower, 1 something is or runs no more, 2 no comparison, 130 interrupted."""
    parser = argparse.ArgumentParser("python -m bench.compare", description="Is the working tree slower than BASE?")
    parser.add_argument("base", nargs="?", metavar="BASE", help="a branch, tag or commit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--self-test", type=int, metavar="N", help="try the comparison itself, N times each way")
    options = parser.parse_args(arguments)
    if not options.base and not options.self_test:
        parser.error("which revision is the working tree to be compared with? `make bench-compare BASE=main`, say")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} to write to")
    console = Console(width=None if sys.stdout.isatty() else 120)  # wide enough for a log
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.self_test:
            return _try_itself(options.self_test, console, plan, root)
        report = _compare_with(options.base, plan, root)
        report.print(console)
        if options.json:
            report.write(options.json)
    except (CannotCompareError, OSError) as error:
        sys.stderr.write(f"could not compare: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    else:
        return report.code
    finally:
        signal.signal(signal.SIGTERM, previous)


@dataclass(frozen=True, slots=True)
class Report:
    base: str
    head: str
    rows: list[Row]
    notes: list[str]  # what to know beside the rows
    seconds: float  # that the measuring took

    @property
    def code(self) -> int:
        """The exit code: 1 if anything is slower, or a guard does not run any more."""
        return int(any(row.verdict in _FAILURES for row in self.rows))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self) | {"exit_code": self.code}, indent=1) + "\n")

    def print(self, console: Console) -> None:
        table = Table(title=f"{self.head}, against {self.base}", title_justify="left")
        for name in ("benchmark", "base", "head", "ratio [99 %]", "pairs", "verdict"):
            table.add_column(name, justify="left" if name in {"benchmark", "verdict"} else "right", overflow="fold")
        for row in self.rows:
            short = row.name.rpartition("/")[2].removeprefix("bench_").replace(".py::test_", ": ")
            cells = ["", "", "", ""]
            if row.interval is not None:
                ratio = f"{row.interval.ratio:.2f} \\[{row.interval.low:.2f}, {row.interval.high:.2f}]"
                cells = [_time(row.base), _time(row.head), ratio, str(row.pairs)]
            table.add_row(escape(short), *cells, row.verdict, style=_STYLES.get(row.verdict))
        console.print(table)
        counts = {kind: sum(row.verdict is kind for row in self.rows) for kind in Verdict}
        lines = [f"{row.verdict}: {row.name}\n  {row.why}" for row in self.rows if row.why]
        lines += [f"note: {note}" for note in self.notes]
        lines.append(f"{', '.join(f'{n} {kind}' for kind, n in counts.items() if n)}, in {self.seconds:.0f} s")
        console.print("\n".join(lines), markup=False)


def _compare_with(base: str | None, plan: Plan, root: Path, kind: str = "", title: str = "") -> Report:
    """Compare the working tree with a revision or, if there is none, with itself, slowed down if it is "planted"."""
    cache = root / ".benchmarks" / "compare"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache) as folder:
        trees = {side: Path(folder, side) for side in SIDES}
        head = environments.take_working_tree(root, trees["head"])
        if base is None:
            labels = (environments.take_working_tree(root, trees["base"]), title)
        else:
            labels = (f"{base} ({environments.take_revision(root, base, trees['base'])})", head)
        if kind == "planted":
            with (trees["head"] / "fastrack" / "__init__.py").open("a") as package:
                package.write(SLOW_DOWN)
        return _compare_trees(trees, labels, plan, cache)


def _compare_trees(trees: dict[str, Path], labels: tuple[str, str], plan: Plan, cache: Path) -> Report:
    """Build both, and measure the suites of head on both."""
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    notes = environments.check_requirements(trees["base"], trees["head"])
    if load > _BUSY * cpus:
        busy = f"the load was {load:.1f} on {cpus} CPUs before the start"
        notes.append(f"{busy}: intervals are wider, and rows may be undecided")
    console = Console(stderr=True)
    with console.status("reading the sources") as status:  # on a terminal alone
        say: Callable[[str], None] = lambda text: status.update(escape(text))  # noqa: E731
        pythons = {side: environments.build(side, tree, cache, say) for side, tree in trees.items()}
        environments.forget_old(cache)
        shutil.rmtree(trees["head"] / "fastrack")  # installed by now, and not to be imported from here
        start = time.monotonic()
        rows = compare(pythons, trees["head"], say, plan)
    if any(row.verdict is Verdict.UNDECIDED for row in rows):
        notes.append("undecided rows are no finding: run it again when the machine is idle")
    return Report(*labels, rows, notes, time.monotonic() - start)


def _try_itself(times: int, console: Console, plan: Plan, root: Path) -> int:
    """Compare the working tree with itself, with and without a slow-down. Return 0, or 1 if a verdict was wrong."""
    right = {"planted": 0, "unchanged": 0}
    for turn in range(times):
        for kind in right:
            report = _compare_with(None, plan, root, kind, f"{kind}, {turn + 1} of {times}")
            report.print(console)
            right[kind] += report.code == (kind == "planted")
    console.print(f"planted: {right['planted']} of {times} flagged; unchanged: {right['unchanged']} of {times} passed")
    return int(min(right.values()) < times)


def _time(seconds: float | None) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds and seconds >= 1e-3 else f"{1e6 * (seconds or 0):.1f} µs"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
