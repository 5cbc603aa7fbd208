"""Calls of CUDA beside threads that capture: the mode of the thread, and its restoration."""

import ctypes

import pytest
from helpers import stub_cuda
from helpers.cases import each
from helpers.stub_cuda import StubCuda

from fastrack._devices.cuda import captures


@pytest.fixture
def libcuda(monkeypatch):
    stub = StubCuda()
    stub_cuda.install(monkeypatch, stub)
    return stub


@each("before", [0, 1, 2])
def test_the_mode_of_the_thread_is_restored_whatever_happens(libcuda, before):
    libcuda.mode = before
    with captures.BesideCaptures():
        with pytest.raises(KeyError), captures.BesideCaptures():
            raise KeyError
        assert libcuda.mode == captures.THREAD_LOCAL
    assert libcuda.mode == before


def test_a_mode_that_could_not_be_set_is_not_restored(libcuda):
    libcuda.status[captures.EXCHANGE_MODE] = [4, 0]
    with captures.BesideCaptures():
        assert libcuda.mode == 0
    assert libcuda.status[captures.EXCHANGE_MODE] == [0]


def test_without_libcuda_nothing_is_exchanged(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", refuse)
    captures.find_exchange.cache_clear()
    with captures.BesideCaptures():
        pass
    captures.find_exchange.cache_clear()
