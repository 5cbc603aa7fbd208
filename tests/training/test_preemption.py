"""A preemption notice is heard between two steps, by all ranks at one step, and nothing else of the process changes."""

import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.forking import in_forked_child
from helpers.network import Network, on_ranks
from helpers.ranks import run_ranks

import fastrack
from fastrack import ClosedError, Key, KeyPermissionError, PreemptionNotice
from fastrack._training.checkpoints import preemption
from fastrack.distributed import SecureGroup

KEY = Key.from_bytes(bytes(range(32)))


@pytest.fixture(autouse=True)
def _handler_stays():
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def _looks_always(limited):
    limited(preemption_poll=0.0)


def fail_after(seconds):
    time.sleep(seconds)
    raise ZeroDivisionError


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_heard_between_steps_and_its_deadline_runs_from_when_it_came():
    with PreemptionNotice(deadline=5) as notice:
        assert not notice.is_due()
        assert notice.remaining() == math.inf
        terminate()
        time.sleep(0.05)  # the rest of a step
        assert notice.is_due()
        assert 4 < notice.remaining() < 4.96


def test_a_second_signal_changes_nothing_and_a_save_that_is_signalled_is_whole(tmp_path):
    state = {"weights": torch.randn(500_000), "step": 3}
    with PreemptionNotice() as notice:
        terminate()
        left, began = notice.remaining(), time.monotonic()
        stop = threading.Event()

        def keep_signalling():
            while not stop.wait(0.001):
                terminate()

        thread = threading.Thread(target=keep_signalling)
        thread.start()
        with notice.saving():
            fastrack.save_checkpoint(tmp_path / "run.safetensors", state, KEY)
        stop.set()
        thread.join()
        assert notice.remaining() < left - (time.monotonic() - began) + 0.005
    opened = fastrack.load_checkpoint(tmp_path / "run.safetensors", KEY)
    assert opened["step"] == 3
    assert torch.equal(opened["weights"], state["weights"])


def test_an_interrupt_ends_the_block_as_ever():
    with pytest.raises(KeyboardInterrupt), PreemptionNotice():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("earlier", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_earlier_handler_comes_back(earlier):
    signal.signal(signal.SIGTERM, earlier)
    with PreemptionNotice():
        assert signal.getsignal(signal.SIGTERM) != earlier
        terminate()
    assert signal.getsignal(signal.SIGTERM) == earlier
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_earlier_function_is_called_at_the_end_if_the_signal_came():
    calls = []

    def handler(number, _):
        calls.append((number, is_inside))

    signal.signal(signal.SIGTERM, handler)
    is_inside = True
    with PreemptionNotice():
        pass
    with PreemptionNotice() as notice:
        terminate()
        terminate()
        assert notice.is_due()
        is_inside = False
    assert calls == [(signal.SIGTERM, False)]
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_another_library_puts_back_after_the_end_does_what_the_earlier_one_did():
    calls = []
    signal.signal(signal.SIGTERM, lambda *_: calls.append("earlier"))
    with PreemptionNotice() as notice:
        of_notice = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a Trainer does
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, of_notice)  # which it puts back
    terminate()
    assert calls == ["earlier"]
    with pytest.raises(ClosedError):
        notice.is_due()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_signal_of_another_kind_may_be_the_notice():
    with PreemptionNotice(signals=[signal.SIGUSR1]) as notice:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR1)
        assert notice.is_due()


def test_another_thread_is_refused_and_may_have_a_file(tmp_path):
    def enter(**options):
        try:
            with PreemptionNotice(tmp_path / "notice", **options) as notice:
                results.append(notice.is_due())
        except RuntimeError as error:
            results.append(str(error))

    results = []
    for options in ({}, {"signals": ()}):
        thread = threading.Thread(target=enter, kwargs=options, name="trainer")
        thread.start()
        thread.join()
    assert "expected the main thread" in results[0]
    assert "trainer" in results[0]
    assert results[1] is False


# Files


@pytest.mark.usefixtures("_looks_always")
def test_a_file_is_a_notice_from_when_it_appeared(tmp_path):
    with PreemptionNotice(tmp_path / "notice", deadline=5) as notice:
        assert not notice.is_due()
        time.sleep(0.2)
        (tmp_path / "notice").touch()
        time.sleep(0.1)
        assert notice.is_due()
        assert 4.75 < notice.remaining() < 4.95
        (tmp_path / "notice").unlink()
        assert notice.is_due()


@pytest.mark.usefixtures("_looks_always")
@pytest.mark.parametrize("skew", [-3600, 3600])
def test_the_clock_of_a_file_cannot_move_the_deadline_beyond_the_last_look(tmp_path, skew):
    with PreemptionNotice(tmp_path / "notice", deadline=5) as notice:
        assert not notice.is_due()
        (tmp_path / "notice").touch()
        os.utime(tmp_path / "notice", (time.time() + skew,) * 2)
        assert notice.is_due()
        assert 4.8 < notice.remaining() <= 5


@pytest.mark.slow
def test_the_file_is_looked_at_now_and_then(tmp_path, monkeypatch):
    looks = []
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **options: looks.append(path) or stat(path, **options))
    with PreemptionNotice(tmp_path / "notice") as notice:
        looks.clear()
        began = time.monotonic()
        while time.monotonic() < began + 0.6:
            notice.is_due()
    assert 1 <= looks.count(tmp_path / "notice") <= 3


@pytest.mark.usefixtures("_looks_always")
def test_what_others_may_write_is_no_notice(tmp_path):
    path = tmp_path / "notice"
    path.touch()
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="not believed"):
        entered = PreemptionNotice(path).__enter__()
    with ExitStack() as stack:
        stack.push(entered)
        notice = entered
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not notice.is_due()  # told once
        path.chmod(0o600)
        assert notice.is_due()


@pytest.mark.usefixtures("_looks_always")
def test_a_folder_or_a_pipe_is_no_notice_and_a_link_to_ones_own_file_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.warns(RuntimeWarning, match="regular file"), PreemptionNotice(tmp_path / name) as notice:
            assert not notice.is_due()
    (tmp_path / "link").symlink_to("there")  # as in a mounted volume of Kubernetes
    with PreemptionNotice(tmp_path / "link") as notice:
        assert not notice.is_due()
        (tmp_path / "there").touch()
        assert notice.is_due()


def test_a_folder_that_is_not_there_or_that_others_may_write_to_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError), PreemptionNotice(tmp_path / "absent" / "notice"):
        pass
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(KeyPermissionError), PreemptionNotice(tmp_path / "open" / "notice"):
        pass


def test_a_file_from_before_is_a_notice_at_once_and_told(tmp_path):
    (tmp_path / "notice").touch()
    os.utime(tmp_path / "notice", (time.time() - 1e6,) * 2)
    notice = PreemptionNotice(tmp_path / "notice", deadline=5)
    with pytest.warns(RuntimeWarning, match="expected no notice at the start"):
        notice.__enter__()
    with ExitStack() as stack:
        stack.push(notice)
        assert notice.is_due()
        assert 4 < notice.remaining() <= 5  # of another time


# Saves


def test_a_save_too_slow_for_the_deadline_is_told_before_any_notice_and_once():
    with PreemptionNotice(deadline=0.05) as notice:
        notice.is_due()
        with pytest.warns(RuntimeWarning, match="a step and two saves within the deadline"), notice.saving():
            time.sleep(0.06)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with notice.saving():
                time.sleep(0.06)


def test_a_step_counts_towards_the_deadline():
    with PreemptionNotice(deadline=0.1) as notice:
        notice.is_due()
        with warnings.catch_warnings(), notice.saving():
            warnings.simplefilter("error")
            time.sleep(0.01)
        time.sleep(0.09)
        notice.is_due()
        with pytest.warns(RuntimeWarning, match="a step and two saves"), notice.saving():
            time.sleep(0.01)


def test_a_save_after_the_deadline_raises_and_one_that_failed_raises_its_own_error():
    with PreemptionNotice(deadline=0.05) as notice:
        terminate()
        assert notice.is_due()
        with pytest.raises(ZeroDivisionError), notice.saving():
            fail_after(0.06)
        with pytest.raises(TimeoutError, match="It is whole"), notice.saving():
            pass


# What goes wrong


def test_a_block_that_cannot_be_entered_leaves_the_signals_as_they_were():
    with pytest.raises(OSError, match="Invalid argument"), PreemptionNotice(signals=[signal.SIGTERM, signal.SIGKILL]):
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert preemption._entered == []


def test_a_handler_of_native_code_is_refused():
    import faulthandler

    faulthandler.register(signal.SIGUSR2, chain=False)
    try:
        with pytest.raises(RuntimeError, match="one of a library"), PreemptionNotice(signals=[signal.SIGUSR2]):
            pass
    finally:
        faulthandler.unregister(signal.SIGUSR2)


def test_a_notice_around_another_has_its_deadline_from_when_the_signal_came():
    with PreemptionNotice(deadline=5) as outer:
        with PreemptionNotice(deadline=5):
            terminate()
            time.sleep(0.1)
        assert outer.is_due()
        assert outer.remaining() < 4.95


def test_all_earlier_functions_are_called_though_one_raises():
    calls = []
    signal.signal(signal.SIGTERM, lambda *_: 1 / 0)
    signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    notice = PreemptionNotice(signals=[signal.SIGTERM, signal.SIGUSR1]).__enter__()
    terminate()
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(ZeroDivisionError):
        notice.__exit__()
    assert calls == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_block_ends_in_the_thread_that_handles_signals():
    notice, errors = PreemptionNotice(), []

    def leave():
        try:
            notice.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    with notice:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        assert "main thread" in str(errors[0])
        terminate()
        assert notice.is_due()


class Echo:
    """A group of one rank, in whose collective a signal comes."""

    def __init__(self, act=lambda: None):
        self.act = act

    def _reduced(self, _kind, tensor, _op, *, async_op):
        assert not async_op
        answer = tensor.clone()
        self.act()
        return answer


def test_a_signal_that_comes_while_an_answer_is_stored_is_heard_by_the_next_question(monkeypatch):
    with PreemptionNotice() as notice:
        clock, is_asked = time.monotonic, []

        def signalled():
            # As Python runs handlers after any call, also after the look at the times of which one is stored then.
            if not notice._came and is_asked:
                monkeypatch.undo()
                terminate()
            return clock()

        group = Echo(lambda: is_asked.append(True))
        monkeypatch.setattr(preemption.time, "monotonic", signalled)
        assert not notice.is_due(group)
        assert notice._came
        assert notice.is_due(group)


def test_another_group_or_a_number_below_one_is_refused():
    first = Echo()
    with PreemptionNotice() as notice:
        assert not notice.is_due(first)
        with pytest.raises(ValueError, match="got another"):
            notice.is_due(Echo())
        terminate()
        assert notice.is_due(first)
        with pytest.raises(ValueError, match="got another"):
            notice.is_due(Echo())
        with pytest.raises(ValueError, match="above zero"):
            notice.is_due(every=0)
    with pytest.raises(ValueError, match="got neither"):
        PreemptionNotice(signals=())


def test_a_handler_that_raises_while_a_process_forks_leaves_no_signal_blocked(monkeypatch):
    def interrupted(how, numbers):
        before = mask(how, numbers)
        if how == signal.SIG_BLOCK and numbers:
            raise KeyboardInterrupt
        return before

    mask = signal.pthread_sigmask
    with PreemptionNotice() as notice:
        monkeypatch.setattr(preemption.signal, "pthread_sigmask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            preemption._hold_signals()
        assert signal.SIGTERM in mask(signal.SIG_BLOCK, ())
        monkeypatch.undo()
        preemption._release_signals()
        assert signal.SIGTERM not in mask(signal.SIG_BLOCK, ())
        terminate()
        assert notice.is_due()


# Processes


def test_a_forked_child_ends_by_the_signal_as_before():
    def child():
        return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, notice._process

    with PreemptionNotice() as notice:
        assert in_forked_child(child) == (True, -1)
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            worker.start()
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == -signal.SIGTERM
        assert not notice.is_due()
        terminate()
        assert notice.is_due()


def test_a_forked_child_has_no_notice():
    def child():
        with pytest.raises(ClosedError):
            notice.is_due()
        return True

    with PreemptionNotice() as notice:
        terminate()
        assert in_forked_child(child)


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.tensor(index)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_loader_end_while_a_notice_is_awaited():
    with PreemptionNotice() as notice:
        loader = torch.utils.data.DataLoader(Slow(), num_workers=2, persistent_workers=True)
        batches = iter(loader)
        next(batches)
        workers = loader._iterator._workers
        terminate()  # of only this process
        assert notice.is_due()
        next(batches)
        os.kill(workers[0].pid, signal.SIGTERM)
        workers[0].join(20)
        assert workers[0].exitcode is not None


def test_use_outside_of_the_block_pickles_and_wrong_arguments_are_refused():
    notice = PreemptionNotice()
    with pytest.raises(ClosedError):
        notice.is_due()
    with notice:
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(notice)
        with pytest.raises(ValueError, match="every="):
            notice.is_due(object(), every=0)
    with pytest.raises(RuntimeError, match="never entered"), notice:
        pass
    for deadline in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="seconds above zero"):
            PreemptionNotice(deadline=deadline)


# Ranks


def due_by_rank(group, every=1):
    """Return at which call each rank learned of a notice that reached only rank 1 after its third call."""
    with PreemptionNotice("absent-notice", signals=(), deadline=9) as notice:
        for call in range(1, 20):
            if notice.is_due(group, every=every):
                assert notice.is_due(group)  # which sends nothing: others have ended
                return call, notice.remaining() <= 9
            if call == 3 and group.rank == 1:
                notice._told = time.monotonic()
    return None


@pytest.mark.parametrize(("every", "at"), [(1, 4), (4, 4), (5, 5)])
def test_a_notice_of_one_rank_stops_all_at_the_same_step(every, at):
    assert on_ranks(Network(3), KEY, lambda group: due_by_rank(group, every)) == [(at, True)] * 3


def test_answers_in_between_send_nothing():
    network = Network(2)

    def ask(group):
        with PreemptionNotice("absent-notice", signals=()) as notice:
            return [notice.is_due(group, every=10) for _ in range(9)]

    assert on_ranks(network, KEY, ask) == [[False] * 9] * 2
    alone = Network(2)
    on_ranks(alone, KEY, lambda _: None)
    assert len(network.sent) == len(alone.sent)


def agree():
    rank = dist.get_rank()
    with PreemptionNotice() as notice:
        with pytest.raises(ValueError, match="stop together"):
            notice.is_due()
        assert not notice.is_due(dist.group.WORLD)
        if rank == 1:
            terminate()
        assert notice.is_due(dist.group.WORLD)
        assert notice.is_due()  # all know
        assert notice.remaining() < 30
    with PreemptionNotice() as notice, SecureGroup(KEY) as group:
        if rank == 0:
            terminate()
        assert notice.is_due(group)
        dist.barrier()


@pytest.mark.nightly
def test_processes_agree_in_plain_and_sealed():
    run_ranks((2, agree))
