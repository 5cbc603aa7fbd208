"""Sealed collectives of tensors on fake GPUs: results, order on streams, faults, and what is left in memory."""

import gc
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from helpers import fake_kernels
from helpers.cuda_rig import within
from helpers.fake_cuda import MODES
from helpers.fake_torch_cuda import FakeTorchCuda
from helpers.network import Network, Tampering, in_rank_order, on_ranks, tensor_of

import fastrack._devices
from fastrack import AuthenticationError, ClosedError, DeviceError, Key
from fastrack.distributed import SecureGroup, _places
from fastrack.distributed._process_group import SealedProcessGroup
from fastrack.format import CHUNK_SIZE

KEY = Key.from_bytes(bytes(range(32)))
SLAB = 2 * CHUNK_SIZE // 4  # float32 elements of two chunks
COUNT = 3 * CHUNK_SIZE  # elements of three shards of a few chunks


def content(rank, count=COUNT, dtype=torch.float32):
    return tensor_of(rank, count, dtype)


def memory(tensor):
    """Return the memory of a device as it is now, whatever its streams have still to do."""
    with torch._C.DisableTorchFunction():
        return tensor.detach().clone()


class Gpus:
    """A GPU for each rank, and groups of these ranks."""

    def __init__(self, monkeypatch, size, mode="lazy", seed=0):
        self.fake = FakeTorchCuda(monkeypatch, size, mode, seed)
        self.size = size

    def run(self, action, network=None, timeout=20):
        """Run `action(group, new)` on every rank; `new` makes a tensor on its GPU. Return results and errors."""

        def on_rank(group):
            with self.fake.seen():
                return action(group, self.fake.drivers[group.rank].tensor)

        return within(120, lambda: on_ranks(network or Network(self.size), KEY, on_rank, timeout))

    def results(self, action):
        results = self.run(action)
        for result in results:
            if isinstance(result, Exception):
                raise result
        self.fake.stop()
        return results


@pytest.fixture
def gpus(monkeypatch):
    return lambda *arguments: Gpus(monkeypatch, *arguments)


# Results.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.slow
def test_all_reduce_adds_in_the_order_of_ranks(gpus, size, mode):
    counts = [0, 1, 64 * size, COUNT, COUNT + 1]

    def action(group, new):
        return [memory(group.all_reduce(new(content(group.rank, count)))) for count in counts]

    for result in gpus(size, mode).results(action):
        for count, got in zip(counts, result, strict=True):
            assert torch.equal(got, in_rank_order([content(rank, count) for rank in range(size)])), count


@pytest.mark.parametrize("count", [2 * SLAB, 2 * (2 * SLAB + 5)])
def test_slabs_of_a_message_arrive_in_their_places(gpus, count, limited):
    limited(group_slab=2)
    expected = in_rank_order([content(rank, count) for rank in range(2)], "mean")
    for result in gpus(2).results(lambda group, new: memory(group.all_reduce(new(content(group.rank, count)), "mean"))):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_every_dtype_is_added_as_torch_does(gpus, dtype):
    expected = in_rank_order([content(rank, 5000, dtype) for rank in range(3)])
    for result in gpus(3).results(lambda group, new: memory(group.all_reduce(new(content(group.rank, 5000, dtype))))):
        assert torch.equal(result, expected)


def each_operation(group, new):
    """Return what each operation but `all_reduce` fills on a rank of three; `all_gather` in place, too."""
    rank = group.rank
    shard, whole, parts = new(torch.zeros(1000)), new(torch.zeros(3000)), new(torch.zeros(3000))
    group.reduce_scatter(shard, new(content(rank, 3000)), "mean")
    group.all_gather(whole, new(content(rank, 1000)))
    own = parts.view(3, -1)[rank]
    own.copy_(new(content(rank, 1000)))
    group.all_gather(parts, own)
    sent = group.broadcast(new(content(rank)), 1)
    if rank == 1:
        group.send(new(content(1, 77)), 2)
    got = group.receive(new(torch.zeros(77)), 1) if rank == 2 else None
    return [memory(filled) for filled in (shard, whole, parts, sent)] + [got if got is None else memory(got)]


@pytest.mark.parametrize("mode", MODES)
def test_each_operation_fills_what_it_does_in_host_memory(gpus, mode):
    results = gpus(3, mode).results(each_operation)
    in_host_memory = on_ranks(Network(3), KEY, lambda group: each_operation(group, torch.clone))
    for got, right in zip(results, in_host_memory, strict=True):
        assert all(one is other is None or torch.equal(one, other) for one, other in zip(got, right, strict=True))


def test_ranks_on_gpus_and_in_host_memory_understand_each_other(gpus):
    def action(group, new):
        tensor = content(group.rank)
        return memory(group.all_reduce(new(tensor) if group.rank else tensor))

    expected = in_rank_order([content(rank) for rank in range(3)])
    assert all(torch.equal(result, expected) for result in gpus(3).results(action))


# Streams and futures.


@pytest.mark.parametrize("seed", range(12))
def test_operations_come_after_the_work_of_the_caller_s_stream(gpus, seed):
    """The content of each tensor arrives late, and a result is there when the call returns."""
    given = gpus(2, "lazy", seed)

    def action(group, new):
        tensors = [new(content(group.rank, 5000) + turn) for turn in range(3)]
        futures = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
        first = [memory(future.wait()) for future in futures]
        tensors[0].div_(2)  # on the caller's stream
        return [*first, memory(group.all_reduce(tensors[0]))]

    sums = [in_rank_order([content(rank, 5000) + turn for rank in range(2)]) for turn in range(3)]
    for result in given.results(action):
        assert all(torch.equal(got, right) for got, right in zip(result, [*sums, sums[0]], strict=True))
    assert sorted(given.fake.futures) == [["cuda:0"]] * 4 + [["cuda:1"]] * 4


def test_torch_reduces_gathers_and_scatters_through_a_process_group(gpus):
    def action(group, new):
        torch_group = SealedProcessGroup(group, KEY, 20)
        bucket, whole, shard = new(content(group.rank)), new(torch.zeros(2000)), new(torch.zeros(1000))
        torch_group.allreduce([bucket], dist.AllreduceOptions()).wait()
        torch_group.all_gather_single(whole, new(content(group.rank, 1000)), None).wait()
        mean = dist.ReduceScatterOptions()
        mean.reduceOp = dist.ReduceOp.AVG
        torch_group.reduce_scatter_single(shard, new(content(group.rank, 2000)), mean).wait()
        return memory(bucket), memory(whole), memory(shard)

    expected = in_rank_order([content(rank, 2000) for rank in range(2)], "mean").view(2, -1)
    for rank, (bucket, whole, shard) in enumerate(gpus(2).results(action)):
        assert torch.equal(bucket, in_rank_order([content(rank) for rank in range(2)]))
        assert torch.equal(whole, torch.cat([content(0, 1000), content(1, 1000)]))
        assert torch.equal(shard, expected[rank])


# Faults.

OPERATIONS = {
    "all_reduce": lambda group, new: group.all_reduce(new(content(group.rank))),
    "reduce_scatter": lambda group, new: group.reduce_scatter(new(torch.ones(9000)), new(content(group.rank, 27_000))),
    "all_gather": lambda group, new: group.all_gather(new(torch.ones(27_000)), new(content(group.rank, 9000))),
    "broadcast": lambda group, new: group.broadcast(new(content(group.rank, 9000)), 1),
    "send": lambda group, new: (
        (group.send(new(content(1, 9000)), 2) if group.rank == 1 else group.receive(new(torch.ones(9000)), 1))
        if group.rank
        else None
    ),
}


@contextmanager
def recorded(outcome):
    """Record the error of a block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the test looks at it
        outcome.append(error)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [("all_reduce", kind) for kind in Tampering.KINDS]
    + [(name, kind) for name in [*OPERATIONS][1:] for kind in ("flip", "drop")],
)
def test_whatever_happens_to_a_message_no_rank_has_a_wrong_result(gpus, operation, kind):
    def once(group, new):
        result = OPERATIONS[operation](group, new)
        return None if result is None else memory(result)

    def twice(group, new):
        first, errors = once(group, new), []
        with recorded(errors):
            once(group, new)
        return first, errors

    clean = Network(3)
    expected = on_ranks(clean, KEY, lambda group: OPERATIONS[operation](group, torch.clone))
    start = 12  # messages, before the operation
    victim = start + (7 * len(kind) + len(operation)) % (len(clean.sent) - start)
    tampering = Tampering(kind, victim)
    given = gpus(3, "lazy", victim)
    results = given.run(twice, Network(3, tampering), timeout=0.4)
    refused = False
    for result, right in zip(results, expected, strict=True):
        if right is None:
            continue
        if isinstance(result, Exception):
            assert isinstance(result, (AuthenticationError, ClosedError)), result
            refused = True
        else:  # the confirmation of another rank was lost: the next operation fails
            assert torch.equal(result[0], right)
            refused = refused or bool(result[1])
    assert refused or tampering.harmless
    given.fake.stop()


@pytest.mark.parametrize("seed", range(5))
def test_a_bad_chunk_is_told_by_its_number_and_every_result_holds_zeros(gpus, seed):

    def tamper(_number, source, target, data):
        if len(data) < 1000 or (source, target) != (0, 1):
            return [(source, target, data)]
        changed = bytearray(data)
        changed[56 + 16400 + 5] ^= 1
        return [(source, target, bytes(changed))]

    def action(group, new):
        tensor = new(content(group.rank, 20_000))
        with pytest.raises(AuthenticationError) as caught:
            group.all_reduce(tensor)
        return caught.value.chunk, bool(memory(tensor).any())

    given = gpus(2, "lazy", seed)
    results = given.run(action, Network(2, tamper))
    assert results[1] == (1, False)
    assert results[0] == (None, False)
    given.fake.stop()


@pytest.mark.parametrize("upload", range(2))
def test_what_the_bus_alters_on_its_way_to_a_gpu_is_told(gpus, upload):
    """Of rank 1: chunks of the two runs that it opens, with their keys behind them."""
    given, tensors = gpus(2), {}
    driver = given.fake.drivers[1]
    driver.flips[driver.calls["upload"] + upload + 1] = 40

    def action(group, new):
        tensors[group.rank] = new(content(group.rank, 20_000))
        group.all_reduce(tensors[group.rank])

    results = given.run(action, timeout=2)
    assert all(isinstance(result, AuthenticationError) for result in results), results
    assert not any(memory(tensor).any() for tensor in tensors.values())


@pytest.mark.parametrize("number", range(3))
def test_a_launch_that_is_lost_ends_the_operation_on_every_rank_and_leaves_zeros(gpus, number):
    given, tensors, left = gpus(2), {}, [number]
    driver = given.fake.drivers[1]
    launch = driver.launch

    def lose(*operands):
        left[0] -= 1
        if left[0] != -1:
            launch(*operands)

    driver.launch = lose

    def action(group, new):
        tensors[group.rank] = new(content(group.rank, 20_000))
        group.all_reduce(tensors[group.rank])

    results = given.run(action, timeout=2)
    assert left[0] < 0
    assert all(isinstance(result, (AuthenticationError, DeviceError)) for result in results), results
    assert not any("chunk -" in str(result) for result in results), results
    assert not any(memory(tensor).any() for tensor in tensors.values())


@pytest.mark.slow
def test_a_gpu_that_fails_ends_the_operation_on_every_rank(gpus):
    for number in range(1, 400, 9):
        given, tensors = gpus(2, "lazy", number), {}
        driver = given.fake.drivers[0]

        def action(group, new, tensors=tensors, driver=driver, number=number):
            tensors[group.rank] = new(content(group.rank, 5000))
            group.broadcast(new(torch.zeros(5)), 0)
            if group.rank == 0:
                driver.fail_at(number)
            group.all_reduce(tensors[group.rank])

        results = given.run(action, timeout=2)
        failed = driver.failed
        driver.fail_at(None)
        if failed is None:
            assert results == [None, None]
            assert number > 50
            return
        if any(isinstance(result, Exception) for result in results):
            assert isinstance(results[0], DeviceError), (number, results)
            assert isinstance(results[1], AuthenticationError), (number, results)
            given.fake.drivers[0].finish()
            assert not memory(tensors[1]).any()
    pytest.fail("there is no end to the calls")


# Memory.


def test_no_plaintext_is_in_host_memory_or_on_the_network(gpus):
    given = gpus(2)
    secret = torch.frombuffer(bytearray(b"a secret gradient " * 3000), dtype=torch.uint8)
    seen = []

    def look(_number, source, target, data):
        seen.append(any(b"secret grad" in block.tobytes() for block in given.fake.drivers[source].hosts()))
        seen.append(b"secret grad" in data)
        return [(source, target, data)]

    def action(group, new):
        got = memory(group.all_gather(new(torch.zeros(108_000, dtype=torch.uint8)), new(secret)))
        found = any(b"secret grad" in buffer.numpy().tobytes() for buffer in group._link._buffers.values())
        return got.numpy().tobytes().count(b"secret grad"), found, bool(group._link._host._buffers)

    assert given.run(action, Network(2, look)) == [(6000, False, False)] * 2
    assert len(seen) > 4
    assert not any(seen)


def test_the_plaintext_of_other_ranks_and_all_keys_are_wiped(gpus):
    given = gpus(2)
    pattern = b"another rank's gradient "

    def action(group, new):
        mine = bytes(24) if group.rank == 0 else pattern
        tensor = new(torch.frombuffer(bytearray(mine * 2000), dtype=torch.uint8))
        group.all_reduce(tensor)
        driver = given.fake.drivers[group.rank]
        held, staging = driver.holds(pattern), max(driver.hosts(), key=len)
        tensor.zero_()
        group.close()
        driver.finish()
        return held, driver.holds(pattern), bool(staging.any())

    assert given.run(action)[0] == (True, False, False)
    given.fake.stop()


class RecordingCipher:
    """The cipher of the fake kernels, which records each key with each nonce that it seals with."""

    used: ClassVar = []

    def __init__(self, key):
        self._key = bytes(key)
        self._cipher = AESGCM(key)

    def encrypt(self, nonce, plain, _):
        self.used.append((self._key, bytes(nonce)))
        return self._cipher.encrypt(nonce, plain, None)

    def decrypt(self, nonce, sealed, _):
        return self._cipher.decrypt(nonce, sealed, None)


def test_no_key_and_nonce_are_used_twice(gpus, monkeypatch, limited):
    monkeypatch.setattr(fake_kernels, "AESGCM", RecordingCipher)
    limited(group_slab=2)
    monkeypatch.setattr(RecordingCipher, "used", [])

    def action(group, new):
        for _ in range(2):
            each_operation(group, new)
            group.all_reduce(new(content(group.rank, 3 * 5 * SLAB)))

    gpus(3).results(action)
    used = RecordingCipher.used
    assert len(used) > 2 * 3 * 3 * 5  # chunks
    assert len(set(used)) == len(used)


def test_a_group_that_is_closed_closes_its_gpus(gpus):
    given = gpus(1)
    given.results(lambda group, new: memory(group.all_reduce(new(torch.ones(3)))))
    with pytest.raises(ClosedError):
        given.fake.opened[0].staging_buffer(1)
    given = gpus(1)
    group = SecureGroup.over(Network(1).transports()[0], KEY)
    with given.fake.seen():
        group.all_reduce(given.fake.drivers[0].tensor(torch.ones(3)))
    del group
    gc.collect()
    with pytest.raises(ClosedError):
        given.fake.opened[0].staging_buffer(1)


# What is refused.


def test_what_cannot_be_sent_is_refused_before_anything_is_sent(gpus, monkeypatch):
    given, network = gpus(1), Network(1)
    driver = given.fake.drivers[0]

    def action(group, new):
        with pytest.raises(ValueError, match="contiguous"):
            group.all_reduce(new(torch.ones(4, 4)).t())
        with pytest.raises(ValueError, match="one device"):
            group.all_gather(torch.ones(4), new(torch.ones(4)))
        with pytest.raises(ValueError, match="one device"):
            group.reduce_scatter(new(torch.ones(4)), torch.ones(4))
        driver.capturing = True
        with pytest.raises(DeviceError, match="captured"):
            group.all_reduce(new(torch.ones(4)))
        driver.capturing = False
        assert memory(group.all_reduce(new(torch.ones(2)))).tolist() == [1, 1]
        with monkeypatch.context() as patch:
            group._link._gpus.clear()
            patch.setattr(_places, "open_device", fastrack._devices.open_device)
            with pytest.raises(DeviceError, match="needs a GPU of NVIDIA"):
                group.all_reduce(new(torch.ones(4)))
        return group.all_reduce(torch.ones(2)).tolist()

    assert given.run(action, network) == [[1, 1]]
    assert network.sent == []
