"""Answers of the NVIDIA driver on its GPUs, for people and their policies. Nothing here is attested."""

import os
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fastrack._devices.nvml import Confidential, Queries, absence_of, confidential_mode, open_queries

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Memory in bytes; None for an attribute that is not known."""

    name: str | None
    memory: int | None
    attests: bool | None = None  # True if it gave the certificates of the key that signs its attestation reports
    numa_node: int | None = None  # of its PCIe slot, as the kernel numbers it; None where there is one node
    is_near: bool | None = None  # True if this process may run on a CPU of that node
    persists: bool | None = None  # True in persistence mode: its driver stays loaded when no process uses it


@dataclass(frozen=True, slots=True)
class Graphics:
    """The driver and its GPUs. `absent` is the reason that there is no driver; `problems` are queries that failed."""

    driver: str | None = None
    absent: str | None = None
    gpus: tuple[Gpu, ...] = ()
    confidential: Confidential = field(default_factory=Confidential)
    problems: tuple[str, ...] = ()


def read_graphics(nvml: Any = None, root: Path = ROOT) -> Graphics:
    """Query the driver, through the module `pynvml` or one like it. Errors of the driver are returned, not raised."""
    nvml = nvml or import_module("pynvml")
    try:
        with open_queries(nvml) as queries:
            driver = queries.ask("driver version", "nvmlSystemGetDriverVersion")
            count = queries.ask("number of GPUs", "nvmlDeviceGetCount") or 0
            return Graphics(
                driver=driver,
                gpus=tuple(_gpu(queries, index, root) for index in range(count)),
                confidential=confidential_mode(queries),
                problems=tuple(queries.problems),
            )
    except nvml.NVMLError as error:
        return Graphics(absent=absence_of(nvml, error))


def _gpu(queries: Queries, index: int, root: Path) -> Gpu:
    handle = queries.ask(f"GPU {index}", "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(None, None)
    memory = queries.ask(f"memory of GPU {index}", "nvmlDeviceGetMemoryInfo", handle)
    name = queries.ask(f"name of GPU {index}", "nvmlDeviceGetName", handle)
    chain = queries.ask(f"certificates of GPU {index}", "nvmlDeviceGetConfComputeGpuCertificate", handle, lacking=False)
    place = queries.ask(f"place of GPU {index}", "nvmlDeviceGetPciInfo", handle)
    persists = queries.ask(f"persistence mode of GPU {index}", "nvmlDeviceGetPersistenceMode", handle)
    return Gpu(
        name,
        None if memory is None else int(memory.total),
        None if chain is None else chain is not False,
        *numa_node("" if place is None else f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.0", root),
        None if persists is None else persists == queries.nvml.NVML_FEATURE_ENABLED,
    )


def numa_node(bus: str, root: Path = ROOT) -> tuple[int | None, bool | None]:
    """Return the NUMA node of a device by its PCI address, 0000:1b:00.0, and whether this process may run there.

    Both are None for a device of no node; see numa(7).
    """
    try:
        node = int((root / "sys/bus/pci/devices" / bus / "numa_node").read_text())  # -1 for none
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")
        bounds = [[int(number) for number in bound.split("-")] for bound in ranges if bound]
    except (OSError, ValueError):  # no such device here, or one of no node
        return None, None
    near = any(bound[0] <= cpu <= bound[-1] for bound in bounds for cpu in os.sched_getaffinity(0))
    return node, near
