from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from fastrack._cli.nvml import Confidential, Gpu, Graphics, read_graphics

GIB = 1 << 30


class FakeNvml:
    """A driver with one GPU. `fails` gives the error code of the calls that are to fail."""

    def __init__(self, *, feature=1, environment=2, devtools=0, ready=1, multi_gpu=0, fails=None):
        self.state = SimpleNamespace(ccFeature=feature, environment=environment, devToolsMode=devtools)
        self.ready = ready
        self.multi_gpu = multi_gpu
        self.fails = fails or {}
        self.open = 0

    def __getattribute__(self, name):
        fails = object.__getattribute__(self, "__dict__").get("fails", {})
        if name in fails:
            return lambda *_: self.fail(fails[name])
        return object.__getattribute__(self, name)

    def __getattr__(self, name):
        if name.startswith("nvml") and not name.startswith("nvmlError"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    @staticmethod
    def fail(code):
        raise pynvml.NVMLError(code)

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return "580.65.06"

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        assert handle == "handle 0"
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        assert handle == "handle 0"
        return SimpleNamespace(total=80 * GIB)

    def nvmlSystemGetConfComputeState(self):  # noqa: N802
        return self.state

    def nvmlSystemGetConfComputeGpusReadyState(self):  # noqa: N802
        return self.ready

    def nvmlSystemGetConfComputeSettings(self, settings):  # noqa: N802
        settings._obj.multiGpuMode = self.multi_gpu
        return pynvml.NVML_SUCCESS


def test_a_confidential_gpu_is_read():
    nvml = FakeNvml()
    assert read_graphics(nvml) == Graphics(
        driver="580.65.06",
        gpus=(Gpu("NVIDIA H100", 80 * GIB),),
        confidential=Confidential(enabled=True, environment="production", devtools=False, ready=True, multi_gpu="none"),
    )
    assert nvml.open == 0


def test_a_gpu_out_of_confidential_mode_is_read():
    mode = read_graphics(FakeNvml(feature=0, environment=0)).confidential
    assert (mode.enabled, mode.environment, mode.ready) == (False, "unavailable", None)


def test_dev_tools_mode_is_read():
    assert read_graphics(FakeNvml(devtools=1)).confidential.devtools is True


def test_a_gpu_that_is_not_ready_is_read():
    assert read_graphics(FakeNvml(ready=0)).confidential.ready is False


@pytest.mark.parametrize(
    ("mode", "name"), [(0, "none"), (1, "protected PCIe"), (2, "NVLink encryption"), (9, "unknown (9)")]
)
def test_the_multi_gpu_mode_is_read(mode, name):
    assert read_graphics(FakeNvml(multi_gpu=mode)).confidential.multi_gpu == name


def test_an_environment_of_the_future_is_named_by_number():
    assert read_graphics(FakeNvml(environment=7)).confidential.environment == "unknown (7)"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_is_no_error(code):
    assert read_graphics(FakeNvml(fails={"nvmlInit": code})) == Graphics(absent="no NVIDIA driver")


def test_a_driver_that_does_not_answer_is_told():
    found = read_graphics(FakeNvml(fails={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}))
    assert found.absent == "the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch."


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a_gpu_that_knows_no_confidential_mode_is_out_of_it(code):
    found = read_graphics(FakeNvml(fails={"nvmlSystemGetConfComputeState": code}))
    assert found.confidential == Confidential(enabled=False)
    assert found.problems == ()


def test_a_driver_that_does_not_tell_the_mode_leaves_it_unknown():
    found = read_graphics(FakeNvml(fails={"nvmlSystemGetConfComputeState": pynvml.NVML_ERROR_UNKNOWN}))
    assert found.confidential.enabled is None
    assert found.problems == ("confidential state: Unknown Error",)


@pytest.mark.parametrize(
    "call",
    [
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlSystemGetConfComputeGpusReadyState",
        "nvmlSystemGetConfComputeSettings",
    ],
)
def test_one_failure_leaves_the_rest(call):
    nvml = FakeNvml(fails={call: pynvml.NVML_ERROR_GPU_IS_LOST})
    found = read_graphics(nvml)
    assert len(found.problems) == 1
    assert found.problems[0].endswith("GPU is lost")
    assert found.confidential.enabled is True
    assert nvml.open == 0


def test_a_failure_to_end_is_no_error():
    read_graphics(FakeNvml(fails={"nvmlShutdown": pynvml.NVML_ERROR_UNKNOWN}))


def test_an_old_pynvml_without_multi_gpu_settings_will_do(monkeypatch):
    monkeypatch.delattr(pynvml, "c_nvmlSystemConfComputeSettings_v1_t")
    assert read_graphics(FakeNvml()).confidential.multi_gpu is None


def test_settings_that_come_back_with_an_error_code_are_not_believed():
    nvml = FakeNvml()
    nvml.nvmlSystemGetConfComputeSettings = lambda _: pynvml.NVML_ERROR_UNKNOWN
    assert read_graphics(nvml).confidential.multi_gpu is None


def test_the_driver_of_this_machine_is_read_without_an_error():
    found = read_graphics()
    assert (found.absent is None) == (found.driver is not None)
