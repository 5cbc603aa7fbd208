"""Run a kernel's PTX, all threads of a block at once, and find wrong accesses, divergent barriers and races.

Threads that are at the same place execute together, the lowest place first, so that threads meet again where the
branches of a program do. With a seed one warp after another runs ahead until it has to wait, in an order by chance.
"""

from __future__ import annotations

import itertools

import numpy as np

from bench.gpu.ptx.accesses import WARP, Log, Report, Site
from bench.gpu.ptx.memory import Buffer, Violation
from bench.gpu.ptx.operations import Registers, build, dtype_of
from bench.gpu.ptx.parse import size_of

_SHARED_WINDOW = 1 << 56  # of generic addresses
_SHARED_START = 1024  # sm_90 reserves the first KiB of a block's shared memory
_RUNS, _AT_BARRIER, _AT_WARP, _LEFT = range(4)
_CONTROL = {"bra", "ret", "exit", "bar", "barrier", "redux"}
_LAUNCHES = itertools.count()


class Machine:
    """A kernel of a module, with registers and shared memory of a block. Buffers of a `Space` are global memory."""

    def __init__(self, module, name, space, symbols, shared):
        self.kernel, self.space = module.kernels[name], space
        self.threads, self._shared_size = self.kernel.threads, shared
        offsets = {parameter: offset for parameter, (offset, _) in self.kernel.parameters.items()}
        size = sum(next(reversed(self.kernel.parameters.values())))
        self._parameters = Buffer("parameters", 0, size, writable=False)
        self._registers = Registers(self.kernel, {**symbols, **dict.fromkeys(module.shared, _SHARED_START), **offsets})
        self._all = np.arange(self.threads)
        self._warp_of = self._all // WARP
        self._sites = []
        self._steps = [self._guarded(instruction) for instruction in self.kernel.code]
        self._stops = self._ends_of_runs()

    def launch(self, blocks, arguments, table=b"", seed=None):
        """Run all blocks, one after another, and return a `Report`."""
        self._report, self._number = Report(), next(_LAUNCHES)
        for site in self._sites:
            site.requests = site.passes = site.sectors = 0
        self._set_parameters(arguments, table)
        self._runs = {}
        self._report.trace = " ".join([self._run_block(block, blocks, seed) for block in range(blocks)])
        self._report.sites = [
            Site(*(getattr(site, name) for name in Site.__slots__)) for site in self._sites if site.requests
        ]
        for (start, stop), warps in self._runs.items():
            for place in range(start, stop):
                self._report.places[place] += warps
                self._report.instructions[self.kernel.code[place].name] += warps
        return self._report

    def _set_parameters(self, arguments, table):
        values = [int(value).to_bytes(8, "little") for value in arguments] + ([table] if table else [])
        slots = list(self.kernel.parameters.values())
        if len(slots) != len(values):
            raise ValueError(f"{self.kernel.name} takes {len(slots)} parameters, got {len(values)}")
        for (start, size), value in zip(slots, values, strict=True):
            if value[size:].strip(b"\0") or len(value) < size:
                raise ValueError(f"a parameter of {self.kernel.name} takes {size} bytes, got {len(value)}")
            self._parameters.put(start, np.frombuffer(value[:size], np.uint8))

    def _ends_of_runs(self):
        """Return for each place where a run of instructions from there ends: at control, or at a label."""
        code, labels, stops = self.kernel.code, set(self.kernel.labels.values()), [len(self.kernel.code)]
        for place in range(len(code) - 1, -1, -1):
            is_control = code[place].parts[0] in _CONTROL
            stops.append(place if is_control else place + 1 if place + 1 in labels else stops[-1])
        return stops[::-1]

    def _guarded(self, instruction):
        step = self._step(instruction)
        if not instruction.guard or instruction.parts[0] in _CONTROL:
            return step
        guard = self._guard(instruction)
        return lambda mask: step(guard() & mask)

    def _guard(self, instruction):
        predicate = self._registers.named[instruction.guard]
        return (lambda: ~predicate) if instruction.negated else (lambda: predicate)

    def _step(self, instruction):
        name = instruction.parts[0]
        if name in _CONTROL:
            return None
        if name in {"nanosleep", "membar"}:
            return lambda _: None
        if name in {"ld", "st"}:
            return self._memory(instruction)
        special = {"atom": self._atomic, "cvta": self._cvta}.get(name)
        return special(instruction) if special else build(instruction, self._registers)

    # Control.

    def _run_block(self, block, blocks, seed):
        self._block, self._log = block, None
        self.shared = Buffer("shared memory", _SHARED_START, self._shared_size)
        self._log = Log(self.threads, self.shared, self._report)
        self._registers.begin(block, blocks)
        self._place, self._barrier = np.zeros(self.threads, np.int64), np.zeros(self.threads, np.int64)
        self._state, self._times = np.full(self.threads, _RUNS), np.zeros(self.threads // WARP + 1, np.int64)
        self._random, self._turn = None if seed is None else np.random.default_rng([seed, block]), None
        while True:
            running = self._state == _RUNS
            if running.any():
                self._advance(self._choose(running))
            elif (self._state == _LEFT).all():
                break
            else:
                self._release()
        self._log.close(block)
        return self._log.digest()

    def _advance(self, running):
        place = int(self._place[running].min())
        active = running & (self._place == place)
        mask, stop = bool(active.all()) or active, self._stops[place]
        if stop == place:
            self._control(self.kernel.code[place], place, active)
        else:
            for step in self._steps[place:stop]:
                step(mask)
            self._place[active] = stop
        warps = int(np.count_nonzero(np.add.reduceat(active, range(0, self.threads, WARP))))
        run = place, max(stop, place + 1)
        self._runs[run] = self._runs.get(run, 0) + warps

    def _choose(self, running):
        if self._random is None:
            return running
        if self._turn is None or not running[self._warp_of == self._turn].any():
            self._turn = self._random.choice(np.unique(self._warp_of[running]))
        return running & (self._warp_of == self._turn)

    def _release(self):
        waiting = self._state == _AT_BARRIER
        line = self.kernel.code[int(self._place[self._state != _LEFT][0])].line
        if (self._state == _AT_WARP).any():
            raise Violation(f"lanes wait for others that do not come, at line {line}")
        if len(np.unique(self._barrier[waiting])) > 1:
            raise Violation(f"threads wait at different barriers, at line {line}")
        # Places within a warp, and threads of it that have left.
        places = np.where(waiting, self._place, -1)
        low, high = (function.reduceat(places, range(0, self.threads, WARP)) for function in (np.minimum, np.maximum))
        if (low != high).any():
            self._report.tell(f"a warp is divergent at a barrier, at line {line}")
        self._place[waiting] += 1
        self._state[waiting] = _RUNS
        self._report.barriers += 1
        self._log.close(self._block)

    def _control(self, instruction, place, active):
        name = instruction.parts[0]
        taken = active & self._guard(instruction)() if instruction.guard else active
        self._log.note(np.array([place]), np.packbits(taken))
        if name in {"bra", "ret", "exit"}:
            self._place[active] = place + 1
            if name == "bra":
                self._place[taken] = self.kernel.labels[instruction.operands[0]]
            else:
                self._state[taken] = _LEFT
        elif instruction.name in {"bar.sync", "barrier.sync"}:
            number, *count = instruction.operands
            if not isinstance(number, int) or count not in ([], [self.threads]):
                raise NotImplementedError(f"a barrier of some threads, at line {instruction.line}")
            self._barrier[active], self._state[active] = number, _AT_BARRIER
        else:
            self._meet(instruction, place, active)

    def _meet(self, instruction, place, active):
        """Have lanes wait until all that the instruction names are there, then execute it for their warps."""
        self._state[active] = _AT_WARP
        here = (self._state == _AT_WARP) & (self._place == place)
        asked = np.broadcast_to(self._registers.read(instruction.operands[-1], "b32"), self.threads)
        if (asked == 0xFFFFFFFF).all() and here.all():
            warps = {WARP: np.arange(self.threads).reshape(-1, WARP)}
        else:
            warps = [self._those_who_meet(instruction, warp, here, asked) for warp in np.unique(self._warp_of[active])]
            warps = {lanes.size: lanes[None] for lanes in warps if lanes is not None} if len(warps) == 1 else {
                number: lanes[None] for number, lanes in enumerate(warps) if lanes is not None}  # fmt: skip
        for lanes in warps.values():
            if instruction.parts[0] == "redux":
                operation = {"xor": np.bitwise_xor, "or": np.bitwise_or, "and": np.bitwise_and}[instruction.parts[2]]
                d, a = (self._registers.read(operand, "b32") for operand in instruction.operands[:2])
                d[lanes] = operation.reduce(a[lanes], axis=1)[:, None]
            else:  # bar.warp.sync
                self._times = self._times.copy()  # what was logged keeps the old ones
                self._times[lanes[:, 0] // WARP] += 1
            self._state[lanes], self._place[lanes] = _RUNS, place + 1

    def _those_who_meet(self, instruction, warp, here, asked):
        """Return the lanes of a warp that may go on, or None if some are still to come."""
        lanes = np.flatnonzero(self._warp_of == warp)
        there, masks = here[lanes], asked[lanes][here[lanes]]
        named = masks[0] >> np.arange(WARP, dtype=np.uint32) & 1 != 0
        if (masks != masks[0]).any() or (there & ~named).any():
            raise Violation(f"lanes disagree on who is to meet, at line {instruction.line}")
        if (self._state[lanes][named] == _LEFT).any():
            raise Violation(f"a lane that has left is to meet others, at line {instruction.line}")
        return lanes[named] if np.array_equal(there, named) else None

    # Memory.

    def _address(self, address):
        """Return a function that gives each thread's address."""
        register = self._registers.named.get(address.base)
        base = self._registers.read(address.base, "u32" if register is not None and register.itemsize == 4 else "s64")
        return lambda: np.broadcast_to(np.add(base, address.offset, dtype=np.int64), self.threads)

    def _cvta(self, instruction):
        d, a = (self._registers.read(operand, "s64") for operand in instruction.operands)
        shift = _SHARED_WINDOW * ("shared" in instruction.parts) * (-1 if "to" in instruction.parts else 1)
        return lambda mask: np.add(a, shift, out=d, where=mask)

    def _memory(self, instruction):
        kind, space, *_, suffix = instruction.parts
        values, address = instruction.operands if kind == "ld" else instruction.operands[::-1]
        values, where = values if isinstance(values, tuple) else (values,), self._address(address)
        dtype, count = dtype_of(suffix), len(values)
        site = self._site(instruction, size_of(suffix) * count, writes=kind == "st")
        used = [byte for byte in range(site.size) if instruction.used is None or instruction.used >> byte & 1]
        if kind == "ld":  # a narrow value fills its register
            registers = [self._registers.named[value] for value in values]
            registers = [register.view(f"{dtype.kind}{register.itemsize}") for register in registers]
        else:
            registers = [self._registers.read(value, suffix) for value in values]

        def run(mask):
            chosen = slice(None) if mask is True else mask
            for each, lanes, addresses in self._by_buffer(space, chosen, where()[chosen]):
                buffer, offsets = self._locate(site, space, addresses)
                rows = offsets // site.size
                memory = buffer.bytes.view(dtype).reshape(-1, count)
                written = buffer.written.reshape(-1, site.size)
                if site.writes:
                    if not buffer.writable:
                        self._report.tell(f"{site} writes to {buffer.name}")
                    for number, register in enumerate(registers):
                        memory[rows, number] = register[each] if register.ndim else register
                    written[rows] = True
                else:
                    found = memory[rows]
                    for number, register in enumerate(registers):
                        register[each] = found[:, number]
                    known = written[rows][:, used]
                    if not known.all():
                        first = offsets[~known.all(axis=1)][0]
                        self._report.tell(
                            f"{site} reads byte {first} of {buffer.name}, or one behind it, which was never written"
                        )
                if space != "param":
                    self._log.add(site, buffer, offsets, lanes, self._times)

        return run

    def _site(self, instruction, size, *, writes, atomic=False):
        name = instruction.name
        self._sites.append(Site(name, instruction.line, size, writes, ".nc." in name, atomic))
        return self._sites[-1]

    def _by_buffer(self, space, chosen, addresses):
        """Yield the chosen threads, their numbers and addresses: all, unless these are in several buffers."""
        lanes = self._all[chosen]
        while lanes.size and (inside := self._apart(space, addresses)) is not None:
            yield lanes[inside], lanes[inside], addresses[inside]
            chosen = lanes = lanes[~inside]
            addresses = addresses[~inside]
        if lanes.size:
            yield chosen, lanes, addresses

    def _apart(self, space, addresses):
        """Return which addresses are in the buffer of the first, or None unless the next one is in another."""
        buffer = None if space in {"param", "shared"} else self.space.find(int(addresses[0]))
        if buffer is None:
            return None
        inside = (addresses >= buffer.pointer) & (addresses < buffer.pointer + buffer.size)
        return None if inside.all() or self.space.find(int(addresses[~inside][0])) is None else inside

    def _locate(self, site, space, addresses):
        """Return the buffer that holds all these accesses, and their offsets, or raise."""
        low, high = int(addresses.min()), int(addresses.max()) + site.size
        if space not in {"param", "shared", "global"} and high > _SHARED_WINDOW:  # generic
            space, addresses, low, high = (
                "shared",
                addresses - _SHARED_WINDOW,
                low - _SHARED_WINDOW,
                high - _SHARED_WINDOW,
            )
        if space in {"param", "shared"}:
            buffer = self._parameters if space == "param" else self.shared
        else:
            buffer = self.space.find(int(addresses[0]))
            if buffer is None:
                raise Violation(f"out of bounds: {site}, {site.size} bytes where nothing is")
            buffer.begin(self._number)
        offsets = addresses - buffer.pointer
        if low < buffer.pointer + buffer.first or high > buffer.pointer + buffer.size:
            bad = offsets[(offsets < buffer.first) | (offsets + site.size > buffer.size)][0]
            raise Violation(f"out of bounds: {site}, {site.size} bytes at {bad} of {buffer.name}, of {buffer.size}")
        if int(np.bitwise_or.reduce(offsets)) % site.size:
            raise Violation(f"a misaligned access: {site}, {site.size} bytes of {buffer.name}")
        return buffer, offsets

    def _atomic(self, instruction):
        _, space, operation, suffix = instruction.parts
        d, address, b = instruction.operands
        d, b, where = self._registers.read(d, suffix), self._registers.read(b, suffix), self._address(address)
        function = {"min": np.minimum, "max": np.maximum, "add": np.add, "and": np.bitwise_and}[operation]
        site = self._site(instruction, size_of(suffix), writes=True, atomic=True)

        def run(mask):
            lanes = self._all[slice(None) if mask is True else mask]
            if not lanes.size:
                return
            buffer, offsets = self._locate(site, space, where()[lanes])
            memory = buffer.bytes.view(d.dtype)
            for lane, row in zip(lanes, offsets // site.size, strict=True):
                d[lane] = memory[row]
                memory[row] = function(memory[row], np.broadcast_to(b, self.threads)[lane])
            self._log.add(site, buffer, offsets, lanes, self._times)

        return run
