"""Tests of locks that a forked child makes anew, as a thread that it lacks may hold them."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from helpers.forking import in_forked_child

from fastrack._util.fork import per_process


class Server:
    def __init__(self):
        self.lock = per_process(self, "lock", threading.Lock)
        self.pool = per_process(self, "pool", partial(ThreadPoolExecutor, 1))

    def work(self):
        with self.lock:
            return self.pool.submit(sum, [1, 2]).result()


def test_a_forked_child_waits_for_no_lock_or_thread_of_its_parent():
    server = Server()
    assert server.work() == 3
    with server.lock:
        assert in_forked_child(server.work) == 3
    assert server.work() == 3


def test_objects_are_forgotten_with_what_is_made_for_them():
    server = weakref.ref(Server())
    gc.collect()
    assert server() is None
