"""A sealed group answers each question of torch as a plain one does, or refuses it, and never advises a plain one."""

import _thread
import threading

import torch
from helpers.network import Network, on_ranks

from fastrack import AuthenticationError, Key

KEY = Key.from_bytes(bytes(range(32)))

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
