"""The buffer of a visit: views of one memory, which is zeros at the end."""

import numpy as np
import pytest
import torch

import fastrack
from fastrack import tour

KEY = fastrack.Key.generate()
RING = fastrack.KeyRing(KEY)


def sealed(path, plain=(), **tensors):
    fastrack.save_file(tensors, path, KEY, plain=plain)
    return fastrack.load_file(path)


def test_tensors_are_views_of_one_memory_with_their_dtypes_and_shapes(tmp_path):
    given = {
        "rows": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "ids": np.arange(5, dtype=np.int64),
        "mask": np.array([True, False]),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5),
    }
    with sealed(tmp_path / "shard.safetensors", **given) as file:
        buffer = tour.DataBuffer(4096)
        opened = buffer.open(file, RING)
    memory = buffer._memory
    for name, tensor in given.items():
        assert torch.equal(opened[name], torch.as_tensor(tensor)), name
        assert opened[name].untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    assert buffer.chunks == 5


def test_scrub_leaves_zeros_in_views_that_were_kept(tmp_path):
    buffer = tour.DataBuffer(1 << 20)
    with sealed(tmp_path / "shard.safetensors", x=np.full(70_000, 7, np.uint8)) as file:
        x = buffer.open(file, RING)["x"]
    assert buffer.scrub() == 70_000
    assert not x.any()
    assert buffer.scrub() == 0


def test_the_next_file_lies_over_the_one_before(tmp_path):
    buffer = tour.DataBuffer(4096)
    with sealed(tmp_path / "a.safetensors", x=np.full(4000, 1, np.uint8)) as file:
        first = buffer.open(file, RING)["x"]
    with sealed(tmp_path / "b.safetensors", x=np.full(10, 2, np.uint8)) as file:
        buffer.open(file, RING)
    assert first[:10].tolist() == [2] * 10
    assert buffer.scrub() == 4000


def test_what_does_not_verify_leaves_zeros(tmp_path):
    path = tmp_path / "shard.safetensors"
    sealed(path, x=np.full(40_000, 1, np.uint8)).close()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    buffer = tour.DataBuffer(1 << 16)
    with fastrack.load_file(path) as file, pytest.raises(fastrack.AuthenticationError):
        buffer.open(file, RING)
    assert not buffer._memory.any()
    assert buffer.chunks == 0


def test_memory_that_does_not_hold_zeros_is_told(tmp_path, monkeypatch):
    buffer = tour.DataBuffer(64)
    with sealed(tmp_path / "shard.safetensors", x=np.full(8, 1, np.uint8)) as file:
        buffer.open(file, RING)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: tensor)
    with pytest.raises(fastrack.AuthenticationError, match="expected zeros, got other bytes"):
        buffer.scrub()


def test_plain_tensors_and_files_that_do_not_fit_are_refused(tmp_path):
    file = sealed(tmp_path / "plain.safetensors", plain=["y"], x=np.ones(3), y=np.ones(3))
    with file, pytest.raises(ValueError, match="got 1 plain tensors"):
        tour.DataBuffer(64).open(file, RING)
    file = sealed(tmp_path / "large.safetensors", x=np.ones(9))
    with file, pytest.raises(ValueError, match="at most 64 bytes for the buffer, got 72"):
        tour.DataBuffer(64).open(file, RING)
    with pytest.raises(ValueError, match="a size of 1 byte or more"):
        tour.DataBuffer(0)
