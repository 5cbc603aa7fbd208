"""Model folders through transformers, from a warm cache: 236 MiB of bfloat16 in 5 shards, sealed and unencrypted.

On `cpu` a plain `from_pretrained` that keeps the dtype maps the shards, and reads nothing. It is compared with calls
that read them (`disable_mmap=True`, the default on some file systems) or convert them. Runs take turns, in another
order each time.
"""

from functools import partial
from random import Random

import pytest
import torch
from conftest import MIB

from fastrack import seal_folder
from fastrack._bench.measure import medians

transformers = pytest.importorskip("transformers", minversion="5")

from fastrack.transformers import from_pretrained  # noqa: E402 - which needs it

ROUNDS = 12
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 16_000}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
TOKENS = torch.arange(8)[None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).to(torch.bfloat16)
    model.save_pretrained(folder / "plain", max_shard_size="60MB")
    seal_folder(folder / "plain", folder / "sealed", key)
    return folder / "plain", folder / "sealed"


def used(load):
    with torch.no_grad():
        load()(TOKENS)


@pytest.mark.benchmark(group="a model folder, in turns")
def test_ratio(benchmark, folders, key):
    """Compare the sealed way with the plain one by the medians of runs in turns: see extra_info of the JSON report."""
    plain, sealed = folders
    cls = transformers.AutoModelForCausalLM
    ways = {
        "sealed": partial(from_pretrained, cls, sealed, keys=key),
        "plain, read": partial(cls.from_pretrained, plain, disable_mmap=True),
        "plain, mapped": partial(cls.from_pretrained, plain),
        "sealed, converted": partial(from_pretrained, cls, sealed, keys=key, dtype=torch.float32),
        "plain, converted": partial(cls.from_pretrained, plain, dtype=torch.float32),
    }
    ways |= {f"{name}, used": partial(used, ways[name]) for name in ("sealed", "plain, mapped")}
    seconds = medians(ways, ROUNDS, order=Random(0))
    pairs = {
        "sealed to read": ("sealed", "plain, read"),
        "sealed to mapped": ("sealed", "plain, mapped"),
        "both converted": ("sealed, converted", "plain, converted"),
        "sealed to mapped, used": ("sealed, used", "plain, mapped, used"),
    }
    size = sum(path.stat().st_size for path in plain.glob("*.safetensors"))
    benchmark.extra_info["MiB"] = size // MIB
    benchmark.extra_info["milliseconds"] = {name: round(1e3 * value, 1) for name, value in seconds.items()}
    benchmark.extra_info["ratios"] = {name: round(seconds[a] / seconds[b], 2) for name, (a, b) in pairs.items()}
    print(benchmark.extra_info)
    benchmark.pedantic(ways["sealed"], rounds=1)
