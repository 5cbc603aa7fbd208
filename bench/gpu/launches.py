"""The kernels, launched by hand: on memory that is on the device already, and from bytes to bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bench.gpu.gpu import WrongResultError
from fastrack._crypto.base import HostMemory
from fastrack._devices.cuda.buffers import KEY_SIZE, STATE_SIZE
from fastrack._devices.cuda.table import TableSegment, pack_table
from fastrack._devices.cuda.widening import widening_of
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE

GOOD = 2**64 - 1
_FENCE = 256
_GUARD = 0xA5
_POWERS = 513  # of H, for chunks of any size


class Launches:
    """Puts kernels on a stream of its own. Arguments are addresses on the device."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.stream = gpu.driver.stream(high_priority=False)
        self._staging = gpu.driver.host(1 << 16)

    def blocks(self, share, count):
        """Return fastrack's grid."""
        return max(1, min(count, int(share * self.gpu.driver.multiprocessors) * self.gpu.resident))

    def open(self, bits, blocks, state, sealed, target, first, count, size, verdict):
        table = pack_table([TableSegment(target, first, size, count, 0, 0)])
        self.gpu.launch(f"open_{bits}", blocks, (state, 0, sealed, count, 1, verdict), self.stream, table)

    def widen(self, bits, blocks, state, sealed, target, first, count, size, verdict, widening):
        table = pack_table([TableSegment(target, first, size, count, 0, 0)], [widening])
        self.gpu.launch(f"widen_{bits}", blocks, (state, 0, sealed, count, 1, verdict), self.stream, table)

    def seal(self, bits, blocks, *arguments):
        """State, source, sealed, first, count, size."""
        self.gpu.launch(f"seal_{bits}", blocks, arguments, self.stream)

    def gather(self, bits, blocks, state, sealed, target, plan, counts, verdicts):
        """`plan` is chunks, starts and table; `counts` are chunks, pieces, the message's and the result's bytes;
        `verdicts` are on the message and on the plan.
        """
        (count, pieces, total, limit), (verdict, plan_verdict) = counts, verdicts
        table = pack_table([TableSegment(target, 0, total, limit, 0, 0)])
        arguments = (state, 0, sealed, count, 1, verdict, *plan, pieces, plan_verdict)
        self.gpu.launch(f"gather_{bits}", blocks, arguments, self.stream, table)

    def wait(self):
        self.gpu.wait(self.stream)

    def put(self, pointer, content):
        content = np.frombuffer(content, np.uint8)
        if content.size:
            staged = self._staged(content.size)
            staged[:] = content
            self.gpu.upload(pointer, staged, self.stream)
            self.wait()

    def get(self, pointer, size):
        if not size:
            return b""
        staged = self._staged(size)
        self.gpu.download(staged, pointer, self.stream)
        self.wait()
        return staged.tobytes()

    def _staged(self, size):
        if self._staging.size < size:
            self._staging = self.gpu.driver.host(2 * size)
        return self._staging[:size]


@dataclass(frozen=True, slots=True)
class State:
    data: np.ndarray
    bits: int


class ByteRuns:
    """Runs of chunks from bytes to bytes. Every buffer on the device stands between fences, which must hold."""

    def __init__(self, gpu):
        self._launches = Launches(gpu)

    def prepare(self, key, nonce):
        """Have the device expand a message key, and return its state."""
        gpu, bits = self._launches.gpu, 8 * len(key)
        kind = (bits + (_POWERS << 16)).to_bytes(4, "little")
        row = self._fenced(KEY_SIZE, (key + nonce).ljust(KEY_SIZE - len(kind), b"\0") + kind)
        whole = self._fenced(STATE_SIZE, bytes(STATE_SIZE))
        gpu.launch("prepare", 1, (row.pointer, whole.pointer, 0, 0, 1), self._launches.stream)
        return State(np.frombuffer(whole.content(), np.uint8), bits)

    def open_run(self, state, sealed, first=0, *, blocks=1, offset=0, verdict=GOOD):
        """Open a run of chunks: the lowest bad number or None, and the plaintext."""
        count = -(-len(sealed) // SEALED_CHUNK_SIZE)
        size = len(sealed) - TAG_SIZE * count
        target, word = self._fenced(size, offset=offset), self._word(verdict)
        states, source = self._state(state), self._fenced(len(sealed), sealed)
        where = (states.pointer, source.pointer, target.pointer, first, count, size, word.pointer)
        self._launches.open(state.bits, blocks, *where)
        if source.content() != bytes(sealed):
            raise WrongResultError("a kernel wrote into what it was to open")
        return _verdict(word), target.content()

    def widen_run(self, state, sealed, scaling, first=0, *, blocks=1, offset=0):
        """Open and widen a run of chunks, with the bytes of all scales in `scaling`: as `open_run`."""
        count = -(-len(sealed) // SEALED_CHUNK_SIZE)
        size = len(sealed) - TAG_SIZE * count
        target, word = self._fenced(2 * size, offset=offset), self._word(GOOD)
        states, source = self._state(state), self._fenced(len(sealed), sealed)
        scales = self._fenced(len(scaling.memory), scaling.memory)
        memory = HostMemory(scales.pointer, len(scaling.memory), scales)
        widening = widening_of(replace(scaling, memory=memory), first * CHUNK_SIZE + size)
        where = (states.pointer, source.pointer, target.pointer, first, count, size, word.pointer)
        self._launches.widen(state.bits, blocks, *where, widening)
        return _verdict(word), target.content()

    def seal_run(self, state, plain, first=0, *, ends=True, blocks=1, offset=0):
        """Seal a run of chunks; `ends` adds the empty last chunk where the message needs one."""
        count = len(plain) // CHUNK_SIZE + 1 if ends else max(1, -(-len(plain) // CHUNK_SIZE))
        target, source = self._fenced(len(plain) + TAG_SIZE * count), self._fenced(len(plain), plain, offset)
        states = self._state(state)
        where = (states.pointer, source.pointer, target.pointer, first, count, len(plain))
        self._launches.seal(state.bits, blocks, *where)
        return target.content()

    def gather(self, state, packed, pieces, total, result_size, *, blocks=1, offset=0, plan_verdict=GOOD):
        """Scatter pieces of packed chunks: the lowest bad number or None, and the result."""
        target, word, trusted = self._fenced(result_size, offset=offset), self._word(GOOD), self._word(plan_verdict)
        states, source = self._state(state), self._fenced(len(packed), packed)
        parts = [part.tobytes() for part in (pieces.chunks, pieces.starts, pieces.table)]
        plan = [self._fenced(len(part), part) for part in parts]
        where = (states.pointer, source.pointer, target.pointer, [part.pointer for part in plan])
        counts = (len(pieces.chunks), len(pieces.table), total, result_size)
        self._launches.gather(state.bits, blocks, *where, counts, (word.pointer, trusted.pointer))
        return _verdict(word), target.content()

    def _fenced(self, size, content=None, offset=0):
        return _Fenced(self._launches, size, content, offset)

    def _state(self, state):
        return self._fenced(state.data.size, state.data.tobytes())

    def _word(self, value):
        return self._fenced(8, value.to_bytes(8, "little"))


class _Fenced:
    def __init__(self, launches, size, content, offset):
        self._launches = launches
        self._size, self._before = size, _FENCE + offset
        self._all = size + 2 * _FENCE + offset
        self._memory = launches.gpu.driver.memory(self._all)
        self.pointer = self._memory.pointer + self._before
        launches.gpu.fill(self._memory.pointer, _GUARD, self._all, launches.stream)
        if content is not None:
            launches.put(self.pointer, content)

    def content(self):
        """Return the content after all work of the stream."""
        memory = self._launches.get(self._memory.pointer, self._all)
        fences = memory[: self._before] + memory[self._before + self._size :]
        if fences != bytes([_GUARD]) * len(fences):
            raise WrongResultError("a kernel wrote outside its buffer")
        return memory[self._before : self._before + self._size]


def _verdict(word):
    number = int.from_bytes(word.content(), "little")
    return None if number == GOOD else number
