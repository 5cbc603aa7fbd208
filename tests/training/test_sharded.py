"""Modules with DTensors: each process opens its shards, and one file holds the whole."""

import contextlib
import warnings

import numpy as np
import pytest
import torch
from helpers import quantization
from helpers.cases import each
from helpers.ranks import run_ranks
from helpers.tampering import tamper_file
from safetensors.torch import save_file as save_plain
from torch import nn
from torch.distributed import device_mesh, fsdp, tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fastrack
from fastrack import (
    AuthenticationError,
    Key,
    load_checkpoint,
    load_file,
    load_model,
    save_checkpoint,
    save_file,
    save_model,
    seal,
    seal_folder,
    to_device,
    to_host,
    unseal,
)
from fastrack._models.sharded import select_box

KEY = Key.from_bytes(bytes(range(32)))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def net(seed=0, width=33):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def parts(module):
    values = [value.detach() for value in module.state_dict().values()]
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


@contextlib.contextmanager
def process(rank, world):
    """Be one of several processes, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "net.safetensors"
    save_model(net(), path, key=KEY)
    return path


@pytest.fixture
def opened(monkeypatch):
    """The number of bytes of each message that was opened."""
    sizes = []
    from fastrack._transfer.inputs import Opened

    allocate = Opened.allocate

    def noted(self, device):
        result = allocate(self, device)
        for size, plan in zip(result[0].nbytes, result[0].plans, strict=True):
            sizes.append(size if plan is None else int(plan.chunks.size) * 16384)
        return result

    monkeypatch.setattr(Opened, "allocate", noted)
    return sizes


# Boxes


def test_a_box_of_a_tensor_is_what_numpy_selects():
    random = np.random.default_rng(0)
    for shape in [(), (7,), (5, 6), (4, 3, 5), (2, 3, 4, 5), (0, 3), (1, 1)]:
        array = random.integers(0, 1000, shape, np.int32)
        sealed = seal(array, KEY)
        for _ in range(20):
            offsets = [int(random.integers(0, extent + 1)) for extent in shape]
            sizes = [
                int(random.integers(0, extent - offset + 1)) for offset, extent in zip(offsets, shape, strict=True)
            ]
            box = select_box(sealed, offsets, sizes)
            expected = array[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
            assert box.shape == expected.shape
            assert np.array_equal(unseal(box, KEY, framework="numpy"), expected), (shape, offsets, sizes)
            assert np.array_equal(to_device(box, keys=KEY, framework="numpy"), expected)


@each(("offsets", "sizes"), [((0,), (3,)), ((3, 0), (2, 4)), ((-1, 0), (1, 4)), ((0, 0), (1, -1))])
def test_a_box_outside_its_tensor_is_refused(offsets, sizes):
    with pytest.raises(IndexError, match="part of tensor"):
        select_box(seal(np.zeros((4, 4)), KEY), offsets, sizes)


# Loading


@each("device", ["cpu", "meta"])
@each(("rank", "world"), [(1, 3), (4, 5), (6, 7)])  # of the last biases the last one has nothing
def test_a_process_opens_its_shards_of_a_module(path, device, rank, world):
    expected = net().state_dict()
    with process(rank, world):
        mesh = device_mesh.init_device_mesh("cpu", (world,))
        module = net(1).to(device)
        fsdp.fully_shard(module[0], mesh=mesh)
        fsdp.fully_shard(module, mesh=mesh)
        assert load_model(module, path, keys=KEY) == ([], [])
        for name, value in module.state_dict().items():
            assert type(value) is DTensor
            assert (value.shape, value.placements) == (expected[name].shape, (Shard(0),))
            rows = torch.chunk(expected[name], world)
            whole = rows[rank] if rank < len(rows) else expected[name][:0]
            assert torch.equal(value.to_local(), whole), name
        assert all(value.requires_grad and isinstance(value, nn.Parameter) for value in module.parameters())


def test_quantised_weights_are_refused_in_a_sharded_module(tmp_path, monkeypatch):
    quantization.install(monkeypatch)
    (tmp_path / "plain").mkdir()
    save_plain({"0.weight": torch.ones(128, 256)}, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text("{}")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY, quantize="fp8")
    with process(0, 2):
        module = nn.Sequential(nn.Linear(256, 128, bias=False))
        fsdp.fully_shard(module, mesh=device_mesh.init_device_mesh("cpu", (2,)))
        with pytest.raises(RuntimeError, match=r"0\.weight: expected a weight that is not quantised"):
            load_model(module, tmp_path / "sealed", keys=KEY)


def test_a_process_opens_only_the_chunks_of_its_rows(tmp_path, opened):
    path, world = tmp_path / "big.safetensors", 4
    weights = nn.ParameterDict({"w": nn.Parameter(torch.randn(1024, 256))})
    save_model(weights, path, key=KEY)
    with process(2, world):
        weights["w"] = tensor.DTensor.from_local(
            torch.zeros(256, 256), device_mesh.init_device_mesh("cpu", (world,)), [Shard(0)], run_check=False
        )
        load_model(weights, path, keys=KEY)
    assert opened == [256 * 256 * 4]


@each(
    ("placements", "box"),
    [
        ((Shard(1), Replicate()), (slice(None), slice(6, 12))),
        ((Shard(0), Shard(1)), (slice(4, 8), slice(0, 6))),
        ((Shard(1), Shard(1)), (slice(None), slice(6, 9))),
        ((Replicate(), Replicate()), (slice(None), slice(None))),
    ],
)
def test_any_placement_is_filled_with_its_part(tmp_path, placements, box):
    whole = torch.arange(96.0).reshape(8, 12)
    save_file({"w": whole}, tmp_path / "x", KEY)
    with process(2, 4):
        mesh = device_mesh.init_device_mesh("cpu", (2, 2))
        module = nn.ParameterDict(
            {"w": DTensor.from_local(torch.zeros_like(whole[box]), mesh, placements, run_check=False)}
        )
        load_model(module, tmp_path / "x", keys=KEY)
        assert torch.equal(module["w"].to_local(), whole[box])


def test_shards_of_tensor_and_data_parallelism_are_filled(path):
    expected = net().state_dict()["0.weight"]
    with process(3, 4):
        mesh = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        module = net(1, 32)
        save_model(net(0, 32), path, key=KEY)
        tensor.parallel.parallelize_module(module, mesh["tensor"], {"0": tensor.parallel.ColwiseParallel()})
        fsdp.fully_shard(module, mesh=mesh["data"])
        load_model(module, path, keys=KEY)
        expected = net(0, 32).state_dict()["0.weight"]
        assert torch.equal(module[0].weight.to_local(), expected[24:])  # of the second half, the second half


@each("case", ["partial", "strided", "shape", "device", "chunk", "plain"])
def test_a_module_that_cannot_be_filled_is_left_as_it_was(path, case):
    error, match = RuntimeError, "0.weight"
    if case == "chunk":
        tamper_file(path, "2.weight", 60)
        error, match = AuthenticationError, "2.weight"
    if case == "plain":
        save_file(net().state_dict(), path, KEY, plain=["2.weight"])
        error, match = AuthenticationError, "2.weight"
    with process(0, 2):
        mesh = device_mesh.init_device_mesh("cpu", (2,))
        module = net(1, 34 if case == "shape" else 33)
        if case == "partial":
            module[0].weight = nn.Parameter(
                DTensor.from_local(module[0].weight.detach(), mesh, [Partial()], run_check=False)
            )
        elif case == "strided":
            strided = tensor.placement_types._StridedShard(0, split_factor=3)
            part = DTensor.from_local(
                torch.ones(18, 64), mesh, [strided], run_check=False, shape=(33, 64), stride=(64, 1)
            )
            module[0].weight = nn.Parameter(part)
        else:
            if case == "device":
                module, match = module.to("meta"), "device="
            fsdp.fully_shard(module, mesh=mesh)
        before = [value.clone() for value in parts(module)]
        kinds = [type(value) for value in module.parameters()]
        options = {"device": "cuda:0"} if case == "device" else {}
        with pytest.raises(error, match=match):
            load_model(module, path, keys=KEY, **options)
        for value, old in zip(parts(module), before, strict=True):
            assert value.is_meta or torch.equal(value, torch.zeros_like(old) if case == "chunk" else old)
        assert [type(value) for value in module.parameters()] == kinds


# Sealing


def test_a_process_seals_its_part_under_a_name_with_its_place():
    whole = torch.arange(7 * 12.0).reshape(7, 12)
    cases = [
        ((Shard(0), Replicate()), (slice(4, 7), slice(0, 12))),
        ((Shard(1), Replicate()), (slice(0, 7), slice(6, 12))),
        ((Replicate(), Replicate()), (slice(0, 7), slice(0, 12))),
        ((Shard(0), Shard(1)), (slice(4, 7), slice(0, 6))),
    ]
    with process(2, 4):
        mesh = device_mesh.init_device_mesh("cpu", (2, 2))
        for placements, box in cases:
            part = DTensor.from_local(
                whole[box].clone(), mesh, placements, run_check=False, shape=(7, 12), stride=(12, 1)
            )
            for sealed in (seal(part, KEY, "w"), to_host(part, KEY, name="w"), seal(nn.Parameter(part), KEY, "w")):
                assert sealed.name == "w[" + ", ".join(f"{each.start}:{each.stop}" for each in box) + "]"
                assert torch.equal(unseal(sealed, KEY), whole[box])
        partial = DTensor.from_local(torch.zeros(7, 12), mesh, [Partial(), Replicate()], run_check=False)
        for call in (seal, to_host):
            with pytest.raises(ValueError, match=r"'w': .*partial sums"):
                call(partial, KEY, name="w")
        other = device_mesh.DeviceMesh("cpu", [0, 1])
        with pytest.raises(ValueError, match="mesh"):
            seal(DTensor.from_local(torch.zeros(3), other, [Shard(0)], run_check=False, shape=(6,), stride=(1,)), KEY)


# Several processes


def seal_parts(path):
    """Each process seals its rows into a file, of which each opens the rows that are its own, and no others."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = torch.arange(33 * 64.0).reshape(33, 64)
    shard = tensor.distribute_tensor(whole, device_mesh.init_device_mesh("cpu", (world,)), [Shard(0)])
    sealed = seal(shard, KEY, "w")
    assert sealed.name == ("w[0:17, 0:64]", "w[17:33, 0:64]")[rank]
    save_file({sealed.name: sealed}, f"{path}.{rank}", KEY)
    torch.distributed.barrier()
    if rank == 0:
        files = [load_file(f"{path}.{each}") for each in range(world)]
        save_file({name: value for file in files for name, value in file.items()}, path, KEY)
    torch.distributed.barrier()
    target = tensor.distribute_tensor(torch.zeros(33, 64), shard.device_mesh, [Shard(0)])
    with load_file(path) as file:
        to_device(file[sealed.name], keys=KEY, out=target.to_local())
    assert torch.equal(target.full_tensor(), whole)
    message = np.frombuffer(sealed.message, np.uint8)
    elsewhere = fastrack.SealedTensor(sealed.context._replace(name="w[1:18, 0:64]"), message, KEY.id)
    with pytest.raises(AuthenticationError):
        unseal(elsewhere, KEY)


def test_a_transposed_dtensor_in_a_checkpoint_opens_contiguous(path):
    with process(0, 1):
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        transposed = DTensor.from_local(torch.randn(4, 3).T, mesh, [Replicate()], run_check=False)
        state = {"whole": transposed, "beside": torch.ones(4, 3).T}
        save_checkpoint(path, state, key=KEY)
        back = load_checkpoint(path, keys=KEY)
        assert torch.equal(back["whole"], transposed.to_local())
        assert [value.stride() for value in back.values()] == [(4, 1), (1, 3)]


def save_and_load(path):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = device_mesh.init_device_mesh("cpu", (world,))
    module = net()
    module.register_buffer("dense", torch.arange(5))
    for layer in (module[0], module):
        fsdp.fully_shard(layer, mesh=mesh)
    save_model(module, path, key=KEY)
    with torch.device("meta"):
        other = net()
        other.register_buffer("dense", torch.arange(5))
    for layer in (other[0], other):
        fsdp.fully_shard(layer, mesh=mesh)
    load_model(other, path, keys=KEY)
    x = torch.ones(2, 64)
    assert torch.equal(other(x), net()(x))
    other(x).sum().backward()
    state = {"epoch": 3 + rank, "model": module.state_dict(), "again": module.state_dict()}
    save_checkpoint(f"{path}.checkpoint", state, key=KEY)
    failing = f"{path}.none/x"
    error = FileNotFoundError if rank == 0 else RuntimeError
    with pytest.raises(error, match=r"none"):
        save_model(other, failing, key=KEY)
    save_model(other, path, key=KEY)  # the processes are still in step


@pytest.mark.nightly
def test_processes_seal_their_parts_into_one_file(tmp_path):
    run_ranks((2, seal_parts, tmp_path / "x"))
    with load_file(tmp_path / "x") as file:
        assert sorted(file) == ["w[0:17, 0:64]", "w[17:33, 0:64]"]
        assert torch.equal(
            torch.cat([unseal(file[name], KEY) for name in sorted(file)]).flatten(), torch.arange(2112.0)
        )


@pytest.mark.slow
def test_processes_save_one_file_together(tmp_path):
    run_ranks((2, save_and_load, tmp_path / "x"))
    module = net(1)
    module.register_buffer("dense", torch.zeros(5, dtype=torch.int64))
    assert load_model(module, tmp_path / "x", keys=KEY) == ([], [])
    assert torch.equal(module[0].weight, net()[0].weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.checkpoint"]
    state = load_checkpoint(tmp_path / "x.checkpoint", keys=KEY)
    assert state["epoch"] == 3
    assert state["model"].keys() == module.state_dict().keys()
    assert state["again"]["0.weight"] is state["model"]["0.weight"]
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in state["model"].items())
    with load_file(tmp_path / "x") as file:
        assert fastrack.to_device(file["dense"], keys=KEY).tolist() == list(range(5))
