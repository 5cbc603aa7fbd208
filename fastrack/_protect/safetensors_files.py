"""Files of safetensors: what it serialises, of any framework, is sealed, and sealed files open in its functions."""

from __future__ import annotations

import ctypes
import io
from typing import Any

import numpy as np

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile
from fastrack._files.unseal_file import write_plaintext
from fastrack._models.safe_open import safe_open
from fastrack._patches.attributes import find_holder
from fastrack._patches.safetensors import add_handler
from fastrack._protect.sealing import Protection, is_stream, open_sealed, read_sealed, seal_tensors
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import locate
from fastrack.errors import FastrackError, FormatError


def install(protection: Protection) -> None:
    """Add handlers to the four functions that all modules of safetensors call."""
    import safetensors

    for name in ("serialize_file", "serialize"):
        writer = getattr(safetensors, name)
        holder = find_holder(getattr(writer, "fastrack_original", writer))
        if holder is not None:
            raise FastrackError(
                f"protect_checkpoints: expected safetensors' {name} only in modules, got it in a {holder} "
                "too, which would write plaintext. Protect before that is made"
            )

    def seal_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        if not tensors:  # and so nothing that would mark the file as sealed
            return NotImplemented
        return seal_tensors(protection, describe(tensors), locate(filename), dict(metadata or {}))

    def seal_bytes(tensors: Any, metadata: Any = None) -> bytes:
        out = io.BytesIO()
        seal_tensors(protection, describe(tensors), out, dict(metadata or {}))
        return out.getvalue()

    def open_bytes(content: Any) -> Any:
        sealed = read_sealed(io.BytesIO(content))
        return NotImplemented if sealed is None else _open_all(protection, sealed)

    def open_file(filename: Any, framework: Any = "pt", device: Any = "cpu", **_: Any) -> Any:
        sealed = open_sealed(filename)
        if sealed is None or sealed.kind != "tensor":
            return NotImplemented
        if is_stream(sealed):
            raise FormatError(f"{sealed.path}: expected tensors, got what torch.save wrote. Open it with torch.load")
        return safe_open(sealed.path, framework, device, keys=protection.ring)

    add_handler("serialize_file", seal_file, last=True)
    add_handler("serialize", seal_bytes, last=True)
    add_handler("deserialize", open_bytes, last=True)
    add_handler("safe_open", open_file, last=True)


def describe(tensors: Any) -> dict[str, PlainTensor]:
    """Describe the tensors that safetensors was given by their addresses; it keeps them alive for the call."""
    return {name: _described(spec) for name, spec in tensors.items()}


def _described(spec: Any) -> PlainTensor:
    if not hasattr(spec, "data_ptr"):
        raise TypeError(f"serialize: expected a TensorSpec, got {type(spec).__name__}. Use save or save_file")
    size = spec.data_len
    memory: Bytes = np.frombuffer((ctypes.c_uint8 * size).from_address(spec.data_ptr), np.uint8) if size else _EMPTY
    return PlainTensor(spec.dtype, tuple(spec.shape), lambda: arrays.reader(memory))


_EMPTY = np.empty(0, np.uint8)


def _open_all(protection: Protection, file: SealedFile) -> list[tuple[str, dict[str, Any]]]:
    """Return what ``safetensors.deserialize`` does, of a sealed file in memory."""
    return [
        (name, {"dtype": sealed.dtype, "shape": list(sealed.shape), "data": _content(protection, file, name)})
        for name, sealed in file.items()
    ]


def _content(protection: Protection, file: SealedFile, name: str) -> bytearray:
    out = io.BytesIO()
    write_plaintext(file[name], protection.ring, out, None)
    return bytearray(out.getbuffer())
