"""Sealed checkpoints of several processes: resharding, failures of some of them, and kills."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import run_ranks
from helpers.tampering import tamper_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fastrack import AuthenticationError, Key, load_file
from fastrack.distributed import CheckpointReader, CheckpointWriter

KEY = Key.from_bytes(bytes(range(32)))
KILLS = int(os.environ.get("FASTRACK_KILLS", "3"))

pytestmark = pytest.mark.slow


def training(seed):
    """Return a sharded model and its optimizer after a step, which are the same on any number of processes."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 33), nn.ReLU(), nn.Linear(33, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (module[0], module):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01 + seed)
    if seed == 0:
        module(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
    return module, optimizer


def full(module, optimizer):
    """Return all tensors, gathered, and all numbers."""
    states = get_state_dict(module, optimizer)
    found = {}

    def visit(value, path):
        if isinstance(value, dict):
            for name, item in value.items():
                visit(item, f"{path}.{name}")
        else:
            found[path] = value.full_tensor() if isinstance(value, DTensor) else value

    for number, value in enumerate(states):
        visit(value, str(number))
    return found


def first_save(folder, expected):
    module, optimizer = training(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = distribute_tensor(torch.arange(96.0).reshape(8, 12), mesh, [Shard(1)])
    state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    few = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])  # one process has no row
    dcp.save({**state, "columns": columns, "few": few, "step": 7}, storage_writer=CheckpointWriter(folder, KEY))
    tensors = full(module, optimizer)
    if dist.get_rank() == 0:
        torch.save(tensors, expected)
        assert len(list(Path(folder).iterdir())) == dist.get_world_size() + 1


def reshard(folder, expected, target=""):
    module, optimizer = training(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = distribute_tensor(torch.zeros(8, 12), mesh, [Shard(0)])
    few = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(1 if dist.get_world_size() == 3 else 0)])
    names = ("model", "optimizer")
    state = {**dict(zip(names, get_state_dict(module, optimizer), strict=True)), "columns": columns}
    state |= {"few": few, "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(folder, KEY))
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    known = torch.load(expected)
    found = full(module, optimizer)
    assert found.keys() == known.keys()
    for name, value in found.items():
        equal = torch.equal(value, known[name]) if isinstance(value, torch.Tensor) else value == known[name]
        assert equal, name
    assert torch.equal(columns.full_tensor(), torch.arange(96.0).reshape(8, 12))
    assert few.full_tensor().tolist() == [[0, 1], [2, 3], [4, 5]]
    assert state["step"] == 7
    if target:
        dcp.save(state, storage_writer=CheckpointWriter(target, KEY))


@pytest.mark.nightly
def test_a_checkpoint_is_resharded_from_four_processes_to_two_and_three(tmp_path):
    expected = tmp_path / "expected"
    run_ranks(
        (4, first_save, tmp_path / "four", expected),
        (2, reshard, tmp_path / "four", expected, tmp_path / "two"),
        (3, reshard, tmp_path / "two", expected),
    )


def fail(folder):
    """All processes raise what one of them finds, and none has written to a tensor."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = torch.arange(80_000.0).reshape(400, 200)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=CheckpointWriter(folder, KEY))
    path = shard_of(folder, rank)
    dist.barrier()
    content = path.read_bytes()
    for offset in (30, None):
        if rank == 1:
            if offset is None:
                path.unlink()
            else:
                tamper_file(path, "0", offset)
        dist.barrier()
        target = distribute_tensor(torch.ones(400, 200), mesh, [Shard(0)])
        with pytest.raises(CheckpointException) as info:
            dcp.load({"w": target}, storage_reader=CheckpointReader(folder, KEY))
        [(failed, (error, _))] = info.value.failures.items()
        assert failed == 1
        assert isinstance(error, AuthenticationError if offset else FileNotFoundError)
        assert str(path if rank == 1 else shard_of(folder, 1, error)) in str(error)
        assert target.to_local().min() == 1
        dist.barrier()
        if rank == 1:
            path.write_bytes(content)
        dist.barrier()
    state = {"w": distribute_tensor(torch.ones(400, 200), mesh, [Shard(0)])}
    wrong = {**state, "f": print} if rank == 0 else {**state, "f": len}
    with pytest.raises(CheckpointException):
        dcp.save(wrong, storage_writer=CheckpointWriter(folder, KEY))
    dcp.load(state, storage_reader=CheckpointReader(folder, KEY))
    assert torch.equal(state["w"].full_tensor(), whole)


def mix(folder):
    """A storage that gives one process another checkpoint, authentic as well, is noticed."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    for seed in range(2):
        whole = torch.full((4, 2), float(seed))
        dcp.save(
            {"w": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=CheckpointWriter(f"{folder}{seed}", KEY)
        )
    target = distribute_tensor(torch.full((4, 2), 7.0), mesh, [Shard(0)])
    with pytest.raises(CheckpointException) as info:
        dcp.load({"w": target}, storage_reader=CheckpointReader(f"{folder}{rank}", KEY))
    [(error, _)] = info.value.failures.values()
    assert isinstance(error, AuthenticationError)
    assert "process 1" in str(error)
    assert target.to_local().min() == 7
    with pytest.raises(CheckpointException) as info:
        dcp.save({"w": target}, storage_writer=CheckpointWriter(f"{folder}0", KEY if rank else Key.generate()))
    [(error, _)] = info.value.failures.values()
    assert isinstance(error, ValueError)
    assert KEY.id in str(error)
    state = {"w": target}
    dcp.load(state, storage_reader=CheckpointReader(f"{folder}0", KEY))
    assert target.to_local().max() == 0


def alter_values(folder):
    """An altered array inside a value stops all processes, also those that do not load the value."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "history": (torch.arange(40_000), "text")}
    dcp.save(state, storage_writer=CheckpointWriter(folder, KEY))
    [path] = [path for path in Path(folder).glob("shards-*") if "values.0" in load_file(path).names]
    content = path.read_bytes()
    for offset in (30, 56 + 2 * 16400, None):
        dist.barrier()
        if rank == 0:
            if offset is None:  # the file lacks the message
                path.write_bytes(content.replace(b"values.0", b"values.1"))
            else:
                tamper_file(path, "values.0", offset)
        dist.barrier()
        target = distribute_tensor(torch.full((4, 2), 7.0), mesh, [Shard(0)])
        wanted = {"w": target} if rank == 0 else {"w": target, "history": None}
        with pytest.raises(CheckpointException) as info:
            dcp.load(wanted, storage_reader=CheckpointReader(folder, KEY))
        [(failed, (error, _))] = info.value.failures.items()
        assert failed == 1
        assert isinstance(error, AuthenticationError)
        assert "values.0" in str(error)
        assert target.to_local().min() == 7, offset
        dist.barrier()
        if rank == 0:
            path.write_bytes(content)
    dist.barrier()
    wanted = {"w": target} if rank == 0 else {"w": target, "history": None}
    dcp.load(wanted, storage_reader=CheckpointReader(folder, KEY))
    assert torch.equal(target.full_tensor(), whole)
    assert rank == 0 or torch.equal(wanted["history"][0], torch.arange(40_000))


def shard_of(folder, rank, error=None):
    """Return the file in which the rows of a process are."""
    found = []
    for path in sorted(Path(folder).glob("shards-*")):
        with load_file(path) as file:
            rows = file["0"].to(keys=KEY) if error is None else None
        if rows is None or rows[0, 0] == rank * 200 * 200:
            found.append(path)
    if error is not None:
        return Path(folder)
    [path] = found
    return path


def test_a_failure_of_one_process_is_raised_by_all_before_the_first_tensor(tmp_path):
    run_ranks((2, fail, tmp_path / "c"), (2, mix, tmp_path / "d"), (2, alter_values, tmp_path / "e"))


def save_until_killed(folder, number, progress, rank, processes, store):
    if is_shared := processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
        mesh = init_device_mesh("cpu", (processes,))
    for current in itertools.count(number):
        state = {f"w{index}": torch.full((50_000,), float(current)) for index in range(3)}
        if is_shared:
            state = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in state.items()}
        writer = CheckpointWriter(folder, KEY)
        dcp.save({**state, "number": current}, storage_writer=writer, no_dist=not is_shared)
        if rank == 0:
            os.write(progress, b"+")


def kill_saves(folder, processes, attempts):
    """Kill processes that save together at any moment, one after another; what is there is whole, and the last."""
    processes, attempts, chooser, last = int(processes), int(attempts), random.Random(0), 0
    for attempt in range(attempts):
        source, progress = os.pipe()
        children = []
        for rank in range(processes):
            children.append(os.fork())
            if not children[-1]:
                save_until_killed(folder, last + 1, progress, rank, processes, f"{folder}.store{attempt}")
        os.close(progress)
        done = len(os.read(source, 1))
        time.sleep(chooser.uniform(0, 0.1) if processes > 1 else 0.01 + 0.00137 * (attempt % 20))
        for child in chooser.sample(children, processes):
            os.kill(child, signal.SIGKILL)
            time.sleep(chooser.uniform(0, 0.01))
        for child in children:
            os.waitpid(child, 0)
        with os.fdopen(source, "rb") as rest:
            done += len(rest.read())
        state = {**{f"w{index}": torch.zeros(50_000 * processes) for index in range(3)}, "number": 0}
        dcp.load(state, storage_reader=CheckpointReader(folder, KEY), no_dist=True)
        assert state["number"] in {last + done, last + done + 1}
        assert all((state[f"w{index}"] == state["number"]).all() for index in range(3))
        last = state["number"]
    assert last >= attempts


def test_a_process_that_is_killed_leaves_a_whole_checkpoint(tmp_path):
    stages = [(1, kill_saves, tmp_path / "one", 1, KILLS), (1, kill_saves, tmp_path / "two", 2, KILLS // 3)]
    run_ranks(*stages, timeout=100 + 5 * KILLS)
