"""Measure `to_device` of a sealed tensor by size, next to a page-locked copy, by the host's clock."""

from bench.gpu.channels import channel_on
from bench.gpu.host_data import noise
from bench.gpu.plan import size_of
from bench.gpu.timing import rows, wall
from fastrack import Key, seal

SEALED, LOCKED = "to_device, sealed", "page-locked copy"


def measure(gpu, plan):
    key, stream = Key.generate(256), gpu.driver.stream(high_priority=True)
    with channel_on(gpu.driver, key) as channel:
        for size in plan.latency_sizes:
            print(f"    {size_of(size)}")
            plain = noise(size)
            sealed, out, locked = seal(plain, key), gpu.array(size), gpu.driver.host(size)
            locked[:] = plain
            pointer = gpu.pointer(out)

            def copy(pointer=pointer, locked=locked):
                gpu.upload(pointer, locked, stream)
                gpu.wait(stream)

            runs = {
                SEALED: lambda _, sealed=sealed, out=out: wall(channel.to_device, sealed, out=out),
                LOCKED: lambda _, copy=copy: wall(copy),
            }
            yield from rows("latency", size, runs, plan)
