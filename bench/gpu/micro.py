"""Measure rates of the kernels' instructions, in lanes a clock on a multiprocessor, and the placement of blocks."""

from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import numpy as np

from bench.gpu.machine import read_nvrtc

SOURCE = Path(__file__).with_name("micro.cu")
RATES = ["lop3", "prmt", "shf", "imad", "idp4a", "imad_wide", "lop3_and_wide"]
RATES += ["shared_word", "shared_16_bytes_same", "product_of_bits", "product_of_bytes"]
CLMAD = ["clmad_low", "clmad_high", "clmad_both", "clmad_beside_lop3"]  # PTX ISA 9.3, of CUDA 13.3
_THREADS, _WARPS = 512, 16
_INSTRUCTIONS = 64 * 32  # of a warp, as in the source
_SHARED = 65536
_TIMES = 4


def name_of(architecture):
    """Return the name of the compiled source, which a kit for machines without a network has."""
    return f"{architecture}-{sha256(SOURCE.read_bytes()).hexdigest()[:32]}.cubin.xz"


def measure(gpu):
    """Return lanes a clock on a multiprocessor by instruction, and how many multiprocessors some blocks go to."""
    compiled = Path(str(files("fastrack")), "kernels", name_of(gpu.architecture))
    module = gpu.load(compiled) if compiled.is_file() else gpu.compile(SOURCE.read_text(encoding="utf-8"))
    count = gpu.driver.multiprocessors
    rates = {name: _rate(gpu, module, name, 2 * count) for name in RATES}
    version = None if compiled.is_file() else read_nvrtc()
    if version is not None and tuple(map(int, version.split("."))) < (13, 3):
        rates |= dict.fromkeys(CLMAD, f"skipped: NVRTC {version} has no clmad, which takes 13.3 or later")
    else:
        rates |= {name: _rate(gpu, module, name, 2 * count) for name in CLMAD}
    places = {}
    for blocks in (count // 4, count // 2, count, 2 * count):
        out, _ = gpu.run(module, "place", blocks, _THREADS, _SHARED)
        places[blocks] = len(set(out[:blocks].tolist()))
    return {"lanes a clock": rates, "multiprocessors of so many blocks": places}


def _rate(gpu, module, name, blocks):
    """Return the best of some runs with two blocks on every multiprocessor, or why there is no rate."""
    try:
        runs = [gpu.run(module, name, blocks, _THREADS, _SHARED)[1][:blocks] for _ in range(_TIMES)]
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"[:120]
    clocks = min(float(np.mean(run)) for run in runs)
    return round(2 * _WARPS * 32 * _INSTRUCTIONS / clocks, 1)
