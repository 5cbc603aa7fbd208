from functools import partial
from types import SimpleNamespace

import pynvml
import pytest
from helpers.cases import each

from fastrack._cli.nvml import Confidential, Gpu, Graphics, read_graphics

GIB = 1 << 30


class FakeNvml:
    """A driver with one GPU. `fails` gives the error code of the calls that are to fail."""

    def __init__(self, *, feature=1, environment=2, devtools=0, ready=1, multi_gpu=0, fails=None):
        self.multi_gpu = multi_gpu
        self.open = 0
        state = SimpleNamespace(ccFeature=feature, environment=environment, devToolsMode=devtools)
        answers = {
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
            "nvmlDeviceGetName": {"handle 0": "NVIDIA H100"}.__getitem__,
            "nvmlDeviceGetMemoryInfo": {"handle 0": SimpleNamespace(total=80 * GIB)}.__getitem__,
            "nvmlDeviceGetConfComputeGpuCertificate": {"handle 0": SimpleNamespace()}.__getitem__,
            "nvmlSystemGetConfComputeState": lambda: state,
            "nvmlSystemGetConfComputeGpusReadyState": lambda: ready,
        }
        self.__dict__.update(answers | {name: partial(self.fail, code) for name, code in (fails or {}).items()})

    def __getattr__(self, name):
        if name.startswith("nvml") and not name.startswith("nvmlError"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    @staticmethod
    def fail(code, *_):
        raise pynvml.NVMLError(code)

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlSystemGetConfComputeSettings(self, settings):  # noqa: N802
        settings._obj.multiGpuMode = self.multi_gpu
        return pynvml.NVML_SUCCESS


def test_a_confidential_gpu_is_read():
    nvml = FakeNvml()
    assert read_graphics(nvml) == Graphics(
        driver="580.65.06",
        gpus=(Gpu("NVIDIA H100", 80 * GIB, attests=True),),
        confidential=Confidential(enabled=True, environment="production", devtools=False, ready=True, multi_gpu="none"),
    )
    assert nvml.open == 0


@each(
    ("state", "read"),
    [
        ({"feature": 0, "environment": 0}, {"enabled": False, "environment": "unavailable", "ready": None}),
        ({"devtools": 1}, {"devtools": True}),
        ({"ready": 0}, {"ready": False}),
        ({"environment": 7}, {"environment": "unknown (7)"}),
        ({"multi_gpu": 0}, {"multi_gpu": "none"}),
        ({"multi_gpu": 1}, {"multi_gpu": "protected PCIe"}),
        ({"multi_gpu": 2}, {"multi_gpu": "NVLink encryption"}),
        ({"multi_gpu": 9}, {"multi_gpu": "unknown (9)"}),
    ],
)
def test_a_mode_is_read(state, read):
    mode = read_graphics(FakeNvml(**state)).confidential
    assert {name: getattr(mode, name) for name in read} == read


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


@each(
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


def test_multi_gpu_settings_that_are_not_there_or_come_with_an_error_code_are_not_believed(monkeypatch):
    nvml = FakeNvml()
    nvml.nvmlSystemGetConfComputeSettings = lambda _: pynvml.NVML_ERROR_UNKNOWN
    assert read_graphics(nvml).confidential.multi_gpu is None
    monkeypatch.delattr(pynvml, "c_nvmlSystemConfComputeSettings_v1_t")  # as in an old one
    assert read_graphics(FakeNvml()).confidential.multi_gpu is None


def test_the_driver_of_this_machine_is_read_without_an_error():
    found = read_graphics()
    assert (found.absent is None) == (found.driver is not None)
