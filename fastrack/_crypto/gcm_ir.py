"""AES-GCM of one chunk, as LLVM functions on vector instructions.

Each builder adds one function to a module: `expand_key` turns a message key into a *schedule*, and `open`, `verify` and
`seal` work one chunk of up to 16 KiB with it (NIST SP 800-38D sections 7.1 and 7.2, with a 96-bit nonce, no associated
data and a 128-bit tag). Counter mode and GHASH run interleaved, eight vectors at a time, in one pass over the data.

Each run of chunks has a stack frame of its own and clears the registers when it returns. What it spilled to the stack
is overwritten by the function of `stack_wiper`, which its caller calls before it reports the work as done.

No table is indexed by a secret and no branch depends on one, other than on the verdict itself. Ciphertext is read from
memory once: the bytes that were authenticated are the bytes that are decrypted, though another process may be writing
to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llvmlite import ir

from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._crypto.llvm import I1, I8, I32, I64, Emitter, compile_for, declare

_TARGETS = {  # by the width of the instructions: a microarchitecture level and what the code needs beside it
    16: ("x86-64-v3", "+aes,+pclmul,+prfchw"),
    32: ("x86-64-v3", "+aes,+pclmul,+prfchw,+vaes,+vpclmulqdq"),
    64: ("x86-64-v4", "+aes,+pclmul,+prfchw,+vaes,+vpclmulqdq"),
}

Texts = Callable[[int], ir.Value]  # the vectors of a group, by number

_VECTORS = 8  # in flight at a time: enough to hide the latency of an AES round

# The order of hashing: the first vector waits for the hash of the turn before, so it comes last.
_ORDER = (*range(1, _VECTORS), 0)

_LINE = 64  # bytes of a cache line
_PREFETCH_DISTANCE = 2048  # bytes from a group to what is fetched meanwhile; gains 2 to 3 % where memory is the limit

# A schedule, in bytes from a 64-byte boundary.
_POWERS = 32  # of the hash key: as many as blocks are in flight at the widest
_ROUND_KEYS = 0  # 15 round keys, each four times over so that any width loads them whole
_HASH_KEYS = _ROUND_KEYS + 15 * 64  # H^32 ... H^1, byte-reversed and pre-shifted
_HASH_HALVES = _HASH_KEYS + _POWERS * 16  # the sums of their words, for Karatsuba
_NONCE = _HASH_HALVES + _POWERS * 16  # the base nonce and a zero counter, byte-reversed
SCHEDULE_SIZE = 2048

# Bytes of stack that a wiper overwrites. The largest frame takes 2 KiB; a signal that arrives meanwhile puts the vector
# registers below it, 3 KiB of them, or 11 KiB where AMX is in use.
STACK_SIZE = 16 << 10


@dataclass(frozen=True, slots=True)
class Variant:
    """Which code to make: the key's bits, the vectors' bytes, and the widest instructions allowed."""

    bits: int
    width: int
    native: int

    @property
    def rounds(self) -> int:
        return {128: 10, 256: 14}[self.bits]

    @property
    def group(self) -> int:
        """Bytes that one turn of the main loop works."""
        return _VECTORS * self.width


def chunk_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function `name` ("expand_key", "open", "verify" or "seal") of that variant; build it if needed.

    `expand_key(schedule, material)`, and the others `(schedule, source, target, chunk, size) -> 1 or 0`, the verdict;
    `verify` leaves its target alone. Addresses, sizes and results are 64-bit integers.
    """
    build, arguments = _BUILDERS[name]
    symbol = f"fastrack_{name}_{variant.bits}_{variant.width}_{variant.native}"
    known = module.globals.get(symbol)
    if known is not None:
        return known
    function = ir.Function(module, ir.FunctionType(I64, [I64] * arguments), symbol)
    function.linkage = "internal"
    compile_for(function, *_TARGETS[variant.native])
    if name == "expand_key":
        isolate_frame(function)
    else:
        clear_registers(function)  # of use where it is not inlined into its run: `NUMBA_CPU_NAME=generic`
    build(function, variant)
    return function


def run_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function that applies `chunk_function(module, variant, name)` to a run of chunks; build it if needed.

    It is `(schedule, source, target, first, count, size) -> index`, where the size is that of the plaintext from the
    first chunk on. The index is that of the first chunk whose tag is wrong, or the count. The chunk's function is
    inlined, as a call for each chunk costs up to a tenth of the time, and compiled for this CPU then, as the run is:
    with more registers than the variant asks for, if there are more.
    """
    symbol = f"fastrack_{name}_run_{variant.bits}_{variant.width}_{variant.native}"
    known = module.globals.get(symbol)
    if known is not None:
        return known
    chunk = chunk_function(module, variant, name)
    function = ir.Function(module, ir.FunctionType(I64, [I64] * 6), symbol)
    function.linkage = "internal"
    isolate_frame(function)
    schedule, source, target, first, count, size = function.args
    source_step, target_step = (CHUNK_SIZE, SEALED_CHUNK_SIZE) if name == "seal" else (SEALED_CHUNK_SIZE, CHUNK_SIZE)
    entry, loop, done = (function.append_basic_block() for _ in range(3))
    builder = ir.IRBuilder(entry)
    builder.branch(loop)

    builder.position_at_end(loop)
    index, bad = builder.phi(I64), builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), entry)
    bad.add_incoming(count, entry)
    here = builder.add(source, builder.mul(index, ir.Constant(I64, source_step)))
    there = builder.add(target, builder.mul(index, ir.Constant(I64, target_step)))
    left = builder.sub(size, builder.mul(index, ir.Constant(I64, CHUNK_SIZE)))
    full = ir.Constant(I64, CHUNK_SIZE)
    length = builder.select(builder.icmp_signed("<", left, full), left, full)
    good = builder.call(chunk, [schedule, here, there, builder.add(first, index), length])
    is_first = builder.and_(
        builder.icmp_unsigned("==", good, ir.Constant(I64, 0)), builder.icmp_unsigned("==", bad, count)
    )
    found = builder.select(is_first, index, bad)
    after = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(after, loop)
    bad.add_incoming(found, loop)
    builder.cbranch(builder.icmp_unsigned("<", after, count), loop, done)

    builder.position_at_end(done)
    builder.ret(found)
    return function


def isolate_frame(function: ir.Function) -> None:
    """Give `function` a stack frame of its own, for a wiper to overwrite, and have it clear all registers."""
    function.attributes.add("noinline")
    clear_registers(function)


def clear_registers(function: ir.Function) -> None:
    """Have `function` clear the registers when it returns: the next that saves them all would put them on the stack.

    All of them, as LLVM's "used" leaves out the vector registers from the sixteenth on that were used in part.
    """
    set.add(function.attributes, '"zero-call-used-regs"="all"')  # llvmlite has no call for string attributes


def stack_wiper(module: ir.Module) -> ir.Function:
    """Return the function `()` that overwrites the stack below its caller's frame; build it unless it is there.

    It reaches what functions that its caller called before have left.
    """
    known = module.globals.get("fastrack_wipe_stack")
    if known is not None:
        return known
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "fastrack_wipe_stack")
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    place = builder.alloca(I8, STACK_SIZE)
    fill_zero(builder, builder.ptrtoint(place, I64), ir.Constant(I64, STACK_SIZE))
    builder.ret_void()
    return function


# Preparing a key: FIPS 197 section 5.2 (expansion), SP 800-38D section 7.1 step 1 (hash key).


def _build_expand_key(function: ir.Function, variant: Variant) -> None:
    schedule, material = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    emit = Emitter(builder, 16)
    wide = Emitter(builder, 64, native=16)

    keys = expand_128(emit, material) if variant.bits == 128 else expand_256(emit, material)
    for index, key in enumerate(keys):
        wide.store(wide.broadcast(key), schedule, _ROUND_KEYS + 64 * index, align=64)

    hash_key = emit.words(0, 0)
    hash_key = encrypt_block(emit, hash_key, keys)
    first = power = emit.times_x(emit.reverse_bytes(hash_key))
    for exponent in range(1, _POWERS + 1):
        place = (_POWERS - exponent) * 16
        emit.store(power, schedule, _HASH_KEYS + place, align=16)
        emit.store(emit.halves(power), schedule, _HASH_HALVES + place, align=16)
        power = emit.multiply(power, first)

    nonce = builder.add(material, ir.Constant(I64, variant.bits // 8))
    low = builder.zext(builder.load(builder.inttoptr(nonce, I64.as_pointer()), align=1), ir.IntType(128))
    rest = builder.add(nonce, ir.Constant(I64, 8))
    high = builder.zext(builder.load(builder.inttoptr(rest, I32.as_pointer()), align=1), ir.IntType(128))
    block = builder.or_(low, builder.shl(high, ir.Constant(high.type, 64)))
    emit.store(emit.reverse_bytes(builder.bitcast(block, emit.type)), schedule, _NONCE, align=16)
    builder.ret(ir.Constant(I64, 1))


def expand_128(emit: Emitter, material: ir.Value) -> list[ir.Value]:
    keys = [emit.load(material)]
    for constant in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0x1B, 0x36):
        keys.append(_next_key(emit, keys[-1], keys[-1], constant, word=3))
    return keys


def expand_256(emit: Emitter, material: ir.Value) -> list[ir.Value]:
    keys = [emit.load(material), emit.load(material, 16)]
    for constant in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40):
        keys.append(_next_key(emit, keys[-2], keys[-1], constant, word=3))
        keys.append(_next_key(emit, keys[-2], keys[-1], 0, word=2))
    return keys[:15]


def _next_key(emit: Emitter, before: ir.Value, last: ir.Value, constant: int, word: int) -> ir.Value:
    builder = emit.builder
    assist = declare(builder.module, "llvm.x86.aesni.aeskeygenassist", ir.FunctionType(emit.type, [emit.type, I8]))
    words = builder.bitcast(builder.call(assist, [last, ir.Constant(I8, constant)]), ir.VectorType(I32, 4))
    mask = ir.Constant(ir.VectorType(I32, 4), [ir.Constant(I32, word)] * 4)
    mixed = builder.bitcast(builder.shuffle_vector(words, words, mask), emit.type)
    running = builder.bitcast(before, ir.IntType(128))
    for shift in (32, 64):
        running = builder.xor(running, builder.shl(running, ir.Constant(running.type, shift)))
    return emit.xor(builder.bitcast(running, emit.type), mixed)


def encrypt_block(emit: Emitter, block: ir.Value, keys: list[ir.Value]) -> ir.Value:
    state = emit.xor(block, keys[0])
    for key in keys[1:-1]:
        state = emit.aes_round(state, key)
    return emit.aes_last(state, keys[-1])


# Working a chunk.


def _build_open(function: ir.Function, variant: Variant) -> None:
    schedule, source, target, chunk, size = function.args
    work = _Chunk(function, variant, schedule, chunk)
    work.run(source, target, size, decrypt=True)
    wanted = work.small.load(work.builder.add(source, size), once=True)
    good = work.same(work.tag(size), wanted)
    with work.builder.if_then(work.builder.icmp_unsigned("==", good, ir.Constant(I64, 0)), likely=False):
        fill_zero(work.builder, target, size)
    work.builder.ret(good)


def _build_verify(function: ir.Function, variant: Variant) -> None:
    schedule, source, _, chunk, size = function.args
    work = _Chunk(function, variant, schedule, chunk)
    work.run(source, None, size, decrypt=True)
    wanted = work.small.load(work.builder.add(source, size), once=True)
    work.builder.ret(work.same(work.tag(size), wanted))


def _build_seal(function: ir.Function, variant: Variant) -> None:
    schedule, source, target, chunk, size = function.args
    work = _Chunk(function, variant, schedule, chunk)
    work.run(source, target, size, decrypt=False)
    work.small.store(work.tag(size), work.builder.add(target, size))
    work.builder.ret(ir.Constant(I64, 1))


_BUILDERS: dict[str, tuple[Callable[[ir.Function, Variant], None], int]] = {
    "expand_key": (_build_expand_key, 2),
    "open": (_build_open, 5),
    "verify": (_build_verify, 5),
    "seal": (_build_seal, 5),
}


class _Chunk:
    """The code of one chunk, being written: groups of vectors first, then blocks, then the last bytes."""

    def __init__(self, function: ir.Function, variant: Variant, schedule: ir.Value, chunk: ir.Value) -> None:
        self.function = function
        self.variant = variant
        self.schedule = schedule
        self.builder = ir.IRBuilder(function.append_basic_block())
        self.small = Emitter(self.builder, 16)
        self.wide = Emitter(self.builder, variant.width, variant.native)
        self.scratch = self.builder.alloca(I8, 16)
        # The nonce of chunk k is the base nonce XOR k, big-endian; byte-reversed, the counter is the lowest 32 bits.
        number = self.builder.shl(self.builder.zext(chunk, ir.IntType(128)), ir.Constant(ir.IntType(128), 32))
        base = self.small.load(schedule, _NONCE, align=16)
        self.nonce = self.small.xor(base, self.builder.bitcast(number, base.type))
        self.hash = self.small.words(0, 0)

    def run(self, source: ir.Value, target: ir.Value | None, size: ir.Value, *, decrypt: bool) -> None:
        group = ir.Constant(I64, self.variant.group)
        groups = self.builder.udiv(size, group)
        self._groups(source, target, groups, decrypt=decrypt)
        done = self.builder.mul(groups, group)
        left = self.builder.sub(size, done)
        counter = self.builder.add(self.builder.udiv(done, ir.Constant(I64, 16)), ir.Constant(I64, 2))
        source = self.builder.add(source, done)
        target = None if target is None else self.builder.add(target, done)
        self._blocks(source, target, left, counter, decrypt=decrypt)

    def tag(self, size: ir.Value) -> ir.Value:
        """GHASH of the length block, masked with the encrypted first counter block."""
        bits = self.builder.zext(self.builder.shl(size, ir.Constant(I64, 3)), ir.IntType(128))
        self._absorb(self.small.reverse_bytes(self.builder.bitcast(bits, self.small.type)))
        mask = self._keystream(ir.Constant(I64, 1))
        return self.small.xor(self.small.reverse_bytes(self.hash), mask)

    def same(self, left: ir.Value, right: ir.Value) -> ir.Value:
        difference = self.builder.bitcast(self.small.xor(left, right), ir.IntType(128))
        equal = self.builder.icmp_unsigned("==", difference, ir.Constant(difference.type, 0))
        return self.builder.zext(equal, I64)

    # The main loop. Deciphering hashes what it reads. Enciphering hashes what it wrote one turn before, kept in
    # registers, so that the cipher and the hash of one turn do not wait for each other.

    def _groups(self, source: ir.Value, target: ir.Value | None, groups: ir.Value, *, decrypt: bool) -> None:
        builder, wide, variant = self.builder, self.wide, self.variant
        entry = builder.block
        loop, done = (self.function.append_basic_block() for _ in range(2))
        origin = wide.xor(wide.broadcast(self.small.reverse_bytes(self.nonce)), self._round_key(0))
        seeds = [wide.zero_extend(self.hash)]
        if not decrypt:
            # The first turn has nothing to hash yet: it hashes zeros, which leave a hash of zero as it is.
            seeds += [wide.words(0, 0)] * _VECTORS
        builder.cbranch(builder.icmp_unsigned(">", groups, ir.Constant(I64, 0)), loop, done)

        builder.position_at_end(loop)
        turn = builder.phi(I64)
        turn.add_incoming(ir.Constant(I64, 0), entry)
        start = builder.phi(wide.type)  # the first counter block less 2, after round key 0, in every lane
        start.add_incoming(origin, entry)
        carried = [builder.phi(wide.type) for _ in seeds]
        for phi, seed in zip(carried, seeds, strict=True):
            phi.add_incoming(seed, entry)
        turned = builder.add(turn, ir.Constant(I64, 1))
        after = wide.xor(origin, self._counter(builder.mul(turned, ir.Constant(I64, variant.group // 16))))
        offset = builder.mul(turn, ir.Constant(I64, variant.group))
        here = builder.add(source, offset)
        # A text is loaded where it is first used: all at once would not fit into the registers.
        text = cache(lambda lane: wide.load(here, variant.width * lane, once=True))
        hashing = _Hashing(wide, self.schedule, carried[0], text if decrypt else carried[1:].__getitem__)
        if target is None:
            for lane in _ORDER:
                hashing.absorb(lane)
            result = []
        else:
            there = builder.add(target, offset)
            self._fetch_ahead(here, there)
            result = self._cipher(self._first_states(start, after), text, hashing)
            for lane, value in enumerate(result):
                wide.store(value, there, variant.width * lane)
        turn.add_incoming(turned, loop)
        start.add_incoming(after, loop)
        folded = wide.reduce_xor(hashing.finish())
        kept = [wide.zero_extend(folded)] + ([] if decrypt else result)
        for phi, value in zip(carried, kept, strict=True):
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_unsigned("<", turned, groups), loop, done)

        builder.position_at_end(done)
        ends = [builder.phi(folded.type)] + [builder.phi(wide.type) for _ in kept[1:]]
        for phi, seed, value in zip(ends, [self.hash, *seeds[1:]], [folded, *kept[1:]], strict=True):
            phi.add_incoming(seed, entry)
            phi.add_incoming(value, loop)
        self.hash = ends[0]
        if not decrypt:
            hashing = _Hashing(wide, self.schedule, wide.zero_extend(ends[0]), ends[1:].__getitem__)
            for lane in range(_VECTORS):
                hashing.absorb(lane)
            self.hash = wide.reduce_xor(hashing.finish())

    def _counter(self, number: ir.Value) -> ir.Value:
        """`number` in the place of the counter, big-endian, in every lane."""
        swap = declare(self.builder.module, "llvm.bswap.i32", ir.FunctionType(I32, [I32]))
        swapped = self.builder.call(swap, [self.builder.trunc(number, I32)])
        words = ir.Constant(ir.VectorType(I32, 4), [ir.Constant(I32, 0)] * 4)
        block = self.builder.insert_element(words, swapped, ir.Constant(I32, 3))
        return self.wide.broadcast(self.builder.bitcast(block, self.small.type))

    def _first_states(self, start: ir.Value, after: ir.Value) -> list[ir.Value]:
        """The counter blocks of a group after round key 0.

        Counters start at 2, so those of a group are `start` XOR 2, 3 and so on, without a carry; all but the last two,
        which are `after`, where the next group starts, XOR 0 and 1. One instruction a vector makes them.
        """
        wide, count = self.wide, self.variant.group // 16
        states = []
        for lane in range(_VECTORS):
            numbers = range(2 + lane * wide.blocks, 2 + (lane + 1) * wide.blocks)
            base = wide.blend(start, after, [number >= count for number in numbers])
            states.append(wide.xor(base, wide.counters([number % count for number in numbers])))
        return states

    def _fetch_ahead(self, here: ir.Value, there: ir.Value) -> None:
        for ahead in range(_PREFETCH_DISTANCE, _PREFETCH_DISTANCE + self.variant.group, _LINE):
            self.wide.prefetch(here, ahead, write=False)
            self.wide.prefetch(there, ahead, write=True)

    def _cipher(self, states: list[ir.Value], text: Texts, hashing: _Hashing) -> list[ir.Value]:
        wide, rounds = self.wide, self.variant.rounds
        for step in range(1, rounds):
            key = self._round_key(step)
            states = [wide.aes_round(state, key) for state in states]
            for lane in _ORDER[(step - 1) * _VECTORS // (rounds - 1) : step * _VECTORS // (rounds - 1)]:
                hashing.absorb(lane)
        key = self._round_key(rounds)
        return [wide.aes_last(state, wide.xor(key, text(lane))) for lane, state in enumerate(states)]

    def _round_key(self, step: int) -> ir.Value:
        return self.wide.load(self.schedule, _ROUND_KEYS + 64 * step, align=self.variant.width)

    # What is left: whole blocks one by one, then a part of one.

    def _blocks(
        self, source: ir.Value, target: ir.Value | None, left: ir.Value, counter: ir.Value, *, decrypt: bool
    ) -> None:
        builder = self.builder
        entry = builder.block
        head, body, rest, partial, done = (self.function.append_basic_block() for _ in range(5))
        builder.branch(head)

        builder.position_at_end(head)
        place, number = builder.phi(I64), builder.phi(I64)
        running = builder.phi(self.small.type)
        for phi, value in ((place, ir.Constant(I64, 0)), (number, counter), (running, self.hash)):
            phi.add_incoming(value, entry)
        after = builder.add(place, ir.Constant(I64, 16))
        builder.cbranch(builder.icmp_unsigned("<=", after, left), body, rest)

        builder.position_at_end(body)
        self.hash = running
        text = self.small.load(builder.add(source, place), once=True)
        result = self._block(text, number, decrypt=decrypt, cipher=target is not None)
        if target is not None:
            self.small.store(result, builder.add(target, place))
        place.add_incoming(after, body)
        number.add_incoming(builder.add(number, ir.Constant(I64, 1)), body)
        running.add_incoming(self.hash, body)
        builder.branch(head)

        builder.position_at_end(rest)
        bytes_left = builder.sub(left, place)
        builder.cbranch(builder.icmp_unsigned(">", bytes_left, ir.Constant(I64, 0)), partial, done)

        builder.position_at_end(partial)
        self.hash = running
        last = self._last(
            builder.add(source, place),
            None if target is None else builder.add(target, place),
            bytes_left,
            number,
            decrypt=decrypt,
        )
        builder.branch(done)

        builder.position_at_end(done)
        self.hash = builder.phi(self.small.type)
        self.hash.add_incoming(running, rest)
        self.hash.add_incoming(last, partial)

    def _block(self, text: ir.Value, number: ir.Value, *, decrypt: bool, cipher: bool) -> ir.Value:
        result = self.small.xor(text, self._keystream(number)) if cipher else text
        self._absorb(text if decrypt else result)
        return result

    def _last(
        self, source: ir.Value, target: ir.Value | None, size: ir.Value, number: ir.Value, *, decrypt: bool
    ) -> ir.Value:
        builder = self.builder
        scratch = builder.ptrtoint(self.scratch, I64)
        sixteen = ir.Constant(I64, 16)
        fill_zero(builder, scratch, sixteen)
        copy(builder, scratch, source, size)
        text = self.small.load(scratch)
        if target is None:
            self._absorb(text)
            return self.hash
        result = self.small.xor(text, self._keystream(number))
        self.small.store(result, scratch)
        copy(builder, target, scratch, size)
        fill_zero(builder, builder.add(scratch, size), builder.sub(sixteen, size))
        self._absorb(text if decrypt else self.small.load(scratch))
        fill_zero(builder, scratch, sixteen)
        return self.hash

    def _keystream(self, number: ir.Value) -> ir.Value:
        counter = self.builder.bitcast(self.builder.zext(number, ir.IntType(128)), self.small.type)
        block = self.small.reverse_bytes(self.small.add32(self.nonce, counter))
        keys = [
            self.small.load(self.schedule, _ROUND_KEYS + 64 * step, align=16) for step in range(self.variant.rounds + 1)
        ]
        return encrypt_block(self.small, block, keys)

    def _absorb(self, block: ir.Value) -> None:
        place = (_POWERS - 1) * 16
        key = self.small.load(self.schedule, _HASH_KEYS + place, align=16)
        halves = self.small.load(self.schedule, _HASH_HALVES + place, align=16)
        mixed = self.small.xor(self.hash, self.small.reverse_bytes(block))
        self.hash = self.small.reduce(*self.small.product(mixed, key, halves))


class _Hashing:
    """GHASH of one group: every block times its own power of H, one reduction at the end."""

    def __init__(self, wide: Emitter, schedule: ir.Value, start: ir.Value, text: Texts) -> None:
        self.wide = wide
        self.schedule = schedule
        self.start = start
        self.text = text
        self.sums: tuple[ir.Value, ...] = ()

    def absorb(self, lane: int) -> None:
        wide = self.wide
        text = wide.reverse_bytes(self.text(lane))
        if lane == 0:
            text = wide.xor(text, self.start)
        place = 16 * (_POWERS - _VECTORS * wide.blocks) + wide.width * lane
        key = wide.load(self.schedule, _HASH_KEYS + place, align=wide.width)
        halves = wide.load(self.schedule, _HASH_HALVES + place, align=wide.width)
        product = wide.product(text, key, halves)
        self.sums = tuple(map(wide.xor, self.sums, product)) if self.sums else product

    def finish(self) -> ir.Value:
        return self.wide.reduce(*self.sums)


def fill_zero(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    """Overwrite memory with zeros, in a way that the optimiser may not leave out."""
    pointer = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, I8, I64, I1])
    fill = declare(builder.module, "llvm.memset.p0.i64", signature)
    builder.call(fill, [builder.inttoptr(address, pointer), ir.Constant(I8, 0), size, ir.Constant(I1, 1)])


def copy(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, size: ir.Value) -> None:
    """Copy memory that does not overlap."""
    pointer = I8.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [pointer, pointer, I64, I1])
    move = declare(builder.module, "llvm.memcpy.p0.p0.i64", signature)
    addresses = (builder.inttoptr(address, pointer) for address in (target, source))
    builder.call(move, [*addresses, size, ir.Constant(I1, 0)])
