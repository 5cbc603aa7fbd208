"""The metadata of sealed files, in their safetensors headers: dtypes and shapes of messages, and their bindings.

Input is untrusted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fastrack._documents.strict import parse_strict
from fastrack._sealed.contexts import Binding, Kind, MessageContext
from fastrack._sealed.file_header import Layout, StoredTensor, is_shape, parse_header, parse_layouts
from fastrack._sealed.scales import Scale
from fastrack._tensors import dtypes
from fastrack._util.locations import Location
from fastrack._util.shown import shown
from fastrack.errors import FormatError
from fastrack.format import FORMAT_VERSION, HEADER_SIZE, message_size

_HEX_ID = re.compile(r"[0-9a-f]{32}")
_HEX_HEADER = re.compile(r"[0-9a-f]{112}")
_MEMBERS = {"dtype", "shape"}
_SCALE_MEMBERS = frozenset(Scale._fields)


@dataclass(slots=True)
class Contents:
    """The header of a file: the stored tensors, the owner's metadata, and fastrack's metadata.

    Ids are None if nothing is sealed. `layouts` and `bindings` are of sealed tensors, by name.
    """

    stored: dict[str, StoredTensor]
    metadata: dict[str, str]
    file_id: str | None = None
    key_id: str | None = None
    kind: Kind = "tensor"
    layouts: dict[str, Layout] = field(default_factory=dict)
    bindings: dict[str, tuple[str, Binding]] = field(default_factory=dict)

    def context(self, name: str) -> tuple[MessageContext, Binding | None]:
        """Return the context of a sealed tensor, and its binding if it was sealed for another file."""
        layout = self.layouts[name]
        assert self.file_id is not None
        file_id, binding = self.bindings.get(name) or (self.file_id, None)
        return MessageContext(name, layout.dtype, layout.shape, file_id, self.kind, layout.scale), binding


def read_contents(head: bytes, size: int | None, path: Location) -> Contents:
    """Read the header of a file of `size` bytes (None if not known). Raise FormatError if it is damaged."""
    metadata, stored = parse_header(head, size, path)
    fields = {key: value for key, value in metadata.items() if key.startswith("fastrack.")}
    contents = Contents(stored, {key: value for key, value in metadata.items() if key not in fields})
    if fields:
        _read_fields(contents, fields, path)
    return contents


def _read_fields(contents: Contents, fields: dict[str, str], path: Location) -> None:
    version = fields.get("fastrack.version")
    if version != FORMAT_VERSION:
        raise FormatError(f"{path}: expected fastrack format {FORMAT_VERSION!r}, got {version!r:.20}. Update fastrack")
    contents.file_id = _hex_id(fields.get("fastrack.file"), "fastrack.file", path)
    contents.key_id = _hex_id(fields.get("fastrack.key"), "fastrack.key", path)
    kind = fields.get("fastrack.kind")
    if kind not in {None, "checkpoint", "folder", "index"}:
        raise FormatError(
            f"{path}: expected no fastrack.kind, or checkpoint, folder or index, got {kind!r:.20}. Update fastrack"
        )
    contents.kind = cast(Kind, kind or "tensor")
    listed = fields.get("fastrack.tensors")
    contents.layouts = parse_layouts(listed or "") or _read_layouts(listed, contents, path)
    for name, layout in contents.layouts.items():
        stored = contents.stored.get(name)
        if stored is None:
            raise FormatError(f"{path} lists a sealed tensor {shown(name)} that it lacks; the file was altered")
        expected = message_size(layout.nbytes)
        if stored.dtype != "U8" or stored.shape != (expected,):
            raise FormatError(
                f"{path}: {shown(name, 200)} of {layout.dtype} {list(layout.shape)}: expected a U8 vector of "
                f"{expected} bytes, got {stored.dtype} {list(stored.shape)}; the metadata or the file was altered"
            )
        scales = layout.scale and contents.context(name)[0].scales
        if scales and (scales.name not in contents.layouts or contents.context(scales.name)[0] != scales):
            raise FormatError(
                f"{path}: scale of {shown(name)}: expected a sealed tensor {shown(scales.name)} of {scales.dtype} "
                f"{list(scales.shape)} of the same file, got another or none; the metadata was altered"
            )


def _read_layouts(text: str | None, contents: Contents, path: Location) -> dict[str, Layout]:
    """Read tensors and bindings from any JSON. `parse_layouts` reads only fastrack's own."""
    layouts: dict[str, Layout] = {}
    assert contents.file_id is not None
    try:
        listed = parse_strict(text or "")
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, dict):
        raise FormatError(
            f"{path}: fastrack.tensors: expected a JSON object that has each member once, got {text!r:.50}; the "
            "metadata was altered"
        )
    for name, entry in listed.items():
        if isinstance(entry, dict) and "binding" in entry:
            contents.bindings[name] = _take_binding(name, entry, contents.file_id, path)
        layouts[name] = _read_layout(name, entry, path)
    return layouts


def _hex_id(value: str | None, name: str, path: Location) -> str:
    if value is None or not _HEX_ID.fullmatch(value):
        raise FormatError(
            f"{path}: {name}: expected 32 hexadecimal digits, got {value!r:.50}; the metadata was altered"
        )
    return value


def _take_binding(name: str, entry: dict[str, Any], file: str, path: Location) -> tuple[str, Binding]:
    """Remove the original file id and the binding from the entry of an earlier message, and return both."""
    own_id, header = entry.pop("file", None), entry.pop("binding")
    if not isinstance(own_id, str) or not isinstance(header, str) or not _HEX_HEADER.fullmatch(header):
        raise FormatError(
            f"{path}: binding of {shown(name)}: expected {2 * HEADER_SIZE} hexadecimal digits beside a "
            f"file id, got {header!r:.80}; the metadata was altered"
        )
    return _hex_id(own_id, f"file of {shown(name)}", path), Binding(file, bytes.fromhex(header))


def _read_layout(name: str, entry: Any, path: Location) -> Layout:
    if type(entry) is dict and entry.keys() - {"scale"} == _MEMBERS:
        dtype, shape = entry["dtype"], entry["shape"]
        if type(dtype) is str and is_shape(shape):
            scale = _read_scale(name, entry["scale"], dtype, tuple(shape), path) if "scale" in entry else None
            return Layout(dtype, tuple(shape), dtypes.nbytes(dtype, tuple(shape)), scale)
    raise FormatError(
        f"{path}: entry of {shown(name)}: expected a dtype and a shape, got {entry!r:.80}; the metadata was altered"
    )


def _read_scale(name: str, entry: Any, dtype: str, shape: tuple[int, ...], path: Location) -> Scale:
    if type(entry) is dict and entry.keys() == _SCALE_MEMBERS and is_shape(entry["block"]) and is_shape(entry["shape"]):
        scale = Scale(tuple(entry["block"]), entry["dtype"], entry["name"], tuple(entry["shape"]))
        if type(scale.dtype) is type(scale.name) is str and len(scale.block) == 2:
            try:
                scale.check(dtype, shape)
            except FormatError as error:
                raise FormatError(f"{path}: scale of {shown(name)}: {error}; the metadata was altered") from None
            return scale
    raise FormatError(
        f"{path}: scale of {shown(name)}: expected a block, a dtype, a name and a shape, got {entry!r:.80}; the "
        "metadata was altered"
    )


def entry_of(context: MessageContext) -> dict[str, Any]:
    """Return the metadata entry of a tensor."""
    entry = {"dtype": context.dtype, "shape": list(context.shape)}
    return entry if context.scale is None else {**entry, "scale": context.scale._asdict()}


def encode_fields(file_id: str, key_id: str, sealed: Mapping[str, Any], kind: Kind = "tensor") -> dict[str, str]:
    """Return the metadata of a file with sealed tensors, given by their `entry_of`."""
    fields = {
        "fastrack.version": FORMAT_VERSION,
        "fastrack.file": file_id,
        "fastrack.key": key_id,
        "fastrack.tensors": json.dumps(sealed, separators=(",", ":"), ensure_ascii=False),
    }
    return fields if kind == "tensor" else {**fields, "fastrack.kind": kind}
