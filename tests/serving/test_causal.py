"""Sealed causal models of transformers: on the page that serves them in twelve lines, and in examples/serving."""

import json
import logging
import os
import re
import socket
import threading
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.models import write_llama, write_tokenizer
from helpers.pages import blocks_of

import fastrack

ROOT = Path(__file__).parents[2]
if not (ROOT / "examples").exists() or not hasattr(os, "memfd_create"):
    pytest.skip("the server takes Linux, and the tests run without the examples", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from examples.serving import demo, sealing, supervisor, weights  # noqa: E402
from examples.serving.client import Client  # noqa: E402
from examples.serving.refusals import RefusedError, told  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

TEMPLATE = "{{ bos_token }} {% for m in messages %}{{ m['content'] }} w7 {% endfor %}"
SIZES = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 96}
QWEN = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with a key, a plain Llama and the sealed one."""
    folder = tmp_path_factory.mktemp("llama")
    fastrack.Key.generate().save(folder / "owner.key")
    write_llama(folder / "model", 0)
    write_tokenizer(folder / "model", template=TEMPLATE)
    fastrack.seal_folder(folder / "model", folder / "sealed", fastrack.Key.load(folder / "owner.key"))
    return folder


def test_the_twelve_lines_of_the_page_serve_a_sealed_llama(llama, monkeypatch):
    pytest.importorskip("fastapi")
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    program = next(block.text for block in blocks_of(page) if "fastapi" in block.text and block.language == "python")
    assert len([line for line in program.splitlines() if line.strip()]) == 12
    monkeypatch.chdir(llama)
    space = {}
    exec(program, space)
    with started(space["app"]) as url:
        asked = urllib.request.Request(f"{url}/generate", b'"w5 w6"', {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as response:
            answer = json.load(response)
    plain = transformers.AutoModelForCausalLM.from_pretrained("model")
    expected = plain.generate(torch.tensor([[5, 6]]), max_new_tokens=40)
    assert answer == " ".join(f"w{token}" for token in expected[0] if token > 2)


@contextmanager
def started(app):
    """Serve an application with uvicorn, and return its address."""
    uvicorn = pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def opened(path, key):
    memory = os.memfd_create("model")
    weights.open_model(path, str(key), memory)
    model = weights.map_model(memory)
    os.close(memory)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_a_causal_model_answers_as_the_plain_one(llama, tmp_path, name):
    plain, sealed, is_chat = llama / "model", llama / "sealed", name == "llama"
    if not is_chat:
        plain, sealed = tmp_path / "plain", tmp_path / "sealed"
        made = {
            "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **GPT2)),
            "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **QWEN, **HEADS)),
        }[name]()
        made.to(torch.bfloat16).save_pretrained(plain)
        write_tokenizer(plain)
        fastrack.seal_folder(plain, sealed, fastrack.Key.load(llama / "owner.key"))
    model, expected = opened(sealed, llama / "owner.key"), transformers.AutoModelForCausalLM.from_pretrained(plain)
    tokens = torch.arange(5, 25)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected(tokens[None]).logits[0, -1].float())
    if name != "qwen2":  # whose own tokenizer knows no such words
        made = expected.generate(torch.tensor([[1, 5, 6, 7] if is_chat else [5, 6]]), max_new_tokens=64)
        assert model.write("w5 w6") == " ".join(f"w{token}" for token in made[0, 4 if is_chat else 2 :] if token > 2)
    for wrong in (tokens - 6, tokens + 500, tokens[:0], torch.ones(5000, dtype=torch.long)):
        assert not model.takes(wrong)
    for long in ("w5 " * 2000, "w" * 100_000):
        with pytest.raises(RefusedError, match="tokens"):
            model.write(long)


def other_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


@pytest.mark.parametrize(
    ("change", "cause", "expected"),
    [
        (other_config(num_hidden_layers=3), "incomplete", "expected all weights .* for 9, such as model.layers.2"),
        (other_config(model_type="own"), "architecture", "a causal model of transformers, got another"),
        (other_config(architectures=["LlamaModel"]), "architecture", "a causal model of transformers, got another"),
        (other_config(hidden_size=64), "architecture", "config.json describes, got RuntimeError in"),
        (lambda folder: (folder / "config.json").unlink(), "incomplete", "a model with config.json, got none"),
    ],
    ids=["weights", "type", "class", "sizes", "configuration"],
)
def test_what_is_no_whole_causal_model_is_refused_in_one_line(tmp_path, change, cause, expected):
    key = fastrack.Key.generate()
    key.save(tmp_path / "owner.key")
    write_llama(tmp_path / "plain", 0)
    change(tmp_path / "plain")
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", key)
    with pytest.raises(Exception, match=expected) as caught:
        opened(tmp_path / "sealed", tmp_path / "owner.key")
    assert supervisor.cause_of(caught.value) == cause
    assert "\n" not in told(caught.value)


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_model_without_a_tokenizer_answers_tokens_and_says_why_no_text(tmp_path, caplog, content):
    key = fastrack.Key.generate()
    key.save(tmp_path / "owner.key")
    write_llama(tmp_path / "plain", 0)
    if content is not None:
        (tmp_path / "plain" / "tokenizer.json").write_text(content)
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", key)
    with caplog.at_level(logging.WARNING, "serving"):
        model = opened(tmp_path / "sealed", tmp_path / "owner.key")
    assert re.fullmatch(r"the model has no tokenizer \(\w+ in .*\): requests of text are refused", caplog.messages[0])
    assert model(torch.arange(3)).shape == (512,)
    with pytest.raises(RefusedError, match=r"\(text\): the model has no tokenizer"):
        model.write("w5")


@pytest.mark.nightly
def test_a_server_answers_tokens_and_texts_of_a_sealed_llama(llama, tmp_path):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    model = opened(llama / "sealed", llama / "owner.key")
    log = tmp_path / "log"
    with log.open("w") as file, demo.serving(llama / "sealed", llama / "owner.key", log=file.fileno()) as server:
        client = Client(server.url, sealing.trust_nothing)
        tokens = torch.arange(5, 25)
        assert torch.equal(client.ask(tokens).logits, model(tokens))
        assert client.ask("w5 w6").text == model.write("w5 w6")
        client.close()
    assert "Traceback" not in log.read_text()
