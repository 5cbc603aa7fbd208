"""Errors of imports and exports name the file, the line and the column, and never a value."""

import pytest
from helpers.cases import each

from fastrack import FormatError, export_samples, import_samples

SECRET = "secret-4711"


def told_by(raised, function, *arguments, **options):
    with pytest.raises(raised) as caught:
        function(*arguments, **options)
    assert "4711" not in str(caught.value)
    return str(caught.value)


@each(
    "lines,columns,place",
    [
        (["name,ssn\nBob,1\n", f"Alice,{SECRET}\nEve,3\n"], None, "1.csv, line 1: expected the columns"),
        (["name,ssn\nBob,1\n", f"Alice,{SECRET}\nEve,3\n"], ["ssn"], "1.csv, line 1: expected the columns"),
        ([f"x,{SECRET},{SECRET}\n1,2,3\n"], None, "0.csv, line 1: column 3: "),
    ],
)
def test_cells_in_the_place_of_a_header_are_not_told(tmp_path, key, lines, columns, place):
    (tmp_path / "in").mkdir()
    for number, text in enumerate(lines):
        (tmp_path / "in" / f"{number}.csv").write_text(text)
    message = told_by(FormatError, import_samples, tmp_path / "in", tmp_path / "out", key, columns=columns)
    assert place in message


@each("value", [10**30 + 4711, f"{SECRET}\ud800", -(10**25) - 4711])
def test_a_value_that_cannot_be_stored_is_not_told(tmp_path, key, value):
    message = told_by(ValueError, import_samples, [{"x": value}], tmp_path / "out", key)
    assert "sample 0: 'x': expected" in message


def test_a_value_that_parquet_lacks_is_told_by_its_column(tmp_path, key):
    pa = pytest.importorskip("pyarrow")
    times = pa.array([1234567890123456789], pa.int64()).view(pa.timestamp("s"))
    import_samples(pa.table({"ok": [1], "when": times}), tmp_path / "data", key)
    message = told_by(FormatError, export_samples, tmp_path / "data", tmp_path / "out.parquet", key)
    assert message.startswith("exporting a table: column 'when': ")
    assert "123456789" not in message
    assert not (tmp_path / "out.parquet").exists()


def test_an_error_of_pyarrow_without_a_number_is_documented_and_others_are_kept(tmp_path, key, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    import_samples([{"x": 1}], tmp_path / "data", key)
    for error, told in [(OSError(SECRET), FormatError), (OSError(28, "No space left on device"), OSError)]:

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(pa.ipc, "new_file", fail)
        message = told_by(told, export_samples, tmp_path / "data", tmp_path / "out.arrow", key)
        assert ("column 'x'" in message) == (told is FormatError)


def test_a_table_that_cannot_be_read_is_told_without_the_text_of_the_error(tmp_path, key):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(SECRET.encode() * 9)
    message = told_by(FormatError, import_samples, tmp_path / "a.parquet", tmp_path / "out", key)
    assert message == f"{tmp_path / 'a.parquet'} is no .parquet file that can be read (ArrowInvalid). Write it again"
