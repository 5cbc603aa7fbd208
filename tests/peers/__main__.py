"""Run test suites of others with and without fastrack, and compare: ``python -m peers``. See docs/dev/testing.md."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import Counter
from fnmatch import fnmatchcase
from importlib import metadata, util
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".peers-tests"  # source archives, and results, by which a run goes on where the last one stopped
TABLE = tomllib.loads((HERE / "suites.toml").read_text())
SUITES = {suite["name"]: suite for suite in TABLE["suite"]}
DOCUMENTED = tomllib.loads((HERE / "documented.toml").read_text())["documented"]
VERSIONS = dict(line.split("==") for line in (HERE / "sdists.in").read_text().splitlines() if "==" in line)
LIMIT = 300  # seconds a test
EVERY = 30  # seconds between two lines of progress
KINDS = ("passed", "documented", "as plain", "neither")
HEAD = ("suite", "version", "fastrack stands in by", "ran", *KINDS)


class SuiteError(Exception):
    """Raised for a suite that could not be run to its end."""


def main():
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all, if none is named")
    names = parser.parse_args().names or [*SUITES]
    if unknown := set(names) - set(SUITES):
        parser.error(f"expected names of {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")
    rows, faults = [HEAD], []
    for place, name in enumerate(names, 1):
        say(f"[{place}/{len(names)}] {name}")
        try:
            counts, found = judge(SUITES[name])
            version = VERSIONS.get(SUITES[name].get("sdist"), sys.version.split()[0])
            ran = sum(counts[kind] for kind in KINDS)
            rows.append((name, version, SUITES[name]["how"], ran, *(counts[kind] for kind in KINDS)))
            faults += found
        except SuiteError as error:
            faults.append(f"{name}: {error}")
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for name, version, how, *numbers in rows:
        words = [f"{word:{width}}" for word, width in zip((name, version, how), widths, strict=False)]
        say("  ".join(words + [f"{number:>{width}}" for number, width in zip(numbers, widths[3:], strict=True)]))
    for name, reason in TABLE["absent"].items():
        say(f"not run: {name}, as {reason}")
    for fault in faults:
        say(f"neither documented nor as plain: {fault}")
    return 1 if faults else 0


def judge(suite):
    """Run a suite plain and with fastrack, and return how many tests ended in each way, and what nothing explains."""
    if "sdist" not in suite and not (util.find_spec("test") and util.find_spec("test.test_io")):
        raise SuiteError("expected a Python with its own tests, as the package `test`, got one without")
    with tempfile.TemporaryDirectory(prefix="fastrack-peers-") as work:
        plain = run(suite, "plain", Path(work)) if suite.get("plain", True) else {}
        ours = run(suite, "fastrack", Path(work))
    counts, found = Counter(), []
    for test, end in ours.items():
        kind = kind_of(suite["name"], test, end, plain.get(test, {}))
        counts[kind] += 1
        if kind == "neither":
            found.append(f"{suite['name']}: {test}: {' '.join(end['message'].split())[:200]}")
    for row in (row for row in DOCUMENTED if suite["name"] in row["suites"]):
        if not any(is_documented(row, suite["name"], test, end) for test, end in ours.items()):
            say(f"  documented, and fails no more: {', '.join(row['tests'])}")
    if not counts["passed"]:
        raise SuiteError("expected tests that pass, got none")
    return counts, found


def kind_of(name, test, end, plain):
    if end["outcome"] != "failed":
        return end["outcome"]
    if plain.get("outcome") == "failed" and plain["raised"] == end["raised"]:
        return "as plain"
    return "documented" if any(is_documented(row, name, test, end) for row in DOCUMENTED) else "neither"


def is_documented(row, name, test, end):
    named = name in row["suites"] and any(fnmatchcase(test, f"*::{each}") for each in row["tests"])
    return named and fnmatchcase(end.get("message", ""), row["found"]["raised"])


def run(suite, mode, work):
    """Return how each test of a suite ended: in an earlier run, if nothing has changed since."""
    results = FOLDER / "results" / f"{suite['name']}.{mode}.{digest(suite, mode)}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    if lines := read(results):
        say(f"  {mode}: {count_ended(lines)} tests ended in an earlier run")
    while "complete" not in (last := (read(results) or [{}])[-1]):
        code = start(suite, mode, work, results)
        last = (read(results) or [{}])[-1]
        if code >= 0 and "complete" not in last:
            said = (work / "log").read_text()[-3000:]
            raise SuiteError(f"{mode}: expected pytest to run all tests, got status {code}:\n{said}")
        if "outcome" not in last and "test" in last:  # the test that ended the process; the others follow
            last.update(outcome="failed", raised="Died", message=f"the process ended with status {code}")
            with results.open("a") as file:
                file.write(json.dumps(last) + "\n")
    ends = {line["test"]: line for line in read(results) if "outcome" in line}
    counts = Counter(end["outcome"] for end in ends.values())
    say(f"  {mode}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")
    return ends


def start(suite, mode, work, results):
    """Run what is left of a suite, say how far it is now and then, and return the status."""
    source = unpack(suite["sdist"], work) if "sdist" in suite else HERE
    place = HERE / "own" if "own" in suite else source / suite.get("folder", ".")
    plugins = ["no:cacheprovider", "pytest_timeout", "peers.recorder"]
    if mode == "fastrack" and "stand_in" in suite:
        plugins.append(f"peers.stand_ins.{suite['stand_in']}")
    names = work / "names"  # of the checkout's folders only these two, as others are named like packages
    names.mkdir(exist_ok=True)
    for target in (HERE, ROOT / "fastrack"):
        if not (names / target.name).exists():
            (names / target.name).symlink_to(target)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-c", os.devnull, "--rootdir", place]
    command += [f"--timeout={LIMIT}", *(f"-p{plugin}" for plugin in plugins), *suite.get("options", [])]
    environment = {
        "FASTRACK_PEERS_MODE": mode,
        "FASTRACK_PEERS_RESULTS": str(results),
        "FASTRACK_PEERS_SOURCE": str(source),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(work),
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(names),
        "TMPDIR": tempfile.mkdtemp(dir=work),
    }
    begun = time.monotonic()
    with (work / "log").open("w") as log:
        process = subprocess.Popen([*command, *suite["tests"]], cwd=place, env=environment, stdout=log, stderr=log)
        try:
            while True:
                try:
                    return process.wait(EVERY)
                except subprocess.TimeoutExpired:
                    say(f"  {mode}: {count_ended(read(results))} tests ended, {time.monotonic() - begun:.0f} s")
        finally:
            process.kill()
            process.wait()


def unpack(name, work):
    stem = f"{name.replace('-', '_')}-{VERSIONS[name]}"
    if not (work / stem).exists():
        with tarfile.open(FOLDER / "sdists" / f"{stem}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    return work / stem


def digest(suite, mode):
    """Return a name of all that results depend on."""
    parts = [HERE / "recorder.py", HERE / "sdists.txt", HERE / "packages.txt"]
    parts += (HERE / "own" / name for name in (suite["tests"] if "own" in suite else []))
    if mode == "fastrack":
        parts += [*(ROOT / "fastrack").rglob("*.py"), *HERE.glob(f"stand_ins/{suite.get('stand_in')}.py")]
    found = hashlib.sha256(json.dumps([suite, mode, sys.version, metadata.version("torch")]).encode())
    for path in sorted(parts):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def read(results):
    return [json.loads(line) for line in results.read_text().splitlines()]


def count_ended(lines):
    return sum("outcome" in line for line in lines)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
