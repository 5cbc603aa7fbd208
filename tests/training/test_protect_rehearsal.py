"""A save that is rehearsed: what would be written unencrypted is refused, and nothing else is changed."""

import contextlib
import contextvars
import copy
import importlib
import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.foreign import take_back
from helpers.ranks import run_ranks

import fastrack
from fastrack._protect.rehearsal import rehearse

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
from torch.distributed.checkpoint import state_dict  # noqa: E402

KEY = fastrack.Key.generate()
WEIGHTS = np.ones(8).tobytes()
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module", autouse=True)
def protected():
    fastrack.protect_checkpoints(KEY)
    yield
    take_back()


def refused(save):
    """Return the file that a rehearsal names as plain."""
    with pytest.raises(fastrack.errors.FastrackError, match="rehearsing a save failed: ") as info:
        fastrack.rehearse_save(save)
    return str(info.value.path)


def save_well(folder):
    torch.save({"weights": torch.ones(3)}, f"{folder}/a.pt")


def write(name, content):
    def save(folder):
        save_well(folder)
        Path(folder, name).write_bytes(content)

    return save


@pytest.mark.slow
def test_a_sealed_save_is_let_through_and_leaves_nothing():
    folders = []
    fastrack.rehearse_save(lambda folder: (folders.append(folder), save_well(folder)))
    (folder,) = folders
    assert not Path(folder).exists()


def test_plain_files_of_any_writer_are_refused():
    weights = np.ones(8)
    assert refused(write("w.pkl", pickle.dumps(weights))) == "w.pkl"
    assert refused(write("deep.json", pickle.dumps(weights))) == "deep.json"
    assert refused(write("tokenizer.model", pickle.dumps(weights))) == "tokenizer.model"
    assert refused(write("w.bin", b"text in a file for weights")) == "w.bin"

    def unseen(folder):  # as a library in C writes
        save_well(folder)
        subprocess.run([sys.executable, "-c", f"open({folder + '/w'!r}, 'wb').write(bytes(9))"], check=True)

    assert refused(unseen) == "w"


def test_numpy_is_refused_where_it_writes():
    with pytest.raises(fastrack.errors.FastrackError, match="savez"):
        fastrack.rehearse_save(lambda folder: np.savez(f"{folder}/rng.npz", a=np.ones(3)))
    assert refused(lambda folder: (save_well(folder), np.ones(3).tofile(f"{folder}/a.dat"))) == "a.dat"


def test_text_of_trainers_is_let_through():
    files = {
        "config.json": b"{}",
        "latest": b"global_step2",
        "vocab.txt": "ä".encode(),
        "tokenizer.model": b"\n\x0e\n\x05\x00",
    }
    for name, content in files.items():
        fastrack.rehearse_save(write(name, content))


def test_a_file_elsewhere_is_refused_before_a_byte_is_in_it(tmp_path):
    place = tmp_path / "w.pkl"

    def ignoring(folder):
        save_well(folder)
        with contextlib.suppress(fastrack.errors.FastrackError):
            place.write_bytes(b"weights")

    assert refused(ignoring) == str(place)
    assert not place.exists()

    def unnamed(folder):
        save_well(folder)
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))

    if hasattr(os, "O_TMPFILE"):
        assert refused(unnamed) == str(tmp_path)
    text = tmp_path / "log.txt"
    fastrack.rehearse_save(lambda folder: (save_well(folder), text.write_text("saved")))
    assert refused(lambda folder: (save_well(folder), text.write_bytes(bytes(3)))) == str(text)
    place.write_bytes(b"as ever")  # after a rehearsal all files are let through


def tree(folder):
    """Return the files below a folder with what they hold."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_sealed_files_elsewhere_are_as_they_were(tmp_path):
    """A callback may keep its best weights in a place of its own: a rehearsal has none to put there."""
    weights = {"x": torch.ones(3)}

    def save(folder):
        save_well(folder)
        torch.save(weights, tmp_path / "ema.pt")
        safetensors_torch.save_file(weights, tmp_path / "best.safetensors")
        torch.distributed.checkpoint.save(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)

    save(tmp_path)
    before = tree(tmp_path)
    fastrack.rehearse_save(save)
    assert tree(tmp_path) == before
    fastrack.rehearse_save(lambda folder: (save_well(folder), torch.save(weights, tmp_path / "new.pt")))
    assert tree(tmp_path) == before
    with pytest.raises(FileNotFoundError):
        fastrack.rehearse_save(lambda folder: (save_well(folder), torch.save(weights, tmp_path / "absent" / "new.pt")))


def test_files_elsewhere_are_neither_removed_nor_replaced(tmp_path):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    old.write_bytes(WEIGHTS)
    before = tree(tmp_path)

    def rename_to(path):
        text = path.with_suffix(".txt")
        text.write_text("{}")
        text.rename(path)

    def ignoring(act):
        with contextlib.suppress(fastrack.errors.FastrackError):
            act()

    for act in (
        old.unlink,
        lambda: ignoring(old.unlink),
        lambda: shutil.rmtree(tmp_path),
        lambda: old.rename(new),
        lambda: rename_to(old),
        lambda: os.truncate(old, 1),
    ):
        assert refused(lambda folder, act=act: (save_well(folder), act())) == str(old)
        assert tree(tmp_path) == before
    fastrack.rehearse_save(lambda folder: (save_well(folder), None if fastrack.is_rehearsing() else old.unlink()))
    assert not fastrack.is_rehearsing()


def test_text_elsewhere_is_put_back(tmp_path, limited):
    history, log = tmp_path / "history.json", tmp_path / "run.log"
    history.write_text("[1, 2]")
    history.chmod(0o640)
    log.write_text("begun\n")

    def save(folder):
        save_well(folder)
        assert history.read_text() == "[1, 2]"
        (tmp_path / "history.json.tmp").write_text("[]")
        (tmp_path / "history.json.tmp").replace(history)
        (tmp_path / "config.json").write_text("{}")
        with log.open("a") as file:
            file.write("saved\n")

    fastrack.rehearse_save(save)
    assert tree(tmp_path) == {"history.json": b"[1, 2]", "run.log": b"begun\nsaved\n"}
    assert history.stat().st_mode & 0o777 == 0o640
    assert refused(lambda folder: (save_well(folder), (tmp_path / "weights").write_bytes(WEIGHTS))).endswith("weights")
    assert "weights" not in tree(tmp_path)
    limited(rehearsed_bytes=5)  # bytes
    assert refused(lambda folder: (save_well(folder), history.write_text("[]"))) == str(history)
    assert history.read_text() == "[1, 2]"


def test_a_save_may_be_the_first_to_import_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_by_a_save.py").write_text("WIDTH = 3")

    def save(folder):
        module = importlib.import_module("imported_by_a_save")
        torch.save(torch.ones(module.WIDTH), f"{folder}/a.pt")

    fastrack.rehearse_save(save)
    assert [path.suffix for path in (tmp_path / "__pycache__").iterdir()] == [".pyc"]


def test_a_new_folder_is_made_only_outside_of_a_rehearsal(tmp_path):
    def save(folder):
        save_well(folder)
        with fastrack.write_folder(tmp_path / "sealed", KEY):
            pass

    with pytest.raises(fastrack.errors.FastrackError, match=r"is_rehearsing"):
        fastrack.rehearse_save(save)
    assert tree(tmp_path) == {}


def test_what_began_in_a_rehearsal_saves_in_earnest_after_it(tmp_path):
    contexts = []

    def save(folder):
        save_well(folder)
        contexts.append(contextvars.copy_context())

    fastrack.rehearse_save(save)
    contexts[0].run(save_well, tmp_path)
    assert torch.equal(torch.load(tmp_path / "a.pt")["weights"], torch.ones(3))
    contexts[0].run((tmp_path / "w.bin").write_bytes, WEIGHTS)  # which is not refused any more


def test_a_plain_file_is_refused_that_is_gone_at_the_end(tmp_path):
    def remove(path):
        path.write_bytes(WEIGHTS)
        path.unlink()

    def move(_):
        (tmp_path / "config.json").write_bytes(WEIGHTS)
        (tmp_path / "config.json").rename(tmp_path / "elsewhere")

    def remove_by_descriptor(path):
        path.parent.joinpath("below").mkdir()
        path.parent.joinpath("below", "w").write_bytes(WEIGHTS)
        shutil.rmtree(path.parent / "below")

    def temporary(_):
        with tempfile.NamedTemporaryFile(dir=tmp_path, prefix="named") as file:
            file.write(WEIGHTS)
            file.flush()

    for act, name in (
        (remove, "w"),
        (move, str(tmp_path / "elsewhere")),
        (remove_by_descriptor, "below"),
        (temporary, str(tmp_path / "named")),
    ):
        assert refused(lambda folder, act=act: (save_well(folder), act(Path(folder, "w")))).startswith(name)
    fastrack.rehearse_save(lambda folder: (save_well(folder), remove_text(Path(folder, "config.tmp"))))


def remove_text(path):
    path.write_text("{}")
    path.unlink()


def test_a_save_that_fails_or_saves_nothing_ends_in_its_error():
    with pytest.raises(AttributeError, match="lambda"):
        fastrack.rehearse_save(lambda folder: torch.save({"f": lambda: 0}, f"{folder}/a.pt"))
    with pytest.raises(ValueError, match="got none"):
        fastrack.rehearse_save(lambda folder: None)


def test_a_trainer_may_store_all_elsewhere(recwarn, tmp_path):
    """As plug-ins do that keep checkpoints in a store or in memory. A loop of your own names the folder itself."""
    kept = []

    def keep_bytes(_):
        buffer = io.BytesIO()
        torch.save({"weights": torch.ones(3)}, buffer)
        kept.append(buffer.getvalue())

    for keep in (keep_bytes, lambda _: kept.append(pickle.dumps(torch.ones(3)))):
        rehearse(keep, elsewhere=True)
    assert WEIGHTS[:4] * 3 not in kept[0] + kept[1]
    assert not recwarn
    with pytest.warns(UserWarning, match="could not be looked at"):
        rehearse(lambda _: kept.append(torch.ones(3)), elsewhere=True)
    with pytest.raises(fastrack.errors.FastrackError, match="another file"):
        rehearse(lambda _: (tmp_path / "w.bin").write_bytes(WEIGHTS), elsewhere=True)
    with pytest.raises(ValueError, match="got none"):
        rehearse(keep_bytes)


def test_a_rehearsal_takes_no_room(tmp_path):
    sizes = []
    state = {"weights": torch.zeros(16 << 20, dtype=torch.uint8)}

    def save(folder):
        torch.save(state, f"{folder}/a.pt")
        torch.distributed.checkpoint.save(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
        sizes.extend(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())

    fastrack.rehearse_save(save)
    assert len(sizes) == 3
    assert max(sizes) < 8192
    save_well(tmp_path)
    assert torch.equal(torch.load(tmp_path / "a.pt")["weights"], torch.ones(3))  # a save afterwards has its content


def test_random_states_and_optimizers_are_as_before():
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    before = (
        copy.deepcopy(module.state_dict()),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002 - the state that is global
        torch.get_rng_state(),
    )

    def save(folder):
        state = state_dict.get_optimizer_state_dict(module, optimizer)
        assert optimizer.state  # torch has had it take a step
        torch.save((state, random.random(), np.random.rand(), torch.rand(1)), f"{folder}/a.pt")  # noqa: NPY002

    fastrack.rehearse_save(save)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:3]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[3])
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="step"):
        fastrack.rehearse_save(lambda folder: optimizer.step())


@pytest.mark.parametrize("content", [b'{"other": 2}', b"\xff" * 64], ids=["text", "random"])
def test_a_file_that_is_named_by_an_open_folder_is_looked_at_and_put_back(tmp_path, content):
    (tmp_path / "before.json").write_text('{"mine": 1}')

    def save(folder):
        save_well(folder)
        above = os.open(tmp_path, os.O_RDONLY)
        for name in ("before.json", "new.json"):
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=above)
            os.write(file, content)
            os.close(file)
        os.close(above)

    if content.startswith(b"{"):
        fastrack.rehearse_save(save)
    else:
        assert refused(save).startswith(str(tmp_path))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("before.json", '{"mine": 1}')]


def test_a_file_that_gets_a_second_name_elsewhere_is_looked_at(tmp_path):
    (tmp_path / "random").write_bytes(b"\xff" * 64)

    def link(folder):
        save_well(folder)
        os.link(tmp_path / "random", tmp_path / "kept.json")

    assert refused(link) == str(tmp_path / "kept.json")
    assert [path.name for path in tmp_path.iterdir()] == ["random"]


def test_a_forked_child_that_leaves_the_rehearsal_leaves_it_to_its_parent(tmp_path):
    (tmp_path / "log.txt").write_text("before")

    def save(folder):
        (tmp_path / "log.txt").write_text("in the save")
        child = os.fork()
        if child == 0:
            is_child.append(True)
            return
        assert os.waitpid(child, 0)[1] == 0
        assert (tmp_path / "log.txt").read_text() == "in the save"
        save_well(folder)

    is_child = []
    try:
        fastrack.rehearse_save(save)
    finally:
        if is_child:
            os._exit(0)
    assert (tmp_path / "log.txt").read_text() == "before"


def test_attributes_of_callbacks_are_put_back_in_place():
    class Callback:
        def __init__(self, shared):
            self.count, self.seen, self.deep = 0, shared, {"best": [1]}

        def save(self, folder):
            self.count += 1
            self.seen.append(folder)
            self.deep["best"].append(2)
            self.other = True
            save_well(folder)

    shared = []
    callback = Callback(shared)
    rehearse(callback.save, callback)
    assert vars(callback) == {"count": 0, "seen": [], "deep": {"best": [1]}}
    assert callback.seen is shared


def rehearse_in_two():
    import torch.distributed as dist

    fastrack.protect_checkpoints(fastrack.Key.from_bytes(bytes(range(32))))
    folders = [None, None]

    def save(folder):
        dist.all_gather_object(folders, folder)
        torch.save(torch.ones(3), f"{folder}/{dist.get_rank()}.pt")
        if dist.get_rank():
            Path(folder, "of the second").write_bytes(b"\xff")

    with pytest.raises(fastrack.errors.FastrackError, match="of the second"):
        fastrack.rehearse_save(save)
    assert folders[0] == folders[1]


@pytest.mark.slow
def test_what_one_process_writes_is_refused_by_all():
    run_ranks((2, rehearse_in_two))


@pytest.mark.slow
def test_nothing_is_printed_when_a_process_ends_that_has_rehearsed():
    code = """
import os, torch, fastrack
class Opening:
    def __del__(self, read=open, name=os.devnull):
        read(name)
fastrack.protect_checkpoints(fastrack.Key.generate())
fastrack.rehearse_save(lambda folder: torch.save(torch.ones(3), folder + "/a.pt"))
torch.kept = Opening()  # which goes when modules have no names any more
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_accelerate_saves_sealed_states(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    module = torch.nn.Linear(8, 4)
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
    fastrack.rehearse_save(accelerator.save_state)
    module(torch.ones(8)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy(module.state_dict())
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(module, tmp_path / "model")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            fastrack.verify_file(path, KEY)
    torch.nn.init.zeros_(module.weight)
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)
