"""Run a function in several processes that are connected by gloo."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import importlib, sys, torch.distributed as dist
store, rank, world, module, name, *arguments = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
getattr(importlib.import_module(module), name)(*arguments)
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(world, function, *arguments, timeout=100):
    """Call `function(*arguments)`, with arguments of text, in `world` processes, and return what each has printed."""
    code = Path(sys.modules[function.__module__].__file__)
    path = os.pathsep.join([str(code.parent), *map(str, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-c", CHILD, f"{folder}/store"]
        rest = [str(world), code.stem, function.__name__, *map(str, arguments)]
        started = [
            subprocess.Popen(
                [*command, str(rank), *rest], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(world)
        ]
        try:
            done = [process.communicate(timeout=timeout) for process in started]
        finally:
            for process in started:
                process.kill()
    for process, (_, error) in zip(started, done, strict=True):
        assert process.returncode == 0, error
    return [output for output, _ in done]
