import os
import sys

import pynvml
import pytest
from helpers.cases import each
from helpers.fake_nvml import GIB, FakeNvml

from fastrack._devices import graphics, nvml


def test_a_confidential_gpu_is_read():
    fake = FakeNvml()
    assert graphics.read_graphics(fake) == graphics.Graphics(
        driver="580.65.06",
        gpus=(graphics.Gpu("NVIDIA H100", 80 * GIB, attests=True, persists=True),),
        confidential=nvml.Confidential(
            enabled=True, environment="production", devtools=False, ready=True, multi_gpu="none"
        ),
    )
    assert fake.open == 0


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
    mode = graphics.read_graphics(FakeNvml(**state)).confidential
    assert {name: getattr(mode, name) for name in read} == read


def test_persistence_mode_is_read():
    assert [graphics.read_graphics(FakeNvml(persistence=mode)).gpus[0].persists for mode in (0, 1)] == [False, True]
    unknown = FakeNvml(fails={"nvmlDeviceGetPersistenceMode": pynvml.NVML_ERROR_NOT_SUPPORTED})
    assert graphics.read_graphics(unknown).gpus[0].persists is None


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_a_machine_without_a_driver_is_no_error(code):
    assert graphics.read_graphics(FakeNvml(fails={"nvmlInit": code})) == graphics.Graphics(absent="no NVIDIA driver")


def test_a_driver_that_does_not_answer_is_told():
    found = graphics.read_graphics(FakeNvml(fails={"nvmlInit": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}))
    assert found.absent == "the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch."


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a_gpu_that_knows_no_confidential_mode_is_out_of_it(code):
    found = graphics.read_graphics(FakeNvml(fails={"nvmlSystemGetConfComputeState": code}))
    assert found.confidential == nvml.Confidential(enabled=False)
    assert found.problems == ()


def test_a_driver_that_does_not_tell_the_mode_leaves_it_unknown():
    found = graphics.read_graphics(FakeNvml(fails={"nvmlSystemGetConfComputeState": pynvml.NVML_ERROR_UNKNOWN}))
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
    fake = FakeNvml(fails={call: pynvml.NVML_ERROR_GPU_IS_LOST})
    found = graphics.read_graphics(fake)
    assert len(found.problems) == 1
    assert found.problems[0].endswith("GPU is lost")
    assert found.confidential.enabled is True
    assert fake.open == 0


def test_a_failure_to_end_is_no_error():
    graphics.read_graphics(FakeNvml(fails={"nvmlShutdown": pynvml.NVML_ERROR_UNKNOWN}))


def test_multi_gpu_settings_that_are_not_there_or_come_with_an_error_code_are_not_believed(monkeypatch):
    fake = FakeNvml()
    fake.nvmlSystemGetConfComputeSettings = lambda _: pynvml.NVML_ERROR_UNKNOWN
    assert graphics.read_graphics(fake).confidential.multi_gpu is None
    monkeypatch.delattr(pynvml, "c_nvmlSystemConfComputeSettings_v1_t")  # as in an old one
    assert graphics.read_graphics(FakeNvml()).confidential.multi_gpu is None


# The mode decides which thread issues blocking copies.


@each(
    ("state", "expected"),
    [
        ({"feature": 1}, True),
        ({"feature": 0}, False),
        ({"feature": 0, "multi_gpu": 1}, True),  # protected PCIe
        ({"feature": 1, "multi_gpu": 2}, True),
        ({"feature": 0, "multi_gpu": 2}, False),  # NVLink encryption is for what GPUs send each other
        ({"feature": 0, "multi_gpu": 9}, False),  # a mode that is not known
        ({"feature": 0, "fails": {"nvmlSystemGetConfComputeSettings": pynvml.NVML_ERROR_UNKNOWN}}, False),
        ({"fails": {"nvmlSystemGetConfComputeState": pynvml.NVML_ERROR_NOT_SUPPORTED}}, False),
        ({"fails": {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}}, False),
    ],
)
def test_copies_are_encrypted_in_confidential_mode_and_in_protected_pcie(monkeypatch, state, expected):
    fake = FakeNvml(**state)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert nvml.read_confidential().encrypts_copies is expected
    assert fake.open == 0


# Where a GPU is.


@pytest.fixture
def tree(tmp_path):
    """Return a function that makes the files of a machine whose GPU is at a node with these CPUs."""

    def make(node, cpus):
        for name, text in (
            ("bus/pci/devices/0000:1b:02.0/numa_node", node),
            (f"devices/system/node/node{node}/cpulist", cpus),
        ):
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path

    return make


@each(
    ("node", "cpus", "expected"),
    [
        (1, "56-111,168-223", (1, True)),
        (1, "200", (1, True)),
        (0, "0-55,112-167", (0, False)),
        (2, "", (2, False)),  # a node of only memory
        (1, "none", (None, None)),
    ],
)
def test_a_gpu_is_near_if_this_process_may_run_on_a_cpu_of_its_node(tree, monkeypatch, node, cpus, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {100, 200})
    gpu = graphics.read_graphics(FakeNvml(), tree(node, cpus)).gpus[0]
    assert (gpu.numa_node, gpu.is_near) == expected


def test_a_machine_of_one_node_has_no_number_for_it(tree):
    root = tree(0, "0-7")
    (root / "sys/bus/pci/devices/0000:1b:02.0/numa_node").write_text("-1\n")
    assert graphics.read_graphics(FakeNvml(), root).gpus[0].numa_node is None


def test_the_driver_of_this_machine_is_read_without_an_error():
    found = graphics.read_graphics()
    assert (found.absent is None) == (found.driver is not None)
