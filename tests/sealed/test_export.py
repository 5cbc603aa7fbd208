"""Exports: what comes out of a dataset is what went in, or they say what they cannot write, and leave nothing."""

import base64
import csv
import json
import re
import stat
from dataclasses import replace

import numpy as np
import pytest
from helpers import file_systems
from helpers.cases import each
from helpers.tampering import flip_byte
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import (
    AuthenticationError,
    DatasetWriter,
    FormatError,
    Key,
    UnknownKeyError,
    export_samples,
    import_samples,
)
from fastrack._samples.blocks import Block


@pytest.fixture
def cities(tmp_path, key):
    """A dataset of three shards of text and numbers."""
    with DatasetWriter(tmp_path / "cities", key, shard_size=40) as writer:
        names = ["Oslo", "Lima, Perú", 'a "quoted"\nname', "", "=1+1"]
        writer.write_batch({"name": names, "size": [1, -2, 3, 4, 5], "share": [0.1, 1e300, -0.0, 5.0, float("inf")]})
    assert len(list((tmp_path / "cities").iterdir())) >= 3
    return tmp_path / "cities"


def write(folder, key, batch, **options):
    with DatasetWriter(folder, key, **options) as writer:
        writer.write_batch(batch)
    return folder


def exported(folder, key, suffix, **options):
    target = folder.with_name(f"out{suffix}")
    export_samples(folder, target, key, **options)
    return target


def rows(path, delimiter=","):
    with path.open(newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


ROWS = [
    ["name", "size", "share"],
    ["Oslo", "1", "0.1"],
    ["Lima, Perú", "-2", "1e+300"],
    ['a "quoted"\nname', "3", "-0.0"],
    ["", "4", "5.0"],
    ["=1+1", "5", "inf"],
]


@each(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t"), (".CSV", ",")])
def test_a_table_of_text(cities, key, suffix, delimiter):
    done = []
    assert export_samples(cities, cities.with_name(f"out{suffix}"), key, progress=done.append) == 5
    assert len(done) >= 3
    assert rows(cities.with_name(f"out{suffix}"), delimiter) == ROWS


def test_some_columns_in_another_order(cities, key):
    found = rows(exported(cities, key, ".csv", columns=["size", "name"]))
    assert found == [[row[1], row[0]] for row in ROWS]
    for names in (["nome"], ["size", "nome"], []):
        with pytest.raises(ValueError, match="columns="):
            exported(cities, key, ".jsonl", columns=names)
    with pytest.raises(TypeError, match="columns="):
        exported(cities, key, ".jsonl", columns="name")


def test_objects_of_json(tmp_path, key):
    batch = {"text": ["a", "b"], "flag": [True, False], "row": np.arange(4).reshape(2, 2), "tokens": [[1], [2, 3]]}
    batch["tokens"] = [np.array(values, np.uint16) for values in batch["tokens"]]
    write(tmp_path / "in", key, batch, records=["tokens"])
    lines = exported(tmp_path / "in", key, ".jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": "a", "flag": True, "row": [0, 1], "tokens": [1]},
        {"text": "b", "flag": False, "row": [2, 3], "tokens": [2, 3]},
    ]


def test_lines_of_text(cities, key, tmp_path):
    write(tmp_path / "lines", key, {"text": [b"one", "twö".encode(), b"", b"\xff"]})
    assert exported(tmp_path / "lines", key, ".txt").read_bytes() == "one\ntwö\n\n".encode() + b"\xff\n"
    (tmp_path / "out.txt").unlink()
    with pytest.raises(FormatError, match=r"sample 2.*end of a line"):
        exported(cities, key, ".txt", columns=["name"])
    with pytest.raises(FormatError, match="one column of text, got 3 columns"):
        exported(cities, key, ".txt")


@each(
    ("values", "suffix", "told"),
    [
        ([b"\xff\xd8"], ".csv", "sample 0: 'x': expected text in UTF-8"),
        (["a\0b"], ".csv", "NUL"),
        (np.zeros((1, 3)), ".csv", "expected numbers or text for a cell, got F64 \\[3\\]"),
        (np.zeros(1, np.complex64), ".csv", "expected numbers that have a text"),
        ([b"\xff\xd8"], ".jsonl", "sample 0: 'x': expected text in UTF-8"),
        ([float("nan")], ".jsonl", "no number"),
        ([1], ".txt", "expected one column of text, got I64"),
        (np.zeros(1, np.complex64), ".parquet", "expected a dtype that Arrow has"),
        (["a"], "", "samples of no file"),
    ],
)
def test_a_target_that_cannot_hold_the_data_is_refused(tmp_path, key, values, suffix, told):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    write(tmp_path / "in", key, {"x": values})
    with pytest.raises(FormatError, match=told):
        exported(tmp_path / "in", key, suffix)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_lines_that_would_come_back_as_others_are_refused(tmp_path, key, pa):
    import_samples(pa.table({"t": ["a", None, ""]}), tmp_path / "nulls", key)
    with pytest.raises(FormatError, match="sample 1: 't': expected a text, got a null"):
        exported(tmp_path / "nulls", key, ".txt")
    import_samples([{"t": "\ufeffx"}, {"t": "\ufeffy"}], tmp_path / "marks", key)
    with pytest.raises(FormatError, match="sample 0: 't': expected a text, got a byte-order mark"):
        exported(tmp_path / "marks", key, ".txt")


@each("names", [["a;b"], ["a;b", "c"], ["a\tb"], ["\ufeffa"], ["a,b"], ['"a";', "b"]])
def test_names_with_delimiters_come_back(tmp_path, key, names):
    path = exported(write(tmp_path / "data", key, {name: ["x;y", "z"] for name in names}), key, ".csv")
    import_samples(path, tmp_path / "back", key)
    assert json.loads(exported(tmp_path / "back", key, ".jsonl").read_text().splitlines()[0]) == dict.fromkeys(
        names, "x;y"
    )


def crafted(folder, key, told, *records):
    """A dataset that says another type of its column than `import_samples` stores."""
    block = Block.of(records)
    return write(folder, key, {"x": replace(block, column=replace(block.column, type=told))})


def arrow_of(pa, kind, name="json"):
    return "arrow:" + base64.b64encode(pa.schema([] if kind is None else [pa.field(name, kind)]).serialize()).decode()


def test_types_that_are_none_are_refused(tmp_path, key, pa):
    deep = pa.int8()
    for _ in range(60):
        deep = pa.list_(deep)
    huge = pa.struct([("a", pa.list_(pa.int8(), 2**31 - 1))])
    told = ["arrow:", "arrow:!!!", "arrow:AAAA", arrow_of(pa, None), arrow_of(pa, deep), arrow_of(pa, huge), "json"]
    for number, each_told in enumerate(told):
        folder = crafted(tmp_path / str(number), key, each_told, b"[" * 100_000, b'{"a":null}')
        for suffix in [".jsonl"] if each_told == "json" else [".parquet", ".arrow", ".jsonl"]:
            with pytest.raises(FormatError):
                exported(folder, key, suffix)
    huge_null = crafted(tmp_path / "null", key, arrow_of(pa, huge), b'{"a":null}')
    with pytest.raises(FormatError, match="expected values of its type in Arrow"):
        exported(huge_null, key, ".parquet")


@each("suffix", [".csv", ".tsv", ".jsonl"])
@each(
    "unit,values,is_told",
    [
        ("D", [-719_163], True),
        ("D", [2_932_897], True),
        ("D", [-(2**31)], True),
        ("D", [-719_162, 0, 2_932_896], False),
        ("s", [253_402_300_800], True),
        ("s", [-62_135_596_800, 253_402_300_799], False),
        ("us", [-(2**63)], True),
        ("us", [2**63 - 1], True),
        ("ms", [253_402_300_799_999, -62_135_596_800_000], False),
        ("ns", [-(2**62), 2**62], False),
        ("ms UTC", [253_402_300_799_999], True),
        ("ms UTC", [253_402_200_000_000], False),
    ],
)
def test_dates_that_have_no_text_are_refused(tmp_path, key, pa, unit, values, is_told, suffix):
    unit, _, zone = unit.partition(" ")
    kind = pa.date32() if unit == "D" else pa.timestamp(unit, zone or None)
    array = pa.array([*values, None], pa.int32() if unit == "D" else pa.int64()).view(kind)
    import_samples(pa.table({"when": array}), tmp_path / "data", key)
    if is_told:
        with pytest.raises(FormatError, match="column 'when': expected years from 1 to 9999, got others"):
            exported(tmp_path / "data", key, suffix)
        return
    text = exported(tmp_path / "data", key, suffix).read_text()
    found = [re.search(r"[0-9]{4}-[0-9][^\"]*", line) for line in text.splitlines()]
    texts = [match[0].rstrip("Z") for match in found if match]
    back = pa.array(texts).cast(pa.date32() if unit == "D" else pa.timestamp(unit))
    assert back.view(pa.int32() if unit == "D" else pa.int64()).to_pylist() == values


def test_another_suffix_is_no_folder(cities, key):
    with pytest.raises(ValueError, match="target: expected a suffix among"):
        exported(cities, key, ".cvs")


# Tables of Arrow.


@pytest.fixture(scope="module")
def pa():
    return pytest.importorskip("pyarrow")


def stored(table, folder, key, shard_size=200):
    """A dataset that is imported of a Parquet file of a table."""
    from pyarrow import parquet

    parquet.write_table(table, folder.with_name("in.parquet"))
    import_samples(folder.with_name("in.parquet"), folder, key, shard_size=shard_size)
    return folder


def test_nulls_and_types_of_arrow_come_back(tmp_path, key, pa):
    from decimal import Decimal

    from pyarrow import feather, parquet

    table = pa.table(
        {
            "price": pa.array([Decimal("1.50"), None, Decimal("-7.25")], pa.decimal128(9, 2)),
            "when": pa.array([0, None, 1_700_000_000_000_001], pa.timestamp("us", "Europe/Oslo")),
            "day": pa.array([1, 2, None], pa.date32()),
            "count": pa.array([1, None, 3], pa.int16()),
            "text": pa.array(["a", None, ""], pa.large_string()),
            "kind": pa.array(["x", "y", None]).dictionary_encode(),
            "deep": pa.array([{"a": [1, None]}, None, {"a": []}], pa.struct([("a", pa.list_(pa.int64()))])),
            "numbers": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())),
            "flag": pa.array([True, None, False]),
            "blob": pa.array([b"\xff", None, b""]),
        }
    )
    folder = stored(table, tmp_path / "in", key)
    assert len(list(folder.iterdir())) > 1
    found = parquet.read_table(exported(folder, key, ".parquet"))
    assert found.schema == table.schema
    assert found.to_pylist() == table.to_pylist()
    without = [name for name in table.column_names if name != "kind"]
    export_samples(folder, tmp_path / "out.feather", key, columns=without)
    assert feather.read_table(tmp_path / "out.feather") == table.select(without)
    without = [name for name in table.column_names if name != "blob"]
    lines = exported(folder, key, ".jsonl", columns=without).read_text().splitlines()
    assert json.loads(lines[1]) == dict.fromkeys(without) | {"day": "1970-01-03", "kind": "y", "numbers": []}
    assert json.loads(lines[0]) == {
        "price": "1.50",
        "when": "1970-01-01 01:00:00.000000+0100",
        "day": "1970-01-02",
        "count": 1,
        "text": "a",
        "kind": "x",
        "deep": {"a": [1, None]},
        "numbers": [1, 2],
        "flag": True,
    }
    cells = rows(exported(folder, key, ".csv", columns=["price", "day", "count", "text", "kind", "deep", "flag"]))
    assert cells[1:3] == [
        ["1.50", "1970-01-02", "1", "a", "x", '{"a":[1,null]}', "true"],
        ["", "1970-01-03", "", "", "y", "", ""],
    ]


def columns_of_arrow(pa):
    """Strategies of the values of columns, by their types."""
    integers = {f"{sign}int{bits}": (bits, sign) for bits in (8, 16, 32, 64) for sign in ("", "u")}
    whole = [
        (getattr(pa, name)(), st.integers(0 if sign else -(2 ** (bits - 1)), 2 ** (bits - (not sign)) - 1))
        for name, (bits, sign) in integers.items()
    ]
    text = st.text(st.characters(codec="utf-8"), max_size=9)
    simple = [
        *whole,
        (pa.float32(), st.floats(width=32, allow_nan=False)),
        (pa.float64(), st.floats(allow_nan=False)),
        (pa.bool_(), st.booleans()),
        (pa.string(), text),
        (pa.large_string(), text),
        (pa.binary(), st.binary(max_size=9)),
        (pa.binary(3), st.binary(min_size=3, max_size=3)),
        (pa.date32(), st.dates()),
        (pa.timestamp("us"), st.datetimes()),
        (pa.decimal128(20, 3), st.decimals(-(10**16), 10**16, places=3)),
    ]
    nested = [(pa.list_(kind), st.lists(values, max_size=3)) for kind, values in simple]
    members = [(pa.struct([("a", kind)]), st.fixed_dictionaries({"a": values})) for kind, values in simple]
    return [*simple, *nested, *members]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_any_table_comes_back_as_parquet(tmp_path_factory, key, pa, data):
    from pyarrow import parquet

    kinds = data.draw(st.lists(st.sampled_from(columns_of_arrow(pa)), min_size=1, max_size=4))
    count = data.draw(st.integers(1, 12))
    draw = [data.draw(st.lists(st.none() | values, min_size=count, max_size=count)) for _, values in kinds]
    table = pa.table({f"c{i}": pa.array(draw[i], kind) for i, (kind, _) in enumerate(kinds)})
    folder = tmp_path_factory.mktemp("table")
    stored(table, folder / "in", key, shard_size=data.draw(st.sampled_from([1, 50, 10_000])))
    assert parquet.read_table(exported(folder / "in", key, ".parquet")) == table


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(CELLS, min_size=1, max_size=20), numbers=st.data())
@pytest.mark.slow
def test_any_text_and_number_comes_back_as_csv(tmp_path_factory, key, cells, numbers):
    floats = numbers.draw(st.lists(st.floats(), min_size=len(cells), max_size=len(cells)))
    with np.errstate(over="ignore"):
        singles = np.array(floats, np.float32)
    folder = tmp_path_factory.mktemp("table")
    write(folder / "in", key, {"text": cells, "x": floats, "y": singles}, shard_size=64)
    header, *found = rows(exported(folder / "in", key, ".csv"))
    assert header == ["text", "x", "y"]
    assert [row[0] for row in found] == cells
    np.testing.assert_array_equal([float(row[1]) for row in found], floats)
    np.testing.assert_array_equal(np.array([row[2] for row in found], np.float32), singles)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.slow
def test_any_csv_comes_back(tmp_path_factory, key, data):
    cells = st.sampled_from(["", "0", "-7", "007", "1.5", "1e3", "nan", "9" * 19]) | CELLS
    columns = data.draw(st.integers(1, 3))
    table = data.draw(st.lists(st.lists(cells, min_size=columns, max_size=columns), min_size=1, max_size=9))
    folder = tmp_path_factory.mktemp("table")
    with (folder / "in.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b", "c"][:columns], *table])
    import_samples(folder / "in.csv", folder / "in", key, shard_size=data.draw(st.sampled_from([1, 50, 10_000])))
    export_samples(folder / "in", folder / "out.csv", key)
    _, *found = rows(folder / "out.csv")
    assert len(found) == len(table)
    for row, back in zip(table, found, strict=True):
        for cell, other in zip(row, back, strict=True):
            assert cell == other or repr(float(cell)) == repr(float(other))


# Folders of files.


@pytest.fixture
def photos(tmp_path, key):
    paths = ["cat/a.png", "cat/deep/b.png", "dog/a.png"]
    batch = {"image": [b"one", b"two", b""], "path": paths, "label": [0, 0, 1]}
    return write(tmp_path / "photos", key, batch, shard_size=20)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_images_by_their_paths(photos, key):
    out = exported(photos, key, "")
    assert contents(out) == {"cat/a.png": b"one", "cat/deep/b.png": b"two", "dog/a.png": b""}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*") if path.is_file()} == {0o600}
    with pytest.raises(FileExistsError, match="no folder is replaced"):
        exported(photos, key, "", overwrite=True)


def test_arrays_by_their_paths(tmp_path, key):
    arrays = {"a.npy": np.arange(3, dtype=np.int16), "b/c.npy": np.arange(5, dtype=np.int16)}
    write(tmp_path / "series", key, {"array": list(arrays.values()), "path": list(arrays)}, records=["array"])
    out = exported(tmp_path / "series", key, "")
    for name, array in arrays.items():
        found = np.load(out / name)
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    write(tmp_path / "scans", key, {"array": np.ones((1, 2, 3)), "path": ["x.npy"]})
    export_samples(tmp_path / "scans", tmp_path / "back", key)
    assert np.load(tmp_path / "back" / "x.npy").shape == (2, 3)


def test_labels_that_the_folders_do_not_tell_are_not_lost(tmp_path, key):
    batch = {"image": [b"1", b"2"], "path": ["cat/1.png", "dog/2.png"], "label": [1, 0]}
    write(tmp_path / "in", key, batch)
    with pytest.raises(FormatError, match="--columns path,image"):
        exported(tmp_path / "in", key, "")
    assert len(contents(exported(tmp_path / "in", key, "", columns=["path", "image"]))) == 2


def test_a_folder_has_room_for_one_content_a_file(tmp_path, key):
    write(tmp_path / "in", key, {"image": [b"1"], "path": ["1.png"], "caption": ["a cat"]})
    with pytest.raises(FormatError, match="Name two"):
        exported(tmp_path / "in", key, "")


HOSTILE = [
    "/etc/cron.d/x", "../x", "a/../../x", "a\0b", "", ".", "..", "a//b", "a/", "a\\..\\x", "a\nb", "c:x", "NUL",
    "aux.png", "a/com1.txt", "x.", "x ", "n" * 256, "\x1b[2J",
]  # fmt: skip


@each("name", HOSTILE)
def test_a_hostile_path_is_refused_before_anything_is_written(tmp_path, key, name, monkeypatch):
    write(tmp_path / "in", key, {"image": [b"1", b"2"], "path": ["fine.png", name]})
    monkeypatch.setattr("fastrack._samples.export.new_folder", None)
    with pytest.raises(FormatError, match="sample 1: path: expected a path of Unicode text") as caught:
        exported(tmp_path / "in", key, "")
    assert len(name) < 3 or name not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@each("names", [("a", "a"), ("a.png", "A.PNG"), ("a", "a/b"), ("a/b", "A"), ("é", "e\u0301"), ("ß/x", "SS/X")])
def test_paths_that_meet_are_refused(tmp_path, key, names):
    write(tmp_path / "in", key, {"image": [b"1", b"2"], "path": list(names)})
    with pytest.raises(FormatError, match="sample 1: path: expected a path of its own"):
        exported(tmp_path / "in", key, "")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_path_that_is_no_text_is_refused(tmp_path, key):
    write(tmp_path / "in", key, {"image": [b"1"], "path": [b"\xff.png"]})
    with pytest.raises(FormatError, match="sample 0: path: expected a path in UTF-8"):
        exported(tmp_path / "in", key, "")


def test_files_come_back_by_their_names(tmp_path, key):
    with DatasetWriter(tmp_path / "in", key, shard_size=30) as writer:
        for name, texts in {"a.csv": ["one", "two"], "more/b.csv": ["three"] * 9, "c.txt": ["x"]}.items():
            writer.write_batch({"text": texts}, file=name)
    assert contents(exported(tmp_path / "in", key, "")) == {
        "a.csv": b"text\none\ntwo\n",
        "more/b.csv": b"text\n" + b"three\n" * 9,
        "c.txt": b"x\n",
    }


@each("name", ["../a.csv", "/a.csv", "a.tar", "caf\udce9.csv", "con .csv", "COM¹.csv", "conin$.csv", "a/lpt³.csv"])
def test_a_hostile_name_of_a_file_is_refused(tmp_path, key, name):
    with DatasetWriter(tmp_path / "in", key) as writer:
        writer.write_batch({"text": ["a"]}, file=name)
    with pytest.raises(FormatError, match="file"):
        exported(tmp_path / "in", key, "")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# Failures.


def test_nothing_of_an_altered_data_set_is_left(photos, key, pa):  # noqa: ARG001 - needs PyArrow
    flip_byte(photos / "shard-000002.safetensors")
    for suffix in (".csv", ".jsonl", ".parquet", ".arrow", "", ".txt"):
        with pytest.raises(AuthenticationError):
            exported(photos, key, suffix, columns=["path"] if suffix == ".txt" else None)
        assert [path.name for path in photos.parent.iterdir()] == ["photos"]
        with pytest.raises(UnknownKeyError):
            exported(photos, Key.generate(), suffix)


def test_shards_that_are_missing_exchanged_or_copied_are_refused(cities, key):
    first, second, *_ = sorted(cities.iterdir())
    content = first.read_bytes()
    second.rename(second.with_name("kept"))
    with pytest.raises(FormatError, match="expected shard-000001"):
        exported(cities, key, ".csv")
    second.write_bytes(content)
    with pytest.raises(FormatError, match="got a copy of shard-000000"):
        exported(cities, key, ".csv")
    second.with_name("kept").rename(first)
    with pytest.raises(FormatError, match="expected samples 0"):
        exported(cities, key, ".csv")
    assert not cities.with_name("out.csv").exists()


def test_a_shard_that_is_exchanged_meanwhile_is_refused(cities, key, monkeypatch):
    from fastrack._samples import export

    def read(folder, ring, original=export.read_data_set):
        found = original(folder, ring)
        shards = sorted(folder.iterdir())
        shards[1].replace(shards[0])
        return found

    monkeypatch.setattr(export, "read_data_set", read)
    with pytest.raises(FormatError, match="replaced since"):
        exported(cities, key, ".csv")


def test_a_column_that_a_shard_lost_is_missed(photos, key):
    from helpers.tampering import rewrite_file

    def drop(metadata, tensors):
        listed = json.loads(metadata["fastrack.tensors"])
        del listed["label"], tensors["label"]
        metadata["fastrack.tensors"] = json.dumps(listed)

    for path in photos.iterdir():
        rewrite_file(path, drop)
    with pytest.raises(FormatError, match="expected the columns that the shard was written with"):
        exported(photos, key, "")


def test_a_file_is_replaced_only_if_it_is_asked_for(cities, key):
    out = exported(cities, key, ".csv")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    out.write_text("mine")
    with pytest.raises(FileExistsError):
        exported(cities, key, ".csv")
    assert out.read_text() == "mine"
    assert rows(exported(cities, key, ".csv", overwrite=True)) == ROWS


def test_offsets_that_are_none_are_refused(tmp_path, key):
    tensors = {"x.records": np.zeros(3, np.uint8), "x.offsets": np.array([0, 9])}
    (tmp_path / "in").mkdir()
    fastrack.save_file(tensors, tmp_path / "in" / "shard-000000.safetensors", key)
    with pytest.raises(FormatError, match="expected offsets of records"):
        exported(tmp_path / "in", key, ".csv")


def test_a_folder_without_shards_is_refused(tmp_path, key):
    (tmp_path / "in").mkdir()
    with pytest.raises(FormatError, match="expected shards of a dataset, got none"):
        exported(tmp_path / "in", key, ".csv")


def test_shards_must_be_as_the_manifest_lists_them(cities, key, tmp_path):
    from fastrack.grants import Signer

    owner = Signer.generate()
    fastrack.publish(cities, signer=owner)
    fastrack.Anchor.create(tmp_path / "anchor", owner=owner.verifier)
    assert rows(exported(cities, key, ".csv", anchor=tmp_path / "anchor")) == ROWS
    max(cities.glob("shard-*")).unlink()
    with pytest.raises(fastrack.RollbackError):
        exported(cities, key, ".tsv", anchor=tmp_path / "anchor")
    assert export_samples(cities, tmp_path / "out.tsv", key) < 5


def test_a_full_disk_leaves_nothing(cities, key):
    pytest.importorskip("pyarrow")
    for suffix in (".csv", ".parquet", ".arrow"):
        with pytest.raises(OSError, match="free some space"), file_systems.full():
            exported(cities, key, suffix)
    assert not list(cities.parent.glob("out*"))
