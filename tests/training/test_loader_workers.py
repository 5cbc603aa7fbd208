"""Wrapped loaders of torch whose items come from worker processes."""

import gc
import multiprocessing
import signal
import warnings

import pytest
import torch
from helpers import loading, own_channels
from helpers.cuda_on_host import in_confidential_mode
from helpers.loading import Numbers, Stream, look_often, threads_left, wait_until
from torch.utils.data import DataLoader

import fastrack
from fastrack import Key, wrap


@pytest.fixture(autouse=True)
def _leave_nothing(monkeypatch):
    look_often(monkeypatch)
    yield
    assert not threads_left()
    wait_until(lambda: not multiprocessing.active_children())


def rows(loader):
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_batches_come_in_order(method):
    loader = DataLoader(Numbers(10), batch_size=2, num_workers=2, multiprocessing_context=method)
    assert rows(wrap(loader)) == [[i, 0] for i in range(10)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_workers_that_persist_are_used_again(prefetch):
    loader = DataLoader(Numbers(8, loading.process_id), num_workers=2, persistent_workers=True)
    wrapped = wrap(loader, prefetch=prefetch)
    workers = [{process for _, process in rows(wrapped)} for _ in range(3)]
    assert workers[0] == workers[1] == workers[2]
    assert len(workers[0]) == 2
    for _ in range(5):  # an iteration left early is over before the next one begins
        for batch in wrapped:
            assert batch[0, 0] == 0
            break
    assert [i for i, _ in rows(wrapped)] == list(range(8))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_workers_go_when_the_loop_is_left(prefetch):
    loader = DataLoader(Numbers(1000), num_workers=2)
    for _ in wrap(loader, prefetch=prefetch):
        assert len(multiprocessing.active_children()) == 2
        break
    wait_until(lambda: not multiprocessing.active_children())


def test_workers_go_with_close():
    iterator = iter(wrap(DataLoader(Numbers(1000), num_workers=1)))
    next(iterator)
    iterator.close()
    assert not multiprocessing.active_children()


def test_a_stream_is_shared_among_them():
    wrapped = wrap(DataLoader(Stream(10), batch_size=2, num_workers=2))
    assert sorted(rows(wrapped)) == list(range(10))


@pytest.mark.slow
def test_an_error_of_theirs_comes_where_its_batch_would():
    iterator = iter(wrap(DataLoader(Numbers(20, loading.fail_on_five), num_workers=1)))
    assert [next(iterator).tolist() for _ in range(5)] == [[[i, 0]] for i in range(5)]
    with pytest.raises(LookupError, match=r"item 5 is not there"):
        next(iterator)
    assert list(iterator) == []
    gc.collect()  # the frames of the error hold them


@pytest.fixture
def handler(monkeypatch):
    """Let torch set its SIGCHLD handler, which raises in the main thread when a worker dies."""
    before = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr(torch.utils.data._utils.signal_handling, "_SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("is_handled", [True, False])
def test_their_death_is_heard(is_handled):
    iterator = iter(wrap(DataLoader(Numbers(20, loading.die_on_five), num_workers=1, prefetch_factor=1)))
    assert signal.getsignal(signal.SIGCHLD) != signal.SIG_DFL
    if not is_handled:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    received = []
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        received.extend(batch[0, 0].item() for batch in iterator)
    if is_handled:
        assert received == list(range(len(received)))
        iterator.close()
    else:  # where their batch would have been
        assert received == [0, 1, 2, 3, 4]
    assert list(iterator) == []
    gc.collect()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_they_are_forked_from_the_thread_that_begins_the_iteration(prefetch):
    # A child has one thread, and what its parent's others kept for themselves ends in it: process groups of torch hang.
    loader = DataLoader(Numbers(2, loading.is_main_thread), num_workers=1, multiprocessing_context="fork")
    assert rows(wrap(loader, prefetch=prefetch)) == [[0, 1], [1, 1]]


def test_pinned_memory_is_taken_too():
    wrapped = wrap(DataLoader(Numbers(6), batch_size=3, num_workers=1, pin_memory=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no accelerator is found.*")
        assert rows(wrapped) == [[i, 0] for i in range(6)]


def sealed_rows(items):
    """Collate a list of row numbers into a handle on them."""
    return SEALED[[int(item[0]) for item in items]]


KEY = Key.generate()
PLAIN = torch.arange(100).reshape(20, 5)
SEALED = fastrack.seal(PLAIN, KEY)


@pytest.mark.slow
def test_what_they_send_sealed_is_opened_in_the_parent():
    loader = DataLoader(
        Numbers(20), batch_size=6, num_workers=2, collate_fn=sealed_rows, multiprocessing_context="fork"
    )
    assert torch.equal(torch.cat(list(wrap(loader, keys=KEY))), PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("new_channel", in_confidential_mode())
def test_what_they_send_reaches_a_device_in_confidential_mode(new_channel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # it has no streams of torch
    options = {"batch_size": 6, "num_workers": 2, "multiprocessing_context": "fork"}
    with new_channel() as channel:
        own_channels.share(monkeypatch, {"cuda:0": channel})
        loaders = [DataLoader(Numbers(20), collate_fn=sealed_rows, **options), DataLoader(Numbers(20), **options)]
        sealed, plain = (list(wrap(loader, "cuda", keys=KEY, prefetch=2)) for loader in loaders)
    assert torch.equal(torch.cat(sealed), PLAIN)
    assert torch.cat(plain).tolist() == [[i, 0] for i in range(20)]
