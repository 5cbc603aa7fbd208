"""The kernels, launched by hand: on memory that is on the device already, and from bytes to bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.gpu.gpu import WrongResultError
from fastrack._crypto.base import HostMemory
from fastrack._crypto.cobblestone import chunk_nonce
from fastrack._devices.cuda.link import KEY_SIZE, LINK_CALL, ROW_SIZE, STATE_SIZE
from fastrack._devices.cuda.table import TableSegment, pack_table, widening_of
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.tables import paged_launches
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, ciphertext_size

GOOD = 2**64 - 1
CALL = 1
TICKET = CALL << 32  # of the first launch of that call, which every launch here is, but for gathers
VERDICT_SIZE = 40  # bytes of `Verdict` in ``kernels/verdict.cuh``
TOLD_SIZE = 16  # bytes that a launch of `seal` leaves: its ticket and the lowest bad name
ROW_NUMBER = (1 << 33) + 5  # of the first chunk of wrapped keys
_ROWS_BEFORE = CHUNK_SIZE // ROW_SIZE + 1  # so that a row lies in the second chunk, between two others
_FENCE = 256
_GUARD = 0xA5
_POWERS = 513  # of H, for chunks of any size


class Launches:
    """Puts kernels on a stream of its own. Arguments are addresses on the device.

    `keys` are the first arguments of a kernel: a state and 0, or those that describe wrapped keys. `words` is where the
    verdict is.
    """

    def __init__(self, gpu):
        self.gpu = gpu
        self.stream = gpu.driver.stream(high_priority=False)
        self._staging = gpu.driver.host(1 << 16)

    def blocks(self, share, count):
        """Return fastrack's grid."""
        return max(1, min(count, int(share * self.gpu.driver.multiprocessors) * self.gpu.resident))

    def open(self, kernel, blocks, keys, sealed, target, first, count, size, words, widenings=()):
        """Launch `open`, `small` or, with a widening, `widen`."""
        table = pack_table([TableSegment(target, first, size, count, 0, 0)], widenings)
        self.gpu.launch(kernel, blocks, (*keys, sealed, count, 1, words, TICKET), self.stream, table)

    def seal(self, bits, blocks, link, row, *arguments):
        """Launch `seal`. `link` is the state of the key that `row`, 80 bytes on the host, is wrapped under; then follow
        source, sealed, first, count, size, words, and where 16 bytes are told.
        """
        *before, told = arguments
        self.gpu.launch(f"seal_{bits}", blocks, (link, ROW_NUMBER, *before, TICKET, told), self.stream, row)

    def gather(self, kernel, blocks, keys, sealed, target, plan, counts, words):
        """Launch `gather` or `pick`. `plan` is chunks, starts and table, and was opened before; `counts` are chunks,
        pieces, the message's and the result's bytes.
        """
        count, pieces, total, limit = counts
        table = pack_table([TableSegment(target, 0, total, limit, 0, 0)])
        arguments = (*keys, sealed, count, 1, words, TICKET + 1, plan, pieces)
        self.gpu.launch(kernel, blocks, arguments, self.stream, table)

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

    def row(self, size):
        """Return the row of its key, for a message of so many bytes, before it is wrapped."""
        state, powers = self.data.tobytes(), -(-min(size, CHUNK_SIZE) // 16) + 1
        return _key_row(state[: self.bits // 8], state[240:252], powers).ljust(ROW_SIZE, b"\0")


class ByteRuns:
    """Runs of chunks from bytes to bytes. Every buffer on the device stands between fences, which must hold.

    `small_run`, `seal_run` and `pick` wrap the key of a state for the device, under a key of a link of their own.
    `altered` is XORed into the last byte of what was wrapped.
    """

    def __init__(self, gpu):
        self._launches = Launches(gpu)
        self._link_key, self._link_nonce = os.urandom(32), os.urandom(12)

    def prepare(self, key, nonce):
        """Have the device expand a message key, and return its state."""
        return State(np.frombuffer(self._prepare(key, nonce, CALL).content(), np.uint8), 8 * len(key))

    def unwrap(self, key, nonce, altered=0):
        """Have the device unwrap and expand a message key, and return its state: zeros for a row that was altered."""
        gpu, whole = self._launches.gpu, self._fenced(STATE_SIZE, bytes(STATE_SIZE))
        keys, kept = self._wrapped(_key_row(key, nonce).ljust(ROW_SIZE, b"\0"), altered)
        gpu.launch("unwrap", 1, (*keys, whole.pointer, 0, 1, CALL), self._launches.stream)
        kept.content()
        return State(np.frombuffer(whole.content(), np.uint8), 8 * len(key))

    @cached_property
    def link(self):
        """The state of the link's key, on the device."""
        return self._prepare(self._link_key, self._link_nonce, LINK_CALL)

    def wrap(self, rows):
        """Seal rows under the link's key."""
        plain, cipher = b"".join(rows), AESGCM(self._link_key)
        return b"".join(
            cipher.encrypt(chunk_nonce(self._link_nonce, ROW_NUMBER + index), plain[start : start + CHUNK_SIZE], None)
            for index, start in enumerate(range(0, len(plain), CHUNK_SIZE))
        )

    def open_run(self, state, sealed, first=0, *, blocks=1, offset=0, verdict=GOOD):
        """Open a run of chunks: the lowest bad number or None, and the plaintext."""
        states = self._state(state)
        return self._open(f"open_{state.bits}", (states.pointer, 0), sealed, first, blocks, offset, verdict)

    def small_run(self, state, sealed, first=0, *, blocks=1, offset=0, altered=0):
        """Open a run of chunks under the wrapped key of a state: as `open_run`."""
        keys, kept = self._wrapped(state.row(len(sealed)), altered)
        found = self._open(f"small_{state.bits}", keys, sealed, first, blocks, offset)
        kept.content()
        return found

    def _open(self, kernel, keys, sealed, first, blocks, offset, verdict=GOOD):
        count = -(-len(sealed) // SEALED_CHUNK_SIZE)
        size = len(sealed) - TAG_SIZE * count
        target, words = self._fenced(size, offset=offset), self._words(verdict)
        source = self._fenced(len(sealed), sealed)
        where = (source.pointer, target.pointer, first, count, size, words.pointer)
        self._launches.open(kernel, blocks, keys, *where)
        if source.content() != bytes(sealed):
            raise WrongResultError("a kernel wrote into what it was to open")
        return _verdict(words, TICKET), target.content()

    def widen_run(self, state, sealed, scaling, first=0, *, blocks=1, offset=0):
        """Open and widen a run of chunks, with the bytes of all scales in `scaling`: as `open_run`."""
        count = -(-len(sealed) // SEALED_CHUNK_SIZE)
        size = len(sealed) - TAG_SIZE * count
        target, words = self._fenced(2 * size, offset=offset), self._words()
        states, source = self._state(state), self._fenced(len(sealed), sealed)
        scales = self._fenced(len(scaling.memory), scaling.memory)
        memory = HostMemory(scales.pointer, len(scaling.memory), scales)
        widening = widening_of(replace(scaling, memory=memory), first * CHUNK_SIZE + size)
        where = ((states.pointer, 0), source.pointer, target.pointer, first, count, size, words.pointer)
        self._launches.open(f"widen_{state.bits}", blocks, *where, [widening])
        return _verdict(words, TICKET), target.content()

    def seal_run(self, state, plain, first=0, *, ends=True, blocks=1, offset=0, altered=0):
        """Seal a run of chunks; `ends` adds the empty last chunk where the message needs one.

        Where the device tells a bad name, that is returned.
        """
        count = len(plain) // CHUNK_SIZE + 1 if ends else max(1, -(-len(plain) // CHUNK_SIZE))
        target, source = self._fenced(len(plain) + TAG_SIZE * count), self._fenced(len(plain), plain, offset)
        words, told = self._words(), self._fenced(TOLD_SIZE)
        row = _flip_last(self.wrap([state.row(len(plain))]), altered)
        where = (source.pointer, target.pointer, first, count, len(plain), words.pointer, told.pointer)
        self._launches.seal(state.bits, blocks, self.link.pointer, row, *where)
        lowest, found = _verdict(words, TICKET), target.content()
        if np.frombuffer(told.content(), np.uint64).tolist() != [TICKET, GOOD if lowest is None else lowest]:
            raise WrongResultError("a kernel told another verdict than it left")
        if lowest is not None and found != bytes([_GUARD]) * len(found):
            raise WrongResultError("a kernel sealed under a key that it refused")
        return found if lowest is None else lowest

    def gather(self, state, packed, pieces, total, result_size, *, blocks=1, offset=0, plan_verdict=GOOD):
        """Scatter pieces of packed chunks: the lowest bad number or None, and the result."""
        states = self._state(state)
        keys, sizes = (states.pointer, 0), (total, result_size)
        return self._gather(f"gather_{state.bits}", keys, packed, pieces, sizes, blocks, offset, plan_verdict)

    def pick(self, state, packed, pieces, total, result_size, *, blocks=1, offset=0, altered=0):
        """Scatter pieces of packed chunks under the wrapped key of a state: as `gather`."""
        keys, kept = self._wrapped(state.row(total), altered)
        found = self._gather(f"pick_{state.bits}", keys, packed, pieces, (total, result_size), blocks, offset)
        kept.content()
        return found

    def keep_run(self, state, plain, sizes, *, blocks=1):
        """Seal a block of paged memory, whose pieces have these sizes."""
        arrays, launch = self._paged(sizes, plain)
        target, words, told = self._fenced(ciphertext_size(len(plain))), self._words(), self._fenced(TOLD_SIZE)
        states = self._state(state)
        arguments = (states.pointer, 0, target.pointer, launch.count, words.pointer, TICKET, told.pointer)
        self._launches.gpu.launch(f"keep_{state.bits}", blocks, arguments, self._launches.stream, launch.table)
        lowest = _verdict(words, TICKET)
        if np.frombuffer(told.content(), np.uint64).tolist() != [TICKET, GOOD if lowest is None else lowest]:
            raise WrongResultError("a kernel told another verdict than it left")
        if b"".join(array.content()[-size:] for array, size in zip(arrays, sizes, strict=True)) != plain:
            raise WrongResultError("a kernel wrote into what it was to seal")
        return target.content() if lowest is None else lowest

    def restore_run(self, state, sealed, sizes, *, blocks=1):
        """Open a block of paged memory: the lowest bad number or None, whether its bit stayed, and the plaintext."""
        arrays, launch = self._paged(sizes)
        states, source, words = self._state(state), self._fenced(len(sealed), sealed), self._words()
        good = self._fenced(4, b"\xff" * 4)
        arguments = (states.pointer, 0, source.pointer, launch.count, words.pointer, TICKET, good.pointer)
        self._launches.gpu.launch(f"restore_{state.bits}", blocks, arguments, self._launches.stream, launch.table)
        halves = [
            (found[:size], found[size:]) for found, size in zip([a.content() for a in arrays], sizes, strict=True)
        ]
        if any(other.strip(bytes([_GUARD])) for other, _ in halves):
            raise WrongResultError("a kernel wrote into another block")
        (bits,) = np.frombuffer(good.content(), np.uint32).tolist()
        if bits | 1 != 2**32 - 1:
            raise WrongResultError("a kernel cleared the bit of another message")
        return _verdict(words, TICKET), bits & 1 == 1, b"".join(plain for _, plain in halves)

    def _paged(self, sizes, plain=None):
        """Make arrays of two blocks, of which the second may hold a plaintext, and return them with its launch."""
        starts = [0, *accumulate(sizes)]
        contents = [None if plain is None else bytes(b - a) + plain[a:b] for a, b in pairwise(starts)]
        arrays = [self._fenced(2 * size, content) for size, content in zip(sizes, contents, strict=True)]
        pieces = [Piece(array.pointer, size, size) for array, size in zip(arrays, sizes, strict=True)]
        (launch,) = paged_launches([pieces], [PagedBlock(0, 1)], 0, [0])
        return arrays, launch

    def _gather(self, kernel, keys, packed, pieces, sizes, blocks, offset, plan_verdict=GOOD):
        target, words = self._fenced(sizes[1], offset=offset), self._words(plan=plan_verdict, ticket=TICKET)
        source = self._fenced(len(packed), packed)
        parts = np.concatenate([part.reshape(-1) for part in (pieces.chunks, pieces.starts, pieces.table)])
        plan = self._fenced(8 * parts.size, parts.astype(np.int64).tobytes())
        counts = (len(pieces.chunks), len(pieces.table), *sizes)
        where = (keys, source.pointer, target.pointer, plan.pointer, counts, words.pointer)
        self._launches.gather(kernel, blocks, *where)
        return _verdict(words, TICKET + 1), target.content()

    def _fenced(self, size, content=None, offset=0):
        return _Fenced(self._launches, size, content, offset)

    def _state(self, state):
        return self._fenced(state.data.size, state.data.tobytes())

    def _prepare(self, key, nonce, call):
        row, whole = self._fenced(KEY_SIZE, _key_row(key, nonce)), self._fenced(STATE_SIZE, bytes(STATE_SIZE))
        self._launches.gpu.launch("prepare", 1, (row.pointer, whole.pointer, 0, 0, 1, call), self._launches.stream)
        row.content()
        return whole

    def _wrapped(self, row, altered):
        """Return the arguments of a kernel for one row behind others, and what holds them."""
        rows = [bytes(ROW_SIZE)] * _ROWS_BEFORE + [row, bytes(ROW_SIZE)]
        sealed = _flip_last(self.wrap(rows), altered)
        kept = self._fenced(len(sealed), sealed)
        return (self.link.pointer, kept.pointer, ROW_NUMBER, len(rows) + (_ROWS_BEFORE << 32)), kept

    def _words(self, lowest=GOOD, plan=GOOD, ticket=GOOD):
        """Make the words of a verdict after a launch with that ticket, which opened a plan, or before the first one."""
        return self._fenced(VERDICT_SIZE, np.array([lowest, plan, ticket, GOOD, ticket], np.uint64).tobytes())


def _key_row(key, nonce, powers=_POWERS):
    kind = 8 * len(key) + (powers << 16)
    return (key + nonce).ljust(KEY_SIZE - 4, b"\0") + kind.to_bytes(4, "little")


def _flip_last(sealed, bits):
    return sealed[:-1] + bytes([sealed[-1] ^ bits])


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


def _verdict(words, ticket):
    """Return the lowest bad name, or None, of a verdict that a launch with this ticket has left."""
    lowest, _, last, ended, _ = np.frombuffer(words.content(), np.uint64).tolist()
    if (last, ended) != (ticket, GOOD):
        raise WrongResultError("a launch ended without its ticket")
    return None if lowest == GOOD else lowest
