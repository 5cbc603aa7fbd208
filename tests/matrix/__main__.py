"""Runs the quick tests as on machines of other people, each row of a table in turn, and tells how long each took.

    PYTHONPATH=tests python -m matrix ["umask 077" "no HOME" ...]

A row reaches the tests and all that they start: `helpers.own_environment` takes it over, which hides everything else.
"""

import argparse
import grp
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from helpers.own_environment import COMMANDS_UMASK, KEEP

ROOT = Path(__file__).parents[2]
ALL = ["-m", "not slow and not nightly"]
PARALLEL = ["--numprocesses", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
NOBODY = 65534  # a user of the system, as OpenSSH needs one


@dataclass(frozen=True)
class Row:
    """Variables that a machine sets, or unsets by None, its umask, and how the checkout lies there."""

    variables: dict[str, str | None] = field(default_factory=dict)
    umask: int | None = None
    checkout: str = ""
    """The name of a copy; else it is this one."""
    as_nobody: bool = False
    """By a user that is not root, to whom the copy belongs."""
    installed: bool = False
    """With the wheel of dist/ in the place of the checkout, which cannot be written."""


ROWS = {
    "as it is": Row(),
    "no HOME": Row({"HOME": None}),
    "umask 000": Row({COMMANDS_UMASK: "000"}),
    "umask 077": Row(umask=0o077),
    "LC_ALL=C": Row({"LC_ALL": "C", "LANG": None}),
    "another time zone": Row({"TZ": "Pacific/Chatham"}),  # 12:45 or 13:45 before UTC
    "unbuffered": Row({"PYTHONUNBUFFERED": "1"}),
    "no bytecode": Row({"PYTHONDONTWRITEBYTECODE": "1"}),
    "-W error": Row({"PYTHONWARNINGS": "error"}),
    "-X dev": Row({"PYTHONDEVMODE": "1"}),
    "a TMPDIR with spaces and accents": Row({"TMPDIR": "eine Tür é"}),
    "a checkout with spaces": Row(checkout="a check out"),
    "40 columns": Row({"COLUMNS": "40"}),
    "not root": Row(checkout="fastrack", as_nobody=True),
    "installed, beside a read-only checkout": Row(checkout="fastrack", as_nobody=True, installed=True),
}


def main() -> int:
    """Run the rows that were named, or all. The status is 1 if a test fails in one of them."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATH", help="run the quick tests of these files only")
    given = parser.parse_args()
    if unknown := set(given.rows) - ROWS.keys():
        parser.error(f"expected rows of {', '.join(ROWS)}, got {', '.join(sorted(unknown))}")
    failed = []
    logs = ROOT / ".matrix"
    logs.mkdir(exist_ok=True)
    for name in given.rows or ROWS:
        with tempfile.TemporaryDirectory(prefix="fastrack-matrix-", ignore_cleanup_errors=True) as folder:
            os.chmod(folder, 0o755)  # noqa: PTH101
            start = time.monotonic()
            status = run(ROWS[name], Path(folder), given.only, logs / name)
        lines = (logs / name).read_text(errors="replace").splitlines() or ["no output"]
        found = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        say("\n".join([f"{name}: {lines[-1].strip('= ')}; {time.monotonic() - start:.0f} s in all", *found]))
        if status:
            failed.append(name)
    say(f"failed: {', '.join(failed)}" if failed else "all rows passed")
    return bool(failed)


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(row, folder, only, log):
    """Run tests in a row, with what it needs in a new folder. Return the status of pytest, which writes into `log`."""
    python, root = Path(sys.executable), ROOT
    if row.checkout:
        root = copy(folder / row.checkout)
    if row.as_nobody:
        python = reachable(folder)
        install(python, "fastrack_bench-*-none-any.whl")
    (folder / "home").mkdir()
    variables = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(folder / "home"), **row.variables}
    variables[KEEP] = " ".join([*row.variables, *["umask"] * (row.umask is not None)])
    if "TMPDIR" in row.variables:
        variables["TMPDIR"] = str(folder / row.variables["TMPDIR"])
        Path(variables["TMPDIR"]).mkdir()
    options = {}
    if row.installed:
        install(python, f"fastrack_io-*_{os.uname().machine}.whl")
        subprocess.run(["chmod", "--recursive", "a-w", root], check=True)
    elif row.checkout:
        variables["PYTHONPATH"] = str(root)
    if row.as_nobody:
        variables |= {
            "TMPDIR": "/tmp",
            "LD_LIBRARY_PATH": str(folder / "base/lib"),
        }  # else it may take another libpython
    if row.as_nobody and os.geteuid() == 0:
        owned, group = [folder / "home", *([] if row.installed else [root])], group_of_one()
        subprocess.run(["chown", "--recursive", f"{NOBODY}:{group}", *owned], check=True)
        options = {"user": NOBODY, "group": group, "extra_groups": []}
    command = [python, "-c", "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in variables.items() if value is not None}
    umask = -1 if row.umask is None else row.umask
    with log.open("wb") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        line = [*command, *PARALLEL, *ALL, *only]
        return subprocess.run(
            line, cwd=root, env=environment, umask=umask, check=False, **streams, **options
        ).returncode


def group_of_one():
    """Return a group that has no members, as that of an ordinary user has no others."""
    taken = {user.pw_gid for user in pwd.getpwall()}
    return next(group.gr_gid for group in grp.getgrall() if not group.gr_mem and group.gr_gid not in taken)


def copy(target):
    """Copy what git knows of the checkout, and its native extension."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    made = [path.relative_to(ROOT) for path in (ROOT / "fastrack/_crypto").glob("_native*.so")]
    for name in [*filter(None, names.split("\0")), *made]:
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def reachable(folder):
    """Return an environment in a folder with the packages of this one, whose interpreter other users may run."""
    base = Path(sys.base_prefix)
    if not all(path.stat().st_mode & 0o001 for path in (base, *base.parents)):
        shutil.copytree(base, folder / "base", symlinks=True)
        base = folder / "base"
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([base / "bin" / name, "-m", "venv", "--without-pip", folder / "env"], check=True)
    packages = Path("lib") / name / "site-packages"
    shutil.copytree(
        Path(sys.prefix) / packages, folder / "env" / packages, symlinks=True, dirs_exist_ok=True, copy_function=link
    )
    for editable in (folder / "env" / packages).glob("*fastrack*"):
        shutil.rmtree(editable) if editable.is_dir() else editable.unlink()
    for program in (Path(sys.prefix) / "bin").iterdir():  # such as ruff; scripts begin with another interpreter
        if program.is_file() and not program.is_symlink() and program.open("rb").read(4) == b"\x7fELF":
            link(program, folder / "env/bin" / program.name)
    return folder / "env/bin/python"


def link(source, target):
    """Link a file, which takes no room, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def install(python, name):
    """Install a wheel of dist/, without the packages that it needs, which are there."""
    [wheel] = (ROOT / "dist").glob(name)
    packages = python.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        packages,
        wheel,
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
