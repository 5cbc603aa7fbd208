"""The compression function of SHA-512 in one lane and in several, on published vectors and beside hashlib."""

import ctypes
import hashlib
import random
import re
from functools import cache
from importlib import resources

import numpy as np
import pytest
from helpers.cases import each
from helpers.llvm import binding, ir

from fastrack._crypto.isa import INSTRUCTION_SETS, supported_instruction_sets
from fastrack_native import compiler, sha512_ir

BLOCK = 128
WIDTHS = {name: INSTRUCTION_SETS[name].width for name in supported_instruction_sets()}
CASES = [(name, lanes) for name, width in WIDTHS.items() for lanes in dict.fromkeys((1, width // 8))]
pytestmark = [
    pytest.mark.skipif(not CASES, reason="this CPU has no vector engine"),
    pytest.mark.slow,  # to compile the function takes seconds
]
# Around the end of a block and of the room for a length in it.
LENGTHS = [0, 1, 111, 112, 113, 119, 120, 127, 128, 129, 239, 240, 241, 255, 256, 257, 1000]


@cache
def compiled(name, lanes):
    """Return the function of a form for so many lanes, and what keeps its code."""
    module = ir.Module()
    function = sha512_ir.compress_function(module, INSTRUCTION_SETS[name], lanes)
    function.linkage = "external"
    machine, parsed = compiler.target_machine(compiler.host_target(), here=True), binding.parse_assembly(str(module))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
    return call(engine.get_function_address(function.name)), engine


class Hashing:
    """SHA-512 of a message in each lane, by nothing but the function and the padding of FIPS 180-4, section 5.1.2."""

    def __init__(self, name, lanes):
        self.lanes = lanes
        self._compress, self._engine = compiled(name, lanes)
        self._state, self._block, self._mask = (aligned(size * lanes) for size in (8, 16, 1))

    def digests(self, messages):
        """Hash one message a lane, of any lengths."""
        padded = [pad(message) for message in messages]
        for lane in range(self.lanes):
            self._state[lane :: self.lanes] = sha512_ir.initial_state()
        for start in range(0, max(map(len, padded)), BLOCK):
            for lane, text in enumerate(padded):
                block = text[start : start + BLOCK] or bytes(BLOCK)
                self._block[lane :: self.lanes] = np.frombuffer(block, ">u8")
                self._mask[lane] = 2**64 - 1 if start < len(text) else 0
            self._compress(*(array.ctypes.data for array in (self._state, self._block, self._mask)))
        return [self._state[lane :: self.lanes].astype(">u8").tobytes() for lane in range(self.lanes)]

    def digest(self, message):
        """Hash a message in every lane, and return what all of them give."""
        (digest,) = set(self.digests([message] * self.lanes))
        return digest

    def hmac(self, key, text):
        """RFC 2104."""
        key = (key if len(key) <= BLOCK else self.digest(key)).ljust(BLOCK, b"\0")
        inner, outer = (bytes(byte ^ pad for byte in key) for pad in (0x36, 0x5C))
        return self.digest(outer + self.digest(inner + text))


def aligned(words):
    memory = np.zeros(words + 8, np.uint64)
    start = -memory.ctypes.data % 64 // 8
    return memory[start : start + words]


def pad(message):
    return message + b"\x80" + bytes(-(len(message) + 17) % BLOCK) + (8 * len(message)).to_bytes(16)


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def hashing(request):
    return Hashing(*request.param)


def entries(path, *names):
    """Yield the values of an entry of a file of vectors."""
    text = (resources.files("cryptography_vectors") / path).read_text()
    columns = [re.findall(rf"^{name} = (\w+)$", text, re.MULTILINE) for name in names]
    return list(zip(*columns, strict=True))


@each("name", ["SHA512ShortMsg", "SHA512LongMsg"])
def test_published_digests_are_computed(hashing, name):
    found = entries(f"hashes/SHA2/{name}.rsp", "Len", "Msg", "MD")
    assert len(found) >= 128
    for length, message, digest in found[:: 1 if name == "SHA512ShortMsg" else 16]:
        assert (length, hashing.digest(bytes.fromhex(message)[: int(length) // 8]).hex()) == (length, digest)


def test_published_macs_are_computed(hashing):
    found = entries("HMAC/rfc-4231-sha512.txt", "Key", "Msg", "MD")
    assert len(found) >= 6
    for key, message, mac in found:
        assert hashing.hmac(bytes.fromhex(key), bytes.fromhex(message)).hex() == mac


def test_messages_of_different_lengths_share_a_call(hashing):
    chance = random.Random(1)
    for _ in range(40):
        messages = [chance.randbytes(chance.choice(LENGTHS)) for _ in range(hashing.lanes)]
        assert hashing.digests(messages) == [hashlib.sha512(message).digest() for message in messages]
    for length in LENGTHS:
        message = chance.randbytes(length)
        assert (length, hashing.digest(message)) == (length, hashlib.sha512(message).digest())
