"""The scheduler of the threads finds planted faults, and runs what it found again."""

import threading

import pytest
from helpers.baton import DeadlockError, Scheduler
from helpers.forking import in_forked_child

SEEDS = 40


def found(program, error):
    """Return the seeds whose schedules end with that error. All others end well."""
    seeds = []
    for seed in range(SEEDS):
        scheduler = Scheduler(seed)
        try:
            scheduler.run(lambda scheduler=scheduler: program(scheduler))
        except error:
            seeds.append(seed)
    return seeds


def side_by_side(scheduler, *actions):
    threads = [scheduler.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cross(scheduler):
    one, other = scheduler.Lock(), scheduler.Lock()

    def take(first, second):
        with first, second:
            pass

    side_by_side(scheduler, lambda: take(one, other), lambda: take(other, one))


def count(scheduler, lock=None):
    """Count to two in two threads, which lose one of both if the other goes on in between."""
    total = 0

    def add():
        nonlocal total
        lock and lock.acquire()
        before = total
        scheduler.step()
        total = before + 1
        lock and lock.release()

    side_by_side(scheduler, add, add)
    assert total == 2


def hand_over(scheduler, *, tell):
    changed, items = scheduler.Condition(), []

    def give():
        with changed:
            items.append(1)
            if tell:
                changed.notify()

    def take():
        with changed:
            changed.wait_for(lambda: items)

    side_by_side(scheduler, take, give)


def test_locks_that_are_taken_in_two_orders_are_found():
    seeds = found(cross, DeadlockError)
    assert 0 < len(seeds) < SEEDS
    with pytest.raises(DeadlockError, match=r"(?s)<lambda> 1 for a lock of test_baton:.* 2 for a lock of"):
        (scheduler := Scheduler(seeds[0])).run(lambda: cross(scheduler))


def test_an_update_that_is_lost_without_a_lock_is_found_and_none_is_with_one():
    assert 0 < len(found(count, AssertionError)) < SEEDS
    assert found(lambda scheduler: count(scheduler, scheduler.Lock()), AssertionError) == []


def test_a_notification_that_was_forgotten_is_found():
    assert 0 < len(found(lambda scheduler: hand_over(scheduler, tell=False), DeadlockError)) < SEEDS
    assert found(lambda scheduler: hand_over(scheduler, tell=True), DeadlockError) == []


def test_a_seed_runs_again_as_it_ran():
    def steps(seed):
        scheduler = Scheduler(seed)
        lock = scheduler.Lock()
        scheduler.run(lambda: side_by_side(scheduler, *[lambda: count(scheduler, lock)] * 3))
        return scheduler.steps

    runs = [steps(seed) for seed in range(10)]
    assert runs == [steps(seed) for seed in range(10)]
    assert len(set(map(tuple, runs))) > 5


def test_locks_and_events_are_those_of_threading():
    def program(module):
        lock, again, event = module.Lock(), module.RLock(), module.Event()
        with lock, again, again:
            seen = [lock.acquire(blocking=False), again.acquire(blocking=False), lock.locked(), event.is_set()]
            again.release()
        thread = module.Thread(target=event.set)
        thread.start()
        seen += [event.wait(), event.is_set(), lock.acquire(blocking=False)]
        thread.join()
        event.clear()
        return [*seen, event.is_set(), thread.is_alive()]

    scheduler = Scheduler(0)
    assert scheduler.run(lambda: program(scheduler)) == program(threading)


def test_an_error_of_a_thread_ends_the_run():
    scheduler = Scheduler(0)

    def fail():
        raise LookupError("of a thread")

    with pytest.raises(LookupError, match="of a thread"):
        scheduler.run(lambda: side_by_side(scheduler, fail, scheduler.step))


def test_a_forked_child_that_waits_for_a_thread_of_its_parent_is_found():
    scheduler = Scheduler(0)
    lock = scheduler.Lock()

    def child():
        with pytest.raises(DeadlockError, match="lock"):
            lock.acquire()
        return True

    def hold():
        with lock:
            scheduler.wait_until(lambda: is_over, "the child")

    is_over = False

    def program():
        nonlocal is_over
        thread = scheduler.Thread(target=hold)
        thread.start()
        scheduler.wait_until(lock.locked, "the thread")
        is_over = in_forked_child(child)
        thread.join()
        return is_over

    assert scheduler.run(program)
