"""`fastrack bench --collectives`: the references add what they should, and results are shown and given to programs."""

import functools
import itertools
import json
import os
import re
import signal
import threading

import fastjsonschema
import pytest
import torch
from helpers.commands import application
from helpers.network import MemoryTransport, Network, on_ranks
from test_results import SCHEMA
from typer.testing import CliRunner

from fastrack import Key
from fastrack._cli.measurements import narrow_console

pytest.importorskip("fastrack_bench")

from fastrack_bench import models
from fastrack_bench.charts import draw_collectives
from fastrack_bench.cli.collectives import show_times
from fastrack_bench.collectives import ALONE, GLOO, NAIVE, PLAIN, SEALED, STEPS, Collective
from fastrack_bench.models import SPECS, ResNetSpec, TransformerSpec
from fastrack_bench.ring import CopyEngine, NaiveRing

WAYS = (GLOO, PLAIN, NAIVE, SEALED)
TINY = (ResNetSpec("a ResNet", 2, 1, (4, 8)), TransformerSpec("a decoder", 1, 8, 1, 16, 2, 50, 16))


def rows_of(*ranks):
    """Rows as a run would give them."""
    steps = dict.fromkeys(STEPS, 0.001)
    subjects = (("all-reduce", 1 << 20, WAYS), ("all-reduce", 25 << 20, WAYS), ("a ResNet", 1000, (ALONE, *WAYS)))
    return [
        Collective(name, count, size, way, 3, 0.5, (0.4, 0.6), 1.57, {} if way in (ALONE, GLOO) else steps)
        for count in ranks
        for name, size, ways in subjects
        for way in ways
    ]


def ring_on_ranks(network, tensors):
    """Return what each rank of a ring has, or the exception that it raises."""
    results = [None] * len(tensors)

    def run(rank):
        ring = NaiveRing(MemoryTransport(network, rank), bytes(32))
        try:
            results[rank] = ring.all_reduce(tensors[rank].clone())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[rank] = error
        finally:
            ring._thread.shutdown()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# The references.


def test_a_naive_ring_adds_what_all_ranks_have():
    for size, count in itertools.product((1, 2, 3, 4), (0, 1, 64, 1000, 100_003)):
        tensors = [torch.randint(100, (count,), generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
        for result in ring_on_ranks(Network(size), tensors):
            assert torch.equal(result, sum(tensors)), (size, count)


def test_the_plain_way_adds_what_the_sealed_way_adds():
    size = 3
    tensors = [torch.randn(70_001, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]

    def action(group):
        results = [group.all_reduce(tensors[group.rank].clone())]
        group._link.engine = CopyEngine()
        return [*results, group.all_reduce(tensors[group.rank].clone())]

    sealed, plain = zip(*on_ranks(Network(size), Key.generate(), action), strict=True)
    assert all(torch.equal(one, other) for one, other in zip(sealed, plain, strict=True))


def test_a_model_has_the_size_of_its_name():
    for spec, count in zip(SPECS, (272_282, 11_172_170, 124_439_808), strict=True):
        with torch.device("meta"):
            assert sum(weight.numel() for weight in spec.build().parameters()) == pytest.approx(count, rel=0.01)


# The command.


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "SPECS", TINY)
    return lambda line: CliRunner().invoke(application(), line.split())


@pytest.mark.parametrize("columns", [40, 80])
def test_times_are_shown_in_the_columns_of_a_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    show_times(rows_of(2, 4), narrow_console())
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if len(line) > columns] == []
    assert len(re.findall(r"^sealed +500\.0 +1\.57 *$", said, re.MULTILINE)) == 2 * 3
    assert said.count("all-reduce, 25 MiB") == 2
    assert "2501.11771" in said


@functools.cache
def schema():
    return fastjsonschema.compile({**SCHEMA, "anyOf": [{"$ref": "#/definitions/collectives"}]})


@pytest.mark.nightly
@pytest.mark.skipif(not SCHEMA, reason="the tests run without the results")
def test_every_way_is_measured(run, tmp_path):
    done = run("bench --collectives --ranks 2 --size 0.0625 --repeat 1 --json out.json --picture out.svg")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "out.json").read_text())
    schema()(document)
    assert document["settings"]["ranks"] == [2]
    subjects = [("all-reduce", WAYS), *((spec.name, (ALONE, *WAYS)) for spec in TINY)]
    found = [(row["subject"], row["way"]) for row in document["collectives"]]
    assert found == [(name, way) for name, ways in subjects for way in ways]
    for row in document["collectives"]:
        assert (row["ranks"], row["runs"]) == (2, 1)
        assert bool(row["steps"]) == (row["way"] not in (ALONE, GLOO))
        assert sum(row["steps"].values()) > 0 or not row["steps"]
    assert "2 ranks" in done.stdout
    assert "2501.11771" in done.stdout
    assert "Picture: out.svg" in done.stdout
    assert (tmp_path / "out.svg").stat().st_size > 1000


class Killed:
    """A model for whose size the kernel ends a rank."""

    name = "a large model"

    def build(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_that_was_killed_is_told_in_a_line(run, monkeypatch):
    monkeypatch.setattr(models, "SPECS", (Killed(),))
    done = run("bench --collectives --ranks 2 --size 0.001 --repeat 1")
    assert done.exit_code == 1
    assert "SIGKILL" in done.stderr
    assert done.stderr.count("\n") == 1


def test_options_that_do_not_go_together_are_refused(run):
    for line, hint in (
        ("bench --ranks 2", "--ranks"),
        ("bench --collectives --device cuda:0", "--device"),
        ("bench --collectives --timeline out.json", "--timeline"),
        ("bench --collectives --ranks 1", "--ranks"),
    ):
        done = run(line)
        assert done.exit_code == 2
        assert hint in done.stderr


def test_without_torch_the_command_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr("fastrack_bench.cli.collectives.find_spec", lambda _: None)
    done = run("bench --collectives")
    assert (done.exit_code, done.stderr) == (1, "error: torch is not installed: pip install 'fastrack-io[torch]'\n")


@pytest.mark.slow
def test_a_chart_has_a_panel_for_each_number_of_ranks(tmp_path):
    ranks = (2, 3, 4)
    draw_collectives(rows_of(*ranks), tmp_path / "chart.svg")
    text = (tmp_path / "chart.svg").read_text()
    assert all(f">{count} ranks</text>" in text for count in ranks)
    assert text.count(">1.57</text>") == 13 * len(ranks)
