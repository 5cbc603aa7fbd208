"""A stream of sealed batches: one sequence for any number of ranks and workers, continued after any batch."""

import copy
import itertools
import json
import pickle
import random
import threading

import numpy as np
import pytest
from helpers.forking import in_forked_child

import fastrack
from fastrack import SealedDataset, save_file, wrap

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402 - after the check

from fastrack import StreamingSealedDataset  # noqa: E402

KEY = fastrack.Key.from_bytes(bytes(range(32)))
SIZES = [30, 7, 55, 41, 12, 62, 26]
COUNT = sum(SIZES)
BATCH = 16
BATCHES = -(-COUNT // BATCH)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    return [write(folder / f"{shard}.safetensors", sum(SIZES[:shard]), size) for shard, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def data(paths):
    return SealedDataset(paths, keys=KEY)


def write(path, start, count):
    save_file({"x": np.arange(start, start + count)}, path, KEY)
    return path


def stream_of(data, size=BATCH, **options):
    return StreamingSealedDataset(data, size, **{"seed": 3, "window": 3, **options})


def loader_of(stream, workers=0, **options):
    return wrap(DataLoader(stream, batch_size=None, num_workers=workers, **options))


def run(data, world=1, workers=0, state=None, count=None, **options):
    """Return global batches of all ranks, and the state after them, which each rank has."""
    ranks, states = [], []
    for rank in range(world):
        loader = loader_of(stream_of(data, rank=rank, world_size=world, **options), workers)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        ranks.append([batch["x"].tolist() for batch in itertools.islice(iterator, count)])
        states.append(loader.state_dict())
        iterator.close()
    assert all(other == states[0] for other in states)
    return [joined(parts) for parts in zip(*ranks, strict=True)], states[0]


def joined(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.fixture(scope="module")
def whole(data):
    batches, _ = run(data)
    assert sorted(joined(batches)) == list(range(COUNT))
    assert [len(batch) for batch in batches] == [BATCH] * (BATCHES - 1) + [COUNT % BATCH]
    return batches


# Order.


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_and_workers_share_one_sequence_of_global_batches(data, whole, world, workers):
    assert run(data, world, workers)[0] == whole


def test_workers_take_whole_batches_in_turn(data, whole):
    assert run(data, 1, 2)[0] == whole


@pytest.mark.slow
def test_ranks_change_at_any_global_batch(data, whole):
    check_changes(data, whole, 12, workers=(0,))


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_and_workers_change_at_any_global_batch(data, whole):
    check_changes(data, whole, 12, workers=(0, 1, 2))


def check_changes(data, whole, times, workers):
    """Continue an epoch twice, with other ranks and workers, at random batches."""
    draw = random.Random(1)
    for _ in range(times):
        cuts = sorted(draw.sample(range(1, BATCHES), 2))
        got, state = [], None
        for start, stop in itertools.pairwise([0, *cuts, None]):
            some = draw.choice([1, 2, 4, 8]), draw.choice(workers)
            batches, state = run(data, *some, state, None if stop is None else stop - start)
            got += batches
        assert got == whole


def test_another_batch_size_continues_with_the_next_sample(data, whole):
    _, state = run(data, 2, count=5)
    rest, _ = run(data, 1, 0, state, size=10)
    assert joined(rest) == joined(whole)[5 * BATCH :]


def test_epochs_and_seeds_have_orders_of_their_own(data, whole):
    loader = loader_of(stream_of(data))
    orders = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        orders.append([batch["x"].tolist() for batch in loader])
        assert sorted(joined(orders[-1])) == list(range(COUNT))
    assert orders[0] == whole != orders[1] != orders[2] != whole
    assert run(data, seed=4)[0] not in orders


def test_without_shuffle_samples_have_the_order_of_the_data_set(data):
    assert joined(run(data, 4, shuffle=False)[0]) == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_persistent_workers_hear_of_epochs_and_states(data, whole, method):
    loader = loader_of(stream_of(data), 2, persistent_workers=True, multiprocessing_context=method)
    first = [batch["x"].tolist() for batch in loader]
    loader.set_epoch(1)
    second = [batch["x"].tolist() for batch in loader]
    assert first == whole
    assert second == [batch["x"].tolist() for batch in loader_of(epoch_of(data, 1))]
    loader.load_state_dict(run(data, count=4)[1])
    assert [batch["x"].tolist() for batch in loader] == whole[4:]


def epoch_of(data, epoch):
    stream = stream_of(data)
    stream.set_epoch(epoch)
    return stream


def continued(stream, answers):
    """Finish an epoch as a rank, and begin another one."""
    rest = list(stream)
    stream.set_epoch(1)
    answers.put((len(rest), len(list(stream))))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_ranks_that_were_begun_with_a_stream_do_not_move_each_other(data, method):
    stream = stream_of(data)
    stream.load_state_dict(stream.state_dict(4))
    context = torch.multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    for _ in range(2):
        rank = context.Process(target=continued, args=(stream, answers))
        rank.start()
        assert answers.get() == (BATCHES - 4, BATCHES)
        rank.join()
    assert (stream.epoch, len(list(stream))) == (0, BATCHES - 4)


def test_persistent_workers_of_a_rank_that_was_begun_with_a_stream_hear_of_epochs(data):
    stream = stream_of(data)

    def iterate_twice():
        loader = DataLoader(
            stream, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
        )
        first = [opened(batch) for batch in loader]
        stream.set_epoch(1)
        return first == [opened(batch) for batch in loader]

    assert in_forked_child(iterate_twice) is False
    assert stream.epoch == 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_a_copy_of_a_stream_begins_where_it_is_and_does_not_move_it(data, duplicate):
    stream = stream_of(data)
    stream.set_epoch(2)
    again = duplicate(stream)
    assert again.epoch == 2
    again.set_epoch(3)
    assert (stream.epoch, again.epoch) == (2, 3)


# The last batch.


def test_an_iteration_that_has_begun_keeps_its_epoch_while_workers_start(data, whole):
    train = loader_of(stream_of(data), 2, multiprocessing_context="fork")
    first = iter(train)
    train.set_epoch(1)

    assert [batch["x"].tolist() for batch in first] == whole
    assert [batch["x"].tolist() for batch in train] != whole


def test_persistent_workers_of_a_copied_stream_hear_of_epochs(data):
    stream = copy.deepcopy(stream_of(data))
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    train = wrap(loader, keys=KEY)
    epochs = []
    for epoch in range(2):
        train.set_epoch(epoch)
        epochs.append([batch["x"].tolist() for batch in train])

    assert epochs[0] != epochs[1]


def test_ranks_divide_the_last_batch_so_that_each_has_as_many_batches(data):
    streams = [stream_of(data, 20, rank=rank, world_size=4) for rank in range(4)]
    sizes = [[len(batch["x"]) for batch in stream] for stream in streams]
    assert [sizes[rank][-1] for rank in range(4)] == [3, 3, 3, 4]
    assert {tuple(some[:-1]) for some in sizes} == {(5,) * (COUNT // 20)}
    assert {len(stream) for stream in streams} == {len(some) for some in sizes} == {COUNT // 20 + 1}


def test_fewer_last_samples_than_ranks_are_refused(data):
    with pytest.raises(ValueError, match="expected a sample for each of 8 ranks in every batch, got 1 in the"):
        iter(stream_of(data, 29, rank=0, world_size=8))
    assert len(list(stream_of(data, 29, rank=0, world_size=8, drop_last=True))) == COUNT // 29
    stream = stream_of(data, 20, rank=0, world_size=8)
    stream.load_state_dict(stream_of(data, 10).state_dict(1))
    with pytest.raises(ValueError, match="got 3 in the last one"):
        iter(stream)


def test_drop_last_leaves_out_the_batch_that_is_short(data, whole):
    assert run(data, 2, drop_last=True)[0] == whole[:-1]
    assert len(stream_of(data, drop_last=True)) == BATCHES - 1


# State.


def test_the_state_is_that_after_the_last_batch_in_use(data, whole):
    for workers in (0, 2):
        loader = loader_of(stream_of(data), workers)
        iterator = iter(loader)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        iterator.close()
        assert state["consumed"] == BATCH
        again = loader_of(stream_of(data))
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert [batch["x"].tolist() for batch in again] == whole[1:]


def test_a_plain_loader_is_continued_by_the_number_of_batches(data, whole):
    stream = stream_of(data)
    used = list(itertools.islice(DataLoader(stream, batch_size=None, num_workers=2), 5))
    again = stream_of(data)
    again.load_state_dict(stream.state_dict(len(used)))
    assert [opened(batch) for batch in again] == whole[5:]
    assert [opened(batch) for batch in again] == whole  # the next iteration is a whole epoch


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_is_rewound_as_the_caller_comes_to_its_end_and_not_a_thread(data, whole, workers, prefetch):
    stream = stream_of(data)
    loader = wrap(DataLoader(stream, batch_size=None, num_workers=workers), prefetch=prefetch)
    loader.load_state_dict(stream.state_dict(BATCHES - 3))
    iterator = iter(loader)
    first = next(iterator)["x"].tolist()
    for thread in threading.enumerate():
        if thread.name == "fastrack-loader":
            thread.join(60)  # it has come to the end
    del iterator
    rest, again = ([batch["x"].tolist() for batch in loader] for _ in range(2))
    assert [first, *rest[1:]] == rest == whole[-3:]
    assert again == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_of_a_plain_loader_that_came_to_its_end_has_the_state_of_its_end(data, workers):
    stream = stream_of(data)
    stream.load_state_dict(stream.state_dict(4))
    rest = list(DataLoader(stream, batch_size=None, num_workers=workers))
    assert len(rest) == BATCHES - 4
    assert stream.state_dict(len(rest))["consumed"] == COUNT


def opened(batch):
    return fastrack.unseal(batch["x"], KEY).tolist()


def test_without_workers_a_stream_counts_its_own_batches(data):
    stream = stream_of(data)
    iterator = iter(stream)
    for _ in range(3):
        next(iterator)
    assert stream.state_dict() == stream.state_dict(3)
    list(iterator)
    assert stream.state_dict()["consumed"] == COUNT


def test_an_epoch_set_in_the_middle_of_an_iteration_does_not_change_its_state(data):
    stream = stream_of(data)
    iterator = iter(stream)
    next(iterator)
    stream.set_epoch(1)
    assert (stream.state_dict()["epoch"], stream.state_dict()["consumed"]) == (1, 0)
    next(iterator)
    assert (stream.state_dict()["epoch"], stream.state_dict()["consumed"]) == (0, 2 * BATCH)


def test_the_epoch_of_a_state_is_continued_and_any_other_begins_anew(data):
    _, state = run(data, count=4)
    stream = stream_of(data)
    stream.load_state_dict(state)
    stream.set_epoch(0)
    assert len(list(stream)) == BATCHES - 4
    stream.load_state_dict(state)
    stream.set_epoch(1)
    assert len(list(stream)) == BATCHES
    assert stream.epoch == 1


def test_an_epoch_that_is_finished_is_not_begun_again(data):
    loader = loader_of(stream_of(data))
    list(loader)
    state = loader.state_dict()
    again = loader_of(stream_of(data))
    again.load_state_dict(state)
    assert list(again) == []
    assert len(list(again)) == BATCHES


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_state_of_a_finished_epoch_is_loaded_whatever_was_set_before(data, wrapped):
    stream = stream_of(data)
    state = stream.state_dict(BATCHES)
    target = loader_of(stream) if wrapped else stream
    for before in (5, 0):
        stream.set_epoch(before)
        target.load_state_dict(state)
        assert (stream.epoch, target.state_dict()["consumed"], len(list(stream))) == (0, COUNT, 0)
    target.load_state_dict({**state, "epoch": 1, "consumed": 2 * BATCH})
    target.load_state_dict(state)
    stream.set_epoch(1)
    assert len(list(stream)) == BATCHES


@pytest.mark.parametrize(
    "change",
    ["seed=4", "window=2", "shuffle=false", "data=1", "handed=2", "more=1", "epoch=1.0", "epoch=-1", "consumed=1000"],
)
def test_a_state_of_another_stream_is_refused(data, change):
    stream = stream_of(data)
    state = stream.state_dict()
    name, _, value = change.partition("=")
    with pytest.raises(ValueError, match=r"state_dict: .*expected"):
        stream.load_state_dict({**state, name: json.loads(value)})
    assert stream.state_dict() == state


@pytest.mark.parametrize("name", ["data", "seed", "shuffle", "window", "consumed", "epoch", "handed"])
def test_an_array_in_a_state_is_refused_by_a_sentence(data, name):
    stream = stream_of(data)
    for array in (np.array([3, 3]), torch.tensor([3, 3])):
        with pytest.raises(ValueError, match=r"state_dict: .*expected .*, got"):
            stream.load_state_dict({**stream.state_dict(), name: array})


@pytest.mark.parametrize("name", ["dataset", "global_batch_size", "seed", "shuffle", "window", "drop_last", "batched"])
def test_what_a_state_depends_on_stays_as_the_stream_was_made(data, name):
    stream = stream_of(data)
    with pytest.raises(AttributeError, match=f"{name}: expected to stay as it was made"):
        setattr(stream, name, 5)


def test_a_state_of_other_files_is_refused_and_of_moved_ones_is_taken(tmp_path, data, paths):
    state = stream_of(data).state_dict()
    moved = [tmp_path / path.name for path in paths]
    for path, new in zip(paths, moved, strict=True):
        new.write_bytes(path.read_bytes())
    stream_of(SealedDataset(moved, keys=KEY)).load_state_dict(state)
    write(moved[2], sum(SIZES[:2]), SIZES[2])
    with pytest.raises(ValueError, match="got that of others"):
        stream_of(SealedDataset(moved, keys=KEY)).load_state_dict(state)
    with pytest.raises(ValueError, match="got that of others"):
        stream_of(SealedDataset(paths[::-1], keys=KEY)).load_state_dict(state)
    for garbage in (None, 3, [], {}, "state"):
        with pytest.raises(ValueError, match="state_dict: expected the state of a stream"):
            stream_of(data).load_state_dict(garbage)


# What is streamed.


def test_items_are_handles_which_workers_make_without_keys(data):
    for workers in (0, 1):
        item = next(iter(DataLoader(stream_of(data), batch_size=None, num_workers=workers)))
        assert isinstance(item["x"], fastrack.SealedRows)
        assert item["x"].shape == (BATCH,)
    sent = pickle.dumps(stream_of(data))
    assert KEY.material() not in sent
    assert len(list(pickle.loads(sent))) == BATCHES


def test_a_pickled_stream_keeps_its_rank_where_there_is_no_process_group(data, whole, monkeypatch):
    with monkeypatch.context() as patch:
        for name, found in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
            patch.setattr(torch.distributed, name, lambda found=found: found)
        sent = pickle.dumps(stream_of(data))
    received = pickle.loads(sent)
    assert [opened(batch) for batch in received] == [batch[len(batch) // 2 :] for batch in whole]


def test_a_stream_of_no_samples_is_empty(tmp_path):
    empty = SealedDataset(write(tmp_path / "empty.safetensors", 0, 0), keys=KEY)
    for workers in (0, 1):
        loader = loader_of(stream_of(empty), workers)
        assert list(loader) == []
        assert loader.state_dict()["consumed"] == len(loader) == 0


def test_records_windows_and_transforms_are_streamed(tmp_path, data):
    with fastrack.DatasetWriter(tmp_path / "text", KEY) as writer:
        for number in range(20):
            writer.write({"text": "a" * number, "number": number})
    for batch in loader_of(stream_of(SealedDataset(tmp_path / "text", keys=KEY), 6)):
        assert batch["text.lengths"].tolist() == batch["number"].tolist()
    windows = loader_of(stream_of(data.windows("x", 4), 6))
    assert all((batch["x"].diff() == 1).all() for batch in windows)
    opened = SealedDataset(tmp_path / "text", keys=KEY, transform=lambda sample: len(sample["text"]))
    assert sorted(torch.cat(list(stream_of(opened, 6))).tolist()) == list(range(20))


def test_samples_are_streamed_for_those_who_make_batches(data, whole):
    stream = stream_of(data, batched=False)
    loader = wrap(DataLoader(stream, batch_size=BATCH, collate_fn=fastrack.collate))
    assert [batch["x"].tolist() for batch in loader] == whole
    assert len(stream) == COUNT
    iterator = iter(stream)
    for _ in range(20):
        next(iterator)
    again = stream_of(data, batched=False)
    again.load_state_dict(stream.state_dict())
    assert [opened(sample) for sample in again] == joined(whole)[20:]


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}])
def test_batches_that_a_loader_would_batch_again_are_refused(data, options):
    with pytest.raises(ValueError, match=r"batch_size=None.* got batch_size=[14]\. "):
        wrap(DataLoader(stream_of(data), **options))


@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_that_does_not_keep_the_order_is_refused(data, stateful):
    loader = DataLoader(stream_of(data), batch_size=None, num_workers=2)
    loader.in_order = False  # an argument since torch 2.6
    if stateful:  # like that of torchdata
        loader.state_dict = dict
    with pytest.raises(ValueError, match="got in_order=False"):
        wrap(loader)


def test_several_processes_without_a_process_group_are_refused(data, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got neither, where WORLD_SIZE is 2"):
        iter(stream_of(data))
    assert len(list(stream_of(data, rank=0, world_size=2))) == BATCHES
