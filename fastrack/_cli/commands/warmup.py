"""``fastrack warmup``: load the kernels on the GPU of this machine, or have them compiled and kept."""

import time
from dataclasses import asdict

from fastrack._cli.commands.selftest import check_cuda
from fastrack._cli.console import clean, tell
from fastrack._cli.options import Json, Silent
from fastrack._devices.graphics import read_graphics


def warmup(*, quiet: Silent = False, as_json: Json = False) -> None:
    """Load the kernels on this machine's GPU; those that fastrack does not bring for it are compiled and cached."""
    start = time.perf_counter()
    cuda = check_cuda() if read_graphics().gpus else None  # this loads them
    seconds = time.perf_counter() - start
    if cuda is None:
        text = "nothing to do: no GPU was seen, and what runs on the CPU was compiled when fastrack was built"
    elif cuda.problem:
        text = f"GPU: not usable: {clean(cuda.problem)}"
    else:
        text = f"GPU: kernels loaded, compiled by {clean(cuda.kernels or 'an unknown compiler')}; {seconds:.1f} s"
    lines = [] if quiet and not (cuda and cuda.problem) else [text]
    tell(lines, as_json=as_json, cuda=None if cuda is None else asdict(cuda), seconds=seconds)
