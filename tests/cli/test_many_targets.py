"""Sealing and unsealing several files in one call, and on standard input and output."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers.cases import each
from helpers.commands import invoke
from helpers.tampering import flip_byte

from fastrack import Key, load_file, save_file, unseal
from fastrack.format import CHUNK_SIZE

MIXED = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4), "a": np.ones(5, np.uint8)}


@pytest.fixture
def tree(key, folder):  # noqa: ARG001 - makes the key
    """A folder of plain files of each kind, some in a folder below it."""
    tree = folder / "plain"
    (tree / "more").mkdir(parents=True)
    np.save(tree / "a.npy", np.arange(10.0))
    np.savez(tree / "b.npz", x=np.arange(3), y=np.ones(2))
    safetensors.numpy.save_file(MIXED, tree / "m.safetensors", metadata={"licence": "CC0"})
    (tree / "more" / "notes.v1.txt").write_bytes(b"not for everyone" * 3000)
    (tree / "more" / ".hidden").write_bytes(b"")
    return tree


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def run(*line, content=b""):
    return invoke(line, content)


def test_a_folder_of_files_goes_there_and_back(cli, key, tree, folder):
    said = cli(f"seal -r plain sealed {key}").stdout
    assert "sealed: sealed 5 files under key" in said
    sealed = [name if name.endswith(".safetensors") else f"{name}.safetensors" for name in names(tree)]
    assert names(folder / "sealed") == sorted(sealed)
    assert "8 sealed tensors in 5 files" in cli(f"verify -r sealed {key}").stdout
    said = cli(f"unseal --recursive sealed back {key}").stdout
    assert "back: 5 files, unencrypted" in said
    assert names(folder / "back") == names(tree)
    for name in ("a.npy", "m.safetensors", "more/notes.v1.txt", "more/.hidden"):
        assert (folder / "back" / name).read_bytes() == (tree / name).read_bytes()
    with np.load(folder / "back" / "b.npz") as file:
        assert {name: file[name].tolist() for name in file} == {"x": [0, 1, 2], "y": [1, 1]}
    assert all(path.stat().st_mode & 0o77 == 0 for path in (folder / "back").rglob("*") if path.is_file())


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    "line", ["plain/a.npy plain/b.npz out", "'plain/[ab].np?' out", "-o out plain/a.npy plain/b.npz"]
)
def test_several_files_are_sealed_into_a_folder(cli, key, folder, line):
    cli(f"seal {line} -q {key}")
    assert names(folder / "out") == ["a.npy.safetensors", "b.npz.safetensors"]


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("source", ["plain/a.npy", "'plain/a.*'", "'plain/[ab].np?'", "plain/a.npy plain/b.npz"])
def test_the_name_of_the_target_decides_what_it_is(cli, key, folder, source, is_there):
    if is_there:
        (folder / "out").mkdir()
    cli(f"seal {source} out {key}")
    several = ["b.npz.safetensors"] if "b" in source else []
    assert names(folder / "out") == ["a.npy.safetensors", *several]
    documents = cli(f"seal {source} again --json {key}").stdout.splitlines()
    assert [json.loads(line)["target"] for line in documents] == [f"again/{name}" for name in names(folder / "again")]
    cli(f"seal {source} x.safetensors {key}", status=2 if several else 0)
    assert (folder / "x.safetensors").is_file() is not bool(several)


def test_a_folder_that_a_pattern_matches_is_sealed_as_one(cli, key, tree, folder):
    (tree / "more" / ".hidden").unlink()
    for source, target in (("plain", "named"), ("'pl*'", "matched")):
        cli(f"seal {source} {target} {key}")
        assert (folder / target / "fastrack.folder").is_file()


@pytest.mark.usefixtures("tree")
@each(
    "change",
    [
        lambda path: path.write_bytes(b"garbage"),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: shutil.copy("plain/a.npy", path),
        lambda path: flip_byte(path, path.read_bytes().index(b"[") + 1),
        lambda path: (path.unlink(), save_file({"x": np.zeros(3)}, path, Key.generate())),
    ],
)
def test_no_target_is_left_but_a_file_sealed_under_the_key(cli, key, folder, change):
    cli(f"seal plain/a.npy plain/b.npz sealed {key}")
    path = folder / "sealed" / "a.npy.safetensors"
    change(path)
    (folder / "sealed" / "b.npz.safetensors").unlink()
    error = cli(f"seal plain/a.npy plain/b.npz sealed --skip-existing --quiet {key}", status=1).stderr
    assert "a.npy.safetensors" in error
    assert "Traceback" not in error
    assert (folder / "sealed" / "b.npz.safetensors").is_file()  # the others go on
    assert (
        "a.npy.safetensors"
        in cli(f"seal plain/a.npy {path.relative_to(folder)} --skip-existing --quiet {key}", status=1).stderr
    )
    shutil.rmtree("sealed")


@pytest.mark.usefixtures("tree")
def test_targets_that_exist_are_left_and_counted(cli, key, folder):
    cli(f"seal plain/a.npy sealed {key}")
    before = (folder / "sealed" / "a.npy.safetensors").read_bytes()
    said = cli(f"seal -r plain sealed --skip-existing {key}").stdout
    assert "left as they are: 1 file" in said
    assert "sealed 4 files" in said
    documents = cli(f"seal -r plain sealed --skip-existing --json {key}").stdout.splitlines()
    assert [json.loads(line)["skipped"] for line in documents] == [True] * 5
    assert "left as it is" in cli(f"seal plain/a.npy sealed/a.npy.safetensors --skip-existing {key}").stdout
    (folder / "sealed" / "b.npz.safetensors").unlink()
    (folder / "sealed" / "b.npz.safetensors").mkdir()  # no file that a seal wrote
    assert "regular file" in cli(f"seal -r plain sealed --skip-existing {key}", status=1).stderr
    assert (folder / "sealed" / "a.npy.safetensors").read_bytes() == before


@pytest.mark.usefixtures("tree")
def test_one_file_goes_into_a_folder_that_is_there(cli, key, folder):
    (folder / "out").mkdir()
    assert cli(f"seal plain/a.npy out --quiet {key}").output == ""
    cli(f"unseal out/a.npy.safetensors out {key}")
    assert names(folder / "out") == ["a.npy", "a.npy.safetensors"]


@pytest.mark.usefixtures("tree")
def test_a_program_reads_one_document_for_each_file(cli, key):
    (Path("plain") / "bad.npy").write_bytes(b"no array")
    done = cli(f"seal -r plain sealed --json {key}", status=1)
    documents = {document["source"]: document for document in map(json.loads, done.stdout.splitlines())}
    assert len(documents) == 6
    assert documents["plain/bad.npy"]["error"]["type"] == "FormatError"
    assert documents["plain/more/notes.v1.txt"]["target"] == "sealed/more/notes.v1.txt.safetensors"
    assert documents["plain/m.safetensors"]["tensors"] == ["a", "b", "w"]
    done = cli(f"unseal -r sealed back --json {key}")
    assert {json.loads(line)["target"] for line in done.stdout.splitlines()} >= {"back/a.npy", "back/b.npz"}


def test_a_bad_file_leaves_the_others_sealed(cli, key, tree, folder):
    (tree / "bad.npy").write_bytes(b"no array")
    os.mkfifo(tree / "pipe")
    result = cli(f"seal -r plain missing sealed {key}", status=1)
    errors = result.stderr.splitlines()
    assert len(errors) == 3
    assert all(any(name in error for error in errors) for name in ("plain/bad.npy", "plain/pipe", "missing"))
    assert "3 of 8 files FAILED" in result.stdout
    assert len(names(folder / "sealed")) == 5


@pytest.mark.usefixtures("tree")
def test_files_that_exist_are_replaced_by_force_alone(cli, key, folder):
    cli(f"seal -r plain sealed {key}")
    before = (folder / "sealed" / "a.npy.safetensors").read_bytes()
    assert cli(f"seal -r plain sealed {key}", status=1).stderr.count("--force") == 5
    assert (folder / "sealed" / "a.npy.safetensors").read_bytes() == before
    cli(f"seal -r plain sealed -f {key}")
    assert (folder / "sealed" / "a.npy.safetensors").read_bytes() != before


@pytest.mark.usefixtures("tree")
def test_the_folder_of_the_target_is_no_source(cli, key, folder):
    cli(f"seal -r . plain/sealed {key}")
    cli(f"seal -r . plain/sealed -f {key}")
    assert not any("sealed/plain/sealed" in name for name in names(folder))


@pytest.mark.usefixtures("tree")
def test_plaintext_does_not_take_the_place_of_its_source(cli, key, folder):
    cli(f"seal plain/m.safetensors m.safetensors {key}")
    before = (folder / "m.safetensors").read_bytes()
    assert "m.safetensors: expected another folder" in cli(f"unseal m.safetensors . -f {key}", status=1).stderr
    assert (folder / "m.safetensors").read_bytes() == before


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("seal plain/a.npy plain/more/../a.npy out", "distinct"),
        ("seal plain/a.npy", "a target"),
        ("seal plain/a.npy plain/b.npz out --name x", "--name"),
        ("seal plain/a.npy plain/b.npz out --to a.pub", "--to"),
        ("seal plain/a.npy - out", "alone"),
        ("seal - - -o out", "once"),
        ("seal plain/a.npy plain/b.npz plain/m.safetensors", "folder"),
        ("seal plain/a.npy - --json", "--json"),
        ("seal - out", ".safetensors"),
        ("seal plain/a.npy plain/b.npz out.safetensors", "got 2 of them"),
        ("seal 'plain/*.np?' out.safetensors", "got 2 of them"),
        ("seal plain out.safetensors", "got a folder"),
        ("seal -r plain out.safetensors", "got a folder"),
        ("seal plain/a.npy plain/b.npz", "got plain/b.npz"),
        ("seal plain/a.npy out --force --skip-existing", "--skip-existing"),
        ("seal plain out --skip-existing", "--skip-existing"),
        ("seal - out.safetensors --plain x", "--plain"),
        ("unseal plain/a.npy plain/b.npz out --file-id 0", "--file-id"),
        ("unseal - - --key -", "once"),
    ],
)
def test_what_does_not_go_with_several_files_is_refused(cli, folder, line, told):
    before = names(folder)
    key = "" if "--key" in line or "--to" in line else "--key owner.key"
    assert told in cli(f"{line} {key}", status=2).output.replace("\n", " ")
    assert names(folder) == before


@pytest.mark.usefixtures("tree")
def test_tensors_are_chosen_by_patterns(cli, key):
    tensors = {name: np.ones(3) for name in ("layer.0.w", "layer.1.w", "layer.1.b", "odd[1]", "odd1")}
    safetensors.numpy.save_file(tensors, "model.safetensors")
    assert set(
        cli.json(f"seal model.safetensors s.safetensors --plain '*.b' --plain 'odd[1]' {key}")["not_protected"]
    ) == {"layer.1.b", "odd[1]"}
    document = cli.json(f"unseal s.safetensors out.npz --tensor 'layer.1.*' --plain '*.b' {key}")
    assert (set(document["tensors"]), document["not_protected"]) == ({"layer.1.b", "layer.1.w"}, ["layer.1.b"])
    assert "'other.*'" in cli.error(f"unseal s.safetensors new.npz --tensor 'other.*' {key}")
    assert "layer.1.b" in cli.error(f"unseal s.safetensors new.npz --tensor 'layer.1.*' {key}")
    assert "no tensor" in cli.error(f"seal model.safetensors t.safetensors --plain 'other*' {key}", status=2)


# Standard input and output


@pytest.fixture
def owner(key):  # noqa: ARG001 - makes the key
    return Key.load("owner.key")


def sealed_by_stream(content, *options):
    result = run("seal", "-", "-", "-k", "owner.key", *options, content=content)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout_bytes


@pytest.mark.parametrize("size", [0, 1, 8, 9, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 100_000])
def test_any_bytes_go_through_a_pipe_and_back(owner, size):
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    sealed = sealed_by_stream(content)
    assert size < 40 or content not in sealed
    Path("x.safetensors").write_bytes(sealed)
    with load_file("x.safetensors") as file:
        assert unseal(file["stdin"], owner, framework="numpy").tobytes() == content
    assert run("unseal", "-", "-", "-k", "owner.key", content=sealed).stdout_bytes == content


def test_bytes_that_look_like_a_format_are_bytes(owner):
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(np.arange(6).reshape(2, 3)))
    for content in (buffer.getvalue(), buffer.getvalue()[:-1], safetensors.numpy.save(MIXED), b"\x93NUMPY"):
        sealed = sealed_by_stream(content)
        Path("x.safetensors").write_bytes(sealed)
        with load_file("x.safetensors") as file:
            assert unseal(file["stdin"], owner, framework="numpy").tobytes() == content
        assert run("unseal", "-", "-", "-k", "owner.key", content=sealed).stdout_bytes == content


@pytest.mark.usefixtures("owner")
def test_the_format_of_a_file_is_told_by_its_suffix():
    np.save("x.npy", np.arange(3))
    result = run("seal", "x.npy", "new.safetensors", "-k", "owner.key", "--format", "npy")
    assert (result.exit_code, "--format" in result.stderr) == (2, True)


@pytest.mark.usefixtures("owner")
def test_a_safetensors_stream_keeps_its_tensors_and_metadata():
    content = safetensors.numpy.save(MIXED, metadata={"licence": "CC0"})
    sealed = sealed_by_stream(content, "--format", "safetensors")
    assert json.loads(run("inspect", "-", "--json", content=sealed).stdout)["metadata"] == {"licence": "CC0"}
    back = run("unseal", "-", "-", "-k", "owner.key", content=sealed).stdout_bytes
    found = safetensors.numpy.load(back)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in MIXED.items()
    }


@pytest.mark.parametrize(
    "array", [np.arange(50_000.0), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(2.5), np.empty((0, 3))]
)
def test_an_array_keeps_its_shape(owner, array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    Path("x.safetensors").write_bytes(sealed_by_stream(buffer.getvalue(), "--format", "npy"))
    with load_file("x.safetensors") as file:
        found = unseal(file["stdin"], owner, framework="numpy")
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert np.array_equal(found, array)


@pytest.mark.usefixtures("owner")
@each("kind", ["safetensors", "npy", "fortran"])
@each("change", [-1, 1])
def test_a_stream_that_is_shorter_or_longer_than_it_says_is_refused(kind, change):
    buffer = io.BytesIO()
    array = np.arange(12.0).reshape(3, 4)
    if kind == "safetensors":
        buffer.write(safetensors.numpy.save(MIXED))
    else:
        np.save(buffer, np.asfortranarray(array) if kind == "fortran" else array)
    content = buffer.getvalue() + b"x" if change > 0 else buffer.getvalue()[:-1]
    form = "safetensors" if kind == "safetensors" else "npy"
    result = run("seal", "-", "new.safetensors", "-k", "owner.key", "--format", form, content=content)
    assert result.exit_code == 6
    assert "as its header says" in result.stderr
    assert not Path("new.safetensors").exists()


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_a_stream_of_another_format_is_refused_without_what_is_in_it(form):
    result = run("seal", "-", "new.safetensors", "-k", "owner.key", "--format", form, content=b"secret! " * 100)
    assert (result.exit_code, f"stdin.{form}" in result.stderr, "secre" in result.stderr) == (6, True, False)


@pytest.mark.usefixtures("owner")
def test_what_is_sealed_already_or_no_file_is_refused():
    sealed = sealed_by_stream(safetensors.numpy.save(MIXED), "--format", "safetensors")
    wrong = [
        ((2).to_bytes(8, "little") + b"{]", "safetensors file"),
        (b"", "safetensors"),
        (b"\xff" * 9, "safetensors"),
    ]
    for content, told in ((sealed, "sealed already"), *wrong):
        options = ("-k", "owner.key", "--format", "safetensors")
        result = run("seal", "-", "new.safetensors", *options, content=content)
        assert (result.exit_code, told in result.stderr) == (6, True), result.stderr


def test_a_stream_of_an_altered_file_ends_before_the_chunk_with_an_error(owner):
    content = np.zeros(20 << 20, np.uint8)
    save_file({"x": content}, "x.safetensors", owner)
    sealed = bytearray(Path("x.safetensors").read_bytes())
    sealed[-100] ^= 1
    result = run("unseal", "-", "-", "-k", "owner.key", content=bytes(sealed))
    assert result.exit_code == 4
    assert "standard input: tensor 'x', chunk 1279" in result.stderr
    assert len(result.stdout_bytes) < content.size
    assert not any(result.stdout_bytes)


@pytest.mark.usefixtures("owner")
def test_a_terminal_gets_no_bytes(monkeypatch):
    for name, module in list(sys.modules.items()):  # it depends on the version of Typer whose is used
        if name.endswith(".testing") and (wrapper := vars(module).get("_NamedTextIOWrapper")):
            monkeypatch.setattr(wrapper, "isatty", lambda _: True, raising=False)
    result = run("seal", "-", "-", "-k", "owner.key", content=b"text")
    assert (result.exit_code, result.stdout_bytes) == (2, b"")
