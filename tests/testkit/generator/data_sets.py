"""Cases of datasets: section "Shards of data sets" of the page."""

import json
import struct
from collections.abc import Callable

from generator.parts.case import Cases, draw, flip, joined
from generator.parts.drafts import KEY, OTHER_KEY, Draft, Stored, Tensor, tensor
from generator.parts.shards import TYPES, Shard, bits, files, offsets, result, shard_id, shards

SECTION = "shards-of-data-sets"

RULES = {
    "columns": (SECTION, "A column has values of one dtype and shape, or records, and perhaps nulls."),
    "offsets": (
        SECTION,
        "Offsets are I64, one more than there are samples, from 0 to the number of records, and do not decrease.",
    ),
    "valid": (
        SECTION,
        "`NAME.valid` is BOOL, and has one value for each sample of a column, in all shards or in none.",
    ),
    "names": (SECTION, "Shards are named by their numbers, without a gap."),
    "about": (SECTION, "`fastrack.about` is a JSON object with its members."),
    "data-set": (SECTION, "All shards have the same dataset."),
    "previous": (SECTION, "A shard follows that of `previous`."),
    "first": (SECTION, "`first` is the number of samples before, and `samples` that of the shard's own."),
    "run": (SECTION, "`run` is that of the shard before, or the shard's `first`."),
    "types": (SECTION, "`types` has the columns of the shard."),
    "before": (SECTION, "Shards without `fastrack.about` come first, and `before` counts their samples."),
    "complete": (SECTION, "A dataset whose last shard is not complete lacks shards, or was interrupted."),
    "authentic": ("the-message", "Each message is authentic, under the key and file id of its shard."),
    "kind": ("what-a-reader-must-check", "A shard is a file of the kind `tensor`."),
}

Edit = Callable[["Shard"], object]


def opens(made: Cases, name: str, rule: str, data_set: list[Shard]) -> None:
    """Add a dataset that opens."""
    lines, data = joined(files(data_set))
    made.opens(name, rule, data, result(data_set), [("key", KEY.hex()), *lines])


def fails(made: Cases, name: str, rule: str, expect: str, there: dict[str, bytes]) -> None:
    """Add a dataset that is refused."""
    lines, data = joined(there)
    made.fails(name, rule, expect, data, [("key", KEY.hex()), *lines])


def cases() -> Cases:
    """Return the cases of datasets."""
    made = Cases("data-set", RULES)
    for add in (successes, abouts, places, columns, first_versions, refused):
        add(made)
    return made


def successes(made: Cases) -> None:
    """Add datasets that open."""
    opens(made, "two-shards", "columns", shards())
    opens(made, "one-shard", "columns", shards((5,)))
    opens(made, "five-shards", "names", shards((1, 1, 1, 1, 1)))
    opens(made, "interrupted", "complete", shards((2, 2, 1))[:2])
    runs = shards()
    runs[0].about["complete"] = True
    runs[1].about["run"] = 3
    opens(made, "two-runs", "complete", runs)
    again = shards((2, 2))
    again[0].about["complete"] = False
    again[1].about["run"] = 2
    opens(made, "a-run-after-an-interruption", "complete", again)
    nulls = shards()
    nulls[0].tensors += [bits(True, False, True), bits(True, False, True, name="text.valid")]
    nulls[0].replace(Tensor("label", "I64", [3], struct.pack("<3q", 0, 0, 2)))
    nulls[1].tensors += [bits(False, True), bits(True, True, name="text.valid")]
    nulls[1].replace(Tensor("label", "I64", [2], struct.pack("<2q", 0, 4)))
    for one in nulls:
        one.about["types"] = {"image": "", "label": "", "label.valid": "", "text": "text", "text.valid": ""}
    opens(made, "nulls", "valid", nulls)
    spelled = shards()
    for one in spelled:
        one.text = lambda data: json.dumps(json.loads(data), indent=1, sort_keys=True).encode()
        one.about["types"] = dict(sorted(TYPES.items()))
    opens(made, "about-spelled-otherwise", "about", spelled)
    listed = shards()
    listed[0].about["files"] = [["größe/a.csv", 2], ["", 1]]
    listed[1].about["files"] = [["b.csv", 2]]
    listed[1].about["left_out"] = listed[0].about["left_out"] = True
    opens(made, "files-listed", "about", listed)
    for one in listed:
        one.text = lambda data: data.replace(b'.csv"', b'\xff\xc3.csv"')
    opens(made, "files-not-utf-8", "about", listed)
    typed = shards()
    for one in typed:
        one.about["types"] = {"image": "", "label": "arrow:" + "AAAA", "text": "json"}
    opens(made, "types-of-all-kinds", "types", typed)
    wide = shards((2,))
    lengths = Tensor("text.records", "F32", [5], draw("records of floats", 20))
    wide[0].replace(lengths)
    wide[0].replace(offsets([2, 3]))
    wide[0].about["types"] = TYPES | {"text": ""}
    opens(made, "records-of-floats", "columns", wide)


def edited(made: Cases, name: str, rule: str, edit: Edit, number: int = 1, expect: str = "format") -> None:
    """Add a dataset of which one shard was edited."""
    data_set = shards()
    edit(data_set[number])
    fails(made, name, rule, expect, files(data_set))


def abouts(made: Cases) -> None:
    """Add descriptions of shards that are none."""
    for member in shards()[0].about:
        edited(
            made, f"about-without-{member.replace('_', '-')}", "about", lambda one, member=member: one.about.pop(member)
        )
    for name, change in {
        "version-2": {"version": 2},
        "version-fraction": {"version": 1.0},
        "version-true": {"version": True},
        "samples-fraction": {"samples": 2.0},
        "samples-text": {"samples": "2"},
        "first-fraction": {"first": 3.0},
        "first-text": {"first": "3"},
        "complete-number": {"complete": 1},
        "complete-null": {"complete": None},
        "left-out-text": {"left_out": "false"},
        "run-fraction": {"run": 0.0},
        "run-negative": {"run": -1},
        "run-null": {"run": None},
        "data-set-null": {"data_set": None},
        "shard-empty": {"shard": ""},
        "shard-number": {"shard": 1},
        "previous-null": {"previous": None},
        "types-array": {"types": list(TYPES)},
        "types-of-numbers": {"types": dict.fromkeys(TYPES, 1)},
        "files-object": {"files": {}},
        "files-of-fewer-samples": {"files": [["b.csv", 1]]},
        "files-of-more-samples": {"files": [["b.csv", 2], ["", 1]]},
    }.items():
        edited(made, f"about-{name}", "about", lambda one, change=change: one.about.update(change))
    for name, text in {
        "empty": lambda data: b"",
        "array": lambda data: b"[" + data + b"]",
        "not-utf-8": lambda data: data.replace(b'"text": "text"', b'"text": "text", "\xff": ""'),
        "trailing": lambda data: data + b"}",
        "truncated": lambda data: data[:-1],
        "duplicate": lambda data: data.replace(b'"first": 3', b'"first": 0, "first": 3'),
        "duplicate-type": lambda data: data.replace(b'"label": ""', b'"label": "json", "label": ""'),
        "mark": lambda data: b"\xef\xbb\xbf" + data,
    }.items():
        edited(made, f"about-{name}", "about", lambda one, text=text: setattr(one, "text", text))

    for name, told in {"lone-surrogate": b"\\ud800", "data-set-not-utf-8": b"\xff"}.items():
        data_set = shards()
        for one in data_set:
            one.text = lambda data, told=told: data.replace(b'"data_set": "', b'"data_set": "' + told)
        fails(made, f"about-{name}", "about", "format", files(data_set))
    listed = shards()
    listed[1].about["files"] = [["b.csv", 2]]
    listed[1].text = lambda data: data.replace(b"b.csv", b"\\udcff.csv")
    fails(made, "about-lone-surrogate-in-a-name", "about", "format", files(listed))


def places(made: Cases) -> None:
    """Add shards that are missing, swapped, repeated or of another dataset."""
    there = files(shards((2, 1, 1, 1)))
    names = list(there)
    for name, order in {
        "first-missing": (1, 2, 3),
        "second-missing": (0, 2, 3),
        "exchanged": (1, 0, 2, 3),
        "last-two-exchanged": (0, 1, 3, 2),
        "one-twice": (0, 1, 1, 2, 3),
        "last-twice": (0, 1, 2, 3, 3),
    }.items():
        renamed = {f"shard-{number:06}.safetensors": there[names[place]] for number, place in enumerate(order)}
        fails(made, f"shards-{name}", "previous", "format", renamed)
    for name, missing in (("first", 0), ("second", 1)):
        left = {path: data for number, (path, data) in enumerate(there.items()) if number != missing}
        fails(made, f"name-of-the-{name}-missing", "names", "format", left)
    edited(made, "previous-of-another", "previous", lambda one: one.about.update(previous="0" * 32))
    edited(made, "previous-of-none", "previous", lambda one: one.about.update(previous=""))
    edited(made, "previous-of-the-first", "previous", lambda one: one.about.update(previous=shard_id(7)), 0)
    edited(made, "data-set-of-another", "data-set", lambda one: one.about.update(data_set="0" * 32))
    for name, first in (("before", 2), ("after", 4), ("0", 0)):
        edited(made, f"first-{name}", "first", lambda one, first=first: one.about.update(first=first))
    edited(made, "first-of-the-first", "first", lambda one: one.about.update(first=1), 0)
    for name, run in (("between", 1), ("after", 4)):
        edited(made, f"run-{name}", "run", lambda one, run=run: one.about.update(run=run))
    edited(made, "run-of-the-first", "run", lambda one: one.about.update(run=1), 0)
    for name, samples in (("less", 1), ("more", 3)):
        edited(made, f"samples-{name}", "first", lambda one, samples=samples: one.about.update(samples=samples))


def columns(made: Cases) -> None:
    """Add columns that are not those of `types`, or do not fit."""
    edited(made, "types-of-one-less", "types", lambda one: one.about.update(types={"image": "", "label": ""}))
    edited(made, "types-of-one-more", "types", lambda one: one.about.update(types=TYPES | {"more": ""}))
    edited(
        made, "types-of-another", "types", lambda one: one.about.update(types={"image": "", "name": "", "text": "text"})
    )
    edited(made, "column-missing", "types", lambda one: one.tensors.pop(1))
    edited(made, "column-added", "types", lambda one: one.tensors.append(tensor("more", "U8", [2])))
    edited(made, "offsets-missing", "types", lambda one: one.tensors.pop(3))
    edited(made, "records-missing", "types", lambda one: one.tensors.pop(2))
    edited(made, "valid-of-no-column", "types", lambda one: one.tensors.append(bits(True, True, name="more.valid")))
    edited(made, "column-shorter", "columns", lambda one: one.replace(Tensor("label", "I64", [1], bytes(8))))
    edited(made, "column-longer", "columns", lambda one: one.replace(Tensor("label", "I64", [3], bytes(24))))
    edited(made, "column-of-no-dimension", "columns", lambda one: one.replace(Tensor("label", "I64", [], bytes(8))))
    edited(made, "column-of-another-dtype", "columns", lambda one: one.replace(Tensor("label", "F64", [2], bytes(16))))
    edited(made, "column-of-another-shape", "columns", lambda one: one.replace(tensor("image", "F32", [2, 4])))
    edited(
        made,
        "records-of-another-dtype",
        "columns",
        lambda one: one.replace(Tensor("text.records", "I8", [11], b"fourthfifth")),
    )
    edited(
        made,
        "offsets-of-i32",
        "offsets",
        lambda one: one.replace(Tensor("text.offsets", "I32", [3], struct.pack("<3i", 0, 6, 11))),
    )
    for name, ends in {
        "one-less": (0, 11),
        "one-more": (0, 6, 8, 11),
        "decreasing": (0, 12, 11),
        "past-the-end": (0, 6, 12),
        "negative": (-1, 6, 11),
        "from-1": (1, 6, 11),
        "short-of-the-end": (0, 6, 10),
        "of-62-bits": (0, 6, 1 << 62),
    }.items():
        data = struct.pack(f"<{len(ends)}q", *ends)
        edited(
            made,
            f"offsets-{name}",
            "offsets",
            lambda one, data=data, ends=ends: one.replace(Tensor("text.offsets", "I64", [len(ends)], data)),
        )
    edited(
        made,
        "records-of-two-dimensions",
        "offsets",
        lambda one: one.replace(Tensor("text.records", "U8", [11, 1], b"fourthfifth")),
    )
    halves = shards()
    for one in halves:
        one.replace(Tensor("text.records", "F4", [4], b"\x12\x34"))
        one.about["types"] = TYPES | {"text": ""}
        one.replace(offsets([1, 2, 1] if one.samples == 3 else [1, 3]))
    fails(made, "records-of-half-bytes", "columns", "format", files(halves))
    for name, one in {
        "shorter": bits(True),
        "longer": bits(True, True, True),
        "of-u8": Tensor("label.valid", "U8", [2], b"\1\1"),
        "of-two-dimensions": Tensor("label.valid", "BOOL", [2, 1], b"\1\1"),
    }.items():
        data_set = shards()
        _nullable(data_set[0], bits(True, True, False))
        _nullable(data_set[1], one)
        fails(made, f"valid-{name}", "valid", "format", files(data_set))
    edited(made, "valid-in-one-shard-alone", "valid", lambda shard: _nullable(shard, bits(True, False)))
    edited(made, "valid-not-in-types", "types", lambda one: one.tensors.append(bits(True, False)))
    lacking = {"image": "", "label": "", "label.valid": "", "text": "text"}
    edited(made, "valid-in-types-alone", "types", lambda one: one.about.update(types=lacking))


def _nullable(shard: Shard, valid: Tensor) -> None:
    shard.tensors.append(valid)
    shard.about["types"] = TYPES | {"label.valid": ""}


def _retyped(file: Draft, dtype: str, matrix: bool) -> None:
    size = file.sealed[-1].shape[0]
    file.entries["fastrack.about"] = {"dtype": dtype, "shape": [size, 1] if matrix else [size]}
    file.reseal("fastrack.about")


def _plain(name: str) -> Callable[[Draft], object]:
    """Return an edit that stores a tensor unencrypted."""

    def edit(file: Draft) -> None:
        one = next(one for one in file.sealed if one.name == name)
        del file.entries[name]
        file.stored[name] = Stored(one.dtype, one.shape, one.data)

    return edit


def first_versions(made: Cases) -> None:
    """Add datasets that version 0.1 began."""
    begun = shards()
    begun[0].bare = True
    begun[1].about.update(before=3, previous="", run=3)
    opens(made, "begun-by-version-0.1", "before", begun)
    for name, before in (("0", 0), ("less", 2), ("more", 4)):
        wrong = shards()
        wrong[0].bare = True
        wrong[1].about.update(before=before, previous="", run=3)
        fails(made, f"before-{name}", "before", "format", files(wrong))
    middle = shards((2, 1, 2))
    middle[1].bare = True
    middle[2].about.update(previous=shard_id(0))
    fails(made, "bare-shard-in-the-middle", "before", "format", files(middle))
    last = shards()
    last[1].bare = True
    fails(made, "bare-shard-last", "before", "format", files(last))
    claimed = shards()
    for one in claimed:
        one.about["before"] = 1
    fails(made, "before-of-none", "before", "format", files(claimed))


def refused(made: Cases) -> None:
    """Add shards that were altered, or are under another key or of another kind."""

    def altered(name: str, index: int) -> Edit:
        return lambda one: one.edits.append(lambda file: file.alter(name, lambda data: flip(data, index)))

    for name in ("image", "label", "text.records", "text.offsets", "fastrack.about"):
        edited(made, f"altered-{name.replace('.', '-')}", "authentic", altered(name, -1), expect="authentication")
    edited(made, "about-commitment", "authentic", altered("fastrack.about", 30), expect="authentication")
    for name, dtype, matrix in (("about-of-i8", "I8", False), ("about-of-two-dimensions", "U8", True)):
        edited(
            made, name, "about", lambda one, kind=(dtype, matrix): one.edits.append(lambda file: _retyped(file, *kind))
        )
    edited(made, "under-another-key", "authentic", lambda one: setattr(one, "key", OTHER_KEY), expect="unknown-key")

    for name in ("fastrack.about", "image", "text.offsets"):
        edited(
            made, f"in-plain-{name.replace('.', '-')}", "types", lambda one, name=name: one.edits.append(_plain(name))
        )
    edited(made, "a-checkpoint", "kind", lambda one: setattr(one, "kind", "checkpoint"))
    edited(made, "an-index", "kind", lambda one: setattr(one, "kind", "index"))
