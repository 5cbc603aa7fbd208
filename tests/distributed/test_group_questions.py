"""A sealed group answers each question of torch as a plain one does, or refuses it, and never advises a plain one."""

import _thread
import inspect
import pickle
import re
import threading
from datetime import timedelta
from functools import partial
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from helpers.cases import each
from helpers.network import Network, on_ranks
from helpers.recorded_operations import OPERATIONS
from torch.distributed import distributed_c10d

from fastrack import AuthenticationError, ClosedError, Key
from fastrack.distributed import CheckpointWriter, init_process_group
from fastrack.distributed._process_group import SealedProcessGroup

KEY = Key.from_bytes(bytes(range(32)))
CPU, CUDA, OTHER = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
SECONDS = timedelta(seconds=5)
ADVICE = re.compile(r"gloo|nccl", re.IGNORECASE)

# What torch asks a group, or a backend that it gets from one. Each name of these classes is in one of the tables.

SAME = {
    "rank": lambda group: group.rank(),
    "size": lambda group: group.size(),
    "bound_device_id": lambda group: group.bound_device_id,
    "group_desc": lambda group: group.group_desc,
    "_set_group_desc": lambda group: (group._set_group_desc("own"), group.group_desc),
    "_set_group_name": lambda group: group._set_group_name(group.group_name),
    "_device_types": lambda group: {device.type for device in group._device_types},
    "_get_backend": lambda group: [group._get_backend(device).rank() for device in (CPU, CUDA, torch.device("cuda:0"))],
    "_has_hooks": lambda group: group._has_hooks(),
    "_enable_collectives_timing": lambda group: group._enable_collectives_timing(),
    "get_group_store": lambda group: isinstance(group.get_group_store(), dist.Store),
    "boxed": lambda group: type(group.boxed()),
    "unbox": lambda group: dist.ProcessGroup.unbox(group.boxed()) is group,
    "abort": lambda group: group.abort(),
    "shutdown": lambda group: group.shutdown(),
}
OWN = {
    "name": (lambda group: group.name(), "fastrack"),
    "_get_backend_name": (lambda group: group._get_backend_name(), "fastrack"),
    "group_name": (lambda group: distributed_c10d._resolve_process_group(group.group_name) is group, True),
    "_id": (lambda group: type(group._id()), int),
    "supports_coalescing": (lambda group: group._get_backend(CPU).supports_coalescing, False),
    "supports_splitting": (lambda group: group._get_backend(CPU).supports_splitting, False),
    "supports_shrinking": (lambda group: group._get_backend(CPU).supports_shrinking, False),
    "supports_time_estimate": (lambda group: group._get_backend(CPU).supports_time_estimate, False),
    "supports_tensor_alloc": (lambda group: group._get_backend(CUDA).supports_tensor_alloc(CUDA), False),
}
REFUSED = {
    "_get_sequence_number_for_group": lambda group: group._get_sequence_number_for_group(),
    "_set_sequence_number_for_group": lambda group: group._set_sequence_number_for_group(),
    "_start_coalescing": lambda group: group._start_coalescing(CPU),
    "_end_coalescing": lambda group: group._end_coalescing(CPU),
    "split_group": lambda group: group.split_group([0]),
    "merge_remote_group": lambda group: group.merge_remote_group(dist.HashStore(), 1),
    "set_timeout": lambda group: group.set_timeout(SECONDS),
    "monitored_barrier": lambda group: group.monitored_barrier(SECONDS),
    "_wait_for_pending_works": lambda group: group._wait_for_pending_works(),
    "_register_on_completion_hook": lambda group: group._register_on_completion_hook(print),
    "use_pg_for_symm_mem_rendezvous": lambda group: group.use_pg_for_symm_mem_rendezvous,
    "send": lambda group: group.send([torch.ones(1)], 0, 0),
    "recv": lambda group: group.recv([torch.ones(1)], 0, 0),
    "recv_anysource": lambda group: group.recv_anysource([torch.ones(1)], 0),
    "alltoall": lambda group: group.alltoall([torch.ones(1)], [torch.ones(1)]),
    "alltoall_base": lambda group: group.alltoall_base(torch.ones(1), torch.ones(1), [], []),
    "all_to_all_single": lambda group: group.all_to_all_single(torch.ones(1), torch.ones(1), [], []),
    "allgather_coalesced": lambda group: group.allgather_coalesced([[torch.ones(1)]], [torch.ones(1)]),
}
NOT_ASKED = {
    # Types and constants, and what torch calls only of a backend that supports it, or of one that it makes itself.
    *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "Options", "_pybind11_conduit_v1_"),
    *("_backend_id", "_register_backend", "_set_default_backend", "allocate_tensor", "eager_connect_single_device"),
    *("mem_allocator", "memory_stats", "resume", "suspend", "shrink", "setUsePgForSymmMemRendezvous"),
}


@pytest.fixture
def plain(alone):
    """Return a plain group beside a sealed default group."""
    return dist.new_group([0], backend="gloo", group_desc=alone.group_desc)


def outcome(ask, group):
    """Return what a group answers, or the error that it raises, and refuse advice to make a plain group."""
    try:
        return ask(group)
    except Exception as error:  # noqa: BLE001 - the test compares it
        if isinstance(group, SealedProcessGroup) and ADVICE.search(str(error)):
            return str(error)
        return type(error)


def test_each_name_of_a_group_and_of_a_backend_is_in_the_tables():
    kinds = dist.ProcessGroup, torch._C._distributed_c10d.Backend
    asked = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    known = {*SAME, *OWN, *REFUSED, *NOT_ASKED, *OPERATIONS}
    assert not asked - known
    for operation in {*OPERATIONS} & asked:
        assert operation in vars(SealedProcessGroup), operation


@each("ask", SAME.values(), SAME)
def test_a_sealed_group_answers_as_a_plain_one(ask, plain, alone):
    assert outcome(ask, alone) == outcome(ask, plain)


def test_what_a_sealed_group_answers_for_itself(alone):
    for name, (ask, expected) in OWN.items():
        assert ask(alone) == expected, name
    assert alone._get_backend(CPU) is alone._get_backend("cuda:1") is alone
    with pytest.raises(RuntimeError, match="mps"):
        alone._get_backend(OTHER)


@each("ask", REFUSED.values(), REFUSED)
def test_what_is_refused_names_no_plain_group(ask, alone):
    with pytest.raises((NotImplementedError, RuntimeError)) as error:
        ask(alone)
    assert not ADVICE.search(str(error.value))


def test_torch_aborts_a_group(alone):
    session = alone._group._link.session
    distributed_c10d._abort_process_group()
    is_wiped = not any(session._secrets)
    assert is_wiped
    with pytest.raises(ClosedError):
        alone.barrier()


def test_an_abort_ends_what_waits_for_other_ranks():
    def action(group):
        if group.rank:
            return raised.wait(5)
        pending = group.all_reduce(torch.ones(3), async_op=True)
        SealedProcessGroup(group, KEY, 20).abort()
        with pytest.raises(AuthenticationError):
            pending.wait()
        raised.set()
        return True

    raised = threading.Event()
    assert on_ranks(Network(2), KEY, action) == [True, True]


# What the functions of torch.distributed ask for the program. Each function that takes a group is in the table.


def filled(call, *shape):
    """Return the tensor that a function fills."""
    tensor = torch.full(shape or (2,), 3.0)
    call(tensor)
    return tensor.tolist()


def listed(call, count=1):
    """Return the objects that a function puts in a list."""
    found = [None] * count
    call(found)
    return found


ONES = torch.ones(2)
FUNCTIONS = {
    "all_gather": lambda group: filled(lambda tensor: dist.all_gather([tensor], ONES, group)),
    "all_gather_coalesced": lambda group: filled(lambda tensor: dist.all_gather_coalesced([[tensor]], [ONES], group)),
    "all_gather_into_tensor": lambda group: filled(lambda tensor: dist.all_gather_into_tensor(tensor, ONES, group)),
    "all_gather_single": lambda group: filled(lambda tensor: dist.all_gather_single(tensor, ONES, group)),
    "_all_gather_base": lambda group: filled(lambda tensor: dist._all_gather_base(tensor, ONES, group)),
    "all_gather_object": lambda group: listed(lambda found: dist.all_gather_object(found, {"a": 1}, group)),
    "all_reduce": lambda group: filled(lambda tensor: dist.all_reduce(tensor, group=group)),
    "all_reduce_coalesced": lambda group: filled(lambda tensor: dist.all_reduce_coalesced([tensor], group=group)),
    "all_to_all": lambda group: dist.all_to_all([torch.ones(1)], [torch.ones(1)], group),
    "all_to_all_single": lambda group: dist.all_to_all_single(torch.ones(1), torch.ones(1), group=group),
    "barrier": lambda group: dist.barrier(group, device_ids=[0], timeout=SECONDS),
    "broadcast": lambda group: filled(lambda tensor: dist.broadcast(tensor, 0, group)),
    "broadcast_object_list": lambda group: listed(lambda found: dist.broadcast_object_list(found, 0, group)),
    "gather": lambda group: filled(lambda tensor: dist.gather(ONES, [tensor], 0, group)),
    "gather_object": lambda group: listed(lambda found: dist.gather_object("a", found, 0, group)),
    "get_backend_config": lambda group: dist.get_backend_config(group).replace(dist.get_backend(group), "its own"),
    "get_global_rank": lambda group: dist.get_global_rank(group, 0),
    "get_group_rank": lambda group: dist.get_group_rank(group, 0),
    "get_process_group_ranks": dist.get_process_group_ranks,
    "get_rank": dist.get_rank,
    "get_world_size": dist.get_world_size,
    "irecv": lambda group: dist.irecv(torch.ones(1), 0, group),
    "isend": lambda group: dist.isend(torch.ones(1), 0, group),
    "recv": lambda group: dist.recv(torch.ones(1), 0, group),
    "send": lambda group: dist.send(torch.ones(1), 0, group),
    "recv_object_list": lambda group: dist.recv_object_list([None], 0, group),
    "send_object_list": lambda group: dist.send_object_list([1], 0, group),
    "new_subgroups": lambda group: dist.new_subgroups(1, group)[0].size(),
    "reduce": lambda group: filled(lambda tensor: dist.reduce(tensor, 0, group=group)),
    "reduce_scatter": lambda group: filled(lambda tensor: dist.reduce_scatter(tensor, [ONES], group=group)),
    "reduce_scatter_single": lambda group: filled(lambda tensor: dist.reduce_scatter_single(tensor, ONES, group=group)),
    "reduce_scatter_tensor": lambda group: filled(lambda tensor: dist.reduce_scatter_tensor(tensor, ONES, group=group)),
    "_reduce_scatter_base": lambda group: filled(lambda tensor: dist._reduce_scatter_base(tensor, ONES, group=group)),
    "scatter": lambda group: filled(lambda tensor: dist.scatter(tensor, [ONES], 0, group)),
    "scatter_object_list": lambda group: listed(lambda found: dist.scatter_object_list(found, ["a"], 0, group)),
    "shrink_group": lambda group: dist.shrink_group([0], group),
    "split_group": lambda group: dist.split_group(group, [[0]]),
    "_coalescing_manager": lambda group: filled(partial(coalesced, group)),
    "_time_estimator": lambda group: dist._time_estimator(group, CPU).__enter__(),
    "_get_process_group_name": lambda group: type(dist._get_process_group_name(group)),
    "_rank_not_in_group": dist._rank_not_in_group,
    "_device_capability": lambda group: sorted(distributed_c10d._device_capability(group)),
    "_get_object_coll_device": distributed_c10d._get_object_coll_device,
    "_get_pg_config": lambda group: distributed_c10d._get_pg_config(group).keys(),
    "_get_pg_default_device": distributed_c10d._get_pg_default_device,
    "_get_process_group_uid": distributed_c10d._get_process_group_uid,
    "destroy_process_group": dist.destroy_process_group,
}
NAMES_ITSELF = {"get_backend", "monitored_barrier"}  # compares names of backends before it asks a group
REFUSED_CALLS = {"irecv", "isend", "recv", "send", "all_gather_coalesced", "all_to_all", "all_to_all_single"}


def coalesced(group, tensor):
    with dist._coalescing_manager(group):
        dist.all_reduce(tensor, group=group)


def test_each_function_that_takes_a_group_is_in_the_table():
    names = {"group", "process_group", "pg", "parent_pg"}
    functions = {name for name, value in vars(dist).items() if type(value) is FunctionType
                 and names & set(inspect.signature(value).parameters)}  # fmt: skip
    assert not functions - {*FUNCTIONS, *NAMES_ITSELF}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_each_function_does_with_a_sealed_group_what_it_does_with_a_plain_one(plain, alone):
    assert (dist.get_backend(alone), dist.get_backend(plain)) == ("fastrack", "gloo")
    own = dist.new_group([0])
    for name, ask in FUNCTIONS.items():
        if hasattr(distributed_c10d, name):
            found, expected = outcome(ask, own), outcome(ask, plain)
            assert found == expected or (name in REFUSED_CALLS and found is NotImplementedError), name


def test_a_group_may_be_bound_to_a_gpu(monkeypatch):
    pytest.importorskip("torch.accelerator", reason="this version of torch does not name its accelerator")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    init_process_group(KEY, store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        assert isinstance(dist.new_group([0], device_id=torch.device("cuda:0")), SealedProcessGroup)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        assert mesh.get_group("data") is dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_a_hook_may_call_a_group_without_options(alone):
    """As of DDP: `process_group.allreduce([bucket.buffer()])`."""
    assert filled(lambda tensor: alone.allreduce([tensor]).wait()) == [3, 3]
    assert filled(lambda tensor: alone.allreduce(tensor, dist.ReduceOp.MAX).wait()) == [3, 3]
    assert filled(lambda tensor: alone.broadcast([tensor]).wait()) == [3, 3]
    assert filled(lambda tensor: alone.allgather([[tensor]], [ONES]).wait()) == [1, 1]
    assert filled(lambda tensor: alone.reduce_scatter([tensor], [[ONES]]).wait()) == [1, 1]


def test_a_failed_operation_is_no_success(alone):
    works = [dist.all_reduce(torch.ones(3), async_op=True)]
    assert works[0].is_success()
    alone._group._link.session.wipe()
    works.append(dist.all_reduce(torch.ones(3), async_op=True))
    assert [work.is_success() for work in works] == [True, False]
    assert works[0].exception() is None
    assert isinstance(works[1].exception(), ClosedError)
    with pytest.raises(ClosedError):
        works[1].synchronize()


@pytest.mark.usefixtures("alone")
def test_a_writer_goes_to_no_process_whose_group_would_be_plain(tmp_path):
    KEY.save(tmp_path / "owner.key")
    writer = CheckpointWriter(tmp_path, key=tmp_path / "owner.key")
    with pytest.raises(RuntimeError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(writer)


# Threads. Operations of a group have one order on all ranks, or are refused.


def test_a_callback_of_an_operation_begins_the_next_one():
    """As of the hook PowerSGD: it waited for ever."""

    def action(group):
        def twice(future):
            return group.all_reduce(future.value() * 2)

        first, second = torch.ones(3), torch.full((3,), 10.0)
        chained = group.all_reduce(first, async_op=True).then(twice)
        later = group.all_reduce(second, async_op=True)  # of the same kind and size
        return [chained.wait().tolist(), later.wait().tolist()]

    assert on_ranks(Network(2), KEY, action) == [[[8.0] * 3, [20.0] * 3]] * 2


def beside(call, begin=None):
    """Return the error that a call raises in another thread."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)
        ended.set()

    ended = threading.Event()
    (begin or (lambda run: threading.Thread(target=run).start()))(run)
    assert ended.wait(20)
    return found[0]


def test_a_thread_beside_another_is_refused_and_after_it_served():
    def action(group):
        def serve():
            return group.all_reduce(torch.ones(1)).tolist()

        if group.rank == 0:
            pending = group.all_reduce(torch.ones(3), async_op=True)
            refused = beside(serve)
            by_autograd = beside(lambda: group.all_reduce(torch.ones(2), async_op=True), start_unknown)
            asked.set()
            results = pending.wait().tolist(), by_autograd.wait().tolist()
        else:
            refused = asked.wait(20)  # so that the operation of the other rank is not done before
            results = tuple(group.all_reduce(torch.ones(count)).tolist() for count in (3, 2))
        return refused, (*results, beside(serve))

    def start_unknown(run):
        _thread.start_new_thread(run, ())  # as C++ starts those of autograd, which Python does not know

    asked = threading.Event()
    (refused, first), (_, second) = on_ranks(Network(2), KEY, action)
    assert isinstance(refused, RuntimeError)
    assert "process_group=dist.new_group()" in str(refused)
    assert first == second == ([2.0] * 3, [2.0] * 2, [2.0])


def test_like_operations_of_two_threads_do_not_change_places():
    def action(group):
        def reduce():
            return group.all_reduce(torch.ones(3))

        return reduce() if group.rank == 0 else beside(reduce)

    assert all(isinstance(result, AuthenticationError) for result in on_ranks(Network(2), KEY, action))
