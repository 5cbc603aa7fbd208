"""Sealed tensors that are stored as they are: in a file of several, bound to it, or as bytes."""

import pickle

import numpy as np
import pytest
from helpers.cases import each
from helpers.tampering import relist, tampered

import fastrack
from fastrack import AuthenticationError, FormatError, Key, load_file, save_file

# Tensors that are sealed already


def test_sealed_tensors_are_stored_as_they_are(tmp_path, key):
    sealed = fastrack.seal(np.arange(5000), key, "x")
    path = tmp_path / "both.safetensors"
    save_file({"x": sealed, "y": np.arange(3), "z": np.ones(2)}, path, key, plain=["z"])
    fastrack.verify_file(path, key)
    with load_file(path) as file:
        assert list(file.plain) == ["z"]
        assert bytes(file["x"].message) == bytes(sealed.message)
        assert fastrack.unseal(file["x"], key, framework="numpy").tolist() == list(range(5000))
        assert fastrack.to_device(file["x"][[3, 9]], keys=key, framework="numpy").tolist() == [3, 9]
        again = pickle.loads(pickle.dumps(file["x"]))
        assert again.binding == file["x"].binding
        save_file(dict(file), tmp_path / "again.safetensors", key)
    fastrack.verify_file(tmp_path / "again.safetensors", key)


def test_tensors_of_several_files_are_no_file_without_the_key(tmp_path, key):
    paths = [tmp_path / "1", tmp_path / "2"]
    for value, path in enumerate(paths, 1):
        save_file({name: fastrack.seal(np.full(100, value), key, name) for name in "xy"}, path, key)
    with load_file(paths[0]) as one, load_file(paths[1]) as two:
        other, message = two["y"], two["y"].message
        entry = {"dtype": "I64", "shape": [100], "file": other.context.file, "binding": other.binding.header.hex()}
        assert one["y"].nbytes == other.nbytes
        data = paths[0].read_bytes().replace(bytes(one["y"].message), bytes(message))
    paths[0].write_bytes(data)
    relist(paths[0], lambda listed, _: listed.update(y=entry))
    with load_file(paths[0]) as file:
        assert fastrack.unseal(file["x"], key).sum() == 100
        for use in (fastrack.unseal, lambda sealed, keys: fastrack.to_device(sealed[[1]], keys=keys)):
            with pytest.raises(AuthenticationError, match="its binding") as caught:
                use(file["y"], key)
            assert caught.value.tensor == "y"


def test_a_binding_cannot_be_left_out_or_made_up(tmp_path, key):
    path = tmp_path / "bound.safetensors"
    save_file({"x": fastrack.seal(np.arange(10), key, "x")}, path, key)
    good = path.read_bytes()
    for change in (
        lambda listed, _: listed["x"].pop("file") and listed["x"].pop("binding"),
        lambda listed, _: listed["x"].update(binding="0" * 112),
        lambda listed, _: listed["x"].update(file="0" * 32),
        lambda _, metadata: metadata.update({"fastrack.file": "0" * 32}),
    ):
        path.write_bytes(good)
        relist(path, change)
        with load_file(path) as file, pytest.raises(AuthenticationError):
            fastrack.unseal(file["x"], key)
    for value in (None, "", "0" * 111, "g" * 112, 7):
        path.write_bytes(good)
        relist(path, lambda listed, _, value=value: listed["x"].update(binding=value))
        with pytest.raises(FormatError, match="112 hexadecimal"):
            load_file(path)


def test_a_sealed_tensor_keeps_its_name_its_key_and_its_kind(tmp_path, key):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"'y': .* 'x'"):
        save_file({"y": fastrack.seal(np.ones(3), key, "x")}, path, key)
    with pytest.raises(ValueError, match=key.id):
        save_file({"x": fastrack.seal(np.ones(3), Key.generate(), "x")}, path, key)
    with pytest.raises(ValueError, match=r"plain=.*'x'"):
        save_file({"x": fastrack.seal(np.ones(3), key, "x")}, path, key, plain=["x"])
    with pytest.raises(AuthenticationError):
        save_file({"x": tampered(fastrack.seal(np.ones(3), key, "x"), 0)}, path, key)
    fastrack.save_checkpoint(path, [np.ones(3)], key=key)
    with load_file(path) as file, pytest.raises(ValueError, match="checkpoint"):
        save_file({"0": file["0"]}, tmp_path / "y.safetensors", key)


# One tensor as bytes


@each("shape", [(), (0,), (3, 5), (20_000,)])
def test_one_tensor_as_bytes_comes_back(key, tmp_path, shape):
    plain = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    sealed = fastrack.seal(plain, key, "weights \u00e9")
    data = sealed.to_bytes()
    again = fastrack.SealedTensor.from_bytes(data)
    assert (again.name, again.dtype, again.shape, again.key_id) == ("weights \u00e9", "F32", shape, key.id)
    assert np.array_equal(fastrack.unseal(again, key, framework="numpy"), plain)
    assert again.to_bytes() == data
    (tmp_path / "one.safetensors").write_bytes(data)
    fastrack.verify_file(tmp_path / "one.safetensors", key)
    with load_file(tmp_path / "one.safetensors") as file:
        assert np.array_equal(fastrack.unseal(file["weights \u00e9"], key, framework="numpy"), plain)


def test_every_altered_byte_of_one_tensor_is_refused(key):
    data = fastrack.seal(np.arange(3), key, "x").to_bytes()
    accepted = []
    for place in range(len(data)):
        for bit in (1, 32):
            wrong = bytearray(data)
            wrong[place] ^= bit
            try:
                fastrack.unseal(fastrack.SealedTensor.from_bytes(wrong), key)
            except (AuthenticationError, FormatError, fastrack.UnknownKeyError):
                continue
            accepted.append(bytes(wrong[max(0, place - 5) : place + 5]))
    assert accepted == []


def test_bytes_that_hold_no_single_sealed_tensor_are_refused(key, tmp_path):
    data = fastrack.seal(np.arange(3), key, "x").to_bytes()
    for cut in range(len(data)):
        with pytest.raises(FormatError):
            fastrack.SealedTensor.from_bytes(data[:cut])
    with pytest.raises(FormatError):
        fastrack.SealedTensor.from_bytes(data + b"\0")
    path = tmp_path / "x.safetensors"
    for write in (
        lambda: save_file({"a": np.ones(3), "b": np.ones(3)}, path, key),
        lambda: save_file({"a": np.ones(3), "b": np.ones(3)}, path, key, plain=["b"]),
        lambda: save_file({"a": np.ones(3)}, path, key, plain=["a"]),
        lambda: fastrack.save_checkpoint(path, 1, key=key),
    ):
        write()
        with pytest.raises(FormatError, match="one tensor"):
            fastrack.SealedTensor.from_bytes(path.read_bytes())
