"""Measure the cost of a trace while it is taken: the same transfers without and with it, in turns."""

from statistics import median

import pytest
from conftest import MIB

from fastrack import seal
from fastrack._bench.measure import interleave
from fastrack._transfer import timeline

CALLS = {4 << 10: 200, 64 << 10: 100, MIB: 20, 64 * MIB: 1}


@pytest.mark.benchmark(group="a trace")
@pytest.mark.parametrize("size", CALLS, ids=lambda size: f"{size >> 10}KiB")
def test_trace(benchmark, size, channel, key, plain, out):
    """See extra_info of the JSON report: how much longer it takes with a trace."""
    sealed = seal(plain[:size], key)

    def move():
        for _ in range(CALLS[size]):
            channel.to_device(sealed, out=out[:size])

    def traced():
        with timeline.recording():
            move()

    times = interleave({"off": move, "on": traced}, 60)
    pairs = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    benchmark.extra_info["on, over off"] = round(median(pairs), 4)
    benchmark.pedantic(traced, rounds=3)
    print(f"{size} bytes: {100 * median(pairs) - 100:.2f} % longer with a trace")
