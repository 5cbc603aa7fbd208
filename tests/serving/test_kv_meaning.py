"""The meaning of the bytes of a KV block: each value separates blocks, and what no server tells has to be written."""

from dataclasses import fields, replace

import numpy as np
import pytest

from fastrack.kv import BlockContext, BlockSealer
from fastrack.kv._meaning import BlockMeaning
from fastrack.kv._settings import limit_of, require_setting, settings_of

HERE = BlockMeaning(
    model="llama",
    weights="1",
    quantization=None,
    overrides={},
    adapter=None,
    dtype="fp8_e4m3",
    layout="LBNHC",
    page_size=16,
    block_size=64,
    heads=8,
    layers=["0", "1"],
    groups=[16],
    details=None,
    ranks={"tp": [0, 2], "attn_cp": [0, 1]},
    hash="sha256",
    seed="0",
)
OTHERS = {
    "model": ["llama2", None],
    "weights": ["2"],
    "quantization": ["fp8"],
    "overrides": [{"rope_theta": 1e6}],
    "adapter": ["1"],
    "dtype": ["fp8_e5m2", "uint8"],
    "layout": ["LBHNC"],
    "page_size": [32, None],
    "block_size": [16],
    "heads": [4, None],
    "layers": [["0"], ["1", "0"]],
    "groups": [[16, 16]],
    "details": [["amx"]],
    "ranks": [{"tp": [1, 2], "attn_cp": [0, 1]}, {"tp": [0, 2], "attn_cp": [0, 2]}, {"tp": [0, 2]}],
    "hash": ["blake3"],
    "seed": ["1", None],
}
CONTEXTS = [
    HERE.context(b"tokens"),
    HERE.context(b"token"),
    HERE.context(b"tokens", "tenant"),
    HERE.context(b"tokens", group=0),
    HERE.context(b"tokens", group=1),
    HERE.context(b"tokens", rank=1),
    *(replace(HERE, **{name: other}).context(b"tokens") for name, others in OTHERS.items() for other in others),
]


def test_all_values_of_a_meaning_are_tried():
    assert OTHERS.keys() == {each.name for each in fields(BlockMeaning) if each.init}


def test_a_block_opens_under_its_own_meaning_alone(key):
    sealer, opened, opens = BlockSealer(key), np.empty(64, np.uint8), 0
    for context in CONTEXTS:
        message = np.empty(sealer.sealed_size(64), np.uint8)
        sealer.seal(context, np.ones(64, np.uint8), message)
        opens += sum(sealer.open(other, message, opened) for other in CONTEXTS)
        assert sealer.open(context, message, opened)
    assert opens == len(CONTEXTS)
    assert len({context.name(sealer.key) for context in CONTEXTS}) == len(CONTEXTS)


def test_values_in_another_order_are_the_same_meaning():
    turned = replace(HERE, ranks=dict(reversed(HERE.ranks.items())))
    assert turned.context(b"tokens", group=1, rank=0) == HERE.context(b"tokens", rank=0, group=1)


def test_a_context_is_the_public_one_with_canonical_json():
    assert HERE.context(b"tokens", "tenant", group=1) == BlockContext(
        model='{"adapter":null,"model":"llama","overrides":{},"quantization":null,"weights":"1"}',
        layout=(
            '{"block_size":64,"details":null,"dtype":"fp8_e4m3","groups":[16],"hash":"sha256","heads":8,'
            '"layers":["0","1"],"layout":"LBNHC","page_size":16,"seed":"0"}'
        ),
        ranks='{"attn_cp":[0,1],"group":1,"tp":[0,2]}',
        hash=b"tokens",
        salt="tenant",
    )


@pytest.mark.parametrize("model", ["/dev/shm/fastrack-1/model", "./model", "~/model", ""])
def test_a_path_is_no_name_of_a_model(model):
    with pytest.raises(ValueError, match=r"expected the name by which the model is served, got .*--served-model-name"):
        replace(HERE, model=model)


def test_a_meaning_lacks_nothing():
    members = {each.name: getattr(HERE, each.name) for each in fields(BlockMeaning) if each.init}
    del members["seed"]
    with pytest.raises(TypeError, match="seed"):
        BlockMeaning(**members)


@pytest.mark.parametrize("given", [{}, {"edition": None}, {"edition": ""}, {"edition": True}, {"edition": ["1"]}])
def test_what_no_server_tells_is_asked_for_by_name(given):
    with pytest.raises(ValueError, match=r"expected the version of the weights as edition, got none\. .*2026-11"):
        settings_of(given, "params", ("edition",), required=("edition",))
    assert require_setting({"edition": 3}, "params", "edition") == "3"
    assert settings_of({"edition": "3"}, "params", ("edition",), required=("edition",)) == {"edition": "3"}


@pytest.mark.parametrize(
    ("value", "limit"),
    [(None, None), (1, 1), ("20", 20), ("20 GiB", 20 << 30), ("3KiB", 3 << 10), ("1 TiB", 1 << 40)],
)
def test_a_limit_is_written_in_bytes_or_with_a_unit(value, limit):
    assert limit_of({"limit": value}, "params") == limit


@pytest.mark.parametrize("value", ["", "20 GB", "-1", 0, 1.5, "GiB", True])
def test_a_limit_in_another_form_is_refused(value):
    with pytest.raises(ValueError, match="params: expected bytes as limit, such as 20 GiB, got"):
        limit_of({"limit": value}, "params")
