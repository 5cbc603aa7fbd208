"""``fastrack warmup``: have CuPy compile the kernels for the GPUs of this machine, and keep them."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from fastrack._cli.commands.selftest import check_cuda
from fastrack._cli.console import clean, tell
from fastrack._cli.options import Json
from fastrack._devices.nvml import read_graphics


def warmup(
    *, quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors alone.")] = False, as_json: Json = False
) -> None:
    """Compile the kernels for this machine's GPU, so that processes load them from CuPy's cache."""
    start = time.perf_counter()
    cuda = check_cuda() if read_graphics().gpus else None  # this compiles them
    seconds = time.perf_counter() - start
    if cuda is None:
        text = "nothing to compile: no GPU was seen, and what runs on the CPU was compiled when fastrack was built"
    elif cuda.problem:
        text = f"GPU: not usable: {clean(cuda.problem)}"
    else:
        text = f"GPU: kernels compiled, which CuPy keeps, {seconds:.1f} s"
    lines = [] if quiet and not (cuda and cuda.problem) else [text]
    tell(lines, as_json=as_json, cuda=None if cuda is None else asdict(cuda), seconds=seconds)
