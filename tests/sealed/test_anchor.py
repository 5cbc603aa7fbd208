"""Anchors and `publish`: what a reader who remembers a version accepts, and what an owner signs."""

import multiprocessing
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest
from helpers import file_ids
from helpers.cases import each

import fastrack
from fastrack import Anchor, AuthenticationError, FormatError, Key, KeyPermissionError, RollbackError, SignatureError
from fastrack._sets import anchor as anchors
from fastrack.grants import Signer

KEY = Key.from_bytes(bytes(range(32)))
OWNER, OTHER = Signer.generate(name="owner"), Signer.generate()
NAME, MANIFEST = "data.safetensors", "data.safetensors.manifest"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def anchor():
    Anchor.create("reader.anchor", owner=OWNER.verifier)
    return "reader.anchor"


def publish(value, signer=OWNER, **options):
    fastrack.save_file({"x": np.full(20_000, value), "open": np.full(3, value)}, NAME, KEY, plain=["open"])
    return fastrack.publish(NAME, signer=signer, **options)


def opened(anchor, **options):
    with fastrack.load_file(NAME, anchor=anchor, **options) as file:
        return int(fastrack.unseal(file["x"], KEY, framework="numpy")[-1])


class Kept:
    """The bytes of the files of a version, to be put back."""

    def __init__(self, *names):
        self.data = {name: Path(name).read_bytes() for name in names or (NAME, MANIFEST)}

    def put_back(self, *names):
        for name in names or self.data:
            Path(name).write_bytes(self.data[name])


# Going forward, and not back


def test_an_anchor_follows_its_owner(anchor):
    for version in (1, 2, 3):
        assert publish(version).version == version
        assert opened(anchor) == version
        assert Anchor(anchor).version == version
    assert repr(Anchor(anchor)).startswith("<Anchor 'reader.anchor': version 3 of lineage ")


def test_an_older_file_an_older_manifest_and_both_are_refused(anchor):
    publish(1)
    first = Kept()
    publish(2)
    second = Kept()
    assert opened(anchor) == 2
    before = Path(anchor).read_bytes()
    first.put_back(NAME)
    with pytest.raises(RollbackError, match="file id") as caught:
        opened(anchor)
    assert caught.value.path.name == NAME
    first.put_back()
    with pytest.raises(RollbackError, match="version 2 or later, got version 1") as caught:
        opened(anchor)
    assert caught.value.path.name == MANIFEST
    second.put_back(NAME)
    with pytest.raises(RollbackError):
        opened(anchor)
    assert Path(anchor).read_bytes() == before
    second.put_back()
    assert opened(anchor) == 2


def test_a_fork_is_refused_at_once_and_after_many_versions(anchor):
    publish(1)
    first = Kept()
    publish(2)
    assert opened(anchor) == 2
    first.put_back()
    publish(3)
    with pytest.raises(RollbackError, match="it is forked"):
        opened(anchor)
    for value in range(4, 7):
        publish(value)
        with pytest.raises(RollbackError, match="it is forked"):
            opened(anchor)


def test_an_anchor_that_is_far_behind_needs_a_version_between(anchor, limited):
    limited(history=3)
    publish(1)
    assert opened(anchor) == 1
    for value in (2, 3, 4):
        publish(value)
    between = Kept()
    publish(5)
    last = Kept()
    with pytest.raises(RollbackError, match="whether it follows cannot be told"):
        opened(anchor)
    between.put_back()
    assert opened(anchor) == 4
    last.put_back()
    assert opened(anchor) == 5


def test_another_set_of_the_owner_and_a_set_of_another_owner_are_refused(anchor):
    publish(1)
    assert opened(anchor) == 1
    Path(MANIFEST).unlink()
    publish(2)
    with pytest.raises(RollbackError, match="it is of another set"):
        opened(anchor)
    Path(MANIFEST).unlink()
    publish(2, signer=OTHER)
    with pytest.raises(SignatureError, match=OWNER.verifier.id):
        opened(anchor)


def test_what_is_missing_is_told(anchor):
    with pytest.raises(FileNotFoundError, match="no such manifest"):
        opened(anchor)
    publish(1)
    with pytest.raises(FileNotFoundError, match=r"no such anchor.*no\.anchor"):
        opened("no.anchor")
    Path(NAME).unlink()
    with pytest.raises(FileNotFoundError, match=NAME):
        opened(anchor)
    assert Anchor(anchor).version == 0


def test_a_new_anchor_may_know_lineage_and_least_version():
    manifest = publish(1)
    Anchor.create("a", owner=OWNER.verifier, lineage=manifest.lineage, least_version=1)
    assert opened("a") == 1
    Anchor.create("b", owner=OWNER.verifier, lineage="0" * 32)
    with pytest.raises(RollbackError, match="another set"):
        opened("b")
    Anchor.create("c", owner=OWNER.verifier, least_version=2)
    with pytest.raises(RollbackError, match="version 2 or later"):
        opened("c")


def test_an_object_stays_at_its_version(anchor):
    publish(1)
    held = Anchor(anchor)
    assert opened(held) == 1
    publish(2)
    with pytest.raises(RollbackError, match="version 1 of"):
        opened(held)
    assert opened(Anchor(anchor)) == 2
    assert (held.version, Anchor(anchor).version) == (1, 2)


def test_an_older_object_does_not_move_the_anchor_back(anchor):
    publish(1)
    first, held = Kept(), Anchor(anchor)
    assert opened(held) == 1
    publish(2)
    assert opened(anchor) == 2
    first.put_back()
    assert opened(held) == 1  # of the version that it had, which was the newest
    assert Anchor(anchor).version == 2
    with pytest.raises(RollbackError):
        opened(anchor)


def test_an_object_notices_that_another_process_has_moved_the_anchor(anchor):
    publish(1)
    first, early = Kept(), Anchor(anchor)
    publish(2)
    assert opened(anchor) == 2
    first.put_back()
    with pytest.raises(RollbackError, match="version 2 or later"):
        opened(early)


def test_an_anchor_that_is_replaced_while_it_is_in_use_is_refused(anchor):
    publish(1)
    held = Anchor(anchor)
    Path(anchor).unlink()
    Anchor.create(anchor, owner=OTHER.verifier)
    with pytest.raises(RollbackError, match="replaced while it was in use"):
        opened(held)


def open_many(folder, anchor, barrier):
    os.chdir(folder)
    barrier.wait()
    for _ in range(5):
        opened(anchor)


def test_processes_that_open_at_once_leave_the_newest_version(anchor, folder):
    publish(1)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    readers = [context.Process(target=open_many, args=(folder, anchor, barrier)) for _ in range(3)]
    for reader in readers:
        reader.start()
    barrier.wait()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert Anchor(anchor).version == 1
    assert sorted(path.name for path in Path().iterdir()) == [NAME, MANIFEST, anchor]


def test_a_lock_waits_for_the_file_that_has_the_name_by_then(anchor):
    with anchors._locked(Anchor(anchor).path) as file:
        assert os.path.samestat(os.fstat(file.fileno()), Path(anchor).stat())


# The file


def test_the_anchor_file_is_of_one_form(anchor):
    assert stat.S_IMODE(Path(anchor).stat().st_mode) == 0o600
    publish(1)
    opened(anchor)
    assert stat.S_IMODE(Path(anchor).stat().st_mode) == 0o600
    content = Path(anchor).read_bytes()
    for other in [
        b"",
        b"[]",
        content[:-1],
        content + b"\n",
        content.replace(b":1,", b":1.0,"),
        content.replace(b'"version":1', b'"version":-1'),
        content.replace(b'"version":1', b'"version":true'),
        content.replace(b'"lineage":"', b'"lineage":"0'),
        content.replace(b'"digest":"', b'"digest":"G'),
        content.replace(b'"lineage":"' + Anchor(anchor).lineage.encode() + b'"', b'"lineage":null'),
        content.replace(b'"anchor":1', b'"anchor":2'),
        content.replace(b"Ed25519", b"Ed448"),
        content.replace(b'"anchor":1', b'"anchor":1,"anchor":1'),
    ]:
        assert other != content
        Path(anchor).write_bytes(other)
        with pytest.raises(FormatError, match=r"reader\.anchor"):
            Anchor(anchor)


def test_an_anchor_that_others_may_write_to_is_refused(anchor):
    Path(anchor).chmod(0o644)
    Anchor(anchor)
    for mode in (0o666, 0o646):
        Path(anchor).chmod(mode)
        with pytest.raises(KeyPermissionError, match="go-w"):
            Anchor(anchor)


def test_no_anchor_is_made_over_another(anchor):
    with pytest.raises(FileExistsError):
        Anchor.create(anchor, owner=OWNER.verifier)


def test_a_post_quantum_owner_has_an_anchor():
    owner = Signer.generate("ML-DSA-65")
    Anchor.create("a", owner=owner.verifier)
    publish(1, signer=owner)
    assert opened("a") == 1
    assert Anchor("a").owner == owner.verifier


# All that opens takes an anchor


def resaved(tensor):
    fastrack.save_file({"x": tensor}, "copy.safetensors", KEY)
    return fastrack.load_file("copy.safetensors")["x"]


def test_a_file_that_is_altered_in_place_after_it_was_opened_does_not_open(anchor):
    """A header is pinned: what is read later has to be under the message key that follows from it."""
    publish(1)
    old = Path(NAME).read_bytes()
    with fastrack.load_file(NAME) as file:
        file_id = file.file_id
    with pytest.MonkeyPatch.context() as patch:
        file_ids.fix(patch, file_id)
        publish(2)  # under the same contexts
    with fastrack.load_file(NAME, anchor=anchor) as file:
        tensor, rows = file["x"], file["x"][:3]
        assert len({int(fastrack.unseal(one, KEY)[0]) for one in (tensor, resaved(tensor))}) == 1
        with Path(NAME).open("r+b") as out:  # an older message, which is genuine too
            out.write(old)
        for attempt in (
            lambda: fastrack.unseal(tensor, KEY),
            lambda: fastrack.unseal(rows, KEY),
            lambda: fastrack.to_device(tensor, keys=KEY, framework="numpy"),
            lambda: fastrack.to_device([rows, tensor], keys=KEY, framework="numpy"),
            lambda: fastrack.unseal(pickle.loads(pickle.dumps(tensor)), KEY),
            lambda: fastrack.verify_file(file, KEY),
            lambda: fastrack.unseal(fastrack.SealedTensor.from_bytes(tensor.to_bytes()), KEY),
            lambda: fastrack.unseal(resaved(tensor), KEY),
        ):
            with pytest.raises(AuthenticationError):
                attempt()
        with pytest.raises(AuthenticationError, match="'open'"):
            _ = file.plain["open"]
        out = np.empty(20_000, np.int64)
        with pytest.raises(AuthenticationError):
            fastrack.to_device(file["x"], keys=KEY, out=out)
        assert not out.any()


def test_a_plain_tensor_is_a_copy_of_its_own(anchor):
    publish(1)
    with fastrack.load_file(NAME, anchor=anchor) as file:
        array = file.plain["open"]
        with Path(NAME).open("r+b") as out:
            out.write(bytes(Path(NAME).stat().st_size))
        assert array.tolist() == [1, 1, 1]
        assert not array.flags.writeable


def test_a_pickled_file_keeps_its_entry(anchor):
    publish(1)
    with fastrack.load_file(NAME, anchor=anchor) as file:
        data = pickle.dumps(file)
    assert int(fastrack.unseal(pickle.loads(data)["x"], KEY)[0]) == 1
    publish(2)
    with pytest.raises(RollbackError, match="file id"):
        pickle.loads(data)


def test_a_file_that_is_not_mapped_has_an_anchor_as_well(anchor):
    publish(1)
    assert opened(anchor, mapped=False) == 1


def test_copies_of_an_anchored_file_hold_what_was_authenticated(anchor):
    publish(1)
    with fastrack.load_file(NAME, anchor=anchor) as file:
        fastrack.unseal_file(file, "plain.safetensors", KEY, plain=["open"])
        fastrack.rekey_file(file, "other.safetensors", KEY, key=Key.generate(), plain=["open"])
        with Path(NAME).open("r+b") as out:
            out.write(Path(NAME).read_bytes().replace(np.full(3, 1).tobytes(), np.full(3, 7).tobytes()))
        for copy in (
            lambda: fastrack.unseal_file(file, "again", KEY, names=["open"], plain=["open"]),
            lambda: fastrack.rekey_file(file, "again", KEY, key=KEY, plain=["open"]),
        ):
            with pytest.raises((AuthenticationError, FormatError)):
                copy()
        assert not Path("again").exists()


def test_a_data_set_takes_one_version_of_all_its_files(anchor):
    def save(value):
        for shard in range(3):
            fastrack.save_file({"x": np.full(4, value)}, f"shards/{shard}.safetensors", KEY)
        return fastrack.publish("shards", signer=OWNER)

    Path("shards").mkdir()
    paths = [f"shards/{shard}.safetensors" for shard in range(3)]
    save(1)
    first = Kept(*paths, "shards/fastrack.manifest")
    data = fastrack.SealedDataset(paths, keys=KEY, anchor=anchor)
    stored = pickle.dumps(data)
    assert len(pickle.loads(stored)) == 12
    save(2)
    first.put_back(paths[1])
    with pytest.raises(RollbackError, match=r"shards/1\.safetensors"):
        fastrack.SealedDataset(paths, keys=KEY, anchor=anchor)
    with pytest.raises(RollbackError, match=r"shards/1\.safetensors"):
        fastrack.SealedDataset(paths[:2], anchor=anchor)
    assert Anchor(anchor).version == 1
    del data
    with pytest.raises(RollbackError):
        fastrack.unseal(pickle.loads(stored)[0]["x"], KEY)
    save(3)
    assert fastrack.unseal(fastrack.SealedDataset(paths, keys=KEY, anchor=anchor)[5]["x"], KEY, framework="numpy") == 3


RECORDS = {"data": np.arange(6), "offsets": np.array([0, 2, 6])}


@each(
    ("write", "open_it"),
    [
        (lambda: fastrack.save_file(RECORDS, NAME, KEY), fastrack.SealedDataset.records),
        (lambda: fastrack.save_file(RECORDS, NAME, KEY), fastrack.load_tensors),
        (lambda: fastrack.save_file(RECORDS, NAME, KEY), fastrack.safe_open),
        (lambda: fastrack.save_checkpoint(NAME, {"step": 1}, key=KEY), fastrack.load_checkpoint),
    ],
)
def test_whatever_opens_a_file_takes_an_anchor(anchor, write, open_it):
    kept = []
    for _ in range(2):
        write()
        fastrack.publish(NAME, signer=OWNER)
        assert open_it(NAME, keys=KEY, anchor=anchor)
        kept.append(Kept())
    kept[0].put_back()
    with pytest.raises(RollbackError):
        open_it(NAME, keys=KEY, anchor=anchor)
    kept[1].put_back()  # which the next version follows


def test_a_model_takes_an_anchor_and_keeps_its_weights_if_it_is_refused(anchor):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    fastrack.save_model(model, NAME, key=KEY)
    fastrack.publish(NAME, signer=OWNER)
    kept = Kept()
    fastrack.save_model(torch.nn.Linear(3, 2), NAME, key=KEY)
    fastrack.publish(NAME, signer=OWNER)
    fastrack.load_model(model, NAME, keys=KEY, anchor=anchor)
    before = model.weight.clone()
    kept.put_back()
    with pytest.raises(RollbackError):
        fastrack.load_model(model, NAME, keys=KEY, anchor=anchor)
    assert torch.equal(model.weight, before)


def test_a_configuration_is_read_through_an_anchor(anchor):
    Path("set").mkdir()
    fastrack.save_file({"x": np.arange(3)}, f"set/{NAME}", KEY)
    Path("set/config.json").write_text("{}")
    fastrack.publish("set", signer=OWNER)
    assert Anchor(anchor).read("set/config.json") == b"{}"
    assert Anchor(anchor).version == 1
    with pytest.raises(RollbackError, match="lists as sealed"):
        Anchor(anchor).read(f"set/{NAME}")
    with pytest.raises(RollbackError, match="having nothing sealed"):
        fastrack.load_file("set/config.json", anchor=anchor)
    for content in ("[]", "{} "):
        Path("set/config.json").write_text(content)
        with pytest.raises(AuthenticationError, match=r"set/config\.json: expected 2 bytes"):
            Anchor(anchor).read("set/config.json")


# Where manifests are


def test_the_manifest_beside_a_file_comes_before_that_of_a_folder_above(anchor):
    Path("set/sub").mkdir(parents=True)
    fastrack.save_file({"x": np.arange(3)}, f"set/sub/{NAME}", KEY)
    fastrack.publish("set", signer=OWNER)
    with fastrack.load_file(f"set/sub/{NAME}", anchor=anchor) as file:
        assert list(file) == ["x"]
    fastrack.publish(f"set/sub/{NAME}", signer=OTHER)
    with pytest.raises(SignatureError):
        fastrack.load_file(f"set/sub/{NAME}", anchor=anchor)
    held = Anchor(anchor, manifest="set/fastrack.manifest")
    assert fastrack.load_file(f"set/sub/{NAME}", anchor=held)


def test_a_link_to_a_file_is_known_by_its_own_name(anchor):
    Path("blobs").mkdir(parents=True)
    Path("set").mkdir()
    fastrack.save_file({"x": np.arange(3)}, "blobs/0", KEY)
    Path(f"set/{NAME}").symlink_to("../blobs/0")
    assert list(fastrack.publish("set", signer=OWNER).files) == [NAME]
    assert fastrack.load_file(f"set/{NAME}", anchor=anchor)


# What an owner signs


def test_files_are_published_with_a_manifest_of_their_own():
    for name in "ab":
        fastrack.save_file({"x": np.arange(3)}, f"{name}.sealed", KEY)
    manifest = fastrack.publish(["a.sealed", "b.sealed"], signer=OWNER, manifest="ab.manifest")
    assert list(manifest.files) == ["a.sealed", "b.sealed"]
    assert {entry.kind for entry in manifest.files.values()} == {"tensor"}


def test_an_empty_folder_and_an_unsafe_name_are_refused():
    Path("set").mkdir()
    with pytest.raises(ValueError, match="expected a file, got none"):
        fastrack.publish("set", signer=OWNER)
    Path("set/a\nb").touch()
    with pytest.raises(ValueError, match="without control characters"):
        fastrack.publish("set", signer=OWNER)
    Path("set/a\nb").rename("set/a")
    Path("set/loop").symlink_to(".")
    with pytest.raises(FormatError, match="no link to a folder"):
        fastrack.publish("set", signer=OWNER)


def test_a_damaged_sealed_file_is_not_published():
    publish(1)
    with Path(NAME).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(FormatError):
        fastrack.publish(NAME, signer=OWNER)
    assert fastrack.load_manifest(MANIFEST, owner=OWNER.verifier).version == 1


def test_the_next_version_needs_the_same_signer():
    publish(1)
    with pytest.raises(SignatureError):
        publish(2, signer=OTHER)


def test_an_owner_with_an_anchor_does_not_publish_from_an_older_version():
    Anchor.create("owner.anchor", owner=OWNER.verifier)
    publish(1, anchor="owner.anchor")
    first = Kept()
    assert publish(2, anchor="owner.anchor").version == 2
    assert Anchor("owner.anchor").version == 2
    first.put_back()
    with pytest.raises(RollbackError, match="older"):
        publish(3, anchor="owner.anchor")
    Path(MANIFEST).unlink()
    with pytest.raises(RollbackError, match="got no manifest"):
        publish(3, anchor="owner.anchor")
    with pytest.raises(ValueError, match="expected an anchor of"):
        publish(3, signer=OTHER, anchor="owner.anchor")


def test_a_new_set_takes_the_lineage_of_its_anchor():
    Anchor.create("owner.anchor", owner=OWNER.verifier, lineage="5" * 32)
    assert publish(1, anchor="owner.anchor").lineage == "5" * 32


# A manifest that storage moves to another folder of its set


@pytest.fixture
def run():
    """Return a folder as of a trainer: the same names in it and in a folder below it."""
    for folder, value in (("run", 1), ("run/step", 2)):
        Path(folder).mkdir()
        fastrack.save_file({"x": np.full((4, 1), value)}, f"{folder}/{NAME}", KEY)
        Path(folder, "config.json").write_text(str(value))
    fastrack.save_file({"x": np.full((4, 1), 3)}, "run/step/last.safetensors", KEY)
    fastrack.publish("run", signer=OWNER)
    return Path("run")


@pytest.mark.parametrize("place", ["fastrack.manifest", MANIFEST])
def test_a_manifest_that_is_moved_into_a_folder_of_its_set_renames_no_file(run, anchor, place):
    def content(path, **options):
        with fastrack.load_file(path, anchor=Anchor(anchor, **options)) as file:
            return int(fastrack.unseal(file["x"], KEY, framework="numpy")[0, 0])

    assert (content(run / NAME), content(run / "step" / NAME)) == (1, 2)
    (run / "step" / place).write_bytes((run / "fastrack.manifest").read_bytes())
    for name in (NAME, "config.json"):
        (run / "step" / name).write_bytes((run / name).read_bytes())
    with pytest.raises(RollbackError, match=f"'step/{NAME}'.*it was moved"):
        content(run / "step" / NAME)
    with pytest.raises(RollbackError):
        content(run / "step" / NAME, manifest=run / "fastrack.manifest")
    if place == "fastrack.manifest":
        with pytest.raises(RollbackError, match="it was moved"):
            Anchor(anchor).read(run / "step" / "config.json")
        with pytest.raises(RollbackError, match="it was moved"):
            fastrack.SealedDataset(run / "step", anchor=anchor)
    assert content(run / NAME) == 1


def test_a_manifest_that_is_moved_does_not_make_one_folder_another(run, anchor):
    fastrack.save_file({"x": np.full((4, 1), 4)}, "run/root.safetensors", KEY)
    fastrack.publish("run", signer=OWNER)
    (run / "step" / "fastrack.manifest").write_bytes((run / "fastrack.manifest").read_bytes())
    (run / "root.safetensors").rename(run / "step" / "root.safetensors")  # a name that is only in the other folder
    for name in (NAME, "last.safetensors"):
        (run / "step" / name).unlink()
    with pytest.raises(RollbackError, match=r"'step'.*it was moved"):
        fastrack.SealedDataset(run / "step", anchor=anchor)
