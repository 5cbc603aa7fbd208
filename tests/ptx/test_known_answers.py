"""The kernels' PTX, interpreted: known answers, in any order of warps, and the same work for any key and text.

A launch fails at a race, an access out of bounds or to what nobody wrote, and at a barrier that not all threads reach.
`FASTRACK_NVRTC` names folders with other versions of NVRTC, as `make ptx` does.
"""

import numpy as np
import pytest
from helpers.cases import each
from helpers.kernel_nvrtc import find_libraries, version_of
from helpers.kernel_ptx import compile_ptx

from bench.gpu import known
from bench.gpu.launches import ByteRuns
from bench.gpu.ptx import PtxGpu
from fastrack._devices.cuda.nvrtc import KERNELS

pytestmark = pytest.mark.slow
WITHOUT_CLMAD = ("-DFASTRACK_CLMAD=0",)
LIBRARIES = {version_of(path): path for path in find_libraries()}
WAYS = [
    pytest.param((version, options), id=" ".join((version, *options)), marks=marks)
    for number, version in enumerate(LIBRARIES)
    for options in ((), WITHOUT_CLMAD)[: 1 if number else 2]
    for marks in ([pytest.mark.nightly] if options or version.startswith("12") else [],)
]


@pytest.fixture(scope="module", params=WAYS)
def text(request):
    """Return the PTX of a version of NVRTC, which multiplies by `clmad` where it can unless an option forbids that."""
    version, options = request.param
    return compile_ptx(LIBRARIES[version], options)


def test_all_known_answers_are_right(text, request):
    gpu = PtxGpu(text)
    assert known.check(gpu) == 82
    way = "clmad" if "clmad" in text else "multiplication with holes"
    print(f"\n{request.node.callspec.id}, {way}: 82 of 82 known answers in {len(gpu.reports)} launches")  # noqa: T201


@each("seed", [1, 2])
def test_warps_may_run_in_any_order(text, seed):
    gpu = PtxGpu(text, seed=seed)
    assert known.check(gpu, sizes=(700,), blocks=(1,)) == 26


def do_all(text, seed, bits):
    """Run every kernel on a key and a text of this seed: a digest of what each launch did."""
    gpu, random = PtxGpu(text), np.random.default_rng(seed)
    key, nonce, plain = (random.bytes(size) for size in (bits // 8, 12, known.CHUNK_SIZE + 4321))
    runs, sealed = ByteRuns(gpu), known.seal(key, nonce, plain)
    state = runs.prepare(key, nonce)
    assert runs.open_run(state, sealed) == (None, plain)
    for place in (-1, -16, 3):  # which byte of a tag or text is wrong does not show either
        wrong = bytearray(sealed)
        wrong[place] ^= 1 << random.integers(8)
        runs.open_run(state, bytes(wrong))
    assert runs.seal_run(state, plain) == sealed
    known._gather(runs, state, "a gather", sealed, plain, {"blocks": 1, "offset": 0})
    return [(kernel, report.trace) for kernel, report in gpu.reports]


@each("bits", [128, 256])
def test_keys_and_texts_of_one_length_take_the_same_steps_banks_and_addresses(text, bits):
    first, second = (do_all(text, seed, bits) for seed in (1, 2))
    assert first == second
    assert {kernel for kernel, _ in first} == {
        kernel for kernel in KERNELS if kernel == "prepare" or str(bits) in kernel
    }
    # Two forgeries of one chunk, whatever is wrong with its tag.
    assert first[2] == first[3]


def test_each_lookup_in_a_table_takes_one_pass(text):
    gpu = PtxGpu(text)
    known.check(gpu, sizes=(known.CHUNK_SIZE + 4321,), blocks=(1,))
    lookups = [site for _, report in gpu.reports for site in report.sites if site.name == "ld.shared.u32"]
    assert sum(site.requests for site in lookups) > 50_000
    assert [site for site in lookups if site.passes != site.requests] == []
