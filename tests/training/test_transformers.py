"""Sealed model folders with the real transformers and PEFT: the same models as from the plain folder."""

import gc
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

from transformers import (  # noqa: E402 - it may be absent
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TorchAoConfig,
)
from transformers.distributed import DistributedConfig  # noqa: E402

from fastrack import Anchor, Key, load_folder, publish, seal_folder, unseal, unseal_folder  # noqa: E402
from fastrack.errors import AuthenticationError, FormatError, RollbackError  # noqa: E402
from fastrack.grants import Signer  # noqa: E402
from fastrack.transformers import from_pretrained, load_adapter  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

KEY = Key.from_bytes(bytes(range(32)))
TOKENS = torch.arange(2, 22)[None]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "sealed", "model"]


def llama(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 400}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options})).to(torch.bfloat16)
    made.generation_config = GenerationConfig(do_sample=True, temperature=0.25, eos_token_id=7)
    return made


def bert(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": len(WORDS)}
    return BertForMaskedLM(BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=64))


def seal(model, folder, name="sealed"):
    model.save_pretrained(folder / f"plain-{name}", max_shard_size="100KB")
    seal_folder(folder / f"plain-{name}", folder / name, KEY)
    return folder / f"plain-{name}", folder / name


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory, monkeypatch):
    """Keep the network out, and see that no temporary file is left."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    yield
    gc.collect()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("fastrack-")] == []


@pytest.fixture(scope="module")
def llama_folders(tmp_path_factory):
    return seal(llama(tie_word_embeddings=True), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bert_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    made = bert()
    made.save_pretrained(folder / "plain", max_shard_size="100KB")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS) + "\n")
    BertTokenizer(str(vocabulary)).save_pretrained(folder / "plain")
    seal_folder(folder / "plain", folder / "sealed", KEY)
    return folder / "plain", folder / "sealed"


def same(one, other):
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        assert torch.equal(one(TOKENS)[0], other(TOKENS)[0])
    assert {**one.config.to_dict(), "_name_or_path": ""} == {**other.config.to_dict(), "_name_or_path": ""}
    assert (one.training, one.dtype, one.device) == (other.training, other.dtype, other.device)
    return True


def shards(folder):
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def test_a_model_of_several_shards_is_that_of_the_plain_folder(llama_folders, bert_folders):
    for cls, (plain, sealed) in ((AutoModelForCausalLM, llama_folders), (AutoModelForMaskedLM, bert_folders)):
        assert len(shards(sealed)) > 1
        assert same(from_pretrained(cls, sealed, keys=KEY), cls.from_pretrained(plain))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": "float16"},
        {"dtype": "auto"},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}, "dtype": torch.float64},
        {"attn_implementation": "eager"},
        {"output_attentions": True},
    ],
    ids=str,
)
def test_options_are_honoured(llama_folders, options):
    plain, sealed = llama_folders
    for cls in (AutoModelForCausalLM, LlamaForCausalLM, AutoModel):
        made, expected = from_pretrained(cls, sealed, keys=KEY, **options), cls.from_pretrained(plain, **options)
        assert same(made, expected)
        assert made.config._attn_implementation == expected.config._attn_implementation
        assert getattr(made, "hf_device_map", None) == getattr(expected, "hf_device_map", None)


def test_tied_weights_stay_tied(llama_folders):
    model = from_pretrained(AutoModelForCausalLM, llama_folders[1], keys=KEY)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_configuration_of_generation_is_that_of_the_folder(llama_folders, tmp_path):
    plain, sealed = llama_folders
    found = from_pretrained(AutoModelForCausalLM, sealed, keys=KEY).generation_config
    assert (found.temperature, found.eos_token_id) == (0.25, 7)
    assert found.to_dict() == AutoModelForCausalLM.from_pretrained(plain).generation_config.to_dict()
    chosen = GenerationConfig(max_new_tokens=3)
    model = from_pretrained(AutoModelForCausalLM, sealed, keys=KEY, generation_config=chosen)
    assert model.generation_config.max_new_tokens == 3
    shutil.copytree(plain, tmp_path / "plain")
    (tmp_path / "plain" / "generation_config.json").unlink()
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    found = from_pretrained(AutoModelForCausalLM, tmp_path / "sealed", keys=KEY).generation_config
    assert found.to_dict() == AutoModelForCausalLM.from_pretrained(tmp_path / "plain").generation_config.to_dict()


def test_a_given_configuration_is_used(llama_folders):
    config = from_pretrained(AutoConfig, llama_folders[1], keys=KEY, attention_dropout=0.5)
    assert config.attention_dropout == 0.5
    config.num_hidden_layers = 1
    model, info = from_pretrained(
        AutoModelForCausalLM, llama_folders[1], keys=KEY, config=config, output_loading_info=True
    )
    assert len(model.model.layers) == 1
    assert info["unexpected_keys"]
    with pytest.raises(ValueError, match="config"):
        from_pretrained(AutoModelForCausalLM, llama_folders[1], keys=KEY, config="elsewhere")


def test_a_new_head_is_initialised_and_told(bert_folders):
    plain, sealed = bert_folders
    made, info = from_pretrained(
        AutoModelForSequenceClassification, sealed, keys=KEY, num_labels=3, output_loading_info=True
    )
    expected, told = AutoModelForSequenceClassification.from_pretrained(plain, num_labels=3, output_loading_info=True)
    assert info == told
    assert made.classifier.weight.shape == expected.classifier.weight.shape == (3, 64)
    assert torch.equal(made.bert.embeddings.word_embeddings.weight, expected.bert.embeddings.word_embeddings.weight)


def test_a_tokenizer_is_read_from_what_was_authenticated(bert_folders, tmp_path):
    plain, sealed = bert_folders
    for cls in (AutoTokenizer, BertTokenizer):
        found, expected = from_pretrained(cls, sealed, keys=KEY), cls.from_pretrained(plain)
        assert found("sealed model b")["input_ids"] == expected("sealed model b")["input_ids"]
        assert found.name_or_path == str(sealed)
        found.save_pretrained(tmp_path / cls.__name__)
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content.replace(b"sealed", b"Sealed") + b" ")
        with pytest.raises(AuthenticationError, match="tokenizer"):
            from_pretrained(AutoTokenizer, copy, keys=KEY)
        (copy / name).write_bytes(content)


# Refused by name.


@pytest.fixture
def copy(llama_folders, tmp_path):
    shutil.copytree(llama_folders[1], tmp_path / "copy")
    return tmp_path / "copy"


def refused(folder, name, error, **options):
    with pytest.raises(error, match=name):
        from_pretrained(AutoModelForCausalLM, folder, keys=KEY, **options)


def test_a_shard_of_another_training_an_older_one_and_a_missing_one_are_refused(copy, llama_folders, tmp_path):
    name = shards(copy)[0]
    _, other = seal(llama(5, tie_word_embeddings=True), tmp_path, "other")
    seal_folder(llama_folders[0], tmp_path / "again", KEY)
    for source in (other, tmp_path / "again"):
        shutil.copy(source / name, copy / name)
        refused(copy, name, RollbackError)
    (copy / name).unlink()
    refused(copy, name, RollbackError)


def test_an_altered_chunk_is_refused_and_there_is_no_model(copy):
    for name in shards(copy):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused(copy, name, AuthenticationError)
        refused(copy, name, AuthenticationError, device_map="cpu", dtype=torch.float32)
        (copy / name).write_bytes(content)


def test_an_altered_configuration_is_refused_before_it_is_parsed(copy):
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(b"{")
        refused(copy, name, AuthenticationError)
        (copy / name).write_bytes(content)


def test_an_older_folder_is_refused_with_an_anchor(copy, llama_folders, tmp_path):
    owner = Signer.generate()
    publish(copy, signer=owner)
    anchor = tmp_path / "anchor"
    Anchor.create(anchor, owner=owner.verifier)
    from_pretrained(AutoModelForCausalLM, copy, keys=KEY, anchor=anchor)
    seal_folder(llama_folders[0], tmp_path / "new", KEY)
    shutil.copy(copy / "fastrack.manifest", tmp_path / "new")
    publish(tmp_path / "new", signer=owner)
    from_pretrained(AutoModelForCausalLM, tmp_path / "new", keys=KEY, anchor=anchor)
    refused(copy, "older", RollbackError, anchor=anchor)


# Weights that stay on the disk.

DISK = {"": "disk"}
MIXED = {"model.layers.0": "cpu", "model.rotary_emb": "cpu"} | dict.fromkeys(
    ["model.embed_tokens", "model.layers.1", "model.norm", "lm_head"], "disk"
)


@pytest.fixture(scope="module")
def mixtral_folders(tmp_path_factory):
    """Experts, which transformers merges while it loads them."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 400}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return seal(MixtralForCausalLM(MixtralConfig(**sizes, **heads)), tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize("device_map", [DISK, MIXED, "auto"], ids=["all", "some", "auto"])
@pytest.mark.parametrize("kind", ["llama_folders", "mixtral_folders"])
def test_weights_on_the_disk_open_when_they_are_needed_and_are_not_written(
    request, tmp_path, monkeypatch, kind, device_map
):
    plain, sealed = request.getfixturevalue(kind)
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    options = {"max_memory": {"cpu": 300_000}} if device_map == "auto" else {}

    left = []

    class Watched(tempfile.TemporaryDirectory):
        def __exit__(self, *error):
            left.extend(Path(self.name).iterdir())
            super().__exit__(*error)

    with monkeypatch.context() as patched:
        patched.setattr("tempfile.TemporaryDirectory", Watched)
        model = from_pretrained(
            AutoModelForCausalLM,
            sealed,
            keys=KEY,
            device_map=device_map,
            offload_folder=tmp_path / "offload",
            dtype=torch.float32,
            **options,
        )
    gc.collect()
    assert any(parameter.is_meta for parameter in model.parameters())
    assert left == list((tmp_path / "offload").iterdir()) == []
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(TOKENS)[0], expected(TOKENS)[0])
    model.generation_config.do_sample = expected.generation_config.do_sample = False
    assert torch.equal(model.generate(TOKENS, max_new_tokens=4), expected.generate(TOKENS, max_new_tokens=4))


def test_an_altered_weight_on_the_disk_is_refused_when_it_is_needed(copy):
    model = from_pretrained(AutoModelForCausalLM, copy, keys=KEY, device_map=DISK)
    with torch.inference_mode():
        model(TOKENS)
        for name in shards(copy):
            content = bytearray((copy / name).read_bytes())
            content[-1] ^= 1
            with (copy / name).open("r+b") as file:
                file.write(content)
        with pytest.raises(AuthenticationError, match="chunk"):
            model(TOKENS)


def test_weights_that_are_changed_need_a_folder(mixtral_folders):
    with pytest.raises(ValueError, match="offload_folder"):
        from_pretrained(AutoModelForCausalLM, mixtral_folders[1], keys=KEY, device_map=DISK)


# Tensor parallelism.


def load_in_parallel(rank, port, plain, sealed):
    """Compare the local part of each weight with that of the plain folder, in one of two processes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo")
    options = {"distributed_config": DistributedConfig(tp_size=2)}
    expected = AutoModelForCausalLM.from_pretrained(plain, **options)
    made = from_pretrained(AutoModelForCausalLM, sealed, keys=KEY, **options)
    placements = set()
    for (name, one), (other_name, other) in zip(made.named_parameters(), expected.named_parameters(), strict=True):
        assert (name, type(one)) == (other_name, type(other))
        if hasattr(one, "to_local"):
            placements |= {str(placement) for placement in one.placements}
            one, other = one.to_local(), other.to_local()  # noqa: PLW2901 - what this process has of it
        assert torch.equal(one, other), name
    assert placements >= {"S(0)", "S(1)"}
    torch.distributed.destroy_process_group()


def test_each_process_gets_its_part_of_each_weight(tmp_path):
    plain, sealed = seal(llama(), tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(load_in_parallel, (port, str(plain), str(sealed)), nprocs=2)


# Quantised weights.


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_that_were_quantised_and_that_are_quantised_when_loaded(llama_folders, tmp_path, bits):
    pytest.importorskip("bitsandbytes")
    plain, sealed = llama_folders
    chosen = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32} if bits == 4 else {"load_in_8bit": True}
    options = {"quantization_config": transformers.BitsAndBytesConfig(**chosen), "device_map": "cpu"}
    expected = AutoModelForCausalLM.from_pretrained(plain, **options)
    made = from_pretrained(AutoModelForCausalLM, sealed, keys=KEY, **options)
    with torch.no_grad():
        assert torch.equal(made(TOKENS)[0], expected(TOKENS)[0])
    plain, sealed = seal(expected, tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(plain, device_map="cpu")
    made = from_pretrained(AutoModelForCausalLM, sealed, keys=KEY, device_map="cpu")
    with torch.no_grad():
        assert torch.equal(made(TOKENS)[0], expected(TOKENS)[0])


def similar(found, expected):
    with torch.no_grad():
        logits = [model(TOKENS).logits.float().flatten() for model in (found, expected)]
    return torch.nn.functional.cosine_similarity(*logits, dim=0)


WIDE = {"hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_model_that_is_quantised_while_it_is_sealed_loads_as_bfloat16(tmp_path, kind):
    pytest.importorskip("compressed_tensors")
    model = llama(**WIDE)
    model.save_pretrained(tmp_path / "plain", max_shard_size="1MB")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY, quantize=kind)
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path / "sealed", keys=KEY, dtype="auto")
    weights, state = load_folder(tmp_path / "sealed", KEY).weights(), loaded.state_dict()
    assert sum(tensor.scale is not None for tensor in weights.values()) == 14
    for name, tensor in weights.items():
        expected = unseal(tensor, KEY)
        if tensor.scale is not None:
            expected = (expected.float() * unseal(tensor.scale, KEY)).bfloat16()
        assert torch.equal(state[name], expected), name
    assert 0.99 < similar(loaded, model) < 1
    unseal_folder(tmp_path / "sealed", tmp_path / "back", KEY)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").state_dict()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())


def quantise(model, folder):
    """Save a model as compressed-tensors does: values of float8, and scales, for each row."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    options = {"ignore": ["lm_head"], "format": "float-quantized", "quantization_status": "frozen"}
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, **options))
    for layer in model.modules():
        if getattr(layer, "quantization_scheme", None) is not None:
            bounds = torch.aminmax(layer.weight.data.float(), dim=1, keepdim=True)
            layer.weight_scale.data.copy_(calculate_qparams(*bounds, weights)[0])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def test_a_model_of_compressed_tensors_loads_as_from_the_plain_folder(tmp_path):
    pytest.importorskip("compressed_tensors", minversion="0.20")
    quantise(llama(**WIDE), tmp_path / "plain")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    weights = load_folder(tmp_path / "sealed", KEY).weights()
    assert sum(tensor.scale is not None for tensor in weights.values()) == 14
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    loaded = from_pretrained(AutoModelForCausalLM, tmp_path / "sealed", keys=KEY, dtype="auto")
    states = [
        {name: weight.view(torch.uint8) for name, weight in each.state_dict().items()} for each in (plain, loaded)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], weight) for name, weight in states[0].items())
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, plain(TOKENS).logits)
    with pytest.raises(FormatError, match="expected a model without quantization_config"):
        seal_folder(tmp_path / "plain", tmp_path / "again", KEY, quantize="fp8")


def test_weights_that_torchao_quantised_load_as_from_the_plain_folder(llama_folders, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    options = {"quantization_config": TorchAoConfig(quantization.Int8WeightOnlyConfig())}
    plain, sealed = seal(AutoModelForCausalLM.from_pretrained(llama_folders[0], **options), tmp_path)
    made = from_pretrained(AutoModelForCausalLM, sealed, keys=KEY)
    with torch.no_grad():
        assert torch.equal(made(TOKENS)[0], AutoModelForCausalLM.from_pretrained(plain)(TOKENS)[0])


# Code.

MODELING = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel

class OddConfig(PreTrainedConfig):
    model_type = "odd"

class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(4, 4)
        self.post_init()
"""


def test_code_runs_only_if_it_was_asked_for_and_is_authentic(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    plain.mkdir()
    (plain / "modeling_odd.py").write_text(MODELING)
    auto_map = {"AutoConfig": "modeling_odd.OddConfig", "AutoModel": "modeling_odd.OddModel"}
    (plain / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": auto_map}))
    weights = {"layer.weight": torch.rand(4, 4), "layer.bias": torch.rand(4)}
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    seal_folder(plain, sealed, KEY)
    with pytest.raises(ValueError, match="trust_remote_code"):
        from_pretrained(AutoModel, sealed, keys=KEY)
    assert not list(tmp_path.glob("modules/**/modeling_odd.py"))
    model = from_pretrained(AutoModel, sealed, keys=KEY, trust_remote_code=True)
    assert type(model).__name__ == "OddModel"
    assert torch.equal(model.layer.weight, weights["layer.weight"])
    (sealed / "modeling_odd.py").write_text(MODELING + "\n")
    with pytest.raises(AuthenticationError, match="modeling_odd"):
        from_pretrained(AutoModel, sealed, keys=KEY, trust_remote_code=True)


# Adapters.


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory, llama_folders):
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_pretrained(llama_folders[0])
    tuned = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    tuned.save_pretrained(str(folder / "plain"))
    seal_folder(folder / "plain", folder / "sealed", KEY)
    return folder / "plain", folder / "sealed"


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_an_adapter_is_loaded_into_its_model(llama_folders, adapter_folders):
    expected = AutoModelForCausalLM.from_pretrained(llama_folders[0])
    before = expected(TOKENS)[0]
    expected.load_adapter(str(adapter_folders[0]))
    made = from_pretrained(AutoModelForCausalLM, llama_folders[1], keys=KEY)
    load_adapter(made, adapter_folders[1], keys=KEY)
    with torch.no_grad():
        assert torch.equal(made(TOKENS)[0], expected(TOKENS)[0])
        assert not torch.equal(made(TOKENS)[0], before)
    load_adapter(made, load_folder(adapter_folders[1], KEY), keys=KEY, adapter_name="second")
    assert set(made.peft_config) == {"default", "second"}


def test_an_altered_adapter_is_refused(llama_folders, adapter_folders, tmp_path):
    shutil.copytree(adapter_folders[1], tmp_path / "copy")
    path = tmp_path / "copy" / "adapter_model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    made = from_pretrained(AutoModelForCausalLM, llama_folders[1], keys=KEY)
    with pytest.raises(AuthenticationError, match="adapter_model"):
        load_adapter(made, tmp_path / "copy", keys=KEY)
    (tmp_path / "copy" / "adapter_config.json").write_text("{}")
    with pytest.raises(AuthenticationError, match="adapter_config"):
        load_adapter(made, tmp_path / "copy", keys=KEY)


def test_an_adapter_is_no_model_and_a_model_no_adapter(llama_folders, adapter_folders):
    with pytest.raises(FormatError, match="load_adapter"):
        from_pretrained(AutoModelForCausalLM, adapter_folders[1], keys=KEY)
    with pytest.raises(FormatError, match="adapter_config"):
        load_adapter(AutoModelForCausalLM.from_pretrained(llama_folders[0]), llama_folders[1], keys=KEY)


def test_an_adapter_beside_its_model_is_loaded_with_it(llama_folders, adapter_folders, tmp_path):
    both = tmp_path / "both"
    shutil.copytree(llama_folders[0], both)
    for path in adapter_folders[0].iterdir():
        if path.name.startswith("adapter"):
            shutil.copy(path, both)
    seal_folder(both, tmp_path / "sealed", KEY)
    made = from_pretrained(AutoModelForCausalLM, tmp_path / "sealed", keys=KEY)
    with torch.no_grad():
        assert torch.equal(made(TOKENS)[0], AutoModelForCausalLM.from_pretrained(both)(TOKENS)[0])


def test_an_anchor_beside_an_open_folder_is_refused(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "weights").write_bytes(b"x")
    key = Key.generate()
    seal_folder(tmp_path / "plain", tmp_path / "sealed", key)
    with pytest.raises(ValueError, match="anchor="):
        from_pretrained(AutoConfig, load_folder(tmp_path / "sealed", key), keys=key, anchor=tmp_path / "anchor")
