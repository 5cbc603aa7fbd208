"""The command as a process of its own: what CliRunner cannot show."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.commands import invoke
from helpers.processes import largest_file, run_python
from safetensors.numpy import save_file

import fastrack._cli
from fastrack import Key


def run(*line, **options):
    return subprocess.run([sys.executable, "-m", "fastrack", *line], capture_output=True, check=False, **options)


@pytest.mark.slow
def test_the_version_and_every_command_are_shown():
    done = run("--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"fastrack {fastrack.__version__}\n")
    done = run("--help")
    assert done.returncode == 0
    commands = ("keygen", "import", "seal", "inspect", "verify", "unseal", "doctor", "bench", "demo")
    places = [re.search(rf" {command}[ ,]", done.stdout.decode()).start() for command in commands]
    assert places == sorted(places)
    assert run().returncode == 2


def test_the_command_line_loads_nothing_heavy_until_a_command_needs_it():
    loaded = set(run_python("import fastrack._cli.app, sys; print(*sys.modules)").split())
    assert not loaded & {"numpy", "numba", "torch", "cryptography", "safetensors", "pynvml", "matplotlib", "sklearn"}


def test_an_interruption_before_the_command_has_begun_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("fastrack._cli.app.main", interrupted)
    with pytest.raises(SystemExit, match="130"):
        fastrack._cli.main()
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(number, status):
    """Python prints what a destructor raises, and goes on; keys and buffers have destructors."""
    code = f"""
import signal, sys, time
from fastrack._cli import app, main
class Wiped:
    def __del__(self):
        signal.raise_signal(signal.{number})
def work(*_, **__):
    Wiped()
    time.sleep(30)
app.app = work
try:
    app.main()
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (status, b"")


@pytest.mark.parametrize("dev_mode", [False, True])
@pytest.mark.parametrize("error", [TypeError("wrong"), OSError(28, "No space left on device")])
def test_what_no_command_expects_is_one_line_but_for_a_defect_in_development_mode(monkeypatch, capfd, error, dev_mode):
    def failed():
        raise error

    monkeypatch.setattr("fastrack._cli.app.main", failed)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which is opened anew
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "flags", SimpleNamespace(dev_mode=dev_mode))
    is_raised = dev_mode and isinstance(error, TypeError)
    with pytest.raises(TypeError if is_raised else SystemExit, match="wrong" if is_raised else "1"):
        fastrack._cli.main()
    said = capfd.readouterr().err
    if is_raised:
        assert said == ""
        return
    assert said.startswith("error: ")
    assert str(error.args[-1]) in said
    assert said.count("\n") == 1
    assert ("defect" in said) == isinstance(error, TypeError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.slow
def test_standard_output_that_is_full_is_one_line(unbuffered):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        for line, status, told in (
            (["--help"], 1, b"error: standard output: No space left on device\n"),
            (["key", "missing", "--json"], 1, b"error: standard output: No space left on device\n"),
            (["inspect", "missing", "--json"], 6, b"error: missing: No such file or directory\n"),
        ):
            command = [sys.executable, "-m", "fastrack", *line]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False)
            assert (done.returncode, done.stderr) == (status, told)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_plaintext_on_standard_output_is_whole_or_the_command_fails(unbuffered):
    """A system call may write a part, as where a disk gets full: without a buffer Python takes that for all."""
    Key.generate().save("owner.key")
    Path("x.bin").write_bytes(bytes(50_000))
    assert invoke(["seal", "x.bin", "x.safetensors", "-k", "owner.key"]).exit_code == 0
    command = [sys.executable, "-m", "fastrack", "unseal", "x.safetensors", "-", "-k", "owner.key"]
    with Path("back").open("wb") as file, largest_file(10_000):
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, b"error: standard output: File too large\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize(
    "as_json", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
def test_a_command_whose_output_is_full_leaves_no_plaintext(folder, as_json):
    Key.generate().save("owner.key")
    Path("study").mkdir()
    for path in ("x.bin", "study/a.bin", "study/b.txt"):
        Path(path).write_bytes(b"a secret line\n")
    Path("lines.txt").write_bytes(b"a secret line\n")
    for line in ("x.bin x.safetensors", "study sealed", "-r study files"):
        assert invoke(f"seal {line} -k owner.key".split()).exit_code == 0
    before = sorted(folder.rglob("*"))
    for line in (
        "unseal x.safetensors back",
        "unseal sealed back",
        "unseal -r files back",
        "unseal x.safetensors -",
        "verify x.safetensors",
        "verify sealed",
        "verify -r files",
        "import lines.txt samples",
    ):
        with Path("/dev/full").open("wb") as full:
            options = ["-k", "owner.key", *(["--json"] if as_json and not line.endswith("-") else [])]
            command = [sys.executable, "-m", "fastrack", *line.split(), *options]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1, line
        assert b"No space left on device" in done.stderr, line
        assert done.stderr.count(b"\n") == 1, line
        if line.startswith("import"):  # what is sealed may stay, to be continued
            assert b"secret" not in b"".join(path.read_bytes() for path in Path("samples").iterdir())
        else:
            assert sorted(folder.rglob("*")) == before, line


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1>&-", "0<&- 1>&-", "1>&- 2>&-"])
def test_a_command_whose_output_is_closed_does_nothing(folder, closed):
    Key.generate().save("owner.key")
    Path("x.bin").write_bytes(b"secret")
    assert invoke(["seal", "x.bin", "x.safetensors", "-k", "owner.key"]).exit_code == 0
    before = sorted(folder.iterdir())
    for line in ("unseal x.safetensors x -k owner.key", "verify x.safetensors -k owner.key -q", "keygen new.key"):
        command = f"exec {sys.executable} -m fastrack {line} {closed}"
        done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1
        told = b"" if "2>" in closed else b"error: standard output: "
        assert done.stderr.startswith(told)
        assert done.stderr.count(b"\n") == bool(told)
        assert sorted(folder.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0<&-", "2>&-", "0<&- 2>&-"])
@pytest.mark.usefixtures("folder")
def test_what_is_closed_besides_does_no_harm(closed):
    Key.generate().save("owner.key")
    Path("x.bin").write_bytes(b"secret")
    for line in ("seal x.bin x.safetensors -k owner.key", "unseal x.safetensors back.bin -k owner.key"):
        command = f"exec {sys.executable} -m fastrack {line} {closed}"
        assert subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout.startswith(
            line.split()[2].encode()
        )
    assert Path("back.bin").read_bytes() == b"secret"
    assert run("verify", "nope", "-k", "owner.key").returncode == 6


@pytest.mark.parametrize(("name", "told"), [(b"\x1b", b"\\x1b"), (b"\xff", b"\\udcff")], ids=["escape", "no Unicode"])
def test_an_error_is_one_line_on_stderr(folder, name, told):
    done = run(b"inspect", b"missing%b.bin" % name, cwd=folder)
    assert (done.returncode, done.stdout) == (6, b"")
    assert done.stderr == b"error: missing%b.bin: No such file or directory\n" % told


def test_an_error_for_a_program_is_one_document_on_stdout(folder):
    done = run("inspect", "missing.bin", "--json", cwd=folder)
    assert (done.returncode, done.stderr) == (6, b"")
    assert json.loads(done.stdout)["error"]["type"] == "FileNotFoundError"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for what the command does")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(folder, number, status):
    Key.generate().save("owner.key")
    with (folder / "notes.bin").open("wb") as file:
        file.truncate(1 << 30)  # takes long enough
    line = [sys.executable, "-m", "fastrack", "seal", "notes.bin", "notes.sealed", "--key", "owner.key"]
    # Ignored signals stay ignored in a child, as SIGINT is in the background of some shells.
    default = partial(signal.signal, number, signal.SIG_DFL)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | {"FASTRACK_ENGINE": "openssl"}}
    with subprocess.Popen(line, **options, preexec_fn=default) as process:  # noqa: PLW1509 - no lock is taken
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "notes.bin" not in maps.read_text():
            time.sleep(0.001)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (status, b"")
    assert b"Traceback" not in err
    assert sorted(path.name for path in folder.iterdir()) == ["notes.bin", "owner.key"]


@pytest.mark.parametrize("line", ["keygen --help", "inspect plain.safetensors", "inspect plain.safetensors --json"])
def test_a_reader_that_leaves_ends_it_quietly(folder, line):
    save_file({"x": np.ones(4)}, folder / "plain.safetensors")
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fastrack", *line.split()]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert b"Traceback" not in done.stderr
    if "inspect" in line:
        assert (done.returncode, done.stderr) == (141, b"")
