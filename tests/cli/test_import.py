"""``fastrack import``: samples of other formats, as a user imports them."""

import signal
import subprocess
import sys
import time

import pytest
from helpers.cases import each

from fastrack import SealedDataset


@pytest.fixture
def lines(folder):
    (folder / "lines.txt").write_text("".join(f"line {index}\n" for index in range(3000)))
    return "lines.txt"


def texts(folder, key):
    return list(SealedDataset(folder, keys=key, transform=lambda sample: sample["text"].decode()))


def test_lines_are_imported_and_read(cli, key, lines):
    said = cli(f"import {lines} out {key}").stdout
    assert said.startswith("out: 3000 samples sealed")
    assert texts("out", "owner.key") == [f"line {index}" for index in range(3000)]
    assert cli(f"verify out/shard-000000.safetensors {key}")


def test_the_report_is_a_document(cli, key, lines):
    (cli.folder / "more.txt").write_text("one more")
    report = cli.json(f"import {lines} more.txt out {key}")
    assert (report["sources"], report["folder"], report["samples"]) == ([lines, "more.txt"], "out", 3001)
    assert report["key_id"]


@each(("name", "content"), [("a.bin", b"x"), ("a.jsonl", b"{"), ("a.tar", b"x" * 600), ("a\x1b[1m.txt.gz", b"")])
def test_what_cannot_be_imported_is_one_line(cli, key, name, content):
    (cli.folder / name).write_bytes(content)
    error = cli.error(f"import '{name}' out {key}")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "\x1b" not in error


def test_one_path_is_bad_usage(cli, key, lines):
    cli(f"import {lines} {key}", status=2)
    assert "No such file" in cli.error(f"import none.txt out {key}")


@pytest.mark.slow
def test_an_interrupted_import_keeps_its_shards(cli, key, folder):
    (folder / "big.txt").write_bytes((b"x" * 1000 + b"\n") * 60_000)
    command = [sys.executable, "-m", "fastrack", "import", "big.txt", "out", *key.split(), "--shard-size", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not list(folder.glob("out/shard-00000[3-9]*")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 130
    assert "--resume" in error
    assert cli.json(f"import big.txt out {key} --resume")["samples"] == 60_000
