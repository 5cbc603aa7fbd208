"""Headers of safetensors files: beside the safetensors library, on altered ones too."""

import json
import random

import pytest
import safetensors
from helpers import by_hand

from fastrack import load_file
from fastrack.errors import FormatError

SOUND = {
    "__metadata__": {"note": "é"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [0, 7], "data_offsets": [24, 24]},
    'c"\\': {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}
BODY = bytes(26)
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


def test_whatever_opens_the_library_reads_in_the_same_way(tmp_path):
    """Compare with the library, which also takes a few headers that are refused here: members twice or unknown."""
    path = tmp_path / "x.safetensors"
    rng = random.Random(7)
    text, refused, opened = json.dumps(SOUND, ensure_ascii=False), 0, 0
    for _ in range(3000):
        altered = text
        for _ in range(rng.choice([1, 1, 2])):
            start = rng.randrange(len(altered) + 1)
            altered = altered[:start] + rng.choice(TOKENS) + altered[start + rng.choice([0, 0, 1, 1, 2, 5]) :]
        path.write_bytes(by_hand.container(altered.encode(), BODY))
        found = by_fastrack(path)
        if found is None:
            refused += 1
        else:
            opened += 1
            assert found == by_the_library(path), altered
    assert min(refused, opened) > 50


@pytest.mark.parametrize("content", [b"", bytes(7), bytes(8), (1).to_bytes(8, "little"), b"\xff" * 16])
def test_what_is_too_short_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        load_file(path)


@pytest.mark.parametrize(
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
