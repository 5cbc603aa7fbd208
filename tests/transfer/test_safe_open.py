import json
from concurrent.futures import wait

import numpy as np
import pytest
import safetensors
from helpers.tampering import tamper_file

import fastrack

TENSORS = {"b": np.arange(60_000, dtype=np.float32).reshape(3000, 20), "a": np.array(7), "empty": np.zeros((0, 3))}


@pytest.fixture
def path(tmp_path, key):
    fastrack.save_file(
        {**TENSORS, "free": np.ones(2)}, tmp_path / "x.safetensors", key, plain=["free"], metadata={"n": "1"}
    )
    return tmp_path / "x.safetensors"


@pytest.fixture
def plain(tmp_path):
    from safetensors.numpy import save_file

    save_file(TENSORS, tmp_path / "plain.safetensors", {"n": "1"})
    return tmp_path / "plain.safetensors"


def test_it_has_the_methods_of_safetensors(path, plain, key):
    wanted = {name for name in dir(safetensors.safe_open) if not name.startswith("_")}
    with safetensors.safe_open(plain, "np") as theirs:
        wanted_of_slices = {name for name in dir(theirs.get_slice("b")) if not name.startswith("__")}
    assert wanted <= set(dir(fastrack.safe_open))
    with fastrack.safe_open(path, "np", keys=key) as ours:
        assert wanted_of_slices <= set(dir(ours.get_slice("b")))


INDICES = [0, -1, slice(None), slice(5, 2000, 3), slice(2, 2), ..., [4, 2]]
COLUMNS = [(slice(None), slice(5, 9)), (slice(100, 300), 3), (..., 0), (7, slice(None))]


def test_it_returns_what_safetensors_returns_from_a_plain_file(path, plain, key):
    with safetensors.safe_open(plain, "np") as theirs, fastrack.safe_open(path, "np", "cpu", keys=key) as ours:
        assert ours.keys() == theirs.keys()
        assert sorted(ours.offset_keys()) == sorted(theirs.offset_keys())
        assert ours.metadata() == theirs.metadata()
        for name in theirs.keys():  # noqa: SIM118 - it is no mapping
            assert np.array_equal(ours.get_tensor(name), theirs.get_tensor(name))
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype()
        for index in [*INDICES, *COLUMNS]:
            assert np.array_equal(ours.get_slice("b")[index], TENSORS["b"][index]), index
        several, expected = ours.get_tensors(), theirs.get_tensors()
        assert several.keys() == expected.keys()
        assert all(np.array_equal(several[name], expected[name]) for name in expected)


@pytest.mark.parametrize("given", [None, {}, {"step": "3"}])
def test_metadata_are_none_where_the_owner_gave_none(tmp_path, key, given):
    torch = pytest.importorskip("torch")
    fastrack.save_file({"x": np.ones(2)}, tmp_path / "x.safetensors", key, metadata=given)
    fastrack.save_model(torch.nn.Linear(2, 1), tmp_path / "model.safetensors", key, metadata=given)
    np.save(tmp_path / "x.npy", np.ones(2))
    fastrack.seal_file(tmp_path / "x.npy", tmp_path / "y.safetensors", key, metadata=given)
    for path in tmp_path.glob("*.safetensors"):
        with fastrack.safe_open(path, "np", keys=key) as file:
            assert file.metadata() == (given or None)


def test_all_tensors_are_opened_at_once(path, key):
    opened = fastrack.load_tensors(path, keys=key, framework="np")
    assert opened.keys() == TENSORS.keys()
    assert all(np.array_equal(opened[name], TENSORS[name]) for name in TENSORS)


def test_tensors_are_of_torch_where_that_is_asked_for(path, key):
    torch = pytest.importorskip("torch")
    for name in ("pt", "torch", "pytorch"):
        with fastrack.safe_open(path, name, torch.device("cpu"), keys=key) as file:
            assert torch.equal(file.get_tensor("b"), torch.from_numpy(TENSORS["b"]))
    assert torch.equal(fastrack.load_tensors(path, "cpu", keys=key)["a"], torch.tensor(7))


def test_a_plain_tensor_is_not_returned(path, key):
    with fastrack.safe_open(path, "np", keys=key) as file:
        assert "free" not in file.keys()  # noqa: SIM118 - it is no mapping
        for get in (file.get_tensor, file.get_slice):
            with pytest.raises(KeyError):
                get("free")
        assert "free" not in file.get_tensors()
    assert "free" not in fastrack.load_tensors(path, keys=key)


def test_names_and_shapes_take_no_key(path):
    with fastrack.safe_open(path, "np") as file:
        assert file.get_slice("b").get_shape() == [3000, 20]
        with pytest.raises(fastrack.UnknownKeyError):
            file.get_tensor("b")
        with pytest.raises(fastrack.UnknownKeyError):
            file.get_slice("b")[:1]


def test_a_slice_opens_its_chunks_only_and_all_of_the_tensor_none_if_one_was_altered(path, key):
    tamper_file(path, "b", 56 + 16400 + 5)  # in the second chunk: rows 204 to 409 have bytes there
    with fastrack.safe_open(path, "np", keys=key) as file:
        assert np.array_equal(file.get_slice("b")[500:], TENSORS["b"][500:])
        for index in (250, slice(None), [0, 300]):
            with pytest.raises(fastrack.AuthenticationError) as caught:
                file.get_slice("b")[index]
            assert (caught.value.tensor, caught.value.chunk, caught.value.path) == ("b", 1, path)
    with pytest.raises(fastrack.AuthenticationError):
        fastrack.load_tensors(path, keys=key)


def test_another_key_opens_nothing(path):
    other = fastrack.Key.generate()
    with pytest.raises(fastrack.UnknownKeyError):
        fastrack.load_tensors(path, keys=other)
    with fastrack.safe_open(path, "np", keys=other) as file, pytest.raises(fastrack.UnknownKeyError):
        file.get_tensor("b")


def test_a_closed_file_is_refused(path, key):
    with fastrack.safe_open(path, "np", keys=key) as file:
        pass
    with pytest.raises(fastrack.ClosedError):
        file.get_tensor("b")


def test_wrong_arguments_are_refused_before_the_file_is_opened(key):
    with pytest.raises(ValueError, match="tf"):
        fastrack.safe_open("missing", "tf", keys=key)
    with pytest.raises(ValueError, match="tf"):
        fastrack.load_tensors("missing", framework="tf", keys=key)
    with pytest.raises(fastrack.DeviceError):
        fastrack.safe_open("missing", "np", "tpu", keys=key)
    with pytest.raises(fastrack.DeviceError):
        fastrack.load_tensors("missing", "tpu", keys=key)
    with pytest.raises(FileNotFoundError):
        fastrack.load_tensors("missing", keys=key)


def test_a_file_in_which_nothing_is_sealed_is_not_an_empty_dict(plain):
    with pytest.raises(fastrack.FormatError, match="expected sealed tensors, got only unencrypted ones"):
        fastrack.load_tensors(plain)


@pytest.fixture
def layers(tmp_path, key):
    tensors = {f"layer{number}": np.full((64, 32), number, np.float32) for number in range(5)}
    fastrack.save_file(tensors, tmp_path / "layers.safetensors", key)
    return tmp_path / "layers.safetensors", tensors


def test_meta_is_that_of_the_plain_file(layers, key, tmp_path):
    path, tensors = layers
    from safetensors.numpy import save_file

    save_file(tensors, tmp_path / "plain.safetensors")
    content = (tmp_path / "plain.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    with fastrack.safe_open(path, "np", keys=key) as file:
        for name in tensors:
            meta = file.get_tensor_meta(name)
            assert (meta.dtype, meta.shape) == (header[name]["dtype"], header[name]["shape"])
            assert list(meta.data_offsets) == header[name]["data_offsets"]
        with pytest.raises(KeyError, match="layer9"):
            file.get_tensor_meta("layer9")


def test_prefetched_tensors_are_handed_out_once_in_any_order(layers, key):
    path, tensors = layers
    with fastrack.safe_open(path, "np", keys=key) as file:
        with file.prefetch() as loader:
            assert loader.names() == list(tensors)
            assert np.array_equal(loader.take("layer3"), tensors["layer3"])
            with pytest.raises(KeyError, match="layer3"):
                loader.take("layer3")
            rest = dict(loader)
            assert list(rest) == ["layer0", "layer1", "layer2", "layer4"]
            assert all(np.array_equal(rest[name], tensors[name]) for name in rest)
            assert len(loader) == 0
        with file.prefetch({"layer2": slice(8, 16), "layer1": None}, device="cpu", threads=8) as loader:
            assert loader.names() == ["layer1", "layer2"]
            assert loader.take("layer2").shape == (8, 32)
        with pytest.raises(fastrack.ClosedError):
            loader.take("layer1")
        with pytest.raises(KeyError, match="layer9"):
            file.prefetch({"layer9": None})


def test_prefetching_is_bounded_and_fails_where_it_is_used(layers, key, limited):
    path, tensors = layers
    limited(read_ahead=tensors["layer0"].nbytes)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # of the last tensor
    path.write_bytes(content)
    with fastrack.safe_open(path, "np", keys=key) as file:
        loader = file.prefetch()
        assert [name for name in tensors if name in loader._ahead] == ["layer0"]
        for name in list(tensors)[:4]:
            assert np.array_equal(loader.take(name), tensors[name])
        with pytest.raises(fastrack.AuthenticationError, match="layer4"):
            loader.take("layer4")
        loader.close()
        loader = file.prefetch({"layer4": None})
        wait(loader._ahead.values())
        with pytest.raises(fastrack.AuthenticationError, match="layer4"):
            loader.close()
