"""Engine for CPUs with instructions for AES and GHASH, by one native call per run."""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastrack._crypto import workers
from fastrack._crypto.base import (
    FIRST,
    SEALS,
    WHOLE,
    WIDENS,
    WORDS,
    Bytes,
    KeySchedule,
    Messages,
    Secret,
    Texts,
    address,
    check_buffers,
    scaling_row,
)
from fastrack._crypto.cobblestone import DERIVED_SIZE, PREFIXES, MessageKey, chunks_between
from fastrack._crypto.gather import GatherPlan
from fastrack._crypto.isa import SCHEDULE_SIZE
from fastrack._crypto.message_keys import check_rows
from fastrack.errors import ClosedError
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE

_ALIGNMENT = 64
_PADDING = [b"\0\x80".ljust(2 + -(size + 2) % 8, b"\0") for size in range(8)]  # a counter, and padding to whole words


class VectorEngine:
    """An `Engine` on the functions of one instruction set, with at most `threads` threads a run."""

    def __init__(self, name: str, functions: Any, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._functions = functions

    def derive_keys(
        self, secret: Secret, headers: Texts, contexts: Texts, rows: Sequence[int], target: memoryview
    ) -> int | None:
        text, table = derivation_table(secret, headers, contexts, rows)
        check_rows(rows, target)
        bad = self._functions.derive_keys(secret, len(secret), text, table, len(rows), target)
        return None if bad == len(rows) else int(bad)

    def expand_key(self, key: MessageKey) -> VectorSchedule:
        material = np.frombuffer(key.material, np.uint8)
        schedule = VectorSchedule(material.size * 8 - 96)
        self._functions.expand_key(schedule.bits, schedule.address, address(material))
        return schedule

    def open_run(self, schedule: VectorSchedule, source: Bytes, target: Bytes, first: int) -> int | None:
        check_buffers(source, target)
        count = chunks_between(source.size, target.size, first)
        return self._run("open_run", schedule, count, address(source), address(target), first, count, target.size)

    def verify_run(self, schedule: VectorSchedule, source: Bytes, first: int) -> int | None:
        check_buffers(source)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        count = chunks_between(source.size, size, first)
        return self._run("verify_run", schedule, count, address(source), 0, first, count, size)

    def seal_run(self, schedule: VectorSchedule, source: Bytes, target: Bytes, first: int) -> None:
        check_buffers(source, target)
        count = chunks_between(target.size, source.size, first)
        self._run("seal_run", schedule, count, address(source), address(target), first, count, source.size)

    def open_gather(self, schedule: VectorSchedule, source: Bytes, target: Bytes, plan: GatherPlan) -> int | None:
        check_buffers(source, target)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        plan.locate(source.size, size, target.size)
        arrays, count = (plan.chunks, plan.starts, plan.table), plan.chunks.size
        return self._run("open_gather", schedule, count, address(source), address(target), *arrays, count, size)

    def open_jobs(self, jobs: Messages) -> tuple[int, int] | None:
        found = []
        for widens in (False, True) if any(jobs.scalings) else (False,):  # scales are opened before the values
            table = JobTable(jobs, widens=widens)
            arguments = (table.address, len(table.numbers), table.count)
            bad = workers.run(self._functions.open_jobs, arguments, table.count, self.threads)
            if bad is not None:
                found.append(table.find(bad))
        return min(found, default=None)

    def _run(self, name: str, schedule: VectorSchedule, count: int, *arguments: Any) -> int | None:
        if schedule.wiped:  # it holds zeros, which would be a known key
            raise ClosedError("expected a key schedule, got a wiped one; expand the message key again")
        kernel = getattr(self._functions, name)
        return workers.run(kernel, (schedule.bits, schedule.address, *arguments), count, self.threads)


class JobTable:
    """The table of a call's jobs. Each job is checked to stay inside its message and its result.

    Attributes
    ----------
    address : the address of the table
    count : the number of chunks of all jobs
    numbers : the messages of the jobs
    keepalive : the owners of all memory that the table points to
    """

    __slots__ = ("address", "count", "keepalive", "numbers")

    def __init__(self, jobs: Messages, *, widens: bool = False) -> None:
        words: list[int] = []
        count, rows = 0, []
        if not widens and jobs.plans == jobs.scalings == [None] and jobs.sealed != [None]:
            self._set_whole(jobs)  # of a small tensor the loop takes as long as its cipher
            return
        key, numbers = jobs.keys.address - DERIVED_SIZE, []
        columns: list[Sequence[Any]] = [jobs.keys.bits, jobs.nbytes, jobs.memories, jobs.sealed, jobs.plain]
        columns += jobs.plans, jobs.scalings
        for number, (bits, nbytes, target, source, plain, plan, scaling) in enumerate(zip(*columns, strict=True)):
            key += DERIVED_SIZE
            if (scaling is not None) is not widens:
                continue
            numbers.append(number)
            if source is None:
                assert plain is not None
                words += (key, bits, plain.address, target.address, nbytes, count, SEALS, 0, 0)
                if plain.size != nbytes or target.size != nbytes:
                    raise ValueError(f"expected {nbytes} bytes to seal, and a result of that size, got others")
                count += nbytes // CHUNK_SIZE + 1
            elif scaling is not None:
                row = array("q", scaling_row(scaling, nbytes))
                rows.append(row)
                words += (key, bits, source.address, target.address, nbytes, count, WIDENS, row.buffer_info()[0], 0)
                if target.size != 2 * nbytes:
                    raise ValueError(f"expected a result of {2 * nbytes} bytes, got {target.size}")
                count += chunks_between(source.size, nbytes)
            elif plan is None:
                words += (key, bits, source.address, target.address, nbytes, count, WHOLE, 0, 0)
                if target.size != nbytes:
                    raise ValueError(f"expected a result of {nbytes} bytes, got {target.size}")
                count += chunks_between(source.size, nbytes)
            else:
                chunks, *places = plan.locate(source.size, nbytes, target.size)
                words += (key, bits, source.address, target.address, nbytes, count, *places)
                count += chunks
        table = array("q", words)
        self.address = table.buffer_info()[0]
        self.count = count
        self.numbers = numbers
        self.keepalive = table, jobs, rows

    def _set_whole(self, jobs: Messages) -> None:
        """Make the table of one message that is opened as a whole."""
        (nbytes,), (target,), (source,) = jobs.nbytes, jobs.memories, jobs.sealed
        assert source is not None
        if target.size != nbytes:
            raise ValueError(f"expected a result of {nbytes} bytes, got {target.size}")
        words = (jobs.keys.address, jobs.keys.bits[0], source.address, target.address, nbytes, 0, WHOLE, 0, 0)
        table = array("q", words)
        self.address = table.buffer_info()[0]
        self.count = chunks_between(source.size, nbytes)
        self.numbers = [0]
        self.keepalive = table, jobs, []

    def find(self, chunk: int) -> tuple[int, int]:
        """Return the job of chunk number `chunk` of the table, and the number of that chunk in its message."""
        table, jobs, _ = self.keepalive
        firsts = table[FIRST::WORDS]
        row = bisect_right(firsts, chunk) - 1
        chunk -= firsts[row]
        number = self.numbers[row]
        plan = jobs.plans[number]
        return number, chunk if plan is None else int(plan.chunks[chunk])


class VectorSchedule(KeySchedule):
    """A message key as round keys, powers of the hash key H and the base nonce, in aligned memory."""

    __slots__ = ("__del__",)  # in C, as that of a wiped message key

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.wiped = False
        self._memory = np.zeros(SCHEDULE_SIZE + _ALIGNMENT, np.uint8)
        self.__del__ = functools.partial(self._memory.fill, 0)  # type: ignore[method-assign]
        start = address(self._memory)
        self.address = start + -start % _ALIGNMENT

    def wipe(self) -> None:
        self.wiped = True
        self._memory.fill(0)


def derivation_table(secret: Secret, headers: Texts, contexts: Texts, rows: Sequence[int]) -> tuple[bytes, array[int]]:
    """Return the input of `hkdf_ir`: the text of all messages, and a table of context sizes and rows."""
    text: list[Secret] = [PREFIXES[len(secret)]]
    table = array("q")
    for header, context, row in zip(headers, contexts, rows, strict=True):
        size = len(context)
        text += header, context, _PADDING[size & 7]
        table.append(size)
        table.append(row)
    return b"".join(text), table
