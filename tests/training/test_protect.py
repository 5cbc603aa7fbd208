"""A protected process seals or refuses the tensors that it writes, and the same functions open them."""

import errno
import gc
import gzip
import io
import mmap
import os
import pickle
import threading
import types
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import canaries
from helpers.foreign import take_back
from helpers.forking import in_forked_child

import fastrack
from fastrack._patches import imports
from fastrack._protect import refusals, sealing

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")
safetensors_numpy = pytest.importorskip("safetensors.numpy")

KEY = fastrack.Key.generate()
NEEDLE = np.random.default_rng(5).integers(0, 256, 4096, np.uint8)
SLAB = 8 << 20


@pytest.fixture(scope="module", autouse=True)
def protected():
    fastrack.protect_checkpoints(KEY)
    yield
    take_back()


def protect_again(key=KEY, **options):
    """Protect without the canary, which takes longer than a test should."""
    with pytest.MonkeyPatch.context() as patched:
        canaries.replace(patched)
        fastrack.protect_checkpoints(key, **options)


def state():
    weights = torch.from_numpy(NEEDLE.copy())
    return {"weights": weights, "tied": weights.view(64, 64), "step": 3, "order": OrderedDict(a=1.5)}


def require_equal(loaded):
    assert loaded["weights"].numpy().tobytes() == NEEDLE.tobytes()
    assert loaded["tied"].data_ptr() == loaded["weights"].data_ptr()
    assert (loaded["step"], loaded["order"]) == (3, OrderedDict(a=1.5))


def require_sealed(path):
    content = Path(path).read_bytes()
    assert NEEDLE[:16].tobytes() not in content
    assert NEEDLE[-16:].tobytes() not in content
    fastrack.verify_file(path, KEY)


FORMATS = pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])


@FORMATS
def test_what_torch_saves_is_sealed_and_loads_again(tmp_path, options):
    path = tmp_path / "ä.pt"  # torch writes names that are not ASCII in another way
    torch.save(state(), str(path), **options)
    require_sealed(path)
    for loading in ({}, {"weights_only": False}, {"map_location": "cpu"}):
        require_equal(torch.load(path, **loading))


@FORMATS
def test_open_files_and_buffers_are_sealed_where_they_stand(tmp_path, options):
    path = tmp_path / "many.pt"
    with path.open("wb") as file:
        for _ in range(2):
            torch.save(state(), file, **options)
    assert NEEDLE[:16].tobytes() not in path.read_bytes()
    with path.open("rb") as file:
        for _ in range(2):
            require_equal(torch.load(file))
    buffer = io.BytesIO(b"before")
    buffer.seek(6)
    torch.save(state(), buffer, **options)
    assert NEEDLE[:16].tobytes() not in buffer.getvalue()
    buffer.seek(6)
    require_equal(torch.load(buffer))
    assert buffer.read() == b""
    buffer.close()  # nothing holds its memory


def test_a_file_that_was_written_through_a_buffer_is_one_that_the_commands_open(tmp_path):
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    path = tmp_path / "model.ckpt"
    path.write_bytes(buffer.getvalue())
    require_equal(torch.load(path, mmap=True))
    require_sealed(path)
    assert fastrack.load_file(path).metadata == {}


def test_a_compressed_file_is_read_by_its_content(tmp_path):
    path = tmp_path / "model.gz"
    with gzip.open(path, "wb") as file:
        torch.save(state(), file)
    with gzip.open(path) as file:
        require_equal(torch.load(file))


def test_a_large_state_goes_slab_by_slab_and_may_be_mapped(tmp_path):
    large = {"x": torch.arange(SLAB // 4 + 1000, dtype=torch.int64), "y": torch.ones(5)}
    path = tmp_path / "large.pt"
    torch.save(large, path)
    for loaded in (torch.load(path), torch.load(path, mmap=True)):
        assert torch.equal(loaded["x"], large["x"])
        assert torch.equal(loaded["y"], large["y"])
    with path.open("r+b") as file:
        file.seek(-9, 2)
        byte = file.read(1)
        file.seek(-9, 2)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(fastrack.AuthenticationError, match="chunk"):
        torch.load(path, mmap=True)


class Lazy(torch._C.PyTorchFileReader):
    """Reader of a library that was imported before the call."""


def test_an_archive_that_a_program_opens_itself_is_read_record_by_record(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    plain = fastrack.open_bytes(fastrack.load_file(path)["torch.save"], KEY).read()

    def require_values(reader):
        assert isinstance(reader, torch._C.PyTorchFileReader)
        assert reader.get_record("data/0") == NEEDLE.tobytes()
        storage = reader.get_storage_from_record("data/0", NEEDLE.size, torch.UntypedStorage)
        assert bytes(storage._typed_storage()._untyped_storage.tolist()) == NEEDLE.tobytes()

    for open_archive in (torch.PyTorchFileReader, torch._C.PyTorchFileReader, Lazy):
        with path.open("rb") as file:
            for source in (str(path), bytes(path), path, file, io.BytesIO(path.read_bytes()), io.BytesIO(plain)):
                require_values(open_archive(source))
    with torch.serialization._open_zipfile_reader(str(path)) as reader:
        require_values(reader)
    (tmp_path / "plain.pt").write_bytes(plain)
    require_values(torch.PyTorchFileReader(str(tmp_path / "plain.pt")))
    with pytest.raises(RuntimeError, match="No such file"):
        torch.PyTorchFileReader(str(tmp_path / "missing.pt"))


def test_threads_read_an_archive_as_they_read_a_plain_one(tmp_path):
    """torch waits for its own lock with the interpreter's, without which a read in another thread cannot go on."""
    path = str(tmp_path / "model.pt")
    torch.save({"x": torch.arange(1 << 18)}, path)

    def read():
        readers = [torch.PyTorchFileReader(path), Lazy(path)]
        with ThreadPoolExecutor(8) as threads:
            for each in readers:
                records = list(threads.map(each.get_record, ["data/0", ".format_version", "data/0", "version"] * 8))
                sizes = set(threads.map(each.get_record_size, ["data/0"] * 8))
        return [*map(len, records)], sizes

    assert in_forked_child(read) == ([1 << 21, 1, 1 << 21, 2] * 8, {1 << 21})


def test_an_altered_archive_that_is_read_record_by_record_is_refused_as_such(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"x": torch.zeros(100_000)}, path)
    content = path.read_bytes()
    for place in (-5, len(content) // 2):  # in the directory, which is read first, and in a record
        altered = bytearray(content)
        altered[place] ^= 1
        path.write_bytes(altered)
        with pytest.raises(fastrack.AuthenticationError, match="chunk"):
            torch.PyTorchFileReader(str(path)).get_record("data/0")
    safetensors_torch.save_file(tensors(), path)
    with pytest.raises(fastrack.FastrackError, match=r"expected what torch\.save wrote"):
        torch.PyTorchFileReader(str(path))


def test_an_archive_that_was_opened_gives_its_key_back(tmp_path):
    torch.save(state(), tmp_path / "model.pt")
    opened = []

    class Watched(sealing._Stream):
        def close(self):
            opened.remove(id(self))
            super().close()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sealing, "_Stream", lambda *args: opened.append(id(stream := Watched(*args))) or stream)
        reader = torch.PyTorchFileReader(str(tmp_path / "model.pt"))
        assert len(opened) == 1
        del reader
        gc.collect()
    assert not opened


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_sealed_file_is_not_mapped_for_writing(tmp_path):
    """A write to the tensors would reach no file."""
    path = str(tmp_path / "model.pt")
    torch.save({"x": torch.zeros(1000)}, path)
    before = Path(path).read_bytes()
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        with pytest.raises(fastrack.FastrackError, match="MAP_PRIVATE"):
            torch.load(path, mmap=True)
        assert torch.load(path)["x"].sum() == 0
    for write in (torch.UntypedStorage.from_file, torch.FloatStorage.from_file, torch.ByteStorage.from_file):
        with pytest.raises(fastrack.FastrackError, match="Map it with shared=False"):
            write(path, True, 8)
    with pytest.raises(fastrack.FastrackError, match="Map it with shared=False"):
        torch.from_file(path, shared=True, size=8)
    for name in (path, os.fsencode(path)):
        with pytest.raises(fastrack.FormatError, match="got a sealed file"):
            torch.from_file(name, size=8)  # which would have ciphertext for values
    values = tmp_path / "values"
    values.write_bytes(NEEDLE)
    assert torch.from_file(str(values), size=4096, dtype=torch.uint8).numpy().tobytes() == NEEDLE.tobytes()
    torch.load(path, mmap=True)["x"][:] = 7  # a copy of its own, as torch's private map is
    assert Path(path).read_bytes() == before


class SelfSaving:
    """Object whose pickle has a sealed file in it, as that of an estimator that holds a module."""

    def __init__(self):
        self.weights, self.calls = torch.from_numpy(NEEDLE.copy()), 0

    def __getstate__(self):
        self.calls += 1
        buffer = io.BytesIO()
        torch.save(self.weights, buffer)
        return {"saved": buffer.getvalue()}

    def __setstate__(self, saved):
        self.weights = torch.load(io.BytesIO(saved["saved"]))


@FORMATS
@pytest.mark.parametrize("size", [100, SLAB])
def test_objects_that_pickle_otherwise_each_time_are_saved(tmp_path, options, size):
    path, each, large = tmp_path / "model.pt", SelfSaving(), torch.arange(size)
    for _ in range(3):  # sealed bytes are random, and torch writes bytes in a length that depends on them
        torch.save({"each": each, "large": large, "part": large[3:50]}, path, **options)
        loaded = torch.load(path, weights_only=False)
        assert torch.equal(loaded["each"].weights, each.weights)
        assert torch.equal(loaded["large"], large)
        assert loaded["part"].data_ptr() == loaded["large"][3:].data_ptr()
    assert each.calls == 3


def test_a_state_that_grows_while_it_is_saved_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    for size in (100, SLAB):
        growing = torch.zeros(size)

        def grow(storage=growing):  # torch asks for this option when all is counted
            storage.untyped_storage().resize_(storage.nbytes + 4096)

        monkeypatch.setattr(torch.serialization, "get_crc32_options", grow)
        with pytest.raises(ValueError, match="changed while it was saved"):
            torch.save({"x": growing}, path)
    monkeypatch.undo()
    require_equal(torch.load(path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_a_full_disk_is_said_and_nothing_ends_the_process(tmp_path):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        torch.save(state(), Full())
    with pytest.raises(OSError, match="full"):
        torch.save(torch.zeros(3 * SLAB, dtype=torch.uint8), Full())
    with pytest.raises(FileNotFoundError):
        torch.save(state(), tmp_path / "missing" / "model.pt")


def test_files_that_take_some_bytes_at_a_time_get_all_and_those_that_take_none_are_refused():
    class Slow(io.BytesIO):
        most = 1000

        def write(self, data):
            return super().write(data[: self.most])

    file = Slow()
    torch.save(state(), file)
    file.seek(0)
    require_equal(torch.load(file))
    file.most = 0
    with pytest.raises(OSError, match="takes no more bytes"):
        torch.save(state(), file)


class Crowded(pickle._Pickler):
    """Pickler of another library, whose attributes have the names that came to mind first, as those of dill's do."""

    def __init__(self, file, *args, **options):
        super().__init__(file, *args, **options)
        self._file = self._kept = self._tape = self._pickle = self._target = self.file = file

    def dump(self, obj):
        assert self.file is self._kept is self._tape is self._pickle is self._target
        super().dump(obj)
        return self._file.tell()


class Returning(pickle.Pickler):
    """Pickler in C that does not end in what it has written."""

    def dump(self, obj):
        super().dump(obj)
        return 7


def pickles_of(pickler):
    return types.SimpleNamespace(
        __name__="another", Pickler=pickler, Unpickler=pickle._Unpickler, dump=pickle.dump, load=pickle._load
    )


@FORMATS
@pytest.mark.parametrize("pickler", [Crowded, Returning, pickle._Pickler, "cloudpickle", "dill"])
def test_picklers_of_other_libraries_keep_what_is_theirs(tmp_path, options, pickler):
    module = pytest.importorskip(pickler) if isinstance(pickler, str) else pickles_of(pickler)
    path = tmp_path / "model.pt"
    torch.save(state(), path, pickle_module=module, **options)
    require_sealed(path)
    reading = module if hasattr(module, "Unpickler") else pickle  # cloudpickle has none
    require_equal(torch.load(path, pickle_module=reading, weights_only=False))


def test_what_cannot_be_pickled_leaves_no_file(tmp_path):
    with pytest.raises((AttributeError, pickle.PicklingError)):
        torch.save({"x": torch.ones(3), "f": lambda: 0}, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_pickles_of_tensors_are_sealed():
    content = pickle.dumps(state())
    assert NEEDLE[:16].tobytes() not in content
    assert torch.equal(pickle.loads(content)["tied"], state()["tied"])
    parameter = torch.nn.Parameter(torch.ones(3))
    assert torch.equal(pickle.loads(pickle.dumps(parameter)), parameter)


@pytest.mark.slow
def test_plain_files_of_before_load_as_ever(tmp_path):
    take_back()
    torch.save(state(), tmp_path / "plain.pt")
    safetensors_torch.save_file({"x": torch.arange(3)}, tmp_path / "plain.safetensors")
    protect_again()
    require_equal(torch.load(tmp_path / "plain.pt", mmap=True))
    with (tmp_path / "plain.pt").open("rb") as file:
        require_equal(torch.load(file))
    assert torch.load(tmp_path / "plain.safetensors")["x"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_an_unprotected_process_refuses_what_was_sealed(tmp_path):
    torch.save(state(), tmp_path / "model.pt")
    safetensors_torch.save_file(tensors(), tmp_path / "model.safetensors")
    take_back()
    try:
        for options in ({}, {"weights_only": False}, {"mmap": True}):
            with pytest.raises((pickle.UnpicklingError, RuntimeError)):
                torch.load(tmp_path / "model.pt", **options)
    finally:
        protect_again()


def tensors():
    return {"a": torch.from_numpy(NEEDLE.copy()), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.zeros(0)}


def require_same(loaded):
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_files_of_safetensors_are_sealed_and_open_again(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(tensors(), path, metadata={"who": "we"})
    require_sealed(path)
    require_same(safetensors_torch.load_file(path))
    require_same(torch.load(str(path)))
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"who": "we"}
        assert sorted(file.keys()) == ["a", "b", "c"]
        assert file.get_slice("b")[:1].shape == (1, 3)


@pytest.mark.parametrize("given", [None, {"step": "3"}, {"format": "np"}])
def test_files_of_safetensors_have_the_metadata_that_were_given_and_no_others(tmp_path, given):
    arrays, paths = {"x": np.ones(2)}, [tmp_path / name for name in ("n.safetensors", "t.safetensors", "f.safetensors")]
    safetensors_numpy.save_file(arrays, paths[0], metadata=given)
    safetensors_torch.save_file({"x": torch.ones(2)}, paths[1], metadata=given)
    fastrack.save_file(arrays, paths[2], KEY, metadata=given)
    for path in paths:
        with safetensors.safe_open(path, "np") as file:
            assert file.metadata() == given
        fastrack.unseal_file(path, tmp_path / "back.safetensors", KEY)
        with fastrack.load_file(tmp_path / "back.safetensors") as back:
            assert dict(back.metadata) == (given or {})


def test_what_torch_saved_is_not_taken_for_tensors(tmp_path):
    torch.save(state(), tmp_path / "model.safetensors")
    with pytest.raises(fastrack.FormatError, match=r"Open it with torch\.load"):
        safetensors_torch.load_file(tmp_path / "model.safetensors")
    safetensors_torch.save_file(tensors(), tmp_path / "model.pt")
    with pytest.raises(fastrack.FastrackError, match=r"expected what torch\.save wrote"):
        torch.load(tmp_path / "model.pt")
    fastrack.save_checkpoint(tmp_path / "own.ckpt", state(), KEY)
    with pytest.raises(fastrack.FastrackError, match=r"Open it with fastrack\.load_checkpoint"):
        torch.load(tmp_path / "own.ckpt")


def test_bytes_of_safetensors_are_sealed_too(tmp_path):
    content = safetensors_torch.save(tensors())
    assert NEEDLE[:16].tobytes() not in content
    require_same(safetensors_torch.load(content))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    require_same(safetensors_torch.load_file(path))
    arrays = {"x": NEEDLE.reshape(64, 64).astype(np.float32)}
    safetensors_numpy.save_file(arrays, path)
    require_sealed(path)
    assert np.array_equal(safetensors_numpy.load_file(path)["x"], arrays["x"])
    assert np.array_equal(safetensors_numpy.load(safetensors_numpy.save(arrays))["x"], arrays["x"])
    with pytest.raises(TypeError, match="expected a TensorSpec, got dict"):
        safetensors.serialize({"x": {"dtype": "uint8", "shape": [1], "data": b"x"}})


def test_modules_with_tied_weights_are_saved_and_loaded(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    safetensors_torch.save_model(module, str(tmp_path / "m.safetensors"))
    require_sealed(tmp_path / "m.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    other[1].weight = other[0].weight
    safetensors_torch.load_model(other, str(tmp_path / "m.safetensors"))
    assert torch.equal(other[0].weight, module[0].weight)


def test_threads_save_at_once(tmp_path):
    threads = [threading.Thread(target=torch.save, args=(state(), tmp_path / f"{number}.pt")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        require_sealed(tmp_path / f"{number}.pt")
        require_equal(torch.load(tmp_path / f"{number}.pt"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_seals_too(tmp_path):
    child = os.fork()
    if not child:
        try:
            torch.save(state(), tmp_path / "child.pt")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    require_sealed(tmp_path / "child.pt")
    require_equal(torch.load(tmp_path / "child.pt"))


def test_a_second_call_does_nothing_and_another_key_is_refused():
    before = torch.serialization._save
    fastrack.protect_checkpoints(KEY)
    assert torch.serialization._save is before
    with pytest.raises(fastrack.FastrackError, match="second call"):
        fastrack.protect_checkpoints(fastrack.Key.generate())
    with pytest.raises(fastrack.FastrackError, match="keys="):
        fastrack.protect_checkpoints(KEY, keys=fastrack.Key.generate())


@pytest.mark.slow
def test_checkpoints_of_earlier_keys_open(tmp_path):
    torch.save(state(), tmp_path / "old.pt")
    take_back()
    try:
        protect_again(fastrack.Key.generate())
        with pytest.raises(fastrack.UnknownKeyError):
            torch.load(tmp_path / "old.pt")
        take_back()
        protect_again(fastrack.Key.generate(), keys=KEY)
        require_equal(torch.load(tmp_path / "old.pt"))
    finally:
        take_back()
        protect_again()


def map_for_writing(path):
    np.memmap(path, np.uint8, "w+", shape=8)


def package(path):
    torch.package.PackageExporter(path)


def archive(path):
    torch._C.PyTorchFileWriter(str(path))


def script(path):
    torch._C.ScriptModule.save(None, str(path))


def write_storage(path):
    with path.open("wb") as file:
        torch.ones(3).untyped_storage()._write_file(file, True, True, 4)


def skip_data(path):
    with torch.serialization.skip_data():
        torch.save(state(), path)


REFUSED = [
    map_for_writing, package, archive, script, write_storage, skip_data,
    lambda path: np.save(path, NEEDLE),
    lambda path: np.savez(path, NEEDLE),
    lambda path: np.savez_compressed(path, NEEDLE),
    lambda path: np.savetxt(path, NEEDLE),
    lambda path: np.lib.format.write_array(io.BytesIO(), NEEDLE),
    lambda path: torch.jit.save(None, path),
    lambda path: torch.export.save(None, path),
    lambda path: torch.from_file(str(path), shared=True, size=4),
    lambda path: torch.UntypedStorage.from_file(str(path), True, 4),
]  # fmt: skip


@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_what_nothing_can_seal_is_refused_by_a_sentence(tmp_path, write):
    path = tmp_path / "plain"
    with pytest.raises(fastrack.FastrackError, match="would write plaintext: expected"):
        write(path)
    assert not path.exists() or not path.read_bytes()


def test_functions_of_modules_that_are_imported_later_are_refused(tmp_path, monkeypatch):
    for name in ("late_library", "moved_library"):
        (tmp_path / f"{name}.py").write_text("class Saver:\n    def save(self): pass\ndef dump(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(refusals.REFUSED, "late_library", ("dump", "Saver.save", "gone?"))
    monkeypatch.setitem(refusals.REFUSED, "moved_library", ("gone",))
    imports.when_imported(dict.fromkeys(("late_library", "moved_library"), refusals._refuse_in))
    with pytest.raises(fastrack.FastrackError, match=r"expected moved_library\.gone"):
        import moved_library  # noqa: F401
    import late_library

    for write in (late_library.dump, late_library.Saver().save):
        with pytest.raises(fastrack.FastrackError, match="late_library"):
            write()


def test_errors_hold_no_values(tmp_path):
    torch.save(state(), tmp_path / "model.pt")
    content = bytearray((tmp_path / "model.pt").read_bytes())
    content[-100] ^= 1
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(fastrack.AuthenticationError) as caught:
        torch.load(tmp_path / "model.pt")
    assert NEEDLE[:8].tobytes().hex() not in repr(caught.value)
    assert "torch.save" in str(caught.value)


def test_spawned_processes_need_keys_that_they_can_open():
    with pytest.raises(fastrack.FastrackError, match="expected protect_checkpoints to have been given paths"):
        torch.multiprocessing.spawn(save_in_child)


def save_in_child(rank, folder):
    torch.save(state(), f"{folder}/{rank}.pt")


@pytest.mark.nightly
def test_spawned_processes_seal_by_the_same_key_file(tmp_path):
    KEY.save(tmp_path / "owner.key")
    take_back()
    try:
        protect_again(tmp_path / "owner.key")
        torch.multiprocessing.spawn(save_in_child, (tmp_path,), nprocs=1)
        require_equal(torch.load(tmp_path / "0.pt"))
    finally:
        take_back()
        protect_again()
    require_sealed(tmp_path / "0.pt")


def test_a_buffer_that_was_damaged_can_be_written_again_while_the_error_lives():
    buffer = io.BytesIO()
    torch.save(state(), buffer)
    buffer.getbuffer()[-100] ^= 1
    buffer.seek(0)
    with pytest.raises(fastrack.AuthenticationError) as caught:
        torch.load(buffer)
    buffer.seek(0)
    buffer.truncate()
    torch.save({**state(), "more": torch.ones(3 * NEEDLE.size)}, buffer)
    buffer.seek(0)
    require_equal(torch.load(buffer))
    assert caught.value.__traceback__ is not None


def test_a_buffer_that_is_loaded_lazily_is_not_changed_by_later_writes():
    content = safetensors_torch.save(tensors())
    buffer = io.BytesIO(content)
    sealed = sealing.read_sealed(buffer)
    buffer.seek(0)
    buffer.write(bytes(len(content)))
    opened = fastrack.unseal(sealed["a"], KEY, framework="torch")
    assert torch.equal(opened, tensors()["a"])


def test_a_damaged_sealed_file_is_refused_as_such(tmp_path):
    """Torch would advise to load it as any pickle."""
    path = tmp_path / "model.pt"
    torch.save(state(), path)
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"x", content.replace(b'"fastrack.key"', b'"fastrack.kez"', 1)):
        path.write_bytes(damaged)
        for load in (torch.load, safetensors_torch.load_file):
            with pytest.raises(fastrack.FormatError):
                load(path)


def test_a_file_of_no_tensors_is_as_ever(tmp_path):
    safetensors_torch.save_file({}, tmp_path / "none.safetensors", {"a": "b"})
    assert safetensors_torch.load_file(tmp_path / "none.safetensors") == {}
    with safetensors.safe_open(tmp_path / "none.safetensors", "pt") as file:
        assert file.metadata() == {"a": "b"}


def test_a_tensor_may_not_have_the_name_of_what_torch_saves(tmp_path):
    with pytest.raises(fastrack.FormatError, match=r"name of a tensor: expected another than 'torch\.save'"):
        safetensors_torch.save_file({"torch.save": torch.ones(3)}, tmp_path / "a.safetensors")
    both = {"torch.save": torch.ones(3), "other": torch.zeros(2)}
    safetensors_torch.save_file(both, tmp_path / "b.safetensors")
    assert safetensors_torch.load_file(tmp_path / "b.safetensors")["torch.save"].tolist() == [1, 1, 1]


def test_a_map_that_would_be_written_to_leaves_the_file_there(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(b"as before")
    with pytest.raises(fastrack.FastrackError, match="open_memmap would write plaintext"):
        np.lib.format.open_memmap(path, "w+", np.uint8, (3,))
    assert path.read_bytes() == b"as before"
