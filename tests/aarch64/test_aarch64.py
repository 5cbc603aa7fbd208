"""The AArch64 form of the engine on an emulated CPU, beside plain AES-GCM."""

import numpy as np
import pytest
from helpers import arm, reference
from helpers.cases import each
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, hash_key, noise, round_keys
from helpers.runs import Runs, zeroed

from fastrack._crypto import cobblestone, known_answers, vector

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(arm.MISSING), reason=f"needs {' and '.join(arm.MISSING)}")]
NONCE = bytes.fromhex("f0e1d2c3b4a5968778695a4b")
SIZES = [0, 1, 15, 16, 17, 127, 128, 129, 4000, 11384, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE + 777]


@pytest.fixture(scope="module", params=arm.CPUS)
def cpu(request):
    return request.param


@pytest.fixture
def harness(cpu):
    return arm.start(cpu)


def test_the_known_answers_are_given(harness):
    assert known_answers.find_fault(arm.EmulatedEngine(harness)) is None


def test_the_known_keys_are_derived(harness):
    assert known_answers.find_derivation_fault(arm.EmulatedEngine(harness)) is None


@each("count", [1, 2, 5])
@each("size", [16, 32])
def test_a_derivation_leaves_no_secret_on_the_stack_or_in_a_register(harness, count, size):
    secret, headers = noise(size, 1).tobytes(), [noise(56, 2 + number).tobytes() for number in range(count)]
    text, table = vector.derivation_table(secret, headers, [bytes(100)] * count, range(count))
    answer = arm.derive(harness, secret, text, table, count)
    assert answer.result == 0
    keys = [answer.target[cobblestone.DERIVED_SIZE * number :][:16] for number in range(count)]
    needles = [secret[:16], *keys, *map(words, [secret[:16], *keys])]
    padded = [words(bytes(byte ^ pad for byte in secret)) for pad in (0x36, 0x5C)]
    for first, second in (padded, map(words, keys[:2])) if count > 1 else (padded,):  # side by side in two lanes
        needles += [first[:8] + second[:8], first[8:16] + second[8:16]]
    answer = arm.derive(harness, secret, text, table, count, needles=needles)
    assert answer.found == 0
    check_registers(answer.registers[0])


def words(content):
    """The words of 8 bytes in the other byte order."""
    return b"".join(content[start : start + 8][::-1] for start in range(0, len(content), 8))


def test_random_runs_are_what_plain_aes_gcm_makes_of_them(harness):
    random = np.random.default_rng(5)
    for case in range(150):
        key, nonce = random.bytes(random.choice([16, 32])), random.bytes(12)
        size = int(random.choice([random.integers(600), random.integers(3 * CHUNK_SIZE), random.choice(SIZES)]))
        first = int(random.choice([0, 1, 2**32 - 1, 2**38 - 4]))
        plain = random.bytes(size)
        sealed = reference.seal(key, nonce, plain, first)
        engine, passed = arm.EmulatedEngine(harness), np.empty(size, np.uint8)
        runs = Runs(engine, key, nonce)
        assert (case, runs.seal(plain, first)) == (case, sealed)
        assert (case, *runs.open(sealed, first)) == (case, None, plain)
        assert engine.reencrypt_run(runs.schedule, np.frombuffer(plain, np.uint8), passed, first) is None
        assert (case, passed.tobytes()) == (case, plain)

        altered = bytearray(sealed)
        for place in random.integers(len(sealed), size=random.integers(1, 4)):
            altered[place] ^= 1 << random.integers(8)
        chunks = reference.open_each(key, nonce, altered, first)
        bad = [index for index, chunk in enumerate(chunks) if chunk is None]
        expected = (first + bad[0] if bad else None, zeroed(plain, bad))
        assert (case, *runs.open(bytes(altered), first)) == (case, *expected)


@each("bits", [128, 256])
def test_no_byte_of_a_tag_may_differ_and_no_end_may_be_missing(harness, bits):
    key = bytes(range(bits // 8))
    runs = Runs(arm.EmulatedEngine(harness), key, NONCE)
    for size in (1, 145):
        sealed = reference.seal(key, NONCE, noise(size).tobytes())
        for bit in range(8 * size, 8 * (size + TAG_SIZE), 3):
            altered = bytearray(sealed)
            altered[bit // 8] ^= 1 << bit % 8
            assert (size, bit, *runs.open(bytes(altered))) == (size, bit, 0, bytes(size))
        for length in range(TAG_SIZE, size + TAG_SIZE):
            assert (length, *runs.open(sealed[:length])) == (length, 0, bytes(length - TAG_SIZE))


def call_with_a_wrong_tag(harness, work, bits, size, *, wipes=True):
    """Process a chunk whose tag is wrong, or derive keys: what is found of its secrets afterwards."""
    key, plain = noise(bits // 8, 1).tobytes(), noise(size, 2).tobytes()
    sealed = bytearray(reference.seal(key, NONCE, plain, ends=False))
    sealed[-1] ^= 1
    needles = [*round_keys(key), hash_key(key), hash_key(key)[::-1], plain[:16], plain[size // 16 * 16 - 16 :][:16]]
    source = plain if work in {"seal", "reencrypt"} else bytes(sealed)
    target = {"verify": 0, "seal": len(sealed)}.get(work, size)
    rows = np.array([(0, 0, size)]).tobytes()
    return harness.call(work, key + NONCE, source, target, (0, 1, size), wipes=wipes, needles=needles, rows=rows)


@each("bits", [128, 256])
@each("work", arm.WORKS)
@each("size", [11384, CHUNK_SIZE])
def test_no_secret_is_left_on_the_stack_or_in_a_register(harness, work, bits, size):
    answer = call_with_a_wrong_tag(harness, work, bits, size)
    assert answer.found == 0
    for registers in answer.registers:
        check_registers(registers)


def check_registers(registers):
    for number in range(32):
        value = registers[16 * number :][:16]
        if 8 <= number < 16:  # of these a function preserves the low half
            assert (number, value[:8]) == (number, b"\xa5" * 8)
            value = value[8:]
        assert value in {bytes(len(value)), b"\xa5" * len(value)}, number


def test_the_search_finds_what_is_not_wiped(harness):
    found = {work: call_with_a_wrong_tag(harness, work, 256, 11384, wipes=False).found for work in arm.WORKS}
    assert any(found.values())  # which keep some on the stack is the compiler's affair


@each(("work", "target"), [("open", CHUNK_SIZE - 1), ("seal", SEALED_CHUNK_SIZE - 1)])
def test_an_access_beyond_a_buffer_would_end_the_program(cpu, work, target):
    harness = arm.Harness(cpu)
    sealed = reference.seal(bytes(16), bytes(12), bytes(CHUNK_SIZE))[:SEALED_CHUNK_SIZE]
    with pytest.raises(ChildProcessError, match="-11"):
        harness.call(work, bytes(28), sealed, target, (0, 1, CHUNK_SIZE))
    harness.close()
