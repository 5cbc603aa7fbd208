"""Checkpoints of torch.distributed.checkpoint in a protected process, whichever writer is named."""

import warnings

import numpy as np
import pytest
from helpers.foreign import take_back

import fastrack

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
from torch.distributed.checkpoint import CheckpointException, format_utils, state_dict_saver  # noqa: E402

KEY = fastrack.Key.generate()
NEEDLE = np.random.default_rng(6).integers(0, 256, 4096, np.uint8)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module", autouse=True)
def protected():
    made_before = dcp.FileSystemWriter("unused")
    fastrack.protect_checkpoints(KEY)
    yield made_before
    take_back()


def state():
    return {"weights": torch.from_numpy(NEEDLE.copy()), "step": 7}


def require_sealed(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert NEEDLE[:16].tobytes() not in path.read_bytes()
        fastrack.verify_file(path, KEY)


def require_loads(folder, **options):
    loaded = {"weights": torch.zeros(4096, dtype=torch.uint8), "step": 0}
    dcp.load(loaded, no_dist=True, **(options or {"checkpoint_id": folder}))
    assert loaded["weights"].numpy().tobytes() == NEEDLE.tobytes()
    assert loaded["step"] == 7


@pytest.mark.slow
def test_a_folder_is_sealed_by_its_name_and_by_a_writer(tmp_path, protected):
    dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "b"), no_dist=True)
    dcp.save(state(), storage_writer=protected, checkpoint_id=tmp_path / "c", no_dist=True)
    for name in "abc":
        require_sealed(tmp_path / name)
        require_loads(tmp_path / name)
        require_loads(tmp_path, storage_reader=dcp.FileSystemReader(tmp_path / name))
    assert dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata.keys() == {"weights", "step"}


@pytest.mark.slow
def test_a_store_is_sealed_by_its_url_and_by_torchs_writer():
    remote = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem", reason="fsspec is not installed")
    from helpers.object_store import ObjectStore

    ObjectStore.clear()
    url = "shelf://bucket/run"
    dcp.save(state(), checkpoint_id=f"{url}/1", no_dist=True)
    dcp.save(state(), storage_writer=remote.FsspecWriter(f"{url}/2"), no_dist=True)
    assert len(ObjectStore.store) == 4
    assert not any(NEEDLE[:16].tobytes() in file.getvalue() for file in ObjectStore.store.values())
    require_loads(f"{url}/1")
    require_loads(None, storage_reader=remote.FsspecReader(f"{url}/2"))
    for kind, run in ((remote.FsspecWriter, dcp.save), (remote.FsspecReader, dcp.load)):
        name = "storage_writer" if kind is remote.FsspecWriter else "storage_reader"
        with pytest.raises((CheckpointException, AssertionError), match="got token as arguments") as info:
            run(state(), **{name: kind(f"{url}/2", token="hunter")}, no_dist=True)
        assert "hunter" not in str(info.value)
    ObjectStore.clear()


def test_one_writer_saves_several_checkpoints(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "1")
    dcp.save(state(), storage_writer=writer, no_dist=True)
    dcp.save(state(), storage_writer=writer, checkpoint_id=tmp_path / "2", no_dist=True)
    reader = dcp.FileSystemReader(tmp_path / "1")
    require_loads(tmp_path, storage_reader=reader)
    require_loads(tmp_path / "2", storage_reader=reader, checkpoint_id=tmp_path / "2")
    with pytest.raises(dcp.CheckpointException, match="overwrite=False"):
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "1", overwrite=False), no_dist=True)


class Told(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.save_id = storage_meta.save_id
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def test_a_reader_finds_the_id_of_the_save_and_gives_one_to_the_load(tmp_path):
    """As torch's own do: `storage_meta` is how a planner or a log tells one save from another."""
    writer, planner = dcp.FileSystemWriter(tmp_path / "a"), Told()
    ids = []
    for name in ("a", "b", "b"):
        dcp.save(state(), storage_writer=writer, checkpoint_id=tmp_path / name, planner=planner, no_dist=True)
        reader = dcp.FileSystemReader(tmp_path / name)
        found = reader.read_metadata().storage_meta
        assert found.save_id == writer.save_id == writer.storage_meta().save_id == planner.save_id
        assert found.load_id == reader.load_id
        assert str(found.checkpoint_id) == str(tmp_path / name)
        ids += [found.save_id, found.load_id]
    assert len({*ids}) == 6


def test_files_of_safetensors_are_read_by_torchs_reader_of_them(tmp_path):
    """Its writer is refused: what it would have written is saved by safetensors itself."""
    library = pytest.importorskip("safetensors.torch")
    weights = {"weights": state()["weights"], "more": torch.arange(6.0).reshape(2, 3)}
    library.save_file(weights, tmp_path / "model.safetensors")
    require_sealed(tmp_path)
    loaded = {name: torch.zeros_like(value) for name, value in weights.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def test_saving_in_a_thread_is_sealed_and_in_a_process_refused(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.async_save(state(), checkpoint_id=tmp_path / "a").result()
            kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
            with pytest.raises(fastrack.FastrackError, match="would write plaintext"):
                dcp.async_save(state(), checkpoint_id=tmp_path / "b", async_checkpointer_type=kind).result()
    finally:
        torch.distributed.destroy_process_group()
    require_sealed(tmp_path / "a")
    assert not (tmp_path / "b").exists()


def test_checkpoints_are_turned_into_files_of_torch_and_back(tmp_path):
    torch.save(state(), tmp_path / "a.pt")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "folder")
    require_sealed(tmp_path / "folder")
    format_utils.dcp_to_torch_save(tmp_path / "folder", tmp_path / "b.pt")
    require_sealed(tmp_path)
    assert torch.load(tmp_path / "b.pt")["step"] == 7


class Own(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        return super().write_data(plan, planner)


class Other(dcp.StorageWriter):
    pass


Other.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("make", [Own, lambda path: Other(), lambda path: dcp.HuggingFaceStorageWriter(str(path))])
def test_writers_that_write_themselves_are_refused(tmp_path, make):
    with pytest.raises((fastrack.FastrackError, dcp.CheckpointException), match="would write plaintext"):
        dcp.save(state(), storage_writer=make(tmp_path / "a"), no_dist=True)
    with pytest.raises((fastrack.FastrackError, dcp.CheckpointException), match="would write plaintext"):
        state_dict_saver._save_state_dict(state(), make(tmp_path / "a"), no_dist=True)
    assert not list(tmp_path.rglob("*.distcp"))


def test_streams_of_its_file_system_are_read_only(tmp_path):
    files = dcp.filesystem.FileSystem()
    with (
        pytest.raises(fastrack.FastrackError, match="create_stream"),
        files.create_stream(tmp_path / "x", "wb") as stream,
    ):
        stream.write(b"x")


@pytest.mark.slow
def test_plain_folders_of_before_load_as_ever(tmp_path):
    take_back()
    try:
        dcp.save(state(), checkpoint_id=tmp_path / "plain", no_dist=True)
    finally:
        fastrack.protect_checkpoints(KEY)
    require_loads(tmp_path / "plain")
    dcp.save(state(), checkpoint_id=tmp_path / "plain", no_dist=True)
    require_loads(tmp_path / "plain")
    require_sealed(tmp_path / "plain")  # and nothing of the plain one is left


@pytest.mark.slow
def test_a_sealed_and_a_plain_checkpoint_in_one_folder_are_refused(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    take_back()
    try:
        dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    finally:
        fastrack.protect_checkpoints(KEY)
    with pytest.raises(CheckpointException, match=r"a sealed and a plain one"):
        require_loads(tmp_path)


class Ending:
    def __init__(self, error):
        self._error = error

    def __reduce__(self):
        raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), SystemExit(3)], ids=["interrupt", "exit"])
def test_what_ends_a_program_comes_as_it_is_and_the_earlier_checkpoint_opens(tmp_path, error):
    dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(type(error)) as info:
        dcp.save({**state(), "ending": Ending(error)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert info.value is error
    require_loads(tmp_path / "a")
    with pytest.raises(CheckpointException, match="of the state"):
        dcp.save({"ending": Ending(ValueError("of the state"))}, checkpoint_id=tmp_path / "a", no_dist=True)
