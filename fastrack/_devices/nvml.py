"""Queries of the NVIDIA driver, and its answers on confidential mode. Nothing here is attested."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any


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


def read_confidential() -> Confidential:
    """Query the driver for confidential mode only. Nothing is known without pynvml, which CUDA does not need."""
    with suppress(ImportError):
        nvml = import_module("pynvml")
        with suppress(nvml.NVMLError), open_queries(nvml) as queries:
            return confidential_mode(queries)
    return Confidential()


def absence() -> str | None:
    """Return the reason that there is no driver of NVIDIA, or None if there is one that answers."""
    nvml = import_module("pynvml")
    try:
        with open_queries(nvml):
            return None
    except nvml.NVMLError as error:
        return absence_of(nvml, error)


def absence_of(nvml: Any, error: Exception) -> str:
    """Return what an error says that the driver gave in place of answers."""
    if error.value in {nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED}:  # type: ignore[attr-defined]
        return "no NVIDIA driver"
    return f"the NVIDIA driver does not answer: {error}"


@contextmanager
def open_queries(nvml: Any) -> "Iterator[Queries]":
    """Open the driver for queries. Raise NVMLError if it does not answer."""
    nvml.nvmlInit()
    queries = Queries(nvml)
    try:
        yield queries
    finally:
        queries.ask("end", "nvmlShutdown")


class Queries:
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


def confidential_mode(queries: Queries) -> Confidential:
    nvml = queries.nvml
    state = queries.ask("confidential state", "nvmlSystemGetConfComputeState", lacking=False)
    if not state:  # None if it is not known, False for a driver or a GPU without confidential mode
        return Confidential(enabled=state)
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


def _multi_gpu(queries: Queries) -> str | None:
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
