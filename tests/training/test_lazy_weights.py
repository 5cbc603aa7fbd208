"""Test fastrack.transformers without transformers: lazy weights, private copies, and refusals."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.cases import each

import fastrack
from fastrack import Key, load_folder, seal, seal_folder
from fastrack._models.lazy_weights import LazyTensor, SealedWeight, lazy_weights
from fastrack.errors import AuthenticationError, FormatError, RollbackError, UnknownKeyError
from fastrack.transformers import from_pretrained, load_adapter

KEY = Key.from_bytes(bytes(range(32)))
WEIGHT = torch.arange(60_000, dtype=torch.float32).reshape(200, 300)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A sealed folder of one weight, a configuration, a vocabulary and code; temporary files go beside it."""
    plain = tmp_path / "plain"
    plain.mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    half = WEIGHT.to(torch.bfloat16)
    safetensors.torch.save_file(
        {"weight": WEIGHT, "half": half, "one": torch.ones(()), "none": torch.ones(0, 3)}, plain / "model.safetensors"
    )
    (plain / "config.json").write_text(json.dumps({"model_type": "none"}))
    (plain / "vocab.txt").write_text("a b c")
    (plain / "code").mkdir()
    (plain / "code" / "modeling.py").write_text("raise RuntimeError")
    (plain / "extra.bin").write_bytes(b"secret")
    seal_folder(plain, tmp_path / "sealed", KEY)
    return tmp_path / "sealed"


@pytest.fixture
def weights(folder):
    return lazy_weights(load_folder(folder, KEY).weights(), partial(fastrack.to_device, keys=KEY))


class Tokenizer:
    """A class as those of transformers, which reads a folder and refers to it later."""

    calls = ()

    def __init__(self, path):
        self.path = Path(path)
        self.names = sorted(str(each.relative_to(path)) for each in self.path.rglob("*") if each.is_file())
        self.name_or_path = path
        self.mode = self.path.stat().st_mode & 0o777

    @classmethod
    def from_pretrained(cls, path, *args, **kwargs):
        made = cls(path)
        made.calls = (args, kwargs)
        return made


# Weights.


def test_a_weight_tells_dtype_and_shape_and_opens_nothing(weights):
    half = weights["half"]
    assert (half.get_shape(), half.get_dtype(), half.shape, half.dtype) == (
        [200, 300],
        "BF16",
        (200, 300),
        torch.bfloat16,
    )
    assert half.is_floating_point()
    assert (half.size(), half.numel(), half.ndim, half.device) == ((200, 300), 60_000, 2, torch.device("cpu"))
    assert half[...].shape == half[:, 0:300].shape == (200, 300)


def test_a_weight_is_opened_on_a_device_and_converted_there(weights):
    assert torch.equal(weights["weight"].to(), WEIGHT)
    assert torch.equal(weights["weight"][...].to(device="cpu", dtype=torch.float16), WEIGHT.to(torch.float16))
    assert torch.equal(weights["one"].to(torch.device("cpu")), torch.ones(()))


def test_weights_that_are_converted_share_no_memory_and_none_with_what_they_were_converted_from(weights):
    kinds = [torch.float16, torch.float64, torch.complex128, torch.int64]
    with ThreadPoolExecutor(3) as pool:
        jobs = [(name, kind) for name in ("weight", "half", "one", "none") for kind in kinds] * 3
        converted = list(pool.map(lambda job: weights[job[0]].to("cpu", job[1]), jobs))
    plain = {"weight": WEIGHT, "half": WEIGHT.to(torch.bfloat16), "one": torch.ones(()), "none": torch.ones(0, 3)}
    for (name, kind), tensor in zip(jobs, converted, strict=True):
        expected = plain[name].to(kind)
        assert (tensor.dtype, tensor.shape) == (kind, expected.shape)
        assert torch.equal(tensor, expected)
    assert torch.equal(weights["half"].to("cpu", torch.bfloat16), plain["half"])


def test_a_part_of_a_weight_is_what_tensor_parallelism_asks_for(weights):
    assert torch.equal(weights["weight"][:, 100:200].to(device="cpu"), WEIGHT[:, 100:200])
    part = weights["weight"][slice(50, 100), slice(0, 300)]
    assert torch.equal(part.to(device="cpu"), WEIGHT[50:100])
    both = torch.cat([weights["weight"][:, :10], weights["weight"][:, 290:]], dim=1)
    expected = torch.cat([WEIGHT[:, :10], WEIGHT[:, 290:]], dim=1)
    assert torch.equal(both.to(device="cpu", dtype=torch.float64), expected.double())


USES = {
    "a method": lambda weight: weight.float(),
    "a copy": lambda weight: weight.clone(),
    "an operator": lambda weight: weight + 1,
    "the other side": lambda weight: 2 * weight,
    "another tensor": lambda weight: torch.ones(300) - weight,
    "in place": lambda weight: weight.mul_(2).add_(weight),
    "a comparison": lambda weight: (weight == 3) | (weight > 9),
    "a function": lambda weight: torch.stack([weight, torch.ones(1).expand_as(weight)]),
    "a layer": lambda weight: torch.nn.functional.linear(torch.ones(300), weight),
    "a parameter": lambda weight: torch.nn.Parameter(torch.zeros(weight.shape)).data.copy_(weight),
    "an array": lambda weight: torch.from_numpy(np.asarray(weight)),
    "rows": lambda weight: torch.stack(list(weight))[weight[:, 0] > 600],
    "an index that is no slice": lambda weight: weight[[1, 5]][None, ..., ::7],
    "a value": lambda weight: torch.tensor([float(weight[7, 9]), len(weight)]),
    "parts": lambda weight: torch.cat([weight[:5], weight[7:9]]) + 1,
    "a part of a part": lambda weight: weight[5:9][1:3],
    "a dtype": lambda weight: weight.to(torch.float16),
    "a conversion": lambda weight: weight.to("cpu", torch.float64, non_blocking=True),
    "the other's dtype": lambda weight: weight.to(torch.ones(1, dtype=torch.float64)),
    "host memory": lambda weight: weight.cpu(),
}


@pytest.mark.parametrize(
    "part", [(0, 50, 100), (1, 0, 150), (0, 0, 200), (1, 7, 0), (0, -20, 10), (-1, 5, 9), (0, 199, 1)]
)
def test_a_narrowed_weight_is_what_torch_narrows(weights, part):
    assert torch.equal(weights["weight"].narrow(*part).to(), WEIGHT.narrow(*part))


@pytest.mark.parametrize("part", [(0, 190, 20), (2, 0, 1), (1, 0, -1)])
def test_what_is_outside_of_a_weight_is_not_narrowed(weights, part):
    with pytest.raises((IndexError, RuntimeError)):
        weights["weight"].narrow(*part)


@each("use", USES)
def test_a_weight_that_is_used_as_a_tensor_is_one(weights, use):
    expected, found = USES[use](WEIGHT.clone()), USES[use](weights["weight"][...])
    assert isinstance(found, (torch.Tensor, LazyTensor))
    found = found.to()
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_a_weight_that_is_changed_in_place_stays_changed_and_no_other_is(weights):
    first, second = weights["weight"][...], weights["weight"][...]
    first[3] = 7
    first += first
    assert (first[3] == 14).all()
    assert torch.equal(second.to("cpu"), WEIGHT)
    third = weights["weight"][:10]
    third.zero_()
    assert not third.to("cpu", torch.float64).any()


def test_what_torch_s_tensors_do_not_have_is_asked_for_without_opening_it():
    def transfer(*_, **__):
        raise AssertionError

    weight = SealedWeight(seal(WEIGHT, KEY), transfer, threading.local(), "F32")
    assert not any(hasattr(weight, name) for name in ("tp_plan", "_spec", "__cuda_array_interface__", "quantizer"))
    assert torch.overrides.is_tensor_like(weight)
    for use in (lambda: bool(weight.any()), lambda: weight + 1, lambda: torch.sum(weight)):
        with pytest.raises(AssertionError):
            use()


def test_a_tensor_is_filled_from_a_weight_on_its_own_device():
    asked = []

    def transfer(handle, device, out=None, **_):
        asked.append(device)
        return fastrack.to_device(handle, keys=KEY, **({"framework": "torch"} if out is None else {"out": out}))

    weight = SealedWeight(seal(WEIGHT, KEY), transfer, threading.local(), "F32", device="cuda:3")
    assert torch.equal(torch.zeros(200, 300).copy_(weight), WEIGHT)
    assert torch.equal(weight.clone(), WEIGHT)
    assert asked == ["cpu", "cuda:3"]


@pytest.mark.parametrize(
    ("target", "opened_into_it"),
    [
        (torch.zeros(200, 300), True),
        (torch.zeros(400, 300)[100:300], True),
        (torch.zeros(300, 200).T, False),
        (torch.zeros(200, 300, dtype=torch.float64), False),
        (torch.zeros(5, 200, 300), False),
    ],
    ids=["tensor", "rows of one", "transposed", "wider", "more dimensions"],
)
def test_a_tensor_that_has_room_for_a_weight_is_where_it_opens(target, opened_into_it):
    targets = []

    def transfer(handle, device, out=None, dtype=None, framework=None):
        targets.append(out)
        options = {"framework": framework} if out is None else {"out": out}
        return fastrack.to_device(handle, device, keys=KEY, dtype=dtype, **options)

    weight = SealedWeight(seal(WEIGHT, KEY), transfer, threading.local(), "F32")
    assert target.copy_(weight) is target
    assert torch.equal(target.float(), WEIGHT.expand(target.shape))
    assert (targets[0] is target) is opened_into_it
    assert len(targets) == 1


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_an_altered_chunk_is_refused_when_it_is_opened(folder, dtype):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
    weights = lazy_weights(load_folder(folder, KEY).weights(), partial(fastrack.to_device, keys=KEY))
    (bad,) = (weight for weight in weights.values() if is_bad(weight, dtype))
    assert bad.shape in {(), (200, 300)}


def is_bad(weight, dtype):
    try:
        weight.to("cpu", dtype)
    except AuthenticationError as error:
        return error.path.name == "model.safetensors"
    return False


# Files.


def test_what_reads_files_gets_a_private_copy_of_what_was_authenticated(folder, tmp_path):
    made = from_pretrained(Tokenizer, folder, "more", keys=KEY, use_fast=True)
    assert made.names == ["config.json", "extra.bin", "model.safetensors", "vocab.txt"]  # no code
    with pytest.raises(safetensors.SafetensorError, match="sealed by fastrack"):  # and nothing that is sealed
        safetensors.torch.load((made.path / "model.safetensors").read_bytes())
    assert made.mode == 0o500
    assert made.calls == (("more",), {"use_fast": True, "local_files_only": True})
    assert made.name_or_path == str(folder)
    assert made.path.exists()  # as long as the object lives
    del made
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_code_is_there_only_if_it_was_asked_for(folder):
    assert "code/modeling.py" in from_pretrained(Tokenizer, folder, keys=KEY, trust_remote_code=True).names


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "code/modeling.py"])
def test_nothing_is_read_that_was_altered(folder, tmp_path, name):
    content = (folder / name).read_bytes()
    for altered in (content[:-1] + b"!", content + b" ", None):
        (folder / name).unlink()
        if altered is not None:
            (folder / name).write_bytes(altered)
        error = RollbackError if altered is None else AuthenticationError
        with pytest.raises(error, match=name.rpartition("/")[2].partition(".")[0]):
            from_pretrained(Tokenizer, folder, keys=KEY, trust_remote_code=True)
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_later_change_of_the_folder_has_no_effect(folder):
    made = from_pretrained(Tokenizer, folder, keys=KEY)
    (folder / "vocab.txt").write_text("x y z")
    assert (made.path / "vocab.txt").read_text() == "a b c"


def test_a_failure_leaves_no_copy(folder, tmp_path):
    class Broken(Tokenizer):
        def __init__(self, path):
            raise KeyError(path)

    with pytest.raises(KeyError):
        from_pretrained(Broken, folder, keys=KEY)
    gc.collect()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_code_of_other_repositories_is_refused(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "pytorch_model.bin").write_bytes(b"x")
    maps = [{"AutoModel": "other/repo--modeling.Net"}, {"AutoTokenizer": [None, "o/r--t.T"]}]
    for number, auto_map in enumerate(maps):
        (tmp_path / "plain" / "config.json").write_text(json.dumps({"auto_map": auto_map}))
        seal_folder(tmp_path / "plain", tmp_path / str(number), KEY)
        with pytest.raises(ValueError, match="config"):
            from_pretrained(Tokenizer, tmp_path / str(number), keys=KEY, trust_remote_code=True)
        from_pretrained(Tokenizer, tmp_path / str(number), keys=KEY)


ELSEWHERE = [{"state_dict": {"a": 1}}, {"gguf_file": "x"}, {"offload_folder": "x"}]
ON_DISK = [{"device_map": "disk"}, {"device_map": {"a": "disk"}}]


@pytest.mark.parametrize("options", ELSEWHERE + ON_DISK, ids=str)
def test_what_would_load_from_elsewhere_or_write_plaintext_is_refused(folder, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        from_pretrained(Tokenizer, folder, keys=KEY, **options)


def test_a_number_in_a_device_map_is_that_of_a_gpu():
    """Weights for "cuda:0" must not be opened in host memory."""
    from fastrack.transformers._offload import name_of

    assert [name_of(device) for device in (None, 0, 1, "cpu", "cuda:1")] == ["cpu", "cuda:0", "cuda:1", "cpu", "cuda:1"]


def test_the_key_has_to_be_that_of_the_folder(folder):
    with pytest.raises(UnknownKeyError):
        from_pretrained(Tokenizer, folder, keys=Key.generate())


def test_a_model_needs_a_configuration(tmp_path):
    class Model:
        pass

    Model.__name__, Model.__module__ = "PreTrainedModel", "transformers.modeling_utils"
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "adapter_config.json").write_text("{}")
    (tmp_path / "plain" / "adapter_model.bin").write_bytes(b"x")
    seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    with pytest.raises(FormatError, match="load_adapter"):
        from_pretrained(Model, tmp_path / "sealed", keys=KEY)


class Missing:
    """A class whose `from_pretrained` finds no file, as those of diffusers."""

    @classmethod
    def from_pretrained(cls, path, how, **_):
        if how == "told":
            raise OSError(f"no file named model_index.json in {path}")
        return Path(path, "model_index.json").read_text()

    @classmethod
    def load_adapter(cls, path, **_):
        raise ValueError(f"{path} is wrong", 3)


def test_errors_of_a_library_name_the_sealed_folder(folder, tmp_path):
    for how in ("told", "opened"):
        with pytest.raises(OSError, match="model_index") as raised:
            from_pretrained(Missing, folder, how, keys=KEY)
        assert str(folder) in str(raised.value)
        assert str(tmp_path / "temporary") not in str(raised.value)
    (tmp_path / "plain" / "adapter_config.json").write_text("{}")
    seal_folder(tmp_path / "plain", tmp_path / "adapter", KEY)
    with pytest.raises(ValueError, match="is wrong") as raised:
        load_adapter(Missing, tmp_path / "adapter", keys=KEY)
    assert raised.value.args == (f"{tmp_path / 'adapter'} is wrong", 3)
