"""A pytree of many tensors is one operation: all headers first, then one call of the device, and one verdict."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.cuda_on_host import in_confidential_mode
from helpers.forking import in_forked_child
from helpers.staged import staged_channel
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, Channel, ClosedError, DeviceError, Key, SealedTensor, UnknownKeyError
from fastrack._devices.cpu import CpuDevice, CpuOperation
from fastrack.format import CHUNK_SIZE, chunk_offset

SIZES = (0, 1, 8192, CHUNK_SIZE, 3 * CHUNK_SIZE + 5)


DEVICES = [pytest.param(Channel, id="cpu"), pytest.param(staged_channel, id="staged")]


@pytest.fixture(scope="module", params=[*DEVICES, *in_confidential_mode(pytest.mark.slow)])
def channel(request, key):
    with request.param(keys=key) as channel:
        yield channel


def plains(count):
    random = np.random.default_rng(0)
    return [random.integers(1, 256, SIZES[number % len(SIZES)], np.uint8) for number in range(count)]


def sealed_of(arrays, key):
    return [fastrack.seal(array, key, name=f"tensor {number}") for number, array in enumerate(arrays)]


@pytest.fixture
def operations(channel, monkeypatch):
    """Collect the messages of every operation."""
    begun, original = [], channel._device.begin
    monkeypatch.setattr(channel._device, "begin", lambda *given: begun.append(given[0]) or original(*given))
    return begun


def test_a_thousand_tensors_of_all_kinds_are_one_operation(channel, key, operations):
    count = 60 if channel.device == "cuda:0" else 1000
    arrays = plains(count)
    sealed = sealed_of(arrays, key)
    nest = {"sealed": sealed, "plain": (*arrays[:50], torch.arange(7)), "rows": [one[::2] for one in sealed[1:60]]}
    moved = channel.to_device(nest, framework="numpy")
    for there, here in zip((*moved["sealed"], *moved["plain"]), (*arrays, *arrays[:50], np.arange(7)), strict=True):
        assert np.array_equal(there, here)
    for there, here in zip(moved["rows"], arrays[1:60], strict=True):
        assert np.array_equal(there, here[::2])
    assert [len(messages) for messages in operations] == [count + 51 + 59]
    assert not any(operations[0].keys._flat)


def test_a_bad_chunk_is_named_with_its_tensor_and_all_that_was_to_be_filled_is_zero(channel, key):
    arrays = plains(40)
    sealed = sealed_of(arrays, key)
    sealed[19] = tampered(sealed[19], chunk_offset(2))
    sealed[29] = tampered(sealed[29], chunk_offset(0))
    out = [np.full_like(array, 7) for array in arrays]
    with pytest.raises(AuthenticationError) as caught:
        channel.to_device(sealed, out=out)
    assert (caught.value.tensor, caught.value.chunk) == ("tensor 19", 2)
    assert not any(array.any() for array in out)


@pytest.mark.parametrize("fault", ["header", "key"])
def test_nothing_is_allocated_or_moved_before_all_headers_are_authentic(
    channel, key, operations, derived_keys, monkeypatch, fault
):
    arrays = plains(20)
    sealed = sealed_of(arrays, key)
    sealed[17] = tampered(sealed[17], 5) if fault == "header" else fastrack.seal(arrays[17], Key.generate())
    monkeypatch.setattr(channel._device, "empty", Mock(side_effect=AssertionError))
    out = [np.full_like(array, 7) for array in arrays]
    for options in ({}, {"out": out}):
        with pytest.raises(AuthenticationError if fault == "header" else UnknownKeyError):
            channel.to_device(sealed, **options)
    assert operations == []
    assert len(derived_keys) == 2
    assert not any(any(keys._flat) for keys in derived_keys)
    assert not any(array.any() for array in out) or fault == "key"


def test_messages_of_both_key_sizes_and_of_bound_tensors_share_an_operation(channel, key, tmp_path):
    short, arrays = Key.generate(128), plains(10)
    several = sealed_of(arrays[:5], key) + sealed_of(arrays[5:], short)
    fastrack.save_file({f"tensor {number}": one for number, one in enumerate(several[:5])}, tmp_path / "x", key)
    with fastrack.load_file(tmp_path / "x") as file:
        bound = [file[f"tensor {number}"] for number in range(5)]
        moved = channel.to_device([*bound, *several], keys=[key, short], framework="numpy")
    for there, here in zip(moved, [*arrays[:5], *arrays], strict=True):
        assert np.array_equal(there, here)


@pytest.mark.parametrize("place", ["begin", "open", "result"])
def test_an_interruption_leaves_zeros_and_no_key(key, monkeypatch, place):
    arrays = plains(5)
    owner = CpuDevice if place == "begin" else CpuOperation
    original = getattr(owner, place)
    seen = []

    def interrupted(*arguments):
        seen.append(arguments[1].keys if place == "begin" else arguments[0]._messages.keys)
        original(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, place, interrupted)
    out = [np.full_like(array, 7) for array in arrays]
    with Channel(keys=key) as channel, pytest.raises(KeyboardInterrupt):
        channel.to_device(sealed_of(arrays, key), out=out)
    assert not any(array.any() for array in out)
    assert not any(seen[0]._flat)


@each("place", [0, chunk_offset(0)], ids=["header", "chunk"])
def test_an_interruption_of_clearing_leaves_zeros(channel, key, monkeypatch, place):
    arrays = plains(20)
    sealed = sealed_of(arrays, key)
    sealed[9] = tampered(sealed[9], place)
    out = [np.full_like(array, 7) for array in arrays]
    calls, original = [], channel._device.clear

    def clear(memory):
        calls.append(memory)
        if len(calls) in {3, 8}:
            raise KeyboardInterrupt
        original(memory)

    monkeypatch.setattr(channel._device, "clear", clear)
    with pytest.raises(KeyboardInterrupt):
        channel.to_device(sealed, out=out)
    assert not any(array.any() for array in out)


def test_one_tensor_may_stand_many_times_in_a_nest(channel, key):
    sealed = fastrack.seal(np.arange(10), key)
    assert isinstance(sealed, SealedTensor)
    assert [one.tolist() for one in channel.to_device([sealed] * 3, framework="numpy")] == [list(range(10))] * 3


@each(
    ("first", "second", "leaf"),
    [((20, 30), (50, 60), 1), ((10, 20), (40, 50), 0), ((20, 30), (20, 30), 1), ((20, 30), (29, 39), 1)],
    ids=["source of another", "other way round", "twice", "one byte"],
)
def test_what_is_to_be_filled_shares_no_memory_with_anything_else_in_the_nest(channel, first, second, leaf):
    memory = np.arange(200, dtype=np.uint8)
    before = memory.copy()
    with pytest.raises(ValueError, match=rf"leaf \[{leaf}\].*memory"):
        channel.to_device([memory[55:65], memory[10:20]], out=[memory[slice(*first)], memory[slice(*second)]])
    assert np.array_equal(memory, before)


def test_what_is_to_be_filled_lies_in_no_message_of_the_nest(channel, key):
    messages = sealed_of([np.ones(10, np.uint8)] * 2, key)
    memory = np.frombuffer(messages[1].message, np.uint8).copy()
    messages[1] = SealedTensor(messages[1].context, memory, messages[1].key_id)
    with pytest.raises(ValueError, match=r"leaf \[0\].*memory"):
        channel.to_device(messages, out=[memory[-10:], np.zeros(10, np.uint8)])
    assert channel.to_device(messages[1], framework="numpy").all()


def test_arrays_to_fill_may_lie_side_by_side_and_be_empty(channel, key):
    memory = np.zeros(30, np.uint8)
    arrays = [np.full(10, 1, np.uint8), np.empty(0, np.uint8), np.full(20, 2, np.uint8)]
    sealed = sealed_of(arrays, key)
    channel.to_device(sealed, out=[memory[:10], memory[5:5], memory[10:]])
    assert memory.tolist() == [1] * 10 + [2] * 20
    channel.to_device([memory[:10], memory[20:25]], out=[memory[10:20], memory[25:]])


def test_what_was_prepared_moves_once_and_in_its_own_process(channel, key):
    plain = np.arange(10)

    def refuse(move):
        with pytest.raises((ClosedError, DeviceError)):  # what a device says of a fork comes first
            move()
        return True

    with channel.group() as group:
        move = group.prepare([plain, fastrack.seal(plain, key)], framework="numpy")
        assert in_forked_child(lambda: refuse(move))
        moved = move()
    assert [array.tolist() for array in moved] == [plain.tolist()] * 2
    assert refuse(move)


def test_a_device_that_works_in_place_tells_a_group_of_a_bad_chunk_at_once(key):
    sealed = sealed_of([np.ones(10, np.uint8)] * 2, key)
    out = [np.full(10, 7, np.uint8) for _ in sealed]
    with Channel("cpu", keys=key) as channel, channel.group() as group:
        move = group.prepare([sealed[0], tampered(sealed[1], -1)], out=out)
        with pytest.raises(AuthenticationError, match="'tensor 1', chunk 0"):
            move()
        assert not np.any(out)
