"""The steps of `fastrack bench`, one idea after another, on `cpu`: the same objects, timed by pytest-benchmark."""

import pytest

from fastrack._bench.runner import rounds_of
from fastrack._bench.steps import DIRECTIONS, STEPS, open_steps

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "256MiB": 256 << 20}
NAMES = {name: name.removeprefix("+ ").replace(" ", "-") for name in STEPS}  # in the names of benchmarks, which last
REPEAT = 9  # rounds of the large sizes, as `fastrack bench` has them


@pytest.fixture(scope="module", params=SIZES.items(), ids=SIZES)
def size(request):
    return request.param


@pytest.fixture(scope="module", params=DIRECTIONS)
def prepared(request, size):
    """The steps of one direction and size, by name, after each of them was found right."""
    with open_steps(request.param, size[1]) as opened:
        opened.check()
        yield request.param, size, {step.name: step for step in opened.steps}


@pytest.mark.parametrize("name", STEPS, ids=NAMES.get)
def test_step(benchmark, prepared, name):
    direction, (told, nbytes), steps = prepared
    benchmark.group = f"ablation, {direction}, {told}"
    kept = []  # a result that is new memory is given back between two runs

    def run():
        kept.append(steps[name].run())

    benchmark.extra_info.update(direction=direction, size=nbytes, step=name)
    benchmark.pedantic(run, setup=kept.clear, rounds=rounds_of(nbytes, REPEAT), warmup_rounds=1)
    kept.clear()
    if benchmark.stats:  # with --benchmark-disable there are none
        benchmark.extra_info["GB/s"] = round(nbytes / benchmark.stats.stats.median / 1e9, 2)
