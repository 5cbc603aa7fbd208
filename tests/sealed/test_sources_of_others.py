"""Sources of other libraries and programs: imported with all that they have, or refused in words, with a way on."""

import datetime as dt
import decimal
import json
from itertools import islice, product

import numpy as np
import pytest
from helpers.cases import each

from fastrack import FormatError, SealedDataset, export_samples, import_samples
from fastrack._samples import readers

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
dataset = pytest.importorskip("pyarrow.dataset")

D = decimal.Decimal
DAY = dt.date(2020, 2, 1)
TIME = dt.datetime(2020, 2, 1, 5)  # noqa: DTZ001 - as most data have them


def back(folder, key):
    """The dataset as a table of Arrow."""
    export_samples(folder, folder / "back.arrow", key, overwrite=True)
    with pa.OSFile(str(folder / "back.arrow")) as file:
        return pa.ipc.open_file(file).read_all()


def write(path, array):
    path.parent.mkdir(exist_ok=True)
    with pa.ipc.new_file(str(path), pa.schema([("x", array.type)])) as writer:
        writer.write_table(pa.table({"x": array}))


# One column, as two writers make it.


def array(values, kind=None):
    return pa.array(values, kind)


def category(kind, index):
    return array(["c", "c"]).cast(kind).dictionary_encode().cast(pa.dictionary(index, kind))


@pytest.mark.slow
@each(
    ("first", "second"),
    [
        (array(["a"]), array(["b"], pa.large_string())),
        (array(["a"]), array(["b"], pa.string_view())),
        (array(["a"]), category(pa.string(), pa.int32())),
        (category(pa.string(), pa.int8()), category(pa.large_string(), pa.int32())),
        (array([1]), array([2]).dictionary_encode()),
        (array([b"a"]), array([b"b"], pa.large_binary())),
        (array([1], pa.timestamp("us")), array([2000], pa.timestamp("ns"))),
        (array([1], pa.timestamp("us", "UTC")), array([2000], pa.timestamp("ns", "+00:00"))),
        (array([1], pa.duration("us")), array([2000], pa.duration("ns"))),
        (array([1], pa.time32("ms")), array([2000], pa.time64("us"))),
        (array([D("1.50")], pa.decimal128(5, 2)), array([D("2.50")], pa.decimal128(10, 2))),
        (array([[1]]), array([[2], []], pa.large_list(pa.int64()))),
        (array([["x"]]), array([["y"]], pa.large_list(pa.string_view()))),
        (array([{"a": "x"}]), array([{"a": "y"}], pa.struct([("a", pa.large_string())]))),
    ],
)
def test_values_that_are_equal_are_one_column_whichever_writer_comes_first(tmp_path, key, first, second):
    write(tmp_path / "in" / "1.arrow", first)
    write(tmp_path / "in" / "2.arrow", second)
    import_samples(tmp_path / "in", tmp_path / "joined", key)
    assert back(tmp_path / "joined", key)["x"].to_pylist() == [*first.to_pylist(), *second.to_pylist()]
    import_samples(tmp_path / "in" / "2.arrow", tmp_path / "appended", key)
    import_samples(pa.table({"x": first}), tmp_path / "appended", key, append=True)
    export_samples(tmp_path / "appended", tmp_path / "appended.parquet", key)
    found = parquet.read_table(tmp_path / "appended.parquet")["x"].to_pylist()
    assert found == [*second.to_pylist(), *first.to_pylist()]


@each("values", [["a", None], [1, None], [[1], None], [D("1.5"), None], [TIME, None]])
def test_a_file_of_nulls_is_of_the_type_of_another(tmp_path, key, values):
    for number, part in enumerate((pa.nulls(2), array(values), pa.nulls(1))):
        write(tmp_path / "in" / f"{number}.arrow", part)
    import_samples(tmp_path / "in", tmp_path / "out", key)
    found = back(tmp_path / "out", key)["x"]
    assert (found.type, found.to_pylist()) == (array(values).type, [None, None, *values, None])


@pytest.mark.slow
@each(
    ("first", "second", "told"),
    [
        (
            array([1], pa.timestamp("us")),
            array([2001], pa.timestamp("ns")),
            r"\[us\] has, .*of timestamp\[ns\]",
        ),
        (
            array([1], pa.timestamp("us", "UTC")),
            array([1], pa.timestamp("us")),
            r"'timestamp\[us, tz=UTC\]'.* 'time",
        ),
        (
            array([1], pa.timestamp("s", "UTC")),
            array([1], pa.timestamp("s", "Asia/Tokyo")),
            r"'timestamp\[s, tz=Asia",
        ),
        (array([D("1.5")]), array([D("1.55")]), r"decimal128\(2, 1\) has, .*of decimal128\(3, 2\)\. Cast the column"),
        (array([D("1.5")]), array([1.5]), r"expected records of U8, .* got F64"),
        (
            array([{"a": 1}]),
            array([{"a": 1, "b": 2}]),
            r"'struct<a: int64>', .*, got 'struct<a: int64, b",
        ),
        (array([1]), array([1.5]), r"int64 has, .*of double"),
        (array([1.5], pa.float32()), array([1.1]), r"expected F32 \[\], .*got F64"),
        (pa.nulls(1), array(["x"]), r"'null', as before, got 'text'"),
        (array(["x"]), array([DAY]), r"expected records of U8, .*got I32"),
    ],
)
def test_values_that_would_be_others_are_refused_in_words(tmp_path, key, first, second, told):
    write(tmp_path / "1.arrow", first)
    write(tmp_path / "2.arrow", second)
    import_samples(tmp_path / "1.arrow", tmp_path / "out", key)
    with pytest.raises(FormatError, match=rf"2\.arrow: .*{told}") as info:
        import_samples(tmp_path / "2.arrow", tmp_path / "out", key, append=True)
    assert "arrow:/" not in str(info.value)
    assert len(SealedDataset(tmp_path / "out", keys=key)) == 1


def test_text_and_bytes_are_stored_as_before(tmp_path, key):
    write(tmp_path / "in" / "1.arrow", array(["a"]))
    write(tmp_path / "in" / "2.arrow", array([b"\xff"]))
    import_samples(tmp_path / "in", tmp_path / "out", key)
    assert back(tmp_path / "out", key)["x"].to_pylist() == [b"a", b"\xff"]


# Tables.


class Stream:
    """A table of another library, which gives its stream once, or has a length and gives it as often as asked."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        table, self.table = self.table, None
        return table.__arrow_c_stream__(requested_schema)


class Table(Stream):
    def __len__(self):
        return self.table.num_rows

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def test_a_stream_of_arrow_is_a_table(tmp_path, key):
    table = pa.table({"x": [1, None], "t": pa.array(["a", "b"], pa.string_view())})
    late = pa.concat_tables([pa.table({"x": [1] * 5}), pa.table({"x": pa.nulls(1, pa.int64())})])
    assert import_samples(Stream(table), tmp_path / "once", key) == 2
    assert import_samples(Stream(table), tmp_path / "once", key, append=True) == 4
    assert import_samples(Table(late), tmp_path / "twice", key) == 6
    assert import_samples(pa.record_batch({"x": [1]}), tmp_path / "batch", key) == 1
    assert back(tmp_path / "once", key).to_pydict() == pa.concat_tables([table, table]).to_pydict()
    assert back(tmp_path / "twice", key) == late
    with pytest.raises(FormatError, match="'x': expected no nulls, as the batches before had none, got some"):
        import_samples(Stream(late), tmp_path / "late", key)


def test_a_dictionary_of_views_is_text(tmp_path, key):
    words = pa.DictionaryArray.from_arrays(pa.array([1, 0, None]), pa.array(["a", "b"], pa.string_view()))
    import_samples(pa.table({"x": words}), tmp_path / "out", key)
    export_samples(tmp_path / "out", tmp_path / "out.csv", key)
    assert (tmp_path / "out.csv").read_text() == 'x\nb\na\n""\n'


@each(
    ("method", "advice"),
    [("to_frame", r"to_frame\(\)"), ("collect", r"collect\(\)"), ("compute", r"compute\(\)"), ("toArrow", "toArrow")],
)
def test_what_is_no_table_yet_is_refused_with_the_method_that_makes_one(tmp_path, key, method, advice):
    lazy = type("Lazy", (), {method: lambda self: None, "__iter__": lambda self: iter("ab")})()
    with pytest.raises(TypeError, match=f"a table or an iterable of samples, got Lazy. Give its table.* {advice}"):
        import_samples(lazy, tmp_path / "out", key)


def test_columns_and_pairs_are_refused_with_a_way_on(tmp_path, key):
    torch = pytest.importorskip("torch")
    pairs = torch.utils.data.TensorDataset(torch.arange(3), torch.arange(3))
    for source, told in (
        ({"x": [1, 2]}, r"got dict\. .*write_batch"),
        (pairs, r"got TensorDataset\. Give dicts"),
        (torch.utils.data.DataLoader([{"x": 1}]), r"got DataLoader\. Give its dataset"),
    ):
        with pytest.raises(TypeError, match=told):
            import_samples(source, tmp_path / "out", key)
    samples = ({"x": pairs[i][0], "y": pairs[i][1]} for i in range(len(pairs)))  # what the error says
    assert import_samples(samples, tmp_path / "out", key) == 3


def test_a_frame_whose_values_arrow_does_not_have_is_refused_by_its_column(tmp_path, key):
    pandas = pytest.importorskip("pandas")
    periods = pandas.period_range("2026-01", periods=2, freq="M")  # Arrow has 672 and 673
    for values in (periods, pandas.arrays.SparseArray([0, 1]), [1j, 2j]):
        with pytest.raises(FormatError, match="column 'b': expected values of one type that Arrow has"):
            import_samples(pandas.DataFrame({"a": [1, 2], "b": values}), tmp_path / "out", key)


def test_the_index_of_a_frame_is_kept_unless_it_numbers_the_rows(tmp_path, key):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"who": ["a", "b", "a"], "x": [1, 2, 3]})
    dates = pandas.date_range("2020", periods=3)
    expected = {
        "default": (frame, ["who", "x"]),
        "slice": (frame[1:], ["who", "x"]),
        "named": (frame.set_index("who"), ["who", "x"]),
        "group": (frame.groupby("who").sum(), ["who", "x"]),
        "several": (frame.set_index(["who", "x"]).assign(y=1), ["who", "x", "y"]),
        "dates": (frame.set_axis(dates), ["index", "who", "x"]),
        "numbers": (frame.rename_axis("row"), ["row", "who", "x"]),
        "picked": (frame.iloc[[2, 0, 1]], ["index", "who", "x"]),
    }
    for name, (source, columns) in expected.items():
        import_samples(source, tmp_path / name, key)
        found = back(tmp_path / name, key)
        assert found.column_names == columns
        assert found.num_rows == len(source)
    assert back(tmp_path / "named", key)["who"].to_pylist() == ["a", "b", "a"]
    with pytest.raises(FormatError, match=r"names of the index .*, got \['x'\]\. .*reset_index\(drop=True"):
        import_samples(frame.rename_axis("x"), tmp_path / "out", key)
    with pytest.raises(FormatError, match="column 2: expected a name of its own, got that of column 1"):
        import_samples(frame.set_axis(["x", "x"], axis=1), tmp_path / "out", key)
    for source in (frame["x"], frame.index):
        with pytest.raises(TypeError, match=r"got \w+\. Give its table, as by its method to_frame\(\)"):
            import_samples(source, tmp_path / "out", key)


def test_frames_of_polars_and_relations_of_duckdb(tmp_path, key):
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    frame = polars.DataFrame({"x": [1, None], "t": ["a", "b"], "day": [DAY, None], "ids": [[1], [2, 3]]})
    import_samples(frame, tmp_path / "polars", key)
    assert back(tmp_path / "polars", key).to_pydict() == frame.to_dict(as_series=False)
    import_samples(duckdb.sql("select 1 as x, 'a' as t union all select null, 'b'"), tmp_path / "duckdb", key)
    assert sorted(back(tmp_path / "duckdb", key)["t"].to_pylist()) == ["a", "b"]
    for source, told in ((frame.lazy(), r"LazyFrame\. .*collect\(\)"), (frame["x"], r"Series\. .*to_frame\(\)")):
        with pytest.raises(TypeError, match=told):
            import_samples(source, tmp_path / "out", key)


# Samples as dicts.


@each("is_list", [True, False])
def test_values_of_other_types_are_stored_by_the_types_that_arrow_infers(tmp_path, key, is_list):
    samples = [
        {"ids": [1, 2], "t": "a", "n": None, "day": DAY, "at": TIME, "price": D("1.50"), "in": {"a": 1, "b": ["x"]}},
        {"ids": [], "t": None, "n": 1, "day": None, "at": TIME, "price": D("22.5"), "in": {"a": None, "b": []}},
    ]
    given = [{"image": np.full((2, 2), number, np.uint8), **sample} for number, sample in enumerate(samples)]
    import_samples(given if is_list else iter(given), tmp_path / "out", key)
    found = back(tmp_path / "out", key)
    assert found.column_names == list(given[0])
    assert found.drop_columns(["image"]).to_pylist() == samples
    assert found["image"].to_pylist() == [sample["image"].tolist() for sample in given]
    nulls = {name for name in SealedDataset(tmp_path / "out", keys=key).columns if name.endswith(".valid")}
    assert nulls == {"t.valid", "n.valid", "day.valid"}


def test_samples_are_what_they_are_as_json_lines(tmp_path, key):
    samples = [
        {"ids": [1], "t": "a", "x": 1.5, "in": {"a": [1]}},
        {"ids": [2, 3], "t": None, "x": None, "in": {"a": []}},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for source, name in ((samples, "dicts"), (tmp_path / "a.jsonl", "lines")):
        import_samples(source, tmp_path / name, key)
        export_samples(tmp_path / name, tmp_path / f"{name}.jsonl", key)
        found = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in found] == samples
        dtypes = {
            name: getattr(handle, "dtype", "") for name, handle in SealedDataset(tmp_path / name, keys=key)[0].items()
        }
        assert (dtypes["ids"], dtypes["x"], dtypes["t.valid"]) == ("I64", "F64", "BOOL")


def test_types_are_found_over_all_samples_of_a_list(tmp_path, key, monkeypatch):
    monkeypatch.setattr(readers, "take", lambda items, size_of: list(islice(items, 2)), raising=False)
    samples = [{"x": x, "in": y} for x, y in ((1, {"a": 1}), (2, {}), (None, {"b": "x"}), (2.5, None), (3, {}))]
    import_samples(samples, tmp_path / "list", key)
    assert back(tmp_path / "list", key)["x"].to_pylist() == [1.0, 2.0, None, 2.5, 3.0]
    assert back(tmp_path / "list", key)["in"].to_pylist()[2] == {"a": None, "b": "x"}
    for late, told in ((samples, r"sample 2: 'x'|'in'"), ([{"x": [1]}] * 2 + [{"x": None}], "'x': expected no nulls")):
        with pytest.raises((FormatError, TypeError), match=told):
            import_samples(iter(late), tmp_path / "out", key)


@each(
    ("samples", "told"),
    [
        ([{"x": [1]}, {"x": "a"}], r"'x': expected values of one type that Arrow has, got others"),
        ([{"x": DAY}, {"x": TIME}], r"'x': expected values of one type"),  # Arrow would drop the time of day
        ([{"x": [DAY]}, {"x": [TIME]}], r"'x': expected values of one type"),
        ([{"x": {"a": TIME}}, {"x": {"a": TIME.replace(tzinfo=dt.UTC)}}], r"'x': expected values of one type"),
        ([{"x": DAY}, {"x": 2.5}], r"'x': expected values of one type"),  # Arrow would make a day, or a time, of it
        ([{"x": {"a": [TIME, 7]}}], r"'x': expected values of one type"),
        ([{"x": TIME.time()}, {"x": 2.5}], r"'x': expected values of one type"),
        ([{"x": TIME - TIME}, {"x": 7}], r"'x': expected values of one type"),
        ([{"x": TIME.time().replace(tzinfo=dt.UTC)}], r"'x': expected values of one type"),  # and drop the zone
        ([{"x": object()}], r"'x': expected values of one type"),
        ([{"x": None}, {"y": None}], r"expected the columns \['x'\], got \['y'\]"),
        ([{"x": ["a\ud83d"]}], r"'x': .* got text with lone surrogates"),
        ([{"x": None, "x.valid": True}], r"'x\.valid': expected a name other than"),
        ([{1: None}], r"name of a column: expected text, got 1"),
    ],
)
def test_samples_that_no_type_fits_are_refused_in_words(tmp_path, key, samples, told):
    with pytest.raises((FormatError, ValueError, TypeError), match=told):
        import_samples(samples, tmp_path / "out", key)
    assert not (tmp_path / "out").exists()


def test_without_pyarrow_other_values_are_refused_with_a_way_on(tmp_path, key, hide):
    hide("pyarrow")
    for value in ([1, 2], None, DAY, {"a": 1}):
        with pytest.raises(TypeError, match=r"'x': expected bytes, .* got \w+\. .*numpy\.asarray.* with PyArrow"):
            import_samples([{"x": value}], tmp_path / "out", key)


def test_arrays_of_several_lengths_are_records_on_request(tmp_path, key):
    samples = [{"ids": np.arange(3)}, {"ids": np.arange(5)}]
    with pytest.raises(ValueError, match=r"sample 1: 'ids': expected I64 \[3\], .* Name a column .* in records="):
        import_samples(samples, tmp_path / "out", key)
    import_samples(iter(samples), tmp_path / "out", key, records=["ids"])
    assert back(tmp_path / "out", key)["ids"].to_pylist() == [[0, 1, 2], [0, 1, 2, 3, 4]]
    assert import_samples(samples, tmp_path / "out", key, records=["ids"], resume=True) == 2
    for shape in ((4, 2), (2, 4)):
        images = [{"x": np.zeros((2, 2))}, {"x": np.zeros(shape)}]
        with pytest.raises(
            ValueError, match=r"got F64 \[\d, \d\]\. Pad or crop them to one shape, or store them encoded"
        ):
            import_samples(images, tmp_path / "images", key)
    with pytest.raises(ValueError, match=r"expected records of one dimension, got shape \[2, 2\]\. Leave"):
        import_samples(images, tmp_path / "images", key, records=["x"])


# Out again.


@pytest.mark.slow
@each(
    "values",
    [
        array([3, 1, 3]).dictionary_encode(),
        array([3.0, 1.5, 3.0]).dictionary_encode(),
        array([True, False, True]).dictionary_encode(),
        pa.RunEndEncodedArray.from_arrays(array([1, 3], pa.int32()), array([3, 1])),
        array([1, 2, 3], pa.duration("us")),
        array([3, None, 3]).dictionary_encode(),
    ],
)
def test_categories_of_numbers_are_numbers_in_json_and_csv(tmp_path, key, values):
    import_samples(pa.table({"x": values}), tmp_path / "out", key)
    plain = values.cast(pa.int64()) if pa.types.is_duration(values.type) else values
    for suffix in ("jsonl", "csv"):
        export_samples(tmp_path / "out", tmp_path / f"out.{suffix}", key)
    found = [json.loads(line)["x"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(x, type(x)) for x in found] == [(x, type(x)) for x in plain.to_pylist()]
    import_samples(tmp_path / "out.csv", tmp_path / "again", key)
    if not isinstance(plain[0].as_py(), bool):
        assert back(tmp_path / "again", key)["x"].to_pylist() == plain.to_pylist()
    assert back(tmp_path / "out", key)["x"].to_pylist() == values.to_pylist()


# Folders.


def test_what_spark_and_datasets_note_of_their_files_is_left_out(tmp_path, key):
    for folder, notes in (("spark", ["_SUCCESS", "_committed_1"]), ("saved", ["dataset_info.json", "state.json"])):
        (tmp_path / folder).mkdir()
        for name in notes:
            (tmp_path / folder / name).touch()
        parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / folder / "_part-0.snappy.parquet")  # which is no note
        opened = readers.open_source(tmp_path / folder)
        assert import_samples(tmp_path / folder, tmp_path / f"{folder}-sealed", key) == 2
        assert opened.skipped == [(name, "no samples") for name in notes]


def test_a_partitioned_table_is_refused_with_the_way_that_keeps_its_keys(tmp_path, key):
    for year in (2020, 2021):
        (tmp_path / "in" / f"year={year}").mkdir(parents=True)
        parquet.write_table(pa.table({"x": [1, None]}), tmp_path / "in" / f"year={year}" / "a.parquet")
    (tmp_path / "in" / "_SUCCESS").touch()
    with pytest.raises(FormatError, match=r"Of tables, give pyarrow\.dataset\.dataset\('.*in', partitioning='hive'\)"):
        import_samples(tmp_path / "in", tmp_path / "out", key)
    assert import_samples(dataset.dataset(tmp_path / "in", partitioning="hive"), tmp_path / "out", key) == 4
    assert back(tmp_path / "out", key).to_pydict() == {"x": [1, None] * 2, "year": [2020, 2020, 2021, 2021]}


def test_no_table_is_lost_beside_a_folder(tmp_path, key):
    for folder, file in product(["train", "_delta_log"], ["a.parquet", "dataset_dict.json"]):
        place = tmp_path / f"{folder}-{file}"
        (place / folder).mkdir(parents=True)
        (place / file).touch()
        with pytest.raises(FormatError, match=rf"the folder '{folder}' beside '{file}'\. .*or one folder"):
            import_samples(place, tmp_path / "out", key)
