"""Saves of sealed checkpoints into one folder that overlap: what is loaded then is whole, or a save has failed."""

import threading

import pytest

import fastrack

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")
import torch
import torch.distributed.checkpoint as dcp
from helpers.object_store import ObjectStore
from torch.distributed.checkpoint import CheckpointException

from fastrack.distributed import CheckpointReader, CheckpointWriter
from fastrack.distributed import _leftovers as leftovers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

KEY = fastrack.Key.from_bytes(bytes(range(32)))


@pytest.fixture(params=["folder", "store"])
def place(request, tmp_path):
    ObjectStore.clear()
    yield tmp_path / "run" if request.param == "folder" else "shelf://bucket/run"
    ObjectStore.clear()


def names(place):
    if isinstance(place, str):
        return ObjectStore.names(place.removeprefix("shelf://"))
    return sorted(path.name for path in place.iterdir())


class Staged(CheckpointWriter):
    """A writer that calls functions between the steps of a save."""

    def __init__(self, place, *, once_written=lambda: None, once_planned=lambda: None):
        super().__init__(place, key=KEY)
        self.once_written, self.once_planned = once_written, once_planned

    def prepare_global_plan(self, plans):
        plans = super().prepare_global_plan(plans)
        self.once_planned()
        return plans

    def write_data(self, plan, planner):
        done = super().write_data(plan, planner)
        self.once_written()
        return done


def save(place, value, **steps):
    dcp.save({"x": torch.full((5,), float(value))}, storage_writer=Staged(place, **steps), no_dist=True)


def load(place):
    state = {"x": torch.zeros(5)}
    dcp.load(state, storage_reader=CheckpointReader(place, keys=KEY), no_dist=True)
    return int(state["x"][0])


@pytest.mark.parametrize("first", [1, 2])
def test_two_saves_that_are_written_at_once_both_succeed_and_the_last_one_is_loaded(place, first):
    """Either may end first. The next save removes what both have left."""
    planned, written, ended = threading.Barrier(2, timeout=20), threading.Barrier(2, timeout=20), threading.Event()
    failures = []

    def run(value):
        def wait():
            written.wait()
            if value != first:
                assert ended.wait(20)

        try:
            save(place, value, once_planned=planned.wait, once_written=wait)
        except CheckpointException as error:
            failures.append(error)
        if value == first:
            ended.set()

    threads = [threading.Thread(target=run, args=(value,)) for value in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert load(place) == 3 - first
    save(place, 3)
    assert load(place) == 3
    assert len(names(place)) == 2


def test_a_save_whose_files_a_later_one_removed_fails_and_leaves_the_later_checkpoint(place):
    """As of a job that goes on beside its restart."""
    with pytest.raises(CheckpointException, match="another save into this folder") as caught:
        save(place, 1, once_written=lambda: save(place, 2))
    assert [type(error) for error, _ in caught.value.failures.values()] == [FileNotFoundError]
    assert load(place) == 2


def test_a_save_removes_no_file_of_a_checkpoint_that_replaced_its_own(place, monkeypatch):
    """The earlier save ends after the later one has described its checkpoint, and before that removes what was left."""
    described, ended = threading.Event(), threading.Event()
    failures, own_files = [], leftovers.own_files

    def wait_for_the_other(*rest):
        files = list(own_files(*rest))
        if threading.current_thread() is later:
            described.set()
            assert ended.wait(20)
        return files

    def run():
        try:
            save(place, 2)
        except CheckpointException as error:
            failures.append(error)
            described.set()

    def start_the_other():
        later.start()
        assert described.wait(20)

    later = threading.Thread(target=run)
    monkeypatch.setattr(leftovers, "own_files", wait_for_the_other)
    save(place, 1, once_written=start_the_other)
    ended.set()
    later.join(60)
    assert not failures
    assert load(place) == 1


def test_a_checkpoint_that_lost_a_file_after_it_was_described_is_not_reported_as_saved(place, monkeypatch):
    remove = leftovers.Leftovers.remove

    def remove_all(found, key):
        remove(found, key)
        monkeypatch.undo()
        for path in leftovers.own_files(place_of(found), leftovers.shard_names(place_of(found)), key.id):
            leftovers._remove(path)

    def place_of(found):
        return found.folder

    monkeypatch.setattr(leftovers.Leftovers, "remove", remove_all)
    with pytest.raises(CheckpointException, match="another save into this folder"):
        save(place, 1)


def test_a_folder_that_cannot_be_listed_is_written_to(monkeypatch):
    """Credentials may allow only to write objects."""

    def refuse(operation):
        if operation == "find":
            raise PermissionError

    ObjectStore.clear()
    monkeypatch.setattr(ObjectStore, "before", staticmethod(refuse))
    for value in (1, 2):
        save("shelf://bucket/run", value)
    assert load("shelf://bucket/run") == 2
    ObjectStore.clear()


def test_a_file_that_a_store_lists_late_is_not_missed(monkeypatch):
    ObjectStore.clear()
    monkeypatch.setattr(ObjectStore, "find", lambda *_, **__: [])
    save("shelf://bucket/run", 1)
    assert load("shelf://bucket/run") == 1
    ObjectStore.clear()
