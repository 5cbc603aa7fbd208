"""Candidates for faster kernels: right on the host, as those of the tree are, and without spills."""

import re

import pytest
from helpers import kernel_host, reference
from helpers.cases import each
from helpers.kernel_host import Host, Library, pack
from helpers.kernel_nvrtc import KERNELS, Nvrtc, find_libraries
from helpers.reference import CHUNK_SIZE, noise
from helpers.runs import flip, plan
from test_cu_chunks import (  # noqa: F401 - which run here on each candidate
    message,
    test_a_byte_at_any_place_of_a_full_chunk_counts,
    test_a_last_chunk_of_any_length_opens_and_seals,
    test_every_byte_of_a_tag_counts_and_of_one_every_bit,
    test_no_kernel_leaves_a_secret_in_shared_memory,
)

from bench.gpu import candidates
from bench.gpu.known import CASES

REGISTERS = 65536
# A few spilled words would not be worth another order of the source before a measurement says that they are.
SPILLED = 24


pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module", params=candidates.names())
def candidate(request, tmp_path_factory):
    # The fixture is set up several times. A folder of the same name lets the compiled library be used again.
    folder = tmp_path_factory.getbasetemp() / request.param
    folder.mkdir(exist_ok=True)
    return candidates.assemble(request.param, folder)


@pytest.fixture(scope="module")
def host(build, candidate):
    source = candidate.kernels.folder / "fastrack.cu"
    return Host(Library.load(build(source)), kernel_host.constants(source))


@pytest.fixture(scope="module")
def state(host, key, nonce):
    return host.prepare(key, nonce)


@each("case", CASES)
def test_a_published_case_is_a_chunk(host, case):
    _, key, nonce, plain, sealed = (each if isinstance(each, int) else bytes.fromhex(each) for each in case)
    state = host.prepare(key, nonce)
    assert host.open_run(state, sealed) == (None, plain)
    assert host.seal_run(state, plain) == sealed
    assert host.open_run(state, flip(sealed, 8 * len(sealed) - 1)) == (0, bytes(len(plain)))


@each("chunks", [1, 2, 3, 5])
@each("blocks", [1, 2, 4])
def test_a_run_of_chunks_opens_and_seals(host, state, key, nonce, chunks, blocks):
    plain = noise(chunks * CHUNK_SIZE + 99, seed=chunks).tobytes()
    sealed = reference.seal(key, nonce, plain, 2**32 - 2)
    assert host.open_run(state, sealed, 2**32 - 2, blocks=blocks) == (None, plain)
    assert host.seal_run(state, plain, 2**32 - 2, blocks=blocks) == sealed


@each("blocks", [1, 2, 3])
def test_pieces_are_gathered(host, state, key, nonce, blocks):
    total = 4 * CHUNK_SIZE + 777
    plain = noise(total, seed=2).tobytes()
    sealed = reference.seal(key, nonce, plain)
    many = [(start, 1 + start % 97) for start in range(0, total - 97, 613)]
    for ranges in (many, [(CHUNK_SIZE - 5, CHUNK_SIZE + 11)], [(0, total)], [(total - 1, 1)]):
        pieces, size = plan(ranges)
        expected = b"".join(plain[start : start + length] for start, length in ranges)
        packed = pack(sealed, pieces.chunks.tolist())
        assert host.gather(state, packed, pieces, total, size, blocks=blocks, offset=3) == (None, expected)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_spills_six_words_at_most(candidate, architecture):
    libraries = find_libraries()
    if not libraries:
        pytest.skip("there is no NVRTC wheel")
    folder = candidate.kernels.folder
    _, log = Nvrtc.load(libraries[0]).compile(folder / "fastrack.cu", architecture, folder)
    stacks = dict(re.findall(r"entry function '(\w+)'.*?(\d+) bytes stack", log, re.DOTALL))
    assert set(stacks) == set(KERNELS)
    assert max(map(int, stacks.values())) <= SPILLED
    used = re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    registers = [int(number) for name, number in used if name not in {"prepare", "unwrap"}]  # which run alone
    assert max(registers) * max(1024, candidate.kernels.threads) <= REGISTERS
