"""A session is of its ranks in order, its group and run, and of the default group; a message is of its kind."""

import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.cases import each
from helpers.network import MemoryTransport, Network, on_ranks

from fastrack import AuthenticationError, ClosedError, Key
from fastrack._training.checkpoints import preemption
from fastrack.distributed import SecureGroup, _group, _link, _process_group, _session, init_process_group

KEY = Key.from_bytes(bytes(range(32)))
RUN = "TORCHELASTIC_RUN_ID"


# An attacker who wires the ranks chooses which processes form a group, and which of them each rank takes for which.


@dataclass(frozen=True)
class Group:
    """The group that ranks are about to form."""

    run: str
    default: _session.GroupSession | None
    name: str
    ranks: tuple[int, ...]


class Wired(MemoryTransport):
    """A rank of a group. `nodes` are the processes that it is connected to, by the rank that it takes them for."""

    def __init__(self, network, group, rank, nodes):
        super().__init__(network, rank)
        self.node, self.nodes = nodes[rank], nodes
        self.ranks, self.name = list(group.ranks), group.name

    def send(self, data, target):
        self.network.send(self.node, self.nodes[target], data.numpy().tobytes())
        return SimpleNamespace(wait=lambda _: None)

    def receive(self, buffer, source):
        number = self._received[source]
        self._received[source] += 1
        return SimpleNamespace(wait=lambda seconds: self._take(buffer, self.nodes[source], number, seconds))

    def _take(self, buffer, node, number, seconds):
        buffer.copy_(
            torch.frombuffer(bytearray(self.network.take(node, self.node, number, seconds)), dtype=torch.uint8)
        )


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(6) as pool:
        yield pool


@pytest.fixture
def default(monkeypatch):
    """The session of the default group, of each thread that is a rank; a thread has none, or that of all, at first."""

    class Default(threading.local):
        session = None

    default = Default()
    monkeypatch.setattr(_group, "_default_session", lambda: default.session, raising=False)
    return default


DEFAULTS = [  # sessions of default groups: of a run, of that run when it was started again, and of another run
    _session.GroupSession(
        KEY.material(), [bytes([start + rank]) * 32 for rank in range(0, 40, 10)], range(4), "0 1", run
    )
    for run, start in (("a", 1), ("a", 2), ("b", 3))
]


def start(pool, default, members):
    """Start the ranks that a wiring has brought together. Return how each ends: None if it is content."""
    network = Network(len(members), silent=True)  # no rank learns that another has given up

    def run(group, rank, nodes):
        default.session = group.default
        try:
            SecureGroup.over(Wired(network, group, rank, nodes), KEY, timeout=20, run=group.run).close()
        except AuthenticationError as error:
            return error
        return None

    return list(pool.map(run, *zip(*members, strict=True)))


def wirings(seed, groups_of):
    """Yield what a wiring brings together, over and over: members (group, rank, nodes), and whether it is right."""
    chance = random.Random(seed)
    while True:
        size = chance.choice([2, 2, 3])
        groups = groups_of(chance, size)
        processes = [(group, rank) for group in groups for rank in range(size)]
        chance.shuffle(processes)
        if chance.random() < 0.5:  # each rank where it belongs, but perhaps among those of other groups
            processes.sort(key=lambda process: process[1])
            processes = [processes[first :: len(groups)] for first in range(len(groups))]
        else:
            processes = [processes[first : first + size] for first in range(0, len(processes), size)]
        for together in processes:
            members = []
            for node, (group, rank) in enumerate(together):
                others = [other for other in range(size) if other != node]
                if chance.random() < 0.5:
                    chance.shuffle(others)
                else:
                    others.sort(key=lambda other: together[other][1])
                members.append((group, rank, [*others[:rank], node, *others[rank:]]))
            is_right = len({group for group, _ in together}) == 1 and all(
                [together[node][1] for node in nodes] == list(range(size)) for _, _, nodes in members
            )
            yield members, is_right


def pairs_of_groups(chance, size):
    """Return two groups that differ in one thing or more."""

    def draw():
        ranks = chance.choice([range(size), range(size, 2 * size), range(size)[::-1]])
        return Group(
            chance.choice(["", "a", "b"]), chance.choice([None, *DEFAULTS]), chance.choice(["0 1", "3 1"]), (*ranks,)
        )

    one = draw()
    other = draw()
    if chance.random() < 0.7:  # in one thing only
        name = chance.choice(["run", "default", "name", "ranks"])
        other = Group(**{**vars(one), name: getattr(other, name)})
    return [one, other] if one != other else pairs_of_groups(chance, size)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_wiring_of_ranks_groups_and_runs_goes_unnoticed(pool, default, count):
    outcomes = Counter()
    for members, is_right in itertools.islice(wirings(count, pairs_of_groups), 2 * count):
        results = start(pool, default, members)
        if is_right:
            assert results == [None] * len(members)
        else:
            assert all(isinstance(result, AuthenticationError) for result in results), members
        outcomes[is_right] += 1
        if outcomes[False] == count:
            break
    assert outcomes[False] == count
    assert outcomes[True] > count / 50


# Messages of an earlier group of the same ranks, of one name and run.


def step(group):
    tensor = torch.full((100,), group.rank + 1.0)
    group.broadcast(tensor, 0)
    group.all_gather(torch.empty(group.size * 100), tensor)
    return group.all_reduce(tensor).sum().item()


@pytest.mark.parametrize("within", [None, DEFAULTS[0]], ids=["default", "later"])
def test_no_message_of_an_earlier_group_of_the_same_ranks_is_accepted(default, within):
    type(default).session = within
    earlier = Network(2)
    assert on_ranks(earlier, KEY, step) == [200, 200]

    def replay(victim, old):
        replaced = []

        def tamper(number, source, target, data):
            if number == victim and len(data) == len(old) and data != old:
                replaced.append(target)
                return [(source, target, old)]
            return [(source, target, data)]

        results = on_ranks(Network(2, tamper), KEY, step, timeout=5)
        return all(isinstance(results[target], AuthenticationError) for target in replaced)

    cases = [
        (victim, old)
        for victim, (source, target, data) in enumerate(earlier.sent)
        for old in {old for at, to, old in earlier.sent if (at, to, len(old)) == (source, target, len(data))}
    ]
    with ThreadPoolExecutor(len(cases)) as pool:  # as the ranks wait most of the time
        assert all(pool.map(replay, *zip(*cases, strict=True)))


# Kinds of operations.


def call(name, tensors, root=None, op=dist.ReduceOp.SUM):
    """Return a call of a method of torch's process groups with its options."""
    options = SimpleNamespace(rootRank=root, reduceOp=op)
    return lambda group: getattr(group, name)(*tensors(), options).wait()


def one():
    return [[torch.tensor([5.0])]]


def both():
    return [[torch.tensor([5.0, 6.0])]]


def gathered():
    return [[[torch.zeros(1), torch.zeros(1)]], [torch.tensor([5.0])]]


ALIKE = [  # kinds whose messages have the same number and sizes
    {
        "barrier": lambda group: group.barrier().wait(),
        "all_reduce": call("allreduce", one),
        "reduce to 0": call("reduce", one, 0),
        "reduce to 1": call("reduce", one, 1),
    },
    {
        "all_reduce": call("allreduce", lambda: [[torch.tensor([9.0], dtype=torch.float64)]], op=dist.ReduceOp.MIN),
        "is_due": lambda group: preemption._least(9.0, group) == 9,
    },
    {
        "all_gather": call("allgather", gathered),
        "gather to 0": call("gather", gathered, 0),
        "gather to 1": call("gather", gathered, 1),
    },
    {
        "broadcast": call("broadcast", both, 0),
        "scatter": call("scatter", lambda: [[torch.zeros(1)], [[torch.ones(1), torch.ones(1)]]], 0),
    },
]


def test_no_two_kinds_of_operations_are_one_to_a_group():
    def is_refused(kinds, pair):
        results = on_ranks(
            Network(2),
            KEY,
            lambda group: kinds[pair[group.rank]](_process_group.SealedProcessGroup(group, KEY, 5)),
            timeout=2,
        )
        return all(isinstance(result, AuthenticationError) for result in results)

    cases = [(kinds, pair) for kinds in ALIKE for pair in itertools.permutations(kinds, 2)]
    with ThreadPoolExecutor(len(cases)) as pool:  # as the ranks wait most of the time
        refused = pool.map(is_refused, *zip(*cases, strict=True))
        assert [pair for (_, pair), is_refused in zip(cases, refused, strict=True) if not is_refused] == []


@each("kinds", ALIKE)
def test_an_operation_of_one_kind_succeeds(kinds):
    for kind in kinds.values():
        assert True in on_ranks(
            Network(2), KEY, lambda group, kind=kind: kind(_process_group.SealedProcessGroup(group, KEY, 5))
        )


# Later groups, however they are made.


@pytest.fixture
def made(monkeypatch):
    """The parts of each session, from now on: ranks, name, run, and the session that it is derived from."""
    made = []
    monkeypatch.setattr(
        _link,
        "GroupSession",
        lambda key, randoms, *rest: made.append(rest) or _session.GroupSession(key, randoms, *rest),
    )
    return made


WAYS = {
    "new_group": lambda: dist.new_group([0]),
    "local synchronisation": lambda: dist.new_group([0], use_local_synchronization=True),
    "subgroups": lambda: dist.new_subgroups(1),
    "group": lambda: SecureGroup(KEY).close(),
    "group of a group": lambda: SecureGroup(KEY, dist.new_group([0])).close(),
    "group of a plain group": lambda: SecureGroup(KEY, dist.new_group([0], backend="gloo")).close(),
    "over": lambda: SecureGroup.over(Network(1).transports()[0], KEY).close(),
}


def test_each_later_group_derives_from_the_default_group_however_it_is_made(alone, made):
    for way, make in WAYS.items():
        made.clear()
        make()
        assert made, way
        assert all(within is alone.session for *_, within in made), way
        assert len({name for _, name, *_ in made}) == len(made), way
    with pytest.raises(RuntimeError, match="split"):  # torch refuses it: it splits only groups of NCCL
        dist.split_group(split_ranks=[[0]])

    same = KEY.material(), [bytes(32)], [0], "0 1", ""
    assert len({_session.GroupSession(*same, within).mac(b"", 0) for within in (None, alone.session, *DEFAULTS)}) == 5

    first = alone.session
    dist.destroy_process_group()
    made.clear()
    init_process_group(KEY, store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])
    assert [within for *_, within in made] == [None, dist.group.WORLD.session]
    assert dist.group.WORLD.session is not first


def test_no_group_is_made_once_the_default_group_has_ended(alone):
    alone._group.close()
    transport = Network(1).transports()[0]
    with pytest.raises(ClosedError):
        SecureGroup.over(transport, KEY)
    assert transport.closed  # so that other ranks need not wait for the timeout


def test_a_rank_whose_default_group_has_ended_ends_the_start_of_all(pool, default):
    ended = _session.GroupSession(KEY.material(), [], [], "0 1", "")
    ended.wipe()

    def start(transport):
        default.session = DEFAULTS[0] if transport.rank else ended
        began = time.monotonic()
        with pytest.raises(AuthenticationError if transport.rank else ClosedError):
            SecureGroup.over(transport, KEY, timeout=300)
        return time.monotonic() - began

    assert max(pool.map(start, Network(3).transports())) < 60  # not after the timeout


# Runs.


def test_the_run_is_given_or_torchruns_or_that_of_the_default_group(monkeypatch, made):
    def runs_of(**given):
        made.clear()
        init_process_group(KEY, store=dist.HashStore(), rank=0, world_size=1, **given)
        dist.new_group([0])
        SecureGroup(KEY).close()
        SecureGroup(KEY, run="own").close()
        dist.destroy_process_group()
        return [run for *_, run, _ in made]

    monkeypatch.delenv(RUN, raising=False)
    assert runs_of() == ["", "", "", "own"]
    monkeypatch.setenv(RUN, "of torchrun")
    assert runs_of() == ["of torchrun"] * 3 + ["own"]
    assert runs_of(run="given") == ["given"] * 3 + ["own"]


def test_a_run_that_is_no_text_is_refused_by_all_ranks():
    network = Network(1)
    (transport,) = network.transports()
    with pytest.raises(TypeError, match="run=: expected the name"):
        SecureGroup.over(transport, KEY, run=7)
    assert transport.closed
