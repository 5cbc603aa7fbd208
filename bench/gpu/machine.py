"""``python -m bench.gpu.machine cuda:0``: print the machine's part of results, as JSON. Compiles no kernel."""

import json
import platform
import subprocess
import sys
from dataclasses import asdict

from bench.gpu import needs
from bench.machine import ROOT, read_machine
from fastrack._devices.graphics import numa_node, read_graphics

_OLDEST = (8, 0)


def main(argv):
    try:
        print(json.dumps(read(argv[0])))
    except Exception as error:  # noqa: BLE001 - without a GPU that answers there is nothing to measure on
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def read(device):
    """Return the machine: software, CPU, memory, GPU, and the driver's word on confidential mode."""
    gpu = read_gpu(int(device.removeprefix("cuda:")))
    machine, graphics = read_machine(), None
    if needs.lacks("pynvml") is None:
        graphics = asdict(read_graphics())
    machine["software"] |= needs.versions()
    system = f"{platform.system()} {platform.release()}"
    return machine | {"revision": _revision(), "system": system, "gpu": gpu, "graphics": graphics}


def read_gpu(index):
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(index)
    capability = (int(properties["major"]), int(properties["minor"]))
    if capability < _OLDEST:
        raise RuntimeError(f"expected compute capability 8.0 or later, got {capability[0]}.{capability[1]}")
    name, bus = properties["name"], str(runtime.deviceGetPCIBusId(index)).lower()
    return {
        "name": name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        "memory": int(properties.get("totalGlobalMem", 0)),
        "multiprocessors": int(properties.get("multiProcessorCount", 0)),
        "capability": f"{capability[0]}.{capability[1]}",
        "l2": int(properties.get("l2CacheSize", 0)),
        "bus": bus,
        "numa_node": numa_node(bus)[0],
        "cuda": {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion(), "nvrtc": read_nvrtc()},
    }


def read_nvrtc():
    """Return the version of CuPy's compiler, or None without one."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        return ".".join(map(str, nvrtc.getVersion()))
    except Exception:  # noqa: BLE001 - its type depends on CuPy; that no kernel compiles is told by the stages
        return None


def _revision():
    """Return the revision of this checkout, with "-dirty" if it was altered; None where git cannot tell."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
