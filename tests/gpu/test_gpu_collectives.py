"""Sealed collectives of tensors on a GPU, among ranks that are threads: the sums of the host, or an error and zeros."""

import numpy as np
import pytest

from fastrack import AuthenticationError, Key
from fastrack.format import CHUNK_SIZE

KEY = Key.from_bytes(bytes(range(32)))
COUNTS = [0, 1, CHUNK_SIZE // 4, CHUNK_SIZE // 2 + 1, (9 << 20) // 4 + 3]  # float32; the last has several slabs
RANKS = 2


@pytest.fixture
def tensors(frame):
    """Return the frame of torch, of which collectives take arrays."""
    if frame.name != "torch":
        pytest.skip("collectives take tensors of torch")
    return frame


def given(rank, count):
    return np.random.default_rng((rank, count)).standard_normal(count, np.float32) * 100


def summed(count):
    return given(0, count) + given(1, count)


def run(action, tamper=None):
    from helpers.network import Network, on_ranks

    results = on_ranks(Network(RANKS, tamper), KEY, action, timeout=60)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_torch_sums_are_those_of_the_host_and_come_after_the_stream_s_work(tensors):
    def action(group):
        with tensors.side_stream():
            made = [tensors.make(given(group.rank, count)) for count in COUNTS]
            busy = tensors.keep_busy()
            for tensor in made:
                tensor.add_(1)  # behind the work that keeps the stream busy
                tensor.sub_(1)
            found = [tensors.read(group.all_reduce(tensor, async_op=True).wait()) for tensor in made]
            del busy
        return found

    one = np.float32(1)
    for result in run(action):
        for count, got in zip(COUNTS, result, strict=True):
            expected = (given(0, count) + one - one) + (given(1, count) + one - one)
            assert np.array_equal(got, expected), count


@pytest.mark.parametrize("count", COUNTS)
def test_torch_each_operation_fills_what_it_does_in_host_memory(tensors, count):
    def action(group):
        zeros = np.zeros(count, np.float32)
        shard, whole, sent = tensors.make(zeros), tensors.make(np.zeros(RANKS * count, np.float32)), tensors.make(zeros)
        group.reduce_scatter(shard, tensors.make(given(group.rank, RANKS * count)))
        group.all_gather(whole, tensors.make(given(group.rank, count)))
        if group.rank == 0:
            group.send(tensors.make(given(0, count)), 1)
        else:
            group.receive(sent, 0)
        group.broadcast(sent, 1)
        return [tensors.read(filled) for filled in (shard, whole, sent)]

    for rank, (shard, whole, sent) in enumerate(run(action)):
        assert np.array_equal(shard, summed(RANKS * count).reshape(RANKS, -1)[rank])
        assert np.array_equal(whole, np.concatenate([given(0, count), given(1, count)]))
        assert np.array_equal(sent, given(0, count))


def test_torch_a_bad_chunk_is_told_on_every_rank_and_results_hold_zeros(tensors):
    def tamper(_number, source, target, data):
        if len(data) < 1000 or (source, target) != (0, 1):
            return [(source, target, data)]
        changed = bytearray(data)
        changed[56 + 16400 + 5] ^= 1  # of chunk 1
        return [(source, target, bytes(changed))]

    def action(group):
        tensor = tensors.make(given(group.rank, 4 * CHUNK_SIZE))
        with pytest.raises(AuthenticationError) as caught:
            group.all_reduce(tensor)
        return caught.value.chunk, bool(tensors.read(tensor).any())

    assert run(action, tamper) == [(None, False), (1, False)]
