"""Answers of the NVIDIA driver on GPUs and their confidential mode. Nothing here is attested."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Memory in bytes; None for an attribute that is not known."""

    name: str | None
    memory: int | None
    attests: bool | None = None  # True if it gave the certificates of the key that signs its attestation reports


@dataclass(frozen=True, slots=True)
class Confidential:
    """Confidential mode, as the driver reports it; None for an attribute that is not known."""

    enabled: bool | None = None
    environment: str | None = None  # "production", "simulation" or "unavailable"
    devtools: bool | None = None  # True if debugging tools are allowed: nothing is protected then
    ready: bool | None = None  # True if the GPUs accept work
    multi_gpu: str | None = None  # "none", "protected PCIe" or "NVLink encryption"


@dataclass(frozen=True, slots=True)
class Graphics:
    """The driver and its GPUs. `absent` is the reason that there is no driver; `problems` are queries that failed."""

    driver: str | None = None
    absent: str | None = None
    gpus: tuple[Gpu, ...] = ()
    confidential: Confidential = Confidential()
    problems: tuple[str, ...] = ()


def read_graphics(nvml: Any = None) -> Graphics:
    """Query the driver, through the module `pynvml` or one like it. Errors of the driver are returned, not raised."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}:
            return Graphics(absent="no NVIDIA driver")
        return Graphics(absent=f"the NVIDIA driver does not answer: {error}")
    queries = _Queries(nvml)
    try:
        driver = queries.ask("driver version", "nvmlSystemGetDriverVersion")
        count = queries.ask("number of GPUs", "nvmlDeviceGetCount") or 0
        return Graphics(
            driver=driver,
            gpus=tuple(_gpu(queries, index) for index in range(count)),
            confidential=_confidential(queries),
            problems=tuple(queries.problems),
        )
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


def _gpu(queries: _Queries, index: int) -> Gpu:
    handle = queries.ask(f"GPU {index}", "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(None, None)
    memory = queries.ask(f"memory of GPU {index}", "nvmlDeviceGetMemoryInfo", handle)
    name = queries.ask(f"name of GPU {index}", "nvmlDeviceGetName", handle)
    chain = queries.ask(f"certificates of GPU {index}", "nvmlDeviceGetConfComputeGpuCertificate", handle, lacking=False)
    return Gpu(name, None if memory is None else int(memory.total), None if chain is None else chain is not False)


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
