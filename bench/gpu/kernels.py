"""Measure the kernels on memory of the device and by its clock, next to a copy from the device to itself."""

import os

import numpy as np

from bench.gpu.gpu import WrongResultError
from bench.gpu.host_data import noise, require_same, sets_of
from bench.gpu.launches import GOOD, TICKET, TOLD_SIZE, VERDICT_SIZE, ByteRuns, Launches
from bench.gpu.plan import MIB, fraction, size_of
from bench.gpu.timing import Row, interleave, on_device
from fastrack.format import CHUNK_SIZE, NONCE_SIZE, chunk_count, ciphertext_size

COPY = "copy on the device"
_AHEAD = 1 << 30  # bytes that are filled while the runs are queued
_TILE = 64 * MIB


def measure(gpu, plan):
    launches = Launches(gpu)
    scratch = launches.gpu.driver.memory(_ahead_of(plan))
    tile = launches.gpu.driver.host(min(_TILE, max(plan.kernel_sizes)))
    tile[:] = noise(tile.size)
    for size in plan.kernel_sizes:
        for bits in (128, 256):
            print(f"    {size_of(size)}, AES-{bits}")
            yield from _Case(launches, size, bits, tile, scratch, plan).rows()


def _ahead_of(plan):
    return min(_AHEAD, 4 * max(plan.kernel_sizes))


class _Case:
    """Sets of buffers of one size, under one key."""

    def __init__(self, launches, size, bits, tile, scratch, plan):
        self._launches, self._size, self._bits, self._plan = launches, size, bits, plan
        self._scratch, self._tile = scratch, tile
        self._count = chunk_count(size)
        gpu = launches.gpu
        runs = ByteRuns(gpu)
        state = runs.prepare(os.urandom(bits // 8), os.urandom(NONCE_SIZE))
        self._link, self._row = runs.link, runs.wrap([state.row(size)])
        self._state = gpu.driver.memory(len(state.data))
        launches.put(self._state.pointer, state.data)
        self._group = max(1, plan.group // size)
        self._sets = [_Set(gpu, size) for _ in range(max(self._group, sets_of(size, plan, most=4 * self._group)))]
        for buffers in self._sets:
            self._fill(buffers)

    def rows(self):
        measured = interleave(self._runs(), self._plan)
        self._require_right()
        for (path, share), times in measured.items():
            settings = {"share": share} if share else {}
            yield Row("kernels", path, self._size, times, {"bits": self._bits, **settings})

    def _runs(self):
        runs = {}
        for share in self._plan.kernel_shares:
            blocks = self._launches.blocks(share, self._count)
            runs["open", fraction(share)] = lambda _, blocks=blocks: self._time(self._open, blocks)
            runs["seal", fraction(share)] = lambda _, blocks=blocks: self._time(self._seal, blocks)
        runs[COPY, None] = lambda _: self._time(self._copy, None)
        return runs

    def _time(self, job, blocks):
        jobs = [lambda buffers=buffers: job(buffers, blocks) for buffers in self._sets]
        return on_device(self._launches.gpu, self._launches.stream, jobs, self._group, self._ahead)

    def _ahead(self):
        for _ in range(4):
            self._launches.gpu.fill(self._scratch.pointer, 0, _ahead_of(self._plan), self._launches.stream)

    def _open(self, each, blocks):
        keys, where = (self._state.pointer, 0), (each.sealed.pointer, each.target.pointer, 0, self._count, self._size)
        self._launches.open(f"open_{self._bits}", blocks, keys, *where, each.words.pointer)

    def _seal(self, each, blocks):
        where = (each.plain.pointer, each.sealed.pointer, 0, self._count, self._size)
        told = each.words.pointer + VERDICT_SIZE
        self._launches.seal(self._bits, blocks, self._link.pointer, self._row, *where, each.words.pointer, told)

    def _copy(self, each, _):
        self._launches.gpu.copy(each.target.pointer, each.plain.pointer, self._size, self._launches.stream)

    def _fill(self, each):
        """Random plaintext, its ciphertext, and no bad chunk so far."""
        gpu, stream = self._launches.gpu, self._launches.stream
        for start in range(0, self._size, self._tile.size):
            part = self._tile[: min(self._tile.size, self._size - start)]
            gpu.upload(each.plain.pointer + start, part, stream)
        gpu.fill(each.words.pointer, 0xFF, VERDICT_SIZE, stream)
        self._seal(each, self._launches.blocks(1, self._count))
        self._launches.wait()

    def _require_right(self):
        """Open every set once more, into memory that holds something else."""
        gpu, launches = self._launches.gpu, self._launches
        part = self._tile[: min(self._size, self._tile.size)]
        for buffers in self._sets:
            gpu.fill(buffers.target.pointer, 0x5A, self._size, launches.stream)
            self._open(buffers, launches.blocks(1, self._count))
            words = np.frombuffer(launches.get(buffers.words.pointer, VERDICT_SIZE), np.uint64).tolist()
            if words != [GOOD, GOOD, TICKET, GOOD, GOOD]:
                raise WrongResultError(f"a chunk of {size_of(self._size)} was refused, though it was not altered")
        last = self._sets[-1].target.pointer
        require_same("the kernels", gpu, last, part, launches.stream)
        tail = (self._size - 1) // CHUNK_SIZE * CHUNK_SIZE
        offset = tail % self._tile.size
        ending = self._tile[offset : offset + self._size - tail]
        require_same("the kernels", gpu, last + tail, ending, launches.stream)


class _Set:
    def __init__(self, gpu, size):
        self.plain, self.target = gpu.driver.memory(size), gpu.driver.memory(size)
        self.sealed, self.words = (
            gpu.driver.memory(each) for each in (ciphertext_size(size), VERDICT_SIZE + TOLD_SIZE)
        )
