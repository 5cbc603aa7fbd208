"""Models of PEFT, diffusers, sentence-transformers and timm from sealed folders: the same as from plain ones."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", minversion="5")
peft = pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers")
sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")

import accelerate  # noqa: E402 - it may be absent
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from helpers.tampering import tamper_file  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.sentence_transformer import modules  # noqa: E402
from transformers import (  # noqa: E402
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
)

import fastrack  # noqa: E402
from fastrack.errors import AuthenticationError  # noqa: E402
from fastrack.transformers import from_pretrained  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

KEY = fastrack.Key.generate()
TOKENS = torch.arange(2, 10)[None]
BLOCKS = {"block_out_channels": (32, 32), "layers_per_block": 1}
DOWN_UP = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
REFUSED = "sealed by fastrack: open it with fastrack.load_model"


def make_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def make_adapter(base):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config)


def make_pipeline():
    unet = diffusers.UNet2DModel(sample_size=16, in_channels=3, out_channels=3, **BLOCKS, **DOWN_UP)
    return diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())


def make_sentences(folder):
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"]))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=8, **sizes)).save_pretrained(folder / "bert")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    parts = [modules.Transformer(str(folder / "bert")), modules.Pooling(32), modules.Dense(32, 16)]
    return SentenceTransformer(modules=parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of plain models, and the folder of the same ones sealed."""
    plain, sealed = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("sealed")
    make_llama().save_pretrained(plain / "base", max_shard_size="20KB")
    make_adapter(plain / "base").save_pretrained(plain / "adapter")
    make_pipeline().save_pretrained(plain / "pipeline")
    make_sentences(tmp_path_factory.mktemp("parts")).save(str(plain / "sentences"))
    (plain / "linear").mkdir()
    safetensors.torch.save_file(torch.nn.Linear(3, 2).state_dict(), plain / "linear" / "model.safetensors")
    for path in plain.iterdir():
        fastrack.seal_folder(path, sealed / path.name, KEY)
    return plain, sealed


def load_linear(path, _):
    made = torch.nn.Linear(3, 2)
    accelerate.load_checkpoint_in_model(made, f"{path}/model.safetensors")
    return made


LOADERS = {
    "PeftModel": (
        "adapter",
        lambda path, base: peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), path),
    ),
    "AutoPeftModel": ("adapter", lambda path, base: peft.AutoPeftModelForCausalLM.from_pretrained(path)),
    "DDPMPipeline": ("pipeline", lambda path, base: diffusers.DDPMPipeline.from_pretrained(path)),
    "UNet2DModel": ("pipeline", lambda path, base: diffusers.UNet2DModel.from_pretrained(path, subfolder="unet")),
    "UNet2DModel whole": (
        "pipeline",
        lambda path, base: diffusers.UNet2DModel.from_pretrained(f"{path}/unet", low_cpu_mem_usage=False),
    ),
    "SentenceTransformer": ("sentences", lambda path, base: SentenceTransformer(str(path), device="cpu")),
    "transformers": ("base", lambda path, base: LlamaForCausalLM.from_pretrained(path)),
    "transformers, other sizes": (
        "base",
        lambda path, base: LlamaForCausalLM.from_pretrained(path, ignore_mismatched_sizes=True),
    ),
}


def state_of(made):
    found = made.components["unet"] if hasattr(made, "components") else made
    return {name: tensor.clone() for name, tensor in found.state_dict().items()}


def output_of(made):
    """Return an output, of weights at the same alignment as those of any other model that is given here."""
    found = made.components["unet"] if hasattr(made, "components") else made
    found.load_state_dict(state_of(made), assign=True)
    found.eval()
    with torch.no_grad():
        if isinstance(made, SentenceTransformer):
            return torch.from_numpy(made.encode("a b c"))
        if hasattr(found, "sample_size") or type(found).__name__ == "UNet2DModel":
            return found(torch.ones(1, 3, 16, 16), 1).sample
        return found(TOKENS).logits


@pytest.mark.parametrize("name", LOADERS)
def test_a_mounted_folder_gives_the_model_of_the_plain_one(folders, name):
    plain, sealed = folders
    folder, load = LOADERS[name]
    expected = load(plain / folder, plain / "base")
    with fastrack.mount_folder(sealed / folder, KEY) as path:
        made = load(path, plain / "base")
    found, wanted = state_of(made), state_of(expected)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[each], wanted[each]) for each in wanted)
    assert torch.equal(output_of(made), output_of(expected))


@pytest.mark.parametrize("name", [*LOADERS, "accelerate"])
def test_a_plain_loader_of_a_sealed_folder_is_told_and_makes_nothing_of_it(folders, name):
    folder, load = {**LOADERS, "accelerate": ("linear", load_linear)}[name]
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each library raises its own
        load(folders[1] / folder, folders[0] / "base")
    told, error = "", raised.value
    while error is not None:
        told, error = told + str(error), error.__cause__ or error.__context__
    assert REFUSED in told


def test_an_altered_chunk_is_an_authentication_error_in_each(folders, tmp_path):
    for name, (folder, load) in LOADERS.items():
        sealed = tmp_path / name
        shutil.copytree(folders[1] / folder, sealed)
        path = min(path for path in sealed.rglob("*.safetensors") if "2_Dense" not in str(path))
        with fastrack.load_file(path) as file:
            tensor = max(file, key=lambda each: file[each].nbytes)
        tamper_file(path, tensor, 100)
        with pytest.raises(AuthenticationError) as raised, fastrack.mount_folder(sealed, KEY) as mounted:
            load(mounted, folders[0] / "base")
        assert raised.value.path == path, name


def save_all(path, plain):
    """Save a model of each library below a folder, like the fixture."""
    make_llama().save_pretrained(path / "base", max_shard_size="20KB")
    load = {name: LOADERS[name][1] for name in ("PeftModel", "DDPMPipeline")}
    load["PeftModel"](plain / "adapter", plain / "base").save_pretrained(path / "adapter")
    load["DDPMPipeline"](plain / "pipeline", None).save_pretrained(path / "pipeline")
    SentenceTransformer(str(plain / "sentences"), device="cpu").save(str(path / "sentences"))


def test_what_the_libraries_save_is_sealed_and_was_in_no_file_in_plain(folders, tmp_path, monkeypatch):
    """Compare with the files that they save unencrypted: the same names, and the same weights when they are loaded."""
    plain, _ = folders
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    save_all(tmp_path / "control", plain)
    with fastrack.write_folder(tmp_path / "sealed", KEY) as path:
        save_all(Path(path), plain)
        written = [each for each in tmp_path.rglob("*") if each.is_file() and "control" not in each.parts]
        content = b"".join(each.read_bytes() for each in written)
    weights = sorted((tmp_path / "control").rglob("*.safetensors"))
    needles = [each.read_bytes()[-64:] for each in weights]
    assert len(needles) > 6
    assert all(needle in b"".join(each.read_bytes() for each in weights) for needle in needles)
    assert [needle for needle in needles if needle in content] == []
    folder = fastrack.load_folder(tmp_path / "sealed", KEY)
    folder.verify(KEY)
    names = {
        each.relative_to(tmp_path / "control").as_posix()
        for each in (tmp_path / "control").rglob("*")
        if each.is_file()
    }
    assert {name for name in names if not name.startswith(".")} == folder.files.keys()
    for name, (inner, load) in LOADERS.items():
        with fastrack.mount_folder(folder, KEY) as path:
            made = load(f"{path}/{inner}", plain / "base")
        expected = load(tmp_path / "control" / inner, plain / "base")
        assert torch.equal(output_of(made), output_of(expected)), name


def test_from_pretrained_takes_classes_of_diffusers_and_names_the_call_for_those_of_peft(folders):
    plain, sealed = folders
    made = from_pretrained(diffusers.DDPMPipeline, sealed / "pipeline", keys=KEY)
    unet = from_pretrained(diffusers.UNet2DModel, sealed / "pipeline", keys=KEY, subfolder="unet")
    expected = output_of(diffusers.DDPMPipeline.from_pretrained(plain / "pipeline"))
    assert torch.equal(output_of(made), expected)
    assert torch.equal(output_of(unet), expected)
    for cls in (peft.PeftModel, peft.AutoPeftModelForCausalLM):
        with pytest.raises(ValueError, match=r"mount_folder"):
            from_pretrained(cls, sealed / "adapter", keys=KEY)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Make a repository of code that is in no sealed folder; return the file that shows that it ran."""
    (tmp_path / "other" / "repo").mkdir(parents=True)
    ran = tmp_path / "ran"
    (tmp_path / "other" / "repo" / "net.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Net: pass\n")
    shutil.copy(tmp_path / "other" / "repo" / "net.py", tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return ran


ELSEWHERE = "other/repo--net.Net"
REFERENCES = {
    "processor": (
        "processor_config.json",
        {"image_processor": {"auto_map": {"AutoImageProcessor": ELSEWHERE}}},
        lambda path: AutoImageProcessor.from_pretrained(path, trust_remote_code=True),
    ),
    "model": (
        "config.json",
        {"auto_map": {"AutoConfig": ELSEWHERE, "AutoModel": ELSEWHERE}},
        lambda path: AutoModel.from_pretrained(path, trust_remote_code=True),
    ),
    "module": (
        "modules.json",
        [{"idx": 0, "name": "0", "path": "", "type": ELSEWHERE}],
        lambda path: SentenceTransformer(path, trust_remote_code=True),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_no_code_of_another_repository_runs(folders, elsewhere, tmp_path, name):
    file, document, load = REFERENCES[name]
    shutil.copytree(folders[0] / "base", tmp_path / "plain")
    (tmp_path / "plain" / file).write_text(json.dumps(document))
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    with contextlib.suppress(Exception):
        load(str(tmp_path / "plain"))
    assert elsewhere.exists()  # of the plain folder it runs
    elsewhere.unlink()
    for module in [module for module in sys.modules if module.startswith("transformers_modules")]:
        del sys.modules[module]
    with fastrack.mount_folder(tmp_path / "sealed", KEY) as path, pytest.raises((OSError, ValueError, ImportError)):
        load(path)
    with (
        pytest.raises(ValueError, match="another repository"),
        fastrack.mount_folder(tmp_path / "sealed", KEY, code=True),
    ):
        pass
    assert not elsewhere.exists()


def test_a_model_whose_configuration_names_other_code_loads_without_it(folders, tmp_path):
    plain, _ = folders
    shutil.copytree(plain / "base", tmp_path / "plain")
    config = json.loads((plain / "base" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": ELSEWHERE}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    made = from_pretrained(AutoModelForCausalLM, tmp_path / "sealed", keys=KEY)
    assert torch.equal(output_of(made), output_of(LlamaForCausalLM.from_pretrained(plain / "base")))
    with pytest.raises(ValueError, match="another repository"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "sealed", keys=KEY, trust_remote_code=True)


def test_timm_loads_from_a_mounted_folder(tmp_path):
    timm = pytest.importorskip("timm", exc_type=ImportError)
    (tmp_path / "plain").mkdir()
    made = timm.create_model("resnet10t", num_classes=3)
    safetensors.torch.save_file(made.state_dict(), tmp_path / "plain" / "model.safetensors")
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    with fastrack.mount_folder(tmp_path / "sealed", KEY) as path:
        loaded = timm.create_model("resnet10t", num_classes=3, checkpoint_path=f"{path}/model.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in made.state_dict().items())
    with pytest.raises(Exception, match=REFUSED):
        timm.create_model("resnet10t", num_classes=3, checkpoint_path=str(tmp_path / "sealed" / "model.safetensors"))
