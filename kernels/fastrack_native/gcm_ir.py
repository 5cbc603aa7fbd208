"""Build AES-GCM of one chunk as LLVM functions on vector instructions.

Each builder adds one function to a module: `expand_key` expands a message key to a *schedule*, and `open`, `verify` and
`seal` process one chunk of up to 16 KiB with it (NIST SP 800-38D sections 7.1 and 7.2, with a 96-bit nonce, no
associated data and a 128-bit tag). Counter mode and GHASH are interleaved, eight vectors at a time, in one pass.

The function of a run of chunks has its own stack frame and clears the registers when it returns. Registers that it
spilled to the stack are overwritten by the function of `stack_wiper`, which its caller calls before it counts the
chunks as done.

No memory access and no branch depends on a secret, except for the branch on the result of authentication. Ciphertext is
read from memory once: the bytes that are authenticated are those that are decrypted, even if another process writes to
them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from llvmlite import ir

from fastrack._crypto.isa import InstructionSet
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack_native.llvm import I1, I8, I32, I64, I128, VOID, Emitter, call, define, emit_loop, pointer

Builder = Callable[[ir.Function, "Variant"], None]  # emits the code of a function
VectorAt = Callable[[int], ir.Value]  # returns the vector of a group at an index

_VECTORS = 8  # processed at once: enough to hide the latency of an AES round

# The order of hashing: the first vector depends on the hash of the previous iteration, so it comes last.
_ORDER = (*range(1, _VECTORS), 0)

LINE = 64  # bytes of a cache line
_PREFETCH_DISTANCE = 2048  # in bytes; gains 2 to 3 % where memory bandwidth is the limit

# The layout of a schedule, in bytes from a 64-byte boundary.
_POWERS = 32  # of the hash key: the number of blocks of a group at the largest width
_ROUND_KEYS = 0  # 15 round keys, each repeated four times, so that one load fills a vector of any width
_HASH_KEYS = _ROUND_KEYS + 15 * 64  # H^32 ... H^1, byte-reversed and pre-shifted
_HASH_HALVES = _HASH_KEYS + _POWERS * 16  # the XOR of their words, for Karatsuba
_NONCE = _HASH_HALVES + _POWERS * 16  # the base nonce and a zero counter, byte-reversed

# Bytes of stack that a wiper overwrites. The largest frame takes 2 KiB. A signal handler saves the vector registers
# below it, which takes 3 KiB, or 11 KiB if AMX is in use.
STACK_SIZE = 16 << 10


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the code: bits of the key, and the instruction set."""

    bits: int
    isa: InstructionSet

    @property
    def rounds(self) -> int:
        return {128: 10, 256: 14}[self.bits]

    @property
    def group(self) -> int:
        """Bytes that one iteration of the main loop processes."""
        return _VECTORS * self.isa.width

    @property
    def suffix(self) -> str:
        """The end of the names of functions."""
        return "_".join(map(str, (self.bits, *self.isa)))


def chunk_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function `name` ("expand_key", "open", "verify" or "seal") of that variant; build it if needed.

    `expand_key` takes `(schedule, material)`, the others `(schedule, source, target, chunk, size)`, and return 1 if the
    chunk is authentic, else 0; `verify` ignores its target. Addresses, sizes and results are 64-bit integers.
    """
    build, arguments = _BUILDERS[name]
    return define_chunk(module, variant, name, arguments, build)


def define_chunk(module: ir.Module, variant: Variant, name: str, arguments: int, build: Builder) -> ir.Function:
    """Return the function of a chunk with so many arguments; `build` it if needed.

    It clears registers in case it is not inlined into its run.
    """
    symbol, inlines = f"fastrack_{name}_{variant.suffix}", name != "expand_key"
    return define(
        module, symbol, arguments, lambda made: build(made, variant), variant.isa, inlines=inlines, clears=True
    )


def run_function(module: ir.Module, variant: Variant, name: str) -> ir.Function:
    """Return the function that applies `chunk_function(module, variant, name)` to a run of chunks; build it if needed.

    It takes `(schedule, source, target, first, count, size)`, where `size` is that of the plaintext from the first
    chunk on, and returns the index of the first chunk that failed authentication, or the count. The function of a chunk
    is inlined, as a call for each chunk costs up to a tenth of the time.
    """
    steps = (CHUNK_SIZE, SEALED_CHUNK_SIZE) if name == "seal" else (SEALED_CHUNK_SIZE, CHUNK_SIZE)
    return define_run(module, variant, name, chunk_function(module, variant, name), *steps)


def define_run(
    module: ir.Module, variant: Variant, name: str, chunk: ir.Function, source_step: int, target_step: int
) -> ir.Function:
    """Return the function that applies the function of a chunk to a run; build it if needed.

    Arguments that only some functions of chunks have come last, and are the same for each chunk.
    """

    def emit(function: ir.Function) -> None:
        schedule, source, target, first, count, size, *others = function.args
        builder = ir.IRBuilder(function.append_basic_block())

        def body(index: ir.Value, bad: ir.Value) -> list[ir.Value]:
            source_address = builder.add(source, builder.mul(index, I64(source_step)))
            target_address = builder.add(target, builder.mul(index, I64(target_step)))
            remaining = builder.sub(size, builder.mul(index, I64(CHUNK_SIZE)))
            is_full = builder.icmp_signed(">=", remaining, I64(CHUNK_SIZE))
            length = builder.select(is_full, I64(CHUNK_SIZE), remaining)
            work = schedule, source_address, target_address, builder.add(first, index), length, *others
            good = builder.call(chunk, work)
            is_bad = builder.icmp_unsigned("==", good, I64(0))
            is_first = builder.and_(is_bad, builder.icmp_unsigned("==", bad, count))
            return [builder.select(is_first, index, bad)]

        builder.ret(*emit_loop(builder, count, [count], body))

    symbol, arguments = f"fastrack_{name}_run_{variant.suffix}", len(chunk.args) + 1
    return define(module, symbol, arguments, emit, variant.isa, clears=True)


def stack_wiper(module: ir.Module) -> ir.Function:
    """Return the function `()` that overwrites the stack below the frame of its caller; build it if needed.

    Functions that its caller called before have left their data there.
    """

    def emit(function: ir.Function) -> None:
        builder = ir.IRBuilder(function.append_basic_block())
        stack = builder.alloca(I8, STACK_SIZE)
        fill_zero(builder, builder.ptrtoint(stack, I64), I64(STACK_SIZE))
        builder.ret(I64(0))

    return define(module, "fastrack_wipe_stack", 0, emit)


# Key expansion: FIPS 197 section 5.2 (round keys), SP 800-38D section 7.1 step 1 (hash key).


def _build_expand_key(function: ir.Function, variant: Variant) -> None:
    schedule, material = function.args
    builder = ir.IRBuilder(function.append_basic_block())
    emit = Emitter(builder, variant.isa.one_block)
    wide = Emitter(builder, variant.isa.one_block._replace(width=64))

    keys = expand_key(emit, material, variant.bits)
    for index, key in enumerate(keys):
        wide.store(wide.broadcast(key), schedule, _ROUND_KEYS + 64 * index, align=64)

    hash_key = encrypt_block(emit, emit.words(0, 0), keys)
    first = power = emit.times_x(emit.reverse_bytes(hash_key))
    for exponent in range(1, _POWERS + 1):
        offset = (_POWERS - exponent) * 16
        emit.store(power, schedule, _HASH_KEYS + offset, align=16)
        emit.store(emit.halves(power), schedule, _HASH_HALVES + offset, align=16)
        power = emit.multiply(power, first)

    low, high = (
        builder.zext(builder.load(pointer(builder, material, variant.bits // 8 + place, kind), align=1), I128)
        for place, kind in ((0, I64), (8, I32))
    )
    block = builder.or_(low, builder.shl(high, I128(64)))
    emit.store(emit.reverse_bytes(builder.bitcast(block, emit.type)), schedule, _NONCE, align=16)
    builder.ret(I64(1))


def expand_key(emit: Emitter, material: ir.Value, bits: int) -> list[ir.Value]:
    """Return the round keys."""
    count = bits // 128
    keys = [emit.load(material, 16 * index) for index in range(count)]
    for constant in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0x1B, 0x36)[: 10 if bits == 128 else 7]:
        keys.append(_next_key(emit, keys[-count], keys[-1], constant, (13, 14, 15, 12)))
        if bits == 256:
            keys.append(_next_key(emit, keys[-2], keys[-1], 0, (12, 13, 14, 15)))
    return keys[:15]


def _next_key(emit: Emitter, before: ir.Value, last: ir.Value, constant: int, word: Sequence[int]) -> ir.Value:
    """Return the round key after `before`; `word` has the places in `last` of the bytes to substitute.

    The last round of AES substitutes bytes. ShiftRows leaves a block of four equal columns as it is.
    """
    builder = emit.builder
    columns = emit.permute_blocks(last, I8, (*word,) * 4)
    mixed = emit.aes_last(columns, emit.words(*(constant << 32 | constant,) * 2))
    running = builder.bitcast(before, I128)
    for shift in (32, 64):
        running = builder.xor(running, builder.shl(running, I128(shift)))
    return emit.xor(builder.bitcast(running, emit.type), mixed)


def encrypt_block(emit: Emitter, block: ir.Value, keys: list[ir.Value]) -> ir.Value:
    state = emit.xor(block, keys[0])
    for key in keys[1:-1]:
        state = emit.aes_round(state, key)
    return emit.aes_last(state, keys[-1])


# Working a chunk.


def _build_open(function: ir.Function, variant: Variant, *, writes: bool = True) -> None:
    schedule, source, target, chunk, size = function.args
    work = _Chunk(function, variant, schedule, chunk)
    work.run(size, source, target if writes else None)
    work.finish(size, work.builder.add(source, size), target if writes else None)


def _build_seal(function: ir.Function, variant: Variant) -> None:
    schedule, source, target, chunk, size = function.args
    work = _Chunk(function, variant, schedule, chunk, decrypts=False)
    work.run(size, source, target)
    work.small.store(work.tag(size), work.builder.add(target, size))
    work.builder.ret(I64(1))


_BUILDERS: dict[str, tuple[Builder, int]] = {
    "expand_key": (_build_expand_key, 2),
    "open": (_build_open, 5),
    "verify": (partial(_build_open, writes=False), 5),
    "seal": (_build_seal, 5),
}


class _Chunk:
    """An emitter of the code of one chunk: groups of vectors first, then single blocks, then the last bytes.

    `hashes` has the running GHASH, or several of them.
    """

    def __init__(
        self,
        function: ir.Function,
        variant: Variant,
        schedule: ir.Value,
        chunk: ir.Value,
        *,
        decrypts: bool = True,
        hashes: int = 1,
    ) -> None:
        self.variant = variant
        self.schedule = schedule
        self.decrypts = decrypts
        self.builder = ir.IRBuilder(function.append_basic_block())
        self.small = Emitter(self.builder, variant.isa.one_block)
        self.wide = Emitter(self.builder, variant.isa)
        self.scratch = self.builder.alloca(I8, 16)
        # The nonce of chunk k is the base nonce XOR k, big-endian; byte-reversed, the counter is the lowest 32 bits.
        number = self.builder.shl(self.builder.zext(chunk, I128), I128(32))
        base = self.small.load(schedule, _NONCE, align=16)
        self.nonce = self.small.xor(base, self.builder.bitcast(number, base.type))
        self.hashes = [self.small.words(0, 0)] * hashes

    def run(self, size: ir.Value, *addresses: ir.Value | None) -> None:
        """Process so many bytes of the buffers at these addresses: source and target, which may be None."""
        builder, group = self.builder, I64(self.variant.group)
        groups = builder.udiv(size, group)
        self._groups(groups, *addresses)
        done = builder.mul(groups, group)
        remaining = builder.sub(size, done)
        counter = builder.add(builder.udiv(done, I64(16)), I64(2))
        rest = self._moved(addresses, done)
        blocks = builder.udiv(remaining, I64(16))
        self._blocks(blocks, counter, *rest)
        done = builder.mul(blocks, I64(16))
        left = builder.sub(remaining, done)
        before = builder.block, self.hashes
        with builder.if_then(builder.icmp_unsigned(">", left, I64(0))):
            self._last(left, builder.add(counter, blocks), *self._moved(rest, done))
            within = builder.block, self.hashes
        self.hashes = [builder.phi(self.small.type) for _ in self.hashes]
        for block, values in (before, within):
            for phi, value in zip(self.hashes, values, strict=True):
                phi.add_incoming(value, block)

    def _moved(self, addresses: Iterable[ir.Value | None], offset: ir.Value) -> list[ir.Value | None]:
        return [None if address is None else self.builder.add(address, offset) for address in addresses]

    def tag(self, size: ir.Value, number: int = 0) -> ir.Value:
        """Return the tag of a hash: GHASH with the length block, XOR the encrypted first counter block."""
        bits = self.builder.zext(self.builder.shl(size, I64(3)), I128)
        self._absorb(self.small.reverse_bytes(self.builder.bitcast(bits, self.small.type)), number)
        mask = self._keystream(I64(1))
        return self.small.xor(self.small.reverse_bytes(self.hashes[number]), mask)

    def finish(self, size: ir.Value, expected: ir.Value, target: ir.Value | None, number: int = 0) -> None:
        """Return 1 if the tag of a hash is that at an address, else fill the target with zeros and return 0."""
        builder = self.builder
        good = self.same(self.tag(size, number), self.small.load(expected, once=True))
        if target is not None:
            with builder.if_then(builder.icmp_unsigned("==", good, I64(0)), likely=False):
                fill_zero(builder, target, size)
        builder.ret(good)

    def same(self, left: ir.Value, right: ir.Value) -> ir.Value:
        difference = self.builder.bitcast(self.small.xor(left, right), I128)
        equal = self.builder.icmp_unsigned("==", difference, I128(0))
        return self.builder.zext(equal, I64)

    # The main loop. Decryption hashes the ciphertext that it reads. Encryption hashes the ciphertext of the previous
    # iteration, held in registers, so that the cipher and the hash of one iteration are independent.

    def _groups(self, groups: ir.Value, *addresses: ir.Value | None) -> None:
        builder, wide, variant, decrypts = self.builder, self.wide, self.variant, self.decrypts
        source, target = addresses
        origin = self._origin()
        # The first iteration of encryption hashes zeros, which leave a hash of zero unchanged.
        zeros = [] if decrypts else [wide.words(0, 0)] * _VECTORS

        # `start` is the first counter block less 2, XOR round key 0, in every lane.
        def body(iteration: ir.Value, start: ir.Value, running: ir.Value, *before: ir.Value) -> list[ir.Value]:
            next_start, offset = self._next_start(origin, iteration), builder.mul(iteration, I64(variant.group))
            source_address = builder.add(source, offset)
            # A vector is loaded where it is first used: all at once would not fit into the registers.
            text = cache(lambda lane: wide.load(source_address, variant.isa.width * lane, once=True))
            hashing = _Hashing(wide, self.schedule, running, text if decrypts else before.__getitem__)
            if target is None:
                return [next_start, hashing.finish()]
            target_address = builder.add(target, offset)
            self._prefetch(source_address, target_address)
            result = self._work_group(start, next_start, text, hashing)
            for lane, value in enumerate(result):
                wide.store(value, target_address, variant.isa.width * lane)
            return [next_start, hashing.finish(), *([] if decrypts else result)]

        _, running, *last = emit_loop(builder, groups, [origin, *self.hashes, *zeros], body)
        if not decrypts:
            running = _Hashing(wide, self.schedule, running, last.__getitem__).finish()
        self.hashes = [running]

    def _next_start(self, origin: ir.Value, iteration: ir.Value) -> ir.Value:
        blocks = self.builder.mul(self.builder.add(iteration, I64(1)), I64(self.variant.group // 16))
        return self.wide.xor(origin, self._counter(blocks))

    def _work_group(self, start: ir.Value, next_start: ir.Value, text: VectorAt, hashing: _Hashing) -> list[ir.Value]:
        return self._cipher(self._first_states(start, next_start), text, hashing)

    def _origin(self) -> ir.Value:
        """Return the block with a counter of zero, XOR round key 0, in every lane."""
        return self.wide.xor(self.wide.broadcast(self.small.reverse_bytes(self.nonce)), self._round_key(0))

    def _counter(self, number: ir.Value) -> ir.Value:
        """Return `number` at the position of the counter, big-endian, in every lane."""
        swapped = call(self.builder, "llvm.bswap.i32", I32, self.builder.trunc(number, I32))
        block = self.builder.insert_element(ir.VectorType(I32, 4)([0] * 4), swapped, I32(3))
        return self.wide.broadcast(self.builder.bitcast(block, self.small.type))

    def _first_states(self, start: ir.Value, next_start: ir.Value) -> list[ir.Value]:
        """Return the counter blocks of a group XOR round key 0, with one instruction a vector.

        Counters start at 2, so those of a group are `start` XOR 2, 3 and so on, without a carry, except for the last
        two: they are `next_start`, the start of the next group, XOR 0 and 1.
        """
        wide, count = self.wide, self.variant.group // 16
        states = []
        for lane in range(_VECTORS):
            numbers = range(2 + lane * wide.blocks, 2 + (lane + 1) * wide.blocks)
            base = wide.blend(start, next_start, [number >= count for number in numbers])
            states.append(wide.xor(base, wide.counters([number % count for number in numbers])))
        return states

    def _prefetch(self, source: ir.Value, target: ir.Value) -> None:
        for offset in range(_PREFETCH_DISTANCE, _PREFETCH_DISTANCE + self.variant.group, LINE):
            self.wide.prefetch(source, offset)
            self.wide.prefetch(target, offset, write=True)

    def _cipher(self, states: list[ir.Value], text: VectorAt | None, *hashings: _Hashing) -> list[ir.Value]:
        """Return the text of a group XOR its keystream, or the keystream if there is no text."""
        wide, rounds = self.wide, self.variant.rounds
        for step in range(1, rounds):
            key = self._round_key(step)
            states = [wide.aes_round(state, key) for state in states]
            for hashing in hashings:
                hashing.absorb(step * _VECTORS // (rounds - 1))
        key = self._round_key(rounds)
        if text is None:
            return [wide.aes_last(state, key) for state in states]
        return [wide.aes_last(state, wide.xor(key, text(lane))) for lane, state in enumerate(states)]

    def _round_key(self, step: int) -> ir.Value:
        return self.wide.load(self.schedule, _ROUND_KEYS + 64 * step, align=self.variant.isa.width)

    # The rest of a chunk.

    def _blocks(self, blocks: ir.Value, counter: ir.Value, *addresses: ir.Value | None) -> None:
        builder, (source, target) = self.builder, addresses

        def body(index: ir.Value, running: ir.Value) -> list[ir.Value]:
            self.hashes = [running]
            offset = builder.mul(index, I64(16))
            text = result = self.small.load(builder.add(source, offset), once=True)
            if target is not None:
                result = self._work_block(text, builder.add(counter, index))
                self.small.store(result, builder.add(target, offset))
            self._absorb(text if self.decrypts else result)
            return self.hashes

        self.hashes = emit_loop(builder, blocks, self.hashes, body)

    def _last(self, size: ir.Value, number: ir.Value, *addresses: ir.Value | None) -> None:
        builder, (source, target) = self.builder, addresses
        scratch = builder.ptrtoint(self.scratch, I64)
        fill_zero(builder, scratch, I64(16))
        # LLVM would copy from the source again where the bytes stay as they are, and they may be others by then.
        copy(builder, scratch, source, size, once=True)
        text = self.small.load(scratch)
        if target is None:
            self._absorb(text)
            return
        result = self._work_block(text, number)
        self.small.store(result, scratch)
        copy(builder, target, scratch, size)
        fill_zero(builder, builder.add(scratch, size), builder.sub(I64(16), size))
        self._absorb(text if self.decrypts else self.small.load(scratch))
        fill_zero(builder, scratch, I64(16))

    def _work_block(self, text: ir.Value, number: ir.Value) -> ir.Value:
        return self.small.xor(text, self._keystream(number))

    def _keystream(self, number: ir.Value) -> ir.Value:
        counter = self.builder.bitcast(self.builder.zext(number, I128), self.small.type)
        block = self.small.reverse_bytes(self.small.add32(self.nonce, counter))
        keys = [
            self.small.load(self.schedule, _ROUND_KEYS + 64 * step, align=16) for step in range(self.variant.rounds + 1)
        ]
        return encrypt_block(self.small, block, keys)

    def _absorb(self, block: ir.Value, number: int = 0) -> None:
        offset = (_POWERS - 1) * 16
        key = self.small.load(self.schedule, _HASH_KEYS + offset, align=16)
        halves = self.small.load(self.schedule, _HASH_HALVES + offset, align=16)
        mixed = self.small.xor(self.hashes[number], self.small.reverse_bytes(block))
        value = self.small.reduce(*self.small.product(mixed, key, halves))
        self.hashes = [value if index == number else other for index, other in enumerate(self.hashes)]


class _Hashing:
    """An emitter of GHASH of one group: each block times its own power of H, and one reduction at the end."""

    def __init__(self, wide: Emitter, schedule: ir.Value, start: ir.Value, text: VectorAt) -> None:
        self.wide = wide
        self.schedule = schedule
        self.start = wide.zero_extend(start)
        self.text = text
        self.sums: tuple[ir.Value, ...] = ()
        self.absorbed = 0

    def absorb(self, count: int) -> None:
        """Absorb vectors until `count` of them are."""
        wide = self.wide
        for lane in _ORDER[self.absorbed : count]:
            text = wide.reverse_bytes(self.text(lane))
            if lane == 0:
                text = wide.xor(text, self.start)
            offset = 16 * (_POWERS - _VECTORS * wide.blocks) + wide.width * lane
            key = wide.load(self.schedule, _HASH_KEYS + offset, align=wide.width)
            halves = wide.load(self.schedule, _HASH_HALVES + offset, align=wide.width)
            product = wide.product(text, key, halves)
            self.sums = tuple(map(wide.xor, self.sums, product)) if self.sums else product
        self.absorbed = count

    def finish(self) -> ir.Value:
        """Absorb the vectors that are left, and return the hash."""
        self.absorb(_VECTORS)
        return self.wide.reduce_xor(self.wide.reduce(*self.sums))


def fill_zero(builder: ir.IRBuilder, address: ir.Value, size: ir.Value) -> None:
    """Overwrite memory with zeros, by a store that the optimizer must not remove."""
    call(builder, "llvm.memset.p0.i64", VOID, pointer(builder, address, kind=I8), I8(0), size, I1(1))


def copy(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, size: ir.Value, *, once: bool = False) -> None:
    """Copy memory between buffers that do not overlap. With `once`, `source` is read here, and not again later."""
    memory = (pointer(builder, address, kind=I8) for address in (target, source))
    call(builder, "llvm.memcpy.p0.p0.i64", VOID, *memory, size, I1(int(once)))
