"""A copy of the golden files for a test, their keys, and the list of those that some test opens."""

import json
import os
import re
import subprocess
import sys
import tarfile
from datetime import UTC, datetime
from pathlib import Path

import golden_contents as contents
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

import fastrack
from fastrack import FormatError, attest
from fastrack.grants import Verifier

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if re.fullmatch(r"\d+\.\d+", path.name))
SUMS = "SHA256SUMS"
ARCHIVE = "files.tar"
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)  # when the evidence was made, and the grants that answer it
OPENED = []  # patterns of all files that a test opens


class Golden:
    """A copy of the files of a version, which a test may write to. It is called with the name of a file or folder."""

    def __init__(self, source, folder):
        self._folder, self.taken = folder, set()
        for name, data in files_of(source).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        for path in folder.rglob("*"):  # the archive says 644, and others may not read keys or write to anchors
            path.chmod(0o700 if path.is_dir() else 0o600)

    def __call__(self, name):
        path = self._folder / name
        assert path.exists(), f"{name} is gone. Restore it: what was written once has to open for ever"
        self.taken |= {each for each in self.list() if each == name or each.startswith(f"{name}/")}
        return path

    def list(self):
        return sorted(path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())


def files_of(folder):
    """Return the bytes of each file of a version, by its name."""
    with tarfile.open(folder / ARCHIVE, "r:") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def opens(*patterns):
    """Name the files that a test opens."""

    def name(test):
        OPENED.extend(patterns)
        test.opens = patterns
        return test

    return name


def environment():
    """Return the environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def cli(*arguments, status=0):
    """Run a command that ends so, and return the JSON that it prints."""
    command = [sys.executable, "-m", "fastrack", *map(str, arguments), "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def load_keys(golden):
    return {name: fastrack.Key.load(golden(f"keys/{name}")) for name in contents.SECRETS}


def owner_key(golden):
    return fastrack.Key.load(golden("keys/owner256"))


def load_policy(golden, name="attestation/policy.toml"):
    """Read a policy. One of 0.1 says too little: it is refused with the lines to add, and read with them.

    Returns
    -------
    Policy, set of str
        The policy, and the keys of the lines that were added to its file.
    """
    path, added = golden(name), set()
    for _ in range(3):
        try:
            return attest.Policy.from_toml(path), added
        except FormatError as error:
            section, lines = re.search(r"\[cpu\.\w+\]", str(error))[0], re.findall("`(.+?)`", str(error))
            added |= {f"{section} {line.split(' = ')[0]}" for line in lines}
            path.write_text(path.read_text().replace(f"{section}\n", "\n".join([section, *lines, ""])))
    raise AssertionError(f"{name} is refused with the lines that were asked for")


def load_verifiers(golden):
    return [Verifier.load(golden(f"pairs/{name}.signer.pub")) for name in ("owner", "owner-65")]


def load_roots(golden):
    found = json.loads(golden("attestation/roots.json").read_bytes())
    return attest.TrustedRoots(**{name: frozenset(fingerprints) for name, fingerprints in found.items()})


def key_id(secret):
    """Return the id of a key, as docs/format.md says."""
    return HKDFExpand(SHA512(), 16, b"fastrack/key-id@1\0" + bytes([len(secret)])).derive(secret).hex()


def alter(path, at=None):
    """Change one bit of a file, by default in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)
