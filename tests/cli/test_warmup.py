"""`fastrack warmup`, and what `doctor` tells of machine code."""

import dataclasses
import sys

import pynvml
import pytest
from helpers.fake_nvml import FakeNvml

from fastrack._cli.commands import doctor, selftest
from fastrack._crypto import native


def test_without_a_gpu_there_is_nothing_to_do(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fails={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}))
    assert "nothing to do" in cli("warmup").stdout
    assert cli("warmup --quiet").stdout == ""
    assert cli.json("warmup")["cuda"] is None


def test_kernels_are_loaded_where_there_is_a_gpu(cli, monkeypatch, gpu_test):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    loaded = "kernels loaded, compiled by NVRTC 13.0"
    for problem, told in ((None, loaded), ("no compiler", "not usable: no compiler")):
        check = selftest.CudaCheck(usable=problem is None, problem=problem, kernels="NVRTC 13.0")
        gpu_test(check)
        assert told in cli("warmup").stdout
        assert (told in cli("warmup --quiet").stdout) is (problem is not None)
        assert cli.json("warmup")["cuda"] == dataclasses.asdict(check)


@pytest.mark.skipif(native.load() is None, reason="there is no native extension")
def test_doctor_tells_the_file_of_the_machine_code_and_what_made_it(cli):
    code = doctor.read_machine_code()
    assert code["path"].endswith("_native.abi3.so")
    said = cli("doctor").stdout
    assert f"file          {code['path']}" in said
    assert "made by       numba " in said
    assert cli.json("doctor")["code"] == code


def test_doctor_tells_why_there_is_none(cli, monkeypatch):
    monkeypatch.setattr(
        "fastrack._cli.commands.doctor.read_machine_code",
        lambda: {"path": None, "made_by": None, "problem": "it is not there. Get it"},
    )
    assert "state         none: it is not there. Get it" in cli("doctor").stdout
