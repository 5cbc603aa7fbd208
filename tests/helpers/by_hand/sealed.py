"""Sealed files: what they list, their messages, and quantised values."""

import json
from dataclasses import dataclass
from hashlib import sha256
from math import prod

import numpy as np
import safetensors

from helpers.by_hand import messages
from helpers.by_hand.documents import canonical, is_hexadecimal, is_number, load, members, require

BITS = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}
GUARD = {
    "dtype": "sealed by fastrack: open it with fastrack.load_model, fastrack.safe_open or fastrack.mount_folder",
    "shape": [0],
    "data_offsets": [0, 0],
}
KINDS = {"tensor", "checkpoint", "folder", "index"}


@dataclass
class File:
    """A safetensors file: `sealed` and `plain` have a claim and the stored bytes by name."""

    header: dict
    metadata: dict
    plain: dict
    sealed: dict
    id: str = None
    key: str = None
    kind: str = None

    def origin(self, name):
        return self.sealed[name][0].get("file", self.id)


def parse(content):
    """Check everything that needs no key."""
    header, body = _split(content)
    marks = header.pop("__metadata__", None) or {}
    stored = {name: (entry, body[slice(*entry["data_offsets"])]) for name, entry in header.items()}
    owner = {name: value for name, value in marks.items() if not name.startswith("fastrack.")}
    needed = {"fastrack.version", "fastrack.file", "fastrack.key", "fastrack.tensors"}
    if not marks.keys() & {*needed, "fastrack.kind"}:
        return File(header, owner, stored, {})
    require(marks.keys() >= needed, "all entries of a sealed file")
    require(marks["fastrack.version"] == "1", "version 1")
    require(all(is_hexadecimal(marks[f"fastrack.{name}"], 32) for name in ("file", "key")), "ids")
    kind = marks.get("fastrack.kind", "tensor")
    require(kind in KINDS and marks.get("fastrack.kind") != "tensor", "a kind")
    claims = load(marks["fastrack.tensors"])
    sealed = {name: (claim, stored.pop(name)) for name, claim in claims.items()}
    for name, (claim, (entry, message)) in sealed.items():
        size = _check_claim(name, claim)
        require((entry["dtype"], len(entry["shape"])) == ("U8", 1), "a vector of bytes")
        require(len(message) == messages.message_size(size), "a message of its size")
    file = File(header, owner, stored, {name: (claim, message) for name, (claim, (_, message)) in sealed.items()})
    file.id, file.key, file.kind = marks["fastrack.file"], marks["fastrack.key"], kind
    for name, (claim, _) in sealed.items():
        if "scale" in claim:
            _check_scale(file, name, claim)
    return file


def open_all(file, keys, kind, cipher=messages):
    """Return the plaintext of each sealed tensor of a file of the expected kind."""
    require((file.kind or "tensor") == kind, f"a file of the kind {kind}")
    require(kind != "checkpoint" or not file.plain, "a checkpoint without plain tensors")
    return {name: open_one(file, name, keys, kind, cipher) for name in file.sealed}


def open_one(file, name, keys, kind, cipher=messages):
    """Return the plaintext of a sealed tensor of a file of the expected kind."""
    require(file.kind == kind, f"a file of the kind {kind}")
    secrets = {messages.key_id(key): key for key in keys}
    require(file.key in secrets, "a key of this id", "unknown-key")
    secret, (claim, message) = secrets[file.key], file.sealed[name]
    bound = {"dtype": claim["dtype"], "file": file.origin(name), "name": name, "shape": claim["shape"]}
    if "scale" in claim:
        bound["scale"] = claim["scale"]
    text = json.dumps(bound, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    context = f"fastrack/{kind}@1\0{text}".encode()
    if "binding" in claim:
        label = f"fastrack/binding@1\0{file.id}\0".encode()
        messages.check_commitment(cipher, secret, label + context, bytes.fromhex(claim["binding"]))
    return messages.open_message(cipher, secret, context, message, _check_claim(name, claim))


def read_sealed(content, keys, kind, cipher=messages):
    file = parse(content)
    opened = open_all(file, keys, kind, cipher)
    tensors = {name: describe(claim, opened[name]) for name, (claim, _) in file.sealed.items()}
    return {
        "tensors": tensors,
        "plain": {name: describe(*stored) for name, stored in file.plain.items()},
        "metadata": file.metadata,
    }


def read_widened(content, key, name, cipher=messages):
    file = parse(content)
    opened = open_all(file, [key], "tensor", cipher)
    require("scale" in file.sealed.get(name, ({},))[0], "quantised values")
    return {"shape": file.sealed[name][0]["shape"], "sha256": sha256(widen(file, opened, name)).hexdigest()}


def describe(claim, content):
    return {"dtype": claim["dtype"], "shape": claim["shape"], "sha256": sha256(content).hexdigest()}


def widen(file, opened, name):
    """Return quantised values times their scales as the bytes of BF16."""
    claim = file.sealed[name][0]
    scale, shape = claim["scale"], claim["shape"]
    values = np.frombuffer(opened[name], np.uint8)
    floats = values.view(np.int8).astype("<f4") if claim["dtype"] == "I8" else _floats(claim["dtype"])[values]
    stored = opened[scale["name"]]
    if scale["dtype"] == "BF16":
        stored = (np.frombuffer(stored, "<u2").astype("<u4") << 16).tobytes()
    rows, columns = np.indices((prod(shape[:-1]), shape[-1]), np.int64, sparse=True)
    tall, wide = scale["block"]
    numbers = rows // tall * -(-shape[-1] // wide) + columns // wide
    with np.errstate(all="ignore"):
        products = floats.reshape(numbers.shape) * np.frombuffer(stored, "<f4")[numbers]
    bits = products.view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(products), 0x7FC0, rounded).astype("<u2").tobytes()


def _floats(dtype):
    """Return the values of all 256 bytes of an 8-bit float."""
    wide, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    bytes_ = np.arange(256)
    fraction, exponent = bytes_ & (1 << wide) - 1, bytes_ >> wide & 127 >> wide
    floats = np.where(
        exponent == 0,
        np.ldexp(fraction.astype("f8"), 1 - bias - wide),
        np.ldexp((1 << wide) + fraction.astype("f8"), exponent - bias - wide),
    )
    if dtype == "F8_E4M3":  # which has no infinity, and one NaN of each sign
        floats[bytes_ & 127 == 127] = np.nan
    else:
        floats[exponent == 31] = np.where(fraction[exponent == 31] == 0, np.inf, np.nan)
    return np.where(bytes_ < 128, floats, -floats).astype("<f4")


def _split(content):
    """Return the header without the guard, and what follows it, once the safetensors library finds no fault."""
    start = 8 + int.from_bytes(content[:8], "little")
    require(content[8:9] == b"{", "a header that begins with its object")  # which the library does not ask for
    header = load(content[8:start])
    unguarded = content
    if drop_guard_of(header):
        unguarded = drop_guard(content)
    try:
        safetensors.deserialize(unguarded)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from None
    for name, entry in header.items():  # of which the library takes more members
        require(name == "__metadata__" or members(entry, "dtype shape data_offsets"), "an entry of a tensor")
    return header, content[start:]


def drop_guard_of(header):
    """Take the guard out of a header, and return whether it had one."""
    return canonical(header.get("fastrack.guard")) == canonical(GUARD) and header.pop("fastrack.guard")


def _check_claim(name, claim):
    """Return the size of the plaintext that an entry of `fastrack.tensors` claims."""
    more = claim.keys() - {"dtype", "shape", "scale"}
    require(claim.keys() >= {"dtype", "shape"} and more in (set(), {"file", "binding"}), "known members")
    shape, bits = claim["shape"], BITS[claim["dtype"]]
    require(isinstance(shape, list) and len(shape) <= 64, "a shape")
    require(all(type(extent) is int and extent >= 0 for extent in shape), "extents")
    require(prod(extent or 1 for extent in shape) <= 2**56, "a product of extents that numbers hold")
    require(prod(shape) * bits % 8 == 0, "whole bytes")
    if more:
        require(is_hexadecimal(claim["file"], 32) and is_hexadecimal(claim["binding"], 112), "a file and a binding")
    name.encode()
    return prod(shape) * bits // 8


def _check_scale(file, name, claim):
    scale = members(claim["scale"], "block dtype name shape")
    require(claim["dtype"] in {"F8_E4M3", "F8_E5M2", "I8"} and scale["dtype"] in {"F32", "BF16"}, "their dtypes")
    require(claim["shape"], "a dimension")
    extents = prod(claim["shape"][:-1]), claim["shape"][-1]
    block = scale["block"]
    require(isinstance(block, list) and len(block) == 2, "a block")
    require(all(is_number(size, 1, n + 1) for size, n in zip(block, extents, strict=True)), "a block")
    count = prod(-(-n // size) for size, n in zip(block, extents, strict=True))
    found = file.sealed[scale["name"]][0]
    listed = {"dtype": scale["dtype"], "shape": scale["shape"]}
    require("scale" not in found and {each: found[each] for each in listed} == listed, "the scales as listed")
    require(canonical(scale["shape"]) == canonical(found["shape"]), "a shape")
    require(prod(scale["shape"]) == count, "as many scales as values need")
    require(file.origin(scale["name"]) == file.origin(name), "scales of the same file id")


# Files as anyone could make them without fastrack.


def context(name, dtype, shape, file):
    """Written out letter by letter, but for what quotes and escapes a name needs."""
    quoted = json.dumps(name, ensure_ascii=False)
    extents = ",".join(map(str, shape))
    return f'fastrack/tensor@1\0{{"dtype":"{dtype}","file":"{file}","name":{quoted},"shape":[{extents}]}}'.encode()


def marks(tensors, key_id, file):
    """The metadata of a sealed file; `tensors` gives each sealed one's dtype and shape by its name."""
    listed = {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors.items()}
    return {
        "fastrack.version": "1",
        "fastrack.file": file,
        "fastrack.key": key_id,
        "fastrack.tensors": json.dumps(listed),
    }


def drop_guard(data):
    """The bytes of a sealed file without the entry at which other readers of safetensors refuse it."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return data if header.pop("fastrack.guard", None) is None else container(header, data[start:])


def container(header, body=b""):
    """The bytes of a safetensors file with this header, however wrong: JSON text, or what becomes it."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + body
