"""How much a matrix product is slowed by sealed data that streams in beside it."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager

from bench.gpu.channels import channel_on
from bench.gpu.host_data import noise
from bench.gpu.plan import fraction
from bench.gpu.timing import Row, interleave
from fastrack import Key, seal

ALONE, COPYING = "nothing", "page-locked copies"
_PATIENCE = 30


def beside(share):
    """What runs at this share, in words."""
    return f"to_device, sealed, share {fraction(share)}"


def measure(gpu, plan, say):
    """Rows of the time of one product, by what runs beside it, with the speed of that."""
    product = gpu.product(plan.matrix)
    key, size = Key.generate(256), plan.stream_size
    stock = noise(size + (1 << 20))
    sealed = [seal(stock[start : start + size], key) for start in (0, 1 << 20)]
    out = [gpu.array(size) for _ in sealed]
    locked, stream = gpu.host(size), gpu.stream(urgent=True)
    locked[:] = stock[:size]
    pointers = [gpu.pointer(array) for array in out]

    def copy(number):
        gpu.upload(pointers[number % 2], locked, stream)
        gpu.wait(stream)

    with ExitStack() as stack:
        actions = {ALONE: None, COPYING: copy}
        for share in plan.stream_shares:
            channel = stack.enter_context(channel_on(gpu.driver, key, share=share))
            actions[beside(share)] = lambda n, channel=channel: channel.to_device(sealed[n % 2], out=out[n % 2])
        speeds = {name: [] for name in actions}
        runs = {name: _run(product, plan, size, action, speeds[name]) for name, action in actions.items()}
        say(f"    {plan.matrix} x {plan.matrix}, bf16, beside: {', '.join(actions)}")
        found = interleave(runs, plan)
    for name, times in found.items():
        gbps = sorted(speeds[name])[len(speeds[name]) // 2] if speeds[name] else 0.0
        settings = {"beside": name, "beside_gbps": gbps, "slowed": times.median / found[ALONE].median}
        yield Row("slowdown", "matrix product", 3 * 2 * plan.matrix**2, times, settings)


def _run(product, plan, size, action, speeds):
    def run(_):
        if action is None:
            return product.run(plan.products)
        with _repeated(action) as count:
            start, before = time.perf_counter(), count()
            taken = product.run(plan.products)
            speeds.append(size * (count() - before) / (time.perf_counter() - start) / 1e9)
        return taken

    return run


@contextmanager
def _repeated(action):
    """Repeat an action on a thread until the block ends. Gives how often it was done, once it was done twice."""
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
