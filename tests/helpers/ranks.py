"""Run functions in several processes that are connected by gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

# One process imports torch, and is forked for each rank of each stage.
PARENT = """
import importlib, json, os, signal, sys, tempfile, traceback
import torch, torch.distributed as dist

UNCONNECTED = 75  # of gloo, before a function has begun: once in some hundred runs beside other processes with sockets

def run(rank, world, store, function, arguments):
    status = 1
    try:
        torch.set_num_threads(1)
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        function(*arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        status = 0
    except BaseException as error:
        traceback.print_exc()
        if "connectFullMesh failed" in str(error):
            status = UNCONNECTED
    finally:
        sys.stderr.flush()
        os._exit(status)

def run_all(world, function, arguments):
    with tempfile.TemporaryDirectory() as folder:
        children, worst = set(), 0
        for rank in range(world):
            child = os.fork()
            if not child:
                run(rank, world, folder + "/store", function, arguments)
            children.add(child)
        while children:
            child, status = os.wait()
            children.discard(child)
            if status and not worst:
                worst = os.waitstatus_to_exitcode(status)
                for other in children:
                    os.kill(other, signal.SIGKILL)
        return worst

module = importlib.import_module(sys.argv[1])
for world, name, arguments in json.loads(sys.argv[2]):
    stage = world, getattr(module, name), arguments
    status = run_all(*stage)
    if status == UNCONNECTED:
        status = run_all(*stage)
    if status:
        sys.exit(1)
"""


def run_ranks(*stages, timeout=100):
    """Call functions of one module, a stage after another: `(processes, function, *arguments)`, arguments of text."""
    code = Path(sys.modules[stages[0][1].__module__].__file__)
    path = os.pathsep.join([str(code.parent), *map(str, sys.path)])
    named = [(world, function.__name__, list(map(str, arguments))) for world, function, *arguments in stages]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARENT, code.stem, json.dumps(named)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
