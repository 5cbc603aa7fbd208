"""The command line: ``python -m bench.compare BASE [--json FILE]``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from bench.compare import CannotCompareError, environments, selftest
from bench.compare.comparison import Plan, compare, rehearse
from bench.compare.pairs import SIDES
from bench.compare.report import Report, load_note
from bench.compare.verdicts import Verdict


def main(arguments: list[str], plan: Plan = Plan(), root: Path = environments.ROOT) -> int:  # noqa: B008
    """Return the exit code: 0 nothing is slower, 1 a benchmark is slower or fails, 2 no comparison, 130 interrupted."""
    parser = argparse.ArgumentParser("python -m bench.compare", description="Is the working tree slower than BASE?")
    parser.add_argument("base", nargs="?", metavar="BASE", help="a branch, tag or commit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--self-test", type=int, metavar="N", help="try the comparison itself, N times each way")
    options = parser.parse_args(arguments)
    if not options.base and not options.self_test:
        parser.error("which revision is the working tree to be compared with? `make bench-compare BASE=main`, say")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent} to write to")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # wide enough for a log
    previous = signal.signal(signal.SIGTERM, _interrupt)
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


def _compare_with(base: str, plan: Plan, root: Path) -> Report:
    with _trees(root) as trees, _progress() as say:
        commit = environments.take_revision(root, base, trees["base"])
        head = environments.take_working_tree(root, trees["head"])
        return _compare_trees(trees, (f"{base} ({commit})", head), say, plan)


def _try_itself(times: int, console: Console, plan: Plan, root: Path) -> int:
    """Compare the working tree with itself, with and without a slow-down. Return 1 if one went wrong, else 0."""
    right = {"planted": 0, "unchanged": 0}
    for turn in range(times):
        for kind in right:
            with _trees(root) as trees, _progress() as say:
                for tree in trees.values():
                    environments.take_working_tree(root, tree)
                if kind == "planted":
                    selftest.plant(trees["head"])
                report = _compare_trees(trees, ("the working tree", f"{kind}, {turn + 1} of {times}"), say, plan)
            report.print(console)
            right[kind] += report.code == (kind == "planted")
    console.print(f"planted: {right['planted']} of {times} flagged; unchanged: {right['unchanged']} of {times} passed")
    return int(min(right.values()) < times)


def _compare_trees(trees: dict[str, Path], labels: tuple[str, str], say: Callable[[str], None], plan: Plan) -> Report:
    """Build both, and measure the suites of head on both."""
    notes = load_note() + environments.check_requirements(trees["base"], trees["head"])
    folder = trees["head"].parent
    cache = folder.parent
    pythons = {side: environments.build(side, tree, cache, say) for side, tree in trees.items()}
    environments.forget_old(cache)
    shutil.rmtree(trees["head"] / "fastrack")  # installed already, and not to be imported from here
    rehearse(pythons, trees["head"], folder, say, plan)
    start = time.monotonic()
    rows = compare(pythons, trees["head"], folder, say, plan)
    if any(row.verdict is Verdict.UNDECIDED for row in rows):
        notes.append("undecided rows are no finding: run it again when the machine is idle")
    return Report(*labels, rows, notes, time.monotonic() - start)


@contextmanager
def _trees(root: Path) -> Iterator[dict[str, Path]]:
    """Yield an empty folder for each side, in a new folder."""
    cache = environments.cache_of(root)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache) as folder:
        trees = {side: Path(folder, side) for side in SIDES}
        for tree in trees.values():
            tree.mkdir()
        yield trees


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show the current step in one line on a terminal; elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("reading the sources") as status:
        yield lambda text: status.update(text.replace("[", "\\["))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
