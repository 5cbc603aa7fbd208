"""The plug-in for vLLM, where vLLM is missing, or has not what it needs."""

import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import fastrack.vllm


def test_importing_it_loads_no_server_framework_or_engine():
    code = (
        "import sys, fastrack.vllm; print(*(set(sys.modules) & {'vllm', 'torch', 'numba', 'fastrack._crypto.engine'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_vllm_finds_it():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["fastrack"].partition(":")
    assert getattr(sys.modules[module], name) is fastrack.vllm.register


@pytest.mark.parametrize("has_vllm", [False, True])
def test_a_vllm_without_what_it_needs_starts_without_the_load_format(monkeypatch, caplog, has_vllm):
    for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name) if has_vllm else None)
    monkeypatch.delitem(sys.modules, "fastrack.vllm._front_end", raising=False)
    with caplog.at_level(logging.WARNING, "fastrack"):
        fastrack.vllm.register()
    assert "vLLM has no load format fastrack" in caplog.text
