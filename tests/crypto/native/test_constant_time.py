"""The native extension under valgrind, with secrets marked as undefined: no branch and no address depends on them.

memcheck follows each bit of a secret through registers and memory, and reports a branch or an address that depends on
it. It emulates a CPU with the narrow instructions, so this is about the form `aesni`, about the code for any CPU, and
about the wide code on narrow instructions. The owner's key is secret, and so are message keys, all that is derived of
them, and plaintext that is sealed.

The result of authentication is computed of these, and public: branches may depend on it. They are told from other
branches in two ways. The module has no more of them than its sources. And nothing is found in a build that differs in
one thing: it tells valgrind that each result is public.

memcheck does not see instructions whose time depends on data, such as division.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from helpers import reference
from helpers.cases import each

from fastrack._crypto import base, cobblestone, native, vector, widening, workers
from fastrack.format import CHUNK_SIZE, COMMITMENT_SIZE, SALT_SIZE, SEALED_CHUNK_SIZE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="valgrind has no AES instructions but those of x86-64"),
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(getattr(native.load(), "__file__", None) is None, reason="needs the module `_native`"),
]

HELPERS = Path(reference.__file__).parent
WIDE = "vaes-512-on-128"  # of `secret_builds`

# Two chunks, which take all paths of the code: groups of vectors, single blocks, part of a block.
SIZE = CHUNK_SIZE + 1061
CHUNKS = 2
FIRST = (1 << 32) + 5
PLAIN = bytes(index % 251 + 1 for index in range(SIZE))
NONCE = bytes(range(100, 112))
POWERS_SIZE = 2 * 32 * 16  # bytes of powers of the hash key in a schedule, and of their halves
ALTERED = ([], [0], [1], [0, 1])  # chunks with a wrong tag

# A gather of both chunks: two ranges of one, and all of the other.
RANGES = [(1, 3000), (16000, 384), (CHUNK_SIZE, SIZE - CHUNK_SIZE)]
PLAN = {"chunks": [0, 1], "starts": [0, 2, 3], "rows": [1, 0, 3000, 16000, 3000, 384, 0, 3384, SIZE - CHUNK_SIZE]}

# Bytes of context: words end, and padding begins, at different places.
CONTEXTS = [bytes(range(size)) for size in (0, 37, 38, 101, 102, 103, 119, 165, 166, 230)]

ALONE = 1, 0, 0, 0, 0  # a grain of one chunk, and what `share` takes: no worker

# Branches on results of authentication in the sources that a function has and those before it here have not. Where it
# says "copies", there is one for each of the two sizes of keys.
VERDICTS = {
    "open_run": 2 + 1 + 1,  # copies of `_build_open`; a look for a bad chunk; a swap of `fetch_min`
    "verify_run": 1 + 1,  # a look; a swap
    "open_gather": 2 + 2,  # copies of `ranges_function`; a look after each of the two calls
    "open_jobs": 2 + 4 + 3,  # copies of `_build_reencrypt`; a look after each of the four calls; swaps
    "widen": 2 + 2,  # copies of `_build_widen`, which open and then look at the result
}


@dataclass(frozen=True)
class Case:
    """Calls to make, and what is expected of them: the result of the last one, and how memory begins.

    `hidden` has the bytes that secrets must have come to, without which nothing was followed.
    """

    name: str
    secret: list[str]
    memory: dict[str, Any]
    calls: list[Any]
    result: int = 0
    expected: dict[str, bytes] = field(default_factory=dict)
    hidden: dict[str, int] = field(default_factory=dict)


def alter(sealed, chunks):
    data = bytearray(sealed)
    for chunk in chunks:
        data[min((chunk + 1) * SEALED_CHUNK_SIZE, len(data)) - 1] ^= 1
    return bytes(data)


def without(chunks):
    """Return the plaintext with zeros in place of some chunks."""
    data = bytearray(PLAIN)
    for chunk in chunks:
        part = slice(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE)
        data[part] = bytes(len(data[part]))
    return bytes(data)


def parts_of(plain):
    return b"".join(plain[start : start + size] for start, size in RANGES)


def message_cases(form, size):
    """Return cases of keys and of messages, with a key of so many bytes."""
    key, bits = bytes(range(size)), 8 * size
    keys = {"material": key + NONCE, "schedule": bytes(vector.SCHEDULE_SIZE)}
    expand = f"expand_key_{form}", [bits, "schedule", "material"]
    round_keys = b"".join(4 * each for each in reference.round_keys(key))
    expected, hidden = {"schedule": round_keys}, {"schedule": len(round_keys) + POWERS_SIZE + len(NONCE)}
    yield Case("expand_key", ["material"], keys, [expand], 0, expected, hidden)
    work = [bits, "schedule", "plain", "sealed", FIRST, CHUNKS, SIZE, *ALONE]
    sealed = reference.seal(key, NONCE, PLAIN, FIRST, ends=False)
    memory = keys | {"plain": PLAIN, "sealed": bytes(len(sealed))}
    calls, expected, hidden = [expand, (f"seal_run_{form}", work)], {"sealed": sealed}, {"sealed": len(sealed)}
    yield Case("seal_run", ["material", "plain"], memory, calls, workers.NONE_BAD, expected, hidden)
    for altered in ALTERED:
        bad = min(altered, default=workers.NONE_BAD)
        first_bad = bad if bad == workers.NONE_BAD else FIRST + bad
        memory = keys | {"sealed": alter(sealed, altered), "plain": bytes(SIZE)}
        work = [bits, "schedule", "sealed", "plain", FIRST, CHUNKS, SIZE, *ALONE]
        for name, plain in ("open_run", without(altered)), ("verify_run", bytes(SIZE)):
            calls = [expand, (f"{name}_{form}", work)]
            yield Case(name, ["material"], memory, calls, first_bad, {"plain": plain})
        whole = alter(reference.seal(key, NONCE, PLAIN, ends=False), altered)
        parts = parts_of(without(altered))
        memory = keys | PLAN | {"sealed": whole, "parts": bytes(len(parts))}
        work = [bits, "schedule", "sealed", "parts", ["chunks"], ["starts"], ["rows"], CHUNKS, SIZE, *ALONE]
        calls = [expand, (f"open_gather_{form}", work)]
        yield Case("open_gather", ["material"], memory, calls, bad, {"parts": parts})
        memory |= {"plain": PLAIN, "opened": bytes(SIZE), "passed": bytes(SIZE)}
        memory["jobs"] = [
            *("material", bits, "sealed", "opened", SIZE, 0, base.WHOLE, 0, 0),
            *("material", bits, "sealed", "parts", SIZE, CHUNKS, "chunks", "starts", "rows"),
            *("material", bits, "plain", "passed", SIZE, 2 * CHUNKS, base.SEALS, 0, 0),
        ]
        expected = {"opened": without(altered), "parts": parts, "passed": PLAIN}
        calls = [(f"open_jobs_{form}", ["jobs", 3, 3 * CHUNKS, *ALONE])]
        yield Case("open_jobs", ["material", "plain"], memory, calls, bad, expected)


# Values: rows of 2000, so that scales by rows are of large blocks, and others of small ones; special values are there.
COLUMNS = 2000
UNUSUAL = [0.0, -0.0, 1.5, 1e-41, 2.0**119, -(2.0**127), float("inf"), float("-inf"), float("nan"), 0.3]


def widen_cases(form, size):
    """Return cases of widening, with scales that are secret as well."""
    key, bits = bytes(range(size)), 8 * size
    values = np.frombuffer(PLAIN, np.uint8)
    for number, dtype in enumerate(base.VALUES):
        for is_wide, (tall, wide) in enumerate([(3, 128), (1, COLUMNS)]):
            across = -(-COLUMNS // wide)
            scales = np.resize(np.float32(np.roll(UNUSUAL, number)), across * -(-SIZE // (COLUMNS * tall)))
            scales = scales if is_wide else (scales.view(np.uint32) >> 16).astype(np.uint16)
            memory = base.HostMemory.of(scales.view(np.uint8))
            scaling = base.Scaling(memory, "F32" if is_wide else "BF16", dtype, COLUMNS, tall, wide)
            widened = widening.widen(values, 0, scaling).tobytes()
            for altered in ALTERED[:2]:
                bad = min(altered, default=workers.NONE_BAD)
                expected = bytearray(widened)
                for chunk in altered:
                    expected[2 * chunk * CHUNK_SIZE : 2 * (chunk + 1) * CHUNK_SIZE] = bytes(2 * CHUNK_SIZE)
                sealed = alter(reference.seal(key, NONCE, PLAIN, ends=False), altered)
                words = {"material": key + NONCE, "sealed": sealed, "wide": bytes(2 * SIZE), "scales": scales.tobytes()}
                words["scaling"] = ["scales", *base.scaling_row(scaling, SIZE)[1:]]
                words["jobs"] = ["material", bits, "sealed", "wide", SIZE, 0, base.WIDENS, "scaling", 0]
                calls = [(f"open_jobs_{form}", ["jobs", 1, CHUNKS, *ALONE])]
                yield Case("widen", ["material", "scales"], words, calls, bad, {"wide": bytes(expected)})


def derivation_cases(form, size):
    """Return cases of deriving message keys: several and one, with right and with wrong commitments."""
    secret = bytes(range(1, size + 1))
    written = {16: 64, 32: 80}[size]  # bytes: a digest, and whole words of another where they are needed
    for contexts in CONTEXTS, CONTEXTS[-1:]:
        count = len(contexts)
        for bad in {None, 0, count - 1}:
            headers, expected = [], b""
            for number, context in enumerate(contexts):
                salt = bytes([number]) * SALT_SIZE
                row = HKDFExpand(SHA512(), written, cobblestone.PREFIXES[size] + salt + context).derive(secret)
                expected += row.ljust(cobblestone.DERIVED_SIZE, b"\0")
                commitment = bytearray(row[size + len(NONCE) :][:COMMITMENT_SIZE])
                commitment[-1] ^= number == bad
                headers.append(salt + commitment)
            text, table = vector.derivation_table(secret, headers, contexts, range(count))
            memory = {
                "secret": secret,
                "text": text,
                "table": list(table),
                "rows": bytes(count * cobblestone.DERIVED_SIZE),
            }
            calls = [(f"derive_keys_{form}", [["secret"], size, ["text"], ["table"], count, ["rows"]])]
            found, hidden = count if bad is None else bad, {"rows": count * written}
            yield Case("derive_keys", ["secret"], memory, calls, found, {"rows": expected}, hidden)


def cases_of(form):
    """Return the cases of a form, those of `VERDICTS` last: what is found in two functions counts for the first."""
    cases = []
    end = native.suffix_of(form)[1:]
    for size in 16, 32:
        cases += [*message_cases(end, size), *widen_cases(end, size), *derivation_cases(end, size)]
    order = list(VERDICTS)
    return sorted(cases, key=lambda case: order.index(case.name) if case.name in order else -1)


class Memcheck:
    """Runs cases under valgrind's memcheck."""

    def __init__(self, folder):
        self._folder = folder
        self._marks = folder / "marks.so"
        compiler = ["cc", "-O1", "-shared", "-fPIC", "-o", self._marks, HELPERS / "secret_marks.c"]
        done = subprocess.run(compiler, capture_output=True, text=True, check=False)
        if "memcheck.h: No such file" in done.stderr:
            pytest.skip("needs valgrind/memcheck.h")
        assert done.returncode == 0, done.stderr

    def run(self, module, cases):
        """Return what was found, after a look at the results."""
        module = module.resolve()
        asked, log = self._folder / "cases.json", self._folder / "log.xml"
        asked.write_text(json.dumps([describe(case, module) for case in cases]))
        command = ["valgrind", "-q", "--error-limit=no", "--num-callers=20", "--xml=yes", f"--xml-file={log}"]
        command += [sys.executable, "-I", "-S", HELPERS / "secret_calls.py", self._marks, asked]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        for case, got in zip(cases, json.loads(done.stdout), strict=True):
            assert got["returned"][-1] == case.result, case.name
            for name, expected in case.expected.items():
                assert bytes.fromhex(got["memory"][name])[: len(expected)] == expected, (case.name, name)
            assert {name: got["hidden"][name] for name in case.hidden} == case.hidden, case.name
        return read_log(log, module)


def describe(case, module):
    memory = {name: content.hex() if isinstance(content, bytes) else content for name, content in case.memory.items()}
    return {"name": case.name, "module": str(module), "memory": memory, "secret": case.secret, "calls": case.calls}


def read_log(path, module):
    """Return where memcheck found something in a module, or in functions of C that it called: addresses by case."""
    found, seen, name = defaultdict(set), set(), None
    for entry in ET.parse(path).getroot():
        if entry.tag == "clientmsg":
            name = entry.findtext("text").strip()
        elif entry.tag == "error":
            address = find_address(entry, str(module))
            if address not in {None, *seen}:
                found[name].add(address)
                seen.add(address)
    return found


def find_address(error, module):
    """Return the address of an error in a module, or None if it is in Python."""
    for frame in error.find("stack"):
        file = frame.findtext("obj", "")
        if file == module:
            return int(frame.findtext("ip"), 16)
        if "python" in Path(file).name:
            return None
    return None


@pytest.fixture(scope="module")
def memcheck(tmp_path_factory):
    return Memcheck(tmp_path_factory.mktemp("memcheck"))


@pytest.fixture
def build(tmp_path):
    """Makes one of the modules of `secret_builds`."""
    pytest.importorskip("numba")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def build(name):
        subprocess.run([sys.executable, "-m", "helpers.secret_builds", tmp_path / name], env=environment, check=True)
        return tmp_path / name

    return build


@pytest.fixture(scope="module")
def found(memcheck):
    """The addresses that were found in the module itself."""
    return memcheck.run(Path(native.load().__file__), cases_of("aesni"))


def test_sealing_and_keys_depend_on_no_secret(found):
    assert {name: places for name, places in found.items() if name not in VERDICTS} == {}


@each("name", VERDICTS)
def test_opening_branches_on_results_of_authentication_alone(found, name):
    assert 0 < len(found[name]) <= VERDICTS[name]


@pytest.mark.nightly
def test_nothing_is_found_where_these_results_are_public(memcheck, build):
    shown = build("shown.so")
    for form in ("aesni", WIDE):
        assert memcheck.run(shown, cases_of(form)) == {}, form


@pytest.mark.nightly  # a planted branch shows on each change that one is found
def test_a_branch_on_a_tag_is_more_than_may_be_found(memcheck, build):
    cases = [case for case in cases_of("aesni") if case.name in {"seal_run", "open_run"}]
    found = memcheck.run(build("leaky.so"), cases)
    assert len(found["seal_run"]) == 2  # copies
    assert len(found["open_run"]) == VERDICTS["open_run"] + 2


@pytest.mark.nightly
def test_a_planted_branch_and_a_planted_lookup_are_found(memcheck, build):
    memory = {"word": (1).to_bytes(8, "little"), "target": bytes(16)}
    cases = [
        Case(f"{function}, {what}", secret, memory, [(function, [["word"], ["target"]])])
        for what, secret in (("public", []), ("secret", ["word"]))
        for function in ("branch", "look_up")
    ]
    found = memcheck.run(build("planted.so"), cases)
    assert {name: len(places) for name, places in found.items()} == {"branch, secret": 1, "look_up, secret": 1}
