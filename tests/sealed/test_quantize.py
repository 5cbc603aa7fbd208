"""Models whose weights are quantised while they are sealed, and that readers see as bfloat16."""

import json
import sys
from functools import partial

import pytest
import torch
from helpers import quantization
from safetensors.torch import load_file as load_plain
from safetensors.torch import save_file as save_plain

import fastrack
from fastrack import AuthenticationError, FormatError, Key, load_folder, seal_folder, unseal_folder
from fastrack._models.lazy_weights import lazy_weights

KEY = Key.from_bytes(bytes(range(32)))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LINEAR = {"layers.0.mlp.gate_proj.weight": (300, 256), "layers.0.self_attn.k_proj.weight": (128, 256)}
OTHERS = {
    "embed_tokens.weight": (300, 256),
    "layers.0.input_layernorm.weight": (256,),
    "layers.0.mlp.gate.weight": (130, 256),
    "layers.0.small.weight": (64, 256),
    "layers.0.conv.weight": (128, 128, 3),
    "layers.0.proj.bias": (256, 256),
    "layers.0.proj.lora_A.weight": (256, 256),
    "lm_head.weight": (300, 256),
}
LIBRARIES = ["stand-in", "compressed-tensors"]


@pytest.fixture(autouse=True)
def _library(request, monkeypatch):
    if getattr(request, "param", LIBRARIES[0]) == LIBRARIES[0]:
        quantization.install(monkeypatch)
    else:
        pytest.importorskip("compressed_tensors")


def weights_of(names, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in names.items()}


def make_model(folder, dtype=torch.bfloat16, config=None, **more):
    """Write a model of two shards, as `save_pretrained` does."""
    folder.mkdir(parents=True)
    shards = {SHARDS[0]: weights_of(LINEAR, dtype), SHARDS[1]: weights_of(OTHERS, dtype) | more}
    for name, shard in shards.items():
        save_plain(shard, folder / name, metadata={"format": "pt"})
    index = {name: shard for shard, weights in shards.items() for name in weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config or {"hidden_size": 256}))
    return {name: weight for weights in shards.values() for name, weight in weights.items()}


@pytest.fixture
def plain(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def sealed(tmp_path, plain):  # noqa: ARG001 - the model to seal
    seal_folder(tmp_path / "model", tmp_path / "sealed", KEY, quantize="fp8")
    return tmp_path / "sealed"


def product(tensor):
    """Multiply values by their scales with torch, apart from opening them."""
    return (fastrack.unseal(tensor, KEY).float() * fastrack.unseal(tensor.scale, KEY)).bfloat16()


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def seen(folder):
    """The model as readers of a folder see it."""
    weights = load_folder(folder, KEY).weights()
    return {
        name: fastrack.unseal(tensor, KEY) if tensor.scale is None else product(tensor)
        for name, tensor in weights.items()
    }


class Model(torch.nn.Module):
    def __init__(self, weights, dtype=None):
        super().__init__()
        for name, weight in weights.items():
            owner = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(torch.empty_like(weight, dtype=dtype)))


@pytest.mark.parametrize("_library", LIBRARIES, indirect=True)
@pytest.mark.parametrize(("kind", "dtype", "error"), [("fp8", "F8_E4M3", 0.07), ("int8", "I8", 0.01)])
def test_weights_of_linear_layers_become_values_and_scales(tmp_path, plain, kind, dtype, error):
    seal_folder(tmp_path / "model", tmp_path / "sealed", KEY, quantize=kind)
    weights = load_folder(tmp_path / "sealed", KEY).weights()
    assert weights.keys() == plain.keys()
    assert {name: weight.dtype for name, weight in weights.items() if weight.scale is not None} == dict.fromkeys(
        LINEAR, dtype
    )
    for name, weight in weights.items():
        if name in LINEAR:
            assert weight.scale.shape == (weight.shape[0], 1)
            assert weight.context.scale.block == (1, weight.shape[1])
            opened = fastrack.to_device(weight, keys=KEY, dtype="bfloat16")
            assert torch.equal(opened, product(weight))
            assert (opened.float() - plain[name].float()).abs().max() < error * plain[name].abs().max()
        else:
            assert torch.equal(fastrack.to_device(weight, keys=KEY), plain[name])


def test_half_of_the_bytes_are_sealed(tmp_path, sealed):
    before, after = ((folder / SHARDS[0]).stat().st_size for folder in (tmp_path / "model", sealed))
    assert after < 0.53 * before


def test_the_configuration_and_the_index_stay_as_they_were(tmp_path, sealed):
    for name in ("config.json", "model.safetensors.index.json"):
        assert (sealed / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    load_folder(sealed, KEY).verify(KEY)


def test_modules_of_any_dtype_are_filled_with_the_products(sealed, plain):
    expected = seen(sealed)
    for dtype in (torch.bfloat16, torch.float32):
        model = Model(plain, dtype)
        fastrack.load_model(model, sealed, KEY)
        require_equal(model.state_dict(), {name: weight.to(dtype) for name, weight in expected.items()})
    with torch.device("meta"):
        model = Model({name: weight.to("meta") for name, weight in plain.items()})
    fastrack.load_model(model, sealed, KEY, device="cpu")
    require_equal(model.state_dict(), expected)


def test_a_module_without_a_place_for_scales_gets_the_products_of_a_single_file_too(tmp_path):
    name, (rows, columns) = next(iter(LINEAR.items()))
    values, scales = torch.ones(rows, columns, dtype=torch.int8), torch.full((rows, 1), 0.5)
    fastrack.save_file({name: values, f"{name}_scale": scales}, tmp_path / "one", KEY, scales={name: f"{name}_scale"})
    model = Model({name: values}, torch.bfloat16)
    assert fastrack.load_model(model, tmp_path / "one", KEY, strict=True) == ([], [])
    assert (model.state_dict()[name] == 0.5).all()
    raw = torch.nn.Module()
    raw.register_buffer("w", torch.zeros(rows, columns, dtype=torch.int8))
    raw.register_buffer("w_scale", torch.zeros(rows, 1))
    fastrack.save_file({"w": values, "w_scale": scales}, tmp_path / "two", KEY, scales={"w": "w_scale"})
    fastrack.load_model(raw, tmp_path / "two", KEY)
    assert torch.equal(raw.w, values)
    assert torch.equal(raw.w_scale, scales)


def test_transformers_gets_the_products(sealed):
    lazy = lazy_weights(load_folder(sealed, KEY).weights(), partial(fastrack.to_device, keys=KEY))
    expected = seen(sealed)
    assert {weight.dtype for weight in lazy.values()} == {torch.bfloat16}
    assert {weight.get_dtype() for weight in lazy.values()} == {"BF16"}
    require_equal({name: weight[...].to("cpu") for name, weight in lazy.items()}, expected)
    wide = {name: weight.to("cpu", torch.float32) for name, weight in lazy.items()}
    require_equal(wide, {name: weight.float() for name, weight in expected.items()})
    with pytest.raises(ValueError, match="which opens whole"):
        lazy["layers.0.mlp.gate_proj.weight"][:, 2:4]


def test_a_folder_comes_back_as_the_model_that_readers_see(tmp_path, sealed):
    unseal_folder(sealed, tmp_path / "back", KEY)
    found = {name: weight for shard in SHARDS for name, weight in load_plain(tmp_path / "back" / shard).items()}
    require_equal(found, seen(sealed))
    seal_folder(tmp_path / "back", tmp_path / "again", KEY)
    require_equal(seen(tmp_path / "again"), found)


@pytest.mark.nightly
def test_a_weight_of_several_pieces_and_slabs_is_quantised_alike(tmp_path, limited):
    (tmp_path / "model").mkdir()
    weight = torch.randn(2100, 4096, generator=torch.Generator().manual_seed(0))
    save_plain({"up.weight": weight}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    found = []
    for piece in (1 << 30, 100_000):
        limited(quantised_piece=piece)
        seal_folder(tmp_path / "model", tmp_path / f"{piece}", KEY, quantize="int8")
        found.append(seen(tmp_path / f"{piece}"))
    require_equal(*found)
    unseal_folder(tmp_path / "100000", tmp_path / "back", KEY)
    require_equal(load_plain(tmp_path / "back" / "model.safetensors"), found[0])


def test_all_bytes_of_the_weights_are_counted(tmp_path, plain):
    done = []
    seal_folder(tmp_path / "model", tmp_path / "sealed", KEY, quantize="fp8", progress=done.append)
    sizes = [
        tmp_path.joinpath("model", name).stat().st_size for name in ("config.json", "model.safetensors.index.json")
    ]
    assert sum(done) == sum(sizes) + sum(weight.nbytes for weight in plain.values())


@pytest.mark.usefixtures("plain")
def test_adapters_and_weights_without_a_configuration_stay_as_they_are(tmp_path):
    for name in ("adapter_model.safetensors", "more/model.safetensors"):
        (tmp_path / "model" / "more").mkdir(exist_ok=True)
        save_plain({"a.weight": torch.ones(128, 128)}, tmp_path / "model" / name)
    seal_folder(tmp_path / "model", tmp_path / "sealed", KEY, quantize="fp8")
    folder = load_folder(tmp_path / "sealed", KEY)
    for name in ("adapter_model.safetensors", "more/model.safetensors"):
        with folder.open(name) as file:
            assert list(file) == ["a.weight"]
            assert file["a.weight"].scale is None


def test_an_altered_scale_is_refused_and_the_model_is_cleared(tmp_path, sealed, plain):
    with load_folder(sealed, KEY).open(SHARDS[0]) as file:
        _, start = file["layers.0.mlp.gate_proj.weight"].scale.location
    with (sealed / SHARDS[0]).open("r+b") as file:
        file.seek(start + 200)
        byte = file.read(1)
        file.seek(start + 200)
        file.write(bytes([byte[0] ^ 1]))
    model = Model(plain)
    with pytest.raises(AuthenticationError, match=r"gate_proj\.weight_scale"):
        fastrack.load_model(model, sealed, KEY)
    assert not any(weight.any() for weight in model.state_dict().values())
    with pytest.raises(AuthenticationError, match=r"gate_proj\.weight_scale"):
        unseal_folder(sealed, tmp_path / "back", KEY)
    assert not (tmp_path / "back").exists()


# What cannot be quantised.


def require_refused(folder, error, match, kind="fp8"):
    with pytest.raises(error, match=match):
        seal_folder(folder, folder.with_name("sealed"), KEY, quantize=kind)
    assert not folder.with_name("sealed").exists()


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("kind", ["fp4", "FP8", "", "bfloat16"])
def test_other_kinds_are_refused(tmp_path, kind):
    require_refused(tmp_path / "model", ValueError, "quantize=: expected one of fp8, int8, got ", kind)


def test_a_quantised_model_is_refused(tmp_path):
    make_model(tmp_path / "model", config={"quantization_config": {"quant_method": "fp8"}})
    require_refused(tmp_path / "model", FormatError, "expected a model without quantization_config")


def test_a_model_with_scales_of_its_own_is_refused(tmp_path):
    save_name = "layers.0.q_proj.weight"
    make_model(tmp_path / "model", **{save_name: torch.ones(128, 128), f"{save_name}_scale": torch.ones(1)})
    require_refused(tmp_path / "model", FormatError, "expected no 'layers.0.q_proj.weight_scale' beside a weight")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    for number, bad in enumerate((float("inf"), float("nan"))):
        weight = torch.ones(128, 128)
        weight[70, 3] = bad
        make_model(tmp_path / f"{number}" / "model", **{"q_proj.weight": weight})
        require_refused(tmp_path / f"{number}" / "model", FormatError, "'q_proj.weight': expected finite weights")


def test_a_folder_without_weights_of_linear_layers_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    save_plain({"embed.weight": torch.ones(300, 300)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    require_refused(tmp_path / "model", FormatError, "expected weights of linear layers in .safetensors files")


@pytest.mark.usefixtures("plain")
def test_without_the_library_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    require_refused(tmp_path / "model", ModuleNotFoundError, r"needs compressed_tensors.*'fastrack-io\[quantize\]'")
