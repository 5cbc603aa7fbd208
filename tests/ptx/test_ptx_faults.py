"""Faults planted in the kernels, which their interpreted PTX shows: most of them leave every answer as it is."""

import os
import shutil

import pytest
from helpers import kernel_host
from helpers.kernel_nvrtc import find_libraries
from helpers.kernel_ptx import compile_ptx
from helpers.runs import as_pieces
from mutants.edits import MUTANTS

from bench.gpu import known
from bench.gpu.gpu import WrongResultError
from bench.gpu.launches import ByteRuns
from bench.gpu.ptx import PtxGpu, Violation

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not find_libraries(), reason="there is no NVRTC wheel")]
THIS = "ptx/test_ptx_faults.py::test_without_a_fault_nothing_is_found"
FAULTS = [mutant.name for mutant in MUTANTS if THIS in mutant.tests]


def check(gpu):
    runs = ByteRuns(gpu)
    known._random(runs, 256, known.CHUNK_SIZE + 4321, 8, 1)
    known._paged(runs, 256, 1)
    key, nonce, plain = os.urandom(32), os.urandom(12), os.urandom(known.CHUNK_SIZE + 9)
    sealed, state = known.seal(key, nonce, plain), runs.prepare(key, nonce)
    known._expect("a short chunk, sealed", runs.seal_run(state, plain[:9]), known.seal(key, nonce, plain[:9]))
    pieces = as_pieces([0], [0, 2], [[1, 1, 1], [1, 6, 9]])
    result = runs.gather(state, sealed[: known.SEALED_CHUNK_SIZE], pieces, len(plain), 15)
    known._expect("pieces at odd places", result, (None, b"\xa5" + plain[1:2] + b"\xa5" * 4 + plain[1:10]))
    for chunk, pieces, place in ((0, 1, known.CHUNK_SIZE - 3), (0, 1, 2 * known.CHUNK_SIZE), (0, 2, 0), (7, 1, 0)):
        piece = as_pieces([chunk], [0, pieces], [[place, 0, 4]])
        result = runs.gather(state, sealed[: known.SEALED_CHUNK_SIZE], piece, len(plain), 100)
        known._expect("a plan that reaches outside", result, (min(chunk, 1), b"\xa5" * 100))


@pytest.mark.nightly
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
