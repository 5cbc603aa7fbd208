"""Measure each of fastrack's ideas on a GPU: the steps of `fastrack bench`, by the host's clock."""

from bench.gpu.plan import size_of
from bench.gpu.timing import rows, wall
from fastrack._bench.endpoints import DIRECTIONS
from fastrack._bench.steps import notes, open_steps


def measure(gpu, plan):
    driver = gpu.driver
    for note in notes(driver.name):
        print(f"    {note}")
    for direction in DIRECTIONS:
        for size in plan.ablation_sizes:
            print(f"    {direction}, {size_of(size)}")
            with open_steps(direction, size, device=driver.name, driver=driver) as opened:
                opened.check()
                runs = {step.name: lambda _, run=step.run: wall(run) for step in opened.steps}
                yield from rows("ablation", size, runs, plan, direction=direction, bits=256)
            gpu.tidy()
