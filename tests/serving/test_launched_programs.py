"""Programs of others under `fastrack run`, unmodified: equal weights and answers, and none without a key."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from helpers.models import write_adapter, write_llama, write_tokenizer
from helpers.swift import free_ports

import fastrack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests"))),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
NEEDS = {
    "transformers": ["transformers"],
    "torchrun": ["transformers"],
    "sentence_transformers": ["sentence_transformers"],
    "diffusers": ["diffusers"],
    "fastapi": ["fastapi", "transformers", "httpx"],
    "kserve": ["kserve"],
    "vllm": ["vllm"],
}


def write(kind, folder):
    """Write a plain model for a program."""
    if kind == "kserve":
        from safetensors.numpy import save_file

        rng = np.random.default_rng(1)
        folder.mkdir()
        for number in (1, 2):
            weights = {f"w{number}": rng.standard_normal((100, 300), np.float32)}
            save_file(weights, folder / f"model-{number}.safetensors", {"format": "pt"})
    elif kind == "sentence_transformers":
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import modules
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        below = folder.with_name("bert")
        BertModel(BertConfig(vocab_size=512, **sizes)).save_pretrained(below)
        write_tokenizer(below, pad_token="w0")
        SentenceTransformer(modules=[modules.Transformer(str(below)), modules.Pooling(64)]).save(str(folder))
    elif kind == "diffusers":
        from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        unet = UNet2DModel(sample_size=8, layers_per_block=1, block_out_channels=(32, 32), **blocks)
        DDPMPipeline(unet=unet, scheduler=DDPMScheduler(num_train_timesteps=10)).save_pretrained(folder)
    else:
        write_llama(folder, 7)
        write_tokenizer(folder)


def run(words, **environment):
    done = subprocess.run(
        words, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=400, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("kind", NEEDS)
def test_an_unmodified_program_has_the_weights_and_the_answers_of_the_plain_folder(kind, tmp_path):
    for name in NEEDS[kind]:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    key = fastrack.Key.generate()
    key.save(tmp_path / "owner.key")
    write(kind, tmp_path / "model")
    if kind == "vllm":
        write_adapter(tmp_path / "adapter")
    folders = sorted(path.name for path in tmp_path.iterdir() if path.name in {"model", "adapter"})[::-1]
    for name in folders:
        fastrack.seal_folder(tmp_path / name, tmp_path / f"sealed-{name}", key)
    plain, sealed = ([str(tmp_path / f"{start}{name}") for name in folders] for start in ("", "sealed-"))
    program = [sys.executable, "-m", "helpers.unmodified_programs", kind]
    launcher = [sys.executable, "-m", "fastrack", "run", *sealed, "--key", str(tmp_path / "owner.key"), "--"]
    port = str(free_ports(1)[0])
    status, meant, said = run([*program, *plain], PORT=port, ALIGNED="1")
    assert status == 0, said
    status, found, said = run([*launcher, *program, *sealed], PORT=port)
    assert status == 0, said
    assert json.loads(found.splitlines()[-1]) == json.loads(meant.splitlines()[-1])
    launcher[launcher.index("--key") : -1] = []
    status, found, said = run([*launcher, *program, *sealed])
    assert (status, found, said.count("\n")) == (5, "", 1)
    assert said.startswith("error: no key was given")
