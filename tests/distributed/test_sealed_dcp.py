"""Sealed checkpoints of torch.distributed.checkpoint, in one process."""

import contextlib
import copy
import itertools
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import file_ids
from helpers.cases import each
from helpers.tampering import tamper_file
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

import fastrack
from fastrack import AuthenticationError, FormatError, Key, UnknownKeyError, load_checkpoint, save_checkpoint
from fastrack._util import atomic
from fastrack.distributed import CheckpointReader, CheckpointWriter
from fastrack.distributed import _description as description
from fastrack.distributed import _writer as writer

KEY, OTHER = Key.from_bytes(bytes(range(32))), Key.from_bytes(bytes(range(1, 33)))
DESCRIPTION = "checkpoint.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def state(seed=0):
    torch.manual_seed(seed)
    return {
        "model": {
            "first.weight": torch.randn(300, 70),
            "second.weight": torch.randn(300, 70),
            "scale": torch.tensor(seed + 0.5),
            "none": torch.empty(0, 3),
        },
        "optimizer": {"state": {"w": {"step": seed, "exp_avg": torch.randn(40, 3)}}, "lr": 0.1 + seed},
        "epoch": seed,
    }


def save(value, folder, key=KEY, **options):
    dcp.save(value, storage_writer=CheckpointWriter(folder, key=key), no_dist=True, **options)


def load(value, folder, keys=KEY, **options):
    reader = CheckpointReader(folder, keys=keys, **options)
    dcp.load(value, storage_reader=reader, no_dist=True)
    return value


def bits(value):
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().view(-1).view(torch.uint8).tolist() if value.numel() else []
    return value


@pytest.fixture
def folder(tmp_path):
    save(state(), tmp_path / "c")
    return tmp_path / "c"


def shards(folder):
    [path] = folder.glob("shards-*.safetensors")
    return path


@contextlib.contextmanager
def refused(error, match=None):
    """Every process fails in this way."""
    with pytest.raises(CheckpointException) as info:
        yield
    [(found, _)] = info.value.failures.values()
    assert isinstance(found, error), found
    if match:
        assert match in str(found)


def refuse(folder, error, match=None, **options):
    """Loading fails, and no tensor is written."""
    target = state(1)
    with refused(error, match):
        load(target, folder, **options)
    assert bits(target) == bits(state(1))


# What was saved is loaded


def test_what_was_saved_is_loaded(folder):
    target = state(1)
    places = {name: value.data_ptr() for name, value in target["model"].items()}
    assert bits(load(target, folder)) == bits(state())
    assert {name: value.data_ptr() for name, value in target["model"].items()} == places
    assert [path.name for path in sorted(folder.iterdir())] == [DESCRIPTION, shards(folder).name]


@each(
    "dtype",
    ["bool", "uint8", "int64", "uint16", "bfloat16", "float16", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"],
)
def test_tensors_of_every_dtype_come_back(tmp_path, dtype):
    dtype = getattr(torch, dtype)
    tensor = torch.randint(0, 2, (50, 7)).to(dtype)
    save({"x": tensor}, tmp_path)
    assert bits(load({"x": torch.zeros(50, 7).to(dtype)}, tmp_path)["x"]) == bits(tensor)


def test_values_come_back_with_their_types(tmp_path):
    shared = torch.arange(3)
    values = {
        "none": None, "yes": True, "big": 2**70, "small": -1.5e-300, "infinite": float("inf"), "text": "é",
        "tuple": (1, [2.5, None], {"a": b"x", 3: "y"}), "inside": (shared, {"again": shared}), "array": np.arange(4),
        "scalar": np.float32(2.5), "betas": (0.9, 0.999),
    }  # fmt: skip
    save({"v": values, "w": torch.ones(2)}, tmp_path)
    found = load({"v": dict.fromkeys(values, 0), "w": torch.zeros(2)}, tmp_path)["v"]
    assert found["inside"][0].tolist() == found["inside"][1]["again"].tolist() == [0, 1, 2]
    assert found["array"].tolist() == [0, 1, 2, 3]
    assert type(found["scalar"]) is np.float32
    for name in values.keys() - {"inside", "array"}:
        assert found[name] == values[name], name
        assert type(found[name]) is type(values[name]), name


def test_any_layout_and_dtype_of_a_target_is_filled(tmp_path):
    whole = torch.randn(30, 40)
    save({"a": whole.T, "b": whole, "c": whole[::2, ::3], "d": whole}, tmp_path)
    tied = torch.zeros(30, 40)
    target = {"a": torch.zeros(30, 40).T, "b": torch.zeros(40, 30).T, "c": torch.zeros(15, 14).double(), "d": tied}
    load(target, tmp_path)
    assert torch.equal(target["a"], whole.T)
    assert torch.equal(target["b"], whole)
    assert torch.equal(target["c"], whole[::2, ::3].double())
    target = {"b": tied, "d": tied}  # of which the last one stays
    assert torch.equal(load(target, tmp_path)["d"], whole)


def test_a_part_of_a_checkpoint_is_loaded(folder):
    target = {"model": {"second.weight": torch.zeros(300, 70)}}
    assert torch.equal(load(target, folder)["model"]["second.weight"], state()["model"]["second.weight"])


def test_a_checkpoint_is_saved_in_the_background(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        current = state()
        future = dcp.async_save(current, storage_writer=CheckpointWriter(tmp_path, key=KEY))
        future.result()
        target = state(1)
        dcp.load(target, storage_reader=CheckpointReader(tmp_path, keys=KEY))
        assert bits(target) == bits(state())
    finally:
        torch.distributed.destroy_process_group()


def test_a_writer_with_the_path_of_a_key_can_go_to_another_process(tmp_path):
    KEY.save(tmp_path / "owner.key")
    sent = pickle.loads(pickle.dumps(CheckpointWriter(tmp_path / "c", key=tmp_path / "owner.key")))
    dcp.save(state(), storage_writer=sent, no_dist=True)
    assert bits(load(state(1), tmp_path / "c")) == bits(state())
    with pytest.raises(TypeError, match="a key stays in its process"):
        pickle.dumps(CheckpointWriter(tmp_path / "c", key=KEY))
    with pytest.raises(FileNotFoundError):
        CheckpointWriter(tmp_path / "c", key=tmp_path / "none.key")


def test_the_argument_checkpoint_id_names_the_folder(tmp_path):
    save(state(), tmp_path / "x", checkpoint_id=str(tmp_path / "y"))
    assert not (tmp_path / "x").exists()
    target = state(1)
    dcp.load(target, checkpoint_id=tmp_path / "y", storage_reader=CheckpointReader(tmp_path / "x", KEY), no_dist=True)
    assert bits(target) == bits(state())
    assert CheckpointWriter.validate_checkpoint_id(tmp_path)
    assert not CheckpointReader.validate_checkpoint_id("")


def test_a_planner_may_transform_what_it_saves(tmp_path):
    class Halving(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            for item in plan.items:
                item.tensor_data.properties.dtype = torch.float16
            return plan

        def transform_object(self, item, value):
            return value.half()

    save({"w": torch.ones(40, 2)}, tmp_path, planner=Halving())
    assert torch.equal(load({"w": torch.zeros(40, 2)}, tmp_path)["w"], torch.ones(40, 2))

    class Wrong(DefaultSavePlanner):
        def transform_object(self, item, value):
            return value.half()

    with refused(TypeError, "'w'"):
        save({"w": torch.ones(40, 2)}, tmp_path, planner=Wrong())
    assert torch.equal(load({"w": torch.zeros(40, 2)}, tmp_path)["w"], torch.ones(40, 2))


def test_a_planner_that_keeps_its_plans_saves_again(tmp_path, monkeypatch):
    for name in [name for name in vars(SavePlanner) if name.startswith("_cached")]:
        monkeypatch.setattr(SavePlanner, name, {})
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for seed in (0, 2, 3):
        save(state(seed), tmp_path, planner=planner)
        assert bits(load(state(1), tmp_path)) == bits(state(seed))
        assert len(list(tmp_path.iterdir())) == 2


def test_a_tensor_elsewhere_is_sealed_there(tmp_path, monkeypatch):
    sealed, seal_message = [], writer.seal_message
    describe = writer._describe
    monkeypatch.setattr(writer, "_describe", lambda *given: (*describe(*given)[:2], True))
    monkeypatch.setattr(writer, "seal_message", lambda x, *rest: sealed.append(x.shape) or seal_message(x, *rest))
    save(state(), tmp_path)
    assert len(sealed) == 5
    assert bits(load(state(1), tmp_path)) == bits(state())


# What the storage sees


def test_names_and_values_are_not_in_the_files(tmp_path):
    save({"secret_name": torch.ones(3), "other_name": "secret value", "learning_rate": 0.125}, tmp_path)
    for path in tmp_path.iterdir():
        content = path.read_bytes()
        for text in (b"secret", b"other_name", b"learning_rate", np.ones(3, np.float32).tobytes(), b"pickle", b"torch"):
            assert text not in content, (path, text)


def test_the_files_are_sealed_files_that_can_be_verified(folder):
    for path in folder.iterdir():
        fastrack.verify_file(path, KEY)
        with fastrack.load_file(path) as file:
            assert (file.kind, file.key_id, len(file.plain)) == ("checkpoint", KEY.id, 0)


# Replacing a checkpoint


def test_a_new_checkpoint_replaces_the_old_one_and_its_files(folder):
    old = shards(folder)
    save(state(3), folder.with_name("unfinished"))
    unfinished = shards(folder.with_name("unfinished"))
    unfinished.rename(folder / unfinished.name)
    (folder / "shards-notes.txt").touch()
    save(state(2), folder)
    assert shards(folder) != old
    assert bits(load(state(1), folder)) == bits(state(2))
    assert {path.name for path in folder.iterdir()} == {DESCRIPTION, shards(folder).name, "shards-notes.txt"}


def test_the_files_of_others_are_left(folder):
    content = shards(folder).read_bytes()
    foreign = ["shards-00001.safetensors", "shards-train.safetensors", ".fastrack-0123.part", "shards-x.safetensors"]
    for name, text in zip(foreign, [b"data", b"", b"being written", content], strict=True):
        (folder / name).write_bytes(text)
    fastrack.save_file({"x": np.ones(2)}, folder / f"shards-{32 * '0'}.safetensors", KEY)
    save(state(2), folder.with_name("other"), key=fastrack.Key.generate())
    of_other_key = shards(folder.with_name("other"))
    of_other_key.rename(folder / of_other_key.name)
    before = {path.name for path in folder.iterdir()}
    save(state(2), folder)
    after = {path.name for path in folder.iterdir()}
    assert len(before - after) == len(after - before) == 1
    assert {*foreign, f"shards-{32 * '0'}.safetensors", of_other_key.name} <= after


class Stopped(BaseException):
    pass


@pytest.mark.slow
def test_a_save_that_stops_anywhere_leaves_the_old_checkpoint_or_the_new(folder, monkeypatch, tmp_path):
    """Stop at each use of the file system."""
    steps: list[str] = []
    stops = [1000]

    def counted(function):
        def call(*arguments, **options):
            steps.append(function.__name__)
            if len(steps) == stops[0]:
                raise Stopped
            return function(*arguments, **options)

        return call

    uses = [(os, "fsync"), (os, "replace"), (os, "link"), (Path, "unlink"), (atomic._CompleteWriter, "write")]
    for place, name in uses:
        monkeypatch.setattr(place, name, counted(getattr(place, name)))
    expected, outcomes = [bits(state()), bits(state(2))], []
    for stop in itertools.count(1):
        copied = tmp_path / f"c{stop}"
        shutil.copytree(folder, copied)
        steps.clear()
        stops[0] = stop
        with contextlib.suppress(CheckpointException):
            save(state(2), copied)
        is_done = len(steps) < stop
        stops[0] = 1000
        outcomes.append(expected.index(bits(load(state(1), copied))))
        save(state(3), copied)  # which removes what was left
        assert len(list(copied.iterdir())) == 2
        if is_done:
            break
    assert outcomes == sorted(outcomes)
    assert outcomes.count(0) > 5
    assert outcomes.count(1) > 1


def test_a_save_that_fails_leaves_the_old_checkpoint(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for wrong in [
        {"f": print},
        {"s": range(2)},
        {"x": torch.zeros(3).to_sparse()},
        {"x": torch.zeros(3, dtype=torch.complex128)},
    ]:
        with refused(TypeError):
            save({"w": torch.ones(3), **wrong}, folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert bits(load(state(1), folder)) == bits(state())


def test_saving_without_a_coordinator_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_collectives"):
        CheckpointWriter(tmp_path, KEY).set_up_storage_writer(True, rank=0, use_collectives=False)


# Refusals before anything is written


def test_a_missing_or_plain_description_is_refused(folder):
    (folder / DESCRIPTION).unlink()
    refuse(folder, (AssertionError, FileNotFoundError), DESCRIPTION)
    dcp.save(state(), checkpoint_id=folder, no_dist=True)  # a plain one beside the sealed files
    refuse(folder, (AssertionError, FileNotFoundError), DESCRIPTION)


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_the_file_of_another_checkpoint_is_refused(folder, tmp_path, key):
    save(state(), tmp_path / "other", key)
    shutil.copy(shards(tmp_path / "other"), shards(folder))
    refuse(folder, AuthenticationError, keys=[KEY, OTHER])


def test_an_older_file_is_refused(folder, tmp_path):
    old = shutil.copy(shards(folder), tmp_path / "old")
    save(state(2), folder)
    shutil.copy(old, shards(folder))
    refuse(folder, AuthenticationError, "file id")


def test_a_file_of_the_same_id_under_another_key_is_refused(folder, tmp_path, monkeypatch):
    """The holder of another key that the reader has cannot take the place of a process."""
    path = shards(folder)
    file_ids.fix(monkeypatch, path.stem.removeprefix("shards-"))
    save(state(2), tmp_path / "other", OTHER)
    shutil.copy(shards(tmp_path / "other"), path)
    refuse(folder, AuthenticationError, OTHER.id, keys=[KEY, OTHER])


def test_a_checkpoint_of_another_kind_in_the_place_of_the_description_is_refused(folder):
    save_checkpoint(folder / DESCRIPTION, {"model": state()}, key=KEY)
    refuse(folder, (AssertionError, FormatError), "expected the description")


def test_the_description_of_another_checkpoint_does_not_find_its_files(folder, tmp_path):
    save(state(), tmp_path / "other")
    shutil.copy(tmp_path / "other" / DESCRIPTION, folder / DESCRIPTION)
    refuse(folder, FileNotFoundError)


def test_messages_that_changed_places_are_refused(folder):
    """Both weights have the same dtype and shape."""
    path = shards(folder)
    with fastrack.load_file(path) as file:
        numbers = [name for name in file.names if file[name].shape == (300, 70)]
        first, second = (file[name].message.tobytes() for name in numbers)
    content = path.read_bytes()
    assert content.count(first) == content.count(second) == 1
    swapped = content.replace(first, b"?" * len(first)).replace(second, first).replace(b"?" * len(first), second)
    path.write_bytes(swapped)
    refuse(folder, AuthenticationError)


def test_a_key_that_is_missing_is_named(folder):
    refuse(folder, (AssertionError, UnknownKeyError), KEY.id, keys=OTHER)


def test_an_altered_header_anywhere_is_refused_before_the_first_tensor(folder):
    with fastrack.load_file(shards(folder)) as file:
        names = [name for name in file.names if file[name].nbytes]  # of what is empty nothing is read
    content = shards(folder).read_bytes()
    for name in names:
        tamper_file(shards(folder), name, 30)
        refuse(folder, AuthenticationError)
        shards(folder).write_bytes(content)
    assert bits(load(state(1), folder)) == bits(state())


def test_an_altered_chunk_leaves_zeros_and_names_file_and_chunk(folder):
    with fastrack.load_file(shards(folder)) as file:
        name = next(name for name in file.names if file[name].shape == (300, 70))
    tamper_file(shards(folder), name, 56 + 2 * 16400 + 5)
    target = state(1)
    with pytest.raises(CheckpointException) as info:
        load(target, folder)
    [(error, _)] = info.value.failures.values()
    assert isinstance(error, AuthenticationError)
    assert (error.path, error.tensor, error.chunk) == (shards(folder), name, 2)
    assert not any(value.any() for value in target["model"].values())
    assert target["epoch"] == 1


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_in_place_of_any_file_are_not_run(folder, tmp_path):
    marker, bomb = tmp_path / "ran", pickle.dumps(Bomb(tmp_path / "ran"))
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for evil in (bomb, len(bomb).to_bytes(8, "little") + bomb, content[:-80] + bomb, content + bomb):
            path.write_bytes(evil)
            refuse(folder, Exception)
        path.write_bytes(content)
    (folder / ".metadata").write_bytes(bomb)
    (folder / "__0_0.distcp").write_bytes(bomb)
    assert bits(load(state(1), folder)) == bits(state())
    assert not marker.exists()
    pickle.loads(bomb).close()
    assert marker.exists()  # so that the test can fail


def test_a_tensor_of_another_shape_is_refused(folder):
    target = state(1)
    target["model"]["scale"] = torch.zeros(3)
    before = bits(target)
    with pytest.raises(CheckpointException):
        load(target, folder)
    assert bits(target) == before


def test_an_anchor_refuses_an_older_checkpoint(folder, tmp_path):
    from fastrack.grants import Grants, Identity, Signer

    owner = Signer.generate()
    fastrack.publish(folder, signer=owner)
    anchor = tmp_path / "anchor"
    fastrack.Anchor.create(anchor, owner=owner.verifier)
    assert bits(load(state(1), folder, anchor=anchor)) == bits(state())
    alice = Identity.generate()
    for version, opens in ((1, True), (2, False)):
        grants = Grants.issue(KEY, [alice.recipient], signer=owner, least_version=version)
        with contextlib.nullcontext() if opens else pytest.raises(CheckpointException, match="granted"):
            assert bits(load(state(1), folder, keys=grants.unlock(alice), anchor=anchor)) == bits(state())
    shutil.copytree(folder, tmp_path / "old")
    save(state(2), folder)
    fastrack.publish(folder, signer=owner)
    assert bits(load(state(1), folder, anchor=anchor)) == bits(state(2))
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "old", folder)
    assert bits(load(state(1), folder)) == bits(state())  # which nothing else could tell
    refuse(folder, (AssertionError, fastrack.RollbackError), "older", anchor=anchor)


# The description


def test_any_other_pytree_in_place_of_a_description_is_a_format_error(folder):
    document = load_checkpoint(folder / DESCRIPTION, keys=KEY)
    path = folder / DESCRIPTION
    description.parse(copy.deepcopy(document), path)
    values = [
        None,
        True,
        0,
        -1,
        2**70,
        1.5,
        "",
        "F32",
        "x" * 32,
        b"x",
        [],
        {},
        (),
        [[]],
        {"a": 1},
        np.zeros(3),
        np.int64(3),
    ]
    chooser = random.Random(0)
    for _ in range(3000):
        changed = copy.deepcopy(document)
        _change(changed, chooser, values)
        with contextlib.suppress(FormatError):
            description.parse(changed, path)
    for name in document:
        for value in values:
            with contextlib.suppress(FormatError):
                description.parse({**document, name: value}, path)
        without = {**document}
        del without[name]
        with pytest.raises(FormatError):
            description.parse(without, path)


def _change(node, chooser, values):
    """Replace, remove or add something somewhere in a pytree."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = chooser.choice(keys)
        inner = node[key]
        if isinstance(inner, np.ndarray):
            node[key] = inner.copy()
            node[key][chooser.randrange(inner.size)] = chooser.choice([-1, 0, 1, 2**62, 301])
            return
        if isinstance(inner, (dict, list)) and inner and chooser.random() < 0.7:
            node = inner
            continue
        choice = chooser.random()
        if choice < 0.2:
            del node[key]
        elif choice < 0.3 and isinstance(node, dict):
            node[chooser.choice(["x", 3])] = chooser.choice(values)
        else:
            node[key] = chooser.choice(values)
        return


def test_a_description_that_lies_about_a_message_is_refused(folder):
    path = folder / DESCRIPTION
    for index, value in [(1, 7), (1, 2), (4, 299)]:  # no such message, another one, fewer rows
        document = load_checkpoint(path, keys=KEY)
        document["shards"][index] = value
        if index == 4:
            document["tensors"]["model.first.weight"][1][0] = 299
        save_checkpoint(path, document, key=KEY)
        target = state(1)
        if index == 4:
            target["model"]["first.weight"] = torch.zeros(299, 70)
        with refused(AuthenticationError):
            load(target, folder)
        save(state(), folder)


def test_the_id_of_a_save_is_in_its_checkpoint_and_of_no_other(folder):
    writer, reader = CheckpointWriter(folder, key=KEY), CheckpointReader(folder, keys=KEY)
    ids = []
    for _ in range(2):
        dcp.save(state(), storage_writer=writer, no_dist=True)
        found = reader.read_metadata().storage_meta
        assert found.save_id == writer.storage_meta().save_id
        assert found.load_id == reader.load_id
        ids += [found.save_id]
    metadata = reader.read_metadata()
    written = [WriteResult(index, 0, shard) for index, shard in metadata.storage_data.items()]
    writer.finish(metadata, [written])  # a second time, without a `reset` by which torch begins a save
    ids += [reader.read_metadata().storage_meta.save_id, reader.load_id]
    reader.reset()
    assert len({*ids, reader.load_id}) == 5
    KEY.save(folder / "owner.key")
    sent = CheckpointWriter(folder, key=folder / "owner.key")
    copies = [pickle.loads(pickle.dumps(sent)) for _ in range(2)]  # as torch sends one to a process for each save
    assert len({each.storage_meta().save_id for each in [sent, *copies]}) == 3


def test_a_planner_that_reads_nothing_is_served(folder):
    target = {"unknown": torch.ones(2)}
    reader = CheckpointReader(folder, keys=KEY)
    dcp.load(target, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    assert target["unknown"].tolist() == [1, 1]
