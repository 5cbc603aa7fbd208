"""Devices are found by name, and each has what the transfer loop asks of one."""

from __future__ import annotations

import inspect

import pytest
import torch

from fastrack import DeviceError
from fastrack.devices import Device, canonical, open_device
from fastrack.devices.cpu import CpuDevice


@pytest.mark.parametrize(
    ("given", "name"),
    [(None, "cpu"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3"), (torch.device("cuda", 1), "cuda:1")],
)
def test_names_have_one_form(given, name):
    assert canonical(given) == name


@pytest.mark.parametrize("given", ["gpu", "cuda:", "cuda:-1", "CUDA", "mps", 0])
def test_other_names_are_refused(given):
    with pytest.raises(DeviceError, match="no such device"):
        canonical(given)


def test_a_device_that_cannot_be_used_says_what_to_do():
    with pytest.raises(DeviceError, match="use device='cpu'"):
        open_device("cuda:0")


def test_a_device_has_ten_methods_at_most():
    methods = [name for name, _ in inspect.getmembers(Device, inspect.isfunction) if not name.startswith("_")]
    assert len(methods) <= 10
    assert all(callable(getattr(CpuDevice, name)) for name in methods)


def test_slabs_are_whole_chunks():
    assert CpuDevice.slab % 16384 == 0
