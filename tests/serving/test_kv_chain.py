"""vLLM on a CPU over LMCache's server: what exchanged files of blocks do to the answers of a model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastrack

if not (importlib.util.find_spec("vllm") and importlib.util.find_spec("lmcache")):
    pytest.skip("vLLM or LMCache is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("chain_program.py")
PATHS = [str(Path(__file__).parents[2]), *(path for path in sys.path if path.endswith(".lmcache"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("chain")
    fastrack.Key.generate().save(folder / "kv.key")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "plain")
    return folder


def run(name, folder, port):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    command = [sys.executable, PROGRAM, name, folder, str(port)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads(done.stdout.partition("ANSWER")[2])


def tokens(answer):
    return [found for found, _ in answer]


def cached(answer):
    return [count for _, count in answer]


@pytest.mark.parametrize(("name", "port"), [("adapter", 6570), ("serde", 6580), ("aesgcm", 6590)])
def test_exchanged_blocks_change_the_answers_of_aesgcm_alone(folder, name, port):
    found = run(name, folder, port)
    assert cached(found["cold"]) == [0, 0]
    assert cached(found["again"]) == [512, 512]
    assert tokens(found["again"]) == tokens(found["cold"])
    if name == "aesgcm":
        assert cached(found["exchanged"]) == [512, 512]
        assert tokens(found["exchanged"]) != tokens(found["cold"])
    else:
        assert cached(found["exchanged"]) == [0, 0]
        assert tokens(found["exchanged"]) == tokens(found["cold"])
