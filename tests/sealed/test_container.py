"""Headers of safetensors files: beside the safetensors library, on altered ones too."""

import json
import random
from pathlib import Path

import pytest
import safetensors
from helpers import by_hand
from helpers.cases import each

from fastrack import Key, load_checkpoint, load_file
from fastrack._sealed import file_header, metadata
from fastrack.errors import FormatError

SOUND = {
    "__metadata__": {"note": "é"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [0, 7], "data_offsets": [24, 24]},
    'c"\\': {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}
BODY = bytes(26)
COMPACT = {"__metadata__": SOUND["__metadata__"], "a.weight": SOUND["a"], "b": SOUND["b"], "é": SOUND['c"\\']}
TOKENS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    '"b"',
    '"dtype"',
    '"shape"',
    "0",
    "24",
    "26",
    "-1",
    "1.0",
    "1e2",
    "01",
    "NaN",
]
TOKENS += [
    "null",
    "true",
    '"F32"',
    '"U8"',
    "\\",
    "\\u0061",
    "\\ud800",
    "\\ud83d\\ude00",
    " ",
    "\n",
    "\t",
    "\ufeff",
    "\0",
    "é",
]
TOKENS += [str(2**63), str(2**64), "2" * 5000, '"more":1,', '"__metadata__":{},', '"data_offsets":[0,24],']


def by_the_library(path):
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            parts = {name: file.get_slice(name) for name in file.offset_keys()}
            return file.metadata() or {}, {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    except safetensors.SafetensorError:
        return None


def by_fastrack(path):
    try:
        with load_file(path) as file:
            return file.metadata, {
                name: (file.describe(name).dtype, list(file.describe(name).shape)) for name in file.names
            }
    except FormatError:
        return None


def test_a_sound_header_is_read_as_the_library_reads_it(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(by_hand.container(SOUND, BODY))
    expected = by_the_library(path)
    assert expected is not None
    assert by_fastrack(path) == expected


def alter(text, rng):
    for _ in range(rng.choice([1, 1, 2])):
        start = rng.randrange(len(text) + 1)
        text = text[:start] + rng.choice(TOKENS) + text[start + rng.choice([0, 0, 1, 1, 2, 5]) :]
    return text


def as_written(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("text", [json.dumps(SOUND, ensure_ascii=False), as_written(COMPACT)], ids=["any", "compact"])
def test_whatever_opens_the_library_reads_in_the_same_way(tmp_path, text):
    """Compare with the library, which also takes a few headers that are refused here: members twice or unknown."""
    path = tmp_path / "x.safetensors"
    rng = random.Random(7)
    refused, opened = 0, 0
    for _ in range(1500):
        altered = alter(text, rng)
        path.write_bytes(by_hand.container(altered.encode(), BODY))
        found = by_fastrack(path)
        if found is None:
            refused += 1
        else:
            opened += 1
            assert found == by_the_library(path), altered
    assert min(refused, opened) > 20


def attempt(parse, *arguments):
    try:
        return parse(*arguments)
    except (ValueError, RecursionError, FormatError):
        return "refused"


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_parser_of_compact_headers_agrees_with_that_of_all(is_padded):
    rng, text = random.Random(8), as_written(COMPACT) + "  " * is_padded
    assert file_header._parse_compact(text, 100) == file_header._parse(text, 100)
    parsed = 0
    for _ in range(5000):
        altered = alter(text, rng)
        general = attempt(file_header._parse, altered, 100)
        compact = attempt(file_header._parse_compact, altered, 100)
        assert compact in (None, general), altered
        if compact not in (None, "refused"):
            assert list(compact[1]) == list(general[1])
            parsed += 1
    assert parsed > 50


def test_the_parser_of_compact_lists_agrees_with_that_of_all():
    rng = random.Random(9)
    text = as_written({name: {"dtype": f"F{8 * len(name)}", "shape": [3] * len(name)} for name in ["é.é.", "ab", "cd"]})
    parsed = 0
    for _ in range(5000):
        altered = alter(text, rng)
        compact = file_header.parse_layouts(altered)
        if compact is not None:
            parsed += 1
            entries = json.loads(altered, object_pairs_hook=file_header.unique)
            assert compact == {
                name: metadata._read_layout(name, entry, Path("x")) for name, entry in entries.items()
            }, altered
            assert list(compact) == list(entries)
    assert parsed > 50


@each(
    "header",
    [
        {},
        {"__metadata__": {}},
        {"a": COMPACT["b"], "__metadata__": {}},
        {"__metadata__": None, "a": COMPACT["b"]},
        {"b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}, "a": SOUND["a"] | {"data_offsets": [0, 1]}},
    ],
)
def test_the_parser_of_compact_headers_leaves_others_to_that_of_all(header):
    assert file_header._parse_compact(as_written(header), 0) is None


@each("content", [b"", bytes(7), bytes(8), (1).to_bytes(8, "little"), b"\xff" * 16])
def test_what_is_too_short_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        load_file(path)


@each(
    "header",
    [
        b"[]",
        b'{"__metadata__":[]}',
        b'{"__metadata__":{"a":1}}',
        b'{"__metadata__":{"a":"\\ud800"}}',
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":0}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":["U8"],"shape":[0],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[false,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[-1,-1]}}',
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16"),
    ],
)
def test_what_the_format_does_not_have_is_refused(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(by_hand.container(header, b""))
    with pytest.raises(FormatError):
        load_file(path)


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {f"{i:04}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(2000)}
    path.write_bytes(by_hand.container(header, bytes(2000)))
    with load_file(path) as file:
        assert file.names == tuple(header)


@each(
    ("content", "said"),
    [
        (b"PK\x03\x04\x14\x00\x00\x00\x08", "zip archive.*torch.load"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", "pickle.*torch.load"),
        (b"\x80\x04\x95\x06\x00\x00\x00\x00", "pickle"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "array of NumPy.*fastrack seal"),
        (b"name,age\nOslo,3\n", "text.*fastrack import"),
        (b"a,b\n1", "text"),
        (b"\x80\x04\x00\x00\x00\x00\x00\x00{", "header of 1152 bytes"),
        (b"PK\x03\x04\x00\x00\x00\x00", "zip archive"),
        (b'"patient",1\n', "text.*fastrack import"),
        (b"\xef\xbb\xbfn\xc3\xa4me,b\n", "text"),
        (b"\xff\xfea\x00b\x00c\x00", "UTF-16"),
        (b"\x89PNG\r\n\x1a\n\x00", "image.*fastrack import"),
        (b"PAR1\x15\x04\x15\x10", "table.*fastrack import"),
        (b"\x1f\x8b\x08\x08\x00\x00\x00\x65\x02\xff", "compressed"),
        (bytes(30), "zeros"),
        (b"\xff" * 20, "first bytes are of another format.*fastrack seal"),
    ],
)
def test_another_kind_of_file_is_named(content, said, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (load_file, lambda path: load_checkpoint(path, Key.generate())):
        with pytest.raises(FormatError, match=said):
            read(path)
