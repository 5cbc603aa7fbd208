"""Requests: which of the blocks that wait for a thread are asked for together, and what their calls are told."""

import threading
import time

import numpy as np
import pytest

import fastrack
from fastrack._remote import remote_file

BLOCK = remote_file.BLOCK
SIZE = 40 * BLOCK


@pytest.fixture
def one_thread(limited):
    """Let one thread download, so that all but its request wait."""
    limited(requests_at_once=1)
    remote_file._threads.__init__()
    yield
    remote_file._threads.__init__()


class Held:
    """A fault that keeps all requests but the first one waiting until `go` is set, and then lets `fault` answer."""

    def __init__(self, fault=lambda handler, number: False):
        self.go, self.begun, self._fault = threading.Event(), threading.Event(), fault

    def __call__(self, handler, number):
        if number == 0:
            return False
        self.begun.set()
        assert self.go.wait(10)
        return self._fault(handler, number)


def ranges(served):
    """Return the ranges that were asked for after the file was opened, in blocks."""
    asked = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for _, text in served.requests[1:]]
    return [(first // BLOCK, (last + 1) // BLOCK) for first, last in asked]


def one(block):
    return [(block * BLOCK, (block + 1) * BLOCK)]


@pytest.mark.usefixtures("one_thread")
def test_neighbours_that_wait_are_asked_for_together_in_the_order_of_the_oldest(served):
    data = served.write("a", SIZE)
    held = served.faults = Held()
    remote = served.open_remote("a")
    remote.prefetch(one(30))
    assert held.begun.wait(10)
    for block in (7, 20, 6, 9, 8, 10, 5, 4, 31, 29):  # 4 to 10 are more than 1 MiB
        remote.prefetch(one(block))
    remote.prefetch([(12 * BLOCK, 17 * BLOCK)])  # which is as large alone
    held.go.set()
    remote.fetch([(12 * BLOCK, 17 * BLOCK)])
    assert ranges(served) == [(30, 31), (7, 11), (20, 21), (4, 7), (31, 32), (29, 30), (12, 17)]
    remote.fetch([(0, SIZE)])
    assert (
        sum(stop - first for first, stop in ranges(served)) == SIZE // BLOCK - 1
    )  # each once, and the first at opening
    assert bytes(remote.view(0, SIZE)) == data


@pytest.mark.usefixtures("one_thread")
def test_each_call_is_told_of_the_failure_of_a_joined_request_and_may_try_again(served, limited):
    limited(attempts=1)
    data = served.write("a", SIZE)
    held = served.faults = Held(lambda handler, number: number > 1 and (handler.refuse(503), True)[1])
    remote = served.open_remote("a")
    remote.prefetch(one(30))
    assert held.begun.wait(10)
    failed = []

    def call(block):
        try:
            remote.fetch(one(block))
        except OSError as error:
            failed.append((block, str(error)))

    calls = [threading.Thread(target=call, args=(block,)) for block in (5, 6, 7)]
    for each in calls:
        each.start()
    while len(remote.copy()._pending) < 4:  # with the one that is held
        time.sleep(0.001)
    held.go.set()
    for each in calls:
        each.join()
    assert sorted(block for block, _ in failed) == [5, 6, 7]
    assert all("503" in text for _, text in failed)
    assert ranges(served)[1:] == [(5, 8)]
    served.faults = lambda handler, number: False
    assert remote.read(5 * BLOCK, 8 * BLOCK) == data[5 * BLOCK : 8 * BLOCK]
    assert remote.copy()._pending == {}


def test_the_headers_of_an_iteration_are_authenticated_once_before_its_downloads(url, key, images, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from fastrack._training import prefetch as loading

    seen = []

    def authenticate(tensors, ring):
        seen.extend(tensors)
        return authentic(tensors, ring)

    authentic = loading.authenticate_remote
    monkeypatch.setattr(loading, "authenticate_remote", authenticate)
    data = fastrack.SealedDataset([url], keys=key, columns=["images"])
    loader = torch.utils.data.DataLoader(data, batch_size=8, collate_fn=fastrack.collate)
    got = [batch["images"].numpy() for batch in fastrack.wrap(loader, keys=key)]
    np.testing.assert_array_equal(np.concatenate(got), images)
    assert len(seen) == len(set(map(id, seen))) == 1


@pytest.mark.parametrize(("blocks", "expected"), [(20, [4] * 5), (100, [12] * 8 + [4]), (200, [16] * 12 + [8])])
def test_a_request_asks_for_an_eighth_of_a_long_run(served, limited, blocks, expected):
    """Between two bounds: here of 4 and 16 blocks."""
    limited(request=4 * BLOCK, longest_request=16 * BLOCK)
    served.write("a", (blocks + 1) * BLOCK)
    served.open_remote("a").fetch([(BLOCK, (blocks + 1) * BLOCK)])
    assert [last - first for first, last in sorted(ranges(served))] == expected
