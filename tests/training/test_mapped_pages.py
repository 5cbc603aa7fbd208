"""Memory of a load: pages of a sealed file are given back as they are used, and are there again when they are read."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.cases import each

from fastrack import (
    Key,
    load_file,
    load_model,
    load_tensors,
    mount_folder,
    safe_open,
    save_file,
    seal_folder,
    to_device,
)
from fastrack._models import load, mapped_pages
from fastrack._models.mapped_pages import give_back, in_parts

KEY = Key.from_bytes(bytes(range(32)))
TENSORS = {f"t{number}": np.full((1 << 10, 1 << 10), number, np.float32) for number in range(6)}  # of 4 MiB each
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "plain").mkdir()
    tensors = {name: torch.from_numpy(tensor) for name, tensor in TENSORS.items()}
    safetensors.torch.save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    seal_folder(folder / "plain", folder / "sealed", KEY)
    return folder / "sealed" / "model.safetensors"


def resident(path):
    """Return how many bytes of the maps of a file are in the memory of this process."""
    lines, total, is_own = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in lines:
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0]:
            is_own = line.endswith(str(path))
        elif name == "Rss" and is_own:
            total += int(value.split()[0]) << 10
    return total


def by_safe_open(path):
    with safe_open(path, "np", keys=KEY) as file:
        return file, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - as in safetensors


def by_get_tensors(path):
    with safe_open(path, "np", keys=KEY) as file:
        return file, file.get_tensors()


def by_mount(path):
    with mount_folder(path.parent, KEY) as folder, safetensors.safe_open(f"{folder}/{path.name}", "pt") as file:
        return file, {name: file.get_slice(name)[...].to("cpu").numpy() for name in TENSORS}


@each("opened", [by_safe_open, by_get_tensors, by_mount])
def test_no_pages_of_the_file_are_left(sealed, opened):
    kept, found = opened(sealed)
    assert resident(sealed) < SIZE / 8
    assert all((found[name] == tensor).all() for name, tensor in TENSORS.items())
    del kept


def test_load_model_leaves_none_before_it_replaces_its_tensors(sealed, monkeypatch):
    with torch.device("meta"):
        model = torch.nn.ParameterDict({name: torch.empty(tensor.shape) for name, tensor in TENSORS.items()})
    seen, replace = [], load._replace
    monkeypatch.setattr(load, "_replace", lambda *step: seen.append(resident(sealed)) or replace(*step))
    load_model(model, sealed, KEY)
    assert len(seen) == len(TENSORS)
    assert max(seen) < SIZE / 8
    assert all((model[name].detach().numpy() == tensor).all() for name, tensor in TENSORS.items())


def test_without_it_the_pages_are_left(sealed):
    """The measurement sees what it is to see."""
    with load_file(sealed) as file:
        tensors = to_device(dict(file), keys=KEY, framework="numpy")
        assert resident(sealed) > SIZE * 0.9
        give_back(file.values())
        assert resident(sealed) < SIZE / 8
        again = to_device(dict(file), keys=KEY, framework="numpy")
    assert all((tensors[name] == again[name]).all() for name in TENSORS)


def test_what_lies_in_memory_and_small_rows_stay(sealed, tmp_path):
    with load_file(sealed) as file:
        to_device(file["t1"], keys=KEY)
        held = resident(sealed)
        give_back([file["t1"][:2]])
        assert resident(sealed) >= held
        give_back([file["t1"][:512]])
        assert resident(sealed) < held / 2
    save_file({"x": np.arange(1 << 18)}, tmp_path / "x.safetensors", KEY)
    with load_file(tmp_path / "x.safetensors", mapped=False) as file:
        give_back(file.values())
        assert (to_device(file["x"], keys=KEY, framework="numpy") == np.arange(1 << 18)).all()


def test_host_memory_is_filled_in_parts_and_a_gpu_at_once(sealed, monkeypatch):
    monkeypatch.setattr(mapped_pages, "_WHOLE", SIZE - 1)
    monkeypatch.setattr(mapped_pages, "_LEAST", 9 << 20)
    with load_file(sealed) as file:
        split = [list(in_parts(list(file), device, file.__getitem__)) for device in ("cpu", "cuda:0")]
        assert list(in_parts([], "cpu", file.__getitem__)) == []
    names = list(TENSORS)
    assert split == [[names[:2], names[2:4], names[4:]], [names]]
    assert load_tensors(sealed, keys=KEY, framework="np").keys() == TENSORS.keys()
