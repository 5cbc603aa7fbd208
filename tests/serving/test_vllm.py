"""vLLM with `load_format="fastrack"`: equal answers, and nothing of a folder believed before it is authenticated."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.models import write_adapter, write_llama
from helpers.swift import free_ports

import fastrack

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("vllm_program.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "VLLM_LOGGING_LEVEL": "WARNING"}


def write_model(folder, seed):
    """A random Llama of several shards, with a tokenizer, a chat template, a generation configuration and code."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_llama(folder, seed)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    (folder / "modeling_own.py").write_text("# code of the owner\n")


def append(path):
    path.write_bytes(path.read_bytes() + b" ")


def swap_shards(folder):
    first, second, *_ = sorted(folder.glob("model-*.safetensors"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def name_a_speculator(folder):
    """Have vLLM, which looks for this first, take another model, and code of this folder for a draft model."""
    config = json.loads((folder / "config.json").read_text())
    verifier = {"name_or_path": str(folder.parent / "sealed-other"), "architectures": ["LlamaForCausalLM"]}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 1}
    config["speculators_config"] = {"algorithm": "eagle", "proposal_methods": [proposal], "verifier": verifier}
    config["speculators_config"]["default_proposal_method"] = "greedy"
    config |= {"speculators_model_type": "eagle3", "model_type": "own", "auto_map": {"AutoConfig": "added.Own"}}
    config["transformer_layer_config"] = {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    lines = ["from pathlib import Path", "from transformers import LlamaConfig"]
    code = "\n".join([*lines, f"Path({str(folder / 'ran')!r}).touch()", "class Own(LlamaConfig): model_type = 'own'"])
    (folder / "added.py").write_text(code)


ALTERED = {
    "swapped-shard": swap_shards,
    "config": lambda folder: append(folder / "config.json"),
    "tokenizer": lambda folder: append(folder / "tokenizer.json"),
    "chat-template": lambda folder: append(folder / "chat_template.jinja"),
    "generation": lambda folder: append(folder / "generation_config.json"),
    "speculator": name_a_speculator,
    "code": lambda folder: append(folder / "modeling_own.py"),
    "index": lambda folder: append(folder / "fastrack.folder"),
    "removed-shard": lambda folder: min(folder.glob("model-*.safetensors")).unlink(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    key = fastrack.Key.generate()
    key.save(folder / "owner.key")
    for seed, name in enumerate(["", "-other"]):
        write_model(folder / f"plain{name}", seed)
        fastrack.seal_folder(folder / f"plain{name}", folder / f"sealed{name}", key)
    shutil.copytree(folder / "plain", folder / "plain-rope")
    config = json.loads((folder / "plain" / "config.json").read_text())
    (folder / "plain-rope" / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    fastrack.seal_folder(folder / "plain-rope", folder / "sealed-rope", key)
    for name, alter in ALTERED.items():
        shutil.copytree(folder / "sealed", folder / f"sealed-{name}")
        alter(folder / f"sealed-{name}")
    shutil.copytree(folder / "sealed", folder / "sealed-late")
    return folder


def run(job, folder, *arguments, status=0):
    done = subprocess.run(
        [sys.executable, PROGRAM, job, folder, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr[-3000:]
    return json.loads(done.stdout.partition("ANSWER")[2])


def test_answers_equal_those_of_the_plain_folder_also_after_reloads(folder):
    found = run("tokens", folder)
    assert found["sealed"] == found["plain"] != found["other"]
    assert found["engine"] != "openssl"
    assert not found["numba"]
    assert found["reloaded sealed-other"] == found["other"]
    assert found["reloaded sealed"] == found["after"] == found["plain"]
    assert "another configuration" in found["refused"]


def test_what_was_altered_is_refused_before_a_worker_starts(folder):
    found = run("refused", folder, json.dumps([f"sealed-{name}" for name in ALTERED]))
    assert found.pop("sealed-removed-shard") == found.pop("sealed-swapped-shard") == "RollbackError"
    assert found.pop("sealed-index") == "FormatError"
    assert set(found.values()) == {"AuthenticationError"}
    assert not (folder / "sealed-speculator" / "ran").exists()


def test_sealed_adapters_are_served_and_others_refused(folder):
    write_adapter(folder / "adapter")
    fastrack.seal_folder(folder / "adapter", folder / "sealed-adapter", fastrack.Key.load(folder / "owner.key"))
    shutil.copytree(folder / "sealed-adapter", folder / "altered-adapter")
    append(folder / "altered-adapter" / "adapter_config.json")
    found = run("adapters", folder)
    assert found["sealed, sealed-adapter"] == found["plain"] != found["base"]
    assert found["sealed base, sealed-adapter"] == found["base"]
    assert "expected a sealed adapter beside a sealed model" in found["sealed, adapter"]
    assert "adapter_config.json" in found["sealed, altered-adapter"]


def test_an_older_folder_is_refused_by_an_anchor(folder):
    from fastrack.grants import Signer

    signer = Signer.generate()
    newest = folder / "sealed-newest"
    shutil.copytree(folder / "sealed", newest)
    first = fastrack.publish(newest, signer=signer)
    shutil.copytree(newest, folder / "sealed-older")
    fastrack.Anchor.create(folder / "anchor", owner=signer.verifier, lineage=first.lineage)
    fastrack.publish(newest, signer=signer)
    found = run("refused", folder, json.dumps(["sealed-newest", "sealed-older"]), str(folder / "anchor"))
    assert found == {"sealed-newest": "accepted", "sealed-older": "RollbackError"}


def test_what_changes_after_the_check_has_no_effect_or_is_refused(folder):
    found = run("late", folder)
    assert found["same"]
    assert found["error"] == "RollbackError"
    assert "draft model" in found["draft"]
    assert "for speculative decoding" in found["beside"]
    assert found["served"] == str(folder / "sealed-late")
    assert found["tokenizer"]
    assert found["mode"] == "0o500"
    assert found["weights"] < 1000  # stubs


def test_ranks_open_their_rows_alone(folder):
    found = run("ranks", folder)
    assert found["equal"]
    assert found["opened"] <= 0.51 * found["whole"]


def test_exchanged_files_of_the_example_connector_change_answers(folder):
    found = run("stock", folder)
    assert found["again"] == [found["cold"][0], [192, 192]]
    assert found["exchanged"][1] == [192, 192]
    assert found["exchanged"][0] != found["cold"][0]


@pytest.fixture
def serve(folder, tmp_path):
    processes = []

    [port] = free_ports(1)

    def start(name):
        # As `vllm serve`, which in this build for CPUs looks for a package of another name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / name]
        command += ["--load-format", "fastrack"]
        command += ["--model-loader-extra-config", json.dumps({"keys": str(folder / "owner.key")})]
        command += ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "256", "--port", str(port)]
        environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        processes.append(process)
        return process, tmp_path / "log", port

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_vllm_serve_answers_from_a_sealed_folder(folder, serve):
    process, log, port = serve("sealed")
    body = {"model": str(folder / "sealed"), "prompt": "w7 w8 w9", "max_tokens": 4, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            answer = json.load(urllib.request.urlopen(request, timeout=60))
            break
        except OSError:
            time.sleep(1)
    assert all(word[0] == "w" for word in answer["choices"][0]["text"].split())
    assert not any(secret in log.read_text() for secret in [(folder / "owner.key").read_text().split()[-1]])


def test_vllm_serve_ends_with_words_for_an_altered_folder(serve):
    process, log, _ = serve("sealed-tokenizer")
    assert process.wait(120) != 0
    text = log.read_text()
    assert "tokenizer.json: expected" in text
    assert "EngineCore" not in text
