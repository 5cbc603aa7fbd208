"""``python stand_in_process.py MODULE ARGUMENT...``: run a module of the suite for GPUs over host memory.

Stands in for ``python -m``. The environment variable FASTRACK_TEST_BEFORE may hold Python to be run before.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import pytest  # noqa: E402 - what follows is found by the path above

from bench.gpu import gpu, machine, micro, stage  # noqa: E402
from fastrack._tensors import arrays  # noqa: E402
from helpers import fake_cuda  # noqa: E402
from helpers.stand_in_gpu import MACHINE, TINY, StandIn  # noqa: E402

fake_cuda.install(pytest.MonkeyPatch())
arrays.installed = lambda framework: False
gpu.Gpu = lambda *_: StandIn()
machine.read_gpu = lambda index: MACHINE
micro.measure = lambda gpu: {"lanes a clock": {"lop3": 64}}
stage.FULL = stage.QUICK = TINY
exec(os.environ.get("FASTRACK_TEST_BEFORE", ""))
sys.exit(import_module(sys.argv[1]).main(sys.argv[2:]))
