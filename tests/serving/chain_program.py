"""vLLM, `LMCacheMPConnector`, `lmcache server` and files: `python chain_program.py ADAPTER FOLDER PORT HTTP`.

Asks for two prompts cold, again from the files of blocks, and after these were swapped; prints the tokens, and how
many were cached, as one line of JSON.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.triton_utils import dispatcher

# Version 0.32 asks each global of each module for its attributes as a dict, and one of llvmlite's has none.
dispatcher.vars = lambda value: value.__dict__ if isinstance(value.__dict__, dict) else {}


TOLD = {"edition": "1", "kv_dtype": "bfloat16", "layout": "NHD", "hash": "blake3", "seed": "0"}


def adapter_of(name, folder):
    """Return what `--l2-adapter` takes."""
    key, blocks = str(folder / "kv.key"), str(folder / f"blocks-{name}")
    if name == "aesgcm":
        serde = {"type": "aesgcm", "aes_bits": 256, "master_key_path": key}
        return {"type": "fs", "base_path": blocks, "serde": serde}
    plugin = {"type": "plugin", "module_path": "fastrack.kv.lmcache"}
    if name == "serde":
        inner = {"type": "fs", "base_path": blocks}
        serde = {"type": "fastrack", "keys": key, **TOLD}
        return {**plugin, "class_name": "StockAdapter", "adapter_params": inner, "serde": serde}
    return {**plugin, "class_name": "SealedAdapter", "adapter_params": {"folder": blocks, "keys": key, **TOLD}}


def main(name, folder, port, http):
    """Run the chain and print what it gave."""
    log = (folder / f"{name}.log").open("wb")
    command = [sys.executable, "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "server"]
    command += [
        "--l1-size-gb",
        "1",
        "--eviction-policy",
        "LRU",
        "--l2-store-policy",
        "default",
        "--l2-prefetch-policy",
        "default",
    ]
    command += ["--supported-transfer-mode", "engine_driven", "--l2-adapter", json.dumps(adapter_of(name, folder))]
    command += ["--port", str(port), "--http-port", str(http)]
    server = subprocess.Popen(command, stdout=log, stderr=log)

    def call(path, method="GET"):
        request = urllib.request.Request(f"http://127.0.0.1:{http}{path}", method=method)
        urllib.request.urlopen(request, timeout=5).read()

    try:
        while True:
            assert server.poll() is None, (folder / f"{name}.log").read_text()[-3000:]
            try:
                call("/healthcheck")
                break
            except OSError:
                time.sleep(0.5)
        mode = {"lmcache.mp.port": port, "lmcache.mp.mp_transfer_mode": "engine_driven"}
        transfer = KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=mode,
        )
        llm = LLM(
            model=str(folder / "plain"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=1024,
            enable_prefix_caching=False,
            kv_transfer_config=transfer,
        )
        random = torch.Generator().manual_seed(1)
        prompts = [{"prompt_token_ids": torch.randint(0, 512, (513,), generator=random).tolist()} for _ in range(2)]

        def ask():
            greedy = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
            found = llm.generate(prompts, greedy, use_tqdm=False)
            return [[list(each.outputs[0].token_ids), each.num_cached_tokens] for each in found]

        def files():
            return sorted(path for path in (folder / f"blocks-{name}").rglob("*") if path.suffix in {".kv", ".data"})

        answer = {"cold": ask()}
        while len(files()) < 4:
            time.sleep(0.1)
        time.sleep(1)
        call("/cache/clear", "POST")
        answer["again"] = ask()
        time.sleep(1)
        call("/cache/clear", "POST")
        contents = [path.read_bytes() for path in files()]
        for path, content in zip(files(), reversed(contents), strict=True):
            path.write_bytes(content)
        answer["exchanged"] = ask()
        print("\nANSWER", json.dumps(answer), flush=True)  # noqa: T201
    finally:
        server.terminate()
        server.wait(20)
        os._exit("exchanged" not in answer)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
