"""Files that change while they are read: no dataset of them is complete, and no error has their values."""

import os
import tarfile

import numpy as np
import pytest
from helpers.cases import each

from fastrack import FormatError, import_samples
from fastrack._samples import imports, readers

CHANGED = "expected the file as it was at the first look, got one that changed"


def batches_while(path, change, after=1):
    """Read a source, and change it after a number of batches."""
    for read, _ in enumerate(readers.open_source(path).batches, 1):
        if read == after:
            change(path)


def cut(path, size=9):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - size)


@each("suffix,size", [(".csv", 9), (".csv", 3), (".txt", 18), (".txt", 5), (".jsonl", 18)])
@pytest.mark.slow
def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, suffix, size):
    path = tmp_path / f"a{suffix}"
    head, line = {".csv": ("a,b\n", "1%05d,7\n"), ".txt": ("", "%08d\n"), ".jsonl": ("", '{"a":"%09d"}\n')}[suffix]
    path.write_text(head + "".join(line % index for index in range(50_000)))
    with pytest.raises(FormatError, match="got one that changed"):
        batches_while(path, lambda path: cut(path, size), after=2)


def test_a_file_that_grew_while_it_was_read_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n" * 3000)

    def grow(path):
        with path.open("a") as file:
            file.write("three\n")

    with pytest.raises(FormatError, match=CHANGED):
        batches_while(path, grow)


def test_a_table_that_was_replaced_after_its_survey_is_refused(tmp_path, monkeypatch):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    from fastrack._samples import tables

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": list(range(100))}), path)
    find = tables.Survey.find

    def find_and_replace(survey, arrays):
        find(survey, arrays)
        parquet.write_table(pa.table({"x": list(range(5000, 5010))}), tmp_path / "new")
        (tmp_path / "new").replace(path)

    monkeypatch.setattr(tables.Survey, "find", find_and_replace)
    with pytest.raises(FormatError, match=CHANGED):
        list(readers.open_source(path).batches)


def write_image(path):
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + os.urandom(8 + path.exists()))


def write_array(path):
    np.save(path, np.zeros(3 + path.exists()))


def write_archive(path):
    count = 2 + path.exists()
    with tarfile.open(path, "w") as archive:
        for index in range(count):
            archive.addfile(tarfile.TarInfo(f"{index}.txt"))


@each("suffix,write", [(".png", write_image), (".npy", write_array), (".tar", write_archive)])
def test_an_image_an_array_and_an_archive_that_change_are_refused(tmp_path, suffix, write):
    path = tmp_path / f"a{suffix}"
    write(path)
    with pytest.raises(FormatError, match=CHANGED):
        batches_while(path, write)


def test_a_file_that_changes_after_it_was_compared_is_refused(tmp_path, key, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("a\n")
    import_samples(source, tmp_path / "data", key)
    (source / "b.txt").write_text("b\n")
    find = imports.Import._find_existing

    def find_and_change(self, writer):
        found = find(self, writer)
        (source / "a.txt").write_text("changed\nand more\n")
        return found

    monkeypatch.setattr(imports.Import, "_find_existing", find_and_change)
    with pytest.raises(FormatError, match=CHANGED):
        import_samples(source, tmp_path / "data", key, append=True, skip_existing=True)


def test_cells_that_are_no_longer_numbers_are_not_in_the_error(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "100000,7\n" * 20_000)

    def change(path):
        with path.open("r+") as file:
            file.seek(path.stat().st_size - 9)
            file.write("secret,7")

    with pytest.raises(FormatError, match="got one that changed") as caught:
        batches_while(path, change)
    assert "secret" not in str(caught.value)
