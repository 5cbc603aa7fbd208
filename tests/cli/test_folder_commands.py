"""The commands on folders: sealed, verified, and back to the same bytes."""

import json
import shutil
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file as save_plain


@pytest.fixture
def model(folder):
    (folder / "model" / ".cache").mkdir(parents=True)
    for number in (1, 2):
        save_plain(
            {f"w{number}": np.full((40, 9), number, np.float32)}, folder / "model" / f"model-{number}.safetensors"
        )
    (folder / "model" / "config.json").write_text(json.dumps({"layers": 2}))
    (folder / "model" / "optimizer.pt").write_bytes(b"moments")
    (folder / "model" / ".cache" / "lock").write_bytes(b"")
    return folder / "model"


@pytest.fixture
def sealed(cli, key, model):
    cli(f"seal {model.name} sealed {key}")
    return model.with_name("sealed")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_folder_is_sealed_verified_and_unsealed(cli, key, model):
    said = cli(f"seal model sealed {key}").stdout
    assert "sealed 3 files and copied 1 file" in said
    assert "not protected, anyone can read config.json\n" in said
    assert "left out: .cache/lock" in said
    assert "4 files, each as" in cli(f"verify sealed {key}").stdout
    cli(f"unseal sealed back {key}")
    assert contents(model.with_name("back")) == contents(model)


def test_the_documents_say_what_was_done(cli, key, model):
    document = cli.json(f"seal model sealed {key}")
    assert document["files"] == ["model-1.safetensors", "model-2.safetensors", "optimizer.pt"]
    assert document["not_protected"] == ["config.json"]
    assert document["readable"] == {"files": ["config.json"]}
    assert document["left_out"] == [".cache/lock"]
    size = sum(map(len, contents(model).values())) - 2 * 80  # without the headers of two safetensors files
    document = cli.json(f"verify sealed {key}")
    assert document["ok"]
    assert [each["ok"] for each in document["files"]] == [True] * 4
    assert document["bytes"] <= size + 2 * 80
    document = cli.json(f"unseal sealed back {key}")
    assert document["files"] == ["config.json", "model-1.safetensors", "model-2.safetensors", "optimizer.pt"]


def test_verify_names_each_bad_file(cli, key, sealed):
    shutil.copy(sealed / "model-1.safetensors", sealed / "model-2.safetensors")
    (sealed / "config.json").write_text("{}")
    (sealed / "more.py").write_text("")
    document = cli.json(f"verify sealed {key}", status=1)
    assert [each["name"] for each in document["files"] if not each["ok"]] == [
        "config.json",
        "model-2.safetensors",
        "more.py",
    ]
    assert document["error"]["type"] == "AuthenticationError"
    said = cli(f"verify sealed {key}", status=1).stdout
    assert "3 of 5 files FAILED" in said
    assert "config.json" in cli.error(f"unseal sealed back {key}")
    assert "back" not in cli.names()


@pytest.mark.parametrize(
    "line",
    [
        "seal model out --plain x",  # no file of this name
        "seal model out --name x",
        "seal model out --drop-metadata",
        "seal model out --force",
        "unseal sealed out --tensor x",
        "unseal sealed out --allow-plain",
        "unseal sealed out --file-id 00",
        "unseal sealed out --force",
        "verify sealed --expect x",
    ],
)
def test_options_of_files_are_refused(cli, key, sealed, line):
    cli(f"{line} {key}", status=2)
    assert not sealed.with_name("out").exists()


def test_a_folder_that_is_not_sealed_is_told(cli, key, model):
    assert "expected a sealed folder or a dataset" in cli.error(f"unseal {model.name} back {key}")
    cli(f"verify {model.name} {key}", status=2)


def test_a_folder_is_granted_to_others(cli, model):
    cli("keygen owner.signer --signer")
    cli("keygen reader.id --identity")
    cli("seal model sealed --to reader.id.pub --sign owner.signer")
    assert "sealed.grants" in cli.names()
    document = cli.json("grant sealed.grants --owner owner.signer.pub")
    assert len(document["files"]) == 4  # three files and the index
    assert model.exists()


def test_a_folder_follows_an_anchor(cli, key, sealed):
    cli("keygen owner.signer --signer")
    cli("publish sealed --sign owner.signer")
    cli("anchor model.anchor --owner owner.signer.pub")
    cli(f"verify sealed --anchor model.anchor {key}")
    assert "version 1" in cli("verify sealed --anchor model.anchor").stdout
    cli(f"unseal sealed back --anchor model.anchor {key}")
    cli(f"seal model new {key}")
    shutil.copy(sealed / "fastrack.manifest", sealed.with_name("new"))
    assert "fastrack.folder" in cli.error(f"unseal new again --anchor model.anchor {key}")


def test_a_sealed_folder_of_many_files_is_shown_in_part(cli, key, folder):
    (folder / "many").mkdir()
    for number in range(50):
        (folder / "many" / f"{number:02}.txt").write_text("text")
    cli(f"seal many sealed {key}")
    said = cli("inspect sealed").stdout.splitlines()
    assert [line for line in said if line.startswith(("19.txt", "20.txt"))][1:] == []
    assert "... 30 more; --json has all" in said
    assert said[-1].startswith("50 files, ")
    assert len(cli.json("inspect sealed")["files"]) == 50


def make_linear(model):
    save_plain({"q_proj.weight": np.ones((256, 256), np.float32)}, model / "model-1.safetensors")


def test_weights_are_quantised_and_come_back_as_bfloat16(cli, key, model, monkeypatch):
    pytest.importorskip("torch")
    from helpers import quantization

    quantization.install(monkeypatch)
    make_linear(model)
    said = cli(f"seal model sealed {key} --quantize fp8").stdout
    assert "sealed 3 files and copied 1 file" in said
    assert "q_proj.weight_scale" in cli("inspect sealed/model-1.safetensors").stdout
    assert "4 files, each as" in cli(f"verify sealed {key}").stdout
    cli(f"unseal sealed back {key}")
    with safe_open(model.with_name("back") / "model-1.safetensors", "np") as file:
        assert file.get_slice("q_proj.weight").get_dtype() == "BF16"
        assert list(file.keys()) == ["q_proj.weight"]


def test_only_models_that_are_not_quantised_yet_are_quantised(cli, key, model, monkeypatch):
    pytest.importorskip("torch")
    from helpers import quantization

    quantization.install(monkeypatch)
    expected = "expected the folder of a model as SOURCE, and no --recursive"
    assert expected in cli.error(f"seal model/model-1.safetensors x.safetensors {key} --quantize fp8", status=2)
    assert expected in cli.error(f"seal model sealed {key} --recursive --quantize fp8", status=2)
    assert "expected one of 'fp8', 'int8', got 'fp4'" in cli.error(f"seal model sealed {key} --quantize fp4", status=2)
    assert "expected weights of linear layers" in cli.error(f"seal model sealed {key} --quantize int8")
    make_linear(model)
    (model / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert "that is quantised already" in cli.error(f"seal model sealed {key} --quantize fp8")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    assert "pip install 'fastrack-io[quantize]'" in cli.error(f"seal model sealed {key} --quantize fp8")
    assert not model.with_name("sealed").exists()
