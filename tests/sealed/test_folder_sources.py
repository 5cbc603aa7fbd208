"""Folders of images and of arrays: each file a sample, what is none refused by name, what is left out told."""

import numpy as np
import pytest
from helpers.cases import each

from fastrack import FormatError, SealedDataset, import_samples
from fastrack._samples.readers import open_source

PNG = b"\x89PNG\r\n\x1a\n"


def samples_of(folder, key):
    return list(SealedDataset(folder, keys=key, transform=lambda sample: sample))


def read_all(source):
    for _ in open_source(source).batches:
        pass


def save(folder, arrays):
    for name, array in arrays.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, array)


def test_a_folder_of_arrays_becomes_a_data_set(tmp_path, key):
    arrays = {f"{number:03}.npy": np.full((4, 3), number, np.int16) for number in range(5)}
    save(tmp_path / "in", arrays)
    save(tmp_path / "in", {"003.npy": np.asfortranarray(arrays["003.npy"] * np.int16([[1, 2, 3]]))})
    assert import_samples(tmp_path / "in", tmp_path / "out", key) == 5
    found = samples_of(tmp_path / "out", key)
    assert [sample["path"].decode() for sample in found] == list(arrays)
    assert [sample["array"].tolist() for sample in found[:3]] == [array.tolist() for array in list(arrays.values())[:3]]
    assert found[3]["array"].tolist() == [[3, 6, 9]] * 4


def test_arrays_by_class_and_of_any_length(tmp_path, key):
    arrays = {f"{label}/{number}.npy": np.arange(number + 1.0) for label in ("a", "b") for number in range(3)}
    save(tmp_path / "in", arrays)
    import_samples(tmp_path / "in", tmp_path / "out", key)
    found = samples_of(tmp_path / "out", key)
    assert [sample["array"].tolist() for sample in found] == [array.tolist() for array in arrays.values()]
    assert [sample["label"].item() for sample in found] == [0, 0, 0, 1, 1, 1]


@each(
    ("array", "word"),
    [
        (np.zeros((2, 3), np.int32), r"expected I64 \[2, 3\], as in the first file, got I32 \[2, 3\]"),
        (np.zeros((3, 2), np.int64), r"got I64 \[3, 2\]"),
        (np.zeros(2, np.int64), r"got I64 \[2\]"),
        (np.array(["a"]), "b.npy"),
        (np.array([None]), "Python objects"),
    ],
)
def test_arrays_that_differ_are_refused_before_the_first_sample(tmp_path, array, word):
    save(tmp_path, {"a.npy": np.zeros((2, 3), np.int64), "b.npy": array})
    with pytest.raises((FormatError, TypeError), match=word):
        next(open_source(tmp_path).batches)


@each("cut", [0, 5, 20, 100, 140])
def test_an_array_that_was_cut_short_is_refused(tmp_path, cut):
    save(tmp_path, {"a.npy": np.zeros((2, 3))})
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:cut])
    with pytest.raises(FormatError, match=r"a\.npy"):
        read_all(tmp_path)
    (tmp_path / "a.npy").write_bytes(content + b"more")
    with pytest.raises(FormatError, match="not as long as its header says"):
        read_all(tmp_path)
    (tmp_path / "a.npy").write_bytes(content.replace(b"(2, 3), }" + b" " * 12, b"(2000000000000, 3), }"))
    with pytest.raises(FormatError, match="not as long as its header says"):
        read_all(tmp_path)


@each("content", [b"", b"a text", b"\0" * 100, b"<html>"])
def test_a_file_that_is_no_image_is_refused_by_name(tmp_path, content):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.png").write_bytes(content)
    got = "an empty file" if not content else f"{len(content)} bytes that begin otherwise"
    with pytest.raises(FormatError, match=rf"b\.png: expected an image, got {got}. Remove the file"):
        read_all(tmp_path)


def test_images_of_every_kind_are_taken(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for suffix in ("jpg", "jpeg", "png", "ppm", "pgm", "bmp", "tif", "tiff", "webp"):
        picture = image.new("L" if suffix == "pgm" else "RGB", (3, 3))
        picture.save(tmp_path / f"a.{suffix}")
    (tmp_path / "really.png").write_bytes((tmp_path / "a.jpg").read_bytes())
    assert sum(1 for _ in open_source(tmp_path).batches) == 10


def test_what_is_left_out_is_told(tmp_path):
    for name in ("a/1.png", "a/notes.md", "b/2.png", "b/Thumbs.db", ".DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / ".DS_Store").unlink()
    reason = "no image or .npy file"
    assert open_source(tmp_path).skipped == [("a/notes.md", reason), ("b/Thumbs.db", reason)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a\n")
    (tmp_path / "text" / ".hidden").write_text("a\n")
    assert open_source(tmp_path / "text").skipped == [(".hidden", "hidden")]


def test_image_files_may_be_named_themselves(tmp_path, key):
    for name in ("x/a.png", "y/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(PNG)
    import_samples([tmp_path / "y/b.png", tmp_path / "x/a.png"], tmp_path / "out", key)
    assert [sample["path"] for sample in samples_of(tmp_path / "out", key)] == [b"y/b.png", b"x/a.png"]
    import_samples(tmp_path / "x/a.png", tmp_path / "one", key)
    assert [sample["path"] for sample in samples_of(tmp_path / "one", key)] == [b"a.png"]


@each(
    ("names", "word"),
    [
        (["a.png", "b.npy"], r"a\.png: expected only images|b\.npy: expected only images or only .npy files"),
        (["a.csv", "b.jsonl"], r"expected files of one kind, got 'a\.csv', 'b\.jsonl'"),
        (["a.csv", "b.doc"], r"got 'b\.doc'"),
        (["a.xlsx"], r"got 'a\.xlsx'"),
    ],
)
def test_a_mixture_is_refused_by_what_it_is_of(tmp_path, names, word):
    for name in names:
        (tmp_path / name).write_bytes(PNG)
    with pytest.raises(FormatError, match=word):
        read_all(tmp_path)


# Text.


@each("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_text_and_json_lines_of_every_encoding(tmp_path, key, encoding):
    mark = "\ufeff" if encoding.startswith("utf-16") else ""
    (tmp_path / "a.txt").write_bytes((mark + "one\r\nzwö\n\u0a0a\n\nend").encode(encoding))
    (tmp_path / "a.jsonl").write_bytes((mark + '{"x": "zwö", "y": 1}\r\n\n{"x": "\u0a0a", "y": 2}').encode(encoding))
    import_samples(tmp_path / "a.txt", tmp_path / "text", key)
    assert [sample["text"].decode() for sample in samples_of(tmp_path / "text", key)] == ["one", "zwö", "ਊ", "", "end"]
    import_samples(tmp_path / "a.jsonl", tmp_path / "json", key)
    assert [sample["x"].decode() for sample in samples_of(tmp_path / "json", key)] == ["zwö", "\u0a0a"]


@each(
    ("content", "word"),
    [
        (b"one\ntw\xf6\n", "line 2: expected text in UTF-8"),
        (b"one\n\ntw\0o\n", "line 3: .*NUL"),
        ("\ufeffone\n".encode("utf-16-le") + b"\0\xd8a\0\n\0", "line 2: expected text in UTF-16-LE"),
        ("\ufeffone\n".encode("utf-32"), "NUL"),
        ("one\n".encode("utf-16-le"), "line 1: .*NUL"),
    ],
)
def test_what_is_no_text_is_refused_by_line(tmp_path, content, word):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(FormatError, match=rf"a\.txt, {word}" if word.startswith("line") else word):
        read_all(tmp_path / "a.txt")


def test_names_of_members_that_cannot_be_stored_are_refused(tmp_path):
    for name in ("", "x.valid", "x.records"):
        (tmp_path / "a.jsonl").write_text(f'{{"{name}": 1}}\n')
        with pytest.raises(FormatError, match=r"a\.jsonl, line 1"):
            read_all(tmp_path / "a.jsonl")
