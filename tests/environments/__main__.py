"""Install fastrack's wheel with other packages, as pip resolves it, and use it there: ``python -m environments``.

See docs/dev/testing.md.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from environments.table import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
INSIDE = Path(__file__).with_name("inside.py")
LIMIT = 300  # seconds that a process takes in an environment, but for pip and for tests
LONG = 3600
SHOWN = ("fastrack-io", "numpy", "cryptography", "safetensors", "llvmlite", "numba", "torch", "triton")


class UnfitError(Exception):
    """Raised for what does not hold in an environment."""


def main():
    options = _options()
    # Whatever is started in the background may ignore it, which its children would inherit, and tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    wheel = _wheel(options.wheel)
    _say(f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB")
    reports, failed = {}, []
    for name in options.names:
        start = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix=f"fastrack-{name}-", dir=options.folder) as folder:
                reports[name] = _try(name, wheel, Path(folder))
        except UnfitError as fault:
            failed.append(name)
            reports[name] = {"failure": str(fault)}
            _say(f"  FAILED: {fault}")
        reports[name]["seconds"] = round(time.monotonic() - start, 1)
        _say(f"  {reports[name]['seconds']} s")
    if options.json:
        options.json.write_text(json.dumps(reports, indent=2) + "\n")
    _say(f"failed: {', '.join(failed)}" if failed else "all is right")
    return 1 if failed else 0


def _options():
    table = "\n".join(f"  {name:13} {environment.purpose}" for name, environment in ENVIRONMENTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m environments",
        description=f"{__doc__}\nEnvironments:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wheel", type=Path, help="the wheel, or a folder that has one for this machine")
    parser.add_argument("names", nargs="+", choices=ENVIRONMENTS, metavar="NAME", help="an environment")
    parser.add_argument("--folder", type=Path, help="where they are made, and removed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write versions, sizes and times there")
    return parser.parse_args()


def _wheel(path):
    """Return the wheel with machine code that this Python can install."""
    tags = set(sys_tags())
    wheels = [path] if path.is_file() else sorted(path.glob("fastrack_io-*.whl"))
    for wheel in wheels:
        *_, its = parse_wheel_filename(wheel.name)
        if tags & its and not any(tag.platform == "any" for tag in its):
            return wheel.resolve()
    names = [wheel.name for wheel in wheels]
    raise SystemExit(f"expected a wheel for this machine in {path}, got {names}. Run `make dist`")


def _try(name, wheel, folder):
    """Make an environment, see that all holds in it, and return versions, sizes and times."""
    environment = ENVIRONMENTS[name]
    base = _python(environment.python)
    _run([base, "-m", "venv", "--without-pip", folder / "env"])
    python = folder / "env/bin/python"
    installed = _install(environment, wheel, python, folder)
    version = _run([python, "-c", "import platform; print(platform.python_version())"]).strip()
    report = {"python": version, "packages": installed}
    shown = ", ".join(f"{package} {installed[package]}" for package in SHOWN if package in installed)
    verb = "installed" if environment.is_installed else "resolved"
    _say(f"{name}: Python {version}, {len(installed)} packages {verb}, of them {shown}")
    if not environment.is_installed:
        return report
    _remove_unfit(environment, python)
    report["bytes"] = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    _say(f"  {report['bytes'] / 1e6:.0f} MB")
    _seal_and_open(environment, python, folder)
    _doctor(python)
    _extend(wheel, python)
    if environment.is_tested:
        _test(python, folder)
    return report


def _python(version):
    """Return the interpreter of a version: a command, or one that pyenv has."""
    if not version:
        return sys.executable
    known = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"{version}.*/bin/python")
    for candidate in (f"python{version}", *sorted(known)):
        # pyenv has commands of versions that are not there.
        found = shutil.which(candidate)
        if found and not subprocess.run([found, "-V"], capture_output=True, check=False).returncode:
            return found
    raise UnfitError(f"expected Python {version} on this machine, found none")


def _install(environment, wheel, python, folder):
    """Have pip resolve the wheel and all other packages by one command, and return their versions."""
    command = ["install", *([] if environment.is_installed else ["--dry-run"]), "--report", folder / "report.json"]
    _pip(python, *command, wheel, *environment.requires)
    chosen = json.loads((folder / "report.json").read_text())["install"]
    return {each["metadata"]["name"].lower(): each["metadata"]["version"] for each in chosen}


def _remove_unfit(environment, python):
    """See that each package has what it requires, then remove those that cannot be imported, which fastrack is not."""
    said = _run([sys.executable, "-m", "pip", "--python", python, "check"], status=None).splitlines()
    # Of a wheel that names another platform inside than in its name, as others publish some.
    strange = [line for line in said if line.endswith("is not supported on this platform")]
    wrong = [line for line in said if line not in (*strange, "No broken requirements found.")]
    if wrong or "fastrack" in str(strange):
        raise UnfitError(f"expected each package to have what it requires, got {said}")
    if environment.unfit:
        _pip(python, "uninstall", "--yes", *environment.unfit)
        _say(f"  removed, as they are for another build of torch: {', '.join(environment.unfit)}")


def _pip(python, *arguments):
    return _run([sys.executable, "-m", "pip", "--quiet", "--python", python, *arguments], limit=LONG)


def _seal_and_open(environment, python, folder):
    programs = [(), *((environment.beside, when) for when in ("first", "then") if environment.beside)]
    for program in programs:
        report = json.loads(_run([python, "-I", INSIDE, *program], cwd=folder).splitlines()[-1])  # others may print
        beside = f", and {program[1]} the others" if program else ""
        if not Path(report["path"]).is_relative_to(folder):
            raise UnfitError(f"expected fastrack of the environment, got {report['path']}")
        if report["fault"] or report["engine"] == "openssl":
            raise UnfitError(f"expected a vector engine{beside}, got {report['engine']}: {report['fault']}")
        if report["loaded"] and (not program or program[1] == "then"):
            raise UnfitError(f"expected no compiler to be loaded by fastrack, got {report['loaded']}")
        if not environment.has_numba and report["installed"]:
            raise UnfitError(f"expected no compiler to be installed, got {report['installed']}")
        made_by = report["made_by"]
        told = f"{report['engine']}, code made by numba {made_by['numba']}, LLVM {made_by['llvm']}"
        _say(f"  sealed and opened{beside}: {told}")


def _doctor(python):
    facts = json.loads(_run([python.with_name("fastrack"), "doctor", "--json"]))
    if facts["code"]["problem"] or facts["engine"]["problem"]:
        raise UnfitError(f"expected doctor to find no problem, got {facts['code']}, {facts['engine']}")
    _say(f"  doctor: {facts['engine']['engine']}, seals {facts['engine']['seal_gbps']:.1f} GB/s on one thread")


def _extend(wheel, python):
    """See that fastrack-bench of the same folder adds its commands, which are refused in words without it."""
    plan = [python.with_name("fastrack"), "plan", "transfer", "--published", "all", "--size", "1MiB"]
    said = _run(plan, status=1)
    if "pip install fastrack-bench" not in said:
        raise UnfitError(f"expected `fastrack plan` to say what it needs, got:\n{said}")
    _pip(python, "install", "--no-deps", *wheel.parent.glob("fastrack_bench-*.whl"))
    _run(plan)
    _say("  fastrack-bench: adds `fastrack plan`")


def _test(python, folder):
    """Run tests/crypto where fastrack's checkout cannot be seen."""
    copy = folder / "copy"
    for name in ("conftest.py", "crypto", "helpers"):
        copied = shutil.copytree if (ROOT / "tests" / name).is_dir() else shutil.copy
        (copy / "tests").mkdir(parents=True, exist_ok=True)
        copied(ROOT / "tests" / name, copy / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    options = ["--numprocesses", "2", "--dist", "loadscope", "-m", "not nightly", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", "-q", "--no-header", *options, "tests/crypto"]
    lines = _run(command, cwd=copy, limit=LONG, status=None).splitlines()
    skipped = Counter()
    for line in lines:
        if match := re.match(r"SKIPPED \[(\d+)\] \S+: (.*)", line):
            skipped[match[2]] += int(match[1])
    others = [line for line in lines if not line.startswith("SKIPPED")]
    if not re.match(r"\d+ passed(, \d+ skipped)? in ", others[-1]):
        raise UnfitError("\n".join(["expected all tests to pass, got:", *others[-100:]]))
    _say(f"  tests/crypto: {others[-1]}")
    for reason, count in skipped.most_common():
        _say(f"    skipped: {count}, as {reason}")


def _run(command, *, cwd=None, status=0, limit=LIMIT, **variables):
    """Run a command as a user would, with nothing of this process, and return its output. A status of None is any."""
    here = ("PYTHON", "FASTRACK_", "VIRTUAL_", "MAKE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(here)}
    try:
        done = subprocess.run(
            [str(part) for part in command], env=kept | variables, cwd=cwd, text=True, timeout=limit, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UnfitError(f"expected an end within {limit} s of: {_shown(command)}") from None
    if status is not None and done.returncode != status:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise UnfitError(f"expected status {status}, got {ended}, of: {_shown(command)}\n{done.stdout[-8000:]}")
    return done.stdout


def _shown(command):
    return " ".join(str(part).strip().splitlines()[0] for part in command)


def _say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
