"""Compile the emulator, and fastrack's kernels for it, once for each state of their sources."""

import hashlib
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from helpers.kernel_host import COMMON, COMPILER, SHIM, SOURCE

HERE = Path(__file__).parent / "cuda"
FOLDER = Path(__file__).parents[2] / "build/emulator"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers")
OPTIONS = (*COMMON, "-O3", "-fvisibility=hidden", "-pthread")
SHIM_OPTIONS = (*COMMON, "-O3", "-march=native", "-flto")


def build_driver():
    """Compile the runtime and driver API, and return the path of the library."""
    units = [*sorted(HERE.glob("*.h")), *(path for path in sorted(HERE.glob("*.cpp")) if path.stem != "nvml")]
    sources = [path for path in units if path.suffix == ".cpp"]
    return _build("libcuda.so.1", units, [[*OPTIONS, *WARNINGS, f"-I{_headers()}", *sources, "-ldl"]])


def build_nvml():
    """Compile the part of NVML that fastrack uses, and return the path of the library."""
    source = HERE / "nvml.cpp"
    return _build("libnvidia-ml.so.1", [source], [[*OPTIONS, *WARNINGS, source]])


def build_kernels(source=None):
    """Compile kernels for the host with the shim of tests/kernels, and return the path of the library."""
    source = Path(source or os.environ.get("EMU_SOURCE") or SOURCE)
    units = [source, *sorted(source.parent.glob("*.cuh")), *sorted(SHIM.glob("shim.*"))]
    kernels = [*SHIM_OPTIONS, "-Wno-unknown-pragmas", f"-I{source.parent}", "-include", SHIM / "shim.h", "-x", "c++"]
    return _build("libkernels.so", units, [[*kernels, "-c", source], [*SHIM_OPTIONS, SHIM / "shim.cpp"]])


def _build(name, units, commands):
    """Link a library of what the commands compile; those before the last one make objects."""
    digest = hashlib.sha256(repr(commands).encode())
    for path in units:
        digest.update(path.read_bytes())
    folder = FOLDER / digest.hexdigest()[:16]
    library = folder / name
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}.{os.getpid()}"
    objects = [folder / f"{made.name}.{number}.o" for number in range(len(commands) - 1)]  # of only this process
    try:
        for command, target in zip(commands, objects, strict=False):
            _compile(*command, "-o", target)
        _compile("-shared", f"-Wl,-soname,{name}", *objects, *commands[-1], "-o", made)
        made.replace(library)
    finally:
        for path in (made, *objects):
            path.unlink(missing_ok=True)
    return library


def _compile(*arguments):
    done = subprocess.run([COMPILER, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{COMPILER} failed:\n{done.stderr}")


def _headers():
    """Find the headers of CUDA 13 that the wheel nvidia-cuda-runtime brings. Those of CUDA 12 have other structures."""
    found = find_spec("nvidia.cu13")
    for place in found.submodule_search_locations if found else ():
        folder = Path(place) / "include"
        if (folder / "cuda.h").is_file():
            return folder
    raise RuntimeError(
        "the headers of CUDA 13 are missing: expected the wheel nvidia-cuda-runtime; use `make emulator`"
    )
