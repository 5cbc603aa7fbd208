"""Devices are found by name, and each has what the transfer loop asks of one."""

import inspect

import numpy as np
import pytest
import torch
from helpers import engines
from helpers.cases import each
from helpers.messages import messages_of, raw_key

from fastrack import Channel, DeviceError, Key, KeyRing, to_device
from fastrack._devices import base, canonical, open_device
from fastrack._devices.cpu import CpuDevice


@each(
    ("given", "name"),
    [
        (None, "cpu"),
        ("cpu", "cpu"),
        (torch.device("cpu", 0), "cpu"),
        ("cuda", "cuda:0"),
        ("cuda:3", "cuda:3"),
        (torch.device("cuda", 1), "cuda:1"),
    ],
)
def test_names_have_one_form(given, name):
    assert canonical(given) == name


@each("given", ["gpu", "cuda:", "cuda:-1", "CUDA", "mps", 0])
def test_other_names_are_refused(given):
    with pytest.raises(DeviceError, match=str(given)):
        canonical(given)


@each("size", [300, 5000])
@each("start", ["", "cuda:9"])
def test_texts_that_are_too_long_for_a_path_are_refused_too(start, size):
    with pytest.raises(DeviceError, match="no such device") as caught:
        canonical(start + "9" * size)
    assert len(str(caught.value)) < 200


def test_keys_in_the_place_of_a_device_are_refused_without_repeating_a_secret(tmp_path):
    key = Key.generate()
    key.save(tmp_path / "owner.key")
    text = (tmp_path / "owner.key").read_text().strip()
    for given in (key, KeyRing(key), tmp_path / "owner.key", str(tmp_path / "owner.key"), text):
        with pytest.raises(DeviceError, match="keys=") as caught:
            to_device(np.ones(2), given)
        assert text not in str(caught.value)


def test_a_dtype_in_the_place_of_a_device_is_refused_with_the_other_way():
    with pytest.raises(DeviceError, match="dtype"):
        canonical(torch.float16)


def test_a_device_that_cannot_be_used_says_what_to_do():
    with pytest.raises(DeviceError, match="use device='cpu'"):
        open_device("cuda:0")


def test_a_device_has_ten_methods_at_most():
    methods = [name for name, _ in inspect.getmembers(base.Device, inspect.isfunction) if not name.startswith("_")]
    assert len(methods) <= 10
    assert all(callable(getattr(CpuDevice, name)) for name in methods)


def test_slabs_are_whole_chunks():
    assert CpuDevice.max_slab_size % 16384 == 0


# The host itself.


@pytest.fixture
def cpu():
    return open_device("cpu", threads=2)


def test_the_host_keeps_what_is_wanted_else_what_came_and_nothing_of_cupy(cpu, hide):
    assert cpu.framework("numpy", "torch") == "numpy"
    assert cpu.framework("torch", None) == cpu.framework("torch", "cupy") == "torch"
    assert [cpu.framework(None, came) for came in ("numpy", "torch", "cupy", None)] == ["numpy", *["torch"] * 3]
    for origin in (None, "cupy", "numpy"):
        with pytest.raises(DeviceError, match="CuPy"):
            cpu.framework("cupy", origin)
    hide("torch")
    assert cpu.framework(None, None) == cpu.framework(None, "cupy") == "numpy"


def test_the_host_is_done_when_it_returns(cpu):
    slot = cpu.staging_buffer(100)
    slot.memory.fill(7)
    slot.wait()
    assert slot.ready()
    slot.wipe()
    assert not slot.memory.any()

    key, plain, sealed = raw_key(bytes(32)), np.arange(84, dtype=np.uint8), slot.memory

    def messages(memory):
        return messages_of([key], [84], [cpu.view(memory, writable=True)], sealed=[sealed])

    sealing = cpu.begin(messages(plain))
    sealing.seal(None, None)
    sealing.finish()
    assert (sealing.done(), sealing.result()) == (True, None)
    opened = np.zeros(84, np.uint8)
    engine = engines.make()
    assert engine.open_run(engine.expand_key(key), sealed, opened, 0) is None
    assert np.array_equal(opened, plain)

    cpu.clear(cpu.view(opened, writable=True))
    assert not opened.any()
    sealed[0] ^= 1
    opening = cpu.begin(messages(opened))
    opening.open(None, None)
    opening.finish()
    assert (opening.done(), opening.result()) == (True, base.BadChunk(0, 0))
    assert not opened.any()


def test_a_channel_takes_no_share_that_there_is_not_and_it_has_no_meaning_on_the_host():
    for share in (0, -1, 1.5):
        with pytest.raises(ValueError, match="share="):
            Channel(share=share)
    with Channel(share=0.25) as channel:
        assert channel.to_device(np.arange(3)).tolist() == [0, 1, 2]
