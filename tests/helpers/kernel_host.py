"""The CUDA kernels on the host: compiled by g++ through the shim, and called as the device side would call them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastrack._crypto.base import HostMemory
from fastrack._devices.cuda.gather_plan import join_plans
from fastrack._devices.cuda.table import TableSegment, name_of, pack_table, widening_of
from helpers import reference
from helpers.buffers import Fenced
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "kernels/fastrack.cu"
SHIM = ROOT / "tests/kernels/shim"
COMPILER = "g++"
COMMON = ("-std=c++17", "-fPIC", "-fno-strict-aliasing")
# Which run as fast, and compile in a seventh of the time.
QUICK = ("-O1", "-D__forceinline__=inline")
GOOD = 2**64 - 1
CALL, LINK = 1, 2**32 - 1  # the number of a call, and what the state of the link has in its place
TICKET, PLAN = CALL << 32, 1 << 63
LINK_KEY, LINK_NONCE = bytes(range(90, 122)), bytes(range(30, 42))
LINK_NUMBER = (1 << 33) + 5  # of the first chunk of wrapped keys


def build(source, folder, clmad=0):
    """Compile a .cu file into a library in `folder`, or take the one that is there: its path.

    `clmad` is the kernels' FASTRACK_CLMAD.
    """
    headers = source.parent if (source.parent / SOURCE.name).is_file() else SOURCE.parent
    digest = hashlib.sha256(repr((COMMON, QUICK)).encode())
    for path in (source, *sorted(headers.glob("*.cu*")), *sorted(SHIM.glob("shim.*"))):
        digest.update(path.read_bytes())
    name = f"{headers.name}-{source.stem}-clmad{clmad}"
    library = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    kernels, linked = (folder / f"{os.getpid()}-{library.name}{end}" for end in (".cu.o", ""))
    head = (*COMMON, *QUICK, "-Wno-unknown-pragmas", "-I", headers, "-include", SHIM / "shim.h", "-x", "c++")
    try:
        _compile(*head, f"-DFASTRACK_CLMAD={clmad}", "-c", source, "-o", kernels)
        _compile(*COMMON, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", kernels, SHIM / "shim.cpp", "-o", linked)
        for old in folder.glob(f"{name}-*.so"):
            old.unlink(missing_ok=True)
        linked.replace(library)
    finally:
        for path in (kernels, linked):
            path.unlink(missing_ok=True)
    return library


def is_there():
    return shutil.which(COMPILER) is not None


def constants(source):
    """The sizes that the kernels declare, by name."""
    lines = re.findall(r"^#define FASTRACK_(\w+) (\d+)$", source.read_text(), re.MULTILINE)
    return {name: int(value) for name, value in lines}


def _compile(*arguments):
    done = subprocess.run([COMPILER, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True, slots=True)
class Library:
    """A library that `build` made. `launch` runs one kernel of it over a grid."""

    shared: ctypes.CDLL

    @classmethod
    def load(cls, path):
        shared = ctypes.CDLL(str(path))
        shared.shim_launch.restype = ctypes.c_char_p
        shared.shim_remains.restype = ctypes.c_void_p
        return cls(shared)

    def launch(self, kernel, *arguments, grid=1, threads=512, shared=0, first=0):
        """Run the blocks of a grid from number `first` on. An array among the arguments stands for its address."""
        values = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
        complaint = self.shared.shim_launch(
            ctypes.cast(getattr(self.shared, kernel), ctypes.c_void_p),
            (ctypes.c_uint64 * len(values))(*values),
            *map(ctypes.c_uint64, (len(values), first, grid, threads, shared)),
        )
        assert complaint is None, f"{kernel}: {complaint.decode()}"

    def remains(self, size):
        """Return the shared memory as the last block of the last launch left it."""
        return ctypes.string_at(self.shared.shim_remains(), size)


class Host:
    """fastrack's kernels under the shim. Every buffer has its exact size and stands between fences."""

    def __init__(self, library, sizes):
        self._library = library
        self._sizes = sizes

    def prepare(self, key, nonce):
        """Expand a message key, without the kernel that does it."""
        return State(read_only(Fenced.holding(reference.kernel_state(key, nonce, CALL), 16)), 8 * len(key))

    @property
    def link(self):
        """The state of the key that wraps others."""
        state = reference.kernel_state(LINK_KEY, LINK_NONCE, LINK)
        return read_only(Fenced.holding(state, 16))

    def open_run(self, state, sealed, first=0, *, blocks=1, offset=0, verdict=GOOD, size=None):
        """Open a run of chunks: the lowest bad number or None, and the plaintext.

        `size` is the size of a longer run, of which `sealed` holds the first chunks.
        """
        count = count_of(sealed)
        target = Fenced(size_of(sealed), offset)
        words = verdict_words(verdict)
        source = read_only(Fenced.holding(sealed, 16))
        table = table_at(target.data, first, size or size_of(sealed), count)
        arguments = (state.data, 0, source, count, 1, words.data, TICKET, table)
        self.launch(f"open_{state.bits}", *arguments, grid=blocks)
        assert target.stands
        return verdict_of(words), target.data.tobytes()

    def widen_run(self, state, sealed, scaling, first=0, *, blocks=1, offset=0):
        """Open and widen a run of chunks, with the bytes of all scales in `scaling`: as `open_run`."""
        segments = [(0, first, sealed, scaling)]
        verdict, (wide,) = self.widen_nest(state.data, state.bits, segments, blocks=blocks, offset=offset)
        return verdict, wide

    def widen_nest(self, states, bits, segments, *, blocks=1, offset=0):
        """Open and widen segments of several messages, given as (message, first chunk, sealed, scaling)."""
        places, packed = pack_nest(sealed for _, _, sealed, _ in segments)
        targets, scales, rows, widenings, start = [], [], [], [], 0
        for (message, first, sealed, scaling), place in zip(segments, places, strict=True):
            count, size = count_of(sealed), size_of(sealed)
            target = Fenced(2 * size, offset + 2 * len(rows))
            memory = HostMemory.of(read_only(Fenced.holding(scaling.memory, 4)))
            row = TableSegment(target.data.ctypes.data, name_of(message, first), size, count, start, place // 16)
            rows.append(row)
            widenings.append(widening_of(replace(scaling, memory=memory), first * CHUNK_SIZE + size))
            targets.append(target)
            scales.append(memory.owner)
            start += count
        words = verdict_words()
        source, table = read_only(Fenced.holding(packed, 16)), table_of(*rows, widenings=widenings)
        mask = states.size // self._sizes["STATE_BYTES"] - 1
        arguments = (states, mask, source, start, len(rows), words.data, TICKET, table)
        self.launch(f"widen_{bits}", *arguments, grid=blocks)
        assert all(each.stands for each in targets)
        return verdict_of(words), [each.data.tobytes() for each in targets]

    def seal_run(self, state, plain, first=0, *, ends=True, blocks=1, offset=0, size=None):
        """Seal a run of chunks; `ends` adds the empty last chunk where the message needs one.

        `size` is the size of a longer run, of which `plain` holds the first chunks.
        """
        count = len(plain) // CHUNK_SIZE + 1 if ends else max(1, -(-len(plain) // CHUNK_SIZE))
        target = Fenced(len(plain) + count * TAG_SIZE, 16)
        source = read_only(Fenced.holding(plain, offset))
        words, told = verdict_words(), Fenced(16, 16)
        arguments = (source, target.data, first, count, size or len(plain), words.data, TICKET, told.data)
        self.launch(f"seal_{state.bits}", self.link, LINK_NUMBER, *arguments, wrap([state.row]), grid=blocks)
        assert target.stands
        assert verdict_of(words) is None
        assert told.stands
        assert told.data.view(np.uint64).tolist() == [TICKET, GOOD]
        return target.data.tobytes()

    def gather(self, state, packed, pieces, total, result_size, *, blocks=1, offset=0, plan_verdict=GOOD):
        """Scatter pieces of packed chunks: the lowest bad number or None, and the result.

        What no piece names keeps the 0xA5 that it held before.
        """
        target = Fenced(result_size, offset)
        table = table_at(target.data, 0, total, result_size)
        count, source = len(pieces.chunks), read_only(Fenced.holding(packed, 16))
        words = self._gather(state.bits, (state.data, 0, source, count, 1), pieces, table, plan_verdict, blocks)
        assert target.stands
        return verdict_of(words, TICKET + 1), target.data.tobytes()

    def _gather(self, bits, before, plan, table, plan_verdict, blocks):
        """Launch a gather after a launch that has opened its plan with that verdict."""
        words = verdict_words(GOOD, plan_verdict, TICKET, opened=TICKET)
        arrays = np.concatenate([part.reshape(-1) for part in (plan.chunks, plan.starts, plan.table)])
        opened = read_only(Fenced.holding(arrays.astype(np.int64).tobytes(), 8))
        arguments = (*before, words.data, TICKET + 1, opened, len(plan.table), table)
        self.launch(f"gather_{bits}", *arguments, grid=blocks)
        return words

    def prepare_all(self, keys, *, first=0, count=None, slots=None, powers=513, blocks=1):
        """Expand keys by the kernel, given as pairs of a key and a nonce: the states, of which there are `slots`."""
        rows = read_only(Fenced.holding(b"".join(key_row(*pair, powers) for pair in keys), 16))
        slots = slots or 1 << (len(keys) - 1).bit_length()
        states = Fenced(slots * self._sizes["STATE_BYTES"], 16)
        states.data[:] = 0xA5
        count = len(keys) - first if count is None else count
        self.launch("prepare", rows, states.data, slots - 1, first, count, CALL, grid=blocks)
        assert states.stands
        return read_only(states)

    def open_nest(self, states, bits, segments, *, blocks=1, alter=list):
        """Open segments of several messages, given as (message, first chunk, sealed): verdict and plaintexts.

        `alter` may change the rows of the table.
        """
        places, packed = pack_nest(sealed for _, _, sealed in segments)
        targets = [Fenced(size_of(sealed), index % 16) for index, (_, _, sealed) in enumerate(segments)]
        rows, start = [], 0
        for (message, first, sealed), target, place in zip(segments, targets, places, strict=True):
            name, count = name_of(message, first), count_of(sealed)
            rows.append(TableSegment(target.data.ctypes.data, name, target.data.size, count, start, place // 16))
            start += count
        words = verdict_words()
        source, table = read_only(Fenced.holding(packed, 16)), table_of(*alter(rows))
        mask = states.size // self._sizes["STATE_BYTES"] - 1
        arguments = (states, mask, source, start, len(rows), words.data, TICKET, table)
        self.launch(f"open_{bits}", *arguments, grid=blocks)
        assert all(each.stands for each in targets)
        return verdict_of(words), [each.data.tobytes() for each in targets]

    def gather_nest(self, states, bits, segments, *, blocks=1, plan_verdict=GOOD, change=lambda plan: None):
        """Gather from several messages, given as (message, bytes, packed chunks, plan, bytes of the result).

        Returns the verdict and the results. `change` may change the arrays of the plan of all of them.
        """
        places, packed = pack_nest(chunks for _, _, chunks, _, _ in segments)
        targets = [Fenced(size, index % 16) for index, (*_, size) in enumerate(segments)]
        rows, start = [], 0
        for (message, total, _, pieces, _), target, place in zip(segments, targets, places, strict=True):
            address, limit = target.data.ctypes.data, target.data.size
            rows.append(TableSegment(address, name_of(message, 0), total, limit, start, place // 16))
            start += len(pieces.chunks)
        plan = join_plans([pieces for *_, pieces, _ in segments])
        change(plan)
        source, table = read_only(Fenced.holding(packed, 16)), table_of(*rows)
        mask = states.size // self._sizes["STATE_BYTES"] - 1
        words = self._gather(bits, (states, mask, source, start, len(rows)), plan, table, plan_verdict, blocks)
        assert all(each.stands for each in targets)
        return verdict_of(words, TICKET + 1), [each.data.tobytes() for each in targets]

    def run_last(self, state, kernel, *arguments, blocks):
        """Run only the last block of a grid, on buffers as they are."""
        first = (self.link, LINK_NUMBER) if kernel == "seal" else (state.data, 0)
        self.launch(f"{kernel}_{state.bits}", *first, *arguments, grid=blocks, first=blocks - 1)

    def remains(self):
        """Return the shared memory as the last launch left it."""
        return self._library.remains(self._sizes["PICK_SHARED_BYTES"])

    def launch(self, kernel, *arguments, **options):
        """Launch a kernel as a device does."""
        kind = kernel.partition("_")[0]
        own = {"gather": "GATHER_", "pick": "PICK_", "small": "SMALL_", "seal": "SMALL_", "unwrap": "SMALL_"}
        sizes = {"threads": self._sizes["THREADS"], "shared": self._sizes[f"{own.get(kind, '')}SHARED_BYTES"]}
        self._library.launch(kernel, *arguments, **sizes, **options)


@dataclass(frozen=True, slots=True)
class State:
    data: np.ndarray
    bits: int

    @property
    def row(self):
        """The row of the key, before it is wrapped."""
        state = self.data.tobytes()
        return wrapped_row(state[: self.bits // 8], state[240:252])


def key_row(key, nonce, powers):
    """A message key as the kernel `prepare` takes it."""
    return (key + nonce).ljust(44, b"\xa5") + (8 * len(key) + (powers << 16)).to_bytes(4, "little")


def wrapped_row(key, nonce, message=0, powers=513):
    """A message key as it is wrapped, with the number of its message."""
    return (key_row(key, nonce, powers) + message.to_bytes(4, "little")).ljust(64, b"\0")


def wrap(rows, number=LINK_NUMBER):
    """Seal rows under the key of the link."""
    plain = b"".join(rows)
    sealed = b"".join(
        reference.seal(LINK_KEY, LINK_NONCE, plain[start : start + CHUNK_SIZE], number + index, ends=False)
        for index, start in enumerate(range(0, len(plain), CHUNK_SIZE))
    )
    return read_only(Fenced.holding(sealed, 16))


def pack_nest(parts):
    """Lay the chunks of segments side by side, at multiples of 16: their places, and the bytes."""
    places, packed = [], b""
    for part in parts:
        packed += bytes(-len(packed) % 16)
        places.append(len(packed))
        packed += part
    return places, packed


def table_of(*segments, widenings=()):
    """A table of segments, which no kernel may write."""
    return read_only(Fenced.holding(pack_table(segments, widenings), 16))


def table_at(memory, name, size, count):
    """Make a table of one segment, at the first byte of this memory."""
    return table_of(TableSegment(memory.ctypes.data, name, size, count, 0, 0))


def read_only(fenced):
    fenced.data.flags.writeable = False
    return fenced.data


def verdict_words(lowest=GOOD, plan=GOOD, ticket=GOOD, *, opened=GOOD, ended=0):
    """The verdict on a call, before a launch of which so many blocks have ended."""
    words = [lowest, plan, ticket, (ended - 1) % 2**64, opened]
    return Fenced.holding(np.array(words, np.uint64).tobytes(), 16)


def verdict_of(fenced, ticket=TICKET):
    """Read a verdict after the launch with that ticket: the lowest bad name, or None."""
    assert fenced.stands
    lowest, _, last, ended, _ = fenced.data.view(np.uint64).tolist()
    assert (last, ended) == (ticket, GOOD)
    return None if lowest == GOOD else lowest


def count_of(sealed):
    return -(-len(sealed) // SEALED_CHUNK_SIZE)


def size_of(sealed):
    return len(sealed) - TAG_SIZE * count_of(sealed)


def pack(sealed, chunks):
    """Return those chunks of a message, each at a multiple of 16400. Nothing follows the last."""
    parts = [sealed[chunk * SEALED_CHUNK_SIZE : (chunk + 1) * SEALED_CHUNK_SIZE] for chunk in chunks]
    return b"".join([part.ljust(SEALED_CHUNK_SIZE, b"\0") for part in parts[:-1]] + parts[-1:])
