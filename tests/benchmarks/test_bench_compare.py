import itertools
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median

import pytest
from helpers.copies import copy_tree

from bench.compare import CannotCompareError, command, comparison, environments, pairs, selftest, verdicts
from bench.compare.comparison import Plan
from bench.compare.pairs import run_pair
from bench.compare.report import Report
from bench.compare.verdicts import CONFIRMED, Row, Verdict, interval, judge, one_sided

ROOT = Path(__file__).parents[2]
QUICK = Plan(pairs=2, most_pairs=6, rounds=5, seconds=20, patience=20)


# What the times say.


def samples(*, ratio=1.0, pairs=8, rounds=31, noise=0.1, process=0.02, seed=0):
    """Log-normal rounds, a bias of each pair, and once in a while something else that takes the CPU."""
    chance = random.Random(seed)

    def one(base):
        return base * chance.lognormvariate(0, noise) * (chance.choice((2, 5)) if chance.random() < 0.05 else 1)

    def pair():
        bias = chance.gauss(0, process)
        return [(one(1e-3), one(1e-3 * ratio * 2.718281828**bias)) for _ in range(rounds)]

    return [pair() for _ in range(pairs)]


def test_the_same_is_never_slower_and_a_fifth_more_always_is():
    for seed in range(50):
        assert judge("a", samples(noise=0.05, seed=seed)).verdict is Verdict.OK, seed
        assert judge("a", samples(noise=0.05, ratio=1.2, seed=seed)).verdict is Verdict.SLOWER, seed


def test_noise_alone_is_undecided_at_worst():
    found = [judge("a", samples(noise=0.5, process=0.3, pairs=6, seed=seed)).verdict for seed in range(300)]
    assert found.count(Verdict.SLOWER) <= 3
    assert Verdict.UNDECIDED in found


QUIET = {"ratio": 1.5, "noise": 0.001, "process": 0.0001}


def test_a_verdict_follows_from_the_ratio_and_the_number_of_pairs():
    for options, verdict in (
        ({"ratio": 1.05, "noise": 0.02, "process": 0.005}, Verdict.OK),
        ({"ratio": 0.8}, Verdict.FASTER),
        (QUIET | {"pairs": CONFIRMED - 1}, Verdict.UNDECIDED),
        (QUIET | {"pairs": CONFIRMED}, Verdict.SLOWER),
        ({"pairs": 1}, Verdict.UNDECIDED),
    ):
        assert judge("a", samples(**options)).verdict is verdict, options


def test_the_interval_is_students():
    found = interval([0.1, 0.2, 0.3])  # mean 0.2, standard error 0.1 / sqrt 3, quantile 9.925
    assert found.ratio == pytest.approx(2.718281828**0.2)
    assert found.low == pytest.approx(2.718281828 ** (0.2 - 9.925 * 0.1 / 3**0.5))
    assert found.high == pytest.approx(2.718281828 ** (0.2 + 9.925 * 0.1 / 3**0.5))


def test_who_comes_second_in_a_round_makes_no_difference():
    """Rounds alternate, and there may be an odd number of them."""
    rounds = [(1.0, 1.3) if number % 2 == 0 else (1.3, 1.0) for number in range(11)]
    found = judge("a", [rounds] * 4)
    assert found.interval.ratio == pytest.approx(1)
    assert judge("a", [[(1.0, 2.0)]] * 2).interval.ratio == pytest.approx(2)


def test_what_seems_slower_is_measured_again_before_what_is_only_uncertain():
    measured = {
        "fine": samples(pairs=4, noise=0.01, process=0.001),
        "slow": samples(pairs=4, ratio=1.3),
        "wide": [[(1.0, 0.7)], [(1.0, 1.3)], [(1.0, 0.8)], [(1.0, 1.2)]],
    }
    assert comparison._next(measured, Plan(), time_left=True) == ["slow"]
    measured["slow"] = measured["fine"]
    assert comparison._next(measured, Plan(), time_left=True) == ["wide"]
    assert comparison._next(measured, Plan(), time_left=False) == []


def test_what_is_about_to_be_called_slower_is_confirmed_even_if_time_is_up():
    measured = {"slow": samples(pairs=5, ratio=1.3, process=0.01), "fine": samples(pairs=5)}
    assert comparison._next(measured, Plan(), time_left=False) == ["slow"]
    measured["slow"] = samples(pairs=6, ratio=1.3, process=0.01)
    assert comparison._next(measured, Plan(), time_left=False) == []


def test_a_pair_that_was_lost_is_made_up_for_even_if_time_is_up():
    measured = {"a": samples(pairs=4), "b": samples(pairs=3), "c": []}
    assert comparison._next(measured, Plan(), time_left=False) == ["b", "c"]


def test_what_one_side_cannot_run_is_new_or_gone():
    for sides, verdict in ((["base"], Verdict.NEW), (["head"], Verdict.GONE), (["base", "head"], Verdict.BROKEN)):
        assert one_sided("a", dict.fromkeys(sides, "no")).verdict is verdict


def test_only_what_is_slower_ends_with_1(tmp_path):
    for verdict in Verdict:
        report = Report("base", "head", [Row("a", verdict), Row("b", Verdict.OK)], [], 1.0)
        assert report.code == (verdict in {Verdict.SLOWER, Verdict.GONE, Verdict.BROKEN})
        report.write(tmp_path / "out.json")
        written = json.loads((tmp_path / "out.json").read_text())
        assert (written["rows"][0]["verdict"], written["exit_code"]) == (verdict.value, report.code)


# Two processes in lock-step, on suites of a few lines.

PROJECT = """\
[tool.pytest.ini_options]
python_files = ["bench_*.py"]
addopts = ["--strict-markers"]
markers = ["guard: measured"]
filterwarnings = ["error"]
"""

SUITE = """\
import os, signal, time
from pathlib import Path
import fastrack
import pytest

pytestmark = pytest.mark.guard
"""


@pytest.fixture(scope="module")
def pythons(tmp_path_factory):
    """Two environments with a `fastrack` that only knows which side it is."""
    folder, found = tmp_path_factory.mktemp("environments"), {}
    for side in pairs.SIDES:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / side], check=True)
        site = next((folder / side / "lib").glob("python*/site-packages"))
        (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (site / "fastrack").mkdir()
        (site / "fastrack" / "__init__.py").write_text(f"SIDE = {side!r}\n")
        found[side] = folder / side / "bin" / "python"
    return found


def write_suite(root, body, project=PROJECT):
    (root / "bench").mkdir()
    (root / "pyproject.toml").write_text(project)
    (root / "bench" / "bench_it.py").write_text(SUITE + body)


@pytest.fixture
def measure(pythons, tmp_path):
    def run(body, patience=20):
        write_suite(tmp_path, body)
        return run_pair(pythons, tmp_path, tmp_path, number=0, rounds=4, patience=patience)

    return run


def name(test):
    return f"bench/bench_it.py::{test}"


@pytest.mark.slow
def test_rounds_follow_each_other_and_never_overlap(measure, tmp_path):
    found = measure(f"""
def action():
    start = time.perf_counter()
    time.sleep(0.004)
    with open({str(tmp_path / "log")!r}, "a") as log:
        print(fastrack.SIDE, start, time.perf_counter(), file=log)

def test_one(benchmark):
    benchmark(action)
""")
    assert len(found.rounds[name("test_one")]) == 4
    assert not found.broken
    runs = [line.split() for line in (tmp_path / "log").read_text().splitlines()][: 2 * (3 + 4)]
    assert [side for side, *_ in runs[6:]] == ["base", "head", "head", "base"] * 2
    assert all(float(end) <= float(start) for (_, _, end), (_, start, _) in itertools.pairwise(runs))


@pytest.mark.slow
def test_short_calls_make_longer_rounds_of_as_many_calls_on_both_sides(measure, tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "_ROUND", 0.02)  # on a busy machine, a call may take some milliseconds
    found = measure(f"""
calls = 0

def action():
    global calls
    calls += 1
    time.sleep(0.0005)

def test_one(benchmark):
    benchmark.pedantic(action, (), {{}}, rounds=1)
    Path({str(tmp_path)!r}, "calls-" + fastrack.SIDE).write_text(str(calls))
""")
    counted = {(tmp_path / f"calls-{side}").read_text() for side in pairs.SIDES}
    assert len(counted) == 1
    assert int(counted.pop()) > 2 * 4
    assert all(0.0005 <= seconds < 0.1 for times in found.rounds[name("test_one")] for seconds in times)


@pytest.mark.slow
def test_a_slower_side_is_slower(measure):
    found = measure("""
def test_one(benchmark):
    benchmark(time.sleep, 0.01 if fastrack.SIDE == "head" else 0.002)
""")
    assert median(head / base for base, head in found.rounds[name("test_one")]) > 2


FAULTS = {
    "pytest.skip('not here')": "not here",
    "raise ValueError('odd')": "ValueError: odd",
    "benchmark(lambda: 1 / 0)": "ZeroDivisionError",
    "benchmark(int); assert False, 'wrong result'": "wrong result",
    "benchmark(int); benchmark(int)": "measures twice",
}


@pytest.mark.nightly
@pytest.mark.parametrize("side", ["head"])
def test_what_fails_on_one_side_is_told_and_the_rest_is_measured(measure, side):
    bad = [
        f"def test_bad_{number}(benchmark):\n    if fastrack.SIDE == {side!r}:\n        {fault}\n    benchmark(int)\n"
        for number, fault in enumerate(FAULTS)
    ]
    found = measure("\n".join([*bad, "def test_good(benchmark):\n    benchmark(int)\n"]))
    assert list(found.rounds) == [name("test_good")]
    for number, why in enumerate(FAULTS.values()):
        told = found.broken.pop(name(f"test_bad_{number}"))
        assert list(told) == [side]
        assert why in told[side]
    assert not found.broken


@pytest.mark.slow
def test_a_process_that_dies_is_told_with_its_last_words(measure):
    found = measure("""
def test_bad(benchmark):
    if fastrack.SIDE == "head":
        os.write(2, b"out of luck\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    benchmark(int)
""")
    assert "ended with -9" in found.broken[name("test_bad")]["head"]
    assert "out of luck" in found.broken[name("test_bad")]["head"]


@pytest.mark.nightly
def test_a_process_that_hangs_is_given_up(measure, monkeypatch):
    monkeypatch.setattr(pairs, "_FAREWELL", 0.1)
    begin = time.monotonic()
    found = measure(
        'def test_bad(benchmark):\n    benchmark(time.sleep, 60 if fastrack.SIDE == "head" else 0)\n', patience=2
    )
    assert found.broken[name("test_bad")] == {"head": "no answer within 2 s"}
    assert time.monotonic() - begin < 15


@pytest.mark.nightly
def test_what_a_death_kept_from_being_measured_is_measured_in_another_pair(pythons, tmp_path):
    bad, good = (
        "def test_bad(benchmark):\n    os._exit(7)\n",
        "def test_good(benchmark):\n    benchmark(time.sleep, 0.002)\n",
    )
    write_suite(tmp_path, bad + good)
    plan = Plan(pairs=2, rounds=3, seconds=0, patience=20)
    rows = comparison.compare(pythons, tmp_path, tmp_path, lambda _: None, plan)
    assert [(row.name, row.pairs) for row in rows] == [(name("test_good"), 2), (name("test_bad"), 0)]


@pytest.mark.slow
def test_only_guards_are_measured(measure):
    found = measure("""
pytestmark = []

@pytest.mark.guard
def test_one(benchmark):
    benchmark(int)

def test_two(benchmark):
    benchmark(int)
""")
    assert list(found.rounds) == [name("test_one")]


@pytest.mark.slow
def test_a_suite_that_one_side_cannot_import_is_new(measure):
    found = measure("""
if fastrack.SIDE == "base":
    from fastrack import later

def test_one(benchmark):
    benchmark(int)
""")
    assert not found.rounds
    assert list(found.broken) == [name("test_one")]
    assert "cannot import name 'later'" in found.broken[name("test_one")]["base"]


@pytest.mark.slow
def test_fastrack_from_anywhere_else_is_refused(pythons, measure):
    init = next(pythons["head"].parents[1].glob("lib/python*/site-packages/fastrack/__init__.py"))
    text = init.read_text()
    init.write_text(text + f"__file__ = {str(ROOT / 'fastrack' / '__init__.py')!r}\n")
    try:
        with pytest.raises(CannotCompareError, match="head imports fastrack from"):
            measure("def test_one(benchmark):\n    benchmark(int)\n")
    finally:
        init.write_text(text)


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
    write_suite(root, "def test_one(benchmark):\n    benchmark(time.sleep, fastrack.TIME)\n", PACKAGE + PROJECT)
    for folder in ("fastrack", "kernels"):
        (root / folder).mkdir()
    (root / ".gitignore").write_text("/.benchmarks/\n")
    (root / "fastrack" / "__init__.py").write_text("TIME = 0.004\n")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "core.hooksPath="]
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True)
    return root


def left_behind(root):
    return list(environments.cache_of(root).glob("run-*"))


@pytest.mark.nightly
def test_the_same_tree_passes_and_a_slower_one_does_not(repository, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "CONFIRMED", 3)
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
    with pytest.raises(CannotCompareError, match=r"the base needs numpy>=999"):
        environments.check_requirements(tree("later", "numpy>=999"), plain)
    with pytest.raises(CannotCompareError, match=r"the working tree needs no-such-thing"):
        environments.check_requirements(plain, tree("missing", "no-such-thing"))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_nothing(repository, kind):
    script = "import sys; from bench.compare import command; from pathlib import Path\n"
    script += f"sys.exit(command.main(['HEAD'], root=Path({str(repository)!r})))"
    running = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    end = time.monotonic() + 15
    while not list(environments.cache_of(repository).glob("run-*/head.log")):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(running.pid, kind)
    assert running.wait(15) == 130
    assert running.stderr.read() == b"interrupted\n"
    running.stderr.close()
    assert not left_behind(repository)
    while processes_in(repository):  # one that was just being started ends when it finds the pipe closed
        assert time.monotonic() < end + 15
        time.sleep(0.05)


def processes_in(root):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += [process] if os.fsencode(root) in (process / "cmdline").read_bytes() else []
        except OSError:
            continue
    return found


def test_the_slow_down_of_the_self_test_slows_transfers(tmp_path):
    copy_tree(ROOT / "fastrack", tmp_path / "fastrack")
    selftest.plant(tmp_path)
    code = "import fastrack; print({getattr(fastrack.Channel, way).__name__ for way in ('to_device', 'to_host')})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{'slow'}\n"
