"""File objects over sealed bytes: what they return is what the file had, or an error."""

import gc
import io
import os
import pickle
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import engines
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, ClosedError, Key, UnknownKeyError, open_bytes, seal
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

SIZES = [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 20 * CHUNK_SIZE + 77]


def random(size):
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def sealed_of(data, key):
    return seal(np.frombuffer(data, np.uint8), key, "data")


@each("size", SIZES)
def test_seeks_and_reads_are_those_of_a_plain_file(key, size):
    plain, rng = random(size).tobytes(), np.random.default_rng(0)
    with open_bytes(sealed_of(plain, key), key) as file:
        other = io.BytesIO(plain)
        assert file.read() == plain
        for _ in range(200):
            whence = int(rng.integers(3))
            offset = int(rng.integers(-size - 3, size + 3))
            for each in (file, other):
                try:
                    each.seek(offset, whence)
                except (ValueError, OSError):
                    each.seek(0)
            assert file.tell() == other.tell()
            count = int(rng.choice([-1, 0, 1, 5, 1000, 3 * CHUNK_SIZE, 17 * CHUNK_SIZE]))
            assert file.read(count) == other.read(count), (offset, whence, count)
            file.seek(other.tell())  # BytesIO remembers a position past the end otherwise
            into, expected = bytearray(100), bytearray(100)
            assert (file.readinto(into), into) == (other.readinto(expected), expected)


def test_it_says_what_it_can_do(key):
    file = open_bytes(sealed_of(b"abc", key), key)
    assert (file.readable(), file.seekable(), file.writable(), file.name) == (True, True, False, "data")
    with pytest.raises(io.UnsupportedOperation):
        file.write(b"x")
    with pytest.raises(TypeError):
        pickle.dumps(file)
    with pytest.raises(OSError, match="whence"):
        file.detach().seek(0, 7)


PLACES = [(-1,), (-1, 1), (-22, 2), (0, 7), (0, -1), (2**70,), (2**63 - 1, 2), (1.0,), ("a",), (0, None), (True,)]


def test_a_seek_that_a_file_refuses_is_refused_by_the_same_error(key, tmp_path):
    """Readers tell by the class what is wrong with a file: of one that is short, zipfile asks for what is before it."""
    content, path = b"hello", tmp_path / "file"
    path.write_bytes(content)

    def answer(file, *place):
        try:
            return file.seek(*place)
        except (OSError, OverflowError, TypeError, ValueError) as error:
            return OSError if isinstance(error, OverflowError) else type(error), getattr(error, "errno", None)

    for buffering in (0, -1):
        sealed = open_bytes(sealed_of(content, key), key)
        with path.open("rb", buffering=buffering) as plain, sealed if buffering else sealed.detach() as file:
            for place in PLACES:
                got, expected = answer(file, *place), answer(plain, *place)
                assert got == expected or place == (2**70,), place
                assert file.tell() == plain.tell()
        for ask in (file.seekable, file.readable, file.tell, plain.seekable, plain.readable, plain.tell):
            with pytest.raises(ValueError, match="closed"):
                ask()


@each("size", [0, 5, 21, 22, 23])
def test_a_file_that_is_too_short_for_an_archive_is_none(key, size):
    with open_bytes(sealed_of(b"x" * size, key), key) as file:
        assert not zipfile.is_zipfile(file)
        with pytest.raises(zipfile.BadZipFile):
            zipfile.ZipFile(file)
        file.seek(0)
        with pytest.raises(tarfile.ReadError), tarfile.open(fileobj=file):
            pass


def test_an_altered_chunk_is_refused_and_the_others_are_read(key):
    plain = random(4 * CHUNK_SIZE).tobytes()
    sealed = tampered(sealed_of(plain, key), 56 + 2 * SEALED_CHUNK_SIZE + 5)
    raw = open_bytes(sealed, key).detach()
    assert raw.read(2 * CHUNK_SIZE) == plain[: 2 * CHUNK_SIZE]
    for start, size in ((2 * CHUNK_SIZE, 1), (3 * CHUNK_SIZE - 1, 1), (0, 4 * CHUNK_SIZE)):
        raw.seek(start)
        memory = bytearray(b"\xee" * size)
        with pytest.raises(AuthenticationError) as caught:
            raw.readinto(memory)
        assert (caught.value.tensor, caught.value.chunk, memory) == ("data", 2, bytearray(size))
        assert raw.tell() == start
    raw.seek(3 * CHUNK_SIZE)
    assert raw.readall() == plain[3 * CHUNK_SIZE :]
    with pytest.raises(AuthenticationError):
        open_bytes(sealed, key).read()


def test_a_wrong_key_and_an_altered_header_are_refused_at_once(key):
    sealed = sealed_of(b"abc", key)
    with pytest.raises(UnknownKeyError):
        open_bytes(sealed, Key.generate())
    with pytest.raises(AuthenticationError):
        open_bytes(tampered(sealed, 3), key)


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.uint8), np.zeros(3), np.uint8(1)], ids=["2-d", "F64", "0-d"])
def test_only_vectors_of_bytes_are_opened(key, array):
    with pytest.raises(TypeError, match="U8"):
        open_bytes(seal(np.asarray(array), key), key)


def test_handles_and_paths_are_refused(key):
    for other in (sealed_of(b"abc", key)[:2], "x.safetensors"):
        with pytest.raises(TypeError, match="SealedTensor"):
            open_bytes(other, key)


def test_a_closed_file_has_no_key(key):
    file = open_bytes(sealed_of(b"abc", key), key)
    raw = file.raw
    schedule = raw._message._schedule
    file.close()
    file.close()
    assert "_message" not in vars(raw)
    with pytest.raises(ClosedError):
        engines.make().open_run(schedule, np.zeros(19, np.uint8), np.zeros(3, np.uint8), 0)
    for use in (raw.tell, raw.readall, lambda: raw.seek(0), file.read):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_file_that_is_garbage_is_closed(key):
    file = open_bytes(sealed_of(b"abc", key), key)
    schedule = file.raw._message._schedule
    del file
    gc.collect()
    with pytest.raises(ClosedError):
        engines.make().open_run(schedule, np.zeros(19, np.uint8), np.zeros(3, np.uint8), 0)


def test_threads_share_a_file(key):
    plain = random(40 * CHUNK_SIZE).tobytes()
    lock = threading.Lock()
    with open_bytes(sealed_of(plain, key), key) as file, ThreadPoolExecutor(8) as pool:

        def read(start):
            with lock:
                file.seek(start)
                return file.read(1000) == plain[start : start + 1000]

        assert all(pool.map(read, np.random.default_rng(0).integers(0, len(plain), 300).tolist()))


def test_archives_are_read_from_it(key):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(20):
            archive.writestr(f"{index}.bin", random(10_000 + index).tobytes())
    with open_bytes(sealed_of(memory.getvalue(), key), key) as file, zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert archive.read("7.bin") == random(10_007).tobytes()


def test_pillow_reads_from_it(key):
    image = pytest.importorskip("PIL.Image")
    memory = io.BytesIO()
    image.fromarray(random(64 * 64 * 3).reshape(64, 64, 3)).save(memory, "PNG")
    with open_bytes(sealed_of(memory.getvalue(), key), key) as file:
        opened = image.open(file)
        assert np.array_equal(np.asarray(opened), random(64 * 64 * 3).reshape(64, 64, 3))


def test_parquet_files_are_read_from_it(key, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = pa.table({"x": np.arange(50_000), "text": [f"line {i}" for i in range(50_000)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5000)
    fastrack.seal_file(tmp_path / "a.parquet", tmp_path / "a.safetensors", key)
    sealed = fastrack.load_file(tmp_path / "a.safetensors")["a.parquet"]
    with open_bytes(sealed, key) as file:
        opened = parquet.ParquetFile(file, pre_buffer=True)
        assert opened.read(use_threads=True).equals(table)
        assert opened.read_row_group(3, ["x"]).equals(table.slice(15_000, 5000).select(["x"]))
    last = sealed.message.nbytes - 1
    with open_bytes(tampered(sealed, last), key) as file, pytest.raises(AuthenticationError):
        parquet.ParquetFile(file)


def test_it_reads_files_larger_than_its_buffer_without_a_copy_of_all(key, tmp_path):
    (tmp_path / "big.bin").write_bytes(random(1 << 20).tobytes() * 4)
    fastrack.seal_file(tmp_path / "big.bin", tmp_path / "big.safetensors", key)
    with open_bytes(fastrack.load_file(tmp_path / "big.safetensors")["big.bin"], key) as file:
        assert file.seek(0, os.SEEK_END) == 4 << 20
        file.seek(0)
        assert b"".join(iter(lambda: file.read(100_000), b"")) == (tmp_path / "big.bin").read_bytes()


def test_a_forked_child_reads_whatever_its_parents_threads_do(key):
    file = open_bytes(sealed_of(b"abc", key), key)
    with file.raw._lock:  # as a thread that the child lacks
        assert in_forked_child(lambda: file.raw.read(3), seconds=20) == b"abc"
