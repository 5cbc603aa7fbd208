"""Sealed folders: files bound together by an index, and back to the same bytes."""

import json
import multiprocessing
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers import by_hand
from helpers.cases import each
from helpers.tampering import rewrite_file
from hypothesis import given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key, load_file, load_folder, save_file, seal_folder, unseal, unseal_folder
from fastrack._sets import folder_writer
from fastrack._sets.entries import encode
from fastrack._sets.folder import INDEX, parse_index
from fastrack.errors import AuthenticationError, FormatError, RollbackError, UnknownKeyError
from fastrack.grants import Signer

KEY = Key.from_bytes(bytes(range(32)))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
WEIGHTS = "model.safetensors.index.json"


def make_model(folder, seed=0):
    """Write a folder as `save_pretrained` does, with two shards, and files that are sealed whole."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    tensors = [
        {"embed.weight": draw.random((300, 64), np.float32), "norm.weight": draw.random(64, np.float32)},
        {"head.weight": draw.random((10, 64), np.float32), "head.bias": np.zeros(10, np.float16), "empty": np.zeros(0)},
    ]
    for name, shard in zip(SHARDS, tensors, strict=True):
        safetensors.numpy.save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, shard in zip(SHARDS, tensors, strict=True) for tensor in shard}
    (folder / WEIGHTS).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "seed": seed}))
    (folder / "tokenizer.model").write_bytes(bytes(draw.integers(0, 256, 5000, np.uint8)))
    (folder / "training_args.bin").write_bytes(bytes(draw.integers(0, 256, 40_000, np.uint8)))
    (folder / "nothing.bin").write_bytes(b"")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "graph.onnx").write_bytes(b"secret graph")
    return {name: array for shard in tensors for name, array in shard.items()}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def plain(tmp_path):
    make_model(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def sealed(plain, tmp_path):
    seal_folder(plain, tmp_path / "sealed", KEY)
    return tmp_path / "sealed"


def test_a_folder_comes_back_byte_for_byte(plain, sealed, tmp_path):
    unseal_folder(sealed, tmp_path / "back", KEY)
    assert contents(tmp_path / "back") == contents(plain)
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "back" / SHARDS[0]).stat().st_mode & 0o777 == 0o600


def test_any_layout_of_a_safetensors_file_comes_back(tmp_path):
    (tmp_path / "plain").mkdir()
    header = (
        b'{"b":{"shape":[3],"dtype":"U8","data_offsets":[0,3]},  '
        b'"a\\u0062":{"dtype":"F32","shape":[],"data_offsets":[3,7]}}   '
    )
    content = len(header).to_bytes(8, "little") + header + b"1234567"
    (tmp_path / "plain" / "odd.SAFETENSORS").write_bytes(content)
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    assert (tmp_path / "back" / "odd.SAFETENSORS").read_bytes() == content


def test_configuration_and_tokenizer_stay_and_all_else_is_sealed(plain, sealed):
    before, after = contents(plain), contents(sealed)
    same = {name for name in before if before[name] == after[name]}
    assert same == {WEIGHTS, "config.json", "tokenizer.model"}
    assert after.keys() == before.keys() | {INDEX}
    for secret in (before["training_args.bin"][:64], b"secret graph", before[SHARDS[0]][-64:]):
        assert not [name for name, content in after.items() if secret in content]


@each("name", ["weights.bin", "w.pt", "w.pth", "m.gguf", "w.npz", "data.jsonl", "a.model", "x.parquet", "json"])
def test_unknown_files_are_sealed(tmp_path, name):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / name).write_bytes(b"confidential weights")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    assert b"confidential" not in (tmp_path / "sealed" / name).read_bytes()
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    assert (tmp_path / "back" / name).read_bytes() == b"confidential weights"


def test_the_files_open_one_by_one(plain, sealed):
    folder = load_folder(sealed, KEY)
    assert folder.read("config.json") == (plain / "config.json").read_bytes()
    with folder.open("training_args.bin") as file:
        assert (
            unseal(file["training_args.bin"], KEY, framework="numpy").tobytes() == contents(plain)["training_args.bin"]
        )
    for call in (lambda: folder.read(SHARDS[0]), lambda: folder.open("config.json"), lambda: folder.read("none")):
        with pytest.raises(KeyError):
            call()
    folder.verify(KEY)


def test_the_weights_are_those_of_all_shards(tmp_path):
    arrays = make_model(tmp_path / "plain")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    weights = load_folder(tmp_path / "sealed", KEY).weights()
    assert weights.keys() == arrays.keys()
    for name, array in arrays.items():
        assert unseal(weights[name], KEY, framework="numpy").tobytes() == array.tobytes()


def one_shard(folder, **tensors):
    folder.mkdir(exist_ok=True)
    for name, content in tensors.items():
        safetensors.numpy.save_file(content, folder / f"{name.replace('__', '.')}.safetensors")


def test_the_weights_of_a_folder_without_an_index_file(tmp_path):
    one_shard(tmp_path / "plain", a={"x": np.ones(2)}, b={"y": np.ones(3)})
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    assert sorted(load_folder(tmp_path / "sealed", KEY).weights()) == ["x", "y"]


def test_the_weights_of_a_variant_and_of_a_subfolder(tmp_path):
    (tmp_path / "plain").mkdir()
    one_shard(tmp_path / "plain" / "unet", model={"x": np.ones(2)}, model__fp16={"x": np.ones(2, np.float16)})
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    folder = load_folder(tmp_path / "sealed", KEY)
    assert folder.weights("unet")["x"].dtype == "F64"
    assert folder.weights("unet", "fp16")["x"].dtype == "F16"
    for place in [("", None), ("unet", "bf16"), ("vae", None)]:
        with pytest.raises(FormatError):
            folder.weights(*place)


def test_two_files_with_one_name_of_a_tensor_are_no_model(tmp_path):
    one_shard(tmp_path / "plain", a={"x": np.ones(2)}, b={"x": np.ones(3)})
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    with pytest.raises(FormatError, match="'x'"):
        load_folder(tmp_path / "sealed", KEY).weights()


def test_an_index_file_that_names_others_is_no_model(tmp_path, monkeypatch):
    one_shard(tmp_path / "plain", a={"x": np.ones(2)})
    maps = ['{"x": "../b.safetensors"}', '{"x": "config.json"}', '{"x": 3}', '{"x": []}', "[]", "3"]
    for number, text in enumerate(["[]", "{", *(f'{{"weight_map": {weights}}}' for weights in maps)]):
        (tmp_path / "plain" / WEIGHTS).write_text(text)
        with pytest.raises(FormatError):
            seal_folder(tmp_path / "plain", tmp_path / str(number), KEY)
        with monkeypatch.context() as patch:  # as an earlier version sealed it
            patch.setattr(folder_writer, "compare_indexes", lambda *_: None)
            seal_folder(tmp_path / "plain", tmp_path / str(number), KEY)
        with pytest.raises(FormatError, match="weight_map"):
            load_folder(tmp_path / str(number), KEY).weights()


# What is refused, and by which name.


def use(folder):
    opened = load_folder(folder, KEY)
    opened.weights()
    for name in ("config.json", "tokenizer.model", WEIGHTS):
        opened.read(name)


def refused(folder, name, error=RollbackError):
    """Check that loading, verifying and unsealing refuse the folder, and name the file."""
    back = folder.parent / "made" / "back"
    calls = [lambda: load_folder(folder, KEY).verify(KEY), lambda: unseal_folder(folder, back, KEY)]
    if name not in {"training_args.bin", "onnx/graph.onnx"}:
        calls.append(lambda: use(folder))
    for call in calls:
        with pytest.raises(error, match=name) as raised:
            call()
        assert raised.value.path == folder / name
    assert not back.parent.exists()
    assert not list(folder.parent.glob(".fastrack*"))


def test_a_shard_with_another_format_is_refused(sealed):
    rewrite_file(sealed / SHARDS[0], lambda metadata, _: metadata.update(format="tf"))
    refused(sealed, SHARDS[0], AuthenticationError)


def test_a_shard_without_its_guard_is_the_same_to_the_index(sealed):
    for name in SHARDS:
        with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):
            safetensors.numpy.load_file(sealed / name)
        (sealed / name).write_bytes(by_hand.drop_guard((sealed / name).read_bytes()))
    use(sealed)


def test_weights_that_say_no_format_are_guarded_and_come_back_byte_for_byte(tmp_path):
    (tmp_path / "plain").mkdir()
    safetensors.numpy.save_file({"x": np.ones(3)}, tmp_path / "plain" / "lora.safetensors")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):
        safetensors.numpy.load_file(tmp_path / "sealed" / "lora.safetensors")
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    assert contents(tmp_path / "back") == contents(tmp_path / "plain")


def test_a_folder_with_nothing_to_seal_is_refused(tmp_path):
    (tmp_path / "plain").mkdir()
    for names, told in (([], "got none. "), (["a", "b"], "got 'a', 'b', which stay plain. ")):
        for name in names:
            (tmp_path / "plain" / name).touch()
        with pytest.raises(FormatError, match=told):
            seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY, plain=names)


def test_a_shard_of_another_seal_is_refused(plain, sealed, tmp_path):
    make_model(tmp_path / "other", seed=1)
    for source in (plain, tmp_path / "other"):  # sealed anew, and of another training
        target = tmp_path / f"again-{source.name}"
        seal_folder(source, target, KEY)
        shutil.copy(target / SHARDS[1], sealed / SHARDS[1])
        refused(sealed, SHARDS[1])


def test_one_shard_in_the_place_of_another_is_refused(sealed):
    shutil.copy(sealed / SHARDS[0], sealed / SHARDS[1])
    refused(sealed, SHARDS[1])


def test_a_missing_file_is_refused(sealed):
    for name in (SHARDS[0], "config.json", "training_args.bin"):
        (sealed / name).rename(sealed.parent / "away")
        refused(sealed, name)
        (sealed.parent / "away").rename(sealed / name)


def test_a_plain_shard_in_the_place_of_a_sealed_one_is_refused(plain, sealed):
    shutil.copy(plain / SHARDS[0], sealed / SHARDS[0])
    refused(sealed, SHARDS[0])


def test_an_altered_configuration_is_refused_before_it_is_used(sealed):
    for name in ("config.json", "tokenizer.model", WEIGHTS):
        content = (sealed / name).read_bytes()
        for other in (content[:-1] + b"x", content + b" ", content[:-1], b""):
            (sealed / name).write_bytes(other)
            refused(sealed, name, AuthenticationError)
        (sealed / name).write_bytes(content)


def test_an_altered_chunk_is_refused(sealed):
    path = sealed / "training_args.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))  # never as it was
    refused(sealed, "training_args.bin", AuthenticationError)


def test_a_foreign_file_is_told_by_verify_alone(sealed, tmp_path):
    (sealed / "generate.py").write_text("print()")
    use(sealed)
    with pytest.raises(RollbackError, match="generate"):
        load_folder(sealed, KEY).verify(KEY)
    unseal_folder(sealed, tmp_path / "back", KEY)
    assert not (tmp_path / "back" / "generate.py").exists()


def test_verify_names_all_that_are_bad(sealed):
    (sealed / "config.json").write_text("{}")
    (sealed / SHARDS[1]).unlink()
    with pytest.raises(AuthenticationError, match="config") as raised:
        load_folder(sealed, KEY).verify(KEY)
    assert SHARDS[1] in "".join(raised.value.__notes__)


def test_every_altered_byte_of_the_index_is_refused(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.bin").write_bytes(b"x")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    index = tmp_path / "sealed" / INDEX
    content = index.read_bytes()
    for place in range(len(content)):
        index.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises((AuthenticationError, FormatError, UnknownKeyError)):
            load_folder(tmp_path / "sealed", KEY)


def test_another_key_does_not_open_the_index(sealed):
    with pytest.raises(UnknownKeyError):
        load_folder(sealed, Key.generate())


def test_an_ordinary_sealed_file_is_no_index(sealed):
    with load_file(sealed / INDEX) as file:
        document = unseal(file["files"], KEY, framework="numpy")
    save_file({"files": document}, sealed / INDEX, KEY)
    with pytest.raises(FormatError, match="index"):
        load_folder(sealed, KEY)
    tamper_kind(sealed / INDEX)
    with pytest.raises(AuthenticationError):
        load_folder(sealed, KEY)


def tamper_kind(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["fastrack.kind"] = "folder"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(format=2),
        lambda document: document.update(more=1),
        lambda document: document["files"].update({"../config.json": document["files"]["config.json"]}),
        lambda document: document["files"].update({"/etc/config.json": document["files"]["config.json"]}),
        lambda document: document["files"]["config.json"].update(size=-1),
        lambda document: document["files"].update({"config.json": []}),
        lambda document: document.update(files=[]),
    ],
)
def test_an_index_that_its_owner_made_wrong_is_refused(plain, tmp_path, monkeypatch, change):
    encode = folder_writer.encode

    def wrong(document):
        change(document)
        return encode(document)

    monkeypatch.setattr(folder_writer, "encode", wrong)
    seal_folder(plain, tmp_path / "sealed", KEY)
    with pytest.raises(FormatError, match=INDEX):
        load_folder(tmp_path / "sealed", KEY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENTRY = {"sha256": "0" * 64, "size": 1}


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        JSON.map(lambda value: json.dumps(value).encode()),
        JSON.map(lambda value: encode({"files": value, "format": 1})),
        JSON.map(lambda value: encode({"files": {"a": value}, "format": 1})),
        st.text(max_size=9).map(lambda name: encode({"files": {name: ENTRY}, "format": 1})),
    )
)
@pytest.mark.slow
def test_an_index_of_any_content_is_parsed_or_refused(content):
    try:
        entries = parse_index(content, Path("folder"))
    except FormatError:
        return
    assert all(isinstance(name, str) and ".." not in name.split("/") and name[:1] != "/" for name in entries)


def test_a_folder_that_is_not_sealed_is_told(plain, tmp_path):
    with pytest.raises(FileNotFoundError, match=INDEX):
        load_folder(plain, KEY)
    with pytest.raises(OSError, match="none"):
        load_folder(tmp_path / "none", KEY)


# Anchors.


def test_an_older_folder_is_refused_with_an_anchor(plain, sealed, tmp_path):
    owner = Signer.generate()
    fastrack.publish(sealed, signer=owner)
    anchor = tmp_path / "model.anchor"
    fastrack.Anchor.create(anchor, owner=owner.verifier)
    load_folder(sealed, KEY, anchor=anchor).verify(KEY)
    fastrack.Anchor(anchor).verify(sealed)
    old = contents(sealed)
    new = tmp_path / "new"
    seal_folder(plain, new, KEY)
    shutil.copy(sealed / "fastrack.manifest", new)
    fastrack.publish(new, signer=owner)
    opened = load_folder(new, KEY, anchor=anchor)
    unseal_folder(new, tmp_path / "back", KEY, anchor=anchor)
    assert contents(tmp_path / "back") == contents(plain)
    for open_it in (load_folder, lambda *given, **options: unseal_folder(given[0], tmp_path / "older", KEY, **options)):
        with pytest.raises(RollbackError, match="older"):
            open_it(sealed, KEY, anchor=anchor)
    assert not (tmp_path / "older").exists()
    with pytest.raises(ValueError, match="load_folder"):
        unseal_folder(opened, tmp_path / "older", KEY, anchor=anchor)
    (new / INDEX).write_bytes(old[INDEX])
    with pytest.raises(RollbackError, match=INDEX):
        load_folder(new, KEY, anchor=anchor)


# Writing.


def test_nothing_is_replaced(plain, sealed, tmp_path):
    before = contents(sealed)
    (tmp_path / "file").write_text("")
    for target in (sealed, tmp_path / "file", tmp_path):
        with pytest.raises(FileExistsError):
            seal_folder(plain, target, KEY)
        with pytest.raises(FileExistsError):
            unseal_folder(sealed, target, KEY)
    assert contents(sealed) == before


@each("files", [{}, {INDEX: b""}, {"a.safetensors": b"x"}, {"a\\b.bin": b""}, {b"\xff.bin": b""}], ids=str)
def test_what_cannot_be_sealed_leaves_nothing(tmp_path, files):
    (tmp_path / "plain").mkdir()
    for name, content in files.items():
        Path(os.fsdecode(os.fsencode(tmp_path / "plain") + b"/" + os.fsencode(name))).write_bytes(content)
    with pytest.raises(FormatError):
        seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_links_inside_a_folder_are_followed_and_others_refused_before_anything_is_written(tmp_path):
    one_shard(tmp_path / "blobs", a={"x": np.ones(2)})
    one_shard(tmp_path / "plain", a={"x": np.ones(3)})
    (tmp_path / "plain" / "more").mkdir()
    (tmp_path / "plain" / "more" / "b.safetensors").symlink_to("../a.safetensors")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    content = contents(tmp_path / "plain")["a.safetensors"]
    assert contents(tmp_path / "back") == {"a.safetensors": content, "more/b.safetensors": content}
    for number, target in enumerate(["../blobs/a.safetensors", "../blobs", tmp_path / "blobs" / "a.safetensors"]):
        link = tmp_path / "plain" / f"link{number}.txt"
        link.symlink_to(target)
        with pytest.raises(FormatError, match=f"link{number}"):
            seal_folder(tmp_path / "plain", tmp_path / "again", KEY, plain=["*.txt"])
        link.unlink()
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("model", [("config.json", "model.safetensors"), ("adapter_config.json", "adapter_model.bin")])
def test_only_the_folder_of_a_model_keeps_files_readable(tmp_path, model):
    def readable(*names):
        (tmp_path / "plain").mkdir()
        for name in names:
            path = tmp_path / "plain" / name
            path.parent.mkdir(exist_ok=True)
            content = {"x": np.ones(1)}
            safetensors.numpy.save_file(content, path) if path.suffix == ".safetensors" else path.write_bytes(b"secret")
            if name == WEIGHTS:
                path.write_text(json.dumps({"weight_map": {"x": names[0]}}))
        seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
        names = load_folder(tmp_path / "sealed", KEY).plain_names
        shutil.rmtree(tmp_path / "plain")
        shutil.rmtree(tmp_path / "sealed")
        return names

    configuration, weights = model
    patients = ["patients.json", "notes.txt", "a.md", "b.yaml", "C.TXT", "README"]
    assert readable(*patients) == []
    assert readable(configuration, *patients) == []
    assert readable(configuration, "scans.safetensors", "x.bin", *patients) == []
    assert readable(weights, *patients) == []
    assert readable("model-1.safetensors", "model.safetensors.index.json", *patients) == [
        "model.safetensors.index.json"
    ]
    assert readable("a.safetensors", "model.safetensors.index.json", "a.index.json") == []
    assert readable(configuration, weights, "notes.txt") == [configuration, "notes.txt"]
    inner = [f"sub/{configuration}", f"sub/{weights}", "sub/vocab.txt"]
    assert readable(*inner, *patients) == [inner[0], inner[2]]
    assert readable(*inner, configuration, *patients) == [inner[0], inner[2]]
    assert readable(*inner, "model_index.json") == ["model_index.json", inner[0], inner[2]]


def test_a_link_makes_nothing_readable_that_is_sealed(plain, tmp_path):
    (plain / "vocab.txt").symlink_to("training_args.bin")
    (plain / "more.json").symlink_to("config.json")
    for number, (globs, expected) in enumerate({(): False, ("*.txt", "*.json"): False, ("vocab.txt",): True}.items()):
        (plain / "notes.txt").write_text("x")
        with nullcontext() if expected else pytest.warns(UserWarning, match="find 'vocab.txt' only by mount_folder"):
            seal_folder(plain, tmp_path / str(number), KEY, plain=globs)
        names = load_folder(tmp_path / str(number), KEY).plain_names
        assert ("vocab.txt" in names, "more.json" in names) == (expected, True), globs


def test_what_stays_plain_is_named(tmp_path):
    (tmp_path / "plain" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "sub/a.txt", "c.csv", "*.txt"):
        (tmp_path / "plain" / name).write_bytes(b"x")
    cases = {
        ("a.txt",): ["a.txt"],
        ("s*/*",): ["sub/a.txt"],
        ("*.csv", "b.txt"): ["b.txt", "c.csv"],
        ("*.txt",): ["*.txt"],
    }
    for number, (patterns, expected) in enumerate(cases.items()):
        seal_folder(tmp_path / "plain", tmp_path / str(number), KEY, plain=patterns)
        assert load_folder(tmp_path / str(number), KEY).plain_names == expected
        unseal_folder(tmp_path / str(number), tmp_path / f"back-{number}", KEY)
        assert contents(tmp_path / f"back-{number}") == contents(tmp_path / "plain")
    for wrong in (["nope*"], ["a.txt", "A.TXT"]):
        with pytest.raises(ValueError, match="plain="):
            seal_folder(tmp_path / "plain", tmp_path / "wrong", KEY, plain=wrong)
    with pytest.raises(TypeError, match="plain="):
        seal_folder(tmp_path / "plain", tmp_path / "wrong", KEY, plain="a.txt")
    assert not (tmp_path / "wrong").exists()


def test_a_source_that_changes_meanwhile_is_refused(plain, tmp_path, monkeypatch):
    def change(path, *arguments, **options):
        one_shard(plain, **{path.stem: {"other": np.ones(2)}})
        return open_plain(path, *arguments, **options)

    open_plain = folder_writer.open_plain
    monkeypatch.setattr(folder_writer, "open_plain", change)
    with pytest.raises(FormatError, match="changed"):
        seal_folder(plain, tmp_path / "sealed", KEY)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_progress_counts_all_bytes(plain, sealed, tmp_path):
    total = load_folder(sealed, KEY).nbytes
    for call in (
        lambda add: seal_folder(plain, tmp_path / "again", KEY, progress=add),
        lambda add: unseal_folder(sealed, tmp_path / "back", KEY, progress=add),
        lambda add: load_folder(sealed, KEY).verify(KEY, progress=add),
    ):
        done = []
        call(done.append)
        assert sum(done) == total


def _seal_for_ever(source, folder):
    for number in range(10_000):
        seal_folder(source, folder / str(number), KEY)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_process_leaves_no_half_of_a_folder(plain, tmp_path):
    for delay in (0, 2, 5, 9, 14):
        made = tmp_path / f"made-{delay}"
        made.mkdir()
        process = multiprocessing.get_context("fork").Process(target=_seal_for_ever, args=(plain, made))
        process.start()
        while not list(made.iterdir()):
            time.sleep(0.001)
        time.sleep(delay / 1000)
        process.kill()
        process.join()
        for path in made.iterdir():
            if not path.name.startswith(".fastrack-"):
                load_folder(path, KEY).verify(KEY)


def test_a_folder_is_unsealed_below_folders_that_are_made(tmp_path):
    key = Key.generate()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "optimizer.pt").write_text("1")
    fastrack.seal_folder(tmp_path / "run", tmp_path / "sealed", key)
    fastrack.unseal_folder(tmp_path / "sealed", tmp_path / "new" / "run" / "checkpoint-100", key)
    assert (tmp_path / "new" / "run" / "checkpoint-100" / "optimizer.pt").read_text() == "1"


def test_an_empty_path_is_not_the_current_folder(plain, monkeypatch):
    monkeypatch.chdir(plain)
    before = sorted(plain.rglob("*"))
    signer = Signer.generate()
    for call in (
        lambda: fastrack.seal_folder("", plain.with_name("out"), KEY),
        lambda: fastrack.seal_folder(plain, "", KEY),
        lambda: fastrack.publish("", signer=signer),
        lambda: fastrack.load_folder("", KEY),
        lambda: fastrack.load_file(""),
        lambda: fastrack.SealedDataset("", keys=KEY),
        lambda: fastrack.import_samples("", plain.with_name("out"), KEY),
        lambda: fastrack.unseal_folder(plain, "", KEY),
    ):
        with pytest.raises(ValueError, match="got an empty text"):
            call()
    assert sorted(plain.rglob("*")) == before
    assert not plain.with_name("out").exists()
