"""The functions of the package move tensors on channels that the whole process shares."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import own_channels
from helpers.staged import staged_channel
from helpers.tampering import tampered

import fastrack
import fastrack._transfer.api
from fastrack import AuthenticationError, Key


@pytest.fixture
def shared(monkeypatch):
    """The channels, of which none is open yet; one to another device is opened for "cuda:0"."""
    own_channels.share(monkeypatch)
    opened = []

    def open_channel(device):
        opened.append((device, staged_channel() if device == "cuda:0" else fastrack.Channel(device)))
        return opened[-1][1]

    monkeypatch.setattr(fastrack._transfer.api, "Channel", open_channel)
    yield opened
    for _, channel in opened:
        channel.close()


def test_one_channel_a_device_is_opened_when_first_needed(shared):
    assert not shared
    for device in ("cpu", None, "cuda", "cuda:0", torch.device("cpu")):
        fastrack.to_device(np.arange(3), device)
    assert [device for device, _ in shared] == ["cpu", "cuda:0"]


def test_a_tensor_leaves_the_device_it_is_on(monkeypatch):
    assert fastrack._transfer.api.device_of(np.arange(3)) == "cpu"
    assert fastrack._transfer.api.device_of(torch.arange(3)) == "cpu"
    monkeypatch.setattr(fastrack._tensors.arrays, "framework_of", lambda array: "cupy")
    of_cupy = SimpleNamespace(device=SimpleNamespace(id=1))
    assert fastrack._transfer.api.device_of(of_cupy) == "cuda:1"


def test_synchronizing_opens_no_channel(shared):
    fastrack.synchronize()
    fastrack.synchronize("cuda:7")
    assert not shared


def test_synchronizing_waits_for_one_device_and_tells_what_failed_there(shared):
    key = Key.generate()
    sealed = tampered(fastrack.seal(np.arange(3), key, name="x"), -1)
    fastrack.to_device(sealed, "cuda:0", keys=key, non_blocking=True)
    fastrack.synchronize("cpu")
    with pytest.raises(AuthenticationError, match="'x'"):
        fastrack.synchronize("cuda")
    fastrack.synchronize("cuda:0")
    assert [device for device, _ in shared] == ["cuda:0"]
