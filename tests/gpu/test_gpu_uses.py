"""Loaders, files, models, checkpoints and vaults on a GPU, by torch. ``--gpu cpu`` tries the tests."""

import copy
import time

import numpy as np
import pytest
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, Key
from fastrack._crypto.engine import get_engine
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.cuda import CudaPages
from fastrack._devices.paged.host import HostPages
from fastrack.format import message_size
from fastrack.kv import BlockContext
from fastrack.kv._paged import PagedSealer

torch = pytest.importorskip("torch")


@pytest.fixture
def where(request, device):
    """The name of the device for torch and fastrack."""
    name = device if device == "cpu" else request.getfixturevalue("real")
    if name != "cpu" and not torch.cuda.is_available():
        pytest.skip("this torch cannot use a GPU")
    return name


@pytest.fixture
def key():
    return Key.generate()


def make_model(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(96, 300), torch.nn.BatchNorm1d(300), torch.nn.GELU(), torch.nn.Linear(300, 7)
    return torch.nn.Sequential(*layers)


def same(a, b):
    a, b = ({name: value.cpu() for name, value in each.items()} for each in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_dtypes_and_strides_arrive(where, key, dtype):
    x = torch.randint(0, 2, (40, 3, 5)).to(dtype).transpose(0, 2)
    for moved in (fastrack.to_device(x, where), fastrack.to_device(fastrack.seal(x, key), where, keys=key)):
        assert (moved.device, moved.dtype, moved.shape) == (torch.device(where), dtype, x.shape)
        assert torch.equal(moved.cpu().float(), x.float())
    back = fastrack.unseal(fastrack.to_host(moved, key=key), key)
    assert torch.equal(back.float(), x.float())


def test_what_was_altered_arrives_nowhere(where, key):
    sealed = tampered(fastrack.seal(torch.arange(100_000), key), 70_000)
    with pytest.raises(AuthenticationError):
        fastrack.to_device(sealed, where, keys=key)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_a_sealed_dataset(where, key, tmp_path, workers):
    x, y = np.random.default_rng(0).standard_normal((1000, 33)).astype(np.float32), np.arange(1000)
    fastrack.save_file({"x": x, "y": y}, tmp_path / "d.fastrack", key)
    dataset = fastrack.SealedDataset(tmp_path / "d.fastrack")
    loader = torch.utils.data.DataLoader(dataset, 64, shuffle=True, num_workers=workers, collate_fn=fastrack.collate)
    seen = []
    for batch in fastrack.wrap(loader, where, keys=key):
        assert batch["x"].device == torch.device(where)
        assert np.array_equal(batch["x"].cpu(), x[batch["y"].cpu()])
        seen += batch["y"].tolist()
    assert sorted(seen) == list(range(1000))


def test_files(where, key, tmp_path):
    tensors = {"a": torch.randn(300, 70), "b": torch.arange(9), "empty": torch.zeros(0, 4)}
    fastrack.save_file({name: tensor.to(where) for name, tensor in tensors.items()}, tmp_path / "f.fastrack", key)
    loaded = fastrack.load_tensors(tmp_path / "f.fastrack", where, keys=key)
    assert same(loaded, tensors)
    assert {tensor.device for tensor in loaded.values()} == {torch.device(where)}
    with fastrack.safe_open(tmp_path / "f.fastrack", framework="pt", device=where, keys=key) as file:
        assert torch.equal(file.get_tensor("a").cpu(), tensors["a"])
        assert torch.equal(file.get_slice("a")[17:200].cpu(), tensors["a"][17:200])


def test_a_model_trained_there_comes_back(where, key, tmp_path):
    model = make_model().to(where)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 96, device=where)).square().mean().backward()
    optimizer.step()
    fastrack.save_model(model, tmp_path / "m.fastrack", key)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    fastrack.save_checkpoint(tmp_path / "c.fastrack", states, key)
    other = make_model(1).to(where)
    fastrack.load_model(other, tmp_path / "m.fastrack", keys=key)
    assert same(other.state_dict(), model.state_dict())
    on_meta = make_model(2).to("meta")
    fastrack.load_model(on_meta, tmp_path / "m.fastrack", keys=key, device=where)
    assert same(on_meta.state_dict(), model.state_dict())
    state = fastrack.load_checkpoint(tmp_path / "c.fastrack", key, device=where)
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(state["optimizer"])
    for mine, theirs in zip(*(each.state_dict()["state"].values() for each in (again, optimizer)), strict=True):
        assert same(mine, theirs)


def test_a_vault_keeps_activations_and_weights(where):
    model, batch = make_model().to(where), torch.randn(3000, 96, device=where)
    other = copy.deepcopy(model)
    model(batch).square().mean().backward()
    with fastrack.Vault() as vault:
        with fastrack.sealed_activations(vault):
            loss = other(batch).square().mean()
        loss.backward()
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        ticket = vault.put("x", batch)
        assert torch.equal(vault.get(ticket), batch)
    model.eval()
    expected = model(batch)
    pytest.importorskip("accelerate")
    with fastrack.Vault() as vault:
        fastrack.offload(model, vault, device=where)
        assert torch.equal(model(batch), expected)


def test_a_sealed_folder_of_transformers(where, key, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    plain.save_pretrained(tmp_path / "plain")
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", key)
    from fastrack.transformers import from_pretrained

    model = from_pretrained(transformers.LlamaForCausalLM, tmp_path / "sealed", keys=key, device_map={"": where})
    assert same(model.state_dict(), plain.state_dict())
    assert model.device == torch.device(where)


def test_a_training_loop_learns_there_what_it_learns_with_plain_batches(where, key):
    torch.manual_seed(0)
    x = torch.randn(512, 96)
    y = (x[:, :7] > 0).float()
    losses = {}
    for name in ("plain", "sealed"):
        model, data = make_model().to(where), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for start in range(0, 512, 64):
            batch = x[start : start + 64], y[start : start + 64]
            data.append(batch if name == "plain" else tuple(fastrack.seal(part, key) for part in batch))
        losses[name] = []
        for _ in range(3):
            batches = fastrack.wrap(data, where, keys=key) if name == "sealed" else data
            for a, b in batches:
                loss = torch.nn.functional.binary_cross_entropy_with_logits(model(a.to(where)), b.to(where))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[name].append(loss.item())
    assert losses["plain"] == pytest.approx(losses["sealed"], rel=1e-4)
    assert losses["sealed"][-1] < losses["sealed"][0]


@pytest.mark.parametrize(("layers", "size"), [(32, 16384), (160, 1024)])  # the latter have too many pieces for a launch
def test_blocks_of_a_paged_cache(where, key, layers, size, record_property):
    arrays = [torch.randint(-128, 128, (40, 2, size), dtype=torch.int8, device=where) for _ in range(layers)]
    pieces = [Piece(each.data_ptr() + part * size, 2 * size, size) for each in arrays for part in (0, 1)]
    pages = HostPages([pieces], get_engine()) if where == "cpu" else CudaPages.on(where, [pieces], arrays[0])
    blocks = [PagedBlock(0, number) for number in range(0, 40, 2)]
    contexts = [BlockContext("m@1", "int8", "0 of 1", bytes([block.number])) for block in blocks]
    messages = [np.zeros(message_size(pages.sizes()[0]), np.uint8) for _ in blocks]
    before, paged = [each.cpu() for each in arrays], PagedSealer(pages, key)
    for turn in ("first", "second"):
        start = time.perf_counter()
        assert all(paged.store(contexts, blocks, messages).result())
        record_property(f"{turn} store, GB/s", sum(map(len, messages)) / 1e9 / (time.perf_counter() - start))
        for each in arrays:
            each[::2].zero_()
        start = time.perf_counter()
        assert all(paged.load(contexts, blocks, messages).result())
        record_property(f"{turn} load, GB/s", sum(map(len, messages)) / 1e9 / (time.perf_counter() - start))
        assert all(torch.equal(each.cpu(), old) for each, old in zip(arrays, before, strict=True))
    messages[7][-30] ^= 1
    assert paged.load(contexts, blocks, messages).result() == [number != 7 for number in range(len(blocks))]
    for each, old in zip(arrays, before, strict=True):
        assert not each[14].any()
        assert torch.equal(torch.cat([each[:14], each[15:]]).cpu(), torch.cat([old[:14], old[15:]]))
    paged.close()
