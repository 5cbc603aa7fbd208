"""Test the storage of sealed files: more files than maps, maps that come again, and files that changed meanwhile."""

import errno
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fastrack import Key, load_file, save_file, unseal, verify_file
from fastrack._sealed import storage
from fastrack.errors import FormatError

KEY = Key.from_bytes(bytes(range(32)))
COUNT = 12


@pytest.fixture
def paths(tmp_path):
    found = [tmp_path / f"{number:02}.safetensors" for number in range(COUNT)]
    for number, path in enumerate(found):
        save_file({"x": np.full(20, number)}, path, KEY, plain=[])
    return found


@pytest.fixture
def few_maps(limited):
    gc.collect()
    storage._mapped.clear()
    limited(mapped_files=4)


def maps_in(folder):
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.usefixtures("few_maps")
def test_of_many_files_few_are_mapped_and_all_can_be_read(paths, tmp_path):
    files = [load_file(path) for path in paths]
    tensors = [file["x"] for file in files]
    assert maps_in(tmp_path) == 4
    for _ in range(2):
        for number in (7, 0, 11, 3, *range(COUNT)):
            assert (unseal(tensors[number], KEY, framework="numpy") == number).all()
            assert maps_in(tmp_path) == 4
    for file in files:
        verify_file(file, KEY)


@pytest.mark.usefixtures("few_maps")
def test_a_file_that_is_used_stays_mapped(paths):
    files = [load_file(path) for path in paths[:4]]
    for path in paths[4:]:
        paths[0].unlink(missing_ok=True)  # from now on it cannot be mapped again
        assert (unseal(files[0]["x"], KEY, framework="numpy") == 0).all()
        load_file(path)


@pytest.mark.usefixtures("few_maps")
def test_files_that_are_gone_count_no_more(paths, tmp_path):
    for path in paths:
        load_file(path)
    gc.collect()
    assert not storage._mapped
    assert maps_in(tmp_path) == 0


@pytest.mark.usefixtures("few_maps")
@pytest.mark.parametrize("change", ["replaced", "written", "longer"])
def test_a_file_that_changed_while_it_was_not_mapped_is_refused(paths, change):
    files = [load_file(path) for path in paths]
    sealed = files[0]["x"]
    content = paths[0].read_bytes()
    if change == "replaced":
        save_file({"x": np.full(20, 5)}, paths[0], KEY)
    else:
        paths[0].write_bytes(content + bytes(change == "longer"))
    with pytest.raises(FormatError, match="changed since it was opened") as caught:
        unseal(sealed, KEY)
    assert caught.value.path == paths[0]


@pytest.mark.usefixtures("few_maps")
def test_a_file_that_is_missing_when_it_is_mapped_again_is_named(paths):
    files = [load_file(path) for path in paths]
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match=str(paths[1])):
        unseal(files[1]["x"], KEY)


@pytest.mark.usefixtures("few_maps")
def test_a_relative_path_is_found_again_from_another_directory(paths, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [load_file(path.name) for path in paths]
    monkeypatch.chdir("/")
    assert (unseal(files[0]["x"], KEY, framework="numpy") == 0).all()


@pytest.mark.usefixtures("few_maps")
def test_memory_that_was_taken_out_outlives_the_map(paths):
    files = [load_file(path) for path in paths[:1]]
    message, memory = files[0]["x"].message, files[0]["x"].memory
    expected = bytes(message)
    files += [load_file(path) for path in paths[1:]]
    paths[0].unlink()
    assert bytes(message) == expected
    assert bytes(memory.array) == expected[-memory.size :]


@pytest.mark.usefixtures("few_maps")
def test_threads_map_the_same_files_again_and_again(paths):
    tensors = [load_file(path)["x"] for path in paths]

    def read(seed):
        numbers = np.random.default_rng(seed).integers(0, COUNT, 100).tolist()
        return all((unseal(tensors[number], KEY, framework="numpy") == number).all() for number in numbers)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))


def test_where_the_kernel_allows_fewer_maps_others_are_given_up(paths, tmp_path, monkeypatch):
    original = storage.map_file

    def limited(descriptor, size):
        if maps_in(tmp_path) >= 5:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return original(descriptor, size)

    storage._mapped.clear()
    monkeypatch.setattr(storage, "map_file", limited)
    files = [load_file(path) for path in paths]
    assert [unseal(file["x"], KEY)[0].item() for file in files] == list(range(COUNT))
    held = [file["x"].message for file in files[:5]]
    with pytest.raises(OSError, match="max_map_count") as caught:
        load_file(paths[5])
    assert caught.value.filename == str(paths[5])
    assert len(held) == 5


def test_a_part_of_a_storage_ends_with_it():
    stored = storage.StoredBytes(np.arange(10, dtype=np.uint8))
    assert stored.memory(4, 20).size == 6
    assert stored.memory(4, 6).array.tolist() == [4, 5]
    assert stored.read(8, 20) == bytes([8, 9])


def test_a_folder_in_place_of_a_file_is_refused_with_what_opens_it(tmp_path):
    with pytest.raises(IsADirectoryError, match="load_folder") as caught:
        load_file(tmp_path)
    assert caught.value.filename == str(tmp_path)
