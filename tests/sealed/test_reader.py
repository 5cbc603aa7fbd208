"""Reading sealed files: lazily, without fastrack too, and however wrong the header is."""

import errno
import gc
import json
import os
import pickle
import stat
import tracemalloc
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from helpers import by_hand
from helpers.cases import each
from helpers.processes import room_for
from helpers.tampering import relist, rewrite_file, tamper_file
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key, SealedTensor, check_file, load_file, save_file, unseal, verify_file
from fastrack._sealed import storage
from fastrack._tensors import arrays
from fastrack.errors import AuthenticationError, ClosedError, FastrackError, FormatError, UnknownKeyError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, chunk_offset

KEY = Key.from_bytes(bytes(range(32)))
FILE_ID = "5eed" * 8
TENSORS = {
    "images": np.arange(30_000, dtype=np.float32).reshape(300, 100),
    "labels": np.arange(300, dtype=np.int64),
    "names": np.frombuffer(b"ten", np.uint8),
    "scale": np.array(2.5),
    "nothing": np.empty((0, 7), np.float16),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "train.safetensors"
    save_file(TENSORS, path, KEY, plain=["labels"], metadata={"licence": "CC0", "epoch": "3"})
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory, path):
    # Once beforehand, so that the memory native code takes when it is loaded counts for no file.
    assert all(check.error is None for check in check_file(path, KEY))
    assert len(opened(path)) == 4
    return tmp_path_factory.mktemp("scratch") / "made.safetensors"


def opened(path):
    with load_file(path) as file:
        return [unseal(sealed, KEY) for sealed in file.values()]


# A mapping


@pytest.fixture
def two_files(tmp_path):
    """Give two files of the same tensors and key, as an owner who seals twice has."""
    for name in ("older", "newer"):
        save_file(TENSORS, tmp_path / name, KEY)
    return tmp_path / "older", tmp_path / "newer"


def test_a_file_is_opened_by_its_id(two_files):
    older, newer = two_files
    with load_file(newer) as file:
        wanted = file.file_id
    with load_file(newer, file_id=wanted) as file:
        assert file.file_id == wanted
        again = pickle.loads(pickle.dumps(file))
    older.replace(newer)
    with pytest.raises(AuthenticationError, match=wanted):
        load_file(newer, file_id=wanted)
    with pytest.raises(AuthenticationError, match=wanted):
        pickle.loads(pickle.dumps(again))


def test_a_file_that_was_opened_is_verified_though_another_takes_its_place(two_files):
    older, newer = two_files
    with load_file(newer) as file:
        older.write_bytes(b"no such file")
        older.replace(newer)
        verify_file(file, KEY)
        assert [check.name for check in check_file(file, KEY)] == list(file)


def test_a_file_is_a_mapping_of_names_to_tensors(path):
    with load_file(str(path)) as file:
        assert repr(file) == f"<SealedFile {str(path)!r}: 4 sealed, 1 plain>"
        assert isinstance(file, Mapping)
        assert set(file) == set(file.keys()) == set(TENSORS) - {"labels"}
        assert len(file) == 4
        assert set(file.plain) == {"labels"}
        assert set(file.names) == set(TENSORS)
        assert "images" in file
        assert "Images" not in file
        assert None not in file
        assert file.get("no such") is None
        with pytest.raises(KeyError, match="no such'; it has"):
            file["no such"]
        assert file.path == path
        assert file.key_id == KEY.id
        assert file.metadata == {"licence": "CC0", "epoch": "3"}


def test_a_sealed_tensor_comes_out_sealed_and_so_do_its_rows(path):
    with load_file(path) as file:
        for name, sealed in file.items():
            assert isinstance(sealed, SealedTensor)
            assert sealed.shape == TENSORS[name].shape
            assert np.array_equal(unseal(sealed, KEY, framework="numpy"), TENSORS[name])
        rows = file["images"][[7, -1]]
    assert np.array_equal(unseal(rows, KEY, framework="numpy"), TENSORS["images"][[7, -1]])


def test_a_plain_tensor_comes_out_as_an_array_that_cannot_be_written_to(path):
    with load_file(path) as file:
        labels = file.plain["labels"]
    assert np.array_equal(labels, TENSORS["labels"])
    assert labels.dtype == np.int64
    assert not labels.flags.writeable


def test_a_plain_tensor_is_not_among_the_sealed_ones(path):
    with load_file(path) as file:
        assert "labels" not in file
        with pytest.raises(KeyError, match=r"plain\['labels'\]"):
            file["labels"]
        with pytest.raises(KeyError):
            file.plain["images"]
        assert "labels" in repr(file.plain)


def test_a_plain_tensor_put_in_the_place_of_a_sealed_one_is_not_taken_for_it(scratch):
    save_file({"x": np.arange(3)}, scratch, KEY)

    def replace(metadata, tensors):
        metadata["fastrack.tensors"], tensors["x"] = "{}", np.arange(3)[::-1].copy()

    rewrite_file(scratch, replace)
    with load_file(scratch) as file, pytest.raises(KeyError, match="unencrypted"):
        fastrack.to_device(file["x"], keys=KEY)


def test_two_files_are_the_same_only_if_they_are_one(path):
    with load_file(path) as file, load_file(path) as again:
        assert file == file  # noqa: PLR0124
        assert file != again
        assert file.plain != again.plain
        assert len({file, again}) == 2


def test_a_closed_file_hands_out_nothing_more(path):
    file = load_file(path)
    file.close()
    file.close()
    for tensors in (file, file.plain):
        for name in tensors:
            with pytest.raises(ClosedError, match=str(path)):
                tensors[name]
    with pytest.raises(KeyError):
        file["no such"]
    assert "images" in file
    assert len(file) == 4


def test_tensors_that_were_taken_out_outlive_the_file(scratch):
    save_file(TENSORS, scratch, KEY, plain=["labels"])
    with load_file(scratch) as file:
        images, labels = file["images"], file.plain["labels"]
    del file
    scratch.unlink()
    assert np.array_equal(unseal(images, KEY, framework="numpy"), TENSORS["images"])
    assert np.array_equal(labels, TENSORS["labels"])


def test_opening_a_file_reads_only_its_header(scratch):
    save_file({"x": np.zeros(50_000_000, np.uint8)}, scratch, KEY)
    load_file(scratch).close()
    tracemalloc.start()
    try:
        with load_file(scratch) as file:
            assert file["x"].shape == (50_000_000,)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_no_key_is_needed_until_a_tensor_is_opened(path, monkeypatch, tmp_path):
    with load_file(path) as file, pytest.raises(UnknownKeyError):
        unseal(file["images"])
    KEY.save(tmp_path / "owner.key")
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(tmp_path / "owner.key"))
    with load_file(path) as file:
        assert unseal(file["scale"]).item() == 2.5


@pytest.mark.parametrize("tensors", [{"x": TENSORS["images"]}, {}])
def test_a_plain_safetensors_file_opens_as_one_without_sealed_tensors(scratch, tensors):
    safetensors.numpy.save_file(tensors, scratch, metadata={"format": "np"})
    with load_file(scratch) as file:
        assert dict(file) == {}
        assert not file
        assert file.key_id is None
        assert file.metadata == {"format": "np"}
        assert list(file.plain) == list(tensors)
        assert all(np.array_equal(file.plain[name], tensors[name]) for name in tensors)


def test_a_plain_tensor_of_a_type_that_numpy_lacks_says_so_when_it_is_taken_out(scratch):
    header = {"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}
    scratch.write_bytes(by_hand.container(header, b"\1\2"))
    with load_file(scratch) as file:
        assert "x" in file.plain
        assert file.stored("x")[:2] == ("F4", (4,))
        with pytest.raises(TypeError, match="F4"):
            file.plain["x"]


# What is no sealed file


@pytest.mark.parametrize("use", [load_file, lambda path: verify_file(path, KEY)], ids=["load", "verify"])
def test_a_missing_file_is_missing_and_a_directory_is_none(tmp_path, use):
    with pytest.raises(FileNotFoundError):
        use(tmp_path / "missing.safetensors")
    with pytest.raises(OSError, match=r".+"):
        use(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_not(path, scratch):
    scratch.write_bytes(path.read_bytes())
    scratch.chmod(0)
    try:
        with pytest.raises(PermissionError):
            load_file(scratch)
    finally:
        scratch.chmod(stat.S_IRUSR | stat.S_IWUSR)


def exercise(path):
    """Do everything a reader does with a file, and let only fastrack's own errors and the system's pass."""
    size = path.stat().st_size
    tracemalloc.start()
    try:
        with load_file(path) as file:
            assert repr(file)
            assert set(file) | set(file.plain) == set(file.names)
            for name in file.names:
                dtype, _, memory = file.stored(name)
                assert memory.size <= size
                if name in file:
                    with pytest.raises((AuthenticationError, UnknownKeyError)):
                        unseal(file[name], KEY)
                elif not dtype.startswith(("F4", "F6")):
                    assert file.plain[name].nbytes == memory.size
            assert all(check.error is not None for check in check_file(path, KEY))
    except (FastrackError, OSError) as error:
        return error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60 * size + (1 << 20)
    return None


fuzz = settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzz
@given(content=st.binary(max_size=300))
@example(content=b"")
@example(content=b"\x08")
@example(content=bytes(8))
@example(content=b"\xff" * 8)
@example(content=(2**63 - 1).to_bytes(8, "little") + b"{}")
@example(content=(100_000_001).to_bytes(8, "little") + b"{}")
@example(content=(99_999_999).to_bytes(8, "little") + b"{}")
@example(content=(3).to_bytes(8, "little") + b"{}")
def test_arbitrary_bytes_are_no_sealed_file(scratch, content):
    scratch.write_bytes(content)
    error = exercise(scratch)
    assert error is None or isinstance(error, FormatError)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.sampled_from(
        [0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200, 10**4000, "U8", "F32", "F64"]
    )
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def usually(value, other=json_values):
    """The right value as a rule, and any other now and then."""
    return st.integers(0, 5).flatmap(lambda dice: other if dice == 0 else st.just(value))


@st.composite
def headers(draw):
    extents = st.sampled_from([0, 1, 2, 3, 72, 2**31, 2**62, 2**64 - 1])
    tensors = {}
    for name in draw(st.lists(st.sampled_from(["x", "y", "", "__metadata__", "\ud800", "é"]), max_size=3)):
        shape = draw(usually([72], st.lists(extents, max_size=70)))
        entry = {"dtype": draw(usually("U8", st.sampled_from(["F4", "F6_E2M3", "BF16", "F64", "C64", "Q8", 8]))),
                 "shape": draw(usually(shape)), "data_offsets": draw(usually([0, 72]))}  # fmt: skip
        if draw(st.integers(0, 9)) == 0:
            entry.popitem()
        tensors[name] = draw(usually(entry))
    return json.dumps(draw(usually(tensors)))


@pytest.mark.slow
@fuzz
@given(header=headers(), body=st.sampled_from([b"", bytes(72), bytes(144)]), lie=usually(0, st.integers(-9, 2**63)))
@example(header='{"x":{"dtype":"U8","shape":[72],"data_offsets":[0,72]}}', body=bytes(72), lie=0)
@example(header='{"x":{"dtype":"U8","shape":[72],"data_offsets":[0,72]}}', body=bytes(71), lie=0)
@example(header='{"x":{"dtype":"U8","shape":[72],"data_offsets":[72,0]}}', body=bytes(72), lie=0)
@example(header='{"x":{"dtype":"U8","shape":[72],"data_offsets":[8,80]}}', body=bytes(80), lie=0)
@example(header='{"x":{"dtype":"F64","shape":[0,4611686018427387904],"data_offsets":[0,0]}}', body=b"", lie=0)
@example(header='{"x":{"dtype":"U8","shape":[%s1],"data_offsets":[0,1]}}' % ("1," * 70), body=bytes(1), lie=0)
@example(header='{"x":' + "[" * 100_000 + "]" * 100_000 + "}", body=b"", lie=0)
@example(header='{"x":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', body=bytes(2), lie=0)
def test_a_lying_header_is_refused_or_harmless(scratch, header, body, lie):
    content = bytearray(by_hand.container(header.encode(), body))
    content[:8] = max(0, len(header.encode()) + lie).to_bytes(8, "little")
    scratch.write_bytes(content)
    exercise(scratch)


def sealed_container(metadata, size=72, name="x"):
    header = {"__metadata__": metadata, name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    return by_hand.container(header, bytes(size))


SOUND = by_hand.marks({"x": ("U8", (0,))}, KEY.id, FILE_ID)


@fuzz
@given(
    version=usually("1", st.text(max_size=30)),
    file=usually(FILE_ID, st.text(max_size=40)),
    key=usually(KEY.id, st.text(max_size=40)),
    tensors=usually(SOUND["fastrack.tensors"], st.text(max_size=40)),
    other=st.dictionaries(st.text(max_size=5).map("fastrack.".__add__), st.text(max_size=5), max_size=2),
    left_out=usually(None, st.sampled_from(sorted(SOUND))),
)
@pytest.mark.slow
def test_arbitrary_metadata_is_refused_or_harmless(scratch, version, file, key, tensors, other, left_out):
    metadata = {**other, "fastrack.version": version, "fastrack.file": file, "fastrack.key": key}
    metadata["fastrack.tensors"] = tensors
    metadata.pop(left_out, None)
    scratch.write_bytes(sealed_container(metadata))
    exercise(scratch)


@pytest.mark.slow
@settings(fuzz, max_examples=100)
@given(listed=usually({"x": {"dtype": "U8", "shape": [0]}}), entry=json_values, shape=json_values, dtype=json_values)
def test_arbitrary_claims_are_refused_or_harmless(scratch, listed, entry, shape, dtype):
    for claims in (
        listed,
        {"x": entry},
        {"x": {"dtype": "U8", "shape": shape}},
        {"x": {"dtype": "U8", "shape": [0, shape]}},
        {"x": {"dtype": dtype, "shape": [0]}},
        {"x": {"dtype": "U8", "shape": [0]}, "y": entry},
        {"x": {"dtype": "U8", "shape": [0], "more": entry}},
    ):
        scratch.write_bytes(sealed_container({**SOUND, "fastrack.tensors": json.dumps(claims)}))
        exercise(scratch)


NO_LISTS = ["", "null", "[]", "1", "NaN", "{"]
NO_CLAIMS = ["null", "[]", "{}", '{"dtype":"U8"}', '{"shape":[0]}', '{"dtype":"U8","shape":[0],"more":1}']
NO_CLAIMS += ["[" * 500 + "]" * 500, "[" * 100_000 + "]" * 100_000, '{"a":' * 950 + "1" + "}" * 950]
NO_DTYPES = ['["U8"]', "null", '"U9"', '"\\ud800"']
NO_SHAPES = ["0", '{"0":0}', '"0"', "[false]", "[0.0]", "[-0.0]", "[1e400]", '["0"]', "[null]", "[-1]", "[-1,-1]"]
NO_SHAPES += ["[1]", "[9223372036854775808]", "[0,9223372036854775808]", "[0,4294967296,4294967296]"]
NO_SHAPES += ["[1" + "0" * 5000 + "]", "[0" + ",1" * 64 + "]"]


@each(
    "listed",
    [
        *NO_LISTS,
        *('{"x":' + claim + "}" for claim in NO_CLAIMS),
        *('{"x":{"dtype":' + dtype + ',"shape":[0]}}' for dtype in NO_DTYPES),
        *('{"x":{"dtype":"U8","shape":' + shape + "}}" for shape in NO_SHAPES),
        '{"x":{"dtype":"F4","shape":[1]}}',
        '{"x":{"dtype":"F64","shape":[0,4611686018427387904]}}',
        '{"x":{"dtype":"U8","shape":[0]},"y":{"dtype":"U8","shape":[0]}}',
        '{"\\ud800":{"dtype":"U8","shape":[0]}}',
        '{"x":{"dtype":"U8","shape":[0]},"x":1}',
    ],
)
def test_an_unsound_list_of_sealed_tensors_is_refused(scratch, listed):
    scratch.write_bytes(sealed_container({**SOUND, "fastrack.tensors": listed}))
    error = exercise(scratch)
    assert isinstance(error, FormatError)
    assert len(str(error)) < 600


def test_the_sound_list_is_not_refused_before_its_header_is(scratch):
    scratch.write_bytes(sealed_container(SOUND))
    assert exercise(scratch) is None


@each(
    ("mark", "value", "match"),
    [
        *(("fastrack.version", version, f"'1', got {version!r}") for version in ("2", "", None)),
        ("fastrack.file", "00", "fastrack.file: .*'00'"),
        *(("fastrack.file", file, "fastrack.file: ") for file in ("g" * 32, "A" * 32, "0" * 32 + "\n")),
        ("fastrack.file", None, "fastrack.file: .*None"),
        ("fastrack.key", "0" * 33, "fastrack.key: "),
        ("fastrack.key", None, "fastrack.key: "),
        ("fastrack.tensors", None, "fastrack.tensors: .*None"),
        ("fastrack.tensors", '{"a":{"dtype":"F32","shape":[3]},"a":{"dtype":"F32","shape":[3]}}', "fastrack.tensors: "),
        ("fastrack.tensors", '{"a":{"dtype":"F32","shape":[3],"shape":[3]}}', "fastrack.tensors: "),
    ],
)
def test_an_unsound_mark_is_refused(scratch, mark, value, match):
    metadata = {**SOUND, mark: value}
    scratch.write_bytes(sealed_container({key: text for key, text in metadata.items() if text is not None}))
    with pytest.raises(FormatError, match=match):
        load_file(scratch)


@each(("dtype", "shape"), [("I8", [72]), ("BOOL", [72]), ("U8", [8, 9]), ("U8", [72, 1]), ("F64", [9])])
def test_a_sealed_tensor_that_is_no_vector_of_bytes_is_refused(scratch, dtype, shape):
    header = {"__metadata__": SOUND, "x": {"dtype": dtype, "shape": shape, "data_offsets": [0, 72]}}
    scratch.write_bytes(by_hand.container(header, bytes(72)))
    with pytest.raises(FormatError, match="72 bytes"):
        load_file(scratch)


def test_a_shape_that_no_array_may_have_is_refused(scratch):
    for shape in ([0, 2**62], [1] * 65 + [0]):
        header = {"x": {"dtype": "F64", "shape": shape, "data_offsets": [0, 0]}}
        scratch.write_bytes(by_hand.container(header))
        with pytest.raises(FormatError, match="shape of 'x'"):
            load_file(scratch)


def after_each_read(monkeypatch, happen):
    """Have something happen whenever a part of a file was read that is not mapped, as the header is."""
    pread = os.pread

    def read(*given):
        found = pread(*given)
        happen()
        return found

    monkeypatch.setattr(os, "pread", read)


def test_a_file_that_shrinks_while_it_is_opened_is_refused(scratch, monkeypatch):
    header = {"x": {"dtype": "U8", "shape": [500], "data_offsets": [0, 500]}}
    scratch.write_bytes(by_hand.container(header, bytes(500)))
    after_each_read(monkeypatch, lambda: scratch.stat().st_size > 100 and os.truncate(scratch, 100))
    with pytest.raises(FormatError, match="cut short"):
        load_file(scratch)


def test_every_truncation_of_a_file_is_refused(scratch):
    save_file({"x": np.arange(50, dtype=np.uint8)}, scratch, KEY)
    content = scratch.read_bytes()
    for size in range(len(content)):
        scratch.write_bytes(content[:size])
        with pytest.raises(FormatError):
            load_file(scratch)


@pytest.mark.slow
def test_every_flipped_bit_of_a_file_is_refused_or_leaves_what_was_sealed(scratch):
    plain = np.arange(20, dtype=np.uint8)
    save_file({"x": plain}, scratch, KEY)
    content = bytearray(scratch.read_bytes())
    opened = 0
    for bit in range(8 * len(content)):
        content[bit // 8] ^= 1 << bit % 8
        scratch.write_bytes(content)
        content[bit // 8] ^= 1 << bit % 8
        try:
            with load_file(scratch) as file:
                # Stripped of its marks or its name, it is no longer a sealed tensor called x.
                sealed = list(file.values())
                assert all(np.array_equal(unseal(tensor, KEY, framework="numpy"), plain) for tensor in sealed)
                opened += bool(sealed)
        except (FormatError, AuthenticationError, UnknownKeyError):
            pass
    assert opened < 8 * 40  # only spaces of the padding and the like


# Verifying


def test_a_sound_file_verifies(path):
    assert verify_file(path, KEY) is None
    seen = []
    checks = check_file(path, KEY, progress=seen.append)
    assert {check.name for check in checks} == set(TENSORS) - {"labels"}
    assert all(check.error is None for check in checks)
    images = next(check for check in checks if check.name == "images")
    assert (images.dtype, images.shape, images.nbytes) == ("F32", (300, 100), 120_000)
    assert sum(seen) == sum(check.nbytes for check in checks)


def altered(path, scratch, name, place):
    """The file with one bit of a message flipped."""
    scratch.write_bytes(path.read_bytes())
    tamper_file(scratch, name, place)


@each(("name", "chunk"), [("images", 0), ("images", 3), ("images", 7), ("nothing", 0), ("scale", 0)])
@each("in_tag", [False, True])
def test_a_bad_chunk_is_found_and_the_other_tensors_are_good(path, scratch, name, chunk, in_tag):
    with load_file(path) as file:
        last = min(chunk_offset(chunk + 1), len(file[name].message)) - 1
    altered(path, scratch, name, last if in_tag else chunk_offset(chunk))
    for check in check_file(scratch, KEY):
        if check.name != name:
            assert check.error is None
            continue
        assert isinstance(check.error, AuthenticationError)
        assert (check.error.tensor, check.error.chunk) == (name, chunk)


def test_a_bad_header_is_found(path, scratch):
    altered(path, scratch, "images", 30)
    errors = {check.name: check.error for check in check_file(scratch, KEY)}
    assert errors.pop("images").chunk is None
    assert set(errors.values()) == {None}


def test_a_file_of_another_key_is_told_apart_from_an_altered_one(path):
    for check in check_file(path, Key.generate()):
        assert isinstance(check.error, UnknownKeyError)


def test_a_bad_chunk_far_behind_is_found_slab_by_slab(scratch, limited):
    limited(verified_run=4 * CHUNK_SIZE)
    save_file({"x": np.zeros(20 * CHUNK_SIZE, np.uint8)}, scratch, KEY)
    seen = []
    assert check_file(scratch, KEY, progress=seen.append)[0].error is None
    assert seen == [4 * CHUNK_SIZE] * 5
    for chunk in (0, 3, 4, 13, 19, 20):
        save_file({"x": np.zeros(20 * CHUNK_SIZE, np.uint8)}, scratch, KEY)
        tamper_file(scratch, "x", chunk_offset(chunk))
        assert check_file(scratch, KEY)[0].error.chunk == chunk


# Tensors moved between names and files


def test_two_tensors_of_one_shape_cannot_change_places(scratch):
    save_file({"a": np.zeros(100), "b": np.ones(100)}, scratch, KEY)
    rewrite_file(scratch, lambda _, tensors: tensors.update(a=tensors["b"], b=tensors["a"]))
    assert [check.error.chunk for check in check_file(scratch, KEY)] == [None, None]


def test_a_tensor_cannot_move_to_another_file(scratch, tmp_path):
    for name in ("one", "two"):
        save_file({"x": np.zeros(100), "y": np.zeros(3)}, tmp_path / name, KEY)
    other = safetensors.numpy.load(by_hand.drop_guard((tmp_path / "two").read_bytes()))
    rewrite_file(tmp_path / "one", lambda _, tensors: tensors.update(x=other["x"]), scratch)
    errors = {check.name: check.error for check in check_file(scratch, KEY)}
    assert isinstance(errors["x"], AuthenticationError)
    assert errors["y"] is None


def test_a_tensor_cannot_change_its_type_or_shape(path, scratch):
    for claim in ({"dtype": "I32", "shape": [300, 100]}, {"dtype": "F32", "shape": [100, 300]}):
        relist(path, lambda listed, _, claim=claim: listed.update(images=claim), scratch)
        errors = {check.name: check.error for check in check_file(scratch, KEY)}
        assert isinstance(errors.pop("images"), AuthenticationError)
        assert set(errors.values()) == {None}


def test_a_sealed_tensor_without_its_mark_is_bytes_and_nothing_more(path, scratch):
    relist(path, lambda listed, _: listed.pop("images"), scratch)
    with load_file(scratch) as file:
        assert "images" in file.plain
        with pytest.raises(TypeError):
            unseal(file.plain["images"], KEY)
        with pytest.raises(KeyError, match="unencrypted"):
            file["images"]


def test_a_file_may_be_rewritten_by_others_who_keep_its_metadata(path, scratch):
    rewrite_file(path, lambda metadata, _: metadata.update(extra="note"), scratch)
    assert all(check.error is None for check in check_file(scratch, KEY))


# Interoperation


@pytest.mark.parametrize("bits", [128, 256])
def test_a_sealed_file_opens_without_fastrack(scratch, bits):
    secret = bytes(range(bits // 8))
    tensors = {**TENSORS, 'a "quoted" name, größer': np.arange(9, dtype=ml_dtypes.bfloat16)}
    save_file(tensors, scratch, Key.from_bytes(secret), plain=["labels"])
    scratch.write_bytes(by_hand.drop_guard(scratch.read_bytes()))

    with safetensors.safe_open(scratch, framework="numpy") as file:
        metadata = file.metadata()
    listed = json.loads(metadata["fastrack.tensors"])
    for stored in (safetensors.numpy.load_file(scratch), safetensors.torch.load_file(scratch)):
        assert set(stored) == set(tensors)
        assert np.array_equal(stored["labels"], TENSORS["labels"])
        for name, claim in listed.items():
            context = by_hand.context(name, claim["dtype"], claim["shape"], metadata["fastrack.file"])
            plain = by_hand.unseal(secret, context, np.asarray(stored[name]).tobytes())
            assert plain == tensors[name].tobytes()
            assert claim["shape"] == list(tensors[name].shape)
        assert set(listed) | {"labels"} == set(tensors)


@each("bits", [128, 256])
@each("save", [safetensors.numpy.save_file, safetensors.torch.save_file])
def test_a_file_made_without_fastrack_opens(scratch, bits, save):
    secret = bytes(range(bits // 8))
    key = Key.from_bytes(secret)
    wrap = torch.from_numpy if save is safetensors.torch.save_file else np.asarray
    claims, stored = {}, {"free": wrap(np.arange(5, dtype=np.float32))}
    for name, array in TENSORS.items():
        claims[name] = (fastrack._tensors.dtypes.from_numpy(array.dtype), array.shape)
        message = by_hand.seal(secret, by_hand.context(name, *claims[name], FILE_ID), array.tobytes())
        stored[name] = wrap(np.frombuffer(message, np.uint8).copy())
    save(stored, scratch, metadata={"note": "by hand", **by_hand.marks(claims, key.id, FILE_ID)})

    with load_file(scratch) as file:
        assert set(file) == set(TENSORS)
        assert set(file.plain) == {"free"}
        assert file.metadata == {"note": "by hand"}
        for name, array in TENSORS.items():
            back = unseal(file[name], key, framework="numpy")
            assert (back.dtype, back.shape) == (array.dtype, array.shape)
            assert np.array_equal(back, array)
    assert all(check.error is None for check in check_file(scratch, key))


# Verifying, for a program that wants an exception


def test_a_bad_tensor_raises_and_the_other_bad_ones_are_in_the_notes(scratch):
    save_file({name: np.zeros(3 * CHUNK_SIZE, np.uint8) for name in "abc"}, scratch, KEY)
    tamper_file(scratch, "a", chunk_offset(1))
    tamper_file(scratch, "c", chunk_offset(2))
    with pytest.raises(AuthenticationError) as caught:
        verify_file(scratch, KEY)
    assert (caught.value.tensor, caught.value.chunk) == ("a", 1)
    (note,) = caught.value.__notes__
    assert note.startswith(f"{scratch}: tensor 'c', chunk 2:")


# Files that change


def test_a_file_that_is_replaced_while_it_is_opened_is_read_whole_from_one_version(scratch, monkeypatch):
    first, second = {"x": np.zeros(10_000, np.uint8)}, {"x": np.ones(20_000, np.uint8)}
    save_file(first, scratch, KEY)
    pread = os.pread

    def replace_and_read(*given):
        save_file(second, scratch, KEY)
        return pread(*given)

    with monkeypatch.context() as patches:
        patches.setattr(os, "pread", replace_and_read)
        file = load_file(scratch)
    assert np.array_equal(unseal(file["x"], KEY, framework="numpy"), first["x"])
    with load_file(scratch) as file:
        assert np.array_equal(unseal(file["x"], KEY, framework="numpy"), second["x"])


def test_a_file_that_is_written_over_while_it_is_opened_is_read_again(scratch, path, monkeypatch):
    save_file({"x": np.zeros(10_000, np.uint8)}, scratch, KEY)
    changes = iter([path.read_bytes()])
    after_each_read(monkeypatch, lambda: [scratch.write_bytes(content) for content in changes])
    with load_file(scratch) as file:
        assert unseal(file["scale"], KEY).item() == 2.5


@pytest.mark.timeout(20)
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(3)}, path, KEY)

    def replace():
        os.utime(path, (0, 0))  # so that it is opened again
        path.unlink()
        os.mkfifo(path)

    after_each_read(monkeypatch, replace)
    with pytest.raises(OSError, match="a regular"):
        load_file(path)


def test_a_file_that_never_holds_still_is_refused(scratch, monkeypatch):
    save_file({"x": np.arange(3)}, scratch, KEY)
    times = iter(range(10**6))
    after_each_read(monkeypatch, lambda: os.utime(scratch, ns=(0, next(times))))
    with pytest.raises(FormatError, match="keeps changing"):
        load_file(scratch)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_pickles_as_its_path(path, mapped):
    with load_file(path, mapped=mapped) as file, pickle.loads(pickle.dumps(file)) as again:
        assert len(pickle.dumps(file)) < 500
        assert again._is_mapped is mapped
        assert list(again) == list(file)
        assert bytes(again["images"].message) == bytes(file["images"].message)


@each("fault", ["chunk", "header", "key", "format", "id"])
def test_an_error_names_its_file(path, scratch, fault):
    scratch.write_bytes(path.read_bytes())
    if fault in {"chunk", "header"}:
        tamper_file(scratch, "images", HEADER_SIZE if fault == "chunk" else 0)
    elif fault == "format":
        scratch.write_bytes(by_hand.container(b"text"))

    def use():
        with load_file(scratch, file_id="0" * 32 if fault == "id" else None) as file:
            unseal(file["images"], Key.generate() if fault == "key" else KEY)

    with pytest.raises((AuthenticationError, UnknownKeyError, FormatError), match=str(scratch)) as caught:
        use()
    again = pickle.loads(pickle.dumps(caught.value))
    assert caught.value.path == again.path == scratch
    if fault in {"chunk", "header"}:
        found = [check.error for check in check_file(scratch, KEY) if check.error]
        assert [error.path for error in found] == [scratch]
        assert str(scratch) in str(found[0])


def test_a_file_that_is_not_mapped_may_be_cut_afterwards(path, scratch):
    scratch.write_bytes(path.read_bytes())
    with load_file(scratch, mapped=False) as file, load_file(path) as mapped:
        os.truncate(scratch, 100)
        assert list(file) == list(mapped)
        assert (file.file_id, file.names) == (mapped.file_id, mapped.names)
        for name in file:
            one, other = (unseal(each[name], KEY).tolist() for each in (file, mapped))
            assert one == other
        assert not any(array.flags.writeable for array in file.plain.values() if array.size)


def test_a_file_that_is_cut_while_it_is_read_is_refused(scratch, monkeypatch):
    save_file({"x": np.zeros(10_000, np.uint8)}, scratch, KEY)
    monkeypatch.setattr(storage, "_version_of", lambda _: ())
    empty_bytes = arrays.empty_bytes

    def cut(size):
        os.truncate(scratch, 5000)
        return empty_bytes(size)

    monkeypatch.setattr(arrays, "empty_bytes", cut)
    with pytest.raises(FormatError, match="file size"):
        load_file(scratch, mapped=False)


def test_an_open_file_keeps_no_descriptor(path):
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = [load_file(path) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert unseal(files[19]["scale"], KEY).item() == 2.5


def test_a_map_goes_with_the_last_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(3)}, path, Key.generate())
    file = load_file(path)
    tensor = file["x"]
    file.close()
    del file
    gc.collect()
    assert str(path) in Path("/proc/self/maps").read_text()
    assert len(bytes(tensor.message)) == tensor.message.nbytes
    del tensor
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_too_many_open_files_are_reported_as_that(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(3)}, path, Key.generate())
    load_file(path)
    with room_for(20), ExitStack() as taken:
        last = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(OSError, match="Too many"):  # noqa: PT012 - fills the table first
            while True:
                taken.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match=rf"Too many open files: .*{path.name}") as caught:
            load_file(path)
        assert caught.value.errno == errno.EMFILE
        os.close(last)
        load_file(path)  # one is enough
