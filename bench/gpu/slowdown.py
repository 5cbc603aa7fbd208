"""Measure how much a stream of sealed data slows a matrix product."""

import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median_high

from bench.gpu.channels import channel_on
from bench.gpu.host_data import Pair, noise
from bench.gpu.plan import fraction
from bench.gpu.timing import Row, interleave, wall
from fastrack._devices.cuda.streams import LANES

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
    """Yield rows of the time of one product during a stream at a share of a quarter, with other settings."""
    case = _Case(gpu, plan)
    grid = [[{"slab": slab, "depth": depth} for depth in plan.sweep_depths] for slab in plan.sweep_slabs]
    for settings in (*grid, [{"lead": lead} for lead in plan.sweep_leads]):
        print(f"    {settings}")
        with ExitStack() as stack:
            actions = {ALONE: None}
            for each in settings:
                channel = channel_on(gpu.driver, case.pair.key, share=_SHARE, **each)
                name = ", ".join(f"{setting} {value}" for setting, value in each.items())
                actions[name] = case.pair.mover(stack.enter_context(channel))
            yield from case.rows("sweep beside", actions)


def lanes(gpu, plan):
    """Yield rows of transfers on an idle stream, beside one that waits for a busy stream, by the number of lanes."""
    product, pair = gpu.product(plan.matrix), Pair(gpu, max(plan.lead_sizes))

    def run(_, move, *, is_beside):
        if is_beside:
            with product.busy(plan.products):
                move(0, non_blocking=True)
        taken = wall(move, 1)
        gpu.is_well()  # waits for what is left on the busy stream
        return taken

    with ExitStack() as stack:
        runs = {}
        for count in range(1, LANES + 1):
            move = pair.mover(stack.enter_context(channel_on(gpu.driver, pair.key, lanes=count)))
            runs[count] = partial(run, move=move, is_beside=True)
        runs[ALONE] = partial(run, move=move, is_beside=False)
        for count, times in interleave(runs, plan).items():
            yield Row("lanes", "to_device, sealed", pair.size, times, {"lanes": count})


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
