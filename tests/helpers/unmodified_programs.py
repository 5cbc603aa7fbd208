"""Programs that know nothing of fastrack: ``python -m helpers.unmodified_programs NAME FOLDER``.

Each prints a JSON document with digests of its weights and of what it computes. Weights that are mapped from a file lie
anywhere, others on rounder addresses, and processors sum in another order then: with ``ALIGNED`` in the environment a
program copies its weights first, for one that loads plain files to compare with.
"""

import asyncio
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


def digest(arrays):
    return hashlib.sha256(b"".join(each.tobytes() for each in arrays)).hexdigest()[:16]


def weights(module):
    """Return the digest of a module's weights, which are copied if the environment says so."""
    if "ALIGNED" in os.environ:
        for each in module.parameters():
            each.data = each.data.clone()
    import torch

    held = [each.detach().contiguous().view(-1) for _, each in sorted(module.state_dict().items())]
    return digest(each.view(torch.uint8).numpy() for each in held)


def causal(folder):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def answer(model, first):
    import torch

    with torch.no_grad():
        return digest([model(input_ids=torch.arange(first, first + 6).view(1, 6)).logits.float().numpy()])


def transformers(folder):
    from transformers import AutoTokenizer

    model = causal(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("w1 w2 w3 w4")["input_ids"]
    return {"weights": weights(model), "answer": answer(model, 3), "tokens": tokens}


def torchrun(folder):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", __spec__.name, "rank", folder]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"ranks": sorted(ranks, key=lambda each: each["rank"])}


def rank(folder):
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    model = causal(folder)
    before = weights(model)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    tokens = torch.arange(8).view(1, 8) + distributed.get_rank()
    trained(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    distributed.destroy_process_group()
    return {"rank": int(os.environ["RANK"]), "before": before, "after": weights(model)}


def sentence_transformers(folder):
    from sentence_transformers import SentenceTransformer

    model, texts = SentenceTransformer(folder, device="cpu"), ["w1 w2", "w7 w9 w11"]
    found = {"weights": weights(model), "answer": digest([model.encode(texts)])}
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    found["pool"] = digest([model.encode(texts, pool=pool)])
    model.stop_multi_process_pool(pool)
    return found


def diffusers(folder):
    import torch
    from diffusers import DDPMPipeline

    pipeline = DDPMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    known = weights(pipeline.unet)
    image = pipeline(generator=torch.Generator().manual_seed(0), num_inference_steps=3, output_type="np").images
    return {"weights": known, "answer": digest([image])}


def begin(folder):
    global model  # noqa: PLW0603 - of a worker
    model = causal(folder)
    weights(model)


def infer(first):
    return answer(model, first)


def fastapi(folder):
    import httpx
    from fastapi import FastAPI

    spawn = multiprocessing.get_context("spawn")
    app = FastAPI()
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=begin, initargs=(folder,)) as pool:

        @app.get("/{first}")
        def get(first: int) -> str:
            return pool.submit(infer, first).result()

        async def ask():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=120) as client:
                return [(await client.get(f"/{first}")).json() for first in range(4)]

        return {"answers": asyncio.run(ask())}


def kserve(folder):
    import httpx
    import kserve
    from safetensors.numpy import load_file

    class Model(kserve.Model):
        def load(self):
            self.weights = {}
            for path in sorted(Path(folder).glob("*.safetensors")):
                self.weights |= load_file(path)
            self.ready = True
            return True

        def predict(self, payload, headers=None, response_headers=None):
            return {"predictions": [digest(each for _, each in sorted(self.weights.items()))]}

    model, port = Model("model"), int(os.environ.get("PORT", "18080"))
    model.load()

    def ask():
        with httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=60) as client:
            address = f"http://127.0.0.1:{port}/v1/models/model:predict"
            sys.stdout.write(json.dumps(client.post(address, json={"instances": [1]}).json()) + "\n")
            sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=ask, daemon=True).start()
    kserve.ModelServer(http_port=port, enable_grpc=False).start([model])


def vllm(folder, adapter):
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "dtype": "bfloat16"}
    llm = LLM(folder, enable_lora=True, max_lora_rank=8, **options)
    asked = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    prompt = {"prompt_token_ids": list(range(7, 27))}
    requests = {"base": None, "adapter": LoRARequest("adapter", 1, adapter)}
    said = {name: llm.generate(prompt, asked, lora_request=each) for name, each in requests.items()}
    return {name: list(each[0].outputs[0].token_ids) for name, each in said.items()}


def main(name, *folders):
    found = globals()[name](*folders)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
