"""Sealed collectives among ranks that are threads: results, and what a hostile network can do."""

import gc
import itertools
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.network import Network, in_rank_order, on_ranks, tensor_of

from fastrack import AuthenticationError, ClosedError, DeviceError, Key, LeaseError, trace
from fastrack._keys.leases import LeasePage, Moment
from fastrack.distributed import SecureGroup
from fastrack.distributed._messages import SLAB_CHUNKS
from fastrack.format import CHUNK_SIZE

KEY = Key.from_bytes(bytes(range(32)))
SLAB = SLAB_CHUNKS * CHUNK_SIZE // 4  # float32 elements of a slab
ONES = torch.ones(5000)
FLOATS = [torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def run(size, action, key=KEY):
    results = on_ranks(Network(size), key, action)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class TestResults:
    @each("size", [1, 2, 3, 4])
    @each("count", [0, 1, 63, 64 * 4, 4096, 4097, 100_003, 3 * SLAB + 5])
    @pytest.mark.slow
    def test_all_reduce_adds_in_the_order_of_ranks(self, size, count):
        expected = in_rank_order([tensor_of(rank, count) for rank in range(size)])
        for result in run(size, lambda group: group.all_reduce(tensor_of(group.rank, count))):
            assert torch.equal(result, expected)

    @each(("dtype", "op"), [*itertools.product(FLOATS, ["sum", "mean"]), (torch.int64, "sum")])
    def test_every_dtype_is_added_as_torch_does(self, dtype, op):
        expected = in_rank_order([tensor_of(rank, 5000, dtype) for rank in range(3)], op)
        for result in run(3, lambda group: group.all_reduce(tensor_of(group.rank, 5000, dtype), op)):
            assert torch.equal(result, expected)

    @each("count", [0, 1, 4096, SLAB + 7])
    def test_reduce_scatter_gives_each_rank_its_shard(self, count):
        whole = [tensor_of(rank, 3 * count) for rank in range(3)]
        expected = in_rank_order(whole, "mean").view(3, -1)

        def action(group):
            given = whole[group.rank].clone()
            output = group.reduce_scatter(torch.empty(count), given, "mean")
            assert torch.equal(given, whole[group.rank])
            return output

        for rank, result in enumerate(run(3, action)):
            assert torch.equal(result, expected[rank])

    @each("in_place", [True, False])
    @each("count", [0, 1, 4096, SLAB + 7])
    def test_all_gather_collects_the_shards(self, count, in_place):
        expected = torch.cat([tensor_of(rank, count) for rank in range(3)])

        def action(group):
            output = torch.empty(3 * count)
            own = output.view(3, -1)[group.rank] if in_place else torch.empty(count)
            own.copy_(tensor_of(group.rank, count))
            return group.all_gather(output, own)

        for result in run(3, action):
            assert torch.equal(result, expected)

    @pytest.mark.parametrize("source", [0, 2])
    def test_broadcast_gives_all_the_tensor_of_one(self, source):
        for result in run(3, lambda group: group.broadcast(tensor_of(group.rank, 70_000), source)):
            assert torch.equal(result, tensor_of(source, 70_000))

    def test_two_ranks_send_to_each_other(self):
        def action(group):
            other = 1 - group.rank
            got = torch.empty(5, 7)
            for turn in (0, 1):
                if group.rank == turn:
                    group.send(tensor_of(group.rank, 35).view(5, 7), other)
                else:
                    group.receive(got, other)
            return got

        for rank, result in enumerate(run(2, action)):
            assert torch.equal(result, tensor_of(1 - rank, 35).view(5, 7))

    def test_operations_that_run_meanwhile_come_in_order(self):
        def action(group):
            futures = [group.all_reduce(torch.full((100,), float(i)), async_op=True) for i in range(20)]
            return torch.stack([future.wait() for future in futures])

        for result in run(2, action):
            assert torch.equal(result, torch.arange(20.0).mul(2)[:, None].expand(20, 100))

    def test_parameters_are_filled_without_a_gradient(self):
        def action(group):
            parameter = torch.nn.Parameter(torch.full((3,), float(group.rank)))
            group.broadcast(parameter.detach(), 1)
            return parameter.detach()

        for result in run(2, action):
            assert result.tolist() == [1, 1, 1]


# Keys.


def test_no_plaintext_is_sent():
    secret = torch.frombuffer(bytearray(b"a secret gradient " * 1000), dtype=torch.uint8)
    network = Network(2)
    on_ranks(network, KEY, lambda group: group.all_gather(torch.empty(36_000, dtype=torch.uint8), secret))
    assert not any(b"secret grad" in data for _, _, data in network.sent)


def test_a_trace_shows_the_steps_of_a_collective(tmp_path):
    with trace(tmp_path / "trace.json"):
        run(2, lambda group: group.all_reduce(tensor_of(group.rank, 3 * SLAB)))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {"all_reduce", "seal", "wait", "open", "add", "drain", "confirm"}
    (first, *_) = [event for event in spans if event["name"] == "all_reduce"]
    inside = [event["name"] for event in spans if event["tid"] == first["tid"] and event is not first]
    assert [inside.count(step) for step in ("seal", "wait", "open", "add")] == [4, 4, 4, 2]
    assert all(first["ts"] <= event["ts"] for event in spans if event["tid"] == first["tid"])


def test_a_forked_child_cannot_use_the_group():
    group = SecureGroup.over(Network(1).transports()[0], KEY)
    tensor = torch.ones(3)

    def refused():
        try:
            group.all_reduce(tensor)
        except ClosedError:
            return True
        return False

    gc.collect()  # not in the child: groups of gloo in other tests' garbage wait for threads that it lacks
    assert in_forked_child(refused)
    assert group.all_reduce(tensor).tolist() == [1, 1, 1]
    group.close()


def test_a_group_is_in_no_pickle_and_its_repr_has_no_secret():
    def action(group):
        with pytest.raises(TypeError, match="stays in its process"):
            pickle.dumps(group)
        return repr(group)

    assert run(2, action) == ["<SecureGroup: rank 0 of 2>", "<SecureGroup: rank 1 of 2>"]


# Failures of operations that nobody waits for.


def altered(_, source, target, data):
    """Alter all messages but random bytes and MACs."""
    return [(source, target, data if len(data) == 32 else bytes(len(data)))]


def fail(action):
    """Run `action(group, future)` on two ranks whose first operation fails."""

    def run(group):
        future = group.all_reduce(torch.ones(5000), async_op=True)
        group._thread.submit(int).result()  # it has ended
        return action(group, future)

    return on_ranks(Network(2, altered), KEY, run, timeout=5)


def test_close_raises_what_nobody_waited_for():
    assert all(isinstance(result, AuthenticationError) for result in fail(lambda *_: None))


def test_what_a_future_has_told_close_does_not():
    def action(group, future):
        for ask in (future.wait, future.value):
            with pytest.raises(AuthenticationError):
                ask()
        future.then(lambda done: done)
        future.add_done_callback(lambda done: done)
        group.close()
        return True

    assert fail(action) == [True, True]


def test_what_the_next_operation_has_told_close_does_not():
    def action(group, _):
        with pytest.raises(ClosedError, match="altered"):
            group.all_reduce(torch.ones(3))
        group.close()
        return True

    assert fail(action) == [True, True]


def test_a_block_that_ends_with_another_error_keeps_both():
    def action(group, _):
        with pytest.raises(ZeroDivisionError) as raised, group:
            raise ZeroDivisionError
        return raised.value.__notes__[0]

    assert all("altered" in note for note in fail(action))


# What ranks must agree in.


DIFFERENT = {
    "all_reduce": (lambda group: group.all_reduce(ONES), lambda group: group.all_reduce(ONES, "mean")),
    "reduce_scatter": (
        lambda group: group.reduce_scatter(torch.ones(3), torch.ones(6), "max"),
        lambda group: group.reduce_scatter(torch.ones(3), torch.ones(6), "min"),
    ),
    "broadcast": (lambda group: group.broadcast(ONES, 0), lambda group: group.broadcast(ONES, 1)),
    "dtype": (lambda group: group.all_reduce(ONES), lambda group: group.all_reduce(ONES.int())),
    "count": (lambda group: group.all_reduce(ONES), lambda group: group.all_reduce(ONES[1:])),
    "operation": (lambda group: group.all_reduce(ONES), lambda group: group.broadcast(ONES, 0)),
}


def test_ranks_that_mean_different_operations_are_refused():
    def refuse(calls):
        results = on_ranks(Network(2), KEY, lambda group: calls[group.rank](group), timeout=1)
        return all(isinstance(result, AuthenticationError) for result in results)

    with ThreadPoolExecutor(len(DIFFERENT)) as pool:  # as the ranks wait most of the time
        assert dict(zip(DIFFERENT, pool.map(refuse, DIFFERENT.values()), strict=True)) == dict.fromkeys(DIFFERENT, True)


def test_operations_of_different_kinds_have_one_sequence():
    """A message of an operation does not open in another place of the sequence, whatever came between."""

    def action(group):
        group.all_reduce(torch.ones(3))
        group.broadcast(torch.ones(3), 0)
        return group._link.next_number(-1, -1), group._link.next_number(0, 1)

    assert run(2, action) == [(3, 1), (3, 1)]


@pytest.mark.parametrize(("op", "expected"), [("max", [2, 0]), ("min", [0, -2])])
def test_the_greatest_and_the_least_are_found(op, expected):
    for result in run(3, lambda group: group.all_reduce(torch.tensor([1.0, -1.0]) * group.rank, op)):
        assert result.tolist() == expected


# Misuse.


def test_a_closed_group_refuses_operations():
    def action(group):
        group.close()
        group.close()
        with pytest.raises(ClosedError):
            group.all_reduce(torch.ones(3))

    run(1, action)


def test_what_cannot_be_sent_is_refused_at_once():
    refused = [
        (ValueError, "contiguous", lambda group: group.all_reduce(torch.ones(4, 4).t()[1:])),
        (ValueError, "contiguous", lambda group: group.all_reduce(torch.ones(4).to_sparse())),
        (DeviceError, "meta", lambda group: group.all_reduce(torch.ones(4, device="meta"))),
        (ValueError, "op=", lambda group: group.all_reduce(torch.ones(4), "product")),
        (ValueError, "op='max'", lambda group: group.all_reduce(torch.ones(4, dtype=torch.complex64), "max")),
        (ValueError, "mean", lambda group: group.all_reduce(torch.ones(4, dtype=torch.int32), "mean")),
        (ValueError, "elements", lambda group: group.all_gather(torch.ones(4), torch.ones(5))),
        (ValueError, "rank", lambda group: group.broadcast(torch.ones(4), 1)),
        (ValueError, "another rank", lambda group: group.send(torch.ones(4), 0)),
    ]

    def action(group):
        for error, match, call in refused:
            with pytest.raises(error, match=match):
                call(group)
        return group.all_reduce(torch.ones(2)).tolist()

    assert run(1, action) == [[1, 1]]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="leases need Linux")
def test_a_group_ends_with_the_lease_of_its_key():
    page = LeasePage.create([Key.from_bytes(bytes(range(32)))], Moment.now().after(60))
    ended = threading.Barrier(2)
    sessions = []

    def action(group):
        assert torch.equal(group.all_reduce(ONES.clone()), 2 * ONES)
        sessions.append(group._link.session)
        if ended.wait(60) == 0:
            page.end()
        ended.wait(60)
        with pytest.raises(LeaseError, match="expected a lease in force"):
            group.all_reduce(ONES.clone())

    run(2, action, page.keys[0])
    assert not any(any(session._secrets) for session in sessions)
