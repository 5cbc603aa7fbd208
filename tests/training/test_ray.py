"""Sealed rows in Ray Data and Ray Train, on a local cluster; what Ray stores is searched for plaintext and keys."""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.tampering import tamper_file

import fastrack

ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # what Ray warns of is its own
]

STORE = 80 << 20  # bytes, little more than Ray's least
X = np.arange(500 * 100, dtype=np.float32).reshape(500, 100)


@pytest.fixture(scope="module")
def spill():
    """Start a cluster on this machine, and return the folder that it spills to."""
    import ray.data

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short, as the names of sockets are
    (folder / "spill").mkdir()
    full = {"RAY_local_fs_capacity_threshold": "1"}  # as no test is about how full the disk is
    os.environ.update(full, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    ray.init(
        num_cpus=4, object_store_memory=STORE, object_spilling_directory=str(folder / "spill"), _temp_dir=str(folder),
        include_dashboard=False, log_to_driver=False, logging_level="error",
    )  # fmt: skip
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    yield folder / "spill"
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def key_file(tmp_path, key):
    key.save(tmp_path / "owner.key")
    return str(tmp_path / "owner.key")


@pytest.fixture
def path(tmp_path, key):
    fastrack.save_file({"x": X, "y": np.arange(500)}, tmp_path / "x.safetensors", key)
    return tmp_path / "x.safetensors"


@pytest.fixture
def data(path):
    return fastrack.SealedDataset(path)


def read(data, **options):
    from fastrack.ray import SealedDatasource

    return ray.data.read_datasource(SealedDatasource(data), **options)


def collate_fn(data, device=None, **options):
    from fastrack.ray import SealedCollateFn

    return SealedCollateFn(data, device, **options)


def batches(rows, collate, **options):
    return rows.iter_torch_batches(batch_size=64, collate_fn=collate, **options)


@pytest.mark.usefixtures("spill")
def test_the_rows_of_a_data_set_are_two_numbers_each(data):
    rows = read(data, override_num_blocks=3)
    assert rows.count() == 500
    assert rows.schema().names == ["dataset", "row"]
    assert rows.materialize().num_blocks() == 3
    assert sorted(row["row"] for row in rows.take_all()) == list(range(500))


@pytest.mark.usefixtures("spill")
def test_shuffled_rows_are_opened_as_what_was_sealed(data, key, key_file):
    for keys in (key, key_file):
        seen = []
        for batch in batches(read(data).random_shuffle(seed=0), collate_fn(data, keys=keys), prefetch_batches=3):
            assert torch.equal(batch["x"], torch.from_numpy(X)[batch["y"]])
            seen += batch["y"].tolist()
        assert seen != sorted(seen)
        assert sorted(seen) == list(range(500))


@pytest.mark.usefixtures("spill")
def test_other_columns_stay_beside_them(data, key):
    rows = read(data).map_batches(lambda batch: {**batch, "half": batch["row"] / 2, "text": batch["row"].astype(str)})
    for batch in batches(rows, collate_fn(data, keys=key)):
        assert torch.equal(batch["half"], batch["y"] / 2)
        assert batch["text"].tolist() == list(map(str, batch["y"].tolist()))


@pytest.mark.usefixtures("spill")
def test_no_rows_are_no_batches(tmp_path, key):
    fastrack.save_file({"x": X[:0]}, tmp_path / "none.safetensors", key)
    data = fastrack.SealedDataset(tmp_path / "none.safetensors")
    assert read(data).count() == 0
    assert list(batches(read(data), collate_fn(data, keys=key))) == []


@pytest.mark.usefixtures("spill")
def test_rows_of_another_data_set_are_refused(tmp_path, data, key):
    fastrack.save_file({"x": X, "y": np.arange(500)}, tmp_path / "other.safetensors", key)
    other = fastrack.SealedDataset(tmp_path / "other.safetensors")
    with pytest.raises(fastrack.FormatError):
        list(batches(read(data).union(read(other)), collate_fn(data, keys=key)))


@pytest.mark.usefixtures("spill")
def test_an_altered_row_is_an_error_in_its_batch(path, data, key):
    tamper_file(path, "x", 56 + 5)
    with pytest.raises(fastrack.AuthenticationError) as caught:
        list(batches(read(data), collate_fn(data, keys=key)))
    assert (caught.value.tensor, caught.value.chunk) == ("x", 0)


@pytest.mark.usefixtures("spill")
def test_keys_that_are_not_there_are_an_error_in_the_first_batch(data):
    for keys in (None, fastrack.Key.generate()):
        with pytest.raises(fastrack.UnknownKeyError):
            next(iter(batches(read(data), collate_fn(data, keys=keys))))


def test_a_key_does_not_travel(data, key, key_file):
    for keys in (key, fastrack.KeyRing(key), [key]):
        with pytest.raises(TypeError, match="key"):
            pickle.dumps(collate_fn(data, keys=keys))
    collate = collate_fn(data, keys=key_file)
    collate({name: column.numpy() for name, column in batch_of(data).items()})
    assert bytes(key.material()) not in pickle.dumps(collate)  # also once it was used
    with pytest.raises(fastrack.FormatError) as caught:
        collate_fn(data, keys=Path(key_file).read_text().strip())
    assert key.material().hex() not in str(caught.value)


def batch_of(data):
    from fastrack._training.row_tables import RowTable, make_table

    table = make_table(RowTable(data).dataset_id, 0, 3)
    return {name: torch.from_numpy(column) for name, column in table.items()}


def test_what_is_no_data_set_is_refused(path):
    for make in (collate_fn, read):
        with pytest.raises(TypeError, match="SealedDataset"):
            make(str(path))


@pytest.mark.usefixtures("spill")
def test_a_data_set_of_the_same_files_opens_rows_of_another_process(path, data, key_file):
    @ray.remote
    def open_there(rows, paths, keys):
        again = fastrack.SealedDataset(paths)
        return [batch["y"].sum().item() for batch in batches(rows, collate_fn(again, keys=keys))]

    assert sum(ray.get(open_there.remote(read(data).materialize(), str(path), key_file))) == 499 * 250


@pytest.mark.usefixtures("spill")
def test_records_are_opened_in_another_process(tmp_path, key, key_file):
    starts = np.cumsum([0, *range(100)])
    fastrack.save_file({"data": np.arange(starts[-1]), "offsets": starts}, tmp_path / "r.safetensors", key)
    records = fastrack.SealedDataset.records(tmp_path / "r.safetensors", keys=key)

    @ray.remote
    def open_there(rows, collate):
        found = list(batches(rows, collate))
        return [batch["lengths"].sum().item() for batch in found], [batch["data"].sum().item() for batch in found]

    lengths, sums = ray.get(open_there.remote(read(records).materialize(), collate_fn(records, keys=key_file)))
    assert sum(lengths) == starts[-1]
    assert sum(sums) == np.arange(starts[-1]).sum()


# What Ray stores. The rows are windows on a vector, so many that their numbers alone fill the store.

WINDOW = 65_536


def train(config):
    """Open the batches of a worker, say so, and wait until what Ray stores was searched."""
    import ray.train

    collate = collate_fn(config["data"], keys=config["keys"])
    digests, opened = [], []
    for batch in ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=32, collate_fn=collate):
        opened.append(batch["x"])
        digests += [hashlib.sha256(window).hexdigest() for window in batch["x"].numpy()]
    folder = Path(config["folder"])
    part = folder / f"{ray.train.get_context().get_world_rank()}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "digests": digests}))
    part.rename(part.with_suffix(".json"))
    while not (folder / "searched").exists():
        time.sleep(0.05)


def wait_for(paths, thread):
    while not all(path.exists() for path in paths):
        assert thread.is_alive(), "the training ended early"
        time.sleep(0.1)
    return [json.loads(path.read_text()) for path in paths]


def search(spill, needles, without=()):
    """Return where Ray has these: in its spilled objects, in its raylet, which has the store, or elsewhere."""
    spilled = (path.read_bytes() for path in spill.rglob("*") if path.is_file())
    found = {("spilled", name) for data in spilled for name, needle in needles.items() if needle in data}
    processes = ray_processes()
    assert "raylet" in processes.values()
    for pid in processes.keys() - set(without):
        found |= {(processes[pid], needle) for needle in find_in(pid, needles, with_store=processes[pid] == "raylet")}
    return found


def find_in(pid, needles, *, with_store=False):
    """Return which of these the writable memory of a process has, without the store, which it shares, or with it."""
    found = set()
    try:
        lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
            for line in lines:
                if not line[1].startswith("rw") or ("plasma" in line[-2] and not with_store):
                    continue
                start, stop = line[0].split("-")
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    memory.seek(int(start, 16))
                    data = memory.read(int(stop, 16) - int(start, 16))
                    found |= {name for name, needle in needles.items() if needle in data}
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended
    return found


def ray_processes():
    """Return the names of the processes of the cluster by their ids: this one's children, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, ends = {}, [os.getpid()]
    while ends:
        parent = ends.pop()
        for pid in (pid for pid, of in parents.items() if of == parent):
            ends.append(pid)
            try:
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def test_neither_plaintext_nor_keys_are_in_the_store_or_in_what_it_spills(spill, tmp_path, key, key_file):
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    random = np.random.default_rng(0)
    marker = random.integers(1, 255, 32, np.uint8)
    vector = random.integers(0, 255, 6000 * 1024, np.uint8)
    vector.reshape(-1, 1024)[:, : marker.size] = marker
    fastrack.save_file({"x": vector}, tmp_path / "v.safetensors", key)
    sealed = fastrack.SealedDataset(tmp_path / "v.safetensors")
    needles = {
        "plaintext": marker.tobytes(),
        "ciphertext": bytes(fastrack.load_file(tmp_path / "v.safetensors")["x"].message[56:88]),
        "key": bytes(key.material()),
    }
    data = sealed.windows("x", WINDOW, 1)
    rows = read(data, override_num_blocks=12).random_shuffle(seed=0).materialize()
    assert rows.count() * 16 > STORE
    assert sum(path.stat().st_size for path in spill.rglob("*") if path.is_file()) > STORE / 2
    trainer = TorchTrainer(
        train,
        train_loop_config={"data": data, "keys": key_file, "folder": str(tmp_path)},
        datasets={"train": rows.limit(512)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
    )
    training = threading.Thread(target=trainer.fit, daemon=True)
    training.start()
    workers = wait_for([tmp_path / "0.json", tmp_path / "1.json"], training)
    found = search(spill, needles, without=[worker["pid"] for worker in workers])
    opened = [find_in(worker["pid"], needles) for worker in workers]
    (tmp_path / "searched").touch()
    training.join()
    starts = [row["row"] for row in rows.limit(512).take_all()]
    expected = [hashlib.sha256(vector[start : start + WINDOW]).hexdigest() for start in starts]
    assert sorted(digest for worker in workers for digest in worker["digests"]) == sorted(expected)
    assert [len(worker["digests"]) for worker in workers] == [256, 256]
    assert found == set()
    assert all({"plaintext", "key"} <= each for each in opened)
    del rows
    plain = [ray.put(np.tile(vector, 2)) for _ in range(8)]  # more than the store holds
    found = search(spill, needles)
    assert {("spilled", "plaintext"), ("raylet", "plaintext")} <= found
    del plain
