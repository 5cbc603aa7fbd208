"""Run a program under strace, and search all bytes that it wrote to files for needles.

strace shows the data of each call that writes, so a file that was removed, replaced or never had a name is searched as
one that is left; files that were mapped for writing are read at the end instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CALLS = "write,pwrite64,writev,pwritev,pwritev2"
OPENING = "openat,open,creat,openat2,memfd_create"
UNSEEN = (
    "io_uring_setup,io_setup,vmsplice"  # lead to writes that strace does not show: refused, so that others are made
)
DATA = re.compile(rb'(?:, |iov_base=)"((?:\\x[0-9a-f]{2})*)"')
WRITTEN = re.compile(rb"^(?:%s)\(\d+<((?:\\x[0-9a-f]{2})+)>" % CALLS.replace(",", "|").encode())
MAPPED = re.compile(rb"^mmap\(.*PROT_WRITE.*MAP_SHARED(?:_VALIDATE)?\b[^<]*\d+<((?:\\x[0-9a-f]{2})+)>(.*)")
NAMED = re.compile(rb"^(?:%s)\(.*?(?:O_WRONLY|O_RDWR|O_CREAT|MFD_).* = \d+<((?:\\x[0-9a-f]{2})+)>" % (
    OPENING.replace(",", "|").encode()
))  # fmt: skip


def unhex(text: bytes) -> bytes:
    return bytes.fromhex(text.replace(b"\\x", b"").decode())


@dataclass
class Writes:
    """Bytes that a program and its children wrote to files."""

    opened: set[str] = field(default_factory=set)
    """Paths opened for writing, as the kernel names them: a file without a name is ``folder/#inode``."""

    data: dict[tuple[str, str], bytearray] = field(default_factory=dict)
    """Bytes by thread and path, in the order in which they were written."""

    mapped: set[str] = field(default_factory=set)
    """Paths mapped for writing, whose writes strace does not show."""

    def found(self, needles: list[bytes]) -> dict[bytes, str]:
        """Return the path for each needle that is in a file."""
        places = [(path, bytes(data)) for (_, path), data in self.data.items()]
        left = [path for path in self.opened | self.mapped if not path.startswith(("/dev/", "/proc/"))]
        places += [(path, Path(path).read_bytes()) for path in left if Path(path).is_file()]
        return {needle: path for path, data in places for needle in needles if needle in data}


def trace(command: list[str], *, env: dict[str, str], folder: Path, timeout: float = 240) -> tuple[int, str, Writes]:
    """Run a command and return its status, its output and what it wrote. Skip the test where strace cannot run."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    folder.mkdir()
    strace = ["strace", "-ff", "--seccomp-bpf", "-qq", "-y", "-xx", "-s", str(1 << 26), "-o", str(folder / "trace")]
    strace += ["-e", f"trace={CALLS},{OPENING},{UNSEEN},mmap", "-e", "signal=none"]
    strace += ["-e", f"inject={UNSEEN}:error=ENOSYS"]
    done = subprocess.run(
        [*strace, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
        check=False, cwd=folder,
    )  # fmt: skip
    if "ptrace" in done.stdout and "not permitted" in done.stdout:
        pytest.skip("needs the right to trace processes")
    writes = Writes()
    for path in sorted(folder.glob("trace.*")):
        _read(path, writes)
        path.unlink()
    return done.returncode, done.stdout, writes


def _read(path: Path, writes: Writes) -> None:
    with path.open("rb") as lines:
        for line in lines:
            if match := WRITTEN.match(line):
                name = os.fsdecode(unhex(match[1]))
                if name.startswith("/") and not name.startswith("/dev/pts"):  # no pipe and no socket
                    data = writes.data.setdefault((path.name, name), bytearray())
                    for text in DATA.findall(line, match.end()):
                        data += unhex(text)
            elif match := NAMED.match(line):
                writes.opened.add(os.fsdecode(unhex(match[1])))
            elif match := MAPPED.match(line):
                name = os.fsdecode(unhex(match[1]))
                writes.mapped.add(name + (" (deleted)" if b"(deleted)" in match[2] else ""))
