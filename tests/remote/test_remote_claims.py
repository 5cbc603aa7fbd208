"""Sizes that nothing authenticates: what a server claims costs neither memory, nor downloads, nor time."""

import json
import os
import tracemalloc

import numpy as np
import pytest

import fastrack
from fastrack._remote import blocks, objects
from fastrack.format import message_size

BLOCK = blocks.BLOCK
MIB = 1 << 20
SIZE = 1 << 41  # bytes of plaintext that are claimed
FILE_ID = "11" * 16


def write_claim(path, key, tensors):
    """Write a sparse file that claims to hold sealed tensors of these dtypes and shapes: zeros, and no message."""
    entries, listed, stop = {}, {}, 0
    for name, (dtype, width, shape) in tensors.items():
        size = message_size(int(np.prod(shape)) * width)
        entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [stop, stop + size]}
        listed[name] = {"dtype": dtype, "shape": shape}
        stop += size
    metadata = {
        "fastrack.version": "1",
        "fastrack.file": FILE_ID,
        "fastrack.key": key.id,
        "fastrack.tensors": json.dumps(listed),
    }
    head = json.dumps({"__metadata__": metadata, **entries}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + stop)


@pytest.fixture
def claim(served, key):
    """The URL of a file that claims to hold a tensor of 2 TiB, and one of offsets of 2 TiB."""
    columns = {"x": ("U8", 1, [SIZE >> 16, 1 << 16]), "y": ("I64", 8, [SIZE // 8]), "z": ("U8", 1, [0])}
    write_claim(served.folder / "claim.safetensors", key, columns)
    return served.url("claim.safetensors")


def read_batches(url, key):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    data = fastrack.SealedDataset([url], keys=key, columns=["x"])
    loader = torch.utils.data.DataLoader(data, batch_sampler=[range(0, 1 << 20, 7)] * 3, collate_fn=fastrack.collate)
    list(fastrack.wrap(loader, keys=key))


def read_tensors(url, key):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with fastrack.load_file(url) as file:
        loader = torch.utils.data.DataLoader([file["x"], file["y"]], batch_size=None)
        list(fastrack.wrap(loader, keys=key))


def with_file(use):
    def read(url, key):
        with fastrack.load_file(url) as file:
            use(file, key)

    return read


USES = {
    "unseal": with_file(lambda file, key: fastrack.unseal(file["x"], key)),
    "unseal rows": with_file(lambda file, key: fastrack.unseal(file["x"][::2], key)),
    "to_device": with_file(lambda file, key: fastrack.to_device(file["x"], keys=key)),
    "to_device of rows": with_file(lambda file, key: fastrack.to_device(file["x"][1:], keys=key)),
    "to_device of all": with_file(lambda file, key: fastrack.to_device(dict(file), keys=key)),
    "a box": with_file(lambda file, key: fastrack.to_device(file["x"][:, 3:5], keys=key)),
    "verify_file": fastrack.verify_file,
    "unseal_file": lambda url, key: fastrack.unseal_file(url, "out.safetensors", key),
    "rekey_file": lambda url, key: fastrack.rekey_file(url, "out.safetensors", key, key=fastrack.Key.generate()),
    "load_checkpoint": lambda url, key: fastrack.load_checkpoint(url, keys=key),
    "load_tensors": lambda url, key: fastrack.load_tensors(url, keys=key),
    "a dataset": read_batches,
    "records": lambda url, key: fastrack.SealedDataset.records([url], "z", "y", keys=key),
    "a loader of tensors": read_tensors,
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_tensor_whose_header_is_wrong_is_refused_before_it_is_downloaded(use, served, claim, key):
    tracemalloc.start()
    try:
        with pytest.raises(fastrack.FastrackError):
            USES[use](claim, key)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * MIB  # with the modules that the first use imports
    asked = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for _, text in served.requests]
    assert sum(last + 1 - first for first, last in asked) <= 8 * BLOCK


@pytest.mark.parametrize("size", [1 << 38, SIZE])
def test_a_plain_tensor_that_no_cache_holds_is_refused_at_once(size, served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "100M")
    head = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = served.folder / "plain.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + size)
    with fastrack.load_file(served.url("plain.safetensors")) as file, pytest.raises(OSError, match="CACHE_SIZE"):
        file.plain["x"]
    assert len(served.requests) == 1


def test_a_large_range_is_downloaded_in_steps(served, limited):
    limited(block_step=3)
    data = np.random.default_rng(1).bytes(5 * MIB + 7)
    (served.folder / "a").write_bytes(data)
    file = served.open_remote("a")
    assert file.prefetch([(0, 5 * MIB)]) == 2 * BLOCK  # the first block came with the head
    assert file.read(3, 5 * MIB + 7) == data[3:]


def test_blocks_of_ranges_are_as_counted_one_by_one():
    generator = np.random.default_rng(2)
    for _ in range(300):
        starts = generator.integers(0, 40 * BLOCK, generator.integers(0, 9)).tolist()
        ranges = [(start, start + int(generator.integers(0, 5 * BLOCK))) for start in starts]
        expected = {
            block for start, stop in ranges for block in range(start // BLOCK, -(-stop // BLOCK)) if start < stop
        }
        found = blocks.blocks_of(ranges)
        assert [block for each in found for block in each] == sorted(expected)
        assert blocks.count(found) == len(expected)
        assert [block for step in blocks.steps(found) for each in step for block in each] == sorted(expected)
    assert blocks.count(blocks.blocks_of([(0, objects.LARGEST)])) == objects.LARGEST // BLOCK
    assert max(map(blocks.count, blocks.steps(blocks.blocks_of([(0, 1 << 40)])))) == 4096
