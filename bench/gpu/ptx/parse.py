"""Parse the PTX that NVRTC generates: globals, and kernels as lists of instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\(")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(\w+)(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+?)(?:<(\d+)>)?;")
_GLOBAL = re.compile(
    r"\.(?:visible\s+\.)?(?:global|const)\s+\.align\s+\d+\s+\.(\w+)\s+(\w+)(?:\[(\d+)\])?(?:\s*=\s*(.+?))?;"
)
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[\d*\];")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);$")
_USED = re.compile(r'\.pragma "used_bytes_mask (\w+)";')
_ADDRESS = re.compile(r"\[([%$\w]+)(?:\+(-?\d+))?\]$")


@dataclass(frozen=True, slots=True)
class Address:
    base: str  # a register or a symbol
    offset: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """`operands` are names of registers and symbols, integers, `Address`es, and tuples of names for vectors."""

    name: str  # with its suffixes: "ld.shared.v4.u32"
    operands: tuple
    guard: str | None  # a predicate
    negated: bool
    line: int
    used: int | None = None  # of a load: a bit for each byte that is used, if those are not all

    @property
    def parts(self):
        return self.name.split(".")


@dataclass(slots=True)
class Kernel:
    name: str
    threads: int = 0
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)  # offset and size of each
    registers: list[tuple[str, list[str]]] = field(
        default_factory=list
    )  # types, and names of each: "b32", ["%r0", ...]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    used: int | None = None  # what a pragma says of the next instruction


@dataclass(slots=True)
class Module:
    kernels: dict[str, Kernel] = field(default_factory=dict)
    globals: dict[str, bytes] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)  # names of dynamic shared memory


def size_of(kind):
    """Return the bytes of a type such as "u32" or "bf16x2"."""
    bits, _, count = kind.lstrip("busfe").partition("x")
    return int(bits) * int(count or 1) // 8


def parse(text: str) -> Module:
    module, kernel, in_head = Module(), None, False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("//")[0].strip()
        if kernel is None:
            if entry := _ENTRY.match(line):
                kernel, in_head = Kernel(entry[1]), True
            elif found := _GLOBAL.match(line):
                module.globals[found[2]] = _content(found)
            elif found := _SHARED.search(line):
                module.shared.append(found[1])
        elif in_head:
            in_head = line != "{"
            if found := _PARAMETER.match(line):
                _add_parameter(kernel, found)
            elif found := re.match(r"\.maxntid\s+(\d+)", line):
                kernel.threads = int(found[1])
        elif raw.startswith("}"):
            module.kernels[kernel.name] = kernel
            kernel = None
        else:
            _add_line(kernel, line.removeprefix("{").removesuffix("}").strip(), number)  # an inner scope
    return module


def _add_line(kernel, line, number):
    if found := _REGISTERS.match(line):
        kind, prefix, count = found.groups()
        kernel.registers.append((kind, [f"{prefix}{index}" for index in range(int(count))] if count else [prefix]))
    elif line.endswith(":"):
        kernel.labels[line[:-1]] = len(kernel.code)
    elif found := _USED.match(line):
        kernel.used = int(found[1], 0)
    elif line and not line.startswith("."):
        kernel.code.append(_instruction(line, number, kernel.used))
        kernel.used = None


def _add_parameter(kernel, found):
    kind, name, count = found.groups()
    size = size_of(kind) * int(count or 1)
    end = sum(next(reversed(kernel.parameters.values()), (0, 0)))
    kernel.parameters[name] = (-(-end // 8) * 8 if count else -(-end // size) * size, size)


def _content(found):
    kind, _, count, values = found.groups()
    size = size_of(kind)
    numbers = [int(value) for value in re.findall(r"-?\d+", values or "")]
    content = b"".join((number & (1 << 8 * size) - 1).to_bytes(size, "little") for number in numbers)
    return content.ljust(size * int(count or 1), b"\0")


def _instruction(line, number, used):
    found = _INSTRUCTION.match(line)
    if not found:
        raise SyntaxError(f"line {number}: cannot parse {line!r}")
    parts = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", found[4])
    return Instruction(found[3], tuple(map(_operand, parts)), found[2], bool(found[1]), number, used)


def _operand(text):
    if text[0] == "{":
        return tuple(_operand(part.strip()) for part in text[1:-1].split(","))
    if text[0] == "[":
        base, offset = _ADDRESS.match(text).groups()
        return Address(base, int(offset or 0))
    if re.fullmatch(r"-?\d+|0[xX][0-9a-fA-F]+U?", text):
        return int(text.rstrip("U"), 0)
    if re.fullmatch(r"0[fdFD][0-9a-fA-F]+", text):  # the bits of a floating point number
        return int(f"0x{text[2:]}", 0)
    return text
