"""Faults planted in the kernels, which their interpreted PTX shows: most of them leave every answer as it is."""

import os
import shutil

import numpy as np
import pytest
from helpers import kernel_host
from helpers.kernel_nvrtc import find_libraries
from helpers.kernel_ptx import compile_ptx
from mutants.edits import MUTANTS

from bench.gpu import known
from bench.gpu.gpu import WrongResultError
from bench.gpu.launches import ByteRuns
from bench.gpu.ptx import PtxGpu, Violation
from fastrack._crypto.gather import GatherPlan

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_libraries(), reason="there is no NVRTC wheel")]
FAULTS = [
    "tables-without-barrier",
    "warp-without-barrier",
    "no-barrier-before-release",
    "one-side-to-open",
    "no-barrier-before-pieces",
    "powers-without-barrier",
    "schedule-read-early",
    "wipe-without-barrier",
    "no-barrier-before-the-tag",
    "one-side-to-gather",
    "blocks-in-front-read",
    "store-too-long",
    "byte-of-a-column",
    "opened-too-long",
    "source-read-too-far",
    "sums-of-one-side",
    "load-too-long",
    "load-misaligned",
    "no-barrier-after-a-key",
    "piece-one-too-long",
]


def check(gpu):
    runs = ByteRuns(gpu)
    known._random(runs, 256, known.CHUNK_SIZE + 4321, 8, 1)
    key, nonce, plain = os.urandom(32), os.urandom(12), os.urandom(known.CHUNK_SIZE + 9)
    sealed, state = known.seal(key, nonce, plain), runs.prepare(key, nonce)
    piece = GatherPlan(np.array([0]), np.array([0, 1]), np.array([[known.CHUNK_SIZE - 3, 0, 4]]))  # the chunk has three
    result = runs.gather(state, sealed[: known.SEALED_CHUNK_SIZE], piece, len(plain), 100)
    known._expect("a piece that is too long", result, (0, b"\xa5" * 100))


def test_without_a_fault_nothing_is_found():
    check(PtxGpu(compile_ptx(find_libraries()[0])))


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_noticed(tmp_path, monkeypatch, name):
    (fault,) = (mutant for mutant in MUTANTS if mutant.name == name)
    folder = shutil.copytree(kernel_host.SOURCE.parent, tmp_path / "kernels")
    source = (folder / fault.file).read_text()
    assert source.count(fault.old) == 1
    (folder / fault.file).write_text(source.replace(fault.old, fault.new))
    monkeypatch.setattr(kernel_host, "SOURCE", folder / kernel_host.SOURCE.name)
    gpu = PtxGpu(compile_ptx(find_libraries()[0]))
    with pytest.raises((Violation, WrongResultError)):
        check(gpu)
