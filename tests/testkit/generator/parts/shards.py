"""Shards of datasets that can still be edited: section "Shards of data sets" of the page."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from generator.parts.case import draw, sha256
from generator.parts.drafts import KEY, Draft, Tensor, draft, tensor


@dataclass(slots=True)
class Shard:
    """Hold a shard that can still be edited."""

    number: int
    samples: int
    about: dict[str, object]
    tensors: list[Tensor]
    text: Callable[[bytes], bytes] = bytes
    bare: bool = False
    """Whether it is of version 0.1, without `fastrack.about`."""
    key: bytes = KEY
    kind: str | None = None
    edits: list[Callable[[Draft], object]] = field(default_factory=list)

    def replace(self, one: Tensor) -> None:
        """Put a tensor in the place of that of its name."""
        self.tensors = [one if each.name == one.name else each for each in self.tensors]

    def written(self) -> bytes:
        """Return the file."""
        data = self.text(json.dumps(self.about, ensure_ascii=False).encode())
        about = [] if self.bare else [Tensor("fastrack.about", "U8", [len(data)], data)]
        one = draft(*self.tensors, *about, key=self.key, file=f"{self.number + 1:032x}", kind=self.kind)
        for edit in self.edits:
            edit(one)
        return one.write()


TEXTS = ["first", "", "größe 🚀", "fourth", "fifth"]
TYPES = {"image": "", "label": "", "text": "text"}


def offsets(lengths: list[int], name: str = "text.offsets") -> Tensor:
    """Return the offsets of records."""
    ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    return Tensor(name, "I64", [len(ends)], struct.pack(f"<{len(ends)}q", *ends))


def bits(*values: bool, name: str = "label.valid") -> Tensor:
    """Return which samples of a column are not null."""
    return Tensor(name, "BOOL", [len(values)], bytes(values))


COUNTS = (3, 2)
"""The samples of the shards of the usual dataset."""


def shards(counts: tuple[int, ...] = COUNTS) -> list[Shard]:
    """Return the shards of the usual dataset."""
    made, first = [], 0
    for number, samples in enumerate(counts):
        about: dict[str, object] = {"version": 1, "data_set": draw("data set", 16).hex()}
        about |= {"shard": shard_id(number), "previous": shard_id(number - 1) if number else "", "before": 0}
        about |= {"first": first, "samples": samples, "run": 0, "complete": number == len(counts) - 1}
        about |= {"left_out": False, "types": dict(TYPES), "files": []}
        texts = [(TEXTS * 2)[first + sample].encode() for sample in range(samples)]
        records = b"".join(texts)
        columns = [
            tensor("image", "F32", [samples, 2, 2]),
            Tensor("label", "I64", [samples], struct.pack(f"<{samples}q", *range(first, first + samples))),
            Tensor("text.records", "U8", [len(records)], records),
            offsets([len(text) for text in texts]),
        ]
        made.append(Shard(number, samples, about, columns))
        first += samples
    return made


def shard_id(number: int) -> str:
    return draw(f"shard {number}", 16).hex()


def files(made: list[Shard]) -> dict[str, bytes]:
    """Return the files of a dataset."""
    return {f"shard-{number:06}.safetensors": one.written() for number, one in enumerate(made)}


def samples_of(one: Shard, column: str) -> list[bytes | None]:
    """Return the bytes of each sample of a column, and None for a null."""
    tensors = {each.name: each for each in one.tensors}
    valid = tensors.get(f"{column}.valid")
    if column in tensors:
        data, count = tensors[column].data, one.samples
        size = len(data) // count
        made = [data[number * size : (number + 1) * size] for number in range(count)]
    else:
        records = tensors[f"{column}.records"]
        size = len(records.data) // records.shape[0] if records.shape[0] else 1
        ends = struct.unpack(f"<{one.samples + 1}q", tensors[f"{column}.offsets"].data)
        made = [records.data[start * size : end * size] for start, end in pairwise(ends)]
    return [None if valid and not valid.data[number] else each for number, each in enumerate(made)]


def result(made: list[Shard]) -> dict[str, object]:
    """Return what a reader reads."""
    columns = {}
    for column in TYPES:
        each = [sample for one in made for sample in samples_of(one, column)]
        parts = (b"\xff" * 8 if sample is None else len(sample).to_bytes(8, "big") + sample for sample in each)
        columns[column] = sha256(b"".join(parts))
    return {"samples": sum(one.samples for one in made), "columns": columns, "complete": made[-1].about["complete"]}
