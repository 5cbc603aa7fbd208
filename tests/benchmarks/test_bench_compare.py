"""`make bench-compare`: what times say, what a process tells, and the whole way on a repository of a few files."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("bench.compare", reason="the tests run without the benchmarks")

from bench.compare import CannotCompareError, comparison, environments
from bench.compare import __main__ as command
from bench.compare.comparison import CONFIRMED, Plan, Row, Verdict, compare, interval, judge, measure

ROOT = Path(__file__).parents[2]
QUICK = Plan(pairs=2, most_pairs=4, seconds=20, patience=60)


def samples(*, ratio=1.0, pairs=8, noise=0.02, seed=0):
    """Pairs of seconds whose ratios differ by so much."""
    chance = random.Random(seed)
    return [(1e-3, 1e-3 * ratio * 2.718281828 ** chance.gauss(0, noise)) for _ in range(pairs)]


def test_the_same_is_never_slower_and_a_fifth_more_always_is():
    for seed in range(50):
        assert judge("a", samples(seed=seed)).verdict is Verdict.OK, seed
        assert judge("a", samples(ratio=1.25, seed=seed)).verdict is Verdict.SLOWER, seed


def test_noise_alone_is_undecided_at_worst():
    found = [judge("a", samples(noise=0.3, pairs=6, seed=seed)).verdict for seed in range(300)]
    assert found.count(Verdict.SLOWER) <= 3
    assert Verdict.UNDECIDED in found


def test_a_verdict_follows_from_the_ratio_and_the_number_of_pairs():
    for options, verdict in (
        ({"ratio": 1.05, "noise": 0.005}, Verdict.OK),
        ({"ratio": 0.8}, Verdict.FASTER),
        ({"ratio": 1.5, "noise": 0.0001, "pairs": CONFIRMED - 1}, Verdict.UNDECIDED),
        ({"ratio": 1.5, "noise": 0.0001, "pairs": CONFIRMED}, Verdict.SLOWER),
        ({"pairs": 1}, Verdict.UNDECIDED),
    ):
        assert judge("a", samples(**options)).verdict is verdict, options


def test_the_interval_is_students():
    found = interval([0.1, 0.2, 0.3])  # mean 0.2, standard error 0.1 / sqrt 3, quantile 9.925
    assert found.ratio == pytest.approx(2.718281828**0.2)
    assert found.low == pytest.approx(2.718281828 ** (0.2 - 9.925 * 0.1 / 3**0.5))
    assert found.high == pytest.approx(2.718281828 ** (0.2 + 9.925 * 0.1 / 3**0.5))


def test_only_what_is_slower_ends_with_1(tmp_path):
    for verdict in Verdict:
        report = command.Report("base", "head", [Row("a", verdict), Row("b", Verdict.OK)], [], 1.0)
        assert report.code == (verdict in {Verdict.SLOWER, Verdict.GONE, Verdict.BROKEN})
        report.write(tmp_path / "out.json")
        written = json.loads((tmp_path / "out.json").read_text())
        assert (written["rows"][0]["verdict"], written["exit_code"]) == (verdict.value, report.code)


@pytest.fixture
def pairs(monkeypatch, tmp_path):
    """Compare sides whose processes tell what a function makes of the side and the number of the pair."""
    asked = []

    def run(tell, plan):
        def measured(python, _, names, number, *__):
            asked.append((python, tuple(names)))
            seconds, *others = tell(python, number)
            asked_for = names if "::" in names[0] else seconds
            return comparison.Run({name: seconds[name] for name in asked_for if name in seconds}, *others)

        monkeypatch.setattr(comparison, "measure", measured)
        (tmp_path / "bench").mkdir()
        (tmp_path / "bench/bench_it.py").touch()
        return compare({"base": "base", "head": "head"}, tmp_path, lambda _: None, plan), asked

    return run


def test_only_undecided_guards_are_measured_again_and_sides_take_turns(pairs):
    def tell(side, number):
        return ({"a::fine": 1.0, "a::wide": 1.0 + 0.3 * (side == "head") * (number % 3)},)

    rows, asked = pairs(tell, Plan(pairs=2, most_pairs=4, seconds=60))
    assert {row.name: row.pairs for row in rows} == {"a::fine": 2, "a::wide": 4}
    assert [side for side, _ in asked] == ["base", "head", "head", "base"] * 2
    wanted = [("bench/bench_it.py",)] * 2 + [("a::fine", "a::wide")] * 2 + [("a::wide",)] * 4
    assert [names for _, names in asked] == wanted


def test_what_seems_slower_is_confirmed_even_if_time_is_up(pairs):
    def tell(side, number):
        wide = 1.0 + 0.3 * (side == "head") * (number % 3)
        return ({"a::slow": 1.0 + 0.5 * (side == "head"), "a::wide": wide},)

    rows, _ = pairs(tell, Plan(pairs=4, seconds=0))
    assert {row.name: (row.verdict, row.pairs) for row in rows} == {
        "a::slow": (Verdict.SLOWER, CONFIRMED),
        "a::wide": (Verdict.UNDECIDED, 4),
    }


def test_what_one_side_cannot_run_is_new_or_gone_with_the_reason(pairs):
    def tell(side, _):
        there = {"b.py::both": 1.0, "b.py::new" if side == "head" else "h.py::gone": 1.0}
        failed = {"b.py": "cannot import", "broken": side} if side == "base" else {"broken": side}
        return there, failed, {"skipped": "no such CPU"}

    rows, _ = pairs(tell, Plan(pairs=2))
    assert {row.name: (row.verdict, row.why) for row in rows if row.why} == {
        "h.py::gone": (Verdict.GONE, "head: it is not there"),
        "b.py::new": (Verdict.NEW, "base: cannot import"),
        "broken": (Verdict.BROKEN, "base: base; head: head"),
    }


def test_where_nothing_is_common_nothing_is_compared(pairs):
    with pytest.raises(CannotCompareError, match="nothing that both sides can run\na: head: gone"):
        pairs(lambda side, _: ({"a": 1.0}, {}) if side == "base" else ({}, {"a": "gone"}), Plan())


# One process, on a suite of a few lines.

PROJECT = """\
[tool.pytest.ini_options]
python_files = ["bench_*.py"]
addopts = ["--strict-markers"]
markers = ["guard: measured"]
filterwarnings = ["error"]
"""

SUITE = """\
import os, signal, time
import pytest
"""


def write_suite(root, body, project=PROJECT):
    (root / "bench").mkdir(parents=True)
    (root / "pyproject.toml").write_text(project)
    (root / "bench" / "bench_it.py").write_text(SUITE + body)


FAULTS = {
    "pytest.skip('not here')": "not here",
    "raise ValueError('odd')": "ValueError: odd",
    "benchmark(int); assert False, 'wrong result'": "wrong result",
    "benchmark(int); benchmark(int)": "only be used once",
}


@pytest.mark.slow
def test_guards_alone_are_measured_and_what_fails_is_told(tmp_path):
    guards = [f"def test_bad_{n}(benchmark):\n    {fault}\n" for n, fault in enumerate(FAULTS)]
    guards.append("def test_good(benchmark):\n    benchmark(time.sleep, 0.002)\n")
    marked = "".join(f"@pytest.mark.guard\n{guard}" for guard in guards)
    write_suite(tmp_path / "tree", f"{marked}def test_other(benchmark):\n    benchmark(int)\n")
    (tmp_path / "tree/bench/bench_other.py").write_text("from json import later\n")
    found = measure(Path(sys.executable), tmp_path / "tree", ["bench"], 0, 60)
    ((name, seconds),) = found.seconds.items()
    assert name == "bench/bench_it.py::test_good"
    assert 0.002 <= seconds < 0.1
    for number, why in enumerate(FAULTS.values()):
        assert why in found.why(f"bench/bench_it.py::test_bad_{number}")
    assert "cannot import name 'later'" in found.why("bench/bench_other.py::test_one")
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "told"), [("os._exit(7)", "ended with 7"), ("time.sleep(60)", "no end within 4 s")])
def test_a_process_that_dies_or_hangs_is_no_comparison(tmp_path, fault, told):
    write_suite(tmp_path / "tree", f"@pytest.mark.guard\ndef test_bad(benchmark):\n    {fault}\n")
    with pytest.raises(CannotCompareError, match=told):
        measure(Path(sys.executable), tmp_path / "tree", ["bench"], 0, 4 if "sleep" in fault else 60)


# The whole way, on a repository of a few files.

PACKAGE = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fastrack"
version = "0"
dependencies = ["numpy"]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    guard = "@pytest.mark.guard\ndef test_one(benchmark):\n    benchmark(time.sleep, fastrack.TIME)\n"
    write_suite(root, f"import fastrack\n{guard}", PACKAGE + PROJECT)
    for folder in ("fastrack", "kernels"):
        (root / folder).mkdir()
    (root / ".gitignore").write_text("/.benchmarks/\n")
    (root / "fastrack" / "__init__.py").write_text("TIME = 0.004\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath="]
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True)
    return root


def left_behind(root):
    return list(root.glob(".benchmarks/compare/run-*"))


@pytest.mark.slow
def test_the_same_tree_passes_and_a_slower_one_does_not(repository, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "CONFIRMED", 3)
    assert command.main(["HEAD", "--json", str(tmp_path / "out.json")], QUICK, repository) == 0
    assert "the working tree, as committed, against HEAD" in capsys.readouterr().out
    module = repository / "fastrack" / "__init__.py"
    module.write_text("TIME = 0.012\n")
    try:
        assert command.main(["HEAD"], QUICK, repository) == 1
        assert "with changes" in capsys.readouterr().out
    finally:
        module.write_text("TIME = 0.004\n")
    assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == 0
    assert not left_behind(repository)
    assert len(list(repository.glob(".benchmarks/compare/*/finished"))) == 3  # what did not change is built once


@pytest.mark.slow
def test_what_cannot_be_built_is_told_and_not_kept(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'fastrack'\n")
    with pytest.raises(CannotCompareError, match="could not be installed"):
        environments.build("base", tmp_path, tmp_path / "cache", lambda _: None)
    assert not list((tmp_path / "cache").iterdir())


def test_a_revision_that_does_not_exist_ends_with_2(repository, capsys):
    assert command.main(["no-such-branch"], QUICK, repository) == 2
    assert "there is no revision 'no-such-branch' here; name a branch" in capsys.readouterr().err
    assert not left_behind(repository)


def test_no_revision_ends_with_2(capsys):
    with pytest.raises(SystemExit) as error:
        command.main([])
    assert error.value.code == 2
    assert "BASE=main" in capsys.readouterr().err


def test_dependencies_that_differ_are_told_and_missing_ones_refused(tmp_path):
    def tree(name, *dependencies):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(dependencies)}\n")
        return tmp_path / name

    plain = tree("plain", "numpy")
    assert environments.check_requirements(plain, plain) == []
    assert "numpy, numpy>=1" in environments.check_requirements(tree("other", "numpy>=1"), plain)[0]
    for base, head, told in (
        (tree("later", "numpy>=999"), plain, r"the base needs numpy>=999"),
        (plain, tree("missing", "no-such-thing"), r"the working tree needs no-such-thing"),
    ):
        with pytest.raises(CannotCompareError, match=told):
            environments.check_requirements(base, head)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_nothing(repository, kind):
    script = "import sys; from bench.compare import __main__ as command; from pathlib import Path\n"
    script += f"sys.exit(command.main(['HEAD'], root=Path({str(repository)!r})))"
    running = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 60
    while not list(repository.glob(".benchmarks/compare/run-*/tmp*/found.json")):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(running.pid, kind)
    assert running.wait(15) == 130
    assert running.stderr.read().endswith(b"interrupted\n")
    running.stderr.close()
    assert not left_behind(repository)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(repository) in read_if_there(path)]


def read_if_there(path):
    try:
        return path.read_text()
    except OSError:
        return ""


def test_the_slow_down_of_the_self_test_slows_transfers():
    names = "print({getattr(fastrack.Channel, way).__name__ for way in ('to_device', 'to_host')})"
    code = f"import fastrack\n{command.SLOW_DOWN}\n{names}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "{'slow'}\n"
