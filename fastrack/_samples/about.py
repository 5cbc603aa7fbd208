"""`About`: the place of a shard in its dataset, the types of its columns, and the files that it was made of."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._documents import fields
from fastrack._documents.strict import parse_strict
from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.file_header import ABOUT
from fastrack._sealed.messages import open_whole
from fastrack._tensors.arrays import Bytes
from fastrack.errors import FormatError


@dataclass(frozen=True, slots=True)
class About:
    """The place of a shard in its dataset, and what its samples were made of.

    data_set : id of the dataset, which tells its shards from those of others under the same key; "" for shards of
        version 0.1, which say nothing of themselves
    shard, previous : random ids of this shard and of the one before it, "" if that has none. They tell the shards of
        two continuations of one dataset apart, as after a backup was brought back
    before : number of samples that were in the folder before its shards said their place: 0 unless version 0.1 began it
    first, samples : number of the first sample, and how many samples the shard has
    run : number of the first sample of the run that wrote the shard
    complete : True for the last shard of a run that came to its end
    types : what the bytes of each column mean, as `Column.type` has it, in the order of the columns
    left_out : whether the run leaves out files that the dataset had before, as its continuation then does
    files : the files of the samples, in order, with the number of samples of each in this shard; "" for samples of
        no file. Empty if none is of a file
    """

    data_set: str
    shard: str
    previous: str
    before: int
    first: int
    samples: int
    run: int
    complete: bool
    left_out: bool = False
    types: dict[str, str] = field(default_factory=dict)
    files: tuple[tuple[str, int], ...] = ()

    def encode(self) -> Bytes:
        """Return the content of the tensor."""
        text = json.dumps({"version": 1, **asdict(self)}, ensure_ascii=False, separators=(",", ":"))
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)

    @classmethod
    def decode(cls, content: bytes, path: Path) -> About:
        """Return what the tensor of a shard at `path` says; raise FormatError if it has another form."""
        version, about = 1, None
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            members = parse_strict(content.decode("utf-8", "surrogateescape"))
            version = members.pop("version")
            about = cls(**fields.read_members(members, _FIELDS))
        if type(version) is not int or version != 1:
            raise FormatError(f"{path}: expected version 1 of {ABOUT}, got another. Update fastrack")
        if about is None or not about._is_valid():
            raise FormatError(f"{path}: expected {ABOUT} as a DatasetWriter writes it, got another form. Get it again")
        return about

    def _is_valid(self) -> bool:
        of_files = [count for _, count in self.files]
        with suppress(UnicodeEncodeError):  # of bytes that are no UTF-8, which only names of files may have
            "".join([self.data_set, self.shard, self.previous, *self.types, *self.types.values()]).encode()
            is_whole = not of_files or sum(of_files) == self.samples
            return is_whole and max(self.before, self.run) <= self.first
        return False


def _read_file(value: Any) -> tuple[str, int]:
    name, count = value
    return fields.TEXT.read(name), _COUNT.read(count)


_COUNT, _GIVEN = fields.integer(0), fields.text(r".+")
_FIELDS: fields.Fields = {
    "data_set": _GIVEN,
    "shard": _GIVEN,
    "previous": fields.TEXT,
    **dict.fromkeys(("before", "first", "samples", "run"), _COUNT),
    **dict.fromkeys(("complete", "left_out"), fields.BOOLEAN),
    "types": fields.mapping(fields.TEXT, fields.TEXT),
    "files": fields.list_of(fields.Field(_read_file)),
}


def read_about(file: SealedFile, keys: KeyRing) -> About | None:
    """Authenticate and return what a shard says of itself; None for one of a version that said nothing."""
    if ABOUT not in file:
        return None
    tensor = file[ABOUT]
    if tensor.dtype != "U8" or len(tensor.shape) != 1:
        raise FormatError(f"{file.path}: expected {ABOUT} as a vector of bytes, got another tensor. Get it again")
    return About.decode(open_whole(tensor, keys).tobytes(), Path(str(file.path)))
