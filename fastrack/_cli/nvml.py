"""What the NVIDIA driver says about this machine's GPUs and their confidential mode. Nothing here is attested."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; None for what it did not tell. Memory in bytes."""

    name: str | None
    memory: int | None


@dataclass(frozen=True, slots=True)
class Confidential:
    """The driver's word on confidential mode; None for what it did not tell.

    enabled : whether the feature is on
    environment : "production", "simulation" or "unavailable"
    devtools : whether debugging tools are let in, which leaves nothing protected
    ready : whether the GPUs accept work
    multi_gpu : "none", "protected PCIe" or "NVLink encryption"
    """

    enabled: bool | None = None
    environment: str | None = None
    devtools: bool | None = None
    ready: bool | None = None
    multi_gpu: str | None = None


@dataclass(frozen=True, slots=True)
class Graphics:
    """The driver and its GPUs. `absent` says why there is none to ask; `problems` what it failed to answer."""

    driver: str | None = None
    absent: str | None = None
    gpus: tuple[Gpu, ...] = ()
    confidential: Confidential = Confidential()
    problems: tuple[str, ...] = ()


def read_graphics(nvml: Any = None) -> Graphics:
    """Ask the driver, through the module `pynvml` or one like it. Never raises for what the driver does."""
    nvml = nvml or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}:
            return Graphics(absent="no NVIDIA driver")
        return Graphics(absent=f"the NVIDIA driver does not answer: {error}")
    asking = _Asking(nvml)
    try:
        return Graphics(
            driver=asking.ask("driver version", "nvmlSystemGetDriverVersion"),
            gpus=tuple(_gpu(asking, index) for index in range(asking.ask("number of GPUs", "nvmlDeviceGetCount") or 0)),
            confidential=_confidential(asking),
            problems=tuple(asking.problems),
        )
    finally:
        asking.ask("end", "nvmlShutdown")


class _Asking:
    """Calls that may fail: each failure is None, and a line in `problems`."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.problems: list[str] = []

    def ask(self, what: str, name: str, *args: Any, lacking: Any = None) -> Any:
        """What the call returns; `lacking` where the driver or the GPU has no such thing at all."""
        nvml = self.nvml
        try:
            call: Callable[..., Any] = getattr(nvml, name)
            return call(*args)
        except AttributeError:
            return lacking
        except nvml.NVMLError as error:
            if error.value in {nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
                return lacking
            self.problems.append(f"{what}: {error}")
            return None


def _gpu(asking: _Asking, index: int) -> Gpu:
    handle = asking.ask(f"GPU {index}", "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return Gpu(None, None)
    memory = asking.ask(f"memory of GPU {index}", "nvmlDeviceGetMemoryInfo", handle)
    return Gpu(
        name=asking.ask(f"name of GPU {index}", "nvmlDeviceGetName", handle),
        memory=None if memory is None else int(memory.total),
    )


def _confidential(asking: _Asking) -> Confidential:
    nvml = asking.nvml
    state = asking.ask("confidential state", "nvmlSystemGetConfComputeState", lacking=False)
    if state is None:
        return Confidential()
    if state is False:  # a driver or a GPU that knows no confidential mode
        return Confidential(enabled=False)
    enabled = state.ccFeature == nvml.NVML_CC_SYSTEM_FEATURE_ENABLED
    ready = asking.ask("ready state", "nvmlSystemGetConfComputeGpusReadyState") if enabled else None
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
        multi_gpu=_multi_gpu(asking),
    )


def _multi_gpu(asking: _Asking) -> str | None:
    nvml = asking.nvml
    try:
        settings = nvml.c_nvmlSystemConfComputeSettings_v1_t()
    except AttributeError:  # a pynvml from before these settings
        return None
    # pynvml passes this one on as it is and checks nothing.
    status = asking.ask("multi-GPU mode", "nvmlSystemGetConfComputeSettings", ctypes.byref(settings))
    if status != nvml.NVML_SUCCESS:
        return None
    modes = {
        nvml.NVML_CC_SYSTEM_MULTIGPU_NONE: "none",
        nvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE: "protected PCIe",
        nvml.NVML_CC_SYSTEM_MULTIGPU_NVLE: "NVLink encryption",
    }
    return modes.get(settings.multiGpuMode, f"unknown ({settings.multiGpuMode})")
