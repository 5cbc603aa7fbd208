"""Mounted folders: other libraries load sealed weights from them as plain ones, and errors reach the caller."""

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pickle
import re
import shutil
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from helpers.cases import each
from helpers.tampering import tamper_file

from fastrack import Key, load_folder, mount_folder, seal_folder
from fastrack._files.writer import write_sealed
from fastrack._keys.keyring import KeyRing
from fastrack._models import mounts
from fastrack._sets import folder_writer
from fastrack.errors import AuthenticationError, FormatError, RollbackError, UnknownKeyError

KEY = Key.from_bytes(bytes(range(32)))
WEIGHTS = {
    "w": torch.arange(60_000, dtype=torch.float32).reshape(200, 300),
    "half": torch.arange(9).to(torch.bfloat16),
    "none": torch.zeros(0, 3),
}
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def plain(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    plain = tmp_path / "plain"
    (plain / "unet").mkdir(parents=True)
    (plain / "model_index.json").write_text("{}")
    (plain / "pipeline.py").write_text("print()")
    (plain / "unet" / "config.json").write_text(json.dumps({"size": 1}))
    (plain / "weights.gguf").write_bytes(b"GGUF" + bytes(range(256)) * 100)
    safetensors.torch.save_file(WEIGHTS, plain / UNET, {"format": "pt"})
    return plain


@pytest.fixture
def sealed(plain, tmp_path):
    seal_folder(plain, tmp_path / "sealed", KEY)
    yield tmp_path / "sealed"
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def same(found, expected=WEIGHTS):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_functions_of_safetensors_open_what_is_mounted_and_nothing_else(sealed, plain):
    with mount_folder(sealed, KEY) as path:
        files = sorted(each.relative_to(path).as_posix() for each in Path(path).rglob("*") if each.is_file())
        assert files == ["model_index.json", "unet/config.json", UNET, "weights.gguf"]  # no code
        assert Path(path, "weights.gguf").stat().st_mode & 0o777 == 0
        modes = {each.stat().st_mode & 0o777 for each in Path(path).rglob("*") if each.is_file()} - {0}
        assert (modes, Path(path).stat().st_mode & 0o777, Path(path, "unet").stat().st_mode & 0o777) == (
            {0o400},
            0o500,
            0o500,
        )
        assert same(safetensors.torch.load_file(f"{path}/{UNET}"))
        assert same(safetensors.torch.load_file(plain / UNET))
        with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):
            safetensors.torch.load_file(sealed / UNET)
        with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):  # past `safe_open`
            safetensors.torch.load((Path(path) / UNET).read_bytes())
        with safetensors.safe_open(Path(path, UNET), "pt") as file:
            assert (file.keys(), file.metadata()) == (sorted(WEIGHTS), {"format": "pt"})
            assert torch.equal(file.get_tensor("w"), WEIGHTS["w"])
            part = file.get_slice("w")
            assert (part.get_shape(), part.get_dtype()) == ([200, 300], "F32")
            assert torch.equal(part[3:5, 7:].to("cpu"), WEIGHTS["w"][3:5, 7:])
        with safetensors.safe_open(f"{path}/unet/../{UNET}", "np") as file:
            assert np.array_equal(file.get_tensor("w"), WEIGHTS["w"].numpy())
            assert np.array_equal(file.get_slice("w")[3:5], WEIGHTS["w"].numpy()[3:5])
    assert not Path(path).exists()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("given", [None, {"format": "np"}, {"note": "1"}])
def test_mounted_files_have_the_metadata_of_the_plain_ones(tmp_path, monkeypatch, given, marked):
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "plain" / "lora.safetensors", given)

    def write_as_0_2(tensors, place, key, plain, metadata, *rest, **options):
        write_sealed(tensors, place, key, plain, {"format": "pt", **metadata}, *rest, **options)

    if marked:
        monkeypatch.setattr(folder_writer, "write_sealed", write_as_0_2)
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    with (
        mount_folder(tmp_path / "sealed", KEY) as path,
        safetensors.safe_open(f"{path}/lora.safetensors", "pt") as file,
    ):
        assert file.metadata() == given


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_slices_are_tensors_to_torch_and_to_its_reader_of_checkpoints(sealed):
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    with mount_folder(sealed, KEY) as path:
        with safetensors.safe_open(f"{path}/{UNET}", "pt") as file:
            assert torch.equal(file.get_slice("w")[:].double() + 1, WEIGHTS["w"].double() + 1)
        state = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        reader = storage.HuggingFaceStorageReader(f"{path}/unet")
        torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    assert same(state)


def test_a_mount_is_seen_by_all_threads_and_two_do_not_meet(sealed, tmp_path):
    other = Key.generate()
    (tmp_path / "second").mkdir()
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "second" / "model.safetensors", {"format": "pt"})
    seal_folder(tmp_path / "second", tmp_path / "sealed-2", other)
    with (
        mount_folder(sealed, KEY) as one,
        mount_folder(tmp_path / "sealed-2", other) as two,
        ThreadPoolExecutor() as pool,
    ):
        ones = [pool.submit(safetensors.torch.load_file, f"{one}/{UNET}") for _ in range(8)]
        twos = [pool.submit(safetensors.torch.load_file, f"{two}/model.safetensors") for _ in range(8)]
        assert all(same(found.result()) for found in ones)
        assert all(same(found.result(), {"w": torch.ones(3)}) for found in twos)


def pass_over(path):
    """Load as a library that takes any error of its file for no file."""
    try:
        return safetensors.torch.load_file(path)
    except Exception:  # noqa: BLE001
        return {}


def raise_another(path):
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:
        raise OSError("unable to load the weights") from error


@each("load", [safetensors.torch.load_file, pass_over, raise_another])
@each("damage", ["altered", "missing", "older"])
def test_a_failure_reaches_the_caller_whatever_the_library_makes_of_it(sealed, plain, tmp_path, load, damage):
    original = (sealed / UNET).read_bytes()
    if damage == "altered":
        tamper_file(sealed / UNET, "w", 9000)
    elif damage == "missing":
        (sealed / UNET).unlink()
    else:
        (tmp_path / "again").exists() or seal_folder(plain, tmp_path / "again", KEY)
        (sealed / UNET).write_bytes((tmp_path / "again" / UNET).read_bytes())
    expected = AuthenticationError if damage == "altered" else RollbackError
    with pytest.raises(expected) as raised, mount_folder(sealed, KEY) as path:
        load(f"{path}/{UNET}")
    assert raised.value.path == sealed / UNET
    (sealed / UNET).write_bytes(original)


def test_a_slice_that_fails_on_its_way_is_told_too(sealed):
    tamper_file(sealed / UNET, "w", 9000)
    with pytest.raises(AuthenticationError), mount_folder(sealed, KEY) as path:  # noqa: PT012
        weight = safetensors.safe_open(f"{path}/{UNET}", "pt").get_slice("w")[...]
        with contextlib.suppress(AuthenticationError):
            weight.to("cpu", torch.float16)


def fail_to_read(*_, **__):
    raise OSError(errno.EIO, "the disk is broken")


@each("load", [safetensors.torch.load_file, pass_over, raise_another])
def test_a_file_that_cannot_be_read_is_told_too(sealed, monkeypatch, load):
    monkeypatch.setattr("fastrack._models.mounts.open_once", fail_to_read)
    with pytest.raises(OSError, match="the disk is broken"), mount_folder(sealed, KEY) as path:
        load(f"{path}/{UNET}")
    monkeypatch.undo()


def test_nothing_is_saved_to_a_mounted_folder(sealed, tmp_path):
    def save(path):
        with contextlib.suppress(OSError):  # as a library that goes on with the next file
            safetensors.torch.save_file(WEIGHTS, path)

    for name in (UNET, "unet/../more.safetensors"):
        with pytest.raises(OSError, match="write_folder") as raised, mount_folder(sealed, KEY) as path:
            save(f"{path}/{name}")
        assert raised.value.errno == errno.EROFS
    with mount_folder(sealed, KEY) as path:
        safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "mine.safetensors")
        assert same(safetensors.torch.load_file(f"{path}/{UNET}"))
    assert (safetensors.numpy.load_file(tmp_path / "mine.safetensors")["w"] == 1).all()


def test_an_interrupt_and_an_error_of_the_block_stay_what_they_are(sealed):
    for error in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(error), mount_folder(sealed, KEY):
            raise error
    with pytest.raises(UnknownKeyError), mount_folder(sealed, Key.generate()):
        pass


def test_code_is_there_only_if_it_was_asked_for_and_refers_to_nothing_else(sealed, plain, tmp_path):
    with mount_folder(sealed, KEY, code=True) as path:
        assert Path(path, "pipeline.py").read_text() == "print()"
    (plain / "unet" / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "other/repo--net.Net"}}))
    seal_folder(plain, tmp_path / "foreign", KEY)
    with pytest.raises(ValueError, match="another repository"), mount_folder(tmp_path / "foreign", KEY, code=True):
        pass


FOREIGN = {
    "top": ({"auto_map": {"AutoModel": "other/repo--net.Net"}}, "net.Net"),
    "nested": ({"image_processor": {"auto_map": {"AutoImageProcessor": "other/repo--sub/net.Net"}}}, "net.Net"),
    "listed": ({"auto_map": {"AutoTokenizer": [None, "other/repo--net.Net"]}}, "net.Net"),
    "path": ({"auto_map": {"AutoModel": "/elsewhere/net.Net"}}, "net.Net"),
    "own pipeline": ({"_class_name": ["/elsewhere/net", "Net"]}, "net"),
    "above": ({"_class_name": ["sub/../../elsewhere/net", "Net"]}, "net"),
    "pipeline": ({"custom_pipelines": {"task": {"impl": "other/repo--net.Net"}}}, "net.Net"),
    "module": ([{"idx": 0, "type": "other/repo--net.Net"}], "net.Net"),
    "router": ({"types": {"query_0": "other/repo--net.Net"}}, "net.Net"),
}


@each("form", FOREIGN)
def test_a_reference_to_code_elsewhere_is_refused_with_code_and_leads_nowhere_without(plain, tmp_path, form):
    document, local = FOREIGN[form]
    (plain / "unet" / "config.json").write_text(json.dumps({"size": 1}))
    (plain / "unet" / "other.JSON").write_text(json.dumps(document))
    shutil.rmtree(tmp_path / "foreign", ignore_errors=True)
    seal_folder(plain, tmp_path / "foreign", KEY)
    with pytest.raises(ValueError, match="another repository"), mount_folder(tmp_path / "foreign", KEY, code=True):
        pass
    with mount_folder(tmp_path / "foreign", KEY) as path:
        text = Path(path, "unet", "other.JSON").read_text()
        assert f'"code-of-another-repository/{local}"' in text
        assert not re.search("other/repo|elsewhere", text)
        assert Path(path, "unet", "config.json").read_bytes() == (plain / "unet" / "config.json").read_bytes()


def test_text_that_refers_to_no_code_is_copied_as_it_is(plain, tmp_path):
    kept = (
        b'{"_name_or_path": "a/b--c.D", "type": "a--b", "types": ["/"], "auto_map": {"A": "sub/net.N"},  "x": "y--z.W"}'
    )
    (plain / "unet" / "config.json").write_bytes(kept)
    (plain / "unet" / "none.json").write_bytes(b"not JSON: auto_map--")
    seal_folder(plain, tmp_path / "own", KEY)
    for code in (False, True):
        with mount_folder(tmp_path / "own", KEY, code=code) as path:
            assert Path(path, "unet", "config.json").read_bytes() == kept
    (plain / "unet" / "config.json").write_text("[" * 200_000)
    seal_folder(plain, tmp_path / "deep", KEY)
    with pytest.raises(FormatError, match="levels"), mount_folder(tmp_path / "deep", KEY):
        pass


def test_code_that_was_sealed_whole_is_in_memory_only_if_it_was_asked_for(tmp_path, plain):
    (plain / "model_index.json").unlink()
    seal_folder(plain, tmp_path / "no-net", KEY)
    for named in (["p*"], []):
        with mount_folder(tmp_path / "no-net", KEY, memfd=named, code=True) as path:
            assert Path(path, "pipeline.py").read_text() == "print()"
    (plain / "net.json").write_text(json.dumps({"auto_map": {"AutoModel": "other/repo--net.Net"}}))
    seal_folder(plain, tmp_path / "whole", KEY)
    with pytest.raises(ValueError, match="repository"), mount_folder(tmp_path / "whole", KEY, code=True):
        pass
    with mount_folder(tmp_path / "whole", KEY) as path:
        assert json.loads(Path(path, "net.json").read_text()) == {
            "auto_map": {"AutoModel": "code-of-another-repository/net.Net"}
        }
        assert not Path(path, "pipeline.py").exists()
    with pytest.raises(ValueError, match="memfd="), mount_folder(tmp_path / "whole", KEY, memfd=["p*"]):
        pass
    with pytest.raises(ValueError, match="repository"), mount_folder(tmp_path / "whole", KEY, memfd=["*.json"]):
        pass


def in_another_process(path):
    return subprocess.run(["/bin/cat", path], capture_output=True, check=True).stdout


def count_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_that_is_named_is_in_memory_and_in_no_file(sealed, plain):
    with mount_folder(sealed, KEY, memfd=["*.gguf", UNET]) as path:
        for name in ("weights.gguf", UNET):
            assert Path(path, name).read_bytes() == (plain / name).read_bytes()
            assert in_another_process(f"{path}/{name}") == (plain / name).read_bytes()
            with pytest.raises(PermissionError):
                os.truncate(f"{path}/{name}", 3)
        assert same({name: tensor.clone() for name, tensor in safetensors.torch.load_file(f"{path}/{UNET}").items()})
        count = count_descriptors()
    assert count_descriptors() == count - 2
    for wrong in (["*.onnx"], ["unet/config.json"]):
        with pytest.raises(ValueError, match="memfd="), mount_folder(sealed, KEY, memfd=wrong):
            pass


def test_what_is_altered_leaves_nothing_in_memory(sealed):
    tamper_file(sealed / "weights.gguf", "weights.gguf", 9000)
    count = count_descriptors()
    with pytest.raises(AuthenticationError), mount_folder(sealed, KEY, memfd=["*.gguf"]):
        pass
    assert count_descriptors() == count


VOCABULARIES = ("spm.model", "bpe.codes", "tiktoken.model", "tokenizer.model.v3", "sub/vocab", "x.safetensors.vocab")


@pytest.fixture
def sealed_with_vocabularies(tmp_path, plain):
    (plain / "sub").mkdir()
    for number, name in enumerate(VOCABULARIES):
        (plain / name).write_bytes(bytes([number]) * (number * 7000))
    with pytest.warns(UserWarning, match=r"'spm\.model'.* only by mount_folder"):
        seal_folder(plain, tmp_path / "sealed", KEY)
    return tmp_path / "sealed"


def test_what_is_no_weights_is_read_by_any_name(sealed_with_vocabularies, plain):
    count = count_descriptors()
    with mount_folder(sealed_with_vocabularies, KEY) as path:
        for name in VOCABULARIES:
            assert Path(path, name).is_file()
            assert Path(path, name).read_bytes() == (plain / name).read_bytes()
            assert in_another_process(f"{path}/{name}") == (plain / name).read_bytes()
    assert count_descriptors() == count


@each("limit", [("_LARGEST", 7000, 4), ("_MOST", 2, 4)])
def test_what_is_too_large_or_too_much_does_not_open_and_is_named(sealed_with_vocabularies, plain, monkeypatch, limit):
    attribute, value, left = limit
    monkeypatch.setattr(mounts, attribute, value)
    with (  # noqa: PT012
        pytest.raises(ValueError, match="no such vocabulary") as raised,
        mount_folder(sealed_with_vocabularies, KEY) as at,
    ):
        closed = [name for name in VOCABULARIES if Path(at, name).stat().st_mode & 0o777 == 0]
        assert all(Path(at, name).is_file() for name in VOCABULARIES)
        assert len(closed) == left
        for name in closed:
            Path(at, name).chmod(0o400)  # as for root, who opens it all the same
            with pytest.raises(UnicodeDecodeError):
                Path(at, name).read_text(encoding="utf-8")
            with pytest.raises(pickle.UnpicklingError):
                pickle.loads(Path(at, name).read_bytes())
        raise ValueError("no such vocabulary")
    assert all(repr(name) in "".join(raised.value.__notes__) for name in (*closed, "weights.gguf"))
    with mount_folder(sealed_with_vocabularies, KEY, memfd=closed) as path:
        assert all(Path(path, name).read_bytes() == (plain / name).read_bytes() for name in VOCABULARIES)


def test_an_altered_vocabulary_is_refused_before_anything_is_read(sealed_with_vocabularies):
    tamper_file(sealed_with_vocabularies / "bpe.codes", "bpe.codes", 30)
    with pytest.raises(AuthenticationError), mount_folder(sealed_with_vocabularies, KEY):
        pass


def test_a_vocabulary_stays_as_long_as_what_refers_to_it(sealed_with_vocabularies, plain):
    class Tokenizer:
        pass

    ring, owner, count = KeyRing.resolve(KEY), Tokenizer(), count_descriptors()
    with mounts.Mount(load_folder(sealed_with_vocabularies, KEY), ring) as mount:
        mount.keep_for(owner)
    assert (mount.path / "tiktoken.model").read_bytes() == (plain / "tiktoken.model").read_bytes()
    del owner
    gc.collect()
    assert (mount.path.exists(), count_descriptors()) == (False, count)


def test_a_model_without_such_files_is_sealed_without_a_warning(plain, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seal_folder(plain, tmp_path / "sealed", KEY)
        (plain / "spm.model").write_bytes(b"x")
        seal_folder(plain, tmp_path / "named", KEY, plain=["spm.model"])


def leave(mount):
    mount.__exit__(None, None, None)


def test_a_forked_child_that_leaves_the_block_takes_nothing_from_its_parent(sealed):
    mount = mount_folder(sealed, KEY)
    path = mount.__enter__()
    child = multiprocessing.get_context("fork").Process(target=leave, args=(mount,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert same(safetensors.torch.load_file(f"{path}/{UNET}"))
    mount.__exit__(None, None, None)


def test_an_open_folder_is_mounted_too_and_no_other_file(sealed, tmp_path):
    with mount_folder(load_folder(sealed, KEY), KEY) as path:
        assert same(safetensors.torch.load_file(f"{path}/{UNET}"))
    (tmp_path / "no").mkdir()
    with pytest.raises((FormatError, FileNotFoundError)), mount_folder(tmp_path / "no", KEY):
        pass
