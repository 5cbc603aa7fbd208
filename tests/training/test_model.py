"""Sealed weights into modules: like load_state_dict, but in place, all or nothing, and never unauthenticated."""

import tracemalloc
from itertools import pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.cases import each
from helpers.tampering import tamper_file
from torch import nn
from torch.distributed.tensor import DTensor

from fastrack import Key, load_file, load_model, save_file, save_model
from fastrack._devices.cpu import CpuOperation
from fastrack._tensors import arrays
from fastrack.errors import AuthenticationError, DeviceError, UnknownKeyError
from fastrack.format import chunk_offset

SECRET = bytes(range(7, 39))
KEY = Key.from_bytes(SECRET)


class Net(nn.Module):
    """Parameters, persistent and other buffers, a tied pair, a scalar and nothing."""

    def __init__(self, width=70, dtype=torch.float32, device=None):
        super().__init__()
        self.embed = nn.Embedding(50, width, dtype=dtype, device=device)
        self.body = nn.Sequential(
            nn.Linear(width, 300, dtype=dtype, device=device), nn.BatchNorm1d(300, dtype=dtype, device=device)
        )
        self.head = nn.Linear(width, 50, bias=False, dtype=dtype, device=device)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype, device=device))
        self.nothing = nn.Parameter(torch.ones((0, 3), dtype=dtype, device=device))
        self.register_buffer("passing", torch.zeros(3, device=device), persistent=False)


def net(seed, **options):
    torch.manual_seed(seed)
    made = Net(**options)
    with torch.no_grad():
        for value in [*made.parameters(), *made.buffers()]:
            value.copy_(torch.randn(value.shape) * 10)
    return made


def bits(module):
    state = module.state_dict()
    return {name: (value.dtype, arrays.bytes_of(value).tobytes()) for name, value in state.items()}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "net.safetensors"
    save_model(net(1), path, key=KEY, metadata={"licence": "CC0"})
    return path


def refuse(module, path, error, match, **options):
    """Loading fails, and nothing was loaded."""
    before = bits(module)
    with pytest.raises(error, match=match):
        load_model(module, path, **{"keys": KEY, **options})
    assert bits(module) == before


# What was saved is loaded


def test_what_was_saved_is_loaded_where_the_parameters_are(path):
    module = net(2)
    places = {name: value.data_ptr() for name, value in module.state_dict().items()}
    passing = module.passing.clone()  # which is not persistent
    found = load_model(module, path, keys=KEY)
    assert found == ([], [])
    assert found.missing_keys == found.unexpected_keys == []
    assert type(found) is type(net(2).load_state_dict(net(1).state_dict()))
    assert bits(module) == bits(net(1))
    assert {name: value.data_ptr() for name, value in module.state_dict().items()} == places
    assert all(value.requires_grad for value in module.parameters())
    assert torch.equal(module.passing, passing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_kind_of_weights_comes_back(tmp_path, dtype):
    save_model(net(1, dtype=dtype), tmp_path / "x", key=KEY)
    module = net(2, dtype=dtype)
    load_model(module, tmp_path / "x", keys=KEY)
    assert bits(module)["body.0.weight"] == bits(net(1, dtype=dtype))["body.0.weight"]


def test_a_buffer_that_stays_on_the_meta_device_is_named(path):
    with torch.device("meta"):
        module = Net()
    with pytest.warns(UserWarning, match="on the meta device still: passing. Make them again") as told:
        load_model(module, path, keys=KEY)
    assert told[0].filename == __file__
    module.passing = torch.zeros(3)
    load_model(module, path, keys=KEY)


def test_autograd_learns_that_its_saved_tensors_changed_and_goes_on(path):
    module = net(2)
    loss = (module.embed(torch.tensor([1])) * module.embed.weight).sum()
    load_model(module, path, keys=KEY)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
    module.zero_grad()
    module.embed(torch.tensor([1, 2])).sum().backward()
    assert module.embed.weight.grad.abs().sum() > 0


def test_a_name_hook_of_the_module_is_followed(tmp_path):
    def add_prefix(_module, state, _prefix, _):
        for name in list(state):
            state[f"wrapped.{name}"] = state.pop(name)

    one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    for module in (one, other):
        module._register_state_dict_hook(add_prefix)
    save_model(one, tmp_path / "x", key=KEY)
    with load_file(tmp_path / "x") as file:
        assert set(file) == {"wrapped.weight", "wrapped.bias"}
    load_model(other, tmp_path / "x", keys=KEY)
    assert bits(one) == bits(other)


# Types, places and layouts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_converted_as_load_state_dict_does(path, dtype):
    module, expected = net(2, dtype=dtype), net(2, dtype=dtype)
    load_model(module, path, keys=KEY)
    expected.load_state_dict(net(1).state_dict())
    assert bits(module) == bits(expected)


def test_a_parameter_that_is_not_contiguous_is_filled(tmp_path):
    one, other = nn.Linear(30, 40), nn.Linear(30, 40)
    memory = torch.zeros(30, 80)
    other.weight = nn.Parameter(memory.T[::2])
    save_model(one, tmp_path / "x", key=KEY)
    load_model(other, tmp_path / "x", keys=KEY)
    assert torch.equal(other.weight, one.weight)
    assert torch.equal(memory.T[::2], one.weight)
    assert not memory.T[1::2].any()
    save_model(other, tmp_path / "y", key=KEY)
    third = nn.Linear(30, 40)
    load_model(third, tmp_path / "y", keys=KEY)
    assert bits(third) == bits(one)


@pytest.mark.filterwarnings("ignore:load_model")
def test_a_module_on_the_meta_device_comes_into_being(path):
    module = Net(device="meta")
    assert load_model(module, path, keys=KEY) == ([], [])
    assert bits(module) == bits(net(1))
    assert module.head.weight is module.embed.weight
    assert isinstance(module.scale, nn.Parameter)
    assert module.scale.requires_grad
    assert "running_mean" in dict(module.body[1].named_buffers())
    assert module.passing.is_meta


@pytest.mark.filterwarnings("ignore:load_model")
def test_a_parameter_on_the_meta_device_takes_the_dtype_of_the_file(path):
    module = Net(dtype=torch.bfloat16, device="meta")
    module.scale.requires_grad_(False)
    load_model(module, path, keys=KEY, device="cpu")
    assert bits(module) == bits(net(1))
    assert not module.scale.requires_grad


def test_the_device_is_for_parameters_on_the_meta_device_alone(path):
    module = net(2)
    load_model(module, path, keys=KEY, device="cuda:0")
    assert bits(module) == bits(net(1))


def test_a_device_that_cannot_be_used_is_named_before_anything_is_written(path):
    module = net(2)
    module.scale = nn.Parameter(torch.ones((), device="meta"))
    before = module.embed.weight.clone()
    with pytest.raises(DeviceError):
        load_model(module, path, keys=KEY, device="cuda:99")
    assert torch.equal(module.embed.weight, before)
    with pytest.raises(DeviceError, match="tpu"):
        load_model(module, path, keys=KEY, device="tpu")


def test_an_integer_is_no_parameter_with_a_gradient(tmp_path):
    save_file({"weight": np.ones((2, 2), np.int32)}, tmp_path / "x", KEY)
    module = nn.Linear(2, 2, bias=False, device="meta")
    with pytest.raises(RuntimeError, match=r"weight: .*torch\.int32"):
        load_model(module, tmp_path / "x", keys=KEY)
    assert module.weight.is_meta


def test_tensors_in_one_memory_are_filled_in_their_order(tmp_path, monkeypatch):
    module, memory = nn.Module(), torch.zeros(12)
    for name, part in {
        "a": memory[4:8],
        "b": memory[6:],
        "c": memory[:5],
        "d": memory[4:8],
        "e": torch.zeros(3),
    }.items():
        module.register_buffer(name, part)
    values = {
        name: torch.full_like(tensor, number) for number, (name, tensor) in enumerate(module.state_dict().items())
    }
    save_file(values, tmp_path / "x", KEY)
    filled, original = [], CpuOperation.open
    monkeypatch.setattr(
        CpuOperation, "open", lambda *given: filled.extend(given[0]._messages.memories) or original(*given)
    )
    load_model(module, tmp_path / "x", keys=KEY, strict=False)
    assert memory.tolist() == [2] * 4 + [3] * 4 + [1] * 4
    assert len(filled) == 5
    spans = sorted((one.address, one.address + one.size) for one in filled)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


# Names


@pytest.mark.filterwarnings("ignore:load_model")
@each("left_out", ["embed.weight", "head.weight", None])
@each("device", [None, "meta"])
def test_any_of_the_names_of_tied_weights_will_do_and_so_will_all(tmp_path, left_out, device):
    state = net(1).state_dict()
    save_file({name: tensor for name, tensor in state.items() if name != left_out}, tmp_path / "x", KEY)
    module = Net(device=device)
    assert load_model(module, tmp_path / "x", keys=KEY) == ([], [])
    assert bits(module) == bits(net(1))
    assert module.head.weight is module.embed.weight


class Tied(nn.Module):
    """A parameter under two names, as a view of it, and as buffers of other forms in its memory."""

    def __init__(self, device=None):
        super().__init__()
        self.embed = nn.Embedding(6, 4, device=device)
        self.head = nn.Linear(4, 6, bias=False, device=device)
        self.head.weight = self.embed.weight
        if device is None:
            self.low = nn.Parameter(self.embed.weight.detach()[:3])
            self.register_buffer("turned", self.embed.weight.detach().T)


ONE = np.arange(24, dtype=np.float32).reshape(6, 4)
OTHER = ONE + (ONE == 5)
EQUAL = {"embed.weight": ONE, "head.weight": ONE, "low": ONE[:3], "turned": ONE.T.copy()}


@each(
    ("name", "device"),
    [
        *((name, None) for name in EQUAL),
        ("embed.weight", "meta"),
        ("head.weight", "meta"),
    ],
)
def test_tensors_that_differ_are_refused_for_one_memory(tmp_path, name, device):
    """As safetensors refuses them; each took the place of the others, without a word."""
    module = Tied(device)
    values = {each: EQUAL[each] for each in module.state_dict()}
    save_file(values, tmp_path / "equal", KEY)
    other = {"low": OTHER[:3], "turned": OTHER.T.copy()}.get(name, OTHER)
    save_file({**values, name: other}, tmp_path / "x", KEY)
    match = r"embed\.weight, head\.weight.*: expected equal tensors for one memory"
    if device is None:
        refuse(module, tmp_path / "x", RuntimeError, match)
    else:
        with pytest.raises(RuntimeError, match=match):
            load_model(module, tmp_path / "x", keys=KEY)
        assert module.embed.weight.is_meta
    assert load_model(module, tmp_path / "equal", keys=KEY) == ([], [])
    assert np.array_equal(module.head.weight.detach(), ONE)
    plain = Tied()
    plain.load_state_dict({each: torch.from_numpy(value) for each, value in {**EQUAL, name: other}.items()})
    load_model(module, tmp_path / "x", keys=KEY, strict=False)
    if device is None:
        assert bits(module) == bits(plain)
    assert module.head.weight is module.embed.weight


@each("view", [torch.conj, lambda memory: memory.conj().imag])
def test_views_that_negate_parts_of_their_memory_are_compared_by_their_values(tmp_path, view):
    values = torch.tensor([1 + 2j, -3j, 5])
    equal = view(values).resolve_conj().resolve_neg().clone()
    module, memory = nn.Module(), torch.zeros(3, dtype=torch.complex64)
    module.register_buffer("memory", memory)
    module.register_buffer("view", view(memory))
    save_file({"memory": values, "view": -equal}, tmp_path / "x", KEY)
    with pytest.raises(RuntimeError, match="memory, view: expected equal tensors"):
        load_model(module, tmp_path / "x", keys=KEY)
    save_file({"memory": values, "view": equal}, tmp_path / "equal", KEY)
    load_model(module, tmp_path / "equal", keys=KEY)
    assert torch.equal(memory, values)


@each("device", [None, "meta"])
def test_equal_is_to_the_last_bit_in_the_dtype_of_the_module(tmp_path, device):
    special = torch.tensor([[float("nan"), -0.0, 2.0, 1e-40]] * 6)
    zero = torch.where(special == 0, 0.0, special)
    cases = {
        "same": (special, special, True),
        "zeros": (special, zero, False),
        "dtypes": (special.bfloat16().float(), special.bfloat16(), device is None),  # else the file decides on it
        "rounded": (special + 1e-3, special.bfloat16(), False),
    }
    for case, (one, other, fits) in cases.items():
        save_file({"embed.weight": one, "head.weight": other}, tmp_path / case, KEY)
        module = nn.Module()
        with torch.device(device or "cpu"):
            module.embed, module.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        module.head.weight = module.embed.weight
        if fits:
            load_model(module, tmp_path / case, keys=KEY)
            assert torch.equal(module.embed.weight.detach().view(torch.int32), one.view(torch.int32))
        else:
            with pytest.raises(RuntimeError, match="expected equal tensors"):
                load_model(module, tmp_path / case, keys=KEY)


def test_quantised_values_and_others_for_one_weight_are_compared_as_they_open(tmp_path):
    values, scales = torch.arange(24).to(torch.int8).reshape(6, 4), torch.full((6, 1), 0.5)
    module = nn.Module()
    module.embed, module.head = nn.Embedding(6, 4).bfloat16(), nn.Linear(4, 6, bias=False).bfloat16()
    module.head.weight = module.embed.weight
    for path, added in (("x", 0), ("y", 1)):
        whole = (values * scales + added).bfloat16()
        tensors = {"embed.weight": values, "embed.weight_scale": scales, "head.weight": whole}
        save_file(tensors, tmp_path / path, KEY, scales={"embed.weight": "embed.weight_scale"})
    load_model(module, tmp_path / "x", keys=KEY)
    assert torch.equal(module.head.weight.float(), values * scales)
    refuse(module, tmp_path / "y", RuntimeError, "expected equal tensors")


def test_a_view_of_what_was_loaded_is_loaded(tmp_path):
    module = nn.Module()
    module.all = nn.Parameter(torch.zeros(6, 4))
    module.register_buffer("part", module.all.detach()[2:4])
    save_file({"all": np.arange(24, dtype=np.float32).reshape(6, 4)}, tmp_path / "x", KEY)
    assert load_model(module, tmp_path / "x", keys=KEY) == ([], [])
    assert module.part[0, 0] == 8
    save_file({"part": np.ones((2, 4), np.float32)}, tmp_path / "y", KEY)
    refuse(module, tmp_path / "y", RuntimeError, r'Missing key\(s\) in state_dict: "all"')


def test_views_of_one_storage_that_differ_are_each_stored(tmp_path):
    one, other = nn.Module(), nn.Module()
    for module, start in ((one, 1), (other, 50)):
        memory = torch.arange(start, start + 12, dtype=torch.float32)
        module.low, module.high = nn.Parameter(memory[:8]), nn.Parameter(memory[4:])
    save_model(one, tmp_path / "x", key=KEY)
    load_model(other, tmp_path / "x", keys=KEY)
    assert bits(one) == bits(other)


def test_names_that_differ_are_listed_and_nothing_is_loaded(tmp_path):
    state = net(1).state_dict()
    del state["scale"], state["body.0.bias"]
    save_file({**state, "more": torch.ones(2), "and more": torch.ones(2)}, tmp_path / "x", KEY)
    listed = (
        r'into Net:\s+Unexpected key\(s\) in state_dict: "(and )?more", "(and )?more"\.'
        r'\s+Missing key\(s\) in state_dict: "scale", "body\.0\.bias"\.'
    )
    refuse(net(2), tmp_path / "x", RuntimeError, listed)


@pytest.mark.filterwarnings("ignore:load_model")
def test_names_that_differ_are_returned_if_that_is_allowed(tmp_path):
    state = net(1).state_dict()
    del state["scale"], state["body.0.bias"]
    save_file({**state, "more": torch.ones(2)}, tmp_path / "x", KEY)
    module = net(2)
    scale = module.scale.clone()
    found = load_model(module, tmp_path / "x", keys=KEY, strict=False)
    assert found == (["scale", "body.0.bias"], ["more"])
    assert torch.equal(module.scale, scale)
    assert torch.equal(module.embed.weight, net(1).embed.weight)
    ghost = Net(device="meta")
    load_model(ghost, tmp_path / "x", keys=KEY, strict=False)
    assert ghost.scale.is_meta
    assert torch.equal(ghost.embed.weight, net(1).embed.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_named_and_nothing_is_loaded(path, strict):
    refuse(
        net(2, width=60),
        path,
        RuntimeError,
        r"embed\.weight: size mismatch: \[50, 70\] in the file, \[50, 60\] in the module",
        strict=strict,
    )


def test_memory_that_cannot_hold_a_tensor_is_refused_beforehand(tmp_path):
    module = nn.Linear(3, 4)
    module.bias = nn.Parameter(torch.zeros(1).expand(4))
    save_model(nn.Linear(3, 4), tmp_path / "x", key=KEY)
    refuse(module, tmp_path / "x", RuntimeError, "bias: several elements of the tensor share one address")
    lazy = nn.LazyLinear(4)
    with pytest.raises(RuntimeError, match="weight: "):
        load_model(lazy, tmp_path / "x", keys=KEY)


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}


def test_state_that_is_no_tensor_is_neither_saved_nor_loaded(tmp_path):
    with pytest.raises(TypeError, match=r"'_extra_state'.*dict"):
        save_model(Extra(3, 4), tmp_path / "x", key=KEY)
    assert not list(tmp_path.iterdir())
    save_model(nn.Linear(3, 4), tmp_path / "x", key=KEY)
    with pytest.raises(RuntimeError, match=r'Missing .*"_extra_state"'):
        load_model(Extra(3, 4), tmp_path / "x", keys=KEY)
    assert load_model(Extra(3, 4), tmp_path / "x", keys=KEY, strict=False) == (["_extra_state"], [])
    save_file(
        {"weight": np.ones((4, 3), np.float32), "bias": np.ones(4), "_extra_state": np.ones(1)}, tmp_path / "y", KEY
    )
    with pytest.raises(RuntimeError, match="_extra_state: "):
        load_model(Extra(3, 4), tmp_path / "y", keys=KEY, strict=False)


# What is not the owner's is not loaded


@each("strict", [True, False])
@each("name", ["scale", "head.weight"])  # of which the second is another name of a sealed one
def test_a_tensor_in_plain_is_never_loaded(tmp_path, name, strict):
    save_file(net(1).state_dict(), tmp_path / "x", KEY, plain=[name])
    refuse(net(2), tmp_path / "x", AuthenticationError, f"'{name}' unencrypted and unauthenticated", strict=strict)


def test_a_file_in_plain_is_refused(tmp_path):
    safetensors.torch.save_model(net(1), tmp_path / "x")
    refuse(net(2), tmp_path / "x", AuthenticationError, "unencrypted and unauthenticated", strict=False)


def test_a_plain_tensor_that_the_module_does_not_have_is_left_alone(tmp_path):
    save_file({**net(1).state_dict(), "notes": np.ones(3)}, tmp_path / "x", KEY, plain=["notes"])
    assert load_model(net(2), tmp_path / "x", keys=KEY) == ([], [])


def test_another_key_is_refused_before_anything_is_written(path):
    refuse(net(2), path, UnknownKeyError, "key", keys=Key.generate())


def test_a_wrong_header_is_found_before_anything_is_written(path):
    with load_file(path) as file:
        last = list(file)[-1]
    tamper_file(path, last, 30)
    refuse(net(2), path, AuthenticationError, last)


def test_a_bad_chunk_leaves_zeros_wherever_something_was_loaded(path):
    tamper_file(path, "body.0.weight", chunk_offset(1) + 5)
    module = net(2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(AuthenticationError) as caught:
        load_model(module, path, keys=KEY)
    assert (caught.value.tensor, caught.value.chunk) == ("body.0.weight", 1)
    assert any("hold zeros now" in note for note in caught.value.__notes__)
    after = module.state_dict()
    assert not after["body.0.weight"].any()
    loaded = net(1).state_dict()
    for name, value in after.items():
        assert not value.any() or torch.equal(value, before[name]), name
        assert not value.any() or not torch.equal(value, loaded[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bad_chunk_leaves_every_tensor_zero_if_it_was_in_the_last(path, dtype):
    module = net(2, dtype=dtype)
    last = [name for name in module.state_dict() if name != "head.weight"][-1]
    tamper_file(path, last, 56)
    with pytest.raises(AuthenticationError) as caught:
        load_model(module, path, keys=KEY)
    assert caught.value.tensor == last
    assert not any(value.any() for value in module.state_dict().values())


def test_a_bad_chunk_leaves_a_module_on_the_meta_device_as_it_was(path):
    tamper_file(path, "body.0.weight", 60)
    module = Net(device="meta")
    with pytest.raises(AuthenticationError):
        load_model(module, path, keys=KEY)
    assert all(value.is_meta for value in module.state_dict().values())


def test_an_interruption_leaves_zeros_too(path, monkeypatch):
    monkeypatch.setattr(CpuOperation, "result", Mock(side_effect=KeyboardInterrupt))
    module = net(2)
    with pytest.raises(KeyboardInterrupt):
        load_model(module, path, keys=KEY)
    loaded = net(1).state_dict()
    assert not module.scale.any()
    assert not any(value.any() and torch.equal(value, loaded[name]) for name, value in module.state_dict().items())


# Saving


def test_neither_saving_nor_loading_takes_the_memory_of_a_second_model(tmp_path, limited):
    limited(file_slab=1 << 20)
    module, other = (nn.ParameterList(torch.randn(1 << 20) for _ in range(6)) for _ in range(2))
    save_model(nn.Linear(3, 4), tmp_path / "x", key=KEY)  # what is made once is made now
    load_model(nn.Linear(3, 4), tmp_path / "x", keys=KEY)
    tracemalloc.start()
    save_model(module, tmp_path / "x", key=KEY)
    load_model(other, tmp_path / "x", keys=KEY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert bits(module) == bits(other)
    assert peak < 4 << 20


def test_the_file_opens_as_any_sealed_file_and_has_tied_weights_once(path):
    with load_file(path) as file:
        assert set(file) == {name for name in net(1).state_dict() if name != "head.weight"}
        assert file.metadata == {"licence": "CC0"}
        opened = file["embed.weight"].to("cpu", keys=KEY)
    assert torch.equal(opened, net(1).embed.weight)


def test_a_module_that_is_not_in_host_memory_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"'scale': .* meta"):
        save_model(Net(device="meta"), tmp_path / "x", key=KEY)
    assert not list(tmp_path.iterdir())


# The short way to a device


def test_a_sealed_tensor_and_rows_of_one_know_the_way_to_a_device(path):
    expected = net(1).embed.weight.detach()
    with load_file(path) as file:
        sealed = file["embed.weight"]
        assert torch.equal(sealed.to(keys=KEY), expected)
        assert np.array_equal(sealed.to("cpu", keys=[KEY], framework="numpy"), expected.numpy())
        out = torch.empty(50, 70)
        assert sealed.to(keys=KEY, out=out, non_blocking=True) is out
        assert torch.equal(out, expected)
        assert torch.equal(sealed[3:7].to("cpu", keys=KEY), expected[3:7])
        with pytest.raises(UnknownKeyError):
            sealed.to("cpu")


# Tensors that are not dense


class Halves(torch.Tensor):
    """A tensor kept in two parts, as sharded and quantised ones are kept in several."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(
            cls, (left.shape[0] + right.shape[0], *left.shape[1:]), left.stride()
        )

    def __init__(self, left, right):
        self.halves = [left, right]

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), options=None):
        if operation in {torch.ops.aten.detach.default, torch.ops.aten.view.default}:
            return cls(*arguments[0].halves)
        raise NotImplementedError(operation)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_module_with_a_tensor_that_is_not_dense_is_refused_before_it_is_touched(tmp_path, mesh, is_sharded):
    path, other = tmp_path / "m.safetensors", tmp_path / "n.safetensors"
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    save_model(module, path, key=KEY)
    tensor = Halves(*module[1].weight.detach().chunk(2))
    if is_sharded:
        tensor = DTensor.from_local(tensor, mesh, run_check=False)
    module[1].weight = weight = nn.Parameter(tensor)
    with torch.no_grad():
        before = module[0].weight.fill_(7).clone()
    with pytest.raises(TypeError, match=r"'1\.weight' .*Halves"):
        load_model(module, path, keys=KEY)
    assert module[1].weight is weight
    assert torch.equal(module[0].weight, before)
    with pytest.raises(TypeError, match=r"'1\.weight' .*Halves"):
        save_model(module, other, key=KEY)
    assert not other.exists()
