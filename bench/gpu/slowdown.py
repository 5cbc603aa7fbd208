"""Measure how much a stream of sealed data slows a matrix product."""

import threading
import time
from contextlib import ExitStack, contextmanager
from statistics import median_high

from bench.gpu.channels import channel_on
from bench.gpu.host_data import Pair, noise
from bench.gpu.plan import fraction
from bench.gpu.timing import Row, interleave

ALONE, COPYING = "nothing", "page-locked copies"
_PATIENCE = 30
_SHARE = 1 / 4


def beside(share):
    """Describe the work that runs at this share."""
    return f"to_device, sealed, share {fraction(share)}"


def measure(gpu, plan):
    """Yield rows of the time of one product, by the concurrent work, with its speed."""
    case = _Case(gpu, plan)
    with ExitStack() as stack:
        actions = {ALONE: None, COPYING: case.copy}
        for share in plan.stream_shares:
            channel = stack.enter_context(channel_on(gpu.driver, case.pair.key, share=share))
            actions[beside(share)] = case.pair.mover(channel)
        print(f"    {plan.matrix} x {plan.matrix}, bf16, beside: {', '.join(actions)}")
        yield from case.rows("slowdown", actions)


def sweep(gpu, plan):
    """Yield rows of the time of one product during a stream at a share of a quarter, with one setting changed."""
    case = _Case(gpu, plan)
    for setting, values in (("depth", plan.sweep_depths), ("lead", plan.sweep_leads), ("slab", plan.sweep_slabs)):
        print(f"    {setting}: {values}")
        with ExitStack() as stack:
            actions = {ALONE: None}
            for value in values:
                channel = channel_on(gpu.driver, case.pair.key, share=_SHARE, **{setting: value})
                actions[f"{setting} {value}"] = case.pair.mover(stack.enter_context(channel))
            yield from case.rows("sweep beside", actions)


class _Case:
    """Hold a product, and sealed data to stream in during it."""

    def __init__(self, gpu, plan):
        self._gpu, self._plan, self._product = gpu, plan, gpu.product(plan.matrix)
        self.pair = Pair(gpu, plan.stream_size)
        self._locked, self._stream = gpu.driver.host(plan.stream_size), gpu.driver.stream(high_priority=True)
        self._locked[:] = noise(plan.stream_size)
        self._pointers = [gpu.pointer(array) for array in self.pair.out]

    def copy(self, number):
        self._gpu.upload(self._pointers[number % 2], self._locked, self._stream)
        self._gpu.wait(self._stream)

    def rows(self, step, actions):
        plan, speeds = self._plan, {name: [] for name in actions}
        runs = {name: _run(self._product, plan, action, speeds[name]) for name, action in actions.items()}
        measured = interleave(runs, plan)
        for name, times in measured.items():
            gbps = median_high(speeds[name] or [0.0])
            told = {"beside": name, "beside_gbps": gbps, "slowed": times.median / measured[ALONE].median}
            yield Row(step, "matrix product", 3 * 2 * plan.matrix**2, times, told)


def _run(product, plan, action, speeds):
    def run(_):
        if action is None:
            return product.run(plan.products)
        with _repeated(action) as count:
            start, before = time.perf_counter(), count()
            taken = product.run(plan.products)
            speeds.append(plan.stream_size * (count() - before) / (time.perf_counter() - start) / 1e9)
        return taken

    return run


@contextmanager
def _repeated(action):
    """Repeat an action on a thread until the block ends. Yield a function that counts the runs, after the first two."""
    done, failures = [0], []
    warm, stop = threading.Event(), threading.Event()

    def work():
        try:
            while not stop.is_set():
                action(done[0])
                done[0] += 1
                if done[0] == 2:
                    warm.set()
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
        finally:
            warm.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        if not warm.wait(_PATIENCE):
            raise TimeoutError("what was to run beside the product did not start")
        yield lambda: done[0]
    finally:
        stop.set()
        thread.join(_PATIENCE)
    if failures:
        raise failures[0]
