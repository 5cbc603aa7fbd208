"""Writing files: whole or not at all, slab by slab, and plain again when they are unsealed."""

import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import stat
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from pathlib import Path
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from helpers import by_hand, file_systems
from helpers.cases import each
from helpers.processes import largest_file
from helpers.tampering import tamper_file, tampered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key, check_file, load_file, rekey_file, save_file, seal_file, unseal, unseal_file
from fastrack._files import unseal_file as unsealing
from fastrack._files import writer
from fastrack._tensors import arrays
from fastrack._util import atomic
from fastrack.distributed import CheckpointWriter
from fastrack.errors import AuthenticationError, FastrackError, FormatError, UnknownKeyError
from fastrack.format import CHUNK_SIZE, chunk_offset

SECRET = bytes(range(80, 112))
KEY = Key.from_bytes(SECRET)
ROOT = Path(fastrack.__file__).parents[1]
TENSORS = {
    "images": np.arange(40_000, dtype=np.float32).reshape(400, 100),
    "labels": np.arange(400, dtype=np.int64) % 7,
    "names": np.frombuffer(b"seven", np.uint8),
    "scale": np.array(0.25),
    "nothing": np.empty((3, 0), np.int16),
    "half": np.arange(50, dtype=ml_dtypes.bfloat16),
}


@pytest.fixture
def target(tmp_path):
    (tmp_path / "new").mkdir()
    return tmp_path / "new" / "out.safetensors"


@pytest.fixture
def small_slabs(limited):
    limited(file_slab=2 * CHUNK_SIZE)


def opened(path, key=KEY):
    with load_file(path) as file:
        return {
            name: unseal(file[name], key, framework="numpy") if name in file else file.plain[name]
            for name in file.names
        }


def same(one, other):
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape, one[name].tobytes())
        == (other[name].dtype, other[name].shape, other[name].tobytes())
        for name in one
    )


def leftovers(target):
    return sorted(path.name for path in target.parent.iterdir() if path != target)


# Saving


@pytest.mark.usefixtures("small_slabs")
def test_what_was_saved_comes_out(target):
    save_file(TENSORS, target, KEY)
    assert same(opened(target), TENSORS)
    assert not leftovers(target)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize(
    "size",
    [0, 1, CHUNK_SIZE, 2 * CHUNK_SIZE - 1, 2 * CHUNK_SIZE, 2 * CHUNK_SIZE + 1, 4 * CHUNK_SIZE, 4 * CHUNK_SIZE + 5],
)
def test_tensors_that_end_at_a_slab_come_out(target, size):
    plain = np.arange(size, dtype=np.uint32).astype(np.uint8)
    save_file({"x": plain}, target, KEY)
    assert np.array_equal(opened(target)["x"], plain)
    unseal_file(target, target, KEY)
    assert np.array_equal(safetensors.numpy.load_file(target)["x"], plain)


def test_torch_tensors_are_saved_as_well(target):
    tensors = {
        "a": torch.randn(30, 4, requires_grad=True),
        "b": torch.arange(12).reshape(3, 4).T,
        "c": torch.zeros(2, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "d": torch.randn(5).to(torch.float8_e4m3fn),
        "e": torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
    }
    save_file(tensors, target, KEY)
    with load_file(target) as file:
        for name, tensor in tensors.items():
            back = unseal(file[name], KEY, framework="torch")
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            dense = tensor.detach().resolve_conj().contiguous()
            assert torch.equal(back.view(torch.uint8), dense.view(torch.uint8))


def test_no_tensors_make_a_file_too(target):
    save_file({}, target, KEY)
    with load_file(target) as file:
        assert len(file) == 0
        assert file.key_id == KEY.id


def test_tensors_may_be_left_in_plain(target):
    save_file(TENSORS, target, KEY, plain=["labels", "half"])
    with load_file(target) as file:
        assert set(file.plain) == {"labels", "half"}
    assert same(opened(target), TENSORS)
    content = target.read_bytes()
    assert TENSORS["labels"].tobytes() in content
    assert TENSORS["images"][:4].tobytes() not in content


def test_names_to_leave_in_plain_must_be_there_and_be_several(target):
    with pytest.raises(KeyError, match="label, x"):
        save_file(TENSORS, target, KEY, plain=["x", "labels", "label"])
    with pytest.raises(TypeError, match=r"Give \['ab'\]"):
        save_file({"a": TENSORS["scale"], "b": TENSORS["scale"]}, target, KEY, plain="ab")
    assert not target.exists()


def test_metadata_goes_with_the_file(target):
    metadata = {"licence": "CC0", "größe": '"1"\n', "": ""}
    save_file(TENSORS, target, KEY, metadata=metadata)
    with load_file(target) as file:
        assert file.metadata == metadata
    target.write_bytes(by_hand.drop_guard(target.read_bytes()))
    with safetensors.safe_open(target, framework="numpy") as file:
        assert metadata.items() <= file.metadata().items()


NO_TEXT, NO_UNICODE = (TypeError, "metadata"), (FormatError, "Unicode")


@each(
    ("name", "metadata", "error", "match"),
    [
        *((name, {}, *NO_TEXT) for name in (5, b"x", None)),
        ("x", {"epoch": 5}, *NO_TEXT),
        ("x", {5: "epoch"}, *NO_TEXT),
        ("\ud800", {}, *NO_UNICODE),
        ("x", {"\ud800": ""}, *NO_UNICODE),
        ("x", {"a": "b\udfff"}, *NO_UNICODE),
        ("x", {"fastrack.key": "x"}, FormatError, "fastrack.key"),
        ("__metadata__", {}, FormatError, "'__metadata__'"),
    ],
)
@each("plain", [False, True])
def test_names_and_metadata_that_cannot_be_stored_are_refused(target, name, metadata, error, match, plain):
    with pytest.raises(error, match=match):
        save_file({name: np.zeros(3)}, target, KEY, plain=[name] if plain else (), metadata=metadata)
    assert not target.exists()
    assert not leftovers(target)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=5, unique=True),
    metadata=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(
            lambda key: not key.startswith("fastrack.")  # reserved
        ),
        st.just("ü\0\u2028"),
    ),
    plain=st.sets(st.integers(0, 4)),
)
def test_any_names_and_metadata_come_out(tmp_path, names, metadata, plain):
    tensors = {name: np.array([place], np.int16) for place, name in enumerate(names)}
    left = [name for place, name in enumerate(names) if place in plain]
    save_file(tensors, tmp_path / "any", KEY, plain=left, metadata=metadata)
    assert same(opened(tmp_path / "any"), tensors)
    with load_file(tmp_path / "any") as file:
        assert file.metadata == metadata
        assert set(file.plain) == set(left)


def test_a_header_that_nobody_could_read_is_not_written(target, limited):
    limited(file_header=1000)
    with pytest.raises(FormatError, match="header"):
        save_file({str(i): TENSORS["scale"] for i in range(20)}, target, KEY)
    assert not leftovers(target)


@each("tensor", [None, [1, 2], np.array([None]), np.zeros(3, ">i4"), torch.zeros(2, dtype=torch.complex128)])
def test_what_is_no_tensor_is_refused_before_a_file_is_begun(target, tensor):
    given = {"good": TENSORS["scale"], "bad": tensor}
    with pytest.raises(TypeError, match=r"^'bad'"):
        save_file(given, target.parent / "missing" / target.name, KEY)  # where no file can be begun
    with pytest.raises(FileNotFoundError):
        save_file({"good": TENSORS["scale"]}, target.parent / "missing" / target.name, KEY)


def test_every_file_has_an_id_of_its_own_and_its_tensors_share_no_salt(target):
    ids, salts = set(), []
    for _ in range(10):
        save_file({str(i): TENSORS["scale"] for i in range(3)}, target, KEY)
        with load_file(target) as file:
            ids.add(file["0"].context.file)
            salts += [bytes(file[name].message[:24]) for name in file]
    assert len(ids) == 10
    assert len(set(salts)) == 30


def test_progress_counts_every_byte_once(target):
    seen = []
    save_file(TENSORS, target, KEY, plain=["labels"], progress=seen.append)
    assert sum(seen) == sum(array.nbytes for array in TENSORS.values())
    del seen[:]
    unseal_file(target, target, KEY, plain=["labels"], progress=seen.append)
    assert sum(seen) == sum(array.nbytes for array in TENSORS.values())


def test_every_tensor_lies_at_a_multiple_of_its_element(target):
    arrays = {name: np.zeros(3, name) for name in ("u1", "f8", "i2", "f4", "c8", "?")}
    save_file(arrays, target, KEY, plain=arrays)
    with load_file(target) as file:
        for name in file.names:
            assert file.stored(name)[2].ctypes.data % np.dtype(name).itemsize % 8 == 0


# Sealing files


def test_a_safetensors_file_is_sealed_with_its_metadata(tmp_path, target):
    source = tmp_path / "plain.safetensors"
    safetensors.torch.save_file({"w": torch.randn(30, 50).bfloat16(), "b": torch.zeros(5)}, source, {"format": "pt"})
    seal_file(source, target, KEY, plain=["b"])
    with load_file(target) as file:
        assert file.metadata == {"format": "pt"}
        assert (set(file), set(file.plain)) == ({"w"}, {"b"})
    assert same(opened(target), opened(source))


def by_other_readers(path):
    return [
        lambda: safetensors.safe_open(path, "numpy"),
        lambda: safetensors.numpy.load_file(path),
        lambda: safetensors.torch.load_file(path),
        lambda: safetensors.torch.load(path.read_bytes()),
        lambda: torch.load(path, weights_only=True),
        lambda: torch.load(path, weights_only=False),
    ]


def test_what_looks_like_weights_is_refused_by_other_readers_with_what_to_do(tmp_path, target):
    source, key = tmp_path / "plain.safetensors", Key.generate()
    other, model = tmp_path / "other.safetensors", tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": TENSORS["images"]}, source, {"format": "pt"})
    seal_file(source, target, KEY)
    rekey_file(target, other, KEY, key=key)
    fastrack.save_model(torch.nn.Linear(3, 2), model, KEY)
    for path, owner in ((target, KEY), (other, key), (model, KEY)):
        for load in by_other_readers(path):
            with pytest.raises(Exception, match=r"sealed by fastrack: open it with fastrack\.load_model, "):
                load()
        fastrack.verify_file(path, owner)
        with load_file(path) as file:
            assert file.metadata == ({} if path is model else {"format": "pt"})
            assert "fastrack.guard" not in file.names
    unseal_file(target, target, KEY)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_and_what_says_no_format_are_refused_by_other_readers_too(tmp_path, target):
    whole, array, group = tmp_path / "notes.txt", tmp_path / "a.npy", tmp_path / "group"
    whole.write_bytes(b"text")
    np.save(array, TENSORS["images"])
    safetensors.numpy.save_file({"x": TENSORS["images"]}, tmp_path / "plain.safetensors")
    for path in (whole, array, tmp_path / "plain.safetensors"):
        seal_file(path, tmp_path / f"{path.name}.sealed.safetensors", KEY)
    save_file({"x": TENSORS["images"], "p": TENSORS["labels"]}, target, KEY, plain=["p"], metadata={"note": "1"})
    fastrack.save_checkpoint(tmp_path / "run.sealed.safetensors", {"step": 1, "w": torch.ones(3)}, KEY)
    (tmp_path / "one.sealed.safetensors").write_bytes(fastrack.seal(TENSORS["images"], KEY).to_bytes())
    group.mkdir()
    torch.distributed.checkpoint.save({"w": torch.ones(3)}, storage_writer=CheckpointWriter(group, KEY), no_dist=True)
    for path in (target, *tmp_path.glob("*.sealed.safetensors"), *group.glob("*.safetensors")):
        for load in by_other_readers(path):
            with pytest.raises(Exception, match=r"sealed by fastrack: open it with fastrack\.load_model, "):
                load()
        fastrack.load_file(path)
    assert fastrack.load_checkpoint(tmp_path / "run.sealed.safetensors", KEY)["step"] == 1


def test_shards_of_data_sets_stay_readable_by_any_reader_of_safetensors(tmp_path):
    other = Key.generate()
    fastrack.import_samples([{"x": 1.5, "text": "one"}] * 3, tmp_path / "data", KEY)
    (shard,) = (tmp_path / "data").glob("*.safetensors")
    fastrack.index_dataset(tmp_path / "data", KEY)
    rekey_file(shard, tmp_path / "other.safetensors", KEY, key=other)
    for path in (shard, tmp_path / "data" / "fastrack.index", tmp_path / "other.safetensors"):
        for load in by_other_readers(path)[:4]:
            load()
    assert b"one" not in shard.read_bytes()


def test_the_guard_is_nothing_that_anyone_acts_on(target):
    save_file({"x": TENSORS["images"]}, target, KEY, metadata={"format": "pt"})
    guarded = target.read_bytes()
    entry = {
        "dtype": "sealed by fastrack: open it with fastrack.load_model, fastrack.safe_open or fastrack.mount_folder",
        "shape": [0],
        "data_offsets": [0, 0],
    }
    header = json.loads(guarded[8 : 8 + int.from_bytes(guarded[:8], "little")])
    assert list(header.items())[1] == ("fastrack.guard", entry)  # after the metadata, as written into the format
    last = by_hand.container({name: header[name] for name in ("__metadata__", "x", "fastrack.guard")})
    for content in (guarded, by_hand.drop_guard(guarded), last + guarded[-header["x"]["data_offsets"][1] :]):
        target.write_bytes(content)
        with load_file(target) as file:
            assert list(file.names) == ["x"]
            assert np.array_equal(unseal(file["x"], KEY, framework="numpy"), TENSORS["images"])


@each(
    "altered",
    [
        {"dtype": "sealed by fastrack: open it with curl"},
        {"dtype": "U8"},
        {"shape": [1]},
        {"shape": [False]},
        {"shape": []},
        {"data_offsets": [0, 1]},
        {"data_offsets": [0, 0.0]},
        {"data_offsets": [1, 1]},
        {"more": 1},
    ],
)
def test_another_entry_in_the_place_of_the_guard_is_refused(target, altered):
    save_file({"x": TENSORS["images"]}, target, KEY, metadata={"format": "pt"})
    content = target.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header["fastrack.guard"] |= altered
    target.write_bytes(by_hand.container(header, content[start:]))
    if altered == {"dtype": "U8"}:  # a plain tensor of no bytes, as a file of 0.1 may have it
        with load_file(target) as file:
            assert "fastrack.guard" in file.plain
    else:
        with pytest.raises(FormatError, match=r"fastrack\.guard"):
            load_file(target)


def test_no_tensor_takes_the_name_of_the_guard(target):
    with pytest.raises(FormatError, match="reserved"):
        save_file({"fastrack.guard": TENSORS["images"]}, target, KEY)


@pytest.mark.slow
def test_accelerate_refuses_sealed_weights_in_place_of_plain_ones(tmp_path, target):
    accelerate = pytest.importorskip("accelerate")
    model, source = torch.nn.Linear(3, 2), tmp_path / "plain.safetensors"
    safetensors.torch.save_file(model.state_dict(), source, {"format": "pt"})
    accelerate.load_checkpoint_in_model(model, str(source))
    seal_file(source, target, KEY)
    with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):
        accelerate.load_checkpoint_in_model(model, str(target))


def test_types_that_numpy_lacks_pass_through_files(tmp_path, target):
    header = {
        "a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]},
        "b": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [3, 6]},
    }
    (tmp_path / "odd.safetensors").write_bytes(by_hand.container(header, b"abcdef"))
    seal_file(tmp_path / "odd.safetensors", target, KEY, plain=["b"])
    assert [check.error for check in check_file(target, KEY)] == [None]
    unseal_file(target, target, KEY, plain=["b"])
    with load_file(target) as file:
        assert file.stored("a")[:2] == ("F4", (2, 3))
        assert file.stored("a")[2].tobytes() + file.stored("b")[2].tobytes() == b"abcdef"


FORTRAN = np.asfortranarray(TENSORS["images"])


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("array", [*map(TENSORS.get, ["images", "scale", "nothing"]), FORTRAN, np.zeros((3, 2), bool)])
def test_a_numpy_file_is_sealed_under_its_own_name(tmp_path, target, array):
    np.save(tmp_path / "points.npy", array)
    seal_file(tmp_path / "points.npy", target, KEY)
    assert same(opened(target), {"points": array})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_of_numpy_files_is_sealed_name_by_name(tmp_path, target, save):
    arrays = {name: array for name, array in TENSORS.items() if name != "half"}
    arrays["fortran"] = FORTRAN
    save(tmp_path / "all.npz", **arrays)
    seal_file(str(tmp_path / "all.npz"), str(target), KEY, plain=["labels"])
    assert same(opened(target), arrays)


@pytest.mark.parametrize("content", [b"", b"text", bytes(range(256)) * 300])
def test_any_other_file_is_sealed_whole(tmp_path, target, content):
    (tmp_path / "notes.bin").write_bytes(content)
    seal_file(tmp_path / "notes.bin", target, KEY)
    assert opened(target)["notes.bin"].tobytes() == content


def test_a_file_may_be_sealed_and_unsealed_in_place(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"x": TENSORS["images"]}, path)
    seal_file(path, path, KEY)
    assert same(opened(path), {"x": TENSORS["images"]})
    unseal_file(path, path, KEY)
    assert same(safetensors.numpy.load_file(path), {"x": TENSORS["images"]})


def numpy_file(header, body=bytes(12)):
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + body


def zipped(content, name="x.npy"):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr(name, content)
    return memory.getvalue()


def saved(save, **arrays):
    memory = io.BytesIO()
    save(memory, *arrays.values()) if save is np.save else save(memory, **arrays)
    return memory.getvalue()


SOUND_NPY = saved(np.save, x=np.arange(3.0))
SOUND_NPZ = saved(np.savez, x=np.arange(3.0))
UNSOUND = [
    b"",
    b"text",
    SOUND_NPY[:20],
    SOUND_NPY[:-1],
    numpy_file(b"\0"),
    numpy_file(b"(" * 3000),
    numpy_file(b"{'descr':'<f4'("),
    numpy_file(b"{'descr':'<f4,,','fortran_order':False,'shape':()}"),
    numpy_file(b"{'descr':[('a',)],'fortran_order':False,'shape':()}"),
    *(
        numpy_file(b"{'descr':'<f4','fortran_order':False,'shape':%b}" % shape)
        for shape in (b"(-1,)", b"(True,)", b"(9999999999999999999999,)", b"(4611686018427387904, 4)")
    ),
    saved(np.save, x=np.array([{"an": "object"}])),
]


UNSOUND_NPZ = [*map(zipped, UNSOUND[2:]), b"", SOUND_NPY, SOUND_NPZ[:100], b"PK\3\4" + bytes(60)]


@each(
    ("name", "content", "match"),
    [
        *(("x.npy", content, r"x\.npy .*sealed") for content in [*UNSOUND, SOUND_NPZ]),
        *(("x.npz", content, r"x\.npz .*sealed") for content in UNSOUND_NPZ),
        ("x.npz", SOUND_NPZ.replace(b"@", b"A"), r"x\.npz .*sealed"),
        ("x.npz", zipped(b"text", "readme.txt"), r"'readme\.txt'"),
        ("x.safetensors", b"text", "a safetensors"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_what_is_not_what_its_suffix_says_is_refused(tmp_path, target, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=match):
        seal_file(tmp_path / name, target, KEY)
    assert not leftovers(target)


def test_an_archive_with_a_member_twice_is_refused(tmp_path, target):
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        warnings.simplefilter("ignore")
        for _ in range(2):
            archive.writestr("x.npy", SOUND_NPY)
    with pytest.raises(FormatError, match="there twice"):
        seal_file(tmp_path / "x.npz", target, KEY)


OUTSIDE = ["../x", "a/../../x", "/x", "..", "\\x", "a\\..\\x", "C:x", "c:\\x", "a\0b"]


@each("name", OUTSIDE)
def test_no_archive_has_a_member_that_leads_out_of_its_folder(tmp_path, target, name):
    save_file({name: np.arange(3)}, target, KEY)
    with pytest.raises(FormatError, match="unpacked"):
        unseal_file(target, tmp_path / "back.npz", KEY)
    assert not (tmp_path / "back.npz").exists()
    unseal_file(target, tmp_path / "back.safetensors", KEY)
    (tmp_path / "x.npz").write_bytes(zipped(SOUND_NPY, f"{name}.npy".replace("\0", "/../")))
    with pytest.raises(FormatError, match="unpacked"):
        seal_file(tmp_path / "x.npz", tmp_path / "new", KEY)


@pytest.mark.parametrize("name", ["a..b", "a/b", "...", "model.layers.0", ".hidden", "layer:0"])
def test_other_names_stay_in_an_archive(tmp_path, target, name):
    save_file({name: np.arange(3)}, target, KEY)
    unseal_file(target, tmp_path / "back.npz", KEY)
    seal_file(tmp_path / "back.npz", target, KEY)
    assert same(opened(target), {name: np.arange(3)})


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_unpacked_slab_by_slab_as_it_is_sealed(tmp_path, target, monkeypatch, save):
    arrays = {"long": np.random.default_rng(0).random(50_000), "row": np.asfortranarray(np.ones((1, 9)))}
    save(tmp_path / "x.npz", **arrays)
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("unpacked whole"))
    seal_file(tmp_path / "x.npz", target, KEY)
    monkeypatch.undo()
    assert same(opened(target), arrays)


@pytest.mark.parametrize("size", [3, 2048, 50_000])
def test_an_archive_whose_checksum_is_wrong_is_refused(tmp_path, target, size):
    content = bytearray(saved(np.savez, x=np.arange(float(size))))
    content[content.index(np.arange(float(size)).tobytes()) + 8] ^= 1
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(FormatError, match="Bad CRC-32"):
        seal_file(tmp_path / "x.npz", target, KEY)
    assert not leftovers(target)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".bin"])
def test_a_source_is_opened_once(tmp_path, target, monkeypatch, suffix):
    source = tmp_path / f"x{suffix}"
    source.write_bytes(SOUND_NPZ if suffix == ".npz" else SOUND_NPY)
    given = os.open

    def then_replace(path, *rest, **options):
        descriptor = given(path, *rest, **options)
        if path == str(source) and source.is_file():
            source.unlink()
            os.mkfifo(source)
        return descriptor

    monkeypatch.setattr(os, "open", then_replace)
    seal_file(source, target, KEY)
    assert not source.is_file()
    assert len(opened(target)) == 1


@each("suffix", [".safetensors", ".npy", ".npz", ".bin"])
def test_a_missing_source_is_missing(tmp_path, target, suffix):
    with pytest.raises(FileNotFoundError):
        seal_file(tmp_path / f"missing{suffix}", target, KEY)


# Unsealing files


def test_an_unsealed_file_is_an_ordinary_safetensors_file(tmp_path, target):
    save_file(TENSORS, target, KEY, plain=["labels"], metadata={"note": "kept"})
    back = tmp_path / "back.safetensors"
    unseal_file(target, back, KEY, plain=["labels"])
    assert same(safetensors.numpy.load_file(back), TENSORS)
    with safetensors.safe_open(back, framework="numpy") as file:
        assert file.metadata() == {"note": "kept"}


def test_chosen_tensors_are_unsealed_alone(tmp_path, target):
    save_file(TENSORS, target, KEY, plain=["labels"])
    back = tmp_path / "back.safetensors"
    unseal_file(target, back, KEY, names=["images", "scale"])
    assert same(safetensors.numpy.load_file(back), {name: TENSORS[name] for name in ("images", "scale")})
    for options in ({"names": ["no such"]}, {"names": ["images"], "plain": ["no such"]}):
        with pytest.raises(KeyError, match="no such"):
            unseal_file(target, back, KEY, **options)


@pytest.mark.parametrize("names", [None, ["labels"], ["images", "labels"]])
def test_a_plain_tensor_is_unsealed_only_if_it_is_named_as_one(tmp_path, target, names):
    save_file(TENSORS, target, KEY, plain=["labels", "half"])
    back = tmp_path / "back.safetensors"
    for allowed in ([], ["half"]):
        with pytest.raises(AuthenticationError) as caught:
            unseal_file(target, back, KEY, names=names, plain=allowed)
        assert caught.value.tensor == "labels"
        assert not back.exists()
    with load_file(target) as file:
        unseal_file(file, back, KEY, names=names, plain=file.plain)
    assert same(safetensors.numpy.load_file(back), {name: TENSORS[name] for name in names or TENSORS})


def test_a_file_without_anything_sealed_is_not_unsealed(tmp_path, target):
    save_file(TENSORS, target, KEY, plain=TENSORS)
    with pytest.raises(FormatError, match="got none"):
        unseal_file(target, tmp_path / "back.safetensors", KEY, plain=TENSORS)
    assert not (tmp_path / "back.safetensors").exists()


def test_a_file_that_was_opened_is_unsealed_though_another_takes_its_place(tmp_path, target):
    save_file({"x": TENSORS["images"]}, target, KEY)
    with load_file(target) as file:
        save_file({"x": np.zeros(3)}, target, KEY)
        unseal_file(file, tmp_path / "x.npy", KEY)
    assert np.array_equal(np.load(tmp_path / "x.npy"), TENSORS["images"])


def test_the_suffix_of_the_target_says_what_is_written(tmp_path, target):
    tensors = {"images": TENSORS["images"], "names": TENSORS["names"]}
    save_file(tensors, target, KEY)
    unseal_file(target, tmp_path / "back.npz", KEY)
    with np.load(tmp_path / "back.npz") as back:
        assert same(dict(back), tensors)
    unseal_file(target, tmp_path / "images.npy", KEY, names=["images"])
    assert np.array_equal(np.load(tmp_path / "images.npy"), tensors["images"])
    unseal_file(target, tmp_path / "names.txt", KEY, names=["names"])
    assert (tmp_path / "names.txt").read_bytes() == tensors["names"].tobytes()
    for name in ("both.npy", "both.txt"):
        with pytest.raises(FormatError, match="got 2"):
            unseal_file(target, tmp_path / name, KEY)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("chunk", [0, 1, 2, 9])
def test_a_bad_chunk_leaves_no_plaintext_behind(tmp_path, target, chunk):
    save_file({"images": TENSORS["images"]}, target, KEY)
    tamper_file(target, "images", chunk_offset(chunk))
    back = tmp_path / "back"
    back.mkdir()
    (back / "x.npy").write_bytes(b"old")
    with pytest.raises(AuthenticationError) as caught:
        unseal_file(target, back / "x.npy", KEY)
    assert (caught.value.tensor, caught.value.chunk) == ("images", chunk)
    assert (back / "x.npy").read_bytes() == b"old"
    assert not leftovers(back / "x.npy")


@pytest.mark.usefixtures("small_slabs")
def test_no_slab_is_written_before_it_was_authenticated():
    plain = np.random.default_rng(0).integers(1, 256, 6 * CHUNK_SIZE, dtype=np.uint8)
    sealed = fastrack.seal(plain, KEY)
    out = io.BytesIO()
    with pytest.raises(AuthenticationError):
        unsealing.write_plaintext(tampered(sealed, chunk_offset(3)), fastrack.KeyRing(KEY), out)
    assert out.getvalue() == plain[: 2 * CHUNK_SIZE].tobytes()


def test_another_key_unseals_no_file(tmp_path, target):
    save_file(TENSORS, target, KEY)
    for keys in (Key.generate(), None):
        with pytest.raises(UnknownKeyError):
            unseal_file(target, tmp_path / "back.safetensors", keys)
    assert not (tmp_path / "back.safetensors").exists()


# Whole or not at all


OLD = b"what was there before"


@pytest.fixture(params=["first", "again"])
def before(request, target):
    """Write the file that is under the final name before, and must be there still."""
    if request.param == "first":
        return None
    target.write_bytes(OLD)
    return OLD


def untouched(target, before):
    return (target.read_bytes() if target.exists() else None) == before and not leftovers(target)


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_failure_on_the_way_leaves_what_was_there(target, before, error, after):
    calls = []

    def give_up(size):
        calls.append(size)
        if len(calls) == after:
            raise error

    with pytest.raises(error):
        save_file({"images": TENSORS["images"]}, target, KEY, progress=give_up)
    assert untouched(target, before)


def test_a_source_that_fails_on_the_way_leaves_what_was_there(target, before):
    tensors = {"a": TENSORS["images"], "b": torch.zeros(5, device="meta")}
    with pytest.raises(TypeError, match="meta"):
        save_file(tensors, target, KEY)
    assert untouched(target, before)


FULL = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG]


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
@pytest.mark.parametrize("number", [*FULL, errno.EIO])
def test_a_disk_that_is_full_at_the_last_moment_leaves_what_was_there(target, before, monkeypatch, call, number):
    if call == "replace":  # comes last where a file has a temporary name
        file_systems.refuse_unnamed(monkeypatch)
    elif call == "link" and not atomic._UNNAMED:
        pytest.skip("this system has no files without names")
    monkeypatch.setattr(os, call, Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        save_file(TENSORS, target, KEY)
    monkeypatch.undo()
    assert caught.value.errno == number
    if number in FULL:
        assert "free some space and try again; nothing was left of it" in str(caught.value)
        assert caught.value.filename == str(target)
    assert untouched(target, before)


def test_a_disk_that_is_full_on_the_way_leaves_what_was_there(target, before):
    with largest_file(1_000_000), pytest.raises(OSError, match="free some") as caught:
        save_file({"x": np.zeros(3_000_000, np.uint8)}, target, KEY)
    assert caught.value.errno == errno.EFBIG
    assert untouched(target, before)


@pytest.fixture
def little_disk(tmp_path):
    """A file system of 1 MiB."""
    mount, umount = shutil.which("mount"), shutil.which("umount")
    place = tmp_path / "little"
    place.mkdir()
    if not mount or not umount:
        pytest.skip("there is no mount here")
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "fastrack-test", place]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    yield place
    subprocess.run([umount, place], check=True)


def test_a_disk_without_space_leaves_what_was_there(little_disk):
    target = little_disk / "out"
    for before in (None, OLD):
        if before:
            target.write_bytes(before)
        with pytest.raises(OSError, match="free some") as caught:
            save_file({"x": np.zeros(3_000_000, np.uint8)}, target, KEY)
        assert caught.value.errno == errno.ENOSPC
        assert untouched(target, before)
    save_file(TENSORS, target, KEY)
    assert same(opened(target), TENSORS)


def test_a_directory_is_no_target_and_a_missing_one_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        save_file(TENSORS, tmp_path / "missing" / "out", KEY)
    with pytest.raises(ValueError, match="got an empty text"):
        save_file(TENSORS, "", KEY)
    for path in (tmp_path / "folder", ".", "/"):
        with pytest.raises(IsADirectoryError):
            save_file(TENSORS, path, KEY)
    assert not leftovers(tmp_path / "folder")


def test_a_directory_that_cannot_be_synced_holds_the_file_all_the_same(target, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if Path(path) == target.parent:
            raise PermissionError(errno.EACCES, "no listing")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    save_file(TENSORS, target, KEY)
    monkeypatch.undo()
    assert same(opened(target), TENSORS)


def test_short_writes_are_completed():
    class Slow(io.BytesIO):
        def write(self, data):
            return super().write(bytes(data[:7]))

    raw = Slow()
    assert atomic._CompleteWriter(raw).write(bytes(range(100))) == 100
    assert raw.getvalue() == bytes(range(100))


def test_no_error_shows_the_key(tmp_path, target):
    wiped = Key.from_bytes(SECRET)
    wiped.wipe()
    save_file(TENSORS, target, KEY)
    failures = [
        lambda: save_file(TENSORS, tmp_path / "missing" / "x", KEY),
        lambda: save_file({"\ud800": TENSORS["scale"]}, target, KEY),
        lambda: save_file({"x": torch.zeros(3, device="meta")}, target, KEY),
        lambda: save_file({"x": TENSORS["scale"]}, target, wiped),
        lambda: unseal_file(target, tmp_path / "missing" / "x.npz", KEY),
        lambda: unseal_file(target, target, KEY, names=["y"]),
        lambda: seal_file(target, target, KEY),
    ]
    for fail in failures:
        with pytest.raises((FastrackError, OSError, TypeError, KeyError)) as caught:
            fail()
        told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
        assert SECRET.hex() not in told
        assert repr(bytes(SECRET[:8]))[2:-1] not in told


# What takes longer


_HUGE = 3 << 30
_MARKS = {0: b"start", (1 << 30) - 2: b"across", _HUGE - 5: b"end.."}

_SEAL_VERIFY_UNSEAL = """
import json, sys, threading, time
import fastrack
source, sealed, back = sys.argv[1:]

def resident():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))  # in KiB

def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], resident())

done, peak = threading.Event(), [resident()]
watcher = threading.Thread(target=watch)
watcher.start()
try:
    key = fastrack.Key.generate()
    fastrack.seal_file(source, sealed, key)
    errors = [str(check.error) for check in fastrack.check_file(sealed, key) if check.error]
    fastrack.unseal_file(sealed, back, key)
finally:
    done.set()
    watcher.join()
print(json.dumps({"peak": peak[0] * 1024, "errors": errors}))
"""


@pytest.mark.nightly
def test_three_gibibytes_are_sealed_verified_and_unsealed_in_half_of_one(tmp_path):
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("this takes 12 GiB of disk")
    source, sealed, back = (tmp_path / name for name in ("huge", "sealed", "back.safetensors"))
    with source.open("wb") as file:
        for place, mark in _MARKS.items():
            file.seek(place)
            file.write(mark)
    try:
        command = [sys.executable, "-c", _SEAL_VERIFY_UNSEAL, source, sealed, back]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, timeout=300).stdout)
        assert told["errors"] == []
        assert told["peak"] < 512 << 20
        with load_file(back) as file:
            dtype, shape, content = file.stored("huge")
            assert (dtype, shape) == ("U8", (_HUGE,))
            for place, mark in _MARKS.items():
                assert content[place : place + len(mark)].tobytes() == mark
            assert not content[100 : 32 << 20].any()
            del content
    finally:
        for path in (source, sealed, back):
            path.unlink(missing_ok=True)


def forked_in(write, at):
    """Write with a fork in a call of `progress`, from which both processes return. Return what the child was told."""
    parent, calls = os.getpid(), []
    reading, writing = os.pipe()

    def progress(_):
        calls.append(1)
        if len(calls) == at:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads
                calls.append(os.fork())

    told = "nothing"
    try:
        write(progress)
    except fastrack.ClosedError as error:
        told = str(error)
    finally:
        if os.getpid() != parent:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(max(calls), 0)
    assert told == "nothing"
    return answer


@each("at", [1, 2, 3])  # with another tensor to come, or nothing but the name
@each("is_named", [True, False])
@pytest.mark.slow
def test_a_child_that_is_forked_in_the_middle_of_a_file_leaves_it_to_its_parent(target, monkeypatch, is_named, at):
    if is_named:
        file_systems.refuse_unnamed(monkeypatch)
    tensors = {name: np.full(1000, number) for number, name in enumerate("abc")}
    told = forked_in(lambda progress: save_file(tensors, target, KEY, progress=progress), at)
    assert "expected the process that began it" in told
    assert same(opened(target), tensors)
    assert not [*target.parent.glob("*.part")]
    plain = target.with_suffix(".npz")
    assert "expected the process" in forked_in(lambda progress: unseal_file(target, plain, KEY, progress=progress), at)
    assert same(dict(np.load(plain)), tensors)


def test_a_child_seals_no_other_bytes_under_the_key_and_nonce_of_its_parent(limited):
    limited(file_slab=4 * CHUNK_SIZE)
    out = io.BytesIO()
    tensor = writer.PlainTensor.of(np.zeros(3 * writer.SLAB, np.uint8))

    def write(progress):
        writer.write_sealed({"x": tensor}, out, KEY, frozenset(), {}, progress)

    assert "expected the process that began it" in forked_in(write, 1)
    assert len(out.getvalue()) > 3 * writer.SLAB


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_seal_leaves_no_part_of_a_file_under_its_name(tmp_path, target):
    source = tmp_path / "plain.bin"
    with source.open("wb") as file:
        file.truncate(200 << 20)

    def seal(kill_after=None):
        process = multiprocessing.get_context("fork").Process(target=seal_file, args=(source, target, KEY))
        process.start()
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
        process.join(60)
        return process.exitcode

    assert seal() == 0
    moments = random.Random(5)
    killed = 0
    for attempt in range(10):
        before = OLD if attempt % 2 else None
        target.unlink(missing_ok=True)
        if before:
            target.write_bytes(before)
        seal(kill_after=attempt % 3 * moments.uniform(0, 0.1))
        if target.exists() and target.read_bytes()[: len(OLD)] != OLD:
            assert [check.error for check in check_file(target, KEY)] == [None]  # it was done already
        else:
            assert (target.read_bytes() if target.exists() else None) == before
            killed += 1
        for part in leftovers(target):
            assert part.startswith(".fastrack-")  # between its temporary name and its last, or where none is without
            (target.parent / part).unlink()
    assert killed >= 3


@pytest.mark.usefixtures("small_slabs")
def test_an_array_of_another_layout_is_put_in_order_slab_by_slab(tmp_path, target, monkeypatch):
    array = np.asfortranarray(np.random.default_rng(0).random((300, 200)))
    tensors = {
        "half": torch.randn(300, 200).to(torch.bfloat16).t(),
        "complex": torch.randn(30, 200, dtype=torch.complex64).t(),
        "bool": torch.randn(300, 50).t() > 0,
    }
    np.save(tmp_path / "fortran.npy", array)
    with monkeypatch.context() as patch:
        patch.setattr(arrays, "bytes_of", lambda given, **options: pytest.fail("copied whole"))
        seal_file(tmp_path / "fortran.npy", tmp_path / "fortran", KEY)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", lambda given: pytest.fail("copied whole"))
        save_file(tensors, target, KEY)
    assert np.array_equal(opened(tmp_path / "fortran")["fortran"], array)
    with load_file(target) as file:
        assert all(torch.equal(unseal(file[name], KEY), tensor) for name, tensor in tensors.items())


def test_a_file_that_is_replaced_keeps_its_mode(target):
    save_file({"x": np.arange(3)}, target, KEY)
    target.chmod(0o640)
    unseal_file(target, target, KEY)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["back.safetensors", "back.npz", "back.npy", "back.bin"])
def test_a_plaintext_file_is_for_its_owner_alone(tmp_path, target, name):
    save_file({"x": TENSORS["names"]}, target, KEY)
    unseal_file(target, tmp_path / name, KEY)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "npy", "bin"])
def test_a_target_is_left_as_it_was_if_it_may_not_be_replaced(tmp_path, target, suffix):
    target = target.with_suffix(".bin")  # sealed as bytes where it is sealed again
    save_file({"x": TENSORS["names"]}, target, KEY)
    there = tmp_path / f"back.{suffix}"

    def appear(_):
        there.write_bytes(OLD)

    with pytest.raises(FileExistsError):
        unseal_file(target, there, KEY, overwrite=False, progress=appear)
    with pytest.raises(FileExistsError):
        seal_file(target, there, KEY, overwrite=False)
    assert there.read_bytes() == OLD


def test_a_name_may_be_as_long_as_the_file_system_allows(target):
    long = target.with_name("x" * 255)
    save_file({"x": np.arange(3)}, long, KEY)
    assert list(opened(long)) == ["x"]


def test_what_is_no_ordinary_file_is_not_replaced_by_one(target):
    os.mkfifo(target)
    with pytest.raises(OSError, match="no ordinary"):
        save_file({"x": np.arange(3)}, target, KEY)
    assert stat.S_ISFIFO(target.stat().st_mode)


def test_a_key_may_be_the_path_of_its_file(target, tmp_path):
    KEY.save(tmp_path / "owner.key")
    save_file({"x": np.arange(3)}, target, tmp_path / "owner.key")
    assert opened(target, tmp_path / "owner.key")["x"].tolist() == [0, 1, 2]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".bin"])
def test_nothing_waits_for_a_pipe(tmp_path, target, suffix):
    pipe = tmp_path / f"pipe{suffix}"
    os.mkfifo(pipe, 0o600)
    for use in (
        lambda: seal_file(pipe, target, KEY),
        lambda: load_file(pipe),
        lambda: unseal_file(pipe, target, KEY),
        lambda: fastrack.verify_file(pipe, KEY),
    ):
        with pytest.raises(OSError, match="a regular") as caught:
            use()
        assert caught.value.filename == str(pipe)
    assert not target.exists()


def test_a_file_that_gives_more_than_its_size_is_not_sealed_as_an_empty_one(target):
    with pytest.raises(OSError, match="0 bytes"):
        seal_file("/proc/self/status", target, KEY)
    assert not target.exists()


def test_tensors_without_names_are_refused(key, tmp_path):
    with pytest.raises(TypeError, match="expected a mapping of names to tensors, got ndarray"):
        fastrack.save_file(np.ones(3), tmp_path / "x.safetensors", key)
