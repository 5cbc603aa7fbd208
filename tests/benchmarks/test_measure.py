"""The path table has every path at every size, and its ratios are those of its times."""

from __future__ import annotations

import pytest

from fastrack._bench.measure import BOUNCE, COPY, interleave, path_table


@pytest.mark.parametrize("bits", [128, 256])
def test_every_path_is_measured_at_every_size(bits):
    said = []
    rows = path_table([0.25, 1], bits=bits, repeat=2, progress=said.append)
    assert said == ["0.25 MiB", "1 MiB"]
    paths = [row.path for row in rows if row.size == 1 << 18]
    assert paths == [row.path for row in rows if row.size == 1 << 20]
    assert {COPY, BOUNCE, "parallel bounce", "direct"} <= set(paths)


def test_ratios_follow_from_times():
    rows = {row.path: row for row in path_table([1], repeat=2)}
    direct, bounce, copy = rows["direct"], rows[BOUNCE], rows[COPY]
    assert direct.over_bounce == pytest.approx(bounce.seconds / direct.seconds)
    assert direct.of_copy == pytest.approx(copy.seconds / direct.seconds)
    assert direct.gbps == pytest.approx((1 << 20) / direct.seconds / 1e9)
    assert copy.over_bounce is None


def test_runs_are_interleaved_after_one_to_warm_up():
    order = []
    times = interleave({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert [len(runs) for runs in times.values()] == [2, 2]
