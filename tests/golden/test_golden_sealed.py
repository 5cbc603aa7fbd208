"""Sealed files and folders of earlier versions open, with fastrack and without."""

import hashlib
import json

import golden_contents as contents
import pytest
import safetensors
from golden_files import HERE, alter, key_id, load_keys, opens, owner_key
from helpers import by_hand
from helpers.by_hand import sets

import fastrack
from fastrack.errors import FastrackError

# Sealed files.


def read_by_hand(path, secret):
    """Open the sealed tensors of a file with only safetensors and cryptography."""
    file = by_hand.sealed.parse(path.read_bytes())
    opened = by_hand.sealed.open_all(file, [secret], file.kind)
    claims = {name: claim for name, (claim, _) in file.sealed.items()}
    return {name: (claim["dtype"], tuple(claim["shape"]), opened[name]) for name, claim in claims.items()}


def read_plain(path):
    """Read a safetensors file byte by byte: dtype, shape and content of each tensor, and the metadata."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = entry["dtype"], tuple(entry["shape"]), data[start + first : start + last]
    return found, metadata


def expected(described):
    return {name: (*found, contents.tensor_bytes(name, *found)) for name, found in described.items()}


SEALED = {
    "dtypes-256": ("owner256", contents.DTYPES, {}, contents.METADATA),
    "dtypes-128": ("owner128", contents.DTYPES, {}, contents.METADATA),
    "shapes-256": ("owner256", contents.SHAPES, contents.PLAIN, contents.METADATA),
    "shapes-128": ("owner128", contents.FEW_SHAPES, contents.PLAIN, contents.METADATA),
    "moved": ("owner256", contents.MOVED, {}, {}),
    "single": ("owner256", {contents.SINGLE[0]: contents.SINGLE[1:]}, {}, {}),
    "npy": ("owner256", {contents.ARRAY[0]: contents.ARRAY[1:]}, {}, {}),
    "npz": ("owner256", contents.ARRAYS, {}, {}),
    "rekeyed": ("next256", contents.ARRAYS, {}, {}),
}


@opens(*(f"sealed/{name}.safetensors" for name in SEALED))
def test_a_sealed_file_opens(golden, tmp_path):
    keys = load_keys(golden)
    for name, (key, tensors, plain, metadata) in SEALED.items():
        path, target = golden(f"sealed/{name}.safetensors"), tmp_path / "plain.safetensors"
        fastrack.verify_file(path, keys=keys[key])
        fastrack.unseal_file(path, target, keys[key], plain=plain)
        assert read_plain(target) == (expected(tensors | plain), metadata), name
        assert read_by_hand(path, contents.SECRETS[key]) == expected(tensors), name
        with fastrack.load_file(path) as file:
            assert (file.key_id, file.metadata) == (keys[key].id, metadata)
            assert {each: (file[each].dtype, file[each].shape) for each in file} == tensors
            assert {each: file.plain[each].tobytes() for each in file.plain} == {
                each: contents.tensor_bytes(each, *found) for each, found in plain.items()
            }
            for each, (dtype, shape) in tensors.items():
                if dtype not in contents.NUMPY:
                    continue
                opened = fastrack.unseal(file[each], keys[key], framework="numpy")
                wanted = contents.tensor(each, dtype, shape)
                moved = fastrack.to_device(file[each], keys=keys[key], framework="numpy")
                assert (opened.dtype, opened.shape, opened.tobytes()) == (wanted.dtype, shape, wanted.tobytes())
                assert moved.tobytes() == wanted.tobytes()
                if shape and shape[0] > 1:
                    rows = fastrack.unseal(file[each][[-1, 0]], keys[key], framework="numpy")
                    assert rows.tobytes() == wanted[[-1, 0]].tobytes()


def test_a_file_with_the_guard_opens(tmp_path):
    path, secret = tmp_path / "guarded.safetensors", contents.SECRETS["owner256"]
    path.write_bytes((HERE / "since-0.1" / path.name).read_bytes())
    assert read_by_hand(path, secret) == expected(contents.ARRAYS)
    with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack: open it with "):
        safetensors.safe_open(path, framework="numpy")
    with fastrack.load_file(path) as file:
        assert file.metadata == {"format": "pt"}
        for name in file:
            opened = fastrack.unseal(file[name], fastrack.Key.from_bytes(secret), framework="numpy")
            assert opened.tobytes() == contents.tensor_bytes(name, *contents.ARRAYS[name])


@opens("sealed/dtypes-*.safetensors")
def test_every_dtype_that_torch_has_opens(golden):
    torch = pytest.importorskip("torch")
    for bits in (256, 128):
        key = fastrack.Key.load(golden(f"keys/owner{bits}"))
        with fastrack.load_file(golden(f"sealed/dtypes-{bits}.safetensors")) as file:
            for name, (dtype, shape) in contents.DTYPES.items():
                try:
                    opened = fastrack.unseal(file[name], key, framework="torch")
                except TypeError:
                    assert dtype.startswith(("F4", "F6", "F8")), "torch has it, in all versions"
                    continue
                content = opened.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert content == contents.tensor_bytes(name, dtype, shape)


@opens("sealed/dtypes-256.safetensors")
def test_the_files_have_every_dtype(golden):
    with fastrack.load_file(golden("sealed/dtypes-256.safetensors")) as file:
        assert {tensor.dtype for tensor in file.values()} == set(contents.BITS)


@opens("sealed/whole.bin.safetensors", "sealed/stream.safetensors")
def test_files_that_were_sealed_whole_open(golden, tmp_path):
    for path, key, name, wanted in (
        (golden("sealed/whole.bin.safetensors"), "owner128", "whole.bin", contents.WHOLE_FILE),
        (golden("sealed/stream.safetensors"), "owner256", "stdin", contents.STREAM),
    ):
        opener = fastrack.Key.load(golden(f"keys/{key}"))
        fastrack.unseal_file(path, tmp_path / "out", opener)
        assert (tmp_path / "out").read_bytes() == wanted
        with fastrack.load_file(path) as sealed, fastrack.open_bytes(sealed[name], opener) as file:
            assert file.seek(len(wanted) - 700) == len(wanted) - 700
            assert file.read() == wanted[-700:]
        assert read_by_hand(path, contents.SECRETS[key]) == {name: ("U8", (len(wanted),), wanted)}


@opens("sealed/single.safetensors")
def test_a_tensor_that_was_stored_by_itself_opens(golden):
    data = golden("sealed/single.safetensors").read_bytes()
    sealed = fastrack.SealedTensor.from_bytes(data)
    opened = fastrack.unseal(sealed, owner_key(golden), framework="numpy")
    assert opened.tobytes() == contents.tensor_bytes(*contents.SINGLE)
    # 0.1 and 0.2 wrote no guard.
    stored, again = by_hand.drop_guard(data), by_hand.drop_guard(sealed.to_bytes())
    start, stop = (8 + int.from_bytes(each[:8], "little") for each in (stored, again))
    assert json.loads(again[8:stop]) == json.loads(stored[8:start])
    assert again[stop:] == stored[start:]


FOLDERS = ("sealed", "folder", "training", "data", "manifests")  # tours have keys of their own


@opens(*(f"{folder}/*.safetensors" for folder in FOLDERS), "folder/fastrack.folder")
def test_every_sealed_file_opens_without_fastrack(golden):
    keys = {key.id: key for key in load_keys(golden).values()}
    secrets = {key_id(secret): secret for secret in contents.SECRETS.values()}
    for name in golden.list():
        if not name.endswith((".safetensors", ".folder")) or not name.startswith(FOLDERS):
            continue
        with fastrack.load_file(golden(name)) as file:
            found = read_by_hand(golden(name), secrets[file.key_id])
            assert found.keys() == set(file)
            for each, tensor in file.items():
                assert (tensor.dtype, tensor.shape) == found[each][:2]
                if tensor.dtype in contents.NUMPY:
                    assert fastrack.unseal(tensor, keys, framework="numpy").tobytes() == found[each][2]


# Folders of models.


@opens("folder/*")
def test_a_sealed_folder_opens(golden, tmp_path):
    path, key, wanted = golden("folder"), owner_key(golden), contents.folder()
    folder = fastrack.load_folder(path, key)
    folder.verify(key)
    assert set(folder.files) == set(wanted)
    for name, content in wanted.items():
        if name not in contents.SEALED_IN_FOLDER:
            assert folder.read(name) == content
        elif not name.endswith(".safetensors"):
            with folder.open(name) as file:
                assert fastrack.unseal(file[name], key, framework="numpy").tobytes() == content
    fastrack.unseal_folder(path, tmp_path / "back", key)
    back = {file.relative_to(tmp_path / "back").as_posix(): file for file in (tmp_path / "back").rglob("*")}
    assert {name: file.read_bytes() for name, file in back.items() if file.is_file()} == wanted
    files = {name: (path / name).read_bytes() for name in ("fastrack.folder", *wanted)}
    found = sets.read_folder(files, contents.SECRETS["owner256"])["files"]
    assert found == {name: hashlib.sha256(content).hexdigest() for name, content in wanted.items()}
    weights = folder.weights()
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()} == contents.WEIGHTS
    assert set(folder.weights("adapter")) == {"lora_A", "lora_B"}


@opens("folder/config.json", "folder/pytorch_model.bin", "folder/fastrack.folder", "folder/model-*")
def test_a_sealed_folder_is_refused_if_a_file_was_altered_or_is_gone(golden):
    key = owner_key(golden)
    weights = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    for name in ("config.json", "pytorch_model.bin", *weights):
        path = golden(f"folder/{name}")
        content = path.read_bytes()
        alter(path)
        with pytest.raises(FastrackError):
            fastrack.load_folder(golden("folder"), key).verify(key)
        path.unlink()
        with pytest.raises(FastrackError):
            fastrack.load_folder(golden("folder"), key).verify(key)
        path.write_bytes(content)
    fastrack.load_folder(golden("folder"), key).verify(key)
    alter(golden("folder/fastrack.folder"))
    with pytest.raises(FastrackError):
        fastrack.load_folder(golden("folder"), key)
