"""A dataset, which `import` wrote, is one thing to every command, and comes out again."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each
from helpers.tampering import flip_byte, strip

from fastrack import DatasetWriter, Key, SealedDataset, save_file


@pytest.fixture
def data(key, folder):  # noqa: ARG001 - makes the key
    """A dataset of three shards, of 30 samples."""
    with DatasetWriter("data", Key.load("owner.key"), shard_size=200) as writer:
        for index in range(30):
            writer.write({"text": f"line {index}", "label": index % 3})
    assert len(list((folder / "data").iterdir())) >= 3
    return folder / "data"


def shards(data):
    return sorted(data.glob("shard-*.safetensors"))


def test_inspect_shows_one_table_without_a_key(cli, data, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    count, key_id = len(shards(data)), Key.load("owner.key").id
    (cli.folder / "owner.key").unlink()
    said = cli("inspect data").stdout
    assert f"data: a dataset of 30 samples in {count} shards" in said
    assert f"key {key_id}" in said
    assert [line.split()[:3] for line in said.splitlines() if line.startswith(("text", "label"))] == [
        ["label", "I64", "[]"],
        ["text", "U8", "text"],
    ]
    assert len(said.splitlines()) <= 24
    assert max(map(len, said.splitlines())) <= 100
    assert "shard-" not in said
    document = cli.json("inspect data")
    assert (document["kind"], document["samples"], document["key_id"]) == ("data set", 30, key_id)
    assert [column["name"] for column in document["columns"]] == ["label", "text"]
    assert len({shard["file_id"] for shard in document["shards"]}) == count
    assert sum(shard["samples"] for shard in document["shards"]) == 30


def test_many_files_have_a_line_each_and_very_many_a_summary(cli, data, folder):
    for number in range(30):
        (folder / "many").mkdir(exist_ok=True)
        shutil.copy(shards(data)[0], folder / "many" / f"{number:02}.safetensors")
    said = cli("inspect -r many").stdout.splitlines()
    assert len(said) <= 24
    assert "and 20 more: name fewer files, or --json for each" in said
    assert said[-1].startswith("30 files shown; ")
    assert len(cli("inspect -r many --json").stdout.splitlines()) == 30
    assert cli(f"inspect data data/{shards(data)[0].name}").stdout.count("Nothing here was authenticated") == 2


def test_verify_authenticates_all_of_it(cli, key, data):
    said = cli(f"verify data {key}").stdout
    count = len(shards(data))
    assert f"every chunk of 30 samples in {count} shards is authentic, in order and complete" in said
    lines = said.splitlines()
    assert lines[0].startswith("data: ")
    assert lines[1].startswith("key: ")
    assert lines[2:] == ["not checked: whether later imports were removed from the end; --anchor checks that"]
    document = cli.json(f"verify data {key}")
    assert (document["ok"], document["complete"], document["samples"]) == (True, True, 30)
    assert [shard["ok"] for shard in document["shards"]] == [True] * count
    assert cli(f"verify data --quiet {key}").stdout == ""
    assert "and all shards of 1 dataset" in cli(f"verify data data/{shards(data)[0].name} {key}").stdout
    cli(f"verify data --expect text --expect label {key}")
    assert "expected the column 'more'" in cli.error(f"verify data --expect more {key}")
    cli(f"verify data --file-id 00 {key}", status=2)


@pytest.mark.filterwarnings("ignore:.* do not say their order:UserWarning")
def test_shards_that_do_not_say_their_order_fail_to_verify(cli, key, folder):
    owner = Key.load("owner.key")
    (folder / "old").mkdir()
    for number in range(2):
        save_file({"x": np.full(3, number)}, folder / "old" / f"shard-00000{number}.safetensors", owner)
    told = "warning: old has shards that do not say their order and number"
    for done in range(2):
        assert "someone removed it" in cli.error(f"verify old -q {key}")
        said = cli(f"verify old {key}", status=1).stdout
        assert "in order and complete;" not in said
        document = cli.json(f"verify old {key}", status=1)
        assert (document["ok"], document["complete"], document["samples"]) == (False, None, 6 + done)
        cli(f"verify -r old {key}")
        assert cli(f"unseal old out{done}.csv -q {key}").stdout.startswith(told)
        assert cli.json(f"unseal old out{done}.tsv {key}")["complete"] is None
        assert cli(f"rekey old new{done} -q --new owner.key {key}").stdout.startswith(told)
        assert "someone removed it" in cli.error(f"verify new{done} -q {key}")
        with DatasetWriter("old", owner) as writer:  # shards that say it follow
            writer.write({"x": 2})
    assert (folder / "out0.csv").read_text() == "x\n0\n0\n0\n1\n1\n1\n"
    assert len(list(SealedDataset("old", keys=owner))) == 8


@each(
    ("change", "told"),
    [
        (lambda data: shutil.copy(data.with_name("secret") / "shard-000000.safetensors", shards(data)[-1]), "expected"),
        (lambda data: [strip(path, "fastrack.about") for path in shards(data)], "someone removed it"),
    ],
)
def test_no_shards_are_granted_that_storage_chose(cli, key, data, change, told):
    del key
    shutil.rmtree("secret", ignore_errors=True)
    with DatasetWriter("secret", Key.load("owner.key"), shard_size=200) as writer:
        writer.write_batch({"text": ["a", "b"], "label": [1, 2]})
    for line in ("keygen owner.signer --signer", "keygen reader.id --identity"):
        if line.split()[1] not in cli.names():
            cli(line)
    kept = {path: path.read_bytes() for path in shards(data)}
    change(data)
    assert told in cli.error("grant owner.key --to reader.id.pub --sign owner.signer --file data -o data.grants")
    assert "data.grants" not in cli.names()
    for path, content in kept.items():
        path.write_bytes(content)


def test_no_order_and_no_nulls_are_removed_unheard(cli, key):
    (cli.folder / "in.csv").write_text("day,price\n1,\n2,5\n")
    cli(f"import in.csv data {key}")
    for path in shards(cli.folder / "data"):
        strip(path, "fastrack.about", "price.valid")
    assert "someone removed it" in cli.error(f"verify data -q {key}")
    assert "nulls were not checked" in cli(f"unseal data out.csv -q {key}").stdout


def test_verify_names_each_altered_shard(cli, key, data):
    for path in shards(data)[1:]:
        flip_byte(path)
    document = cli.json(f"verify data {key}", status=1)
    assert [shard["ok"] for shard in document["shards"]] == [True] + [False] * (len(shards(data)) - 1)
    assert document["error"]["type"] == "AuthenticationError"
    said = cli(f"verify data {key}", status=1).stdout
    assert f"{len(shards(data)) - 1} of {len(shards(data))} shards FAILED" in said
    assert "run `fastrack verify`" not in said


def exchange(data):
    first, second, *_ = shards(data)
    first.rename(data / "kept")
    second.rename(first)
    (data / "kept").rename(second)


def of_another_data_set(data):
    with DatasetWriter("other", Key.load("owner.key"), shard_size=200) as writer:
        for index in range(30):
            writer.write({"text": f"LINE {index}", "label": index % 3})
    shutil.copy(shards(data.with_name("other"))[1], shards(data)[1])
    shutil.rmtree(data.with_name("other"))


def of_another_key(data):
    with DatasetWriter("other", Key.generate()) as writer:
        writer.write({"text": "", "label": 0})
    shutil.move(shards(data.with_name("other"))[0], shards(data)[-1])
    (data.with_name("other")).rmdir()


@each(
    ("change", "told"),
    [
        (exchange, "expected samples 0 to"),
        (lambda data: shards(data)[1].unlink(), "expected shard-000001.safetensors, got none"),
        (lambda data: shutil.copy(shards(data)[0], shards(data)[1]), "got a copy of shard-000000.safetensors"),
        (of_another_data_set, "another"),
        (of_another_key, "expected shards under one key"),
    ],
)
def test_shards_that_do_not_belong_together_are_told_and_not_used(cli, key, data, change, told):
    shutil.copytree(data, "copy")
    change(data)
    for line in (f"verify data {key}", f"unseal data out.jsonl {key}", f"rekey data out --new owner.key {key}"):
        assert told in cli(line, status=1).output, line
    assert cli.names() == ["copy", "data", "owner.key"]
    shutil.rmtree("data")
    shutil.move("copy", "data")


def test_an_unfinished_run_does_not_go_unheard(cli, key, data):
    shards(data)[-1].unlink()
    document = cli.json(f"verify data {key}", status=1)
    assert (document["ok"], document["complete"]) == (False, False)
    assert document["error"]["type"] == "FormatError"
    assert "NOT COMPLETE" in cli(f"verify data {key}", status=1).stdout
    assert "--resume" in cli.error(f"verify data -q {key}")
    assert cli(f"unseal data out.jsonl {key}").stdout.startswith("warning: data is not complete")
    assert cli(f"unseal data quiet.jsonl -q {key}").stdout.startswith("warning: data is not complete")
    assert cli.json(f"unseal data again.jsonl {key}")["complete"] is False
    assert cli(f"rekey data new --new owner.key {key}").stdout.startswith("warning: data is not complete")


@pytest.mark.usefixtures("data")
def test_an_anchor_sees_what_is_missing_at_the_end(cli, key, data):
    cli("keygen owner.signer --signer")
    with DatasetWriter("data", Key.load("owner.key")) as writer:
        writer.write({"text": "a second run", "label": 0})
    cli("publish data --sign owner.signer")
    cli("anchor data.anchor --owner owner.signer.pub")
    assert "not checked" not in cli(f"verify data --anchor data.anchor {key}").stdout
    cli("verify data --anchor data.anchor")  # all files, without a key
    cli(f"unseal data out.jsonl --anchor data.anchor {key}")
    shards(data)[-1].unlink()
    cli(f"verify data {key}")  # a run that is missing as a whole
    for line in ("verify data", "unseal data more.jsonl"):
        assert cli.json(f"{line} --anchor data.anchor {key}", status=1)["error"]["type"] == "RollbackError"
    assert "more.jsonl" not in cli.names()


def test_a_data_set_comes_out_as_a_table(cli, key, data):
    said = cli(f"unseal data out.csv {key}").stdout
    assert said.startswith("out.csv: 30 samples, unencrypted, ")
    assert stat.S_IMODE((cli.folder / "out.csv").stat().st_mode) == 0o600
    assert (cli.folder / "out.csv").read_text().startswith("text,label\nline 0,0\n")
    assert "--force" in cli.error(f"unseal data out.csv {key}")
    cli(f"unseal data out.csv --force --columns label --columns text {key}")
    assert (cli.folder / "out.csv").read_text().startswith("label,text\n0,line 0\n")
    document = cli.json(f"unseal data out.txt --columns text {key}")
    assert (document["samples"], document["complete"], document["target"]) == (30, True, "out.txt")
    assert (cli.folder / "out.txt").read_text() == "".join(f"line {index}\n" for index in range(30))
    assert cli(f"unseal data quiet.csv -q {key}").stdout == ""
    cli(f"unseal -r data plain {key}")  # files for themselves, as before
    assert len(shards(cli.folder / "plain")) == len(shards(data))


@pytest.mark.usefixtures("data")
@each(
    ("line", "status", "told"),
    [
        ("unseal data out.safetensors", 2, "--recursive"),
        ("unseal data out.cvs", 2, "without a suffix"),
        ("unseal data -", 2, "expected a file that ends with .parquet"),
        ("unseal data out.txt", 1, "--columns"),
        ("unseal data folder", 1, "Name a file with one of these suffixes"),
        ("unseal data out.csv --columns txt", 1, "'text'"),
        ("unseal data out.csv --tensor x", 2, "--tensor"),
        ("unseal data out --force", 2, "--force: expected none, as no folder is replaced. Name a new folder"),
        ("unseal data/shard-000000.safetensors out.csv", 2, "Unseal the folder data"),
        ("unseal data nowhere/out.csv", 1, "nowhere"),
        ("unseal data/shard-000000.safetensors out.npz --columns text", 2, "--columns"),
        ("unseal data data/shard-000000.safetensors out", 1, "expected a file, got a dataset"),
        ("rekey data new --new owner.key --force", 2, "Name a new folder as TARGET"),
        ("rekey data data --new owner.key", 1, "no folder is replaced"),
    ],
)
def test_what_cannot_be_done_is_told_with_what_can(cli, key, line, status, told):
    cli.folder.joinpath("out").exists()
    assert told in " ".join(cli(f"{line} {key}", status=status).stderr.replace("│", " ").split())
    assert not {"out.csv", "out.txt", "folder", "new"} & set(cli.names())
    shutil.rmtree("out", ignore_errors=True)


def test_plaintext_is_taken_back_if_the_report_cannot_be_written(key, data):
    line = [sys.executable, "-m", "fastrack", "unseal", "data", "out.csv", *key.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"the plaintext was removed again" in done.stderr
    assert not data.with_name("out.csv").exists()


# There and back, by the two commands.


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CSV = 'name,code,size,share\nOslo,007,1,0.5\n"a ""b"",\nc",012,,\n=1+1,é,-9223372036854775808,1e+300\n'


@each("options", ["", "--shard-size 1"])
def test_csv_comes_back_as_it_was(cli, key, options):
    (cli.folder / "in.csv").write_text(CSV, encoding="utf-8-sig")
    cli(f"import in.csv data {options} {key}")
    cli(f"verify data {key}")
    cli(f"unseal data out.csv {key}")
    assert (cli.folder / "out.csv").read_text() == CSV
    cli(f"unseal data out.tsv {key}")
    cli(f"import out.tsv again {key}")
    cli(f"unseal again again.csv {key}")
    assert (cli.folder / "again.csv").read_text() == CSV
    shutil.rmtree("data")
    shutil.rmtree("again")
    for name in ("out.csv", "out.tsv", "again.csv"):
        (cli.folder / name).unlink()


def test_lines_and_objects_come_back_as_they_were(cli, key):
    for name, content in (
        ("in.txt", "one\n\ntwö\n=1\n"),
        ("in.jsonl", '{"text": "a", "n": 1, "x": 0.5, "deep": {"a": [1, null]}, "v": [1, 2]}\n' * 3),
    ):
        (cli.folder / name).write_text(content)
        cli(f"import {name} {name}.data {key}")
        cli(f"unseal {name}.data out-{name} {key}")
        assert (cli.folder / f"out-{name}").read_text() == content


def test_parquet_comes_back_as_it_was(cli, key):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table(
        {
            "z": pa.array([1, None, 3], pa.int8()),
            "a": pa.array(["x", None, ""]),
            "when": pa.array([0, None, 5000], pa.timestamp("ns", "UTC")),
            "price": pa.array(["1.50", None, "2.25"], pa.string()).cast(pa.decimal128(9, 2)),
            "deep": pa.array([[{"a": 1}], None, []]),
            "lists": pa.array([[1.5], [], [2.5, 3.5]]),
            "flag": pa.array([True, False, None]),
            "half": pa.array([1.5, 2.5, None], pa.float16()),
            "bytes": pa.array([b"\xff", b"", None]),
            "none": pa.nulls(3),
            "large": pa.array(["a", "b", "c"], pa.large_string()),
            "fixed": pa.array([b"abc", None, b"def"], pa.binary(3)),
            "day": pa.array([1, None, 2], pa.date32()),
            "kind": pa.array(["u", "v", None]).dictionary_encode(),
        }
    )
    parquet.write_table(table, "in.parquet")
    cli(f"import in.parquet data {key}")
    cli(f"unseal data out.parquet {key}")
    found = parquet.read_table("out.parquet")
    assert found.schema == table.schema
    assert found.to_pylist() == table.to_pylist()
    assert stat.S_IMODE((cli.folder / "out.parquet").stat().st_mode) == 0o600


def test_folders_of_images_arrays_and_tables_come_back_as_they_were(cli, key):
    png = b"\x89PNG\r\n\x1a\n"
    for name in ("cat/1.png", "cat/deep/2.png", "dog/1.png"):
        path = cli.folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png + name.encode())
    (cli.folder / "series").mkdir()
    for number in range(3):
        np.save(cli.folder / "series" / f"{number}.npy", np.full((4, 5), number, np.int16))
    (cli.folder / "tables").mkdir()
    (cli.folder / "tables" / "a.csv").write_text("x,y\n1,a\n,b\n")
    (cli.folder / "tables" / "b.csv").write_text("x,y\n3,c\n")
    for name in ("photos", "series", "tables"):
        cli(f"import {name} {name}-data {key}")
        cli(f"verify {name}-data {key}")
        cli(f"unseal {name}-data {name}-out {key}")
        assert contents(cli.folder / f"{name}-out") == contents(cli.folder / name), name
        assert stat.S_IMODE((cli.folder / f"{name}-out").stat().st_mode) == 0o700


def test_a_data_set_is_sealed_anew(cli, key, data):
    cli("keygen new.key")
    said = cli(f"rekey data again --new new.key {key}").stdout
    assert said.startswith(f"again: sealed {len(shards(data))} shards anew, 30 samples, ")
    document = cli.json("verify again --key new.key")
    assert (document["ok"], document["complete"], document["key_id"]) == (True, True, Key.load("new.key").id)
    assert [path.name for path in shards(cli.folder / "again")] == [path.name for path in shards(data)]
    texts = SealedDataset("again", keys="new.key", transform=lambda sample: sample["text"].decode())
    assert list(texts) == [f"line {index}" for index in range(30)]
    assert "expected key" in cli.error(f"verify again {key}")
    with DatasetWriter("again", "new.key") as writer:  # grows like the first
        writer.write({"text": "more", "label": 1})
    assert cli.json("verify again --key new.key")["samples"] == 31
    assert cli(f"rekey data quiet --new new.key -q {key}").stdout == ""


@pytest.mark.usefixtures("data")
def test_an_interrupted_rekey_leaves_nothing_and_says_so(cli, key, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)  # when its first file is written
    error = cli(f"rekey data again --new owner.key {key}", status=130).stderr
    assert "nothing was left of again; the same command begins again" in error
    assert cli.names() == ["data", "owner.key"]


@pytest.mark.usefixtures("key")
def test_a_folder_that_is_no_data_set_is_not_sealed_anew(cli, folder):
    (folder / "empty").mkdir()
    assert "expected a sealed file or a dataset" in cli.error("rekey empty out --new owner.key --key owner.key")


def test_all_shards_are_granted_and_no_later_ones(cli, data):
    cli("keygen owner.signer --signer")
    cli("keygen reader.id --identity")
    said = cli("grant owner.key --to reader.id.pub --sign owner.signer --file data -o data.grants").stdout
    assert "data: its shards of today; grant the key again when it has grown" in said
    granted = cli.json("grant data.grants --owner owner.signer.pub")["files"]
    assert set(granted) == {shard["file_id"] for shard in cli.json("inspect data")["shards"]}
    count = len(shards(data))
    assert ("files: " + (", ".join(granted) if count <= 8 else f"{count} files, whose ids --json lists")) in said


@pytest.mark.slow
def test_a_killed_rekey_leaves_a_marked_part_without_plaintext(key, folder):
    with DatasetWriter("data", Key.load("owner.key"), shard_size=1 << 20) as writer:
        for _ in range(60):
            writer.write({"text": "x" * (1 << 20), "label": 0})
    command = [sys.executable, "-m", "fastrack", "rekey", "data", "again", "--new", "owner.key", *key.split()]
    with subprocess.Popen(command) as process:
        while not list(folder.glob(".fastrack-*.part/shard-00000[3-9]*")):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert not (folder / "again").exists()
    [part] = folder.glob(".fastrack-*.part")
    assert not any(b"xxxxxxxx" in path.read_bytes() for path in part.iterdir())


def test_the_documents_of_a_failure_are_json(cli, key, data):
    flip_byte(shards(data)[0])
    for line in ("unseal data out.csv", "rekey data new --new owner.key"):
        error = cli.json(f"{line} {key}", status=1)["error"]
        assert (error["type"], error["tensor"] is None) == ("AuthenticationError", False)
    assert json.loads(cli(f"verify data --json {key}", status=1).stdout)["ok"] is False
