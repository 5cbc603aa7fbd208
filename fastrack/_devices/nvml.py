"""Answers of the NVIDIA driver on GPUs and their confidential mode. Nothing here is attested."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

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
class Confidential:
    """Confidential mode, as the driver reports it; None for an attribute that is not known."""

    enabled: bool | None = None
    environment: str | None = None  # "production", "simulation" or "unavailable"
    devtools: bool | None = None  # True if debugging tools are allowed: nothing is protected then
    ready: bool | None = None  # True if the GPUs accept work
    multi_gpu: str | None = None  # "none", "protected PCIe" or "NVLink encryption"

    @property
    def encrypts_copies(self) -> bool:
        """True if the driver encrypts copies between host and GPU, each of which then blocks its caller.

        NVLink encryption is for what GPUs send each other: by itself it leaves these copies unencrypted.
        """
        return bool(self.enabled) or self.multi_gpu == "protected PCIe"


@dataclass(frozen=True, slots=True)
class Graphics:
    """The driver and its GPUs. `absent` is the reason that there is no driver; `problems` are queries that failed."""

    driver: str | None = None
    absent: str | None = None
    gpus: tuple[Gpu, ...] = ()
    confidential: Confidential = Confidential()
    problems: tuple[str, ...] = ()


def read_graphics(nvml: Any = None, root: Path = ROOT) -> Graphics:
    """Query the driver, through the module `pynvml` or one like it. Errors of the driver are returned, not raised."""
    nvml = nvml or import_module("pynvml")
    try:
        with _queries(nvml) as queries:
            driver = queries.ask("driver version", "nvmlSystemGetDriverVersion")
            count = queries.ask("number of GPUs", "nvmlDeviceGetCount") or 0
            return Graphics(
                driver=driver,
                gpus=tuple(_gpu(queries, index, root) for index in range(count)),
                confidential=_confidential(queries),
                problems=tuple(queries.problems),
            )
    except nvml.NVMLError as error:
        if error.value in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}:
            return Graphics(absent="no NVIDIA driver")
        return Graphics(absent=f"the NVIDIA driver does not answer: {error}")


def read_confidential() -> Confidential:
    """Query the driver for confidential mode only. Nothing is known without pynvml, which CUDA does not need."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return Confidential()
    try:
        with _queries(nvml) as queries:
            return _confidential(queries)
    except nvml.NVMLError:
        return Confidential()


@contextmanager
def _queries(nvml: Any) -> "Iterator[_Queries]":
    """Open the driver for queries. Raise NVMLError if it does not answer."""
    nvml.nvmlInit()
    queries = _Queries(nvml)
    try:
        yield queries
    finally:
        queries.ask("end", "nvmlShutdown")


class _Queries:
    """Queries that may fail: a failure returns None, and adds a line to `problems`."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.problems: list[str] = []

    def ask(self, subject: str, name: str, *args: Any, lacking: Any = None) -> Any:
        """Return the result of a call, or `lacking` if the driver or the GPU does not support it."""
        nvml = self.nvml
        try:
            call: Callable[..., Any] = getattr(nvml, name)
            return call(*args)
        except AttributeError:
            return lacking
        except nvml.NVMLError as error:
            if error.value in {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
                return lacking
            self.problems.append(f"{subject}: {error}")
            return None


def _gpu(queries: _Queries, index: int, root: Path) -> Gpu:
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


def _confidential(queries: _Queries) -> Confidential:
    nvml = queries.nvml
    state = queries.ask("confidential state", "nvmlSystemGetConfComputeState", lacking=False)
    if state is None:
        return Confidential()
    if state is False:  # a driver or a GPU without confidential mode
        return Confidential(enabled=False)
    enabled = state.ccFeature == nvml.NVML_CC_SYSTEM_FEATURE_ENABLED
    ready = queries.ask("ready state", "nvmlSystemGetConfComputeGpusReadyState") if enabled else None
    environments = {
        nvml.NVML_CC_SYSTEM_ENVIRONMENT_UNAVAILABLE: "unavailable",
        nvml.NVML_CC_SYSTEM_ENVIRONMENT_SIM: "simulation",
        nvml.NVML_CC_SYSTEM_ENVIRONMENT_PROD: "production",
    }
    return Confidential(
        enabled=enabled,
        environment=environments.get(state.environment, f"unknown ({state.environment})"),
        devtools=state.devToolsMode != nvml.NVML_CC_SYSTEM_DEVTOOLS_MODE_OFF,
        ready=None if ready is None else ready == nvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE,
        multi_gpu=_multi_gpu(queries),
    )


def _multi_gpu(queries: _Queries) -> str | None:
    nvml = queries.nvml
    try:
        settings = nvml.c_nvmlSystemConfComputeSettings_v1_t()
    except AttributeError:  # a pynvml without these settings
        return None
    # pynvml returns the status of this call, and does not raise.
    status = queries.ask("multi-GPU mode", "nvmlSystemGetConfComputeSettings", ctypes.byref(settings))
    if status != nvml.NVML_SUCCESS:
        return None
    modes = {
        nvml.NVML_CC_SYSTEM_MULTIGPU_NONE: "none",
        nvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE: "protected PCIe",
        nvml.NVML_CC_SYSTEM_MULTIGPU_NVLE: "NVLink encryption",
    }
    return modes.get(settings.multiGpuMode, f"unknown ({settings.multiGpuMode})")
