"""vLLM on a CPU over LMCache's server: what swapped files of blocks do to the answers of a model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import write_llama
from helpers.swift import free_ports

import fastrack

if not (importlib.util.find_spec("vllm") and importlib.util.find_spec("lmcache")):
    pytest.skip("vLLM or LMCache is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("chain_program.py")
PATHS = [str(Path(__file__).parents[2]), *(path for path in sys.path if path.endswith(".lmcache"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    fastrack.Key.generate().save(folder / "kv.key")
    write_llama(folder / "plain", 0)
    return folder


def run(name, folder):
    ports = free_ports(2)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    command = [sys.executable, PROGRAM, name, folder, *map(str, ports)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.partition("ANSWER")[2])


def tokens(answer):
    return [found for found, _ in answer]


def cached(answer):
    return [count for _, count in answer]


@pytest.mark.parametrize("name", ["adapter", "serde", "aesgcm"])
def test_exchanged_blocks_change_the_answers_of_aesgcm_alone(folder, name):
    found = run(name, folder)
    assert cached(found["cold"]) == [0, 0]
    assert cached(found["again"]) == [512, 512]
    assert tokens(found["again"]) == tokens(found["cold"])
    if name == "aesgcm":
        assert cached(found["exchanged"]) == [512, 512]
        assert tokens(found["exchanged"]) != tokens(found["cold"])
    else:
        assert cached(found["exchanged"]) == [0, 0]
        assert tokens(found["exchanged"]) == tokens(found["cold"])
