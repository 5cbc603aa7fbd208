"""The kernels' PTX, interpreted: known answers, in any order of warps, and the same work for any key and text.

A launch fails at a race, an access out of bounds or to bytes never written, and a barrier that not all threads reach.
`FASTRACK_NVRTC` names folders with other versions of NVRTC, as `make ptx` does.
"""

from fractions import Fraction

import numpy as np
import pytest
from helpers.kernel_nvrtc import KERNELS, find_libraries, version_of
from helpers.kernel_ptx import compile_ptx

from bench.gpu import known
from bench.gpu.launches import ByteRuns
from bench.gpu.ptx import PtxGpu
from bench.gpu.ptx.operations import fused
from fastrack._crypto.base import Scaling

pytestmark = pytest.mark.slow
WITHOUT_CLMAD = ("-DFASTRACK_CLMAD=0",)
LIBRARIES = {version_of(path): path for path in find_libraries()}
WAYS = [
    pytest.param((version, options), id=" ".join((version, *options)), marks=marks)
    for number, version in enumerate(LIBRARIES)
    for options in ((), WITHOUT_CLMAD)[: 1 if number else 2]
    for marks in ([pytest.mark.nightly] if options or number else [],)  # by day the PTX that is in the wheel
]


@pytest.fixture(scope="module", params=WAYS)
def text(request):
    """Return the PTX of a version of NVRTC, which multiplies by `clmad` where it can unless an option forbids that."""
    version, options = request.param
    return compile_ptx(LIBRARIES[version], options)


@pytest.mark.nightly
def test_known_answers_are_right(text):
    assert known.check(PtxGpu(text), sizes=(17, 16385), blocks=(1,), columns=(63,)) == 74


@pytest.mark.nightly
def test_all_known_answers_are_right(text, request):
    gpu = PtxGpu(text)
    assert known.check(gpu) == 164
    way = "clmad" if "clmad" in text else "multiplication with holes"
    print(f"\n{request.node.callspec.id}, {way}: 164 of 164 known answers in {len(gpu.reports)} launches")  # noqa: T201


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
def test_warps_may_run_in_any_order(text, seed):
    gpu = PtxGpu(text, seed=seed)
    assert known.check(gpu, sizes=(700,), blocks=(1,), columns=(64,)) == 60


def do_all(text, seed, bits):
    """Run every kernel on a key, a text and scales of this seed: a digest of what each launch did."""
    gpu, random = PtxGpu(text), np.random.default_rng(seed)
    key, nonce, plain = (random.bytes(size) for size in (bits // 8, 12, known.CHUNK_SIZE + 4321))
    runs, sealed = ByteRuns(gpu), known.seal(key, nonce, plain)
    state = runs.prepare(key, nonce)
    assert runs.link.content()  # which is expanded now: what follows finds the same buffers
    assert runs.open_run(state, sealed) == (None, plain)
    for place in (-1, -16, 3):  # which byte of a tag or text is wrong does not show either
        wrong = bytearray(sealed)
        wrong[place] ^= 1 << random.integers(8)
        runs.open_run(state, bytes(wrong))
        runs.small_run(state, bytes(wrong))
    assert runs.small_run(state, sealed) == (None, plain)
    assert runs.seal_run(state, plain) == sealed
    for altered in (1, 0x80):  # nor which row is, or what it has
        assert not runs.unwrap(key, nonce, altered).data.any()
        assert runs.small_run(state, sealed, altered=altered)[0] == 0
        assert runs.seal_run(state, plain, altered=altered) == 0
    assert runs.unwrap(key, nonce).data.tobytes() == state.data.tobytes()
    sizes = [16, 4096, known.CHUNK_SIZE + 4321 - 4321 % 16 - 4112]
    block = known.seal(key, nonce, plain[: sum(sizes)])
    assert runs.keep_run(state, plain[: sum(sizes)], sizes) == block
    for place in (-1, 3):
        wrong = bytearray(block)
        wrong[place] ^= 1 << random.integers(8)
        assert not runs.restore_run(state, bytes(wrong), sizes)[1]
    known._gather(runs, state, "a gather", sealed, plain, {"blocks": 1, "offset": 0})
    for columns, values in ((64, "F8_E4M3"), (63, "I8")):
        scales = Scaling(random.bytes(4 * -(-len(plain) // columns)), "F32", values, columns, 1, columns)
        for message in (sealed, bytes(wrong)):
            runs.widen_run(state, message, scales)
    return [(kernel, report.trace) for kernel, report in gpu.reports]


@pytest.mark.nightly  # by day tests/kernels/test_cu_counts.py counts what kernels do
@pytest.mark.parametrize("bits", [128, 256])
def test_keys_and_texts_of_one_length_take_the_same_steps_banks_and_addresses(text, bits):
    first, second = (do_all(text, seed, bits) for seed in (1, 2))
    assert first == second
    assert {kernel for kernel, _ in first} == {
        kernel for kernel in KERNELS if kernel in {"prepare", "unwrap"} or str(bits) in kernel
    }
    opened, small = ([trace for each, trace in first if each == f"{name}_{bits}"] for name in ("open", "small"))
    # Two forgeries of one chunk, and of one row, whatever is wrong with its tag.
    assert opened[1] == opened[2]
    assert small[0] == small[1]
    assert small[4] == small[5]


@pytest.mark.nightly
def test_each_lookup_in_a_table_takes_one_pass(text):
    gpu = PtxGpu(text)
    known.check(gpu, sizes=(known.CHUNK_SIZE + 4321,), blocks=(1,))
    lookups = [site for _, report in gpu.reports for site in report.sites if site.name == "ld.shared.u32"]
    assert sum(site.requests for site in lookups) > 50_000
    assert [site for site in lookups if site.passes != site.requests] == []


def test_afused_multiplication_rounds_once():
    random = np.random.default_rng(0)
    a, b, c = (np.ldexp(random.integers(-(2**24), 2**24, 2000), random.integers(-40, 40, 2000)) for _ in range(3))
    a, b, c = (numbers.astype(np.float32) for numbers in (a, b, c))
    # A product in the middle of two floats, and what is far below it decides.
    a[:2], b[:2], c[:2] = 1 + 2**-12, 1 + 2**-12, (2**-80, -(2**-80))
    for found, *numbers in zip(fused(a, b, c), a, b, c, strict=True):
        x, y, z = (Fraction(float(number)) for number in numbers)
        near = (np.nextafter(found, np.float32(end)) for end in (-np.inf, np.inf))
        assert all(abs(Fraction(float(found)) - x * y - z) <= abs(Fraction(float(each)) - x * y - z) for each in near)
