"""Jobs of test_vllm.py, in processes of their own, as vLLM does not end what it starts.

Run as `python vllm_program.py JOB FOLDER`. Each job prints one line of JSON.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader

import fastrack

SHARED = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256}


def sealed(folder, name="sealed", **extra):
    settings = {"keys": str(folder / "owner.key"), **extra}
    return {"model": str(folder / name), "load_format": "fastrack", "model_loader_extra_config": settings}


def ask(llm, adapter=None):
    greedy = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    prompts = [{"prompt_token_ids": list(range(start, start + 20))} for start in (7, 90)]
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, greedy, use_tqdm=False, lora_request=adapter)
    ]


def tokens(folder):
    """Answers of the plain and of the sealed folder, and after a reload of other weights."""
    found = {"plain": ask(LLM(model=str(folder / "plain"), **SHARED))}
    found["other"] = ask(LLM(model=str(folder / "plain-other"), **SHARED))
    llm = LLM(**sealed(folder), **SHARED)
    found["sealed"] = ask(llm)
    from fastrack._crypto.engine import selected_engine

    found["engine"] = selected_engine().name
    found["numba"] = "llvmlite" in sys.modules
    for name in ("sealed-other", "sealed"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / name)})
        found[f"reloaded {name}"] = ask(llm)
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "sealed-rope")})
    except fastrack.FormatError as error:
        found["refused"] = str(error)
    found["after"] = ask(llm)
    return found


def adapters(folder):
    """Answers with an adapter, plain and sealed; errors for one that is plain or altered beside a sealed model."""
    from vllm.lora.request import LoRARequest

    options = {**SHARED, "enable_lora": True, "max_lora_rank": 8}

    def with_adapter(llm, name, number):
        try:
            return ask(llm, LoRARequest(name, number, str(folder / name)))
        except Exception as error:  # noqa: BLE001 - of any type, after a way through the engine
            return f"{type(error).__name__}: {error}"

    llm = LLM(model=str(folder / "plain"), **options)
    found = {"base": ask(llm), "plain": with_adapter(llm, "adapter", 1)}
    del llm  # before the next one: its end ends the groups of the process
    for number, name in enumerate(["sealed-adapter", "adapter", "altered-adapter"], 1):
        llm = LLM(**sealed(folder), **options)
        found[f"sealed, {name}"] = with_adapter(llm, name, number)
        found[f"sealed base, {name}"] = ask(llm) if number == 1 else None
        del llm
    return found


def refused(folder):
    """Types of the errors for folders that were altered, by their names."""
    names = json.loads(sys.argv[3])
    found = {}
    for name in names:
        extra = {"anchor": sys.argv[4]} if len(sys.argv) > 4 else {}
        try:
            EngineArgs(**sealed(folder, name, **extra), trust_remote_code=True, **SHARED).create_engine_config()
            found[name] = "accepted"
        except fastrack.FastrackError as error:
            found[name] = type(error).__name__
    return found


def late(folder):
    """Files that change after the check: the copy is read, and another folder in the place of the first is refused."""
    arguments = EngineArgs(**sealed(folder, "sealed-late"), **SHARED)
    config = arguments.create_model_config()
    copy = Path(config.model)
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix != ".safetensors"}
    for path in (folder / "sealed-late").iterdir():
        if path.suffix != ".safetensors":
            path.write_bytes(b"{}")
    after = {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix != ".safetensors"}
    shutil.rmtree(folder / "sealed-late")
    shutil.copytree(folder / "sealed-other", folder / "sealed-late")
    loader = get_model_loader(arguments.create_load_config())
    try:
        next(iter(loader.get_all_weights(config, torch.nn.Linear(1, 1))))
        error = ""
    except fastrack.RollbackError as raised:
        error = type(raised).__name__
    config.model = config.tokenizer = str(folder / "plain")  # a draft model, say
    try:
        loader.load_weights(torch.nn.Linear(1, 1), config)
        draft = ""
    except fastrack.FormatError as raised:
        draft = str(raised)
    served, tokenizer = config.served_model_name, Path(arguments.create_model_config().tokenizer)
    speculation = {"model": str(folder / "plain"), "num_speculative_tokens": 1}
    try:
        EngineArgs(**sealed(folder), speculative_config=speculation, **SHARED).create_engine_config()
        beside = ""
    except fastrack.FormatError as raised:
        beside = str(raised)
    return {
        "beside": beside,
        "same": before == after,
        "error": error,
        "draft": draft,
        "served": served,
        "tokenizer": str(tokenizer) == str(copy),
        "mode": oct(copy.stat().st_mode & 0o777),
        "weights": max(path.stat().st_size for path in copy.glob("*.safetensors")),
    }


def ranks(folder):
    """Bytes that a tensor-parallel rank opens of all weights, and whether they are its own."""
    from safetensors.torch import load_file

    from fastrack.vllm import _loader

    arguments = EngineArgs(**sealed(folder), **SHARED)
    config = arguments.create_engine_config()
    opened = []
    open_once = _loader.open_once

    def counted(part, *args, **options):
        opened.append(part.nbytes)
        return open_once(part, *args, **options)

    _loader.open_once = counted
    plain = {}
    for path in (folder / "plain").glob("*.safetensors"):
        plain |= load_file(path)
    loader = get_model_loader(config.load_config)
    equal = True
    for name, weight in loader.get_all_weights(config.model_config, torch.nn.Linear(1, 1)):
        expected = plain[name]
        assert (tuple(weight.shape), weight.dtype) == (tuple(expected.shape), expected.dtype)
        for dim in range(expected.dim()):
            half = expected.shape[dim] // 2
            target = torch.empty_like(expected.narrow(dim, half, half))
            target.copy_(weight.narrow(dim, half, half))
            equal = equal and torch.equal(target, expected.narrow(dim, half, half))
    whole = sum(each.nbytes * each.dim() for each in plain.values())
    return {"equal": equal, "opened": sum(opened), "whole": whole}


def long(llm):
    random = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(3, 512, (200,), generator=random).tolist()} for _ in range(2)]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, detokenize=False), use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found], [each.num_cached_tokens for each in found]


def stock(folder):
    """Answers over the files of vLLM's ExampleConnector: cold, again and exchanged."""
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder / "stock")},
    )
    options = {**SHARED, "enable_prefix_caching": False, "block_size": 64}
    llm = LLM(model=str(folder / "plain"), kv_transfer_config=config, **options)
    found = {"cold": long(llm), "again": long(llm)}
    first, second = sorted((folder / "stock").iterdir())
    first.rename(folder / "stock" / "other")
    second.rename(first)
    (folder / "stock" / "other").rename(second)
    return {**found, "exchanged": long(llm)}


JOBS = {each.__name__: each for each in (tokens, adapters, refused, late, ranks, stock)}

if __name__ == "__main__":
    answer = JOBS[sys.argv[1]](Path(sys.argv[2]))
    print("\nANSWER", json.dumps(answer), flush=True)  # noqa: T201
    os._exit(0)  # vLLM's threads would keep the process
