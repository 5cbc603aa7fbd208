"""Importers: a sealed dataset has what its source has, bit for bit, or they say what they cannot take."""

import contextlib
import io
import json
import os
import sys
import tarfile

import numpy as np
import pytest
from helpers.cases import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastrack import DatasetWriter, FormatError, SealedDataset, export_samples, import_samples
from fastrack._samples.readers import open_source


def samples_of(folder, key):
    return SealedDataset(folder, keys=key, transform=lambda sample: sample)


def column(folder, key, name):
    return [sample[name] for sample in samples_of(folder, key)]


PNG = b"\x89PNG\r\n\x1a\n"


def write_images(folder):
    """A folder of classes; its files in ImageFolder's order, with labels."""
    order = [("cat/a.JPG", 0), ("cat/b.png", 0), ("cat/deep/a.png", 0), ("dog/1.webp", 1), ("dog/10.webp", 1)]
    for number, (name, _) in enumerate(order):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG + bytes([number]) * (number * 1000 + 1))
    (folder / "cat" / "notes.md").write_text("no image")
    return order


def test_images_by_class(tmp_path, key):
    order = write_images(tmp_path / "in")
    assert import_samples(tmp_path / "in", tmp_path / "out", key, shard_size=2500) == 5
    found = list(samples_of(tmp_path / "out", key))
    assert [(sample["path"].decode(), sample["label"].item()) for sample in found] == order
    assert [sample["image"] for sample in found] == [(tmp_path / "in" / name).read_bytes() for name, _ in order]


def test_the_order_is_that_of_torchvision(tmp_path, key):
    datasets = pytest.importorskip("torchvision.datasets", exc_type=(ImportError, RuntimeError))
    write_images(tmp_path / "in")
    import_samples(tmp_path / "in", tmp_path / "out", key)
    plain = datasets.ImageFolder(tmp_path / "in")
    paths = [(tmp_path / "in" / name.decode(), None) for name in column(tmp_path / "out", key, "path")]
    labels = [label.item() for label in column(tmp_path / "out", key, "label")]
    assert [(str(path), label) for (path, _), label in zip(paths, labels, strict=True)] == plain.samples


def test_images_without_classes_have_no_label(tmp_path, key):
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_bytes(PNG + name.encode())
    import_samples(tmp_path, tmp_path / "out", key)
    assert column(tmp_path / "out", key, "image") == [PNG + b"a.png", PNG + b"b.png"]
    assert "label" not in SealedDataset(tmp_path / "out", keys=key).columns


def test_a_class_without_images_is_refused(tmp_path, key):
    write_images(tmp_path / "in")
    (tmp_path / "in" / "empty").mkdir()
    with pytest.raises(FormatError, match="empty"):
        import_samples(tmp_path / "in", tmp_path / "out", key)


def test_files_beside_classes_are_left_out_and_counted(tmp_path, key):
    for folder, stray in (("notes", ["README.md", "labels.txt", "_SUCCESS"]), ("arrays", ["meta.json"])):
        order = write_images(tmp_path / folder)
        for name in [*stray, ".DS_Store"]:
            (tmp_path / folder / name).write_text("no image")
        assert import_samples(tmp_path / folder, tmp_path / f"{folder}-out", key) == len(order)
        assert [label.item() for label in column(tmp_path / f"{folder}-out", key, "label")] == [x for _, x in order]
        skipped = open_source(tmp_path / folder).skipped
        assert sorted(skipped) == [(name, "no image or .npy file") for name in sorted([*stray, "cat/notes.md"])]


def test_an_image_beside_classes_does_not_take_their_labels(tmp_path, key):
    write_images(tmp_path / "in")
    (tmp_path / "in" / "overview.png").write_bytes(PNG)
    with pytest.raises(
        FormatError, match=r"the folder 'cat' beside 'overview\.png'\. Move one away, or name the files"
    ):
        import_samples(tmp_path / "in", tmp_path / "out", key)
    files = [path for path in (tmp_path / "in").rglob("*.*") if path.suffix != ".md"]  # without classes, as it says
    assert import_samples(files, tmp_path / "out", key) == 6
    (tmp_path / "flat" / "notes").mkdir(parents=True)  # no class: it has no image
    (tmp_path / "flat" / "a.png").write_bytes(PNG)
    (tmp_path / "flat" / "notes" / "b.md").touch()
    assert import_samples(tmp_path / "flat", tmp_path / "flat-out", key) == 1


@each("content", [b"", b"<html>not found</html>"])
def test_a_broken_image_is_named(tmp_path, key, content):
    write_images(tmp_path / "in")
    (tmp_path / "in" / "dog" / "5.png").write_bytes(content)
    with pytest.raises(FormatError, match=r"dog/5\.png: expected an image, got .*\. Remove the file, or get it again"):
        import_samples(tmp_path / "in", tmp_path / "out", key)


@pytest.mark.slow
def test_lines_of_text(tmp_path, key):
    (tmp_path / "a.txt").write_bytes("one\r\n\ntwö\n".encode() + b" last")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"x" * 100_000 + b"\n" + b"y\n" * 5000)
    assert import_samples(tmp_path, tmp_path / "out", key) == 5005
    expected = [b"one", b"", "twö".encode(), b" last", b"x" * 100_000, *[b"y"] * 5000]
    assert column(tmp_path / "out", key, "text") == expected
    assert import_samples([tmp_path / "a.txt"], tmp_path / "again", key) == 4


def test_json_lines(tmp_path, key):
    first = {"text": "é\n", "n": 1, "x": 0.5, "ok": True, "ids": [1, 2], "w": [0.5, 1], "chat": [{"a": None}], "e": []}
    second = {"x": 2, "text": "", "n": -1, "ok": False, "ids": [], "w": [3], "chat": {"b": "é"}, "e": [1]}
    lines = f"{json.dumps(first)}\n\n{json.dumps(second)}\n"
    (tmp_path / "a.jsonl").write_text(lines)
    assert import_samples(tmp_path / "a.jsonl", tmp_path / "out", key) == 2
    found = samples_of(tmp_path / "out", key)
    kinds = {"text": "U8", "n": "I64", "x": "F64", "ok": "BOOL", "ids": "I64", "w": "F64", "chat": "U8", "e": "I64"}
    for sample, expected in zip(found, (first, second), strict=True):
        assert sample["text"].decode() == expected["text"]
        assert [sample[name].item() for name in ("n", "x", "ok")] == [expected[name] for name in ("n", "x", "ok")]
        assert [sample[name].tolist() for name in ("ids", "w", "e")] == [expected[name] for name in ("ids", "w", "e")]
        assert json.loads(sample["chat"]) == expected["chat"]
    stored = SealedDataset(tmp_path / "out", keys=key)[0]
    assert {name: stored[name].dtype for name in kinds} == kinds


@each(
    "line",
    [
        "{", "[]", "{}", "5", "[" * 100_000, b"\xff", '{"a": 1, "b": "\\ud800"}', '{"a.valid": 1}', '{"": 1}',
        '{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 2}}', '{"a": 1e400}', '{"a": 1e-400}',
    ],
)  # fmt: skip
def test_lines_that_do_not_fit_are_named(tmp_path, key, line):
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1, "b": "x"}\n' + line)
    with pytest.raises(FormatError, match=r"a\.jsonl"):
        import_samples(tmp_path / "a.jsonl", tmp_path / "out", key)


@each(
    ("values", "dtype", "expected"),
    [
        (["1", "1.5"], "F64", [1.0, 1.5]),
        (["9007199254740993", "1"], "I64", [9007199254740993, 1]),
        (["1", "null"], "I64", [1, None]),
        (["null", "2.5"], "F64", [None, 2.5]),
        (["true", "null"], "BOOL", [True, None]),
        (['"a"', "null", '""'], "U8", ["a", None, ""]),
        (["[1]", "[0.5]", "[]", "null"], "F64", [[1.0], [0.5], [], None]),
        (["[1]", "[]"], "I64", [[1], []]),
        (["1", '"1"', "null"], "U8", [1, "1", None]),
        (["9007199254740993", "0.5"], "U8", [9007199254740993, 0.5]),
        (["9223372036854775808"], "U8", [9223372036854775808]),
        (["true", "1"], "U8", [True, 1]),
        (["[1, null]", "[]"], "U8", [[1, None], []]),
        (["null"], "U8", [None]),
    ],
)
def test_members_of_json_lines_are_what_all_of_them_are(tmp_path, key, values, dtype, expected):
    for number, value in enumerate(values):  # of several files, as one has no say over the others
        (tmp_path / f"{number}.jsonl").write_text(f'{{"x": {value}, "y": 1}}\n')
    import_samples(sorted(tmp_path.glob("*.jsonl")), tmp_path / "out", key)
    stored = SealedDataset(tmp_path / "out", keys=key)[0]
    assert stored["x"].dtype == dtype
    assert ("x.valid" in stored) == ("null" in values and values not in (["null"], ["1", '"1"', "null"]))  # of JSON
    export_samples(tmp_path / "out", tmp_path / "back.jsonl", key)
    found = [json.loads(line)["x"] for line in (tmp_path / "back.jsonl").read_text().splitlines()]
    assert repr(found) == repr(expected)
    assert import_samples(sorted(tmp_path.glob("[0-9].jsonl")), tmp_path / "out", key, resume=True) == len(values)


def test_a_member_that_is_missing_is_a_null(tmp_path, key):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"b": "x", "a": 2.5}\n{"c": {}, "b": "y"}\n')
    import_samples(tmp_path / "a.jsonl", tmp_path / "out", key)
    stored = SealedDataset(tmp_path / "out", keys=key)[0]
    assert set(stored) - {"b.lengths", "c.lengths"} == {"a", "a.valid", "b", "b.valid", "c"}
    export_samples(tmp_path / "out", tmp_path / "back.jsonl", key)
    found = [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()]
    rows = [[1.0, None, None], [2.5, "x", None], [None, "y", {}]]
    assert [list(line.items()) for line in found] == [list(zip("abc", row, strict=True)) for row in rows]


def test_json_lines_that_change_while_they_are_read_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 3000)
    batches = open_source(tmp_path / "a.jsonl").batches
    next(batches)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' * 3001)
    with pytest.raises(FormatError, match=r"a\.jsonl: expected the file as it was at the first look"):
        list(batches)


@each(
    ("content", "told"),
    [
        ('{"a": 1.5, "b": "x"}', r"'a': expected I64 \[\], .* got F64 \[\]\. Give "),
        ('{"a": 1, "b": [1]}', r"'b': expected records of U8, .* got records of I64\. Give "),
        ('{"a": 1, "b": {}}', r"'b': expected values of the type 'text', .* got 'json'\. Give "),
        ('{"a": null, "b": "x"}\n{"a": 1, "b": "x"}', r"'a': expected no nulls, .* got some\. Fill "),
        ('{"a": 1}', r"expected the columns \['a', 'b'\], got \['a'\]\. Give "),
    ],
)
def test_json_lines_of_other_kinds_are_not_appended(tmp_path, key, content, told):
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": "x"}\n')
    import_samples(tmp_path / "a.jsonl", tmp_path / "out", key)
    (tmp_path / "b.jsonl").write_text(content)
    with pytest.raises(FormatError, match=rf"b\.jsonl: .*{told}"):
        import_samples(tmp_path / "b.jsonl", tmp_path / "out", key, append=True)
    assert import_samples(tmp_path / "a.jsonl", tmp_path / "out", key, resume=True) == 1


def archive(path, members, **options):
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


MEMBERS = [
    ("x/0001.jpg", b"first"), ("x/0001.cls", b"7"), ("x/0001.seg.PNG", b"mask"),
    ("x/0002.cls", b"-1"), ("x/0002.jpg", b""), ("x/0002.seg.png", bytes(5000)),
]  # fmt: skip


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_archives_of_webdataset(tmp_path, key, form):
    archive(tmp_path / "a.tar", MEMBERS, format=form)
    assert import_samples(tmp_path / "a.tar", tmp_path / "out", key) == 2
    found = list(samples_of(tmp_path / "out", key))
    assert found[0].keys() == {"__key__", "jpg", "cls", "seg.png"}
    assert [sample["jpg"] for sample in found] == [b"first", b""]
    assert [sample["cls"].item() for sample in found] == [7, -1]
    assert [sample["seg.png"] for sample in found] == [b"mask", bytes(5000)]
    assert [sample["__key__"] for sample in found] == [b"x/0001", b"x/0002"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its files open
def test_archives_written_by_webdataset(tmp_path, key):
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        for index in range(5):
            sink.write({"__key__": f"{index:04}", "jpg": bytes([index] * index), "cls": index, "txt": f"text {index}"})
    import_samples(tmp_path / "a.tar", tmp_path / "out", key)
    plain = list(webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False))
    for sample, expected in zip(samples_of(tmp_path / "out", key), plain, strict=True):
        assert sample["__key__"].decode() == expected["__key__"]
        assert (sample["jpg"], sample["txt"]) == (expected["jpg"], expected["txt"])
        assert sample["cls"].item() == int(expected["cls"])


@each("cut", [1, 100, 512, 700, 1024, 1025, 1536, 2048])
def test_an_archive_that_was_cut_short_is_refused(tmp_path, key, cut):
    archive(tmp_path / "a.tar", MEMBERS[:2])
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[:cut])
    with pytest.raises(FormatError, match=r"a\.tar"):
        import_samples(tmp_path / "a.tar", tmp_path / "out", key)


def test_members_that_are_no_files_are_refused(tmp_path, key):
    for kind, size in ((tarfile.SYMTYPE, 0), (tarfile.FIFOTYPE, 0), (tarfile.REGTYPE, 1 << 40)):
        member = tarfile.TarInfo("a.jpg")
        member.type, member.size, member.linkname = kind, size, "/etc/passwd"
        (tmp_path / "a.tar").write_bytes(member.tobuf() + bytes(2048))
        with pytest.raises(FormatError, match="regular file"):
            import_samples(tmp_path / "a.tar", tmp_path / "out", key)
    for members in (
        [("README", b"")],
        [(".hidden", b"")],
        [("a.cls", b"x")],
        [("a.cls", b"1_0")],
        [("a.cls", "٣".encode())],
        [("a.cls", b"9" * 5000)],
        [("a.jpg", b""), ("a.JPG", b"")],
        [("a.__key__", b"b")],
        [("a.jpg", b""), ("a.__KEY__", b"b")],
    ):
        archive(tmp_path / "a.tar", members)
        with pytest.raises(FormatError, match=r"a\.tar"):
            import_samples(tmp_path / "a.tar", tmp_path / "out", key)
    archive(tmp_path / "a.tar", [("a.jpg", b""), ("b.png", b"")])
    with pytest.raises(FormatError, match="columns"):
        import_samples(tmp_path / "a.tar", tmp_path / "out", key)


# Tables.


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


@pytest.fixture
def table(pa):
    count = 10_000
    numbers = np.arange(count)
    lists = [list(range(index % 4)) for index in range(count)]
    return pa.table(
        {
            "i": numbers.astype(np.int16),
            "f": numbers * 0.1,
            "h": pa.array(numbers.astype(np.float16)),
            "ok": numbers % 3 == 0,
            "text": [f"né {index}" for index in range(count)],
            "view": pa.array([b"b" * (index % 30) for index in range(count)], pa.binary_view()),
            "category": pa.array([f"class {index % 3}" for index in range(count)]).dictionary_encode(),
            "time": pa.array(numbers, pa.timestamp("us", "UTC")),
            "day": pa.array(numbers.astype(np.int32), pa.date32()),
            "ids": pa.array(lists, pa.list_(pa.int32())),
            "large": pa.array(lists, pa.large_list(pa.float32())),
            "fixed": pa.FixedSizeListArray.from_arrays(
                pa.FixedSizeListArray.from_arrays(pa.array(numbers.repeat(6)), 3), 2
            ),
            "uuid": pa.array([index.to_bytes(16) for index in range(count)], pa.binary(16)),
        }
    )


def assert_same(folder, key, table):
    data = samples_of(folder, key)
    assert len(data) == table.num_rows
    columns = table.to_pydict()
    for index in [*range(0, table.num_rows, 997), table.num_rows - 1]:
        sample = data[index]
        for name in ("i", "f", "h", "ok"):
            assert sample[name].item() == columns[name][index]
        assert sample["text"].decode() == columns["text"][index]
        assert sample["view"] == columns["view"][index]
        assert sample["category"].decode() == columns["category"][index]
        assert (sample["time"].item(), sample["day"].item()) == (index % 10_000, index % 10_000)
        assert sample["ids"].tolist() == sample["large"].tolist() == columns["ids"][index]
        assert sample["fixed"].tolist() == columns["fixed"][index]
        assert bytes(sample["uuid"].tolist()) == columns["uuid"][index]
    handles = SealedDataset(folder, keys=key)[0].items()
    dtypes = {name: handle.dtype for name, handle in handles if hasattr(handle, "dtype")}
    assert [dtypes[name] for name in ("i", "f", "h", "ok", "time", "day", "ids", "large", "fixed", "uuid")] == [
        "I16", "F64", "F16", "BOOL", "I64", "I32", "I32", "F32", "I64", "U8",
    ]  # fmt: skip


@pytest.mark.slow
def test_parquet_arrow_and_feather_files(tmp_path, key, pa, table):
    import pyarrow.feather
    import pyarrow.parquet

    view = table.set_column(5, "view", table["view"].cast(pa.binary()))
    pyarrow.parquet.write_table(view, tmp_path / "a.parquet", row_group_size=3000)
    pyarrow.feather.write_feather(view, tmp_path / "a.feather")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1111)
    for name in ("a.parquet", "a.feather", "a.arrow"):
        counts = []
        count = import_samples(
            tmp_path / name, tmp_path / f"{name}.out", key, shard_size=300_000, progress=counts.append
        )
        assert count == sum(counts) == table.num_rows
        assert_same(tmp_path / f"{name}.out", key, table)


def test_tables_in_memory(tmp_path, key, table):
    import_samples(table.slice(0), tmp_path / "table", key)
    assert_same(tmp_path / "table", key, table)
    part = table.slice(3, 20)
    import_samples(part.to_reader(max_chunksize=7), tmp_path / "reader", key)
    for index, sample in enumerate(samples_of(tmp_path / "reader", key)):
        assert sample["text"].decode() == f"né {index + 3}"
        assert sample["ids"].tolist() == list(range((index + 3) % 4))
        assert sample["fixed"].tolist() == [[index + 3] * 3] * 2


@pytest.mark.usefixtures("pa")
def test_pandas(tmp_path, key):
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2020", periods=5)
    frame = pandas.DataFrame({"x": np.arange(5) / 3, "name": list("abcde"), "when": days})
    import_samples(frame[frame.x > 0], tmp_path, key)
    found = list(samples_of(tmp_path, key))
    assert [sample["x"].item() for sample in found] == frame.x[1:].tolist()
    assert [sample["name"].decode() for sample in found] == list("bcde")
    assert [sample["when"].item() for sample in found] == frame.when[1:].astype("int64").tolist()


@pytest.mark.usefixtures("pa")
def test_data_sets_of_hugging_face(tmp_path, key):
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4, 4, 3), index, np.uint8)) for index in range(6)]
    texts = [str(index) for index in range(6)]
    plain = datasets.Dataset.from_dict({"image": pictures, "label": range(6), "text": texts})
    plain = plain.cast_column("image", datasets.Image()).select([5, 0, 3])
    import_samples(plain, tmp_path / "out", key)
    for sample, expected in zip(samples_of(tmp_path / "out", key), plain, strict=True):
        assert np.array_equal(np.asarray(image.open(io.BytesIO(sample["image"]))), np.asarray(expected["image"]))
        assert (sample["label"].item(), sample["text"].decode()) == (expected["label"], expected["text"])
    streamed = plain.to_iterable_dataset()
    assert import_samples(streamed, tmp_path / "streamed", key) == 3
    with pytest.raises(TypeError, match=r"DatasetDict of 'test, train'\. Choose one"):
        import_samples(datasets.DatasetDict({"test": plain, "train": plain}), tmp_path / "splits", key)


@pytest.mark.parametrize(
    "make",
    [
        lambda pa: pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [pa.array([1, 2])]),
        lambda pa: pa.StructArray.from_arrays([pa.array([1, 2])] * 2, ["a", "a"]),
        lambda pa: pa.array([{}] * 2, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    ],
)
def test_columns_that_cannot_be_stored_are_named(tmp_path, key, pa, make):
    table = pa.table({"fine": [1, 2], "wrong": make(pa)})
    with pytest.raises((FormatError, TypeError), match="wrong"):
        import_samples(table, tmp_path / "out", key)


def test_a_table_does_not_choose_which_files_are_read(tmp_path, key, pa):
    (tmp_path / "secret").write_bytes(b"a secret of this machine")
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    files = pa.array([{"bytes": None, "path": str(tmp_path / "secret")}], kind)
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": files}), tmp_path / "a.parquet")
    for source in (tmp_path / "a.parquet", pa.table({"image": files})):
        with pytest.raises(FormatError, match="image"):
            import_samples(source, tmp_path / "out", key)
    import_samples(pa.table({"images": pa.ListArray.from_arrays([0, 1], files)}), tmp_path / "out", key)
    assert b"a secret" not in column(tmp_path / "out", key, "images")[0]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_altered_tables_give_other_values_or_an_error_and_never_a_crash(tmp_path, key, pa, name):
    import pyarrow.feather
    import pyarrow.parquet

    table = pa.table(
        {
            "x": np.arange(300),
            "text": [str(index) for index in range(300)],
            "list": [[index, None] if index % 7 else None for index in range(300)],
            "deep": [{"a": [str(index)]} for index in range(300)],
        }
    )
    write = pyarrow.parquet.write_table if name == "a.parquet" else pyarrow.feather.write_feather
    write(table, tmp_path / name, compression="none" if name == "a.parquet" else "uncompressed")
    content, rng = (tmp_path / name).read_bytes(), np.random.default_rng(0)
    for attempt in range(150):
        altered = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            altered[place] = rng.integers(256)
        (tmp_path / name).write_bytes(altered[: rng.integers(len(content))] if attempt % 5 == 0 else altered)
        with contextlib.suppress(FormatError):
            import_samples(tmp_path / name, tmp_path / f"{attempt}", key)


@pytest.mark.usefixtures("pa")
@given(st.binary(max_size=3000), st.sampled_from([".jsonl", ".tar", ".parquet", ".arrow", ".feather"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path_factory, key, content, suffix):
    folder = tmp_path_factory.mktemp("any")
    (folder / f"a{suffix}").write_bytes(content)
    with contextlib.suppress(FormatError):
        import_samples(folder / f"a{suffix}", folder / "out", key)


# Sources in general.


def test_an_iterable_of_samples(tmp_path, key):
    assert import_samples(({"x": index} for index in range(5)), tmp_path, key) == 5
    assert [value.item() for value in column(tmp_path, key, "x")] == list(range(5))
    for other in (5, {"x": 1}, None):
        with pytest.raises(TypeError, match="import_samples"):
            import_samples(other, tmp_path / "other", key)


def test_files_of_no_kind_or_of_several_are_refused(tmp_path, key):
    (tmp_path / "in").mkdir()
    for names in ([], ["a.bin"], ["a.txt", "b.jsonl"]):
        for name in names:
            (tmp_path / "in" / name).write_bytes(b"x")
        with pytest.raises(FormatError, match=repr(names[-1]) if names else "got none"):
            import_samples(tmp_path / "in", tmp_path / "out", key)
    for name in ("none.txt", "none"):
        for source in (tmp_path / name, [tmp_path / "in" / "a.txt", tmp_path / name]):
            with pytest.raises(FileNotFoundError, match=name):
                import_samples(source, tmp_path / "out", key)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(OSError, match="regular"):
        import_samples(tmp_path / "pipe.txt", tmp_path / "out", key)


def test_a_source_without_a_sample_is_refused(tmp_path, key):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "a.jsonl").write_bytes(b"\n\n")
    for source in (tmp_path / "a.txt", tmp_path / "a.jsonl", []):
        with pytest.raises(FormatError, match="got none"):
            import_samples(source, tmp_path / "out", key)


def test_nothing_in_a_folder_is_passed_over(tmp_path, key):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    (folder / "more").mkdir()
    with pytest.raises(FormatError, match=r"'more' beside 'a\.txt'"):
        import_samples(folder, tmp_path / "out", key)
    (folder / "more").rename(folder / ".more")
    (folder / "b.txt").symlink_to(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        import_samples(folder, tmp_path / "out", key)
    (folder / "b.txt").unlink()
    assert import_samples(folder, tmp_path / "out", key) == 1


def test_the_folder_of_shards_may_be_in_that_of_the_source(tmp_path, key):
    (tmp_path / "text").mkdir()
    for name, count in (("a.txt", 1), ("b.txt", 2)):
        (tmp_path / "text" / name).write_text("line\n")
        assert import_samples(tmp_path / "text", tmp_path / "text" / "out", key, resume=count > 1) == count
    write_images(tmp_path / "images")
    for resume in (False, True):
        assert import_samples(tmp_path / "images", tmp_path / "images" / "out", key, resume=resume) == 5


def test_an_error_names_the_file_that_it_is_about(tmp_path, key, pa):
    write = pytest.importorskip("pyarrow.parquet").write_table
    write(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    write(pa.table({"x": [1.5, None]}), tmp_path / "b.parquet")
    write(pa.table({"y": [1, 2]}), tmp_path / "c.parquet")
    (tmp_path / "a.jsonl").write_text('{"x": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"x": "\\ud800"}\n')
    (tmp_path / "c.jsonl").write_text('{"x": "c"}\n{"y.valid": "c"}\n')
    archive(tmp_path / "a.tar", MEMBERS)
    archive(tmp_path / "b.tar", MEMBERS[:2])
    archive(tmp_path / "c.tar", [("a.cls", b"x")])
    for kind in ("parquet", "jsonl", "tar"):
        for number, name in enumerate("bc"):
            paths = [tmp_path / f"{each}.{kind}" for each in ("a", name, "a")]
            with pytest.raises(FormatError) as info:
                import_samples(paths, tmp_path / f"out-{kind}-{number}", key)
            assert str(info.value).count(str(tmp_path)) == str(info.value).count(str(paths[1])) == 1, info.value


@pytest.mark.slow
def test_a_folder_is_continued_on_request_alone(tmp_path, key):
    (tmp_path / "a.txt").write_text("".join(f"line {index}\n" for index in range(5000)))
    read = []

    def interrupt(count):
        read.append(count)
        if sum(read) > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_samples(tmp_path / "a.txt", tmp_path / "out", key, shard_size=10_000, progress=interrupt)
    with pytest.raises(FileExistsError):
        import_samples(tmp_path / "a.txt", tmp_path / "out", key)
    counts = []
    assert import_samples(tmp_path / "a.txt", tmp_path / "out", key, resume=True, progress=counts.append) == 5000
    assert sum(counts) == 5000  # those that are stored are read again, and compared
    assert column(tmp_path / "out", key, "text") == [b"line %d" % index for index in range(5000)]
    assert import_samples(tmp_path / "a.txt", tmp_path / "out", key, resume=True) == 5000
    (tmp_path / "a.txt").write_text("line 0\n")
    with pytest.raises(ValueError, match="resume="):
        import_samples(tmp_path / "a.txt", tmp_path / "out", key, resume=True)


@pytest.mark.parametrize("kind", ["images", "jsonl", "tar", "parquet", "iterable"])
def test_any_source_is_continued(tmp_path, key, kind):
    source = tmp_path / f"a.{kind}"
    if kind == "images":
        write_images(source)
    elif kind == "jsonl":
        source.write_text('{"x": 1}\n' * 5)
    elif kind == "tar":
        archive(source, [(f"{index}.jpg", bytes(index)) for index in range(5)])
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"x": range(5), "y": list("abcde")}), source)
    else:
        source = [{"x": index} for index in range(5)]
    assert import_samples(source, tmp_path / "all", key, shard_size=1) == 5
    expected = list(map(str, samples_of(tmp_path / "all", key)))
    for skip in (1, 4):
        folder = tmp_path / f"{skip}"
        folder.mkdir()
        for path in sorted((tmp_path / "all").iterdir())[:skip]:
            os.link(path, folder / path.name)
        others = {path.name for path in folder.iterdir()}
        assert import_samples(source, folder, key, resume=True) == 5
        assert {path.name for path in folder.iterdir()} > others
        assert list(map(str, samples_of(folder, key))) == expected


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, key, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ImportError, match="pip install pyarrow"):
        import_samples(tmp_path / "a.parquet", tmp_path / "out", key)
    (tmp_path / "a.txt").write_text("a\n")
    import_samples(tmp_path / "a.txt", tmp_path / "out", key)
    with pytest.raises(ImportError, match=r"^tables of Arrow and Parquet need PyArrow: pip install pyarrow"):
        export_samples(tmp_path / "out", tmp_path / "b.parquet", key)


def text_file(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@each(
    "lines",
    [
        ["a", "b", "c", "d!"],  # altered at the end
        ["a", "B", "c", "d", "e"],  # altered, of the same size
        ["ab", "", "c", "d", "e"],  # the same bytes in other samples
        ["new", "a", "b", "c", "d"],
        ["b", "c", "d", "e"],
        ["a", "b", "c"],
        [],
    ],
)
def test_another_source_is_refused_before_anything_is_stored(tmp_path, key, lines):
    for shard_size in (1, 10_000):
        folder = tmp_path / str(shard_size)
        import_samples(text_file(tmp_path / "a.txt", *"abcd"), folder, key, shard_size=shard_size)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ValueError, match=r"resume=.*(4 samples|sample \d)"):
            import_samples(text_file(tmp_path / "b.txt", *lines), folder, key, resume=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_source_that_has_grown_at_its_end_is_continued(tmp_path, key):
    january, february = text_file(tmp_path / "1.txt", *"abc"), text_file(tmp_path / "2.txt", *"defgh")
    import_samples(january, tmp_path / "out", key)
    with pytest.raises(ValueError, match="resume="):
        import_samples(february, tmp_path / "out", key, resume=True)
    for _ in range(2):
        assert import_samples([january, february], tmp_path / "out", key, resume=True) == 8
        assert column(tmp_path / "out", key, "text") == [letter.encode() for letter in "abcdefgh"]


def test_values_of_every_kind_are_compared(tmp_path, key):
    def rows(**changed):
        row = {"text": "é", "number": 3, "ratio": float("nan"), "row": np.zeros((2, 3)), "none": np.zeros((0, 2))}
        return [row, {**row, **changed}, row]

    import_samples(rows(), tmp_path / "out", key, shard_size=30)
    assert import_samples(rows(), tmp_path / "out", key, resume=True) == 3
    for changed in ({"text": "e"}, {"number": 4}, {"ratio": 0.0}, {"row": np.ones((2, 3))}):
        with pytest.raises(ValueError, match="resume="):
            import_samples(rows(**changed), tmp_path / "out", key, resume=True)


def test_a_failed_import_leaves_no_folder(tmp_path, key):
    (tmp_path / "bad.jsonl").write_text("{")
    for source in (tmp_path / "bad.jsonl", tmp_path / "none.txt", [], text_file(tmp_path / "empty.txt")):
        with pytest.raises((FormatError, OSError)):
            import_samples(source, tmp_path / "new" / "out", key)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["L", "x"])
def test_headers_that_nest_are_refused(tmp_path, key, kind):
    def header(name, size, kind):
        info = tarfile.TarInfo(name)
        info.size, info.type = size, kind.encode()
        return info.tobuf(tarfile.GNU_FORMAT)

    inner = b"name" if kind == "L" else b"11 a=bcdef\n"
    one = header("long", len(inner), kind) + inner.ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(one * 5000 + header("a.txt", 0, "0") + bytes(1024))
    with pytest.raises(FormatError, match=r"a\.tar"):
        import_samples(tmp_path / "a.tar", tmp_path / "out", key)


def test_a_folder_of_images_that_links_to_itself_is_refused(tmp_path, key):
    write_images(tmp_path / "in")
    label = min((tmp_path / "in").iterdir())
    for name in ("x", "y"):
        (label / name).symlink_to("..")
    with pytest.raises(FormatError, match="Remove the link"):
        import_samples(tmp_path / "in", tmp_path / "out", key)
    for name in ("x", "y"):
        (label / name).unlink()
        (label / name).symlink_to(sorted((tmp_path / "in").iterdir())[1])  # twice, and not in itself
    assert import_samples(tmp_path / "in", tmp_path / "out", key) > 5


@each(
    ("name", "advice"),
    [
        ("a.csv.gz", r"Unpack it first, by gunzip"),
        ("a.xlsx", r"Read it by pandas\.read_excel, and import its table"),
        ("a.pkl", r"Read it by pandas\.read_pickle, .*if you trust the file"),
        ("a.json", r"Write one object on each line .* ends with \.jsonl"),
        ("a.bin", r"Name such files"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_way_to_import_it(tmp_path, key, name, advice):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FormatError, match=rf"got '{name}'\. {advice}"):
        import_samples(tmp_path / name, tmp_path / "out", key)


@each("samples", [np.ones((3, 2)), [(1, 2)], [1]])
def test_samples_without_names_of_columns_are_refused(tmp_path, key, samples):
    with pytest.raises(TypeError, match=r"expected each sample as a mapping .*, got one that is \w+\. Give dicts"):
        import_samples(samples, tmp_path / "out", key)
    assert not (tmp_path / "out").exists()


def test_a_column_of_pandas_with_mixed_values_is_named(tmp_path, key):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    table = pandas.DataFrame({"id": [1, 2], "age": [1, "x"]})
    with pytest.raises(FormatError, match=r"DataFrame: column 'age': expected values of one type"):
        import_samples(table, tmp_path / "out", key)


@pytest.mark.parametrize("surrogate", [0xD800, 0xDC80])  # any, and one that stands for a byte in names of files
def test_a_name_of_a_column_that_is_no_unicode_text_is_refused_where_it_is_read(tmp_path, key, surrogate):
    name = f"a{chr(surrogate)}"
    (tmp_path / "a.jsonl").write_text(json.dumps({"x": 1}) + "\n" + json.dumps({"x": 1, name: 1}) + "\n")
    with pytest.raises(FormatError, match=r"a\.jsonl, line 2: name of column 2: expected Unicode text, got lone"):
        import_samples(tmp_path / "a.jsonl", tmp_path / "out", key)
    with pytest.raises(ValueError, match="name of a column: expected Unicode text"):
        import_samples([{name: 1}], tmp_path / "out", key)
    with (
        pytest.raises(ValueError, match="name of a column: expected Unicode text"),
        DatasetWriter(tmp_path / "out", key) as writer,
    ):
        writer.write({name: 1})
    assert not (tmp_path / "out").exists()


@each("content", ['"cut \\ud83d"', '["\\udc00"]', '{"a": {"\\ud83d": 1}}', '"\\ude00\\ud83d"'])
def test_half_an_emoji_in_json_lines_is_told_with_its_line(tmp_path, key, content):
    whole = json.dumps({"x": "whole \U0001f600"}) + "\n"
    (tmp_path / "a.jsonl").write_text(whole * 3)
    assert import_samples(tmp_path / "a.jsonl", tmp_path / "whole", key) == 3
    (tmp_path / "a.jsonl").write_text(f'{whole * 3}{{"x": {content}}}\n')
    with pytest.raises(
        FormatError, match=r"a\.jsonl, line 4: expected Unicode text, got lone surrogates in it\. Remove"
    ):
        import_samples(tmp_path / "a.jsonl", tmp_path / "out", key)


def test_an_ending_in_an_archive_that_is_no_unicode_text_is_refused(tmp_path, key):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("0001.\udcff")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(FormatError, match=r"a\.tar: name of a column: expected Unicode text"):
        import_samples(tmp_path / "a.tar", tmp_path / "out", key)


def test_the_name_of_a_file_of_samples_is_as_names_of_files_come(tmp_path, key):
    with DatasetWriter(tmp_path / "out", key) as writer:
        with pytest.raises(ValueError, match="file=: expected Unicode text"):
            writer.write_batch({"x": [1]}, file="a\ud800")
        writer.write_batch({"x": [1]}, file="a\udc80")  # of bytes that are no UTF-8
    assert writer.stored == 1
