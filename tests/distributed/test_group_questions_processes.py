"""Show that saves in the background, broadcasts of models and hooks go in a sealed group as in a plain one."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import run_ranks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastrack import AuthenticationError, ClosedError, Key, protect_checkpoints, verify_file
from fastrack.distributed import CheckpointReader, CheckpointWriter, init_process_group

pytestmark = pytest.mark.slow

KEY = Key.from_bytes(bytes(range(32)))
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ADVICE = "gloo", "nccl"


class Waiting(dcp.DefaultSavePlanner):
    """A planner whose save ends after its group was used, and training went on meanwhile."""

    def __init__(self):
        super().__init__()
        self.is_there, self.went_on = threading.Event(), threading.Event()

    def resolve_data(self, item):
        self.is_there.set()
        assert self.went_on.wait(60)
        return super().resolve_data(item)


def check_saves(folder):
    own = dist.new_group()  # of the thread that saves
    model = fully_shard(nn.Linear(64, 32))
    for name in ("of its own", "protected"):
        if name == "protected":
            protect_checkpoints(KEY)
        state = {"model": get_model_state_dict(model), "order": torch.arange(5.0), "step": 7}
        expected = model.weight.full_tensor().clone()
        options = {"storage_writer": CheckpointWriter(folder / name, key=KEY)} if name == "of its own" else {}
        planner = Waiting()
        future = dcp.async_save(state, checkpoint_id=folder / name, process_group=own, planner=planner, **options)
        assert planner.is_there.wait(60)
        for step in range(5):  # training, in the default group
            total = torch.full((32,), float(step))
            dist.all_reduce(total)
            assert total.tolist() == [2.0 * step] * 32
        model(torch.ones(2, 64)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        planner.went_on.set()
        future.result()
        assert not torch.equal(model.weight.full_tensor(), expected)
        model.weight.grad = None
        found = {"model": get_model_state_dict(model), "order": torch.ones(5), "step": 0}
        reader = {"storage_reader": CheckpointReader(folder / name, KEY)} if name == "of its own" else {}
        dcp.load(found, checkpoint_id=folder / name, **reader)
        assert torch.equal(found["model"]["weight"].full_tensor(), expected)
        assert (found["order"].tolist(), found["step"]) == ([0, 1, 2, 3, 4], 7)
        if dist.get_rank() == 0:
            for file in (folder / name).iterdir():
                verify_file(file, KEY)


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))


def stepped(module, optimizer):
    module(torch.ones(4, 24)).square().sum().backward()
    optimizer.step()


def check_broadcasts():
    rank = dist.get_rank()
    source = model()
    adam = torch.optim.AdamW(source.parameters())
    stepped(source, adam)
    expected, moments = get_model_state_dict(source), get_optimizer_state_dict(source, adam)
    for shard in (lambda module: module, fully_shard):
        target = nn.Sequential(nn.Linear(24, 40), nn.BatchNorm1d(40), nn.Linear(40, 6))  # of other values
        target = shard(target)
        if shard is fully_shard:
            target.set_allocate_memory_from_process_group_for_comm(True)
        optimizer = torch.optim.AdamW(target.parameters())
        set_model_state_dict(target, dict(expected) if rank == 0 else {}, options=FROM_0)
        set_optimizer_state_dict(target, optimizer, moments if rank == 0 else {}, options=FROM_0)
        found = get_model_state_dict(target, options=StateDictOptions(full_state_dict=True))
        assert rank or all(torch.equal(found[name], value) for name, value in expected.items())
        weight = target[0].weight
        moment = optimizer.state[weight]["exp_avg"]
        assert torch.equal(getattr(moment, "full_tensor", moment.clone)(), adam.state[source[0].weight]["exp_avg"])
        stepped(target, optimizer)  # through the memory that torch asks the group for


def compressed():
    """Return the weights after steps whose gradients the hook PowerSGD compresses, in callbacks of operations."""
    module = DistributedDataParallel(model())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        module(torch.randn(8, 24, generator=generator)).square().mean().backward()
        optimizer.step()
    return [weight.detach().clone() for weight in module.parameters()]


def check_hooks(expected):
    rank = dist.get_rank()
    assert all(torch.equal(one, other) for one, other in zip(compressed(), expected, strict=True))
    for refuse in (lambda: dist.shrink_group([1]), lambda: dist.batch_isend_irecv([_to(1 - rank)])):
        if rank == 0:
            with pytest.raises((TypeError, NotImplementedError)) as error:
                refuse()
            assert not any(word in str(error.value).lower() for word in ADVICE)


def _to(rank):
    return dist.P2POp(dist.isend, torch.ones(1), rank)


def check_threads():
    """Use one group in two threads at once: each result is right, or both threads of both ranks raise."""
    group = dist.new_group()
    wrong, failed = [], []

    def reduce(value):
        try:
            for _ in range(20):
                total = torch.full((3,), value)
                dist.all_reduce(total, group=group)
                if total.tolist() != [2 * value] * 3:
                    wrong.append(total)
        except (RuntimeError, AuthenticationError, ClosedError) as error:
            failed.append(error)

    thread = threading.Thread(target=reduce, args=(10.0,))
    if dist.get_rank():
        thread.start()
        reduce(1.0)
    else:  # the threads of a rank have the other order
        threading.Timer(0.05, thread.start).start()
        reduce(1.0)
        time.sleep(0.1)
    thread.join()
    assert not wrong
    if failed:
        distributed_c10d._abort_process_group(group)


def check_all(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = compressed()
    dist.destroy_process_group()
    init_process_group(KEY, init_method=f"file://{folder}/sealed", rank=rank, world_size=size, timeout=60)
    check_hooks(expected)
    check_broadcasts()
    check_threads()
    check_saves(Path(folder))


@pytest.mark.nightly
def test_saves_broadcasts_and_hooks_end_as_in_a_plain_group_and_threads_with_no_wrong_result(tmp_path):
    run_ranks((2, check_all, tmp_path))
