"""Whatever a network does to the messages of a group: every rank raises in time, and none has a wrong result."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.cases import each
from helpers.network import Network, Tampering, on_ranks, tensor_of

from fastrack import AuthenticationError, ClosedError, Key
from fastrack.distributed import _messages
from fastrack.format import CHUNK_SIZE

KEY = Key.from_bytes(bytes(range(32)))
TIMEOUT = 0.4  # seconds, less than `Tampering.LATE`
IN_TIME = 20  # seconds, on a busy machine
SLAB = 2 * CHUNK_SIZE // 4  # elements of float32


@pytest.fixture(autouse=True)
def small_slabs(limited):
    limited(group_slab=2)


def send(group):
    """Send from the last rank to the first. The others have nothing to do."""
    if group.rank == group.size - 1:
        return group.send(tensor_of(group.rank, SLAB + 100), 0)
    return group.receive(torch.ones(SLAB + 100), group.size - 1) if group.rank == 0 else None


COUNT = 2 * SLAB + 100  # elements of a shard, in 3 slabs
OPERATIONS = {
    "all_reduce": lambda group: group.all_reduce(tensor_of(group.rank, group.size * COUNT)),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(COUNT), tensor_of(group.rank, group.size * COUNT)),
    "all_gather": lambda group: group.all_gather(torch.ones(group.size * COUNT), tensor_of(group.rank, COUNT)),
    "broadcast": lambda group: group.broadcast(tensor_of(group.rank, COUNT), 1),
    "send": send,
}


def expected_of(operation, size):
    """Return what each rank gets in a network that does no harm, and the number of messages."""
    clean = Network(size)
    return on_ranks(clean, KEY, OPERATIONS[operation], timeout=60), len(clean.sent)  # on a busy machine too


def check_every_rank(operation, kind, victim, expected, *, silent):
    """Run an operation twice in a network that tampers. `silent`: no rank learns that another has given up."""
    tampering = Tampering(kind, victim)
    network = Network(len(expected), tampering, silent=silent)
    case = operation, kind, victim, len(expected), silent

    def twice(group):
        began = time.monotonic()
        try:
            first = OPERATIONS[operation](group)
            try:
                OPERATIONS[operation](group)
            except (AuthenticationError, ClosedError):
                return first, True
            return first, False
        finally:
            assert time.monotonic() - began < IN_TIME, case

    results = on_ranks(network, KEY, twice, timeout=TIMEOUT)
    outcomes = [(result, right) for result, right in zip(results, expected, strict=True) if right is not None]
    for result, right in outcomes:
        if isinstance(result, Exception):
            assert isinstance(result, (AuthenticationError, ClosedError)), case
        else:
            # The confirmation of another rank was lost: this one has the right result, and the next operation fails.
            assert torch.equal(result[0], right), case
    failed = [isinstance(result, Exception) or result[1] for result in results]
    if any(isinstance(result, AuthenticationError) for result, _ in outcomes):
        assert all(fails for fails, right in zip(failed, expected, strict=True) if right is not None), case
    assert tampering.harmless or any(failed), case


@each("operation", OPERATIONS)
@pytest.mark.slow
def test_whatever_happens_to_a_message_no_rank_has_a_wrong_result(operation):
    def check(kind):
        chance = random.Random(operation + kind)
        expected, count = expected_of(operation, chance.choice([2, 3, 4]))
        check_every_rank(operation, kind, chance.randrange(count), expected, silent=chance.random() < 0.5)

    with ThreadPoolExecutor(len(Tampering.KINDS)) as pool:  # as the ranks wait most of the time
        list(pool.map(check, Tampering.KINDS))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@each("size", [2, 3, 4])
@each("operation", OPERATIONS)
def test_whatever_happens_to_any_message_no_rank_has_a_wrong_result(operation, size):
    expected, count = expected_of(operation, size)
    victims = range(count) if size == 3 else random.Random(size).sample(range(count), min(count, 12))
    for kind, victim in itertools.product(Tampering.KINDS, victims):
        check_every_rank(operation, kind, victim, expected, silent=victim % 2 == 0)


@each("operation", OPERATIONS)
def test_slow_messages_do_no_harm(operation):
    def slow(number, *message):
        time.sleep(0.01 * (number % 5 == 0))
        return [message]

    expected, _ = expected_of(operation, 3)
    for result, right in zip(on_ranks(Network(3, slow), KEY, OPERATIONS[operation]), expected, strict=True):
        assert torch.equal(result, right) if right is not None else result is None


def test_a_fault_that_no_rank_notices_is_noticed_here(monkeypatch):
    """A check that cannot fail proves nothing: without tags and commitments a wrong sum comes out."""
    expected, count = expected_of("all_reduce", 2)
    monkeypatch.setattr(_messages.Incoming, "open", open_unchecked)
    with pytest.raises(AssertionError):
        check_all("all_reduce", "flip", range(4, count), expected)


def check_all(operation, kind, victims, expected):
    for victim in victims:
        check_every_rank(operation, kind, victim, expected, silent=False)


def open_unchecked(self, slab, target, deadline):
    """Be `Incoming.open` without a look at the verdict."""
    self._pending[slab].wait(deadline - time.monotonic())
    if self._schedule is None:
        self._schedule = self._place.expand_key(self._session.open(self._memory[:56].tobytes(), self.route))
    self._place.open_run(self._schedule, self._memory[self.slabs.chunks(slab)], target, slab * 2)


def test_what_a_failed_operation_would_have_filled_holds_zeros():
    tensors = [tensor_of(rank, 5000) for rank in range(2)]

    def tamper(_number, source, target, data):
        return [(source, target, data if len(data) < 1000 else bytes(len(data)))]

    results = on_ranks(Network(2, tamper), KEY, lambda group: group.all_reduce(tensors[group.rank]), timeout=5)
    assert all(isinstance(result, AuthenticationError) for result in results)
    assert not any(tensor.any() for tensor in tensors)


def test_a_replay_of_another_session_is_refused():
    first = Network(2)
    on_ranks(first, KEY, lambda group: group.all_reduce(tensor_of(group.rank, 5000)))
    recorded = [data for _, _, data in first.sent]

    def replay(number, source, target, data):
        return [(source, target, recorded[number] if len(recorded[number]) == len(data) else data)]

    results = on_ranks(Network(2, replay), KEY, lambda group: group.all_reduce(tensor_of(group.rank, 5000)), timeout=2)
    assert all(isinstance(result, AuthenticationError) for result in results)


def test_a_confirmation_of_another_operation_is_refused():
    """Rank 1 confirms what it sent to rank 0. That must not pass for its confirmation of what rank 0 sent to it."""
    macs = []

    def tamper(_number, source, target, data):
        if source == 1 and len(data) == 32:
            macs.append(data)  # random bytes, and MACs of the start, of what rank 1 sent, and of what it got
            return [(source, target, macs[2] if len(macs) == 4 else data)]
        return [(source, target, data)]

    def action(group):
        tensor = torch.ones(3)
        (group.send if group.rank == 1 else group.receive)(tensor, 1 - group.rank)
        (group.send if group.rank == 0 else group.receive)(tensor, 1 - group.rank)

    result, _ = on_ranks(Network(2, tamper), KEY, action, timeout=2)
    assert len(macs) == 4
    assert isinstance(result, AuthenticationError)


def test_a_rank_with_another_key_is_refused_by_all():
    results = on_ranks(Network(3), [KEY, KEY, Key.generate()], lambda group: group.rank, timeout=5)
    assert all(isinstance(result, AuthenticationError) for result in results)
