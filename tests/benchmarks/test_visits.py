"""Visits of a holder: both ways bring its bytes, buffers are wiped, and it is said what is published and modelled."""

import json

import numpy as np
import pytest
from helpers.commands import invoke

from fastrack._bench.measure import Times
from fastrack.errors import AuthenticationError, FastrackError

pytest.importorskip("fastrack_bench")

from fastrack_bench import holder, visits
from fastrack_bench.holder import Load, open_links
from fastrack_bench.visits import AGAIN, BOUNCE, SEALED, WAYS

SMALL = Load(60_000, 20_000)


@pytest.fixture(scope="module")
def rows():
    return visits.measure_visits(SMALL, [20_000, 40_000, None], 2)


def test_each_buffer_is_measured_in_both_ways(rows):
    assert [(row.buffer, row.buffers, row.way) for row in rows] == [
        (buffer, count, way) for buffer, count in ((20_000, 3), (40_000, 2), (None, 1)) for way in WAYS
    ]
    for bounce, sealed in zip(rows[::2], rows[1::2], strict=True):
        assert bounce.over_bounce == 1
        assert sealed.over_bounce == pytest.approx(sealed.seconds / bounce.seconds)
        assert (sealed.runs, sealed.each) == (4, pytest.approx(sealed.seconds / sealed.buffers))


def test_shares_are_beside_compute_for_as_many_bytes():
    times = {(None, f"{way}{again}"): Times([1.0]) for way in WAYS for again in ("", AGAIN)}
    bounce, _ = visits._rows(Load(600_000_000, visits.PIECE), None, times)
    assert bounce.share == pytest.approx(1 / 1231)
    images = 600e6 / (3 * 224 * 224 * 4)
    assert bounce.share_heavy == pytest.approx(1 / (1 + images * 3 * 8.18e9 / (0.18 * 989e12)), rel=1e-4)
    half, _ = visits._rows(Load(300_000_000, visits.PIECE), None, times)
    assert half.share == pytest.approx(1 / 616)


class Recorded:
    """A way that brings the same number for every token of a hand-over, and records what was asked for."""

    def __init__(self):
        self.asked, self.found = [], []

    def request(self, first, nbytes):
        self.asked.append((first, nbytes))

    def fill(self, buffer):
        self.found.append((len(self.asked), buffer.any()))
        buffer.fill(7)


def test_a_buffer_is_wiped_after_each_use_and_the_next_one_asked_for_before():
    way, memory, used = Recorded(), np.zeros(8, np.uint16), []
    visits._Tour(way, memory, 40)(lambda first, part: used.append((first, part.tolist())))
    assert way.asked == [(0, 16), (16, 16), (32, 8)]
    assert way.found == [(2, False), (3, False), (3, False)]
    assert used == [(0, [7] * 8), (16, [7] * 8), (32, [7] * 4)]
    assert not memory.any()


@pytest.mark.parametrize(("broken", "way"), [("_Bounce", BOUNCE), ("_Sealed", SEALED)])
def test_a_way_that_delivers_other_bytes_is_found(monkeypatch, broken, way):
    monkeypatch.setattr(f"fastrack_bench.visits.{broken}.fill", lambda way, buffer: buffer.fill(0))
    with pytest.raises(RuntimeError, match=f"'{way}' delivered other bytes"):
        visits.measure_visits(SMALL, [None], 1)


def test_the_links_are_tls_and_what_the_owner_sealed():
    with open_links(SMALL) as (tls, sealed, key):
        assert tls.cipher == ("TLS_AES_256_GCM_SHA384", "TLSv1.3", 256)
        sealed.request(20_000, 20_000)
        message = bytearray(sealed.receive())
        expected = SMALL.tokens()[10_000:20_000]
        opened = visits.SealedTensor.from_bytes(message)
        assert np.array_equal(visits.to_device(opened, "cpu", keys=key, framework="numpy"), expected)
        message[-1] ^= 1
        with pytest.raises(AuthenticationError):
            visits.to_device(visits.SealedTensor.from_bytes(message), "cpu", keys=key)


@pytest.mark.slow
def test_a_holder_that_ends_is_told(monkeypatch):
    with (
        pytest.raises(FastrackError, match="the holder's process: expected it to send its data"),
        open_links(
            Load(60_000, 7_000)  # pieces that do not divide it
        ),
    ):
        pass
    with open_links(SMALL) as (_, sealed, _):
        sealed.request(0, 20_000)
        monkeypatch.setattr(holder.socket.socket, "recv", lambda *_: b"")
        with pytest.raises(FastrackError, match="expected it to send its data, got none"):
            sealed.receive()


def test_the_table_of_the_paper_is_told_from_the_model():
    found = {(row.way, row.buffer): row for row in visits.published()}
    assert [row.buffers for row in found.values() if row.way == "baseline"] == [150, 30, 6, 2, 1]
    smallest = found["baseline", 4_000_000]
    assert (smallest.share, smallest.modelled) == (0.47568, pytest.approx(1110 / 2340))
    off = {row.buffer: row.off for row in found.values() if row.modelled}
    assert {buffer for buffer, factor in off.items() if factor > 1.1} == {100_000_000}  # which the model misses
    assert found["travelling", None].modelled is None


def test_the_command_says_what_is_modelled_and_what_is_published(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(visits, "TOTAL", 60_000)
    monkeypatch.setattr(visits, "PIECE", 20_000)
    monkeypatch.setattr(visits, "BUFFERS", (20_000, None))
    files = f"--json '{tmp_path / 'out.json'}' --picture '{tmp_path / 'out.png'}'"
    done = invoke(f"bench --visits --repeat 1 {files}")
    assert done.exit_code == 0
    said = " ".join(done.stdout.split())
    assert "training, which is MODELLED" in said
    assert "paper: published, of other machines, and not measured here" in said
    assert "The paper's own way, travelling: 0.08 %" in said
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["row"] for row in document["visits"]] == ["measured"] * 4 + ["paper"] * 6
    assert document["settings"]["bytes"] == 60_000
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_what_does_not_go_together_is_refused():
    for options, hint in (
        ("--size 1", "--size"),
        ("--workloads", "--workloads"),
        ("--toll all", "--toll"),
        ("--timeline x.json", "--timeline"),
        ("--device cuda:0", "--device"),
    ):
        done = invoke(f"bench --visits {options}")
        assert done.exit_code == 2, options
        assert hint in done.stderr, options
