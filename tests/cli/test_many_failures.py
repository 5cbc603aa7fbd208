"""Commands on many files hold nothing of those that failed, and tell what was done whatever ends them."""

import gc
import io
import json
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import typer

from fastrack._cli import run
from fastrack.errors import FormatError


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch):
    monkeypatch.setattr(run, "load_engine", lambda _: None)


def batch_of(folder, *names, **told):
    for name in names:
        (folder / name).write_bytes(b"x")
    return run.Batch("verifying", [run.Job(folder / name, Path(name)) for name in names], many=True, **told)


def test_the_report_on_a_file_that_failed_keeps_none_of_its_memory(tmp_path):
    kept, reports = [], []

    def work(*_):
        memory = np.zeros(1000)
        kept.append(weakref.ref(memory))
        raise FormatError("damaged") from OSError("of the system")

    batch_of(tmp_path, "a")._work_on_each(work, reports.append)
    gc.collect()
    assert kept[0]() is None
    assert str(reports[0].errors[0]) == "damaged"


def test_many_errors_of_one_kind_are_counted_and_others_shown(tmp_path, capsys):
    names = [f"{number}.npy" for number in range(1_234)]

    def work(job, _):
        kind = "empty" if job.name.name in {"7.npy", "9.npy"} else f"expected 4 bytes, got {len(job.name.name)}"
        raise FormatError(f"{job.source}: tensor {job.name.name!r}: {kind}")

    with pytest.raises(typer.Exit):
        batch_of(tmp_path, *names, quiet=True).run(work)
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition("/")[2].partition(":")[0] for line in said if ".npy" in line] == [
        *("0.npy", "1.npy", "2.npy"),
        *("7.npy", "9.npy"),
    ]
    assert said[3] == "error: ... and 1,229 more like these, which --json names"


def test_documents_of_finished_files_are_written_when_another_ends_the_command(tmp_path, monkeypatch):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream))

    def work(job, _):
        if job.name.name == "b":
            raise KeyboardInterrupt
        return run.Report({"file": job.name.name})

    with pytest.raises(KeyboardInterrupt):
        batch_of(tmp_path, "a", "b", as_json=True, member="file").run(work)
    assert json.loads(stream.getvalue())["file"] == "a"
