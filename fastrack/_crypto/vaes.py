"""Engine for x86 CPUs with VAES and VPCLMULQDQ: several times as fast as OpenSSL, and one native call a run."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from fastrack._crypto import workers
from fastrack._crypto.base import Bytes, GatherPlan, KeySchedule, address, check_buffers, check_plan, chunks_between
from fastrack._crypto.cobblestone import SEALED_CHUNK_SIZE, TAG_SIZE, MessageKey
from fastrack.errors import ClosedError

_ALIGNMENT = 64


class VaesEngine:
    """An `Engine` on vectors of `width` bytes, 32 or 64, with at most `threads` threads a run.

    With `native < width` each wide vector is processed by several narrow instructions. That is slower, and lets tests
    run the wide code on a CPU without the wide instructions.
    """

    def __init__(self, width: int, threads: int, native: int | None = None) -> None:
        from fastrack._crypto import gcm_ir, jit  # deferred: they import numba, which takes a third of a second

        self.name = f"vaes-{width * 8}"
        self.threads = threads
        self._schedule_size = gcm_ir.SCHEDULE_SIZE
        self._kernels = jit.build(width, native or width)

    def expand_key(self, key: MessageKey) -> VaesSchedule:
        material = np.frombuffer(key.material, np.uint8)
        schedule = VaesSchedule(material.size * 8 - 96, self._schedule_size)
        self._kernels.expand_key(schedule.bits, schedule.address, address(material))
        return schedule

    def open_run(self, schedule: VaesSchedule, source: Bytes, target: Bytes, first: int) -> int | None:
        check_buffers(source, target)
        count = chunks_between(source.size, target.size, first)
        arguments = (address(source), address(target), first, count, target.size)
        return self._run(self._kernels.open_run, schedule, arguments, count, (source, target))

    def verify_run(self, schedule: VaesSchedule, source: Bytes, first: int) -> int | None:
        check_buffers(source)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        count = chunks_between(source.size, size, first)
        arguments = (address(source), 0, first, count, size)
        return self._run(self._kernels.verify_run, schedule, arguments, count, (source,))

    def seal_run(self, schedule: VaesSchedule, source: Bytes, target: Bytes, first: int) -> None:
        check_buffers(source, target)
        count = chunks_between(target.size, source.size, first)
        arguments = (address(source), address(target), first, count, source.size)
        self._run(self._kernels.seal_run, schedule, arguments, count, (source, target))

    def open_gather(self, schedule: VaesSchedule, source: Bytes, target: Bytes, plan: GatherPlan) -> int | None:
        check_buffers(source, target)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        check_plan(plan, source.size, size, target.size)
        arguments = (address(source), address(target), plan.chunks, plan.starts, plan.table, size)
        return self._run(self._kernels.open_gather, schedule, arguments, plan.chunks.size, (source, target))

    def _run(
        self, kernel: Any, schedule: VaesSchedule, arguments: tuple[Any, ...], count: int, keepalive: tuple[Bytes, ...]
    ) -> int | None:
        if schedule.wiped:  # it holds zeros, which would be a known key
            raise ClosedError("expected a key schedule, got a wiped one; expand the message key again")
        arguments = (schedule.bits, schedule.address, *arguments)
        return workers.run(kernel, arguments, count, self.threads, (schedule, keepalive))


class VaesSchedule(KeySchedule):
    """A message key as round keys, powers of the hash key H and the base nonce, in aligned memory."""

    _memory = np.empty(0, np.uint8)  # if `__init__` raises

    def __init__(self, bits: int, size: int) -> None:
        self.bits = bits
        self.wiped = False
        self._memory = np.zeros(size + _ALIGNMENT, np.uint8)
        start = address(self._memory)
        self.address = start + -start % _ALIGNMENT

    def wipe(self) -> None:
        self.wiped = True
        self._memory.fill(0)


def supported_width() -> int:
    """Return the widest vectors that this machine supports, in bytes: 64, 32, or 0 for none."""
    if sys.platform not in {"linux", "darwin"} or not is_compiling():
        return 0
    if not cpu_has("aes", "pclmul", "avx2", "bmi2", "prfchw", "vaes", "vpclmulqdq"):
        return 0
    return 64 if cpu_has("avx512f", "avx512bw", "avx512vl", "avx512cd", "avx512dq") else 32


def cpu_has(*names: str) -> bool:
    """Return whether this CPU has these instructions, by LLVM's names."""
    from llvmlite import binding

    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this machine
        return False
    return all(features.get(name, False) for name in names)


def is_compiling() -> bool:
    """Return whether numba compiles functions, without importing it: NUMBA_DISABLE_JIT=1 disables that."""
    disabled = getattr(sys.modules.get("numba.core.config"), "DISABLE_JIT", None)
    if disabled is None:
        try:
            disabled = int(os.environ.get("NUMBA_DISABLE_JIT", "0"))
        except ValueError:  # numba reads other values as 0
            disabled = 0
    return not disabled
