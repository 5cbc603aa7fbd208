"""The AArch64 form of the engine on an emulated CPU: compiled here, linked to a program in C, and run by QEMU."""

import atexit
import shutil
import struct
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from helpers.llvm import binding, ir  # first, as it skips tests where there is no llvmlite

# isort: split
from fastrack._crypto import isa, message_keys, vector
from fastrack._crypto.base import KeySchedule, check_buffers
from fastrack._crypto.cobblestone import DERIVED_SIZE, chunks_between
from fastrack.errors import ClosedError
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE
from fastrack_native import gcm_ir, gcm_ranges, gcm_reencrypt, hkdf_ir

TRIPLE = "aarch64-unknown-linux-gnu"
HARNESS = Path(__file__).parents[1] / "aarch64" / "harness.c"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
# With NEON, with SVE, and without AES but in the functions of the form, which is what the machine code is made for.
CPUS = ["neoverse-n1", "neoverse-v1", "generic"]
WORKS = {name: number for number, name in enumerate(["open", "verify", "seal", "reencrypt", "ranges", "derive"])}
RUNS = dict.fromkeys(["open", "verify", "seal"], gcm_ir.run_function)
RUNS |= {"reencrypt": gcm_reencrypt.reencrypt_function, "ranges": gcm_ranges.ranges_function}
_NEEDLES, ROWS = 64, 256
MESSAGES = 3 * ROWS // 2  # of a derivation, at most
_REQUEST = struct.Struct(f"<11Q48s{16 * _NEEDLES}s{24 * ROWS}s")
_ANSWER = struct.Struct("<qQ512s512s")


def compile_module(module, cpu):
    """Optimise a module for AArch64, as numba does; return it parsed, and LLVM's machine to emit code with.

    All CPUs have AES but "generic".
    """
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    target = binding.Target.from_triple(TRIPLE)
    features = "" if cpu == "generic" else "+aes"
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="static", codemodel="small")
    parsed = binding.parse_assembly(str(module))
    parsed.triple = TRIPLE
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return parsed, machine


def make_module():
    """Make a module of all functions of the form."""
    module = ir.Module()
    functions = [gcm_ir.stack_wiper(module), hkdf_ir.derive_function(module, isa.INSTRUCTION_SETS["armv8"])]
    for bits in (128, 256):
        variant = gcm_ir.Variant(bits, isa.INSTRUCTION_SETS["armv8"])
        functions.append(gcm_ir.chunk_function(module, variant, "expand_key"))
        functions += [build(module, variant, name) for name, build in RUNS.items()]
    for function in functions:
        function.linkage = "external"
    return module


class Answer(NamedTuple):
    """The result of a call of the harness. `found` counts the needles on its stack."""

    result: int
    found: int
    registers: tuple[bytes, bytes]  # after the key was expanded, and after the run
    target: bytes


@cache
def build(cpu):
    """Build the program with the code for a CPU, and return its path, which exists until this process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    code, program = Path(folder.name, "code.o"), Path(folder.name, "harness")
    parsed, machine = compile_module(make_module(), cpu)
    code.write_bytes(machine.emit_object(parsed))
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, "-O1", *warnings, "-static", HARNESS, code, "-o", program], check=True)
    return program


class Harness:
    """The program with the code for a CPU, in QEMU. Calls from several threads take turns."""

    def __init__(self, cpu):
        command = [EMULATOR, "-cpu", "max", build(cpu)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock = threading.Lock()

    def call(
        self, work, material, source=b"", target=0, run=(0, 0, 0), *, at_end=True, wipes=True, needles=(), rows=b""
    ):
        """Run on a key and a nonce: `run` is the first chunk, the number of chunks, and the bytes of plaintext."""
        key_bits = 8 * (len(material) - (0 if work == "derive" else 12))
        sizes = (len(source), target, at_end, wipes, len(needles), len(rows) // 24)
        assert len(rows) <= 24 * ROWS
        with self._lock:
            process = self._process
            process.stdin.write(_REQUEST.pack(WORKS[work], key_bits, *run, *sizes, material, b"".join(needles), rows))
            process.stdin.write(source)
            process.stdin.flush()
            head = process.stdout.read(_ANSWER.size)
            if len(head) < _ANSWER.size:
                raise ChildProcessError(f"the program ended with {process.wait()}")
            result, found, *registers = _ANSWER.unpack(head)
            return Answer(result, found, tuple(registers), process.stdout.read(target))

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def start(cpu):
    """Return the harness for a CPU, started once in this process."""
    harness = Harness(cpu)
    atexit.register(harness.close)
    return harness


class EmulatedSchedule(KeySchedule):
    """A message key, expanded anew for each call."""

    material = bytearray()

    def __init__(self, material):
        self.material = bytearray(material)
        self.wiped = False

    def wipe(self):
        self.wiped = True
        self.material[:] = bytes(len(self.material))


class EmulatedEngine:
    """An `Engine` whose runs of chunks are processed by a harness. Gathers are divided into chunks here."""

    name = "armv8-emulated"

    def __init__(self, harness, threads=1):
        self.threads = threads
        self._harness = harness
        self._calls = 0

    def derive_keys(self, secret, headers, contexts, rows, target):
        message_keys.check_rows(rows, target)
        bad = None
        for start in range(0, len(rows), MESSAGES):
            part = slice(start, start + MESSAGES)
            count = len(rows[part])
            text, table = vector.derivation_table(secret, headers[part], contexts[part], range(count))
            answer = derive(self._harness, secret, text, table, count, at_end=bool(self._calls % 2))
            self._calls += 1
            for index, row in enumerate(rows[part]):
                target[row * DERIVED_SIZE :][:DERIVED_SIZE] = answer.target[index * DERIVED_SIZE :][:DERIVED_SIZE]
            if bad is None and answer.result < count:
                bad = start + answer.result
        return bad

    def expand_key(self, key):
        return EmulatedSchedule(key.material)

    def open_run(self, schedule, source, target, first):
        check_buffers(source, target)
        count = chunks_between(source.size, target.size, first)
        return self._run("open", schedule, source, target, (first, count, target.size))

    def verify_run(self, schedule, source, first):
        check_buffers(source)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        return self._run("verify", schedule, source, None, (first, chunks_between(source.size, size, first), size))

    def seal_run(self, schedule, source, target, first):
        check_buffers(source, target)
        count = chunks_between(target.size, source.size, first)
        self._run("seal", schedule, source, target, (first, count, source.size))

    def reencrypt_run(self, schedule, source, target, first):
        check_buffers(source, target)
        assert source.size == target.size
        count = -(-source.size // CHUNK_SIZE)
        return self._run("reencrypt", schedule, source, target, (first, count, source.size))

    def open_jobs(self, jobs):
        """Seal and open the plaintext of one message, the only kind of job that is emulated."""
        (memory,), (plain,) = jobs.memories, jobs.plain
        material = jobs.keys.memory[0, : jobs.keys.bits[0] // 8 + 12]  # and the nonce
        bad = self.reencrypt_run(EmulatedSchedule(material.tobytes()), plain.array, memory.array, 0)
        return None if bad is None else (0, bad)

    def open_gather(self, schedule, source, target, plan):
        check_buffers(source, target)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        plan.locate(source.size, size, target.size)
        bad = []
        for index, chunk in enumerate(plan.chunks.tolist()):
            length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
            sealed = source[chunk * SEALED_CHUNK_SIZE :][: length + TAG_SIZE]
            table = plan.table[plan.starts[index] : plan.starts[index + 1]]
            for start in range(0, max(len(table), 1), ROWS):
                rows = table[start : start + ROWS].copy()
                # The harness returns all of its target, so the ranges of a chunk are laid end to end there.
                places = rows[:, 1].copy()
                rows[:, 1] = np.cumsum(rows[:, 2]) - rows[:, 2]
                opened = np.empty(int(rows[:, 2].sum()), np.uint8)
                if self._run("ranges", schedule, sealed, opened, (chunk, 1, length), rows.tobytes()) is not None:
                    bad.append(chunk)
                for place, (_, offset, extent) in zip(places.tolist(), rows.tolist(), strict=True):
                    target[place : place + extent] = opened[offset : offset + extent]
        return min(bad, default=None)

    def _run(self, work, schedule, source, target, run, rows=b""):
        if schedule.wiped:
            raise ClosedError("expected a key schedule, got a wiped one; expand the message key again")
        self._calls += 1
        size = 0 if target is None else target.size
        answer = self._harness.call(
            work, bytes(schedule.material), source.tobytes(), size, run, at_end=bool(self._calls % 2), rows=rows
        )
        if target is not None:
            target[:] = np.frombuffer(answer.target, np.uint8)
        first, count, _ = run
        return None if work == "seal" or answer.result == count else first + answer.result


def derive(harness, secret, text, table, count, **options):
    """Derive keys of that text and table: the result is the first message whose commitment differs, or the count."""
    rows = table.tobytes()
    rows += bytes(-len(rows) % 24)
    return harness.call("derive", bytes(secret), text, count * DERIVED_SIZE, (0, count, 0), rows=rows, **options)
