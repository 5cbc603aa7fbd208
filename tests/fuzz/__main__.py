"""Fuzzes all targets at once, each in a process of its own: ``python -m fuzz``. See docs/dev/testing.md."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from fuzz.targets import TARGETS

FAILED = 1
NOT_INSTALLED = 2
ROOT = Path(__file__).resolve().parents[2]
PATHS = f"{ROOT}/tests{os.pathsep}{ROOT}/kernels"  # of the targets, one of which compiles engines
GRACE = 1800  # seconds that a process may take to begin and to end: on a busy machine it compiles for minutes


def main():
    if find_spec("atheris") is None:
        sys.stderr.write(
            f"atheris has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]} here, or is not installed: "
            "`make fuzz` installs it. Without it, pytest tests/project/test_fuzz_targets.py tries the same targets\n"
        )
        return NOT_INSTALLED
    options = _options()
    start = time.monotonic()
    with ThreadPoolExecutor(len(options.targets)) as pool:
        found = list(pool.map(lambda name: _fuzz(name, options.folder, options.seconds), options.targets))
    report = {
        "python": sys.version.split()[0],
        "atheris": version("atheris"),
        "seconds": round(time.monotonic() - start, 1),
        "inputs": sum(one["inputs"] for one in found),
        "crashes": sum(one["crashes"] for one in found),
        "targets": found,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(_table(report))
    return FAILED if report["crashes"] else 0


def _options():
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where inputs and crashes are kept")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    options.targets = options.targets or names
    if unknown := set(options.targets) - set(names):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    return options


def _fuzz(name, folder, seconds):
    command = [sys.executable, "-m", "fuzz.one", name, str(folder), str(seconds)]
    start = time.monotonic()
    log = folder / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with log.open("wb") as out, tempfile.TemporaryDirectory(prefix="fastrack-fuzz-", dir=memory) as temporary:
        # libFuzzer ends its process without cleaning up.
        own = {"PYTHONPATH": PATHS, "TMPDIR": temporary}
        options = {"env": os.environ | own, "stdout": out, "stderr": out, "timeout": seconds + GRACE}
        try:
            code = subprocess.run(command, check=False, **options).returncode
        except subprocess.TimeoutExpired:
            code = "it did not end"
    text = log.read_text(errors="replace")
    if code:
        _show_crash(name, folder, code, text)
    return {
        "target": name,
        "seconds": round(time.monotonic() - start, 1),
        "inputs": _last(r"^stat::number_of_executed_units:\s*(\d+)", text) or _last(r"^#(\d+)", text),
        "edges": _last(r"cov: (\d+)", text),
        "features": _last(r"ft: (\d+)", text),
        "corpus": _last(r"corp: (\d+)", text),
        "peak_mib": _last(r"^stat::peak_rss_mb:\s*(\d+)", text),
        "crashes": int(bool(code)),
    }


def _show_crash(name, folder, code, text):
    kept = dict.fromkeys(re.findall(r"Test unit written to (\S+)", text))
    sys.stderr.write(f"{name}: failed ({code}); see {folder / name}.log\n")
    sys.stderr.write("".join(f"  {line}\n" for line in text.splitlines()[-40:]))
    for path in kept:
        sys.stderr.write(f"again: PYTHONPATH=tests:kernels {sys.executable} -m fuzz.one {name} {folder} 1 {path}\n")


def _last(pattern, text):
    found = re.findall(pattern, text, re.MULTILINE)
    return int(found[-1]) if found else 0


def _table(report):
    lines = [f"{'target':10} {'inputs':>9} {'edges':>6} {'features':>8} {'corpus':>7} {'crashes':>7}  seconds"]
    lines += [
        f"{one['target']:10} {one['inputs']:9} {one['edges']:6} {one['features']:8} {one['corpus']:7} "
        f"{one['crashes']:7}  {one['seconds']:7}"
        for one in report["targets"]
    ]
    lines.append(f"{report['inputs']} inputs in {report['seconds']} s, {report['crashes']} crashes")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
