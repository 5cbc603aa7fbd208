"""Plaintext that is sealed and opened in one call: it comes out as it went in, sealed on its way, or not at all."""

from functools import cache

import pytest
from helpers import engines, reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.gcm_vectors import load_all
from helpers.messages import raw_key
from helpers.native_code import build, forget, needs_compiler
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, noise
from helpers.runs import Runs
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack._crypto.isa import INSTRUCTION_SETS

NONCE = bytes.fromhex("f0e1d2c3b4a5968778695a4b")
SIZES = [0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 511, 512, 513, 1000, CHUNK_SIZE - 17, CHUNK_SIZE - 1, CHUNK_SIZE]
needs_vectors = pytest.mark.skipif(not engines.VECTOR_NAMES, reason="no vector engine here")


@pytest.fixture
def runs(engine_under_test, key):
    return Runs(engine_under_test, key, NONCE)


def test_plaintext_of_any_short_size_comes_out(runs):
    for size in range(1100):
        plain = noise(size, seed=size).tobytes()
        assert (size, *runs.pass_through(plain)) == (size, None, plain)


def test_plaintext_may_lie_at_any_address(runs):
    plain = noise(CHUNK_SIZE + 777).tobytes()
    for offset in range(64):
        assert (offset, *runs.pass_through(plain, offset=offset)) == (offset, None, plain)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6 * CHUNK_SIZE))
def test_plaintext_of_several_chunks_comes_out(engine_under_test, size):
    plain = noise(size, seed=size).tobytes()
    assert Runs(engine_under_test, bytes(32)).pass_through(plain) == (None, plain)


@each("threads", [1, 2, 16])
@pytest.mark.slow
def test_more_plaintext_than_a_thread_works_alone_comes_out(make_engine, key, threads):
    plain = noise(700 * CHUNK_SIZE + 333).tobytes()
    assert Runs(make_engine(threads), key, NONCE).pass_through(plain) == (None, plain)


class TamperingCipher:
    """A cipher that alters one byte of what it is to decrypt, in one call."""

    def __init__(self, cipher, call, place):
        self.cipher, self.call, self.place = cipher, call, place

    def encrypt_into(self, *operands):
        return self.cipher.encrypt_into(*operands)

    def decrypt_into(self, nonce, sealed, extra, plain):
        if self.call == 0:
            sealed[self.place] ^= 1
        self.call -= 1
        return self.cipher.decrypt_into(nonce, sealed, extra, plain)


@each("place", [0, 5000, CHUNK_SIZE, -1])
def test_the_openssl_engine_refuses_what_was_altered_after_it_was_sealed(monkeypatch, place):
    runs = Runs(engines.make("openssl"), bytes(32))
    plain = noise(3 * CHUNK_SIZE).tobytes()
    runs.schedule._cipher = TamperingCipher(runs.schedule._cipher, 1, place)
    with monkeypatch.context() as patch:
        patch.setattr(runs.engine, "expand_key", lambda _: runs.schedule)
        found = runs.pass_through(plain)
    assert found == (1, plain[:CHUNK_SIZE] + bytes(CHUNK_SIZE) + plain[2 * CHUNK_SIZE :])


# The native code, in a buffer that the test can look at


def compile_pass(name):
    """Compile the code of an engine for a buffer of the caller: a function of plaintext to the last chunk, sealed."""
    form = engines.EMULATED.get(name) or INSTRUCTION_SETS[name]
    needs_compiler()
    from fastrack_native import compiler, kernels_chunks

    variant = "/".join(map(str, form))

    @compiler.compiled
    def native(
        bits: "int", schedule: "int", source: "int", target: "int", first: "int", count: "int", size: "int",
        buffer: "int",
    ) -> "int":  # fmt: skip
        return kernels_chunks._call(variant, "reencrypt", bits, (schedule, source, target, first, count, size, buffer))

    native = build({"reencrypt_run": native}, [form]).reencrypt_run

    def run(key, nonce, plain, first):
        schedule = engines.make(name).expand_key(raw_key(key, nonce))
        source, target, buffer = Fenced.holding(plain), Fenced(len(plain)), Fenced(SEALED_CHUNK_SIZE)
        count = max(1, -(-len(plain) // CHUNK_SIZE))
        addresses = source.data.ctypes.data, target.data.ctypes.data
        where = buffer.data.ctypes.data
        bad = native(schedule.bits, schedule.address, *addresses, first, count, len(plain), where)
        assert target.stands
        assert buffer.stands
        last = len(plain) - (count - 1) * CHUNK_SIZE + TAG_SIZE
        return first + bad if bad < count else None, target.data.tobytes(), buffer.data[:last].tobytes()

    return run


pass_of = cache(compile_pass)


@pytest.mark.slow
@pytest.mark.parametrize("name", engines.VECTOR_NAMES)
def test_what_is_in_the_buffer_is_what_plain_aes_gcm_makes_of_a_chunk(name):
    for size in (16, 32):
        key = bytes(range(size))
        for length in SIZES:
            for chunk in (0, 2**32 + 3, 2**38 - 1):
                plain = noise(length, seed=length).tobytes()
                sealed = reference.seal(key, NONCE, plain, chunk, ends=False)
                assert (length, chunk, *pass_of(name)(key, NONCE, plain, chunk)) == (length, chunk, None, plain, sealed)


@pytest.mark.slow
@pytest.mark.parametrize("name", engines.VECTOR_NAMES)
def test_what_is_in_the_buffer_is_what_is_published(name):
    for case in (case for cases in load_all().values() for case in cases if case.plain is not None):
        for chunk in (0, 2**33 + 5):
            passed = pass_of(name)(case.key, reference.nonce_of(case.nonce, chunk), case.plain, chunk)
            assert (case.name, chunk, *passed) == (case.name, chunk, None, case.plain, case.sealed)


@pytest.fixture
def _altered():
    """Has generators emit anew what they emitted before the test, and once more after it."""
    forget()
    yield
    forget()


@pytest.mark.slow
@needs_vectors
@pytest.mark.usefixtures("_altered")
def test_a_chunk_with_another_tag_than_it_was_sealed_with_is_refused(monkeypatch):
    from fastrack_native import gcm_reencrypt

    tag, tags = gcm_reencrypt._Reencryption.tag, []

    def tag_wrongly(work, size, number=0):
        right = tag(work, size, number)
        tags.append(right)
        return right if len(tags) % 2 else work.small.xor(right, work.small.words(1 << 63, 0))

    monkeypatch.setattr(gcm_reencrypt._Reencryption, "tag", tag_wrongly)
    run = compile_pass(engines.VECTOR_NAMES[0])
    for size in SIZES:
        bad, plain, _ = run(bytes(32), NONCE, noise(size).tobytes(), 5)
        assert (size, bad, any(plain)) == (size, 5, False)
    assert len(tags) == 4  # two for each size of key


@pytest.mark.slow
@needs_vectors
@pytest.mark.usefixtures("_altered")
def test_a_chunk_that_is_read_back_otherwise_is_refused(monkeypatch):
    from fastrack_native.llvm import Emitter

    load = Emitter.load

    def misread(self, address, offset=0, align=1, *, once=False):
        value = load(self, address, offset, align, once=once)
        return self.xor(value, self.words(0, 1)) if once and align > 1 else value

    monkeypatch.setattr(Emitter, "load", misread)
    run = compile_pass(engines.VECTOR_NAMES[0])
    assert run(bytes(32), NONCE, bytes(15), 5)[0] is None  # it has neither a group nor a whole block
    for size in (16, 17, 511, 512, CHUNK_SIZE):
        bad, plain, _ = run(bytes(32), NONCE, noise(size).tobytes(), 5)
        assert (size, bad, any(plain)) == (size, 5, False)
    plain = noise(3 * CHUNK_SIZE).tobytes()
    assert run(bytes(32), NONCE, plain, 5)[:2] == (5, bytes(len(plain)))
