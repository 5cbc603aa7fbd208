"""Jobs of test_vllm_kv.py, in processes of their own, as vLLM does not end what it starts.

Run as `python vllm_kv_program.py JOB FOLDER`. Each job prints one line of JSON.
"""

import dataclasses
import gc
import json
import os
import sys
from pathlib import Path
from typing import ClassVar

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process, and a worker too if there is one rank
    "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest

import fastrack
from fastrack.format import HEADER_SIZE
from fastrack.kv import BlockSealer, _vllm_worker

BLOCK = 32
PROMPT = 200  # tokens: six blocks, and some
OPTIONS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256}


def transfer(folder, name="SealedOffloadingConnector", policy="recompute", **extra):
    given = {"keys": str(folder / "owner.key"), "edition": "1", "cpu_bytes_to_use": 4 << 20, **extra}
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path="fastrack.kv.vllm",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={name: value for name, value in given.items() if value is not None},
    )


class Server:
    """An engine whose scheduler and worker are at hand."""

    regions: ClassVar = []  # files in shared memory, which vLLM removes if it ends by itself

    def __init__(self, folder, model="plain", *, config=None, extra=None, **options):
        options = {**OPTIONS, "block_size": BLOCK, "served_model_name": "llama", **options}
        config = config or transfer(folder, **(extra or {}))
        self.llm = LLM(model=str(folder / model), kv_transfer_config=config, **options)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.connector.scheduler.manager
        self.regions.append(Path(self.manager.primary_tier._mmap_region.mmap_path))
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    @property
    def worker(self):
        return get_kv_transfer_group().worker

    def ask(self, prompts, salt=None, tokens=6):
        given = [{"prompt_token_ids": each, **({"cache_salt": salt} if salt else {})} for each in prompts]
        greedy = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        found = self.llm.generate(given, greedy, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found], [each.num_cached_tokens for each in found]

    def again(self, prompts, **options):
        """Ask without what the model's own memory has."""
        assert self.llm.reset_prefix_cache()
        return self.ask(prompts, **options)

    def stored(self):
        """Return the keys of all chunks of the primary tier, each with the number of its row, in order of storing."""
        chunks = self.manager.primary_tier._policy.chunks
        return {bytes(key): chunk.chunk_id for key, chunk in chunks.items()}

    def messages(self, keys):
        return {key: self.rows[row].copy() for key, row in self.stored().items() if key in keys}


def prompts(count=1, seed=1, length=PROMPT):
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 512, (length,), generator=random).tolist() for _ in range(count)]


def count_loads(loads):
    """Have each load note the keys of its chunks, and the scheduler's failures stay what they are."""
    submit = _vllm_worker.SealedWorker.submit_load

    def counted(self, job_id, src_spec, *arguments):
        loads.extend(key.hex() for key in src_spec.keys)
        return submit(self, job_id, src_spec, *arguments)

    _vllm_worker.SealedWorker.submit_load = counted


def flip(place):
    def apply(messages, at):
        for number in at:
            messages[number][place] ^= 1

    return apply


def swap(messages, at):
    copies = [message.copy() for message in messages]
    for number in at:
        messages[number][:] = copies[(number + 1) % len(messages)]


def cut(messages, at):
    for number in at:
        messages[number][messages[number].size // 2 :] = 0


def replay(others):
    def apply(messages, at):
        for number in at:
            messages[number][:] = others[number]

    return apply


FAULTS = {"header": flip(30), "chunk": flip(HEADER_SIZE + 5), "swapped": swap, "cut": cut}


def replayed(server, keys, others):
    """Return the messages of the same blocks as another tenant, epoch, version of the weights or key has them."""
    worker, key = server.worker, fastrack.Key.generate()
    meaning = dataclasses.replace(worker._spec.meaning, weights="0")
    rows, size = server.stored(), worker._sizes[0]
    for name in ("edition", "key"):
        others[name] = []
        for each in keys:
            here, plain = worker._context(each, 0, None), bytearray(size)
            assert BlockSealer(worker._key).open(here, server.rows[rows[each]], plain)
            message = server.rows[rows[each]].copy()
            context = here._replace(model=meaning.context(b"").model) if name == "edition" else here
            BlockSealer(key if name == "key" else worker._key).seal(context, plain, message)
            others[name].append(message)
    return others


def faults(folder):
    """Each fault, in the first, a middle and every block: answers, blocks refused, how often a bad one was loaded."""
    [prompt] = prompts()
    server, others = Server(folder), {}
    found = {"salted": server.ask([prompt], "another")}
    server.ask(prompts(seed=2))
    others["tenant"] = list(server.messages(list(server.stored())[:6]).values())
    assert server.llm.reset_prefix_cache()
    found["cold"] = server.ask([prompt])
    found["warm"] = server.again([prompt])
    keys = list(server.stored())[-6:]
    replayed(server, keys, others)
    loads = []
    count_loads(loads)

    def rounds(name, apply):
        for place, at in {"first": [0], "middle": [3], "every": range(6)}.items():
            rows = server.stored()
            apply([server.rows[rows[key]] for key in keys], at)
            loads.clear()
            refused = server.worker._paged.sealer.counts["refused"]
            bad = server.again([prompt])
            anew = server.again([prompt])  # stores again what was bad
            counts = [loads.count(keys[number].hex()) for number in at]
            refused = server.worker._paged.sealer.counts["refused"] - refused
            found[f"{name} {place}"] = [bad[0], anew[0], server.again([prompt]), refused, max(counts)]

    for name, apply in {**FAULTS, **{name: replay(each) for name, each in others.items()}}.items():
        rounds(name, apply)
    before = list(server.messages(keys).values())
    assert server.llm.reset_prefix_cache(reset_connector=True)
    found["reset"] = server.ask([prompt])
    server.again([prompt])
    rounds("epoch", replay(before))
    connector = get_kv_transfer_group()
    connector.unregister_kv_caches()  # as before vLLM sleeps
    connector.restore_kv_caches()
    found["registered again"] = server.again([prompt])
    return found


def searched(server, folder):
    """Count places of the model's KV cache, of 32 bytes, that are found in the primary tier and in files behind it."""
    caches = [each.tensor.numpy().view(np.uint8) for each in server.worker._caches.tensors]
    used = [np.flatnonzero(cache[:2000].any(1)) for cache in caches]  # blocks are taken in turn, from the first on
    places = {
        cache[block, at : at + 32].tobytes()
        for cache, blocks in zip(caches, used, strict=True)
        for block in blocks
        for at in range(0, 2048, 256)
    } - {bytes(32)}
    shared = server.regions[-1].read_bytes()
    files = b"".join(path.read_bytes() for path in (folder / "fs").rglob("*.bin"))
    assert len(places) > 100
    return [sum(place in text for place in places) for text in (shared, files)], len(files)


def tiers(folder):
    """Answers through vLLM's own tier of files, from swapped ones too. What of the model's cache is found there."""

    def start():
        extra = {"cpu_bytes_to_use": 14 * 20480, "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "fs")}]}
        return Server(folder, extra=extra)

    def evict(server):
        for seed in range(5, 9):
            server.ask(prompts(seed=seed), tokens=2)
        assert not set(keys) & set(server.stored())

    [prompt] = prompts()
    server = start()
    found = {"cold": server.ask([prompt])}
    server.again(prompts(seed=2))
    keys = list(server.stored())[:6]
    evict(server)
    found["files"] = server.again([prompt])
    found["found"] = searched(server, folder)
    found["namespace"] = str(folder) in str(max((folder / "fs").rglob("*")).relative_to(folder / "fs"))
    evict(server)
    paths = sorted((folder / "fs").rglob("*.bin"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    loads, refused = [], server.worker._paged.sealer.counts["refused"]
    count_loads(loads)
    found["swapped"] = server.again([prompt])
    found["refused"] = server.worker._paged.sealer.counts["refused"] - refused
    found["anew"] = server.again([prompt])  # stored in the primary tier, over no file
    found["healed"] = server.again([prompt])
    evict(server)
    found["evicted"] = server.again([prompt])
    found["loads"] = sorted({loads.count(key.hex()) for key in keys})

    class Copies:  # what a worker without a cipher would store
        def __getattr__(self, name):
            return getattr(engine, name)

        def seal_run(self, schedule, source, target, first):
            target[: source.size] = source

    engine = server.worker._paged._pages._engine
    server.worker._paged._pages._engine = Copies()
    for seed in range(20, 24):
        server.ask(prompts(seed=seed), tokens=2)
    found["control"] = searched(server, folder)
    return found


def groups(folder):
    """A model with windows and without, in two groups: answers cold, warm, with bad blocks in each group, and anew."""
    server = Server(folder, "gemma")
    [prompt, other] = prompts(2)
    found = {"groups": len(server.scheduler.kv_cache_config.kv_cache_groups)}
    found["cold"], found["other"] = server.ask([prompt]), server.ask([other])
    found["warm"] = server.again([prompt])
    loads = []
    count_loads(loads)
    for group in (0, 1):
        loads.clear()
        rows = {key: row for key, row in server.stored().items() if key[-1] == group}
        for row in rows.values():
            server.rows[row, 100] ^= 1
        bad, again = server.again([prompt]), server.again([prompt])
        found[f"bad {group}"] = [bad, again, max(loads.count(key.hex()) for key in rows)]
        found[f"healed {group}"] = server.again([prompt])
    return found


def ranks(folder):
    """Two ranks: answers cold, warm, with a bad block of the second, and anew. Keys in the scheduler's process."""
    made = []
    init = fastrack.Key.__init__
    fastrack.Key.__init__ = lambda self, *arguments, **options: made.append(1) or init(self, *arguments, **options)
    server = Server(folder, tensor_parallel_size=2, distributed_executor_backend="mp")
    [prompt] = prompts()
    found = {"cold": server.ask([prompt], tokens=3), "warm": server.again([prompt])}
    rows, spec = server.stored(), server.manager.primary_tier
    [first, *_] = rows.values()
    half = server.rows[first].nonzero()[0].max() // 2
    server.rows[first, half + 500] ^= 1
    found |= {"bad": server.again([prompt]), "failed": len(server.manager.failed), "anew": server.again([prompt])}
    found |= {"healed": server.again([prompt]), "rows": [len(rows), spec._num_chunks]}
    return {**found, "keys": len(made) + sum(isinstance(each, fastrack.Key) for each in gc.get_objects())}


def weights(folder):
    """Answers after a reload of other weights: with vLLM's own cache reset alone, then with that of the connector."""
    [prompt] = prompts()
    server = Server(folder, "plain-other")
    found = {"other": server.ask([prompt])}
    del server
    server = Server(folder)
    found |= {"cold": server.ask([prompt]), "warm": server.again([prompt])}
    server.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "plain-other")})
    found |= {"reloaded": server.again([prompt]), "again": server.again([prompt])}
    assert server.llm.reset_prefix_cache(reset_connector=True)
    found |= {"reset": server.ask([prompt]), "stored": server.again([prompt])}
    return found


def late(folder):
    """Answers after a reload of other weights, a reset before which came too early or while a request went on."""
    [prompt] = prompts()
    server = Server(folder, "plain-other")
    found = {"other": server.ask([prompt])}
    del server
    server, other = Server(folder), {"weights_path": str(folder / "plain-other")}
    found["cold"] = server.ask([prompt])
    assert server.llm.reset_prefix_cache(reset_connector=True)
    server.ask([prompt], tokens=1)  # vLLM hands its blocks to the worker a step later
    server.llm.collective_rpc("reload_weights", kwargs=other)
    found |= {"early": server.again([prompt]), "early again": server.again([prompt])}
    assert server.llm.reset_prefix_cache(reset_connector=True)
    server.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "plain")})
    engine = server.llm.llm_engine
    engine.add_request(
        "held", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    )
    for _ in range(3):
        engine.step()
    server.llm.collective_rpc("reload_weights", kwargs=other)
    found["held"] = server.llm.reset_prefix_cache(reset_connector=True)
    while engine.has_unfinished_requests():
        engine.step()
    found |= {"mixed": server.again([prompt]), "mixed again": server.again([prompt])}
    assert server.llm.reset_prefix_cache(reset_connector=True)
    found |= {"reset": server.ask([prompt]), "stored": server.again([prompt])}
    core = engine.engine_core.engine_core
    core.pause_scheduler("keep")  # which resets both caches, before there are other weights
    server.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder / "plain")})
    core.resume_scheduler()
    found |= {"paused": server.ask([prompt]), "paused again": server.again([prompt])}
    core.model_executor.driver_worker.worker.model_runner.add_lora = lambda _: True
    for in_place in (False, True):
        server.llm.collective_rpc("add_lora", args=(LoRARequest("name", 1, "path", load_inplace=in_place),))
        found[f"in place {in_place}"] = server.again([prompt])
    return found


def chunks(folder):
    """Three blocks to a chunk: a load that begins inside of one, and a bad block in the middle of a chunk."""
    server = Server(folder, extra={"blocks_per_chunk": 3})
    [prompt] = prompts()
    found = {"cold": server.ask([prompt])}
    server.again(prompts(seed=2))
    assert server.llm.reset_prefix_cache()
    server.ask([prompt[:40]])  # the first block is in the model's memory then
    found["inside"] = server.ask([prompt])
    room, rows = server.worker._spec.config.worker_kv_bytes_per_block, server.stored()
    server.rows[next(iter(rows.values())), room + 99] ^= 1  # the second block of the first chunk
    found["bad"] = server.again([prompt])
    found["counts"] = dict(server.worker._paged.sealer.counts)
    found["anew"], found["healed"] = server.again([prompt]), server.again([prompt])
    return found


JOBS = {each.__name__: each for each in (faults, tiers, groups, ranks, weights, late, chunks)}

if __name__ == "__main__":
    answer = JOBS[sys.argv[1]](Path(sys.argv[2]))
    print("\nANSWER", json.dumps(answer), flush=True)  # noqa: T201
    for path in Server.regions:
        path.unlink(missing_ok=True)
    os._exit(0)  # vLLM's threads would keep the process
