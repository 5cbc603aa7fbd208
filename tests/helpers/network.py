"""Ranks as threads of one process, and a network between them that does what a test says."""

import contextlib
import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from fastrack.distributed import SecureGroup

TIMEOUT = 20  # seconds


class Network:
    """Carries messages between ranks.

    `tamper(number, source, target, data)` returns what arrives of a message: tuples (source, target, data). `number`
    counts all messages that were sent. The random bytes at the start of a group are its first messages. With `silent`
    no rank learns that another has closed its connections.
    """

    def __init__(self, size, tamper=None, *, silent=False):
        self.size = size
        self.tamper = tamper
        self.silent = silent
        self.sent = []
        self.arrived = defaultdict(list)
        self.closed = False
        self.changed = threading.Condition()
        if isinstance(tamper, Tampering):
            tamper.network = self

    def transports(self):
        return [MemoryTransport(self, rank) for rank in range(self.size)]

    def send(self, source, target, data):
        with self.changed:
            number = len(self.sent)
            self.sent.append((source, target, data))
            message = source, target, data
            for each in [message] if self.tamper is None else self.tamper(number, *message):
                self.deliver(*each)

    def deliver(self, source, target, data):
        with self.changed:
            self.arrived[source, target].append(data)
            self.changed.notify_all()

    def take(self, source, target, number, seconds):
        with self.changed:
            came = self.changed.wait_for(
                lambda: self.closed or len(self.arrived[source, target]) > number, max(seconds, 0)
            )
            if len(self.arrived[source, target]) > number:
                return self.arrived[source, target][number]
            raise ConnectionError("closed") if came else TimeoutError("timed out")

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class MemoryTransport:
    def __init__(self, network, rank):
        self.network = network
        self.rank = rank
        self.size = network.size
        self.ranks = list(range(network.size))
        self.name = "in memory"
        self.closed = False
        self._received = defaultdict(int)

    def send(self, data, target):
        if self.closed or self.network.closed:
            raise ConnectionError("closed")
        self.network.send(self.rank, target, data.numpy().tobytes())
        return Sent()

    def receive(self, buffer, source):
        number = self._received[source]
        self._received[source] += 1
        return SimpleNamespace(wait=lambda seconds: self._fill(buffer, source, number, seconds))

    def _fill(self, buffer, source, number, seconds):
        data = self.network.take(source, self.rank, number, seconds)
        if len(data) != buffer.numel():
            raise ConnectionError("a message of another size")
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def close(self):
        self.closed = True
        if not self.network.silent:
            self.network.close()


class Sent:
    """A message that is on its way, or dropped."""

    def wait(self, seconds):
        pass


def on_ranks(network, key, action, timeout=TIMEOUT):
    """Run `action(group)` on every rank at once. Return what each returns, or the exception that it raises.

    `key` may be a list, of one key for each rank.
    """
    keys = key if isinstance(key, list) else [key] * network.size

    def run(transport):
        try:
            group = SecureGroup.over(transport, keys[transport.rank], timeout=timeout)
            try:
                return action(group)
            finally:
                arrive(group)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    barrier = threading.Barrier(network.size)

    def arrive(group):
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(0.5)  # a group that is closed ends the operations of others
        group.close()

    with ThreadPoolExecutor(network.size) as pool:
        return list(pool.map(run, network.transports()))


def tensor_of(rank, count, dtype=torch.float32):
    """Return the tensor that a rank has."""
    return (torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 100).to(dtype)


def in_rank_order(tensors, op="sum"):
    """Return what adding the tensors of all ranks in their order gives."""
    total = sum(tensors[1:], tensors[0])
    return total / len(tensors) if op == "mean" else total


class Tampering:
    """A network's `tamper` that does `kind` to the message number `victim`.

    `harmless` if the ranks then get what they would have got.
    """

    KINDS = ("flip", "zeros", "repeat", "misroute", "swap", "drop", "delay", "late")
    LATE = 0.6  # seconds, after which the ranks have given up

    def __init__(self, kind, victim):
        self.kind = kind
        self.victim = victim
        self.chance = random.Random(victim)
        self.held = None
        self.repeated = None
        self.harmless = False
        self.network = None  # which the network sets

    def __call__(self, number, *message):
        source, target, data = message
        if self.held is not None:
            return self.release(message)
        if self.repeated == (source, target):  # the copy is received in its place
            self.harmless = False
        if number != self.victim:
            return [message]
        return getattr(self, self.kind)(source, target, data)

    def release(self, message):
        """Let a held message go, once there is one that it belongs to."""
        (source, target, data), (at, to, other) = self.held, message
        if self.kind == "swap":  # the contents, with the next message that any rank sends
            self.held = None
            self.harmless = data == other  # as of what one rank tells all others
            return [(source, target, other), (at, to, data)]
        if (at, to) == (source, target):
            held, self.held = self.held, None
            return [message, held]
        return [message]

    def flip(self, source, target, data):
        changed = bytearray(data)
        changed[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        return [(source, target, bytes(changed))]

    def zeros(self, source, target, data):
        return [(source, target, bytes(len(data)))]

    def repeat(self, source, target, data):
        self.repeated = source, target
        self.harmless = True  # as long as no message follows, as the copy is not received
        return [(source, target, data)] * 2

    def misroute(self, source, target, data):
        return [(source, (target + 1) % self.network.size, data)]

    def swap(self, *message):
        self.held = message
        return []

    def drop(self, *_):
        return []

    def delay(self, *message):
        """Let the next message of these two ranks overtake this one."""
        self.held = message
        return []

    def late(self, *message):
        """Bring it when the ranks have given up."""
        threading.Timer(self.LATE, self.network.deliver, message).start()
        return []
