"""Sealed blocks in vLLM's offloading: answers as without, whatever happens to what left the memory of the model."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.models import write_llama, write_tokenizer
from helpers.swift import free_ports

import fastrack

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("vllm_kv_program.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_LOGGING_LEVEL": "WARNING"}
ALL = 192  # tokens of the blocks of a prompt, of which the last tokens are always computed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    write_llama(folder / "plain", 1)
    write_tokenizer(folder / "plain")
    write_llama(folder / "plain-other", 2)
    fastrack.Key.generate().save(folder / "owner.key")
    return folder


def run(job, folder, **environment):
    command = [sys.executable, PROGRAM, job, folder]
    environment = {**ENVIRONMENT, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("ANSWER")[2])


def test_blocks_that_are_altered_swapped_cut_or_of_others_are_computed_anew_and_loaded_once(folder):
    found = run("faults", folder)
    tokens, cached = found.pop("cold")
    assert cached == [0]
    assert found.pop("salted") == [tokens, [0]]
    assert found.pop("reset") == [tokens, [0]]
    assert found.pop("warm") == found.pop("registered again") == [tokens, [ALL]]
    assert len(found) == 8 * 3
    for name, (bad, anew, healed, refused, loads) in found.items():
        assert bad == anew == tokens, name
        assert healed == [tokens, [ALL]], name
        assert refused == (6 if name.endswith("every") else 1), name
        assert loads == 1, name


def test_nothing_of_the_cache_is_in_the_tiers_and_swapped_files_are_misses(folder):
    found = run("tiers", folder)
    tokens = found["cold"][0]
    assert found["files"] == [tokens, [ALL]]
    assert found["swapped"][0] == found["anew"][0] == tokens
    assert found["healed"] == [tokens, [ALL]]
    assert found["evicted"] == [tokens, [0]]  # the files are those that did not open
    assert found["loads"] == [2]  # a bad one, and the one that was stored in its place
    assert found["refused"] == 6
    assert not found["namespace"]
    assert found["found"][0] == [0, 0]
    assert found["found"][1] > 1e5  # bytes of files
    in_memory, in_files = found["control"][0]
    assert in_memory > 100
    assert in_files > 100


def write_gemma(folder):
    """Write a random model with two groups of caches: every other layer has a window."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    config = Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=512,
        max_position_embeddings=1024,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def test_a_bad_block_of_either_of_two_groups_has_its_request_computed_anew(folder):
    write_gemma(folder / "gemma")
    found = run("groups", folder)
    tokens, cached = found["cold"]
    assert found["groups"] == 2
    assert cached == [0]
    assert found["other"][0] != tokens
    assert found["warm"] == [tokens, [ALL]]
    for group in (0, 1):
        bad, again, loads = found[f"bad {group}"]
        assert bad == [tokens, [0]]
        assert again[0] == tokens
        assert loads == 1
        assert found[f"healed {group}"] == [tokens, [ALL]]


def test_a_bad_block_of_one_rank_is_a_miss_of_all_and_the_schedulers_process_has_no_key(folder):
    found = run("ranks", folder, VLLM_CPU_OMP_THREADS_BIND="0|1")
    tokens = found["warm"][0][0]
    assert tokens[:3] == found["cold"][0][0]
    assert found["warm"][1] == [ALL]
    assert found["failed"] == 1
    for name in ("bad", "anew", "healed"):
        assert found[name][0] == [tokens], name
    assert found["healed"][1] == [ALL]
    assert found["keys"] == 0


def test_after_other_weights_nothing_is_loaded_until_a_reset_and_nothing_old_opens(folder):
    found = run("weights", folder)
    tokens, others = found["cold"][0], found["other"][0]
    assert tokens != others
    assert found["warm"] == [tokens, [ALL]]
    for name in ("reloaded", "again", "reset"):
        assert found[name][0] == others, name
    assert found["reset"] == [others, [0]]
    assert found["stored"] == [others, [ALL]]


def test_after_other_weights_a_reset_counts_that_comes_after_them_and_ends_what_the_model_has(folder):
    found = run("late", folder)
    others, tokens = found["other"][0], found["cold"][0]
    assert tokens != others
    assert found["held"] is False
    for name in ("early", "early again", "mixed", "mixed again", "reset"):
        assert found[name] == [others, [0]], name
    assert found["stored"] == [others, [ALL]]
    assert found["paused"] == found["in place True"] == [tokens, [0]]
    assert found["paused again"] == found["in place False"] == [tokens, [ALL]]


def test_a_load_begins_inside_of_a_chunk_whose_blocks_are_messages_each(folder):
    found = run("chunks", folder)
    tokens = found["cold"][0]
    assert found["inside"] == [tokens, [ALL]]
    assert found["bad"][0] == found["anew"][0] == tokens
    assert found["healed"] == [tokens, [ALL]]
    assert found["counts"]["refused"] == 1


@pytest.fixture
def transfer(folder):
    def transfer(name="SealedOffloadingConnector", policy="recompute", **extra):
        given = {"keys": str(folder / "owner.key"), "edition": "1", "cpu_bytes_to_use": 1 << 22, **extra}
        return {
            "kv_connector": name,
            "kv_connector_module_path": "fastrack.kv.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {name: value for name, value in given.items() if value is not None},
        }

    return transfer


def test_a_server_stays_up_through_bad_blocks_and_answers_as_before(folder, transfer, tmp_path):
    import numpy as np

    [port] = free_ports(1)
    config = {**transfer(), "engine_id": f"fastrack-{os.getpid()}"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "plain"]
    command += ["--served-model-name", "llama", "--kv-transfer-config", json.dumps(config), "--block-size", "32"]
    command += ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "256", "--port", str(port)]
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)

    def post(path, body):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=60).read()

    def ask(first=3):
        prompt = [3 + (first + number * number) % 500 for number in range(200)]
        body = {"model": "llama", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return json.loads(post("/v1/completions", body))["choices"][0]["text"]

    def again():
        post("/reset_prefix_cache", {})
        return ask()

    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                answer = ask()
                break
            except OSError:
                time.sleep(1)
        ask(7)
        assert again() == answer
        [region] = Path("/dev/shm").glob(f"vllm_offload_{config['engine_id']}*")
        rows = np.memmap(region, np.uint8, "r+")
        for place in (30, 100):  # of headers and of chunks
            assert rows[place::4096].any()
            rows[place::4096] ^= 1
            assert [again(), again(), again()] == [answer] * 3
        assert process.poll() is None
        assert log.read_text().count("Recovered from KV load failure") == 2
        assert (folder / "owner.key").read_text().split()[-1] not in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for left in Path("/dev/shm").glob(f"vllm_offload_{config['engine_id']}*"):
            left.unlink()


def started(folder, transfer, **options):
    """Start the connector as vLLM's scheduler does, as far as it looks at settings."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig

    arguments = {"served_model_name": "llama", "skip_tokenizer_init": True, "dtype": "bfloat16", **options}
    config = EngineArgs(
        model=str(folder / "plain"), kv_transfer_config=KVTransferConfig(**transfer), **arguments
    ).create_engine_config()
    return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(0, [], []))


@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"policy": "fail"}, {}, "kv_load_failure_policy: expected 'recompute'"),
        ({"sync_load_budget_bytes": 1}, {}, "sync_load_budget_bytes: expected 0"),
        ({"canonical_layout": True}, {}, "canonical_layout: expected none"),
        ({"edition": None}, {}, "expected the version of the weights as edition"),
        ({}, {"enable_lora": True}, "expected the version of the adapters as adapters"),
        ({"name": "SealedConnector"}, {}, "expected 'SealedOffloadingConnector', got 'SealedConnector'"),
    ],
)
def test_settings_that_would_let_a_bad_block_pass_are_refused_at_the_start(folder, transfer, changes, options, named):
    with pytest.raises(ValueError, match=named):
        started(folder, transfer(**changes), **options)


@pytest.mark.filterwarnings("ignore")
def test_settings_that_change_what_an_image_becomes_are_of_the_model():
    from types import SimpleNamespace

    from fastrack.kv.vllm import _model_of

    def model(overrides=None, **media):
        config = SimpleNamespace(
            served_model_name="llama",
            quantization=None,
            hf_overrides=overrides,
            multimodal_config=SimpleNamespace(**media),
        )
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"edition": "1"}),
            model_config=config,
            load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
            lora_config=None,
        )

    values = ({"num_crops": 4}, {"video": {"num_frames": 8}}, 0.5)
    names = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
    given = [{}, {"overrides": {"rope": 1}}, *({name: value} for name, value in zip(names, values, strict=True))]
    texts = {json.dumps(_model_of(model(**each))) for each in given}
    assert len(texts) == len(given)


@pytest.mark.filterwarnings("ignore")
def test_pages_are_those_of_the_device_of_the_caches_and_other_devices_are_named(monkeypatch):
    import types

    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

    from fastrack.kv import _vllm_worker

    def caches(*arrays):
        tensors = [CanonicalKVCacheTensor(each, 64) for each in arrays]
        return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, 48)], [CanonicalKVCacheRef(0, 64)]])

    array = torch.zeros(4, 64, dtype=torch.int8)
    assert _vllm_worker.pages_of(caches(array)).sizes() == [48, 64]
    with pytest.raises(fastrack.DeviceError, match="got them on meta"):
        _vllm_worker.pages_of(caches(array.to("meta")))
    with pytest.raises(fastrack.DeviceError, match="got them on cpu, meta"):
        _vllm_worker.pages_of(caches(array, array.to("meta")))
    # In place of a CUDA device: what is asked of an array, and the module of that device's pages.
    padded = torch.zeros(4, 64, dtype=torch.int8)[:, :48]

    class StandIn:
        device = torch.device("cuda:1")
        stride, element_size = padded.stride, padded.element_size

        def data_ptr(self):
            return 4096

        def __getitem__(self, block):
            return padded[block]

    module = types.SimpleNamespace(CudaPages=types.SimpleNamespace(on=lambda *arguments: arguments))
    monkeypatch.setattr(_vllm_worker, "import_module", {"fastrack._devices.paged.cuda": module}.__getitem__)
    device, groups, of_caller = _vllm_worker.pages_of(caches(StandIn()))
    assert device == "cuda:1"
    assert of_caller.is_contiguous()  # as a device asks of an array that is written to
    assert not padded.is_contiguous()
    assert groups == [[(4096, 64, 48)], [(4096, 64, 64)]]
