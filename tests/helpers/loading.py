"""Datasets and loaders for the tests of `fastrack.wrap`. Worker processes import this."""

import gc
import os
import signal
import threading
import time

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

PATIENCE = 30  # seconds after which a test that waits has failed


def threads_left():
    """The threads of wrapped loaders that are still there, after they had time to go."""
    deadline = time.monotonic() + PATIENCE
    while (left := loader_threads()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    return left


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "fastrack-loader"]


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def look_often(monkeypatch):
    """Have torch look for workers that died, and wait for those that end, 0.3 seconds at a time in place of five."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.3)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.3,))


class Numbers(Dataset):
    """Item `i` is a vector of two, `i` and what `action(i)` gives, which may also raise or worse."""

    def __init__(self, count, action=None):
        self.count = count
        self.action = action

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if self.action is not None:
            return torch.tensor([i, self.action(i)])
        return torch.tensor([i, 0])


class Stream(IterableDataset):
    """The numbers below a count, shared among the workers."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(torch.arange(start, self.count, step))


def process_id(_):
    return os.getpid()


def is_main_thread(_):
    return threading.current_thread().name == "MainThread"


def fail_on_five(i):
    if i == 5:
        raise LookupError("item 5 is not there")
    return 0


def die_on_five(i):
    if i == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


class Resumable:
    """A loader of the numbers below a count that can be resumed. Its state is live, as some are."""

    def __init__(self, count):
        self.count = count
        self.users = set()
        self._state = {"next": 0, "epoch": 0}
        self._is_resumed = False

    def __iter__(self):
        self._user()
        if not self._is_resumed:
            self._state["next"] = 0
        self._is_resumed = False
        return self._numbers()

    def _numbers(self):
        while self._state["next"] < self.count:
            self._user()
            self._state["next"] += 1
            yield torch.tensor([self._state["epoch"], self._state["next"] - 1])
        self._state["next"] = 0
        self._state["epoch"] += 1

    def state_dict(self):
        self._user()
        return self._state

    def load_state_dict(self, state):
        self._state = dict(state)
        self._is_resumed = True

    def _user(self):
        self.users.add(threading.current_thread().name)
