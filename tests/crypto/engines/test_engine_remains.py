"""Process memory after work is done: no message key, no round key, no plaintext of a chunk that was altered."""

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import engines, reference
from helpers.cases import each
from helpers.native_code import needs_compiler
from helpers.process_memory import find_in_process, finder
from helpers.reference import hash_key, round_keys

from fastrack._crypto.derivation import derive
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

pytestmark = pytest.mark.slow

NONCE = bytes.fromhex("f0e1d2c3b4a5968778695a4b")
CHUNKS = 512  # enough for helper threads
PART = 11384  # bytes of a message of one chunk, with part of a block at its end
FASTEST, SLOWER = engines.VECTOR_NAMES[:1], engines.VECTOR_NAMES[1:]
WORKS = ["open", f"open {PART}", "verify", "seal", "gather", "jobs", "jobs gather", "jobs plain", f"jobs plain {PART}"]
STARTS = 0, 16, PART // 16 * 16 - 16, CHUNK_SIZE - 16  # of blocks of plaintext that are looked for

CHILD = """
import gc, os, signal, sys
from pathlib import Path
import numpy as np
from helpers import engines
from helpers.messages import messages_of
from helpers.runs import as_pieces
from fastrack._crypto import cobblestone, derivation, message_keys
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

name, works, folder = sys.argv[1], sys.argv[2].split(","), Path(sys.argv[3])
source, plain = (np.memmap(folder / name, np.uint8, "r") for name in ("message", "plain"))
count = source.size // SEALED_CHUNK_SIZE

def read_key():
    path = folder / "key"
    material = bytearray(path.stat().st_size)
    with path.open("rb", 0) as file:
        file.readinto(material)
    return cobblestone.MessageKey(material)

def run(work):
    key = read_key()
    if name == "derive":
        for _ in range(20):
            derivation.derive(key.key, bytes(24), b"").wipe()
        key.wipe()
        return 0
    engine = engines.make(name, threads=2)
    if work.startswith("jobs"):
        return run_jobs(engine, key, work)
    schedule = engine.expand_key(key)
    key.wipe()
    target = np.zeros(count * CHUNK_SIZE, np.uint8)
    if work == "open":
        bad = engine.open_run(schedule, source, target, 0)
    elif work.startswith("open "):
        size = int(work.removeprefix("open "))
        bad = engine.open_run(schedule, source[:size + 16], target[:size], 0)
    elif work == "verify":
        bad = engine.verify_run(schedule, source, 0)
    elif work == "seal":
        bad = engine.seal_run(schedule, target, np.empty(source.size, np.uint8), 0) or 0
    else:
        numbers = np.arange(count)
        table = np.stack([np.full(count, 7), 100 * numbers, np.full(count, 100)], axis=1)
        bad = engine.open_gather(schedule, source, target, as_pieces(numbers, np.arange(count + 1), table))
        assert not target[:100].any(), "plaintext of a bad chunk came out"
    if work.startswith("open"):
        assert not target[:CHUNK_SIZE].any(), "plaintext of a bad chunk came out"
    target[:] = 0
    schedule.wipe()
    return bad

def run_jobs(engine, key, work):
    keys = message_keys.MessageKeys.of([key])
    key.wipe()
    is_plain = work.startswith("jobs plain")
    target = np.zeros(int(work.removeprefix("jobs plain") or plain.size) if is_plain else plain.size, np.uint8)
    numbers = np.arange(count)
    table = np.stack([np.full(count, 7), 100 * numbers, np.full(count, 100)], axis=1)
    plan = as_pieces(numbers, np.arange(count + 1), table) if work == "jobs gather" else None
    given = {"plain": [plain[:target.size]]} if is_plain else {"sealed": [source]}
    bad = engine.open_jobs(messages_of(keys, [target.size], [target], plans=[plan], **given))
    assert is_plain or not target[:100].any(), "plaintext of a bad chunk came out"
    target[:] = 0
    keys.wipe()
    return bad or 0 if is_plain else bad[1]

for work in works:
    assert run(work) == 0
    gc.collect()
    os.kill(os.getpid(), signal.SIGSTOP)
"""

OPENSSL_CHILD = """
import os, signal, sys
import numpy as np
from fastrack._crypto import cobblestone, openssl

source = np.fromfile(sys.argv[1], np.uint8)
target = np.zeros(source.size - 16, np.uint8)
engine = openssl.OpenSSLEngine()
assert engine.open_run(engine.expand_key(cobblestone.MessageKey(bytearray(range(1, 45)))), source, target, 0) == 0
target[:] = 0
os.kill(os.getpid(), signal.SIGSTOP)
"""


SIZES = [pytest.param(16, marks=pytest.mark.nightly), 32]


@pytest.fixture(scope="module", params=SIZES, ids=["aes-128", "aes-256"])
def message(request, tmp_path_factory):
    """A key file, and a message whose chunk 0 was altered; the key and the plaintext of that chunk."""
    folder = tmp_path_factory.mktemp("message")
    key = os.urandom(request.param)
    plain = os.urandom(CHUNK_SIZE)
    others = reference.seal(key, NONCE, bytes(CHUNK_SIZE * CHUNKS))[: CHUNKS * SEALED_CHUNK_SIZE]
    first = bytearray(reference.seal(key, NONCE, plain)[:SEALED_CHUNK_SIZE])
    first[-1] ^= 1
    (folder / "key").write_bytes(key + NONCE)
    (folder / "plain").write_bytes(plain + bytes((CHUNKS - 1) * CHUNK_SIZE))
    (folder / "message").write_bytes(bytes(first) + others[SEALED_CHUNK_SIZE:])
    return folder, key, plain


def remains(engine, works, message, **variables):
    """Return what is found in the memory of a child after each kind of work."""
    folder, key, plain = message
    needles = {f"round key {number}": value for number, value in enumerate(round_keys(key))}
    needles |= {"message key": key, "H": hash_key(key), "H reversed": hash_key(key)[::-1]}
    needles |= {f"plaintext {start}": plain[start : start + 16] for start in STARTS}
    found = set()
    command = [sys.executable, "-c", CHILD, engine, ",".join(works), str(folder)]
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    with subprocess.Popen(command, env=os.environ | variables) as child:
        try:
            for work in works:
                _, status = os.waitpid(child.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status), "the child ended early"
                found |= {(work, *place) for place in find_in_process(child.pid, needles)}
                child.send_signal(signal.SIGCONT)
        finally:
            child.kill()
    return found


@pytest.mark.parametrize("engine", [*FASTEST, *(pytest.param(name, marks=pytest.mark.nightly) for name in SLOWER)])
def test_a_vector_engine_leaves_no_secret_in_memory(engine, message):
    if engine in engines.EMULATED:
        needs_compiler()
    assert remains(engine, WORKS, message) == set()


def test_the_openssl_engine_leaves_round_keys_only(message):
    # OpenSSL leaves them on its stack: docs/threat-model.md, "Remains in memory".
    found = remains("openssl", WORKS, message)
    assert not {(work, name) for work, name, region in found if region != "stack" or not name.startswith("round key")}


@pytest.mark.parametrize("size", [48, 4000, 5088])
def test_the_openssl_engine_leaves_nothing_of_a_chunk_that_failed(size, tmp_path):
    plain = os.urandom(size)
    sealed = bytearray(reference.seal(bytes(range(1, 33)), bytes(range(33, 45)), plain))
    sealed[-1] ^= 1
    (tmp_path / "message").write_bytes(sealed)
    with subprocess.Popen([sys.executable, "-c", OPENSSL_CHILD, str(tmp_path / "message")]) as child:
        try:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "the child ended early"
            assert find_in_process(child.pid, {"first": plain[:16], "last": plain[-16:]}) == set()
        finally:
            child.kill()


@pytest.mark.parametrize("engine", [*FASTEST, "openssl"])
def test_deriving_a_key_leaves_it_nowhere_but_on_the_stack_of_openssl(engine, message):
    folder, secret, plain = message
    derived = derive(secret, bytes(24), b"")  # wiped when it goes away
    # Native code has words in the other byte order.
    key = bytes(derived.key)
    swapped = b"".join(key[start : start + 8][::-1] for start in range(0, len(key), 8))
    for words in (key, swapped):
        found = remains("derive", ["derive"], (folder, words, plain), FASTRACK_ENGINE=engine)
        assert {(name, region) for _, name, region in found if (engine, region) != ("openssl", "stack")} == set()


def test_the_search_finds_what_is_there(message):
    _, key, _ = message
    with subprocess.Popen(["sleep", "60"], env={"SECRET": key.hex()}) as child:
        try:
            deadline = time.monotonic() + 10
            while not (found := find_in_process(child.pid, {"key": key.hex().encode()})):
                assert time.monotonic() < deadline
        finally:
            child.kill()
    assert found == {("key", "stack")}


@each("offset", [0, 1, 4079, 4080])
def test_the_search_finds_a_secret_at_any_offset(offset):
    secret = bytes([0, 7, 0, 9]) + os.urandom(10) + b"ab"
    data = bytearray(4096)
    data[offset : offset + 16] = secret
    assert set(finder({"secret": secret, "other": os.urandom(16)})(bytes(data))) == {"secret"}
