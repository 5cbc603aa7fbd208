"""Sealed files that can still be edited: section "The file" of the page."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from generator.parts.case import draw, sha256
from generator.parts.messages import binding, context_of, key_id, seal

KEY = bytes(range(32))
KEY128 = bytes(range(16))
OTHER_KEY = draw("another key", 32)
FILE = "000102030405060708090a0b0c0d0e0f"
OTHER_FILE = draw("another file", 16).hex()

GUARD = {
    "dtype": "sealed by fastrack: open it with fastrack.load_model, fastrack.safe_open or fastrack.mount_folder",
    "shape": [0],
    "data_offsets": [0, 0],
}

BITS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Hold one tensor as its owner has it."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes

    @property
    def described(self) -> dict[str, object]:
        """Its description in the result of a case."""
        return {"dtype": self.dtype, "shape": self.shape, "sha256": sha256(self.data)}


def tensor(name: str, dtype: str = "U8", shape: list[int] | None = None) -> Tensor:
    """Return a tensor whose bytes are drawn by its name."""
    shape = [20] if shape is None else shape
    return Tensor(name, dtype, shape, draw(f"tensor {name}", math.prod(shape) * BITS[dtype] // 8))


@dataclass(slots=True)
class Stored:
    """Hold what the safetensors header says of a tensor, and its bytes."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass(slots=True)
class Draft:
    """Hold a sealed file, every part of which may be edited before it is written."""

    key: bytes = KEY
    file: str = FILE
    kind: str | None = None
    sealed: list[Tensor] = field(default_factory=list)
    plain: list[Tensor] = field(default_factory=list)
    owner: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    entries: dict[str, dict[str, object]] = field(default_factory=dict)
    stored: dict[str, Stored] = field(default_factory=dict)
    listed: str | None = None
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def purpose(self) -> str:
        """The first part of the contexts."""
        return f"fastrack/{self.kind or 'tensor'}@1"

    @property
    def result(self) -> dict[str, object]:
        """The result of a case that opens it."""
        return {
            "tensors": {one.name: one.described for one in self.sealed},
            "plain": {one.name: one.described for one in self.plain},
            "metadata": self.owner,
        }

    def reseal(self, name: str, data: bytes | None = None, /, *, key: bytes | None = None, **members: object) -> None:
        """Seal a tensor anew: other plaintext, key, or members of its context."""
        one = next(one for one in self.sealed if one.name == name)
        context = self.context(name, **members)
        message = seal(key or self.key, self.salt(name), context, one.data if data is None else data)
        self.stored[name] = Stored("U8", [len(message)], message)

    def context(self, name: str, /, **members: object) -> bytes:
        """Return the context of a tensor, with some of its members swapped."""
        entry = {member: value for member, value in self.entries[name].items() if member != "binding"}
        return context_of(self.purpose, {"file": self.file, "name": name} | entry | members)

    def salt(self, name: str) -> bytes:
        """Return the salt of a tensor's message."""
        return draw(f"salt {self.file} {name}", 24)

    def move(self, name: str, origin: str) -> None:
        """Make the message one that was sealed in another file, and bind it to this."""
        self.entries[name]["file"] = origin
        self.reseal(name)
        bound = binding(self.key, draw(f"binding {name}", 24), self.file, self.context(name))
        self.entries[name]["binding"] = bound.hex()

    def alter(self, name: str, edit: Callable[[bytes], bytes]) -> None:
        """Change the stored bytes of a tensor."""
        self.stored[name].data = edit(self.stored[name].data)

    def text(self) -> str:
        """Return the entry `fastrack.tensors`."""
        return json.dumps(self.entries, sort_keys=True) if self.listed is None else self.listed

    def header(self) -> dict[str, object]:
        """Return the safetensors header."""
        metadata = dict(self.owner)
        metadata |= self.metadata
        if "fastrack.tensors" in metadata:
            metadata["fastrack.tensors"] = self.text()
        header: dict[str, object] = {"__metadata__": metadata, **self.extra}
        at = 0
        for name, one in self.stored.items():
            header[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, at + len(one.data)]}
            at += len(one.data)
        return header

    def data(self) -> bytes:
        """Return all that follows the header."""
        return b"".join(one.data for one in self.stored.values())

    def write(self, edit: Callable[[str], str] = str) -> bytes:
        """Return the file, with an edit of the text of its header."""
        return assemble(edit(json.dumps(self.header(), ensure_ascii=False)).encode(), self.data())


def assemble(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file; the header is padded to whole words."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def draft(
    *sealed: Tensor,
    plain: tuple[Tensor, ...] = (),
    key: bytes = KEY,
    file: str = FILE,
    kind: str | None = None,
    owner: dict[str, str] | None = None,
) -> Draft:
    """Return a valid sealed file."""
    made = Draft(key, file, kind, list(sealed), list(plain), owner or {})
    made.metadata = {"fastrack.version": "1", "fastrack.file": file, "fastrack.key": key_id(key)}
    made.metadata["fastrack.tensors"] = ""
    if kind is not None:
        made.metadata["fastrack.kind"] = kind
    for one in sealed:
        made.entries[one.name] = {"dtype": one.dtype, "shape": one.shape}
        made.reseal(one.name)
    for one in plain:
        made.stored[one.name] = Stored(one.dtype, one.shape, one.data)
    return made


def scaled(made: Draft, values: str, scales: str, block: list[int]) -> None:
    """Make one tensor the quantised values that another one's scales belong to."""
    entry = made.entries[scales]
    made.entries[values]["scale"] = {
        "block": block,
        "dtype": entry["dtype"],
        "name": scales,
        "shape": entry["shape"],
    }
    made.reseal(values)
