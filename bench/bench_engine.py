"""The engines alone: runs of chunks in cache and out of it, next to OpenSSL on whole buffers."""

import os
from itertools import cycle

import numpy as np
import pytest
from conftest import MIB, import_private, size_name
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

available_engines = import_private("fastrack._crypto.engine:available_engines", "fastrack.aead:available")
get_engine = import_private("fastrack._crypto.engine:get_engine", "fastrack.aead:engine")
ciphertext_size = import_private(
    "fastrack.format:ciphertext_size", "fastrack._crypto.cobblestone:ciphertext_size", "fastrack.cobblestone:raw_size"
)
ByteRanges = import_private("fastrack._crypto.gather:ByteRanges", "fastrack._sealed.indexing:ByteRanges")
MessageKey = import_private("fastrack._crypto.cobblestone:MessageKey", "fastrack.cobblestone:MessageKey")


def expand_key(engine, key):
    """Expand a message key, by the present name of the method or the earlier one."""
    return engine.expand_key(key) if hasattr(engine, "expand_key") else engine.prepare(key)


SIZES = [64 << 10, MIB, 16 * MIB, 256 * MIB]
ENGINES = [(name, threads) for name in available_engines() for threads in ((1,) if name == "openssl" else (1, None))]


@pytest.fixture(params=ENGINES, ids=lambda engine: f"{engine[0]}-{engine[1] or 'all'}-threads")
def engine(request):
    name, threads = request.param
    return get_engine(name, threads=threads)


@pytest.fixture(params=SIZES, ids=size_name)
def size(request):
    return request.param


@pytest.fixture(params=[128, 256])
def prepared(request, engine, size, plain, benchmark):
    schedule = expand_key(engine, MessageKey.raw(os.urandom(request.param // 8), os.urandom(12)))
    message = np.zeros(ciphertext_size(size), np.uint8)
    engine.seal_run(schedule, plain[:size], message, 0)
    benchmark.group = f"AES-{request.param}-GCM, {size >> 10} KiB"
    return schedule, message


def test_open(rate, engine, prepared, size, out):
    schedule, message = prepared
    assert rate(size, engine.open_run, schedule, message, out[:size], 0) is None


def test_verify(rate, engine, prepared, size):
    schedule, message = prepared
    assert rate(size, engine.verify_run, schedule, message, 0) is None


def test_seal(rate, engine, prepared, size, plain):
    schedule, message = prepared
    rate(size, engine.seal_run, schedule, plain[:size], message, 0)


@pytest.fixture
def fastest():
    """The engine that transfers use on this machine."""
    engine = get_engine()
    return engine, expand_key(engine, MessageKey.raw(os.urandom(32), os.urandom(12)))


@pytest.mark.guard
@pytest.mark.benchmark(group="AES-256-GCM, 1024 KiB")
def test_fastest_open_1mib(rate, fastest, plain, out):
    engine, schedule = fastest
    message = np.zeros(ciphertext_size(MIB), np.uint8)
    engine.seal_run(schedule, plain[:MIB], message, 0)
    assert rate(MIB, engine.open_run, schedule, message, out[:MIB], 0) is None


@pytest.mark.guard
@pytest.mark.benchmark(group="AES-256-GCM, 1024 KiB")
def test_fastest_seal_1mib(rate, fastest, plain):
    engine, schedule = fastest
    rate(MIB, engine.seal_run, schedule, plain[:MIB], np.zeros(ciphertext_size(MIB), np.uint8), 0)


@pytest.mark.guard
@pytest.mark.benchmark(group="32 windows of 2048 bytes out of 64 MiB")
def test_fastest_windows(rate, fastest, plain):
    """Another batch each time, so that the chunks are not in a cache of the core."""
    engine, schedule = fastest
    message = np.zeros(ciphertext_size(64 * MIB), np.uint8)
    engine.seal_run(schedule, plain[: 64 * MIB], message, 0)
    sizes, offsets = np.full(32, 2048), 2048 * np.arange(32)
    starts = 2048 * np.random.default_rng(0).integers(0, 32 * 1024, (1000, 32))
    plans = cycle([ByteRanges(first, sizes, offsets).pieces() for first in starts])
    out = np.zeros(64 << 10, np.uint8)
    assert rate(out.size, lambda: engine.open_gather(schedule, message, out, next(plans))) is None


@pytest.mark.guard
@pytest.mark.benchmark(group="AES-256-GCM, 1024 KiB")
@pytest.mark.skipif("aesni" not in available_engines(), reason="this CPU has no AES-NI")
def test_narrow_open_1mib(rate, plain, out):
    engine, message = get_engine("aesni", threads=1), np.zeros(ciphertext_size(MIB), np.uint8)
    schedule = expand_key(engine, MessageKey.raw(os.urandom(32), os.urandom(12)))
    engine.seal_run(schedule, plain[:MIB], message, 0)
    assert rate(MIB, engine.open_run, schedule, message, out[:MIB], 0) is None


@pytest.mark.parametrize("bits", [128, 256])
def test_openssl_whole_buffer(rate, bits, size, plain, out, benchmark):
    benchmark.group = f"AES-{bits}-GCM, {size >> 10} KiB"
    cipher, message = AESGCM(AESGCM.generate_key(bits)), np.zeros(size + 16, np.uint8)
    cipher.encrypt_into(bytes(12), plain[:size].data, None, message.data)
    rate(size, cipher.decrypt_into, bytes(12), message.data, None, out[:size].data)
