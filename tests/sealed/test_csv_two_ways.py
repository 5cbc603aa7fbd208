"""CSV by PyArrow and by the csv module: one table, whichever reads it."""

import random
import sys

import pytest

from fastrack import FormatError
from fastrack._samples.csv import cell_types, csv_arrow
from fastrack._samples.readers import open_source

pytest.importorskip("pyarrow")

NUMBERS = ["0", "1", "-2", "12.50", "0.1234567890123456", "1e-3", ".5", "2.", "-0", "9007199254740993", "nan", "-inf"]
ODD = ["007", "+1", " 1", "1 ", "9223372036854775808", "0.12345678901234567890", "1e400", "-nan", "0x10", "1_0", "NA"]
TEXTS = [
    "",
    "é",
    "日本",
    "true",
    "FALSE",
    "N/A",
    "a,b",
    'say "x"',
    "two\nlines",
    "cr\rlf\r\n",
    "\ufeff",
    "#",
    "'",
    "\\",
]
ROUGH = ['"x"y', 'mid"dle', '"open', "\n", "\r", "\r\n", ",", "\0", b"\xff", b"\xed\xa0\x80", ' "x"', '""', '""""']


def table(seed):
    """Bytes of a table, most often a sound one, with a column choice, nulls and types."""
    draw = random.Random(seed)
    width, count = draw.choice([1, 1, 2, 3, 5]), draw.choice([0, 3, 20, 70, 200])
    end, delimiter = draw.choice(["\n", "\n", "\r\n", "\r"]), draw.choice(",,;\t")
    kinds = [draw.choice([NUMBERS[:3], NUMBERS, NUMBERS + ODD[:1], ODD, TEXTS, [*NUMBERS, ""]]) for _ in range(width)]
    rows = [[draw.choice(kind) for kind in kinds] for _ in range(count)]
    for _ in range(draw.choice([0, 0, 1, 2]) if rows else 0):
        draw.choice(rows)[draw.randrange(width)] = draw.choice(ODD + TEXTS)

    def cell(text):
        is_special = set(text) & set('"\r\n;,\t') or (not text and width == 1) or draw.random() < 0.05
        return '"' + text.replace('"', '""') + '"' if is_special else text

    names = [draw.choice(["", "0", "x"])] if draw.random() < 0.2 else ["x"]
    header = [*names, *(draw.choice(["a", "b"]) + str(place) for place in range(1, width))]
    lines = [delimiter.join(map(cell, row)).encode() + end.encode() for row in [header, *rows]]
    for _ in range(draw.choice([0, 0, 0, 1, 1, 2])):
        rough = draw.choice(ROUGH)
        rough = rough if isinstance(rough, bytes) else rough.encode()
        place = draw.randint(0, len(lines))
        lines[place : place + 1] = [rough + b"".join(lines[place : place + 1])] if draw.random() < 0.6 else [rough]
    content = draw.choice([b"", b"", b"\xef\xbb\xbf"]) + b"".join(lines)
    content = content if draw.random() < 0.7 else content.removesuffix(end.encode())
    chosen = None if draw.random() < 0.7 else draw.sample(header, draw.randint(1, width))
    types = {header[-1]: draw.choice(["int", "float", "text", "bool"])} if draw.random() < 0.2 else {}
    return content, chosen, cell_types.Schema.of(draw.choice([(), (), ["NA"], ["", "1"]]), types)


def read(path, chosen, schema):
    """Everything that an import takes from a file: columns with their bytes and nulls, notes, or the error."""
    source, found = None, {}
    try:
        source = open_source(path, None, chosen, schema=schema)
        for _, batch in source.batches:
            for name, block in batch.items():
                column, data, lengths = found.setdefault(name, (str(block.column), bytearray(), []))
                assert str(block.column) == column
                data += block.data.tobytes()
                lengths += [] if block.ends is None else (block.ends[1:] - block.ends[:-1]).tolist()
    except FormatError as error:
        return str(error)
    return found, source.notes


def require_equal(seeds, tmp_path, monkeypatch, limited):
    path, by_arrow = tmp_path / "a.csv", []
    real = csv_arrow.read_columns

    def counted(*arguments):
        for cells in real(*arguments):
            by_arrow.append(len(cells[0].cells))
            yield cells

    monkeypatch.setattr("fastrack._samples.csv.csv_files.read_columns", counted)
    limited(arrow_block=512, arrow_rows=1)
    for seed in seeds:
        content, chosen, schema = table(seed)
        path.write_bytes(content)
        limited(arrow_worth=1 << 30)
        expected = read(path, chosen, schema)
        limited(arrow_worth=0)
        assert read(path, chosen, schema) == expected, (seed, content, chosen, schema)
    assert sum(by_arrow) > 10 * len(seeds)


def test_nasty_tables_are_the_same_with_pyarrow_and_without(tmp_path, monkeypatch, limited):
    require_equal(
        [*range(60), 1362], tmp_path, monkeypatch, limited
    )  # one with a fault after a cell that has not its type


@pytest.mark.slow
def test_a_thousand_nasty_tables_are_the_same_with_pyarrow_and_without(tmp_path, monkeypatch, limited):
    require_equal(range(1000), tmp_path, monkeypatch, limited)


def test_a_mark_where_a_block_begins_stays_as_where_another_row_does(tmp_path, limited):
    limited(arrow_worth=0, arrow_rows=1)
    path = tmp_path / "a.csv"  # of two files, one after the other
    rows = b"one,1\n" * 3
    path.write_bytes(b"\xef\xbb\xbfa,b\n" + rows + b"\xef\xbb\xbfa,b\n" + rows)
    for size in (8, 1 << 20):
        limited(arrow_block=size)
        (columns, _) = read(path, None, cell_types.Schema())
        assert columns["a"][1].decode() == 3 * "one" + "\ufeffa" + 3 * "one"


def test_the_end_of_rows_is_found_in_few_steps_whatever_lines_are_in_quotes():
    block = b'a,b\n1,"' + b'\n""' * 20_000
    calls = []
    sys.setprofile(lambda frame, event, function: calls.append(event))
    try:
        end = csv_arrow._end_of_rows(block)
    finally:
        sys.setprofile(None)
    assert end == len(b"a,b\n")
    assert len(calls) < 100


def test_wide_tables_are_left_to_the_csv_module_unless_they_have_many_rows_or_long_cells(tmp_path, limited):
    limited(arrow_worth=0)
    path = tmp_path / "a.csv"
    for width, count, cell, is_left in ((300, 200, "1", True), (300, 1100, "1", False), (3, 90, "x" * 2000, False)):
        path.write_text("\n".join([",".join([cell] * width)] * (count + 1)) + "\n")
        if is_left:
            with pytest.raises(csv_arrow.Unsure):
                next(csv_arrow.read_columns(path, ",", width, [0]))
        else:
            assert sum(len(cells.cells) for (cells,) in csv_arrow.read_columns(path, ",", width, [0])) == count
