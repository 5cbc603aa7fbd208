"""`init_process_group`: whatever torch sends through its process group is sealed, or refused."""

import contextlib
import json
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.cases import each
from helpers.recorded_operations import PLAIN, PlainGroup, record, register_plain
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastrack import ClosedError, Key, UnknownKeyError
from fastrack.distributed import init_process_group
from fastrack.distributed._process_group import SealedProcessGroup

KEY = Key.from_bytes(bytes(range(32)))


@pytest.mark.usefixtures("alone")
def test_groups_and_meshes_made_later_are_sealed():
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    groups = [dist.new_group([0]), *mesh.get_all_groups(), dist.group.WORLD]
    assert all(isinstance(group, SealedProcessGroup) for group in groups)


@pytest.mark.usefixtures("alone")
def test_options_of_another_backend_are_refused_by_what_they_are():
    with pytest.raises(TypeError, match="takes a Key"):
        dist.new_group([0], pg_options=object())


@each("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
@pytest.mark.usefixtures("alone")
def test_torch_reduces_through_the_group(op):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, op)
    assert tensor.tolist() == [1, 1, 1]


def test_what_cannot_be_sealed_is_refused(alone):
    with pytest.raises(ValueError, match="PRODUCT"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT)
    with pytest.raises(ValueError, match="contiguous"):
        dist.all_reduce(torch.ones(3).to_sparse())
    with pytest.raises(NotImplementedError, match="SecureGroup"):
        dist.all_to_all_single(torch.ones(3), torch.ones(3))
    with pytest.raises(NotImplementedError, match="SecureGroup"):
        alone.send([torch.ones(3)], 0, 0)
    # What C++ does not ask the class for has no backend to fall back on.
    with pytest.raises(RuntimeError, match="No backend"):
        dist.ProcessGroup.reduce(alone, [torch.ones(3)])


def test_a_group_that_is_there_is_replaced():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def defined_meanwhile(tensor, group=dist.group.WORLD):  # as torch.distributed.nn.functional is where it is imported
        dist.all_reduce(tensor, group=group)

    init_process_group(KEY)
    try:
        assert defined_meanwhile.__defaults__ == (None,)
        assert isinstance(dist.group.WORLD, SealedProcessGroup)
        assert dist.get_backend() == "fastrack"
    finally:
        dist.destroy_process_group()


def test_a_model_that_was_wrapped_in_plain_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="before a model is wrapped"):
        init_process_group(KEY)
    assert not dist.is_initialized()
    del model
    init_process_group(KEY, store=dist.HashStore(), rank=0, world_size=1)
    init_process_group(KEY)  # a sealed one may be replaced: what has it is refused
    dist.destroy_process_group()


def test_without_a_key_nothing_begins(monkeypatch):
    monkeypatch.delenv("FASTRACK_KEY_FILE", raising=False)
    with pytest.raises(UnknownKeyError):
        init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_a_group_destroyed_raises_what_nobody_waited_for(alone):
    alone._group._link.transport.close()
    alone._group._link.session.wipe()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    del work
    with pytest.raises(ClosedError):
        dist.destroy_process_group()
    dist.distributed_c10d._update_default_pg(None)
    dist.distributed_c10d._world.pg_map.clear()


# Training: what plain training asks of its process group, the sealed group is asked, and no more goes on the network.

PLAIN_BITS, SEALED_BITS = 0x3E4D, 0x3E53  # the upper half of floats: of both runs' weights, buffers and gradients


def needles_of(bits):
    """Return what weights in bfloat16 and float32, and gradients, are on the wire: bytes of repeated floats."""
    once, twice = bits.to_bytes(2, "little"), (bits + 0x80).to_bytes(2, "little")
    return [once * 32, (b"\0\0" + once) * 16, (b"\0\0" + twice) * 16]


class Model(nn.Module):
    """A model whose weights and buffers are one value at first, and its gradients four times as much."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((32, 64), value))
        self.inner = nn.Linear(64, 64, bias=False)
        nn.init.constant_(self.inner.weight, value)
        self.register_buffer("table", torch.full((64,), value))

    def forward(self, data):
        return (self.weight * data * 4).sum() + self.inner(data).sum() * 0 + self.table.sum() * 0


def train(model, value, steps=2, *, clip=False):
    data = torch.full((32, 64), value)
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-10)
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for weight in model.parameters():
        getattr(weight, "full_tensor", weight.detach)()


def ddp(value):
    model = DistributedDataParallel(Model(value), find_unused_parameters=True)
    with model.no_sync():
        model(torch.full((32, 64), value)).backward()
    train(model, value, clip=True)


def ddp_compiled(value):
    model = DistributedDataParallel(Model(value))
    train(torch.compile(model, backend="aot_eager"), value)


def fsdp(value):
    model = Model(value)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model.inner, model):
        fully_shard(module, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    model(torch.full((32, 64), value)).backward()
    model.set_requires_gradient_sync(True)
    train(model, value, clip=True)
    later = nn.Linear(64, 8, bias=False)  # sharded when all else is in use
    nn.init.constant_(later.weight, value)
    fully_shard(later)(torch.full((32, 64), value)).sum().backward()


def fsdp_compiled(value):
    model = fully_shard(Model(value))
    train(torch.compile(model, backend="aot_eager"), value)


def hsdp(value):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    train(fully_shard(Model(value), mesh=mesh), value, clip=True)


def objects(value):
    dist.barrier()
    parts = [torch.empty(64) for _ in range(2)]
    dist.scatter(parts[0], [torch.full((64,), value), torch.full((64,), value * 2)] if dist.get_rank() == 0 else None)
    dist.gather(parts[0].clone(), parts if dist.get_rank() == 1 else None, dst=1)
    whole = torch.empty(64)
    dist.reduce_scatter(whole, [torch.full((64,), value)] * 2)
    found = [None, None]
    dist.all_gather_object(found, {"value": value})
    dist.reduce(whole, 0, dist.ReduceOp.MAX)


RUNS = [ddp, ddp_compiled, fsdp, fsdp_compiled, hsdp, objects]


def operations_of(seen, bits):
    """Train in each way, and return the operations that torch asked of its groups."""
    value = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16).float().item()
    operations = {}
    for run in RUNS:
        torch._dynamo.reset()
        torch.manual_seed(dist.get_rank())
        seen.clear()
        run(value)
        operations[run.__name__] = list(seen)
    return operations


def start(rank, folder):
    torch.set_num_threads(1)
    register_plain()
    plain_seen, sealed_seen = record(PlainGroup), record(SealedProcessGroup)
    dist.init_process_group(PLAIN, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    plain = operations_of(plain_seen, PLAIN_BITS)
    plain_seen.clear()
    dist.destroy_process_group()
    init_process_group(KEY, init_method=f"file://{folder}/sealed", rank=rank, world_size=2)
    sealed = operations_of(sealed_seen, SEALED_BITS)
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps([plain, sealed, plain_seen]))


@contextlib.contextmanager
def packets():
    """Yield a list that gets what this machine sends to itself, or None where the user may not see that."""
    try:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    except PermissionError:
        yield None
        return
    found = []
    with wire:
        wire.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        wire.bind(("lo", 0))
        wire.settimeout(0.2)
        ended = threading.Event()

        def listen():
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    packet = wire.recv(1 << 17)
                    if len(packet) > 300:
                        found.append(packet)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield found
        finally:
            ended.set()
            thread.join()


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Return what both ranks recorded, and the packets between them: of plain training, then of sealed."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch, packets() as sent:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        mp.spawn(start, (str(folder),), 2)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)], sent


@pytest.mark.nightly
def test_the_sealed_group_is_asked_for_all_that_plain_training_asks_of_its_own(training):
    for plain, sealed, beside in training[0]:
        assert sealed == plain
        assert not beside
        # A counter that sees nothing proves nothing: DDP's first broadcasts and buffers, FSDP's norm.
        assert plain["ddp"].count("broadcast") > 3
        assert {"allgather", "allreduce"} < {*plain["ddp"]}
        assert "allreduce" in plain["fsdp"]
        assert all(plain.values())


@pytest.mark.nightly
def test_no_value_of_training_is_on_the_network(training):
    _, sent = training
    if sent is None:
        pytest.skip("only root can see packets")
    for bits, is_seen in ((PLAIN_BITS, True), (SEALED_BITS, False)):
        for needle in needles_of(bits):
            assert any(needle in packet for packet in sent) == is_seen, (bits, needle[:4])
