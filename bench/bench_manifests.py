"""Manifests of 1,000 tensors, whatever the tensors' sizes: signing, verifying, and comparing an open file with one."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import import_private

from fastrack import Anchor, Manifest, load_file, publish, save_file
from fastrack.grants import Signer

SealedFile = import_private("fastrack._files.reader:SealedFile", "fastrack._sealed.reader:SealedFile")
SealedEntry = import_private("fastrack._sets.entries:SealedEntry", "fastrack._sealed.entries:SealedEntry")
sign_manifest = import_private("fastrack._sets.manifest:sign_manifest", "fastrack._sealed.manifest:sign_manifest")

COUNT = 1000
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def owner():
    return Signer.generate()


@pytest.fixture(scope="module")
def path(key):
    """A sealed file of 1,000 tensors, small ones: their bytes are not read."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        names = [f"model.layers.{number // 10}.block_{number % 10}.weight" for number in range(COUNT)]
        save_file({name: np.zeros((64, 64), np.float16) for name in names}, Path(folder) / NAME, key)
        yield Path(folder) / NAME


@pytest.fixture(scope="module")
def entries(path):
    with load_file(path) as file:
        return {NAME: SealedEntry.of(file)}


GROUP = f"a manifest of {COUNT} tensors"


@pytest.mark.guard
@pytest.mark.benchmark(group=GROUP)
@pytest.mark.parametrize("algorithm", ["Ed25519", "ML-DSA-65"])
def test_sign_and_verify(benchmark, entries, algorithm):
    owner = Signer.generate(algorithm)

    def run():
        return Manifest.from_bytes(sign_manifest(entries, owner), owner=owner.verifier)

    assert benchmark(run).files == entries
    benchmark.extra_info["bytes"] = len(run().envelope)


@pytest.mark.benchmark(group=GROUP)
def test_sign(benchmark, entries, owner):
    benchmark(sign_manifest, entries, owner)


@pytest.mark.benchmark(group=GROUP)
def test_verify(benchmark, entries, owner):
    benchmark(Manifest.from_bytes, sign_manifest(entries, owner), owner=owner.verifier)


@pytest.mark.guard
@pytest.mark.benchmark(group=f"an open file of {COUNT} tensors")
def test_check_open_file(benchmark, path, entries):
    with load_file(path) as file:
        benchmark(entries[NAME].check, file)


@pytest.mark.benchmark(group=f"an open file of {COUNT} tensors")
def test_describe_open_file(benchmark, path):
    with load_file(path) as file:
        benchmark(SealedEntry.of, file)


@pytest.mark.benchmark(group=f"opening a file of {COUNT} tensors")
def test_load(benchmark, path):
    benchmark(lambda: SealedFile(path).close())


@pytest.mark.benchmark(group=f"opening a file of {COUNT} tensors")
def test_load_with_anchor(benchmark, path, owner):
    publish(path, signer=owner)
    anchor = path.with_name("anchor")
    Anchor.create(anchor, owner=owner.verifier)
    benchmark(lambda: load_file(path, anchor=anchor).close())
