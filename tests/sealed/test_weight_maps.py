"""Indexes of shards: one that does not fit its shards is refused when it is sealed, verified, loaded and mounted."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers.cases import each

from fastrack import Key, load_folder, mount_folder, seal_folder, write_folder
from fastrack._sets import folder_writer
from fastrack.errors import FormatError

KEY = Key.from_bytes(bytes(range(32)))
ONE, TWO, THREE = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
INDEX = "model.safetensors.index.json"
SHARDS = {ONE: ("a", "b"), TWO: ("c",), THREE: ("d", "e.weight")}


def write_model(folder, *, shards=SHARDS, weight_map=None, index=INDEX):
    folder.mkdir(parents=True, exist_ok=True)
    for shard, names in shards.items():
        safetensors.numpy.save_file({name: np.ones((2, 2), np.float32) for name in names}, folder / shard)
    named = {name: shard for shard, names in SHARDS.items() for name in names} if weight_map is None else weight_map
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    (folder / "config.json").write_text("{}")
    return folder


FULL = {name: shard for shard, names in SHARDS.items() for name in names}
FAULTS = {
    "a tensor is missing": ({"shards": SHARDS | {TWO: ()}}, f"no 'c' in '{TWO}'"),
    "a shard is missing": ({"shards": {ONE: SHARDS[ONE], TWO: SHARDS[TWO]}}, f"no file '{THREE}'"),
    "a tensor is doubled": ({"shards": SHARDS | {TWO: ("c", "a")}}, f"'a' in '{TWO}' besides"),
    "a tensor is left over": ({"shards": SHARDS | {TWO: ("c", "old")}}, f"'old' in '{TWO}' besides"),
    "a tensor is in another shard": ({"weight_map": FULL | {"c": ONE}}, f"no 'c' in '{ONE}'"),
    "a shard is left over": ({"weight_map": {"a": ONE, "b": ONE, "c": TWO}}, f"a file '{THREE}' that it does not name"),
    "the whole is left over": (
        {"shards": SHARDS | {"model.safetensors": ("a", "b")}},
        "a file 'model.safetensors' that it does not name",
    ),
    "all shards but one": ({"shards": {ONE: SHARDS[ONE]}}, f"no file '{TWO}'; no file '{THREE}'"),
    "a shard elsewhere": ({"weight_map": FULL | {"c": f"../{TWO}"}}, f"no file '../{TWO}'"),
    "a list": ({"weight_map": ["a"]}, "expected a weight_map"),
    "a number": ({"weight_map": {"a": 3}}, "expected a weight_map"),
}


@pytest.fixture
def seal_anyway(monkeypatch):
    """Seal as a version did that compared nothing."""

    def seal(plain, sealed, **options):
        with monkeypatch.context() as patch:
            patch.setattr(folder_writer, "compare_indexes", lambda *_: None)
            seal_folder(plain, sealed, KEY, **options)

    return seal


@each("fault", FAULTS)
def test_it_is_refused_when_sealed_verified_loaded_and_mounted(tmp_path_factory, seal_anyway, fault):
    options, told = FAULTS[fault]
    tmp_path = tmp_path_factory.mktemp("model")
    plain = write_model(tmp_path / "plain", **options)
    with pytest.raises(FormatError, match=re.escape(told)) as raised:
        seal_folder(plain, tmp_path / "sealed", KEY)
    assert str(plain / INDEX) in str(raised.value)
    assert sorted(tmp_path.iterdir()) == [plain]
    seal_anyway(plain, tmp_path / "sealed")
    folder = load_folder(tmp_path / "sealed", KEY)
    loaded = (
        "expected a weight_map" if fault in {"a shard is missing", "all shards but one", "a shard elsewhere"} else told
    )
    with pytest.raises(FormatError, match=re.escape(loaded)):
        folder.weights()
    for call in (lambda: folder.verify(KEY), lambda: mount_folder(folder, KEY).__enter__()):
        with pytest.raises(FormatError, match=re.escape(told)):
            call()
    assert [check.name for check in folder.check(KEY) if check.error] == [INDEX]


def test_one_that_fits_is_taken_whatever_stands_beside_it(tmp_path):
    plain = write_model(tmp_path / "plain")
    more = {"model.fp16-00001-of-00001.safetensors": ("a",)}
    write_model(plain, shards=more, weight_map={"a": next(iter(more))}, index="model.safetensors.index.fp16.json")
    write_model(plain / "unet", shards={"other-00001-of-00002.safetensors": ("x",)}, weight_map={})
    safetensors.numpy.save_file({"a": np.ones(2)}, plain / "consolidated-00001-of-00001.safetensors")
    (plain / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}')
    seal_folder(plain, tmp_path / "sealed", KEY)
    folder = load_folder(tmp_path / "sealed", KEY)
    folder.verify(KEY)
    assert sorted(folder.weights()) == sorted(FULL)
    with mount_folder(folder, KEY):
        pass


def test_a_name_that_stands_twice_is_refused(tmp_path):
    plain = write_model(tmp_path / "plain")
    (plain / INDEX).write_text(json.dumps({"weight_map": FULL})[:-2] + f', "a": "{ONE}"}}}}')
    with pytest.raises(FormatError, match="expected each member once"):
        seal_folder(plain, tmp_path / "sealed", KEY)


def test_names_are_those_before_the_seal_quantised_them(tmp_path, seal_anyway):
    pytest.importorskip("compressed_tensors")
    plain = write_model(tmp_path / "plain", weight_map={"layer.weight": ONE}, shards={})
    safetensors.numpy.save_file({"layer.weight": np.ones((256, 256), np.float32)}, plain / ONE)
    seal_folder(plain, tmp_path / "sealed", KEY, quantize="int8")
    folder = load_folder(tmp_path / "sealed", KEY)
    folder.verify(KEY)
    assert list(folder.weights()) == ["layer.weight"]
    (plain / INDEX).write_text(json.dumps({"weight_map": {"layer.weight": ONE, "layer.bias": ONE}}))
    seal_anyway(plain, tmp_path / "cut", quantize="int8")
    with pytest.raises(FormatError, match=r"no 'layer\.bias'"):
        load_folder(tmp_path / "cut", KEY).weights()


def test_a_quantised_model_without_some_of_its_tensors_is_refused_too(tmp_path, seal_anyway):
    names = ("q.weight", "q.weight_scale")
    plain = write_model(tmp_path / "plain", shards={ONE: names[:1]}, weight_map=dict.fromkeys(names, ONE))
    (plain / "config.json").write_text('{"quantization_config": {"quant_method": "compressed-tensors"}}')
    seal_anyway(plain, tmp_path / "sealed")
    with pytest.raises(FormatError, match=r"no 'q\.weight_scale'"):
        load_folder(tmp_path / "sealed", KEY).weights()


def test_a_folder_that_a_library_writes_is_compared_too(tmp_path):
    target = tmp_path / "sealed"
    with pytest.raises(FormatError, match=f"no file '{THREE}'"), write_folder(target, KEY) as path:
        write_model(Path(path), shards={ONE: SHARDS[ONE], TWO: SHARDS[TWO]})
    assert not target.exists()
