"""Models, checkpoints and datasets of earlier versions open."""

import json

import golden_contents as contents
import numpy as np
import pytest
from golden_files import HERE, VERSIONS, opens, owner_key

import fastrack

pytestmark = pytest.mark.filterwarnings("ignore:.* do not say their order:UserWarning")  # datasets of 0.1

# Models and checkpoints.


@opens("training/model.safetensors")
def test_a_model_opens(golden):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), *(torch.nn.Linear(6, 6, bias=False) for _ in range(2)))
    module[2].weight = module[1].weight
    fastrack.load_model(module, golden("training/model.safetensors"), keys=owner_key(golden))
    for name, shape in contents.MODULE.items():
        assert np.array_equal(module.state_dict()[name].numpy(), contents.numbers(name, "F32", shape))


def same(found, wanted):
    """Compare two trees: types, dtypes, shapes and bits."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        return all(same(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        return all(map(same, found, wanted))
    if isinstance(wanted, float):
        return found.hex() == wanted.hex()
    if hasattr(wanted, "shape"):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        return found.tolist() == wanted.tolist()
    return found == wanted


@opens("training/run.safetensors")
def test_a_checkpoint_opens(golden):
    torch = pytest.importorskip("torch")
    state = fastrack.load_checkpoint(golden("training/run.safetensors"), keys=owner_key(golden))
    assert same(state, contents.run_state(torch))
    assert state["model"]["again"] is state["shared"]


def require_formed(path, key):
    torch = pytest.importorskip("torch")
    found, wanted = fastrack.load_checkpoint(path, keys=key), contents.formed_state(torch)
    assert same(found, wanted)
    for name, value in wanted.items():
        assert found[name].strides == value.strides if name == "numpy" else found[name].stride() == value.stride()


LATER = [*VERSIONS[2:], pytest.param("written now", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("golden", LATER, indirect=True)
@opens("training/formed.safetensors")
def test_a_checkpoint_has_its_strides(golden):
    require_formed(golden("training/formed.safetensors"), owner_key(golden))


def test_a_checkpoint_that_was_written_after_0_2_has_its_strides():
    key = fastrack.Key.from_bytes(contents.SECRETS["owner256"])
    require_formed(HERE / "since-0.2" / "formed.safetensors", key)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@opens("training/distributed/*")
def test_a_distributed_checkpoint_opens(golden):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    from fastrack.distributed import CheckpointReader

    shapes = contents.SHARDED | contents.REPLICATED
    state = {name: torch.zeros(shape) for name, shape in shapes.items()} | dict.fromkeys(contents.VALUES)
    reader = CheckpointReader(golden("training/distributed"), keys=owner_key(golden))
    dcp.load(state, storage_reader=reader, no_dist=True)
    wanted = {name: torch.from_numpy(contents.numbers(name, "F32", shape)) for name, shape in shapes.items()}
    assert same(dict(sorted(state.items())), dict(sorted((wanted | contents.VALUES).items())))


# Datasets.


def samples(path, key, *arguments, **options):
    """Return all samples, opened, of what JSON knows, and of bytes."""
    return list(fastrack.SealedDataset(path, *arguments, keys=key, transform=as_values, **options)[:])


def as_values(sample):
    return {name: as_value(value) for name, value in sample.items() if not name.endswith(".lengths")}


def as_value(value):
    if isinstance(value, str):
        return value.encode()
    return value.tolist() if hasattr(value, "tolist") else value


@opens("data/written/*")
def test_a_data_set_that_was_written_opens(golden):
    wanted = [as_values(contents.written(row)) for row in range(contents.COUNT)]
    assert samples(golden("data/written"), owner_key(golden)) == wanted


@opens("data/written/*")
def test_a_data_set_is_continued(golden):
    key, path = owner_key(golden), golden("data/written")
    with fastrack.DatasetWriter(path, key, records=["tokens"]) as writer:
        assert writer.stored == contents.COUNT
        writer.write(contents.written(contents.COUNT))
    wanted = [as_values(contents.written(row)) for row in range(contents.COUNT + 1)]
    assert samples(path, key) == wanted


_COLUMNS = contents.TABLE.items()
TABLE = [{name: as_value(values[row]) for name, values in _COLUMNS} for row in range(len(contents.TABLE["name"]))]
IMPORTED = {
    "images": [
        {"image": image, "path": path.encode(), "label": ["cat", "dog"].index(path[:3])}
        for path, image in contents.IMAGES.items()
    ],
    "txt": [{"text": line.encode()} for line in contents.LINES],
    "jsonl": [{**as_values(one), "more": one["more"]} for one in contents.OBJECTS],
    "tar": [{"__key__": key.encode(), **found} for key, found in contents.ARCHIVE.items()],
    **dict.fromkeys(("parquet", "arrow", "feather", "table"), TABLE),
    "dicts": [as_values(one) for one in contents.OBJECTS_IN_MEMORY],
}


@opens(*(f"data/{name}/shard-000000.safetensors" for name in IMPORTED))
def test_a_data_set_that_was_imported_opens(golden):
    key = owner_key(golden)
    for name, wanted in IMPORTED.items():
        found = samples(golden(f"data/{name}"), key)
        if name == "jsonl":  # what is neither text nor numbers is stored as JSON
            found = [sample | {"more": json.loads(sample["more"])} for sample in found]
        if name == "images":
            found = [sample | {"image": sample["image"].removeprefix(contents.PNG)} for sample in found]
        assert found == wanted, name


@opens("data/images/shard-000000.safetensors", "data/jsonl/shard-000000.safetensors")
def test_a_data_set_comes_out_again(golden, tmp_path):
    key = owner_key(golden)
    assert fastrack.export_samples(golden("data/images"), tmp_path / "images", key) == len(contents.IMAGES)
    for sample in samples(golden("data/images"), key):
        assert (tmp_path / "images" / sample["path"].decode()).read_bytes() == sample["image"]
    fastrack.export_samples(golden("data/jsonl"), tmp_path / "out.jsonl", key)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(contents.OBJECTS)


@opens("data/dicts/*")
def test_an_import_is_resumed(golden):
    key, path = owner_key(golden), golden("data/dicts")
    source = [*contents.OBJECTS_IN_MEMORY, {**contents.OBJECTS_IN_MEMORY[0], "label": 3}]
    assert fastrack.import_samples(source, path, key, resume=True) == 4
    assert samples(path, key) == [as_values(one) for one in source]


@opens("data/columns.safetensors")
def test_columns_and_windows_on_them_open(golden):
    key, path, size = owner_key(golden), golden("data/columns.safetensors"), contents.STREAM_SIZE
    wanted = {name: contents.numbers(name, "I32", (size,)) for name in ("tokens", "mask")}
    wanted |= {"rows": contents.numbers("rows", "F32", (size, 2)), "label": np.arange(size)}
    found = samples(path, key, plain_columns=["label"])
    assert found == [{name: values[row].tolist() for name, values in wanted.items()} for row in range(size)]
    windows = fastrack.SealedDataset(path, keys=key).windows(["tokens", "mask"], 128, 100)
    assert len(windows) == 4
    for number, window in enumerate(windows):
        for name in ("tokens", "mask"):
            opened = fastrack.unseal(window[name], key, framework="numpy")
            assert np.array_equal(opened, wanted[name][100 * number : 100 * number + 128])


@opens("data/records.safetensors")
def test_records_open(golden):
    key, data = owner_key(golden), contents.numbers("data", "I64", (100,))
    found = fastrack.SealedDataset.records(
        golden("data/records.safetensors"), keys=key, columns=["label"], transform=as_values
    )
    parts = [data[start:stop].tolist() for start, stop in [(0, 3), (3, 3), (3, 50), (50, 100)]]
    assert list(found[:]) == [{"data": part, "label": row} for row, part in enumerate(parts)]
