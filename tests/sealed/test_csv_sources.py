"""CSV: numbers where every cell is one, text as it stands, and a line number for what is neither."""

import contextlib
import csv
import io
import re
import time

import pytest
from helpers.cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack import FormatError, SealedDataset, export_samples, import_samples
from fastrack._samples.csv import cell_types, csv_files
from fastrack._samples.readers import open_source


def columns_of(path, columns=None, schema=None, notes=None):
    """The values of a file, read but not sealed: lists of numbers or texts, with None where a cell is empty."""
    found, source = {}, open_source(path, None, columns, schema=schema)
    for _, batch in source.batches:
        for name, block in batch.items():
            if block.ends is not None:
                values = [block.between(i, i + 1).tobytes().decode() for i in range(block.count)]
            else:
                values = block.data.view({"I64": "i8", "F64": "f8", "BOOL": "?"}[block.column.dtype]).tolist()
            found.setdefault(name, []).extend(values)
    if notes is not None:
        notes += source.notes
    return {
        name: [value if valid else None for value, valid in zip(values, found[name + ".valid"], strict=True)]
        if name + ".valid" in found
        else values
        for name, values in found.items()
        if not name.endswith(".valid")
    }


@pytest.fixture
def write(tmp_path):
    def write(content, name="a.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_file_becomes_a_data_set(tmp_path, write, key):
    path = write("id,name,size,note\n1,Oslo,0.5,\n2,Genève,,x\n3,,-2e3,\n")
    assert import_samples(path, tmp_path / "out", key) == 3
    found = list(SealedDataset(tmp_path / "out", keys=key, transform=lambda sample: sample))
    assert [sample["id"].item() for sample in found] == [1, 2, 3]
    assert [sample["name"] for sample in found] == [b"Oslo", "Genève".encode(), b""]
    assert [str(sample["size"].item()) for sample in found] == ["0.5", "nan", "-2000.0"]
    assert [sample["size.valid"].item() for sample in found] == [True, False, True]
    assert [sample["note"] for sample in found] == [b"", b"x", b""]


@each(
    ("cells", "values"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", "", "3"], [1, None, 3]),
        (["9223372036854775807", "-9223372036854775808"], [2**63 - 1, -(2**63)]),
        (["9223372036854775808", "1"], None),
        (["1", "0.5"], [1.0, 0.5]),
        (["9007199254740992", "0.5"], [2.0**53, 0.5]),
        (["9007199254740993", "0.5"], None),
        (["0.5", "9007199254740993"], None),
        (["1e-3", "1E5", ".5", "2."], [0.001, 1e5, 0.5, 2.0]),
        (["0.1234567890123456789", ""], None),
        (["1e400", "1"], None),
        (["-inf", "1", "Infinity"], [float("-inf"), 1.0, float("inf")]),
        (["-0", "1"], [-0.0, 1.0]),
        (["007", "1"], None),
        (["+1"], None),
        (["1_000"], None),
        ([" 1"], None),
        (["1 "], None),
        (["1,5"], None),
        (["0x10"], None),
        (["1\n2", "3"], None),
        (["\u0661"], None),  # a digit, but none of ours
        (["", ""], None),
        (["true", "false"], None),
        (["a", ""], None),
    ],
)
def test_a_column_is_what_all_of_its_cells_are(write, cells, values):
    text = io.StringIO()
    csv.writer(text).writerows([["x", "y"], *([cell, "k"] for cell in cells)])
    found = columns_of(write(text.getvalue()))["x"]
    assert found == (cells if values is None else values)
    assert list(map(type, found)) == list(map(type, cells if values is None else values))


def test_a_type_is_found_over_all_rows_and_files(tmp_path, write):
    write("x,y\n" + "1,2\n" * 20_000 + "1,007\n", "a.csv")
    write("x,y\n0.5,1\n,1\n", "b.csv")
    found = columns_of([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert found["x"] == [1.0] * 20_001 + [0.5, None]
    assert found["y"] == ["2"] * 20_000 + ["007", "1", "1"]


@each(
    "content",
    [
        "x,y\r\n1,a\r\n2,b\r\n",
        "x,y\r1,a\r2,b",
        "\ufeffx,y\n1,a\n2,b\n\n\n",
        "\ufeffx,y\n1,a\n2,b\n".encode("utf-16-le"),
        "\ufeffx,y\n1,a\n2,b\n".encode("utf-16-be"),
        "x;y\n1;a\n2;b\n",
        '"x";"y"\n"1";"a"\n2;b\n',
        "x\ty\n1\ta\n2\tb\n",
    ],
)
def test_one_table_in_its_spellings(write, content):
    assert columns_of(write(content)) == {"x": [1, 2], "y": ["a", "b"]}


def test_quoted_cells(write):
    path = write('x,"a ""b"", c"\n1,"line\nline\r\nline"\n"2",""""\n3,mid"dle\n')
    assert columns_of(path) == {"x": [1, 2, 3], 'a "b", c': ["line\nline\r\nline", '"', 'mid"dle']}
    assert columns_of(write("x\ty\n1\ta,b\n", "a.tsv")) == {"x": [1], "y": ["a,b"]}


@each(
    ("content", "line", "word"),
    [
        ("x,y\n1,2\n3\n", 3, "2 cells.*got 1"),
        ("x,y\n1,2\n3,4,5\n", 3, "2 cells.*got 3"),
        ('x,y\n1,"a\nb"\n3\n', 4, "got 1"),
        ("x,y\n1,2\n\n3\n", 4, "got 1"),
        ('x,y\n1,2\n3,"4\n5,6\n', 3, "quotes"),
        ('x,y\n1,"2"3\n', 2, "quotes"),
        (b"x,y\n1,2\n1,\xff\n", 3, "UTF-8"),
        (b"x,y\n" + b"1,2\n" * 100_000 + b"1,\xff\n", 100_002, "UTF-8"),
        (b"\xff\xfex\0,\0y\0\n\0\x00\xd8\n\0", 2, "UTF-16"),
        (b"x,y\n1,a\0b\n", 2, "NUL"),
        (b"\xff\xfe\0\0x\0\0\0", 1, "NUL"),
        ("x,x\n1,2\n", 1, "column 2"),
        ("x,\n1,2\n", 1, "column 2"),
        ("x,y;z\n1,2;3\n", 1, "two or more of comma"),
        ("x,y.valid\n1,2\n", 1, "y.valid"),
        ("x,y.records\n1,2\n", 1, "y.records"),
        ("1,2\n3,4\n", 1, "header"),
        ("", 1, "header"),
        ("\n", 1, "header"),
    ],
)
def test_what_is_no_table_is_refused_by_line(write, content, line, word):
    path = write(content)
    with pytest.raises(FormatError, match=f"line {line}: .*{word}") as error:
        columns_of(path)
    assert str(error.value).startswith(str(path))


@each(
    "cell",
    [
        "1e-400",
        "-0.1e-400",
        "9007199254740993.0",
        "0.12345678901234567890123",
        "1.2345e-320",
        "123456789012345.67e300",
        "1e99999999999999999999",
        "1e-99999999999999999999",
    ],
)
def test_a_number_that_a_float_would_alter_stays_text(write, cell):
    assert columns_of(write(f"x\n{cell}\n2\n")) == {"x": [cell, "2"]}


@each(
    "cell",
    [
        "0.1",
        "0.30000000000000004",
        "1.000000000000000056e-01",  # as numpy.savetxt writes 0.1
        "1.10",
        "0e99999999999999999999",
        "-0.000",
        "5e-324",
        "2.2250738585072014e-308",
        "9007199254740992.0",
        "1.7976931348623157e308",
        "0.00000000000000000000012",
        "-inf",
    ],
)
def test_a_number_that_a_float_gives_back_is_one(write, cell):
    assert columns_of(write(f"x\n{cell}\n2\n")) == {"x": [float(cell), 2.0]}


@given(st.floats(allow_nan=False))
def test_what_a_float_is_printed_as_is_a_number(value):
    for text in repr(value), f"{value:.16e}", f"{value:.18e}":
        assert cell_types.judge_cell(text) == cell_types.judge_cell("0.5")


@pytest.mark.slow
def test_a_header_of_many_columns_takes_no_time(write):
    count = 40_000
    path = write(",".join(f"c{number}" for number in range(count)) + "\n" + ",".join(["1"] * count) + "\n")
    start = time.process_time()
    assert len(columns_of(path)) == count
    assert time.process_time() - start < 10  # and more than 30 if each name were looked for among all


def test_files_of_other_columns_are_refused(tmp_path, write):
    write("x,y\n1,2\n", "a.csv")
    write("y,x\n1,2\n", "b.csv")
    with pytest.raises(FormatError, match=r"b\.csv, line 1: expected the columns \['x', 'y'\]"):
        columns_of(tmp_path)


def test_columns_are_chosen(write):
    path = write("x,y,z\n1,2,\n3,4,5\n")
    assert list(columns_of(path, ["z", "x"]).items()) == [("z", [None, 5]), ("x", [1, 3])]
    with pytest.raises(FormatError, match="the source has no column 'w'"):
        columns_of(path, ["x", "w"])


def test_a_file_that_changes_between_the_passes_is_refused(tmp_path, write):
    first, second = write("x\n1\n", "a.csv"), write("x\n1\n", "b.csv")
    batches = open_source(tmp_path).batches
    assert next(batches)[0] == first.name
    second.write_text("x\n1\nnot a number\n")
    with pytest.raises(FormatError, match=r"b\.csv: expected the file as it was"):
        next(batches)


cells = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20),
    st.sampled_from(["", "007", "1", "-1", "1.5", '"', '""', ",", "\n", "\r\n", "\r", ";", " x ", "NaN", "é", "日本"]),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(repr),
)


@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), max_size=12)))
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_cells_come_back_as_they_were(tmp_path_factory, rows):
    width = len(rows[0]) if rows else 1
    header = [f"c{index}" for index in range(width)]
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([header, *rows])
    found = columns_of(path)
    for index, name in enumerate(header if rows else []):
        written = [row[index] for row in rows]
        if type(found[name][0]) is str:
            assert found[name] == written
            continue
        for value, cell in zip(found[name], written, strict=True):
            if type(value) is int:
                assert str(value) == cell
            else:
                assert cell == "" if value is None else repr(float(cell)) == repr(value)


@given(
    st.binary(max_size=300),
    st.sampled_from([".csv", ".tsv", ".txt", ".npy", ".jsonl"]),
    st.sampled_from([b"", b"x,y\n1,2\n"]),
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory, content, suffix, start):
    path = tmp_path_factory.mktemp("any") / f"a{suffix}"
    path.write_bytes(start + content)
    with contextlib.suppress(FormatError, TypeError):
        for _ in open_source(path).batches:
            pass


def test_errors_repeat_no_cells(write):
    for content in (
        "x\nsecret,secret\n",
        'x\n"secret"secret\n',
        b"x\nsecret\0\n",
        b"x\nsecret\xff\n",
        "x,y\n\nsecret\n",
    ):
        with pytest.raises(FormatError) as error:
            columns_of(write(content))
        assert not re.search("secret", str(error.value))


def test_the_index_that_pandas_writes_without_a_name_gets_the_one_that_pandas_gives(write):
    path = write(",x,y\n0,1,2\n")
    assert columns_of(path) == {"index": [0], "x": [1], "y": [2]}
    assert columns_of(path, ["y", "x"]) == {"y": [2], "x": [1]}
    assert columns_of(path, ["index"]) == {"index": [0]}
    assert columns_of(write(",,x\n0,a,2\n")) == {"level_0": [0], "level_1": ["a"], "x": [2]}  # of two levels
    assert columns_of(write(",index\n0,2\n")) == {"level_0": [0], "index": [2]}
    assert columns_of(write(",0,1\n0,2,3\n")) == {"index": [0], "0": [2], "1": [3]}
    with pytest.raises(FormatError, match="got numbers"):
        columns_of(write(",7,8\n0,2,3\n"))  # a row, it seems


def test_names_that_no_column_can_have_are_those_of_columns_that_are_left_out(write):
    path = write("x,,y.valid,x.records,z,z\n1,2,3,4,5,6\n")
    assert columns_of(path, ["x"]) == {"x": [1]}
    for columns, word in ((None, "none for column 2"), (["y.valid"], "y.valid"), (["z"], "column 6")):
        with pytest.raises(FormatError, match=word):
            columns_of(path, columns)


@each(
    ("content", "found"),
    [
        ("x,y\n1,2\n\n3,4\n", {"x": [1, 3], "y": [2, 4]}),
        ("x,y\r\n\r\n1,2\r\n\r\n", {"x": [1], "y": [2]}),
        ("x,y\n" + "1,2\n" * 70 + "\n" * 9000 + "3,4\n", {"x": [1] * 70 + [3], "y": [2] * 70 + [4]}),
        ("x\n1\n\n3\n", {"x": [1, None, 3]}),  # as polars and DuckDB write a null
        ("x\n\n" + "a\n" * 5000 + "\n" * 5000 + "b\n", {"x": ["", *["a"] * 5000, *[""] * 5000, "b"]}),
        ('x\n""\n1\n', {"x": [None, 1]}),
    ],
)
def test_empty_lines_are_no_rows_but_between_those_of_one_column(write, content, found):
    assert columns_of(write(content)) == found


def test_empty_lines_at_the_end_of_one_column_are_left_out_with_a_note(write):
    notes = []
    assert columns_of(write("x\n1\n\n\n"), notes=notes) == {"x": [1]}
    assert notes == ["a.csv has 2 empty lines at its end, which are left out"]
    columns_of(write("x\n1\n"), notes=(notes := []))
    assert notes == []


def test_cells_may_be_long(write, key, tmp_path, limited):
    limit, long = csv.field_size_limit(), "a" * 200_000
    path = write(f'x,y\n1,{long}\n2,"{long}"\n')
    assert columns_of(path) == {"x": [1, 2], "y": [long, long]}
    assert csv.field_size_limit() == limit
    import_samples(path, tmp_path / "out", key)
    export_samples(tmp_path / "out", tmp_path / "again.csv", key)
    assert columns_of(tmp_path / "again.csv") == columns_of(path)
    limit = csv_files._csv.field_size_limit(1000)
    assert limit == 2**28
    try:
        with pytest.raises(FormatError, match=r"line 2: expected cells of up to 1000 characters.* Close its quotes"):
            columns_of(path)
    finally:
        csv_files._csv.field_size_limit(limit)
    limited(longest_cell=1000)
    with pytest.raises(FormatError, match="sample 0: 'y': expected text for a cell, got more than 1000 characters"):
        export_samples(tmp_path / "out", tmp_path / "third.csv", key)


def test_a_limit_of_cells_that_a_program_sets_is_its_own(write):
    limit = csv.field_size_limit(10)
    try:
        assert columns_of(write("x\n" + "a" * 1000 + "\n")) == {"x": ["a" * 1000]}
    finally:
        csv.field_size_limit(limit)


@each(
    ("content", "note"),
    [
        ("x\n1\n2\nN/A\n", "x is text, as line 4 of a.csv is no number. If it is a null, name it in nulls="),
        ('t,x\n"a\nb",1\n\nc,2\nd,N/A\n', "x is text, as line 6 of a.csv is no number."),
        ("x\n" + "5\n" * 9000 + "x\n", "x is text, as line 9002 of a.csv is no number."),
        ("x\n1\n2\n5.123456789012345678901\n", "line 4 of a.csv has more digits than a float holds."),
        ("x\n9007199254740993\n0.5\n", "line 2 of a.csv is an integer beyond 2**53, which no float beside it holds."),
        ("x\n12345678901234567890\n12345678901234567891\n", "64 bits holds. Name its type in types=: text to keep it,"),
        (
            "x;y\n1,5;1\n2,5;2\n",
            "x is text, as line 2 of a.csv has a comma in a number. Read the table by pandas, with",
        ),
        ('x,y\n"1,234.5",1\n', "x is text, as line 2 of a.csv has a comma in a number."),
        ("a|b\n1|2\n", "a.csv has one column, as its header has no commas, semicolons or tabs"),
        ("x\n1\n2\n1e400\n", "line 4 of a.csv is beyond the range of floats"),
        ("x\n1\n2\n003\n", "line 4 of a.csv begins with a zero or plus sign, or has spaces."),
        ("x, y\n1, 2\n", " y is text, as line 2 of a.csv begins with a zero or plus sign, or has spaces."),
        ("x\nTRUE\nFALSE\n", "line 2 of a.csv is a truth value. Give it the type bool in types="),
        ("x\na\nb\n1\n", None),
        ("x\n007\n008\n", None),
    ],
)
def test_one_note_tells_why_a_column_is_text_and_on_which_line(write, content, note):
    columns_of(write(content), notes=(notes := []))
    assert len(notes) == (note is not None)
    assert all(note in each for each in notes)


def test_nulls_are_named(write):
    path = write("x,y,z\n1,NA,NA\nnull,b,\n3,,TRUE\n")
    assert columns_of(path)["x"] == ["1", "null", "3"]
    found = columns_of(path, schema=cell_types.Schema.of(["NA", "null"], {}))
    assert found == {"x": [1, None, 3], "y": [None, "b", ""], "z": [None, "", "TRUE"]}
    assert columns_of(path, schema=cell_types.Schema.of(["NA", ""], {}))["y"] == [None, "b", None]
    assert columns_of(path, schema=cell_types.Schema.of(["3"], {}))["x"] == ["1", "null", None]


def test_types_are_given(write):
    path = write("a,b,c,d\n007,0.12345678901234567890,1,TRUE\n +8,NA,2,false\n")
    types = {"a": "int", "b": float, "c": "text", "d": bool}
    found = columns_of(path, schema=cell_types.Schema.of(["NA"], types))
    assert found == {"a": [7, 8], "b": [0.12345678901234568, None], "c": ["1", "2"], "d": [True, False]}


@each(
    ("cells", "kind", "row"),
    [
        (["1", "N/A"], "float", 1),
        (["1", "1e400"], "float", 1),
        (["1", "1_0"], "float", 1),
        (["9223372036854775807", "9223372036854775808"], "int", 1),
        (["1", "2", "2.0"], "int", 2),
        (["0x10"], "int", 0),
        (["true", "yes"], "bool", 1),
    ],
)
def test_a_cell_that_has_not_the_type_of_its_column_is_refused_by_line(write, cells, kind, row):
    path = write("x,y\n" + "".join(f"{cell},z\n" for cell in cells))
    with pytest.raises(FormatError, match=rf"a\.csv, line {row + 2}: column 'x': expected .* as types= says, got"):
        columns_of(path, schema=cell_types.Schema.of([], {"x": kind}))


def test_a_schema_that_is_none_is_refused_in_words(tmp_path, write, key):
    path = write("price,y\n1,2\n")
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    refused = [
        (path, {"types": {"pric": "float"}}, FormatError, "types=: the source has no column 'pric'.*mean 'price'"),
        (path, {"types": {"price": "money"}}, ValueError, "types=: expected bool, float, int or text for 'price', got"),
        (path, {"types": {"price": None}}, ValueError, "types=: expected bool, float, int or text for 'price', got"),
        (path, {"types": ["price"]}, TypeError, "types=: expected a mapping, got list"),
        (path, {"nulls": [None]}, TypeError, "nulls=: expected texts"),
        (path, {"nulls": 5}, TypeError, "nulls=: expected texts"),
        (tmp_path / "a.jsonl", {"nulls": ["NA"]}, ValueError, r"nulls= and types=: expected \.csv or \.tsv files"),
        ([{"x": 1}], {"types": {"x": "int"}}, ValueError, r"nulls= and types=: expected \.csv or \.tsv files"),
    ]
    for source, options, kind, words in refused:
        with pytest.raises(kind, match=words):
            import_samples(source, tmp_path / "out", key, **options)
    assert not (tmp_path / "out").exists()


EXPORTS = {  # of one table of two rows, as these write it
    "pandas": ',id,name,price,n,day\n0,017,Genève,0.1,1,2020-01-02\n1,2,"say ""hi""",,,\n',
    "polars": 'id,name,price,n,day\n017,Genève,0.1,1,2020-01-02\n2,"say ""hi""",,,""\n',
    "DuckDB": 'id,name,price,n,day\n017,Genève,0.1,1,2020-01-02\n2,"say ""hi""",,,\n',
    "Excel": '\ufeffid,name,price,n,day\r\n017,Genève,0.1,1,2020-01-02\r\n2,"say ""hi""",,,\r\n',
    "Excel, of some countries": '\ufeffid;name;price;n;day\r\n017;Genève;0.1;1;2020-01-02\r\n2;"say ""hi""";;;\r\n',
}


@each("program", EXPORTS)
def test_what_other_programs_export_is_imported_without_options(write, program):
    found = columns_of(write(EXPORTS[program]))
    assert found.pop("index", [0, 1]) == [0, 1]
    assert found == {
        "id": ["017", "2"],
        "name": ["Genève", 'say "hi"'],
        "price": [0.1, None],
        "n": [1, None],
        "day": ["2020-01-02", ""],
    }


def test_text_of_windows_is_refused_with_the_command_that_converts_it(write):
    command = r"iconv -f windows-1252 -t utf-8 'my a\.csv' > 'utf8-my a\.csv'"
    with pytest.raises(FormatError, match=rf"line 2: expected text in UTF-8, got other bytes\. .* {command}$"):
        columns_of(write("name\nGenève\n".encode("latin-1"), "my a.csv"))
