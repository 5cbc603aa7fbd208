"""Weights from sealed folders and from several files into modules."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from torch import nn

from fastrack import Anchor, Key, load_model, publish, save_file, save_model, seal_folder
from fastrack.errors import AuthenticationError, FormatError, RollbackError
from fastrack.grants import Signer

KEY = Key.from_bytes(bytes(range(32)))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def net(seed=0, device=None):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(70, 300), nn.LayerNorm(300), nn.Linear(300, 5, dtype=torch.bfloat16))
    return made.to(device)


def same(one, other):
    found, expected = one.state_dict(), other.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def halves(module):
    state = module.state_dict()
    return [{name: state[name] for name in list(state)[part]} for part in (slice(3), slice(3, None))]


def seal_net(module, tmp_path, name):
    plain = tmp_path / f"{name}-plain"
    plain.mkdir()
    for shard, tensors in zip(SHARDS, halves(module), strict=True):
        safetensors.torch.save_file(tensors, plain / shard)
    weight_map = {each: shard for shard, tensors in zip(SHARDS, halves(module), strict=True) for each in tensors}
    (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    seal_folder(plain, tmp_path / name, KEY)
    return tmp_path / name


@pytest.fixture
def folder(tmp_path):
    return seal_net(net(), tmp_path, "sealed")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_folder_is_loaded(folder, device):
    module = net(1, device)
    assert str(load_model(module, folder, keys=KEY)) == "<All keys matched successfully>"
    assert same(module, net())


def test_several_files_are_loaded(tmp_path):
    paths = [tmp_path / shard for shard in SHARDS]
    for path, tensors in zip(paths, halves(net()), strict=True):
        save_file(tensors, path, KEY)
    module = net(1)
    load_model(module, paths, keys=KEY)
    assert same(module, net())
    with pytest.raises(RuntimeError, match="Missing"):
        load_model(net(1), paths[:1], keys=KEY)
    with pytest.raises(FormatError, match="again"):
        load_model(net(1), [*paths, paths[0]], keys=KEY)


def test_a_mixture_of_two_trainings_is_refused_and_nothing_is_loaded(folder, tmp_path):
    other = seal_net(net(5), tmp_path, "other")
    shutil.copy(other / SHARDS[1], folder / SHARDS[1])
    module = net(1)
    with pytest.raises(RollbackError, match=SHARDS[1]):
        load_model(module, folder, keys=KEY)
    assert same(module, net(1))


def test_a_missing_shard_is_refused_and_nothing_is_loaded(folder):
    (folder / SHARDS[0]).unlink()
    module = net(1)
    with pytest.raises(RollbackError, match=SHARDS[0]):
        load_model(module, folder, keys=KEY, strict=False)
    assert same(module, net(1))


def test_a_bad_chunk_names_the_shard(folder):
    path = folder / SHARDS[1]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    with pytest.raises(AuthenticationError, match=SHARDS[1]):
        load_model(net(1), folder, keys=KEY)


def test_a_tensor_that_one_of_several_files_has_in_plain_is_refused(tmp_path):
    first, second = halves(net())
    save_file(first, tmp_path / "a.safetensors", KEY)
    save_file(second, tmp_path / "b.safetensors", KEY, plain=["2.bias"])
    with pytest.raises(AuthenticationError, match=r"b\.safetensors.*2\.bias"):
        load_model(net(1), [tmp_path / "a.safetensors", tmp_path / "b.safetensors"], keys=KEY, strict=False)


def test_an_anchor_binds_several_files(tmp_path):
    owner = Signer.generate()
    made = tmp_path / "set"
    made.mkdir()
    paths = [made / shard for shard in SHARDS]
    for path, tensors in zip(paths, halves(net()), strict=True):
        save_file(tensors, path, KEY)
    publish(made, signer=owner)
    anchor = tmp_path / "anchor"
    Anchor.create(anchor, owner=owner.verifier)
    module = net(1)
    load_model(module, paths, keys=KEY, anchor=anchor)
    assert same(module, net())
    save_file(halves(net(5))[1], paths[1], KEY)
    with pytest.raises(RollbackError, match=SHARDS[1]):
        load_model(module, paths, keys=KEY, anchor=anchor)
    assert same(module, net())


def test_a_folder_that_is_not_sealed_is_told(tmp_path):
    save_model(net(), tmp_path / "model.safetensors", key=KEY)
    with pytest.raises(FileNotFoundError, match=r"fastrack\.folder"):
        load_model(net(1), tmp_path, keys=KEY)
