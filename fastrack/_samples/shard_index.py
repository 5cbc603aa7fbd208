"""The sealed index of a dataset: one file that says of all shards what their headers say."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from fastrack._documents.canonical import decode, encode, is_number, parsing, require
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import write_sealed
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext, new_file_id
from fastrack._sealed.file_header import is_shape
from fastrack._sealed.seal import unseal
from fastrack._sets.anchor import Anchor
from fastrack._sets.load_file import load_file
from fastrack._sets.manifest import is_name
from fastrack._tensors import dtypes
from fastrack._util.gate import admit, most_bytes
from fastrack._util.locations import Location, Url, join
from fastrack.errors import FormatError, RollbackError, UnknownKeyError

INDEX = "fastrack.index"
SUFFIX = ".index"
_SHARDS = "shards"  # the tensor of the index
_FORMAT = 1
_KIND = "index of a dataset"


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """One shard of an index. name : in the folder of the index; size : in bytes; rows : of each tensor."""

    name: str
    size: int
    file_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """An authenticated index. tensors : name, dtype and shape of a row of each."""

    location: Location
    key_id: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    shards: tuple[IndexedShard, ...]

    @classmethod
    def read(
        cls, location: Location, keys: KeyRing, file_id: str | None = None, anchor: Anchor | None = None
    ) -> ShardIndex:
        """Authenticate an index, which must have that file id, and match the anchor's manifest."""
        with load_file(location, file_id=file_id, anchor=anchor) as file:
            if file.kind != "index" or _SHARDS not in file or file.key_id is None:
                raise FormatError(f"{location}: expected the index of a dataset, got another file. Get it again")
            content = unseal(file[_SHARDS], keys, framework="numpy").tobytes()
            with (
                suppress(zlib.error),
                parsing(f"{location} is not the index of a dataset", "write it again with `fastrack index`"),
            ):
                return cls(location, file.key_id, *_parse(content))
            raise FormatError(f"{location} is not the index of a dataset. Write it again with `fastrack index`")

    def write(self, key: Key) -> str:
        """Seal the index, in the place of an earlier one. Return its file id."""
        names, sizes, file_ids, rows = zip(*map(astuple, self.shards), strict=True)
        document = {
            "files": "".join(file_ids),
            "format": _FORMAT,
            "names": names,
            "rows": list(zip(*rows, strict=True)),
            "sizes": sizes,
            "tensors": self.tensors,
        }
        text = encode(document)
        with parsing(f"writing {self.location} failed", "make fewer and larger shards, of fewer columns"):
            admit(text, _KIND)  # as its readers do
        # Compressed, 10,000 shards come with the one request that opens the file.
        content = zlib.compress(text)
        file_id = new_file_id()
        sealed = {_SHARDS: PlainTensor.of(np.frombuffer(content, np.uint8))}
        write_sealed(sealed, self.location, key, frozenset(), {}, None, kind="index", file_id=file_id)
        return file_id

    def locations(self) -> list[Location]:
        """Return the locations of the shards: in the folder of the index."""
        folder = folder_of(self.location)
        return [join(folder, shard.name) for shard in self.shards]

    def contexts(self, names: tuple[str, ...]) -> list[list[MessageContext]]:
        """Return the contexts of these tensors in each shard."""
        columns = [(at, *self.tensors[at]) for at in map([name for name, *_ in self.tensors].index, names)]
        return [
            [MessageContext(name, dtype, (shard.rows[at], *row), shard.file_id) for at, name, dtype, row in columns]
            for shard in self.shards
        ]

    def require_same(self, found: Mapping[str, int]) -> None:
        """Compare the names and sizes of shards in a folder with the index."""
        folder = folder_of(self.location)
        for shard in self.shards:
            size = found.get(shard.name)
            if size != shard.size:
                path, got = join(folder, shard.name), "none" if size is None else str(size)
                raise RollbackError(
                    f"{path}: expected {shard.size} bytes by {self.location}, got {got}; it is missing, an older or "
                    "another one. Get the shards and the index of one version",
                    path=path,
                )
        for name in sorted(found.keys() - {shard.name for shard in self.shards}):
            path = join(folder, name)
            raise RollbackError(
                f"{path}: expected no such shard by {self.location}, got one; it was added since, or is another's. "
                "Write the index again with `fastrack index`, or move the shard away",
                path=path,
            )


def folder_of(location: Location) -> Location:
    """Return the folder that an index lies in."""
    return Url(location.full.rpartition("/")[0]) if isinstance(location, Url) else location.parent


def read_index(location: Location, keys: Any, file_id: str | None = None, anchor: Anchor | None = None) -> ShardIndex:
    """Open an index with `keys`, as for `unseal`."""
    try:
        return ShardIndex.read(location, KeyRing.resolve(keys), file_id, anchor)
    except UnknownKeyError as error:
        error.add_note(f"{location} is sealed, and lists the shards: give the dataset keys=, or a list of its shards")
        raise


def _parse(content: bytes) -> tuple[Any, Any]:
    """Return the tensors and the shards. The content is authentic, yet another program may have written it."""
    members = {"files", "format", "names", "rows", "sizes", "tensors"}
    document = decode(_inflate(content), members, {"format": _FORMAT})
    names, sizes, files, columns = (document[member] for member in ("names", "sizes", "files", "rows"))
    require(names and len(set(names)) == len(names), "names")
    require(all(type(name) is str and is_name(name) and "/" not in name for name in names), "names")
    require(len(sizes) == len(names) and all(map(is_number, sizes)), "sizes")
    file_ids = re.findall(r"[0-9a-f]{32}", files)
    require("".join(file_ids) == files and len(set(file_ids)) == len(file_ids) == len(names), "files")
    tensors = tuple((name, dtype, tuple(row)) for name, dtype, row in document["tensors"])
    require(tensors and len({name for name, *_ in tensors}) == len(tensors) == len(columns), "tensors")
    for name, dtype, row in tensors:
        require(type(name) is str and dtype in dtypes.BITS and is_shape([1, *row]), "tensors")
    require(all(len(rows) == len(names) and all(map(is_number, rows)) for rows in columns), "rows")
    return tensors, tuple(map(IndexedShard, names, sizes, file_ids, zip(*columns, strict=True)))


def _inflate(content: bytes) -> bytes:
    """Return the text in a content, which zlib may have made a thousand times as short."""
    inflater = zlib.decompressobj()
    text = inflater.decompress(content, most_bytes(_KIND) + 1)
    admit(text, _KIND)
    require(inflater.eof and not inflater.unused_data, _SHARDS)
    return text
