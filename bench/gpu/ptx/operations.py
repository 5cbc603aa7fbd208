"""Instructions without memory: each becomes a function of the mask of the threads that execute it."""

from __future__ import annotations

import numpy as np

from bench.gpu.ptx.parse import size_of

_BINARY = {"xor": np.bitwise_xor, "and": np.bitwise_and, "or": np.bitwise_or, "add": np.add, "sub": np.subtract,
           "min": np.minimum, "max": np.maximum, "div": np.floor_divide, "rem": np.remainder}  # fmt: skip
_LOGICAL = {
    "xor": np.logical_xor,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "mov": np.positive,
}
_COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
            "hs": np.greater_equal, "ltu": lambda a, b, **to: np.logical_not(np.greater_equal(a, b), **to),
            "num": lambda a, b, **to: np.logical_not(np.isnan(a) | np.isnan(b), **to)}  # fmt: skip


def dtype_of(suffix):
    kind = {"s": "i", "f": "f"}.get(suffix[0], "u")
    return np.dtype(f"{kind}{size_of(suffix)}")


class Registers:
    """The registers of a block, a vector for each, which keeps its place in memory."""

    def __init__(self, kernel, symbols):
        self.threads, self.symbols, self.named, self._all = kernel.threads, symbols, {}, []
        random = np.random.default_rng(7)
        for kind, names in kernel.registers:
            dtype, shape = np.dtype(bool if kind == "pred" else f"u{size_of(kind)}"), (len(names), kernel.threads)
            noise = random.integers(0, 1, shape, dtype, endpoint=True) if kind == "pred" else np.frombuffer(
                random.bytes(dtype.itemsize * shape[0] * shape[1]), dtype).reshape(shape)  # fmt: skip
            self._all.append((noise, noise.copy()))
            self.named |= zip(names, self._all[-1][1], strict=True)
        numbers = np.arange(kernel.threads, dtype=np.uint32)
        self.specials = {
            "%tid.x": numbers,
            "%laneid": numbers % np.uint32(32),
            "%ntid.x": np.array(kernel.threads, np.uint32),
            "%ctaid.x": np.array(0, np.uint32),
            "%nctaid.x": np.array(0, np.uint32),
        }

    def begin(self, block, blocks):
        """Fill the registers with noise, as they were never written."""
        for noise, registers in self._all:
            registers[:] = noise
        self.specials["%ctaid.x"][...], self.specials["%nctaid.x"][...] = block, blocks

    def read(self, operand, suffix):
        """Return a vector or a scalar of the type of a suffix such as "u32". A vector follows its register."""
        dtype = dtype_of(suffix)
        if isinstance(operand, int):
            return np.array(operand & (1 << 8 * dtype.itemsize) - 1, f"u{dtype.itemsize}").view(dtype)
        if operand in self.symbols:
            return np.array(self.symbols[operand], np.uint64).astype(dtype)
        register = self.specials[operand] if operand in self.specials else self.named[operand]
        if register.itemsize == dtype.itemsize:
            return register.view(dtype)
        return register.view(dtype)[:: register.itemsize // dtype.itemsize]  # the low bytes of a larger register

    def bytes(self, operand):
        """Return the four bytes of each thread's register, or of a number, as rows."""
        if isinstance(operand, int):
            return np.broadcast_to(np.array(operand, np.uint32).reshape(1).view(np.uint8), (self.threads, 4))
        return self.named[operand].view(np.uint8).reshape(self.threads, -1)[:, :4]


def build(instruction, registers):
    """Return `run(mask)` for an instruction that is neither control nor memory; `mask` is True for all threads."""
    name, suffix = instruction.parts[0], instruction.parts[-1]
    if suffix == "pred":
        d, *sources = (registers.named[operand] for operand in instruction.operands)
        return lambda mask: _LOGICAL[name](*sources, out=d, where=mask)
    special = _SPECIAL.get(name)
    if special:
        run = special(instruction, registers)
        if run is not None:
            return run
    elif name in _BINARY and not suffix.startswith("f") and (name not in {"div", "rem"} or suffix[0] == "u"):
        d, a, b = (registers.read(operand, suffix) for operand in instruction.operands)
        function = _BINARY[name]
        return lambda mask: function(a, b, out=d, where=mask)
    raise NotImplementedError(f"{instruction.name} at line {instruction.line}")


def _mov(instruction, registers):
    suffix = instruction.parts[-1]
    target, source = instruction.operands
    half = f"b{4 * size_of(suffix)}"
    if isinstance(source, tuple):
        low, high = (registers.read(part, half) for part in source)
        d, shift = registers.read(target, suffix), 4 * size_of(suffix)
        return lambda mask: np.copyto(d, low.astype(d.dtype) | high.astype(d.dtype) << d.dtype.type(shift), where=mask)
    a = registers.read(source, suffix)
    if not isinstance(target, tuple):
        d = registers.read(target, suffix)
        return lambda mask: np.copyto(d, a, where=mask)
    parts = [registers.read(part, half) for part in target]

    def run(mask):
        for number, part in enumerate(parts):
            np.copyto(part, a >> a.dtype.type(4 * size_of(suffix) * number), where=mask, casting="unsafe")

    return run


def _setp(instruction, registers):
    _, comparison, *_, suffix = instruction.parts
    d, a, b = instruction.operands
    a, b, d = registers.read(a, suffix), registers.read(b, suffix), registers.named[d]
    return lambda mask: _COMPARE[comparison](a, b, out=d, where=mask)


def _selp(instruction, registers):
    *values, p = instruction.operands
    d, a, b = (registers.read(each, instruction.parts[-1]) for each in values)
    p = registers.named[p]
    return lambda mask: np.copyto(d, np.where(p, a, b), where=mask)


def _not(instruction, registers):
    d, a = (registers.read(operand, instruction.parts[-1]) for operand in instruction.operands)
    return lambda mask: np.invert(a, out=d, where=mask)


def _neg(instruction, registers):
    d, a = (registers.read(operand, instruction.parts[-1]) for operand in instruction.operands)
    return lambda mask: np.negative(a, out=d, where=mask)


def _shift(instruction, registers):
    suffix = instruction.parts[-1]
    d, a, by = instruction.operands
    a, by, d = registers.read(a, suffix), registers.read(by, "u32"), registers.read(d, suffix)
    function = np.left_shift if instruction.parts[0] == "shl" else np.right_shift
    return lambda mask: function(a, by.astype(a.dtype), out=d, where=mask)


def _float(function):
    """Make instructions on floats, rounded to the nearest and to even, with subnormal ones and one NaN."""

    def special(instruction, registers):
        if instruction.parts[1:] not in (["rn", "f32"], ["f32"]):
            return None
        d, *sources = (registers.read(operand, "f32") for operand in instruction.operands)

        def run(mask):
            with np.errstate(all="ignore"):
                found = function(*sources)
            np.copyto(d, np.where(np.isnan(found), np.uint32(0x7FFFFFFF).view(np.float32), found), where=mask)

        return run

    return special


def fused(a, b, c):
    """Return a times b, which a double holds, plus c, rounded once: to an odd double, then to a float (Boldo, 2008)."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    back = total - product
    error = product - (total - back) + (c - back)
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where((np.abs(error) > 0) & (total.view(np.int64) % 2 == 0), odd, total).astype(np.float32)


def _mul(instruction, registers):
    _, *how, suffix = instruction.parts
    if suffix == "f32":
        return _float(np.multiply)(instruction, registers)
    d, *sources = instruction.operands
    a, b = (registers.read(source, suffix) for source in sources)
    wide = f"{suffix[0]}{16 * size_of(suffix)}" if "wide" in how else suffix
    d = registers.read(d, wide)
    if "hi" in how:
        return None
    return lambda mask: np.multiply(a, b, out=d, where=mask, dtype=d.dtype)


def _mad(instruction, registers):
    if instruction.parts[1] != "lo":
        return None
    d, a, b, c = (registers.read(operand, instruction.parts[-1]) for operand in instruction.operands)
    return lambda mask: np.copyto(d, a * b + c, where=mask)


def _cvt(instruction, registers):
    *_, to, of = instruction.parts
    if {to[0], of[0]} - set("us"):
        return None
    d, a = instruction.operands
    register, a = registers.named[d], registers.read(a, of)  # of a wider register the low bytes
    d = register.view(f"{dtype_of(to).kind}{register.itemsize}")  # which a narrow value fills
    if size_of(to) == register.itemsize:
        return lambda mask: np.copyto(d, a, where=mask, casting="unsafe")
    return lambda mask: np.copyto(d, a.astype(dtype_of(to)), where=mask)


def _prmt(instruction, registers):
    d, a, b, selector = instruction.operands
    if instruction.name != "prmt.b32":
        return None
    a, b, d = registers.bytes(a), registers.bytes(b), registers.read(d, "b32")
    if isinstance(selector, int) and not selector & 0x8888:
        made = np.empty((registers.threads, 4), np.uint8)
        taken = [(made[:, place], (b if number & 4 else a)[:, number & 3]) for place, number in
                 enumerate(selector >> 4 * place & 7 for place in range(4))]  # fmt: skip

        def run_plain(mask):
            for place, source in taken:
                place[:] = source
            np.copyto(d, made.view(np.uint32)[:, 0], where=mask)

        return run_plain
    selectors = registers.read(selector, "b32")

    def run(mask):
        nibbles = np.broadcast_to(selectors, registers.threads)[:, None] >> np.array([0, 4, 8, 12], np.uint32) & 15
        found = np.take_along_axis(np.concatenate([a, b], axis=1), (nibbles & 7).astype(np.int64), axis=1)
        found = np.where(nibbles > 7, (found >> 7) * np.uint8(255), found)
        np.copyto(d, found.view(np.uint32)[:, 0], where=mask)

    return run


def _dp4a(instruction, registers):
    d, a, b, c = instruction.operands
    if instruction.name != "dp4a.u32.u32":
        return None
    d, c = registers.read(d, "u32"), registers.read(c, "u32")
    if (
        isinstance(b, int) and sum(byte != 0 for byte in b.to_bytes(4, "little")) == 1
    ):  # a byte, times a number, and added
        place = next(place for place in range(4) if b >> 8 * place & 255)
        a, factor = registers.bytes(a)[:, place], np.uint32(b >> 8 * place)
        return lambda mask: np.add(np.multiply(a, factor, dtype=np.uint32), c, out=d, where=mask)
    a, b = registers.bytes(a), registers.bytes(b)
    return lambda mask: np.add((a.astype(np.uint32) * b).sum(axis=1, dtype=np.uint32), c, out=d, where=mask)


def _shf(instruction, registers):
    _, side, kind, suffix = instruction.parts
    if (kind, suffix) != ("wrap", "b32"):
        return None
    d, a, b, by = (registers.read(operand, "u32") for operand in instruction.operands)
    wide = np.uint64

    def run(mask):
        both = a.astype(wide) | b.astype(wide) << wide(32)
        moved = both >> (by & 31).astype(wide) if side == "r" else both << (by & 31).astype(wide) >> wide(32)
        np.copyto(d, moved, where=mask, casting="unsafe")

    return run


def _clmad(instruction, registers):
    """Build half of the carry-less product of two double words, plus a third (PTX ISA 9.3)."""
    _, half, suffix = instruction.parts
    if suffix != "u64":
        return None
    d, a, b, c = (registers.read(operand, "u64") for operand in instruction.operands)

    def run(mask):
        parts = [(x & np.uint64(0xFFFFFFFF), x >> np.uint64(32)) for x in (a, b)]
        products = [_carryless(x, y) for x in parts[0] for y in parts[1]]
        middle = products[1] ^ products[2]
        low, high = products[0] ^ middle << np.uint64(32), products[3] ^ middle >> np.uint64(32)
        found = low if half == "lo" else high
        np.copyto(d, found ^ c, where=mask)

    return run


_HOLES = np.uint64(0x1111111111111111) << np.arange(4, dtype=np.uint64)[:, None]


def _carryless(a, b):
    """Multiply words of 32 bits by integers whose bits are four apart, so that no sum of eight reaches the next."""
    products = (a & _HOLES)[:, None] * (b & _HOLES)  # by the residues of the places of their bits
    found = np.zeros(products.shape[2], np.uint64)
    for residue in range(4):
        column = products[0, residue].copy()
        for number in range(1, 4):
            column ^= products[number, (residue - number) % 4]
        found |= column & _HOLES[residue]
    return found


def _bfi(instruction, registers):
    *values, start, size = instruction.operands
    if not isinstance(start, int) or not isinstance(size, int):
        return None
    d, a, b = (registers.read(each, instruction.parts[-1]) for each in values)
    bits = d.dtype.type(((1 << size) - 1) << start & (1 << 8 * d.itemsize) - 1)
    return lambda mask: np.copyto(d, b & ~bits | a << d.dtype.type(start) & bits, where=mask)


def _lop3(instruction, registers):
    *values, table = instruction.operands
    d, a, b, c = (registers.read(each, "b32") for each in values)
    ones = [(number & 4, number & 2, number & 1) for number in range(8) if table >> number & 1]

    def run(mask):
        found = np.zeros(registers.threads, np.uint32)
        for in_a, in_b, in_c in ones:
            found |= (a if in_a else ~a) & (b if in_b else ~b) & (c if in_c else ~c)
        np.copyto(d, found, where=mask)

    return run


_SPECIAL = {"mov": _mov, "setp": _setp, "selp": _selp, "not": _not, "neg": _neg, "mul": _mul, "mad": _mad, "cvt": _cvt,
            "prmt": _prmt, "dp4a": _dp4a, "shf": _shf, "bfi": _bfi, "lop3": _lop3, "clmad": _clmad, "shl": _shift,
            "shr": _shift, "abs": _float(np.abs), "fma": _float(fused)}  # fmt: skip
