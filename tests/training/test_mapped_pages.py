"""Memory of a load: pages of a sealed file are given back as they are used, and are there again when they are read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.cases import each

from fastrack import (
    AuthenticationError,
    Key,
    UnknownKeyError,
    load_file,
    load_model,
    load_tensors,
    mount_folder,
    safe_open,
    save_file,
    save_model,
    seal_folder,
    to_device,
    trace,
)
from fastrack._models import load, mapped_pages
from fastrack._models.mapped_pages import give_back, in_parts
from fastrack.format import message_size

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
@pytest.mark.slow
def test_no_pages_of_the_file_are_left(sealed, opened):
    kept, found = opened(sealed)
    assert resident(sealed) < SIZE / 8
    assert all((found[name] == tensor).all() for name, tensor in TENSORS.items())
    del kept


@pytest.mark.slow
def test_load_model_leaves_none_before_it_replaces_its_tensors(sealed, monkeypatch):
    with torch.device("meta"):
        model = torch.nn.ParameterDict({name: torch.empty(tensor.shape) for name, tensor in TENSORS.items()})
    monkeypatch.setattr(mapped_pages, "_WHOLE", SIZE - 1)
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


# Large tensors, in pieces.


@pytest.fixture
def small_pieces(monkeypatch):
    """Let pieces have 1 MiB, so that tensors of 4 MiB are large. Return a list that has an item for each."""
    monkeypatch.setattr(mapped_pages, "_LEAST", 1 << 20)
    monkeypatch.setattr(mapped_pages, "_WHOLE", 1 << 20)
    seen, give = [], mapped_pages.give_back
    monkeypatch.setattr(mapped_pages, "give_back", lambda parts: (seen.append(None), give(parts)))
    return seen


@each("opened", [by_safe_open, by_mount])
def test_a_large_tensor_opens_in_pieces(sealed, small_pieces, opened):
    small_pieces.clear()
    _, found = opened(sealed)
    assert len(small_pieces) == 4 * len(TENSORS)
    assert all((found[name] == tensor).all() for name, tensor in TENSORS.items())


@each("is_new", [False, True])
def test_load_model_opens_large_tensors_in_pieces(sealed, small_pieces, is_new):
    small_pieces.clear()
    with torch.device("meta" if is_new else "cpu"):
        model = torch.nn.ParameterDict({name: torch.empty(tensor.shape) for name, tensor in TENSORS.items()})
    before = None if is_new else model["t1"].data_ptr()
    load_model(model, sealed, KEY)
    assert len(small_pieces) >= 4 * len(TENSORS)
    assert before in {None, model["t1"].data_ptr()}
    assert all((model[name].detach().numpy() == tensor).all() for name, tensor in TENSORS.items())


ODD = np.arange((3 << 20) + 5, dtype=np.uint8).reshape(1, -1)  # no row can be split, and the last chunk is short


@pytest.fixture
def odd(tmp_path):
    save_file({"odd": ODD}, tmp_path / "odd.safetensors", KEY)
    with load_file(tmp_path / "odd.safetensors") as file:
        yield file["odd"]


def test_pieces_are_of_bytes_and_fill_what_is_given(odd, small_pieces):
    out = np.ones_like(ODD)
    assert mapped_pages.open_once(odd, keys=KEY, out=out) is out
    assert (out == ODD).all()
    opened = mapped_pages.open_once({"x": odd}, "cpu", keys=KEY, dtype="U8")
    assert opened.keys() == {"x"}
    assert opened["x"].dtype is torch.uint8
    assert (opened["x"].numpy() == ODD).all()
    assert len(small_pieces) == 8


@pytest.mark.usefixtures("small_pieces")
def test_what_does_not_fit_is_refused_as_by_to_device(odd):
    for options in ({"out": np.ones_like(ODD)[:, ::-1]}, {"out": ODD[0].copy()}, {"dtype": torch.int8}):
        refusals = []
        for open_it in (to_device, mapped_pages.open_once):
            with pytest.raises((TypeError, ValueError)) as raised:
                open_it(odd, keys=KEY, **options)
            refusals.append(str(raised.value))
        assert refusals[0] == refusals[1]


@pytest.mark.usefixtures("small_pieces")
@each("place", ["header", "chunk"])
def test_an_altered_piece_is_refused_and_leaves_zeros(tmp_path_factory, place):
    path = tmp_path_factory.mktemp("altered") / "odd.safetensors"
    save_file({"odd": ODD}, path, KEY)
    data = bytearray(path.read_bytes())
    data[-9 if place == "chunk" else -message_size(ODD.nbytes) + 20] ^= 1  # of the last chunk, or of the salt
    path.write_bytes(data)
    with load_file(path) as file:
        refusals, out = [], np.ones_like(ODD)
        for open_it in (to_device, mapped_pages.open_once):
            out.fill(1)
            with pytest.raises(AuthenticationError) as raised:
                open_it(file["odd"], keys=KEY, out=out)
            refusals.append(str(raised.value))
            assert not out.any()
        assert refusals[0] == refusals[1]


@pytest.mark.usefixtures("small_pieces")
def test_without_the_key_what_is_given_stays(odd):
    out = np.ones_like(ODD)
    with pytest.raises(UnknownKeyError):
        mapped_pages.open_once(odd, keys=Key.generate(), out=out)
    assert out.all()


def test_the_trace_of_a_load_has_its_large_tensors(odd, small_pieces, tmp_path):
    with trace(tmp_path / "trace.json"):
        mapped_pages.open_once(odd, keys=KEY)
    assert "open odd" in (tmp_path / "trace.json").read_text()
    assert small_pieces


PEAK = """
import sys, torch, fastrack
def memory():
    return {name: int(value.split()[0]) << 10 for name, _, value in
            (line.partition(":") for line in open("/proc/self/status")) if name in {"VmRSS", "VmHWM"}}
def by_tensors(path):
    return fastrack.load_tensors(path, keys="key", framework="pt")
def by_safe_open(path):
    with fastrack.safe_open(path, "pt", keys="key") as file:
        return {name: file.get_tensor(name) for name in file.keys()}
def by_model(path):
    with torch.device("meta"):
        model = torch.nn.ParameterDict({name: torch.empty(6 << 20) for name in "abcdefgh"})
    fastrack.load_model(model, path, "key", device="cpu")
    return model
load = globals()[sys.argv[1]]
fastrack.load_tensors("small.safetensors", keys="key", framework="pt")  # what is imported late, imports now
fastrack.load_model(torch.nn.Linear(2, 2), "linear.safetensors", "key")
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
before = memory()["VmRSS"]
kept = load("large.safetensors")
print((memory()["VmHWM"] - before) / sum(tensor.nbytes for tensor in kept.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no peaks")
def test_a_load_takes_little_more_memory_than_the_model(tmp_path):
    """Eight tensors of 24 MiB: more than is opened at once, and each in two pieces."""
    KEY.save(tmp_path / "key")
    for name, count in (("small", 2), ("large", 6 << 20)):
        save_file({each: np.ones(count, np.float32) for each in "abcdefgh"}, tmp_path / f"{name}.safetensors", KEY)
    save_model(torch.nn.Linear(2, 2), tmp_path / "linear.safetensors", KEY)
    for way in ("by_tensors", "by_safe_open", "by_model"):
        done = subprocess.run(
            [sys.executable, "-c", PEAK, way], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert 0.99 < float(done.stdout) < 1.12, way
