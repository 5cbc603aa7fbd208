"""Files of earlier versions open, bit for bit as they were sealed, and are refused where they were altered.

README.md says what is where. The public interface opens them. What they hold is what `golden_contents` says, and what a
reader opens beside it that knows docs/format.md alone. A file that no test opens fails, and so does one that is gone.
"""

import hashlib
from fnmatch import fnmatchcase
from importlib import import_module

import pytest
from golden_files import (
    ARCHIVE,
    HERE,
    NOW,
    OPENED,
    SUMS,
    VERSIONS,
    alter,
    files_of,
    load_keys,
    load_policy,
    load_roots,
    load_verifiers,
    opens,
    owner_key,
)

import fastrack
from fastrack import attest
from fastrack.errors import FastrackError
from fastrack.grants import Grants, Identity, Signer

# The folder as a whole.


def test_there_are_files_of_every_version_that_was_released():
    assert VERSIONS == ["0.1", "0.2", "0.3"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_is_as_it_was_written(version):
    lines = (HERE / version / SUMS).read_text().splitlines()
    sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = files_of(HERE / version)
    assert {path.name for path in (HERE / version).iterdir()} == {ARCHIVE, SUMS}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == sums


@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_is_opened_by_a_test(version):
    for path in HERE.glob("test_golden_*.py"):
        import_module(path.stem)  # the decorators in it say what it opens
    assert not [name for name in files_of(HERE / version) if not any(fnmatchcase(name, pattern) for pattern in OPENED)]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_files_stay_small(version):
    assert sum(len(data) for data in files_of(HERE / version).values()) < 1_000_000


# Altered files.


def open_sealed(path, golden):
    fastrack.verify_file(path, keys=list(load_keys(golden).values()))


def open_grants(path, golden):
    Grants.load(path, owner=load_verifiers(golden)).unlock(Identity.load(golden("pairs/alice")), now=NOW)


def open_manifest(path, golden):
    fastrack.load_manifest(path, owner=load_verifiers(golden)[path.name.startswith("run")])


def open_offer(path, golden):
    challenge = attest.Challenge.from_bytes(golden("attestation/challenge-tdx.json").read_bytes())
    policy, _ = load_policy(golden)
    attest.verify_offer(path.read_bytes(), challenge, policy, now=NOW, roots=load_roots(golden))


def open_checkpoint(path, golden):
    fastrack.load_checkpoint(path, keys=owner_key(golden))


ALTERED = {
    "sealed/dtypes-256.safetensors": open_sealed,
    "sealed/dtypes-128.safetensors": open_sealed,
    "sealed/shapes-256.safetensors": open_sealed,
    "sealed/moved.safetensors": open_sealed,
    "sealed/rekeyed.safetensors": open_sealed,
    "sealed/stream.safetensors": open_sealed,
    "data/parquet/shard-000000.safetensors": open_sealed,
    "training/run.safetensors": open_checkpoint,
    "grants/alone.grants": open_grants,
    "grants/limited.grants": open_grants,
    "manifests/set/fastrack.manifest": open_manifest,
    "manifests/run.safetensors.manifest": open_manifest,
    "attestation/offer-tdx.json": open_offer,
    "keys/owner256": lambda path, _: fastrack.Key.load(path),
    "pairs/carol": lambda path, _: Identity.load(path),
    "pairs/owner.signer": lambda path, _: Signer.load(path),
}


@pytest.mark.parametrize("name", ALTERED)
@opens()
@pytest.mark.slow  # of many cases
def test_an_altered_byte_is_refused(golden, name):
    path, open_it = golden(name), ALTERED[name]
    open_it(path, golden)
    content = path.read_bytes()
    for at in (len(content) // 2, len(content) * 3 // 4):
        alter(path, at)
        with pytest.raises(FastrackError):
            open_it(path, golden)
        path.write_bytes(content)
    open_it(path, golden)
