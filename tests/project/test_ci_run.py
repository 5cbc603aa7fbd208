"""Parts of `.ci/run` see little of the machine that it runs on, and tests nothing that they do not ask for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.own_environment import KEEP

pytestmark = pytest.mark.repository

ROOT = Path(__file__).parents[2]
RUN = ROOT / ".ci/run"
OWN = {"PATH", "HOME", "LANG"}
OF_A_SHELL = {"PWD", "SHLVL", "_"}
MACHINE = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_FIND_LINKS": "/wheels",
    "SSL_CERT_FILE": "/ca.pem",
    "FASTRACK_KEY_FILE": "owner.key",
    "COLUMNS": "40",
    "TZ": "Pacific/Chatham",
    "LC_ALL": "C",
    "TMPDIR": "/elsewhere",
    "CI": "true",
}


@pytest.fixture
def parts(tmp_path):
    """Return a function that runs a copy of .ci/run with a `make` that only notes its variables: those by part."""
    if not RUN.exists():
        pytest.skip("the tests run without .ci")
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin/make"
    make.write_text('#!/bin/sh\nenv -0 > "$PWD/env-$1"\ntest "$1" != "$(cat fails)"\n')
    make.chmod(0o755)
    (tmp_path / "fails").touch()

    def run(*, status=0, **changes):
        text = RUN.read_text()
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / ".ci/run").write_text(text)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        command = ["bash", tmp_path / ".ci/run"]
        done = subprocess.run(
            command, env={**MACHINE, "PATH": path, "HOME": "/home/me", "TMPDIR": str(tmp_path)}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        seen = {}
        for file in tmp_path.glob("env-*"):
            lines = file.read_text().split("\0")
            seen[file.name.removeprefix("env-")] = dict(line.split("=", 1) for line in lines if line)
            file.unlink()
        return seen, done.stderr

    return run


def test_a_part_sees_a_path_a_language_and_a_home_of_its_own(parts):
    seen, _ = parts()
    assert {"install", "check", "test-all", "wheels"} < seen.keys()
    with_index = {"install", "wheels", "environments"}
    for name, variables in seen.items():
        index = {"PIP_FIND_LINKS", "SSL_CERT_FILE"} if name in with_index else set()
        assert variables.keys() - OF_A_SHELL == OWN | index, name
        assert variables["HOME"] != "/home/me"
        assert not Path(variables["HOME"]).exists()  # it is removed


def test_a_part_that_fails_ends_the_run(parts, tmp_path):
    (tmp_path / "fails").write_text("test-all")
    seen, _ = parts(status=1)
    assert "test-all" in seen
    assert "test-openssl" not in seen


def test_a_part_beside_the_tests_that_fails_fails_the_run_and_is_told(parts, tmp_path):
    (tmp_path / "fails").write_text("wheels")
    seen, _ = parts(status=1)
    assert "emulator" in seen
    assert "environments" not in seen


def test_a_part_that_would_see_the_buffering_of_this_machine_fails(parts):
    seen, said = parts(status=1, **{"env -i PATH": "env PATH"})
    assert seen == {}
    assert said == "make install: expected no PYTHONUNBUFFERED, which users have not\n"


def test_tests_of_the_repository_are_where_make_check_runs_them():
    tests = Path(__file__).parents[1]
    assert {path.parent for path in tests.rglob("test_*.py") if "mark.repository" in path.read_text()} == {
        tests / "project"
    }


SHOWN = """
import os, subprocess, sys, time
umask = os.umask(0)
os.umask(umask)
print(sorted(os.environ), oct(umask), time.tzname[0], os.environ["HOME"], os.environ["TMPDIR"], flush=True)
"""
TEST = f"""
import subprocess, sys
def test_it(capfd):
    exec({SHOWN!r})
    subprocess.run([sys.executable, "-c", {SHOWN!r}], check=True)
    for line in capfd.readouterr().out.splitlines():
        sys.__stderr__.write("seen: " + line + "\\n")
    sys.__stderr__.flush()
"""


@pytest.fixture
def seen(tmp_path):
    """Return a function that runs a test beside the true conftest.py on such a machine, and returns what it prints."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "helpers"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "tests/test_it.py").write_text(TEST)
    (tmp_path / "elsewhere").mkdir()

    def run(*options, **variables):
        machine = {**MACHINE, "TMPDIR": str(tmp_path / "elsewhere"), "HOME": "/home/me", "PATH": os.environ["PATH"]}
        command = [sys.executable, "-m", "pytest", "-q", "-s", "tests", *options]
        environment = {**machine, **variables, "PYTHONPATH": str(Path(ROOT))}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, umask=0o077, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = [line.partition("seen: ")[2] for line in done.stderr.splitlines() if "seen: " in line]
        assert len(found) == 2
        assert found[0] == found[1]
        return found[0]

    return run


@pytest.mark.parametrize("options", [[], ["--numprocesses", "1"]], ids=["alone", "in a process of xdist"])
def test_a_test_and_what_it_starts_see_nothing_of_the_machine(seen, tmp_path, options):
    said = seen(*options)
    assert not [name for name in MACHINE if name != "TMPDIR" and f"'{name}'" in said]
    assert " 0o22 UTC " in said
    assert "/home/me" not in said
    assert list((tmp_path / "elsewhere").glob("fastrack-tests-*")) == []  # its folders are removed


def test_a_test_sees_what_a_row_of_the_matrix_names(seen):
    said = seen(**{KEEP: "PYTHONUNBUFFERED TZ umask HOME"})
    assert "PYTHONUNBUFFERED" in said
    assert "COLUMNS" not in said
    assert " 0o77 +1245 /home/me " in said
