"""The strides of dense tensors, and Fortran order, come back with the values that are stored or moved."""

from __future__ import annotations

import inspect
import io
import itertools
import json

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.tour_rig import Rig

import fastrack
from fastrack import Key, load_checkpoint, load_file, save_checkpoint, to_device, tour
from fastrack._training.checkpoints.state import decode_state, encode_state
from fastrack.errors import FormatError

KEY = Key.from_bytes(bytes(range(32)))


def by_torch(state, _):
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)  # arrays of NumPy are no weights


def by_fastrack(state, path):
    save_checkpoint(path, state, key=KEY)
    return load_checkpoint(path, keys=KEY)


# A run that is resumed goes on as the whole one does.


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rows):
        return self.head(self.embedding(rows))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, rows):
        self.calls += 1
        return rows * self.scale


def transposed():
    layer = torch.nn.Linear(5, 3)
    layer.weight = torch.nn.Parameter(torch.randn(5, 3).T)
    return layer


def images(*shape, last=torch.channels_last):
    return lambda: torch.randn(shape).to(memory_format=last)


MODULES = {
    "channels_last": (lambda: torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), images(2, 3, 6, 6)),
    "channels_last of one pixel": (
        lambda: torch.nn.Conv2d(3, 8, 1).to(memory_format=torch.channels_last),
        images(2, 3, 4, 4),
    ),
    "channels_last of one channel": (
        lambda: torch.nn.Conv2d(4, 4, 3, groups=4).to(memory_format=torch.channels_last),
        images(2, 4, 5, 5),
    ),
    "channels_last_3d": (
        lambda: torch.nn.Conv3d(2, 4, 2).to(memory_format=torch.channels_last_3d),
        images(1, 2, 4, 4, 4, last=torch.channels_last_3d),
    ),
    "transposed": (transposed, lambda: torch.randn(4, 5)),
    "tied": (Tied, lambda: torch.randint(0, 6, (5,))),
    "0-dim": (Scaled, lambda: torch.randn(4)),
}
OPTIMIZERS = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "Adam, fused": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "SGD, fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "Adagrad, fused": (torch.optim.Adagrad, {"fused": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "SGD, foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
}
if "fused" not in inspect.signature(torch.optim.Adagrad).parameters:  # of the oldest torch
    del OPTIMIZERS["Adagrad, fused"]


def trained(resume, path, modules, optimizers):
    """Return the parameters after two steps, a checkpoint unless `resume` is None, and two steps more."""
    make, draw = MODULES[modules]
    kind, options = OPTIMIZERS[optimizers]
    torch.manual_seed(0)
    module = make()
    optimizer = kind(module.parameters(), lr=0.01, **options)

    def step():
        optimizer.zero_grad()
        module(draw()).square().sum().backward()
        optimizer.step()

    step(), step()
    if resume is not None:
        state = resume({"module": module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
    step(), step()
    return list(module.state_dict().values())


def by_numpy(resume, path, order, size):
    """Return weights after steps of a product that NumPy computes, with a checkpoint in between."""
    random = np.random.default_rng(0)
    state = {
        "weights": np.asarray(random.random((size, size + 3)), order=order),
        "moments": np.zeros((size, size + 3), order=order),
        "rate": np.float64(0.1),
        "steps": np.array(0),
    }
    rows = random.random((7, size))
    for number in range(4):
        if number == 2 and resume is not None:
            state = resume(state, path)
        state["moments"] = state["moments"] * 0.9 + rows.T @ np.tanh(rows @ state["weights"])
        state["weights"] = state["weights"] - state["rate"] * state["moments"]
        state["steps"] += 1
    return [torch.from_numpy(state["weights"].copy("K")), torch.from_numpy(state["steps"])]


RUNS = {f"{module}, {optimizer}": (trained, module, optimizer) for module in MODULES for optimizer in OPTIMIZERS}
RUNS |= {f"NumPy, {order}, {size}": (by_numpy, order, size) for order in "CF" for size in (1, 5, 40)}
QUICK = ["channels_last, SGD, fused", "NumPy, F, 40"]


def require_equal(run, path):
    train, *chosen = RUNS[run]
    whole = train(None, path, *chosen)
    for resume in (by_torch, by_fastrack):
        for left, right in zip(whole, train(resume, path, *chosen), strict=True):
            assert torch.equal(left, right), resume.__name__
            assert left.stride() == right.stride()


@each("run", QUICK)
def test_a_run_that_is_resumed_equals_the_whole_one(tmp_path, run):
    require_equal(run, tmp_path / "run.safetensors")


@pytest.mark.nightly
@each("run", [run for run in RUNS if run not in QUICK])
def test_every_run_that_is_resumed_equals_the_whole_one(tmp_path, run):
    assert len(RUNS) >= 40
    require_equal(run, tmp_path / "run.safetensors")


# Strides, to the last one.


def permutations():
    for shape in [
        (4, 5),
        (8, 3, 1, 1),
        (2, 3, 4, 5),
        (1, 3, 4, 5),
        (1, 1, 5),
        (2, 3, 2, 1),
        (0, 4, 3),
        (4, 0, 1),
        (1,),
    ]:
        whole = torch.randn(shape)
        yield from (whole.permute(order) for order in itertools.permutations(range(len(shape))))


DENSE = [
    *permutations(),
    torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
    torch.randn(2, 1, 3, 3).to(memory_format=torch.channels_last),
    torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    torch.randn(5).as_strided((1, 1, 5), (77, 13, 1)),
    torch.randn(9)[::5][:1],
    torch.randn(1, 5)[:, :1],
    torch.randn(3, 2, dtype=torch.complex64).T.conj(),
    torch.randn(3, 2, dtype=torch.bfloat16).T,
    torch.nn.Parameter(torch.randn(3, 2).T),
    torch.randn(3, 2).T.requires_grad_(),
    torch.tensor(3.0),
]
OTHERS = [
    torch.randn(4, 6)[:, ::2],
    torch.randn(4, 5)[:, :1],
    torch.randn(1, 5).expand(4, 5),
    torch.randn(4, 5).T[1:, 1:],
    torch.randn(3, 4, 5)[:, 1].T,
]


def through_a_vault(tensors, _):
    with fastrack.Vault() as vault:
        return [vault.get(vault.put("x", tensor)) for tensor in tensors]


DOORS = {
    "checkpoint": by_fastrack,
    "to_device": lambda tensors, _: to_device(tensors),
    "vault": through_a_vault,
}


@each("door", DOORS)
def test_the_strides_of_dense_tensors_are_those_that_torch_saves(tmp_path, door):
    moved = DOORS[door](DENSE, tmp_path / "run.safetensors")
    for tensor, expected, found in zip(DENSE, by_torch(DENSE, None), moved, strict=True):
        assert tensor.stride() == expected.stride() == found.stride()
        assert torch.equal(found.resolve_conj(), tensor)
        assert found._base is None


@each("door", DOORS)
def test_tensors_that_are_not_dense_become_contiguous(tmp_path, door):
    for tensor, found in zip(OTHERS, DOORS[door](OTHERS, tmp_path / "run.safetensors"), strict=True):
        assert found.stride() == torch.empty(tensor.shape).stride()
        assert torch.equal(found, tensor)


def test_a_vault_fills_what_has_the_strides_and_no_other():
    with fastrack.Vault() as vault:
        for tensor in DENSE[:40]:
            out = torch.empty_strided(tensor.shape, tensor.stride())
            assert vault.get(vault.put("x", tensor), out=out) is out
            assert torch.equal(out, tensor)


FORTRAN = [np.asfortranarray(np.random.default_rng(0).random((3, 4))), np.arange(24).reshape(2, 3, 4).T]
FORTRAN += [np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2), np.arange(12).reshape(3, 1, 4).T[:, ::-1]]
IN_C_ORDER = [np.arange(12).reshape(3, 4)[::-1], np.arange(12).reshape(4, 3)[::2].T, np.zeros((0, 3)).T, np.array(1)]


@each("door", ["checkpoint", "to_device"])
def test_arrays_of_numpy_keep_their_order(tmp_path, door):
    arrays = [*FORTRAN, *IN_C_ORDER, np.asfortranarray(np.ones((1, 5)))]
    for array, found in zip(arrays, DOORS[door](arrays, tmp_path / "run.safetensors"), strict=True):
        assert np.array_equal(found, array)
        is_kept = any(array is each for each in FORTRAN)
        expected = np.empty_like(array) if is_kept else np.empty(array.shape, array.dtype)
        moving = [size > 1 for size in array.shape]  # NumPy gives the others any stride
        assert np.array(found.strides)[moving].tolist() == np.array(expected.strides)[moving].tolist()
        found[...] = 0  # may be written to


def test_a_column_in_fortran_order_is_one_again_in_torch():
    moved = to_device(FORTRAN[0], framework="torch")
    assert moved.stride() == (1, 3)
    assert np.array_equal(moved, FORTRAN[0])


# The entry of a checkpoint.


IMAGE = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
ONE_PIXEL = torch.ones(2, 3, 1, 1).to(memory_format=torch.channels_last)
FORMS = {
    "image": (IMAGE, ["torch", 0, [12, 1, 6, 3]]),
    "gradient": (torch.ones(2, 3).T.requires_grad_(), ["torch", 0, True, [1, 3]]),
    "parameter": (torch.nn.Parameter(torch.ones(2, 3).T, False), ["parameter", 0, False, [1, 3]]),
    "one pixel": (ONE_PIXEL, ["torch", 0, [3, 1, 3, 3]]),
    "Fortran": (np.asfortranarray(np.ones((2, 3))), ["numpy", 0, [1, 2]]),
    "contiguous": (torch.ones(2, 3), ["torch", 0]),
    "no order": (torch.ones(2, 3, 1, 1), ["torch", 0]),
    "slice": (torch.ones(4, 4)[:, ::2], ["torch", 0]),
    "expanded": (torch.ones(1, 4).expand(3, 4), ["torch", 0]),
    "C": (np.ones((2, 3)), ["numpy", 0]),
    "scalar": (np.float32(1), ["scalar", 0]),
}


@each("value,entry", FORMS.values())
def test_an_entry_has_strides_only_where_a_new_array_has_others(value, entry):
    assert json.loads(encode_state(value)[0]) == {"checkpoint": 1, "state": entry}


def known_to_0_2(entry):
    """Return whether version 0.2 takes the entry of an array, as its decoder matched them."""
    match entry:
        case ["torch" | "numpy" | "scalar", int()] | ["torch" | "parameter", int(), bool()]:
            return True
    return False


@each("value,entry", FORMS.values())
def test_version_0_2_refuses_the_entries_that_it_would_misread(value, entry):
    stored = json.loads(encode_state(value)[0])["state"]
    assert known_to_0_2(stored) == (type(entry[-1]) is not list)


def test_the_message_of_an_array_has_its_dimensions_as_they_are_in_memory(tmp_path):
    save_checkpoint(tmp_path / "run.safetensors", IMAGE, key=KEY)
    with load_file(tmp_path / "run.safetensors") as file:
        assert file["0"].shape == (2, 2, 2, 3)
        assert torch.equal(to_device(file["0"], keys=KEY), IMAGE.permute(0, 2, 3, 1))


def test_places_of_one_array_share_it_and_its_strides(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4, 3).T)
    table = np.asfortranarray(np.ones((2, 3)))
    state = {"a": weight, "b": weight, "c": weight.detach(), "d": weight.detach().T, "n": table, "m": table[:]}
    back = by_fastrack(state, tmp_path / "run.safetensors")
    assert back["a"] is back["b"]
    assert back["n"] is back["m"]
    assert back["a"].data_ptr() == back["c"].data_ptr() != back["d"].data_ptr()
    assert [back[name].stride() for name in "acd"] == [(1, 3), (1, 3), (3, 1)]


REFUSED = [[], [1], [1, 2, 3], [1, 3], [2, 2], [1, 1], [0, 1], [-1, 2], [True, 2], [1.5, 2], ["1", 2], [1, 2**63]]


@each("kind", [["torch", 0], ["torch", 0, True], ["parameter", 0, True], ["numpy", 0], ["scalar", 0]])
def test_strides_that_are_not_those_of_the_array_are_refused(kind):
    for strides in REFUSED:
        text = json.dumps({"checkpoint": 1, "state": [*kind, strides]}).replace("1.5", "15")
        with pytest.raises(FormatError):
            decode_state(text.encode(), lambda _, framework: array_of(framework, (3, 2)))


def array_of(framework, shape):
    return torch.ones(shape) if framework == "torch" else np.ones(shape)


def is_dense(extents, strides):
    """Return whether the elements of an array lie in as many places, without a gap."""
    places = [
        sum(index * stride for index, stride in zip(element, strides, strict=True))
        for element in itertools.product(*map(range, extents))
    ]
    return sorted(places) == list(range(len(places)))


@each("shape", [(3, 2), (1, 4), (2, 1, 3)])
def test_strides_are_taken_if_and_only_if_each_element_has_one_place(shape):
    values = torch.arange(float(np.prod(shape))).reshape(shape)
    for strides in itertools.product(range(7), repeat=len(shape)):
        text = json.dumps({"checkpoint": 1, "state": ["torch", 0, strides]}).encode()
        order = sorted(range(len(shape)), key=lambda dimension: -strides[dimension])
        extents = [shape[order.index(dimension)] for dimension in range(len(shape))]
        try:
            found = decode_state(text, lambda *_: values)
        except FormatError:
            assert not is_dense(extents, strides)
        else:
            assert (list(found.shape), found.stride()) == (extents, strides)
            assert is_dense(extents, strides)
            assert torch.equal(found.permute(order), values)


@each("framework", ["torch", "numpy"])
def test_the_stride_of_one_element_reaches_no_memory(framework):
    text = json.dumps({"checkpoint": 1, "state": [framework, 0, [2**63 - 1, 2**62, 1]]})
    found = decode_state(text.encode(), lambda _, framework: array_of(framework, (1, 1, 4)))
    assert found.shape == (1, 1, 4)
    assert found.sum() == 4


# What else stores values, or hands them out new.


def keep_strides(state, shards):
    """Train nothing: return two tensors, and the strides that they had in the visit before."""
    list(shards)
    found = [state[name].stride() for name in ("image", "moments") if name in state]
    return {"image": IMAGE, "moments": ONE_PIXEL, "found": found}


def test_the_state_of_a_tour_keeps_its_strides(tmp_path):
    rig = Rig(tmp_path, train=keep_strides)
    rig.visit(0)
    key = tour.model_key(rig.visit(1), rig.key)
    state = load_checkpoint(tmp_path / "v2" / "model.safetensors", keys=key)
    assert state["found"] == [state["image"].stride(), state["moments"].stride()] == [IMAGE.stride(), (3, 1, 3, 3)]


def test_a_run_that_a_notice_ends_goes_on_as_the_whole_one(tmp_path):
    def by_notice(state, path):
        with fastrack.PreemptionNotice(deadline=60) as notice, notice.saving():
            save_checkpoint(path, state, key=KEY)
        return load_checkpoint(path, keys=KEY)

    run = tmp_path / "run.safetensors", "channels_last", "SGD, fused"
    assert all(map(torch.equal, trained(None, *run), trained(by_notice, *run)))


class Noted(torch.autograd.Function):
    """Twice a tensor, with a list of the strides in which it was saved and comes back."""

    @staticmethod
    def forward(context, tensor, strides):
        context.save_for_backward(tensor)
        context.strides = strides
        strides.append(tensor.stride())
        return 2 * tensor

    @staticmethod
    def backward(context, gradient):
        context.strides.append(context.saved_tensors[0].stride())
        return 2 * gradient, None


@each("tensor", [IMAGE, ONE_PIXEL])
def test_a_sealed_activation_has_its_strides(tensor):
    strides = []
    with fastrack.sealed_activations(min_bytes=1):
        total = Noted.apply(tensor.clone().requires_grad_() * 1, strides).sum()
    total.backward()
    assert strides == [tensor.stride()] * 2


def written_and_read(array, path):
    """Return a sample, and the same in a batch, of a dataset of one sample that is the array."""
    with fastrack.DatasetWriter(path, KEY) as writer:
        writer.write({"x": array})
    data = fastrack.SealedDataset(path, keys=KEY)
    opened = [to_device(value, keys=KEY, framework="numpy") for value in (data[0]["x"], data[:1]["x"])]
    return [opened[0], opened[1][0]]


def saved_and_read(array, path):
    fastrack.save_file({"x": array}, path, KEY)
    with load_file(path) as file:
        return [to_device(file["x"], keys=KEY, framework="numpy")]


VALUES_ONLY = {
    "dataset": written_and_read,
    "save_file": saved_and_read,
    "seal": lambda array, _: [fastrack.unseal(fastrack.seal(array, KEY), KEY, framework="numpy")],
    "to_host": lambda array, _: [fastrack.unseal(fastrack.to_host(array, KEY), KEY, framework="numpy")],
}


@each("door", VALUES_ONLY)
def test_what_is_stored_as_values_only_opens_contiguous(tmp_path, door):
    for array in (FORTRAN[0], IMAGE):
        for found in VALUES_ONLY[door](array, tmp_path / f"x{array.ndim}"):
            assert found.flags.c_contiguous
            assert np.array_equal(found, array)


def test_a_vault_has_values_of_numpy_only():
    with fastrack.Vault() as vault:
        ticket, out = vault.put("x", FORTRAN[0]), np.empty((3, 4))
        assert vault.get(ticket).flags.c_contiguous
        assert np.array_equal(vault.get(ticket, out=out), FORTRAN[0])


def convolution(device="cpu"):
    return torch.nn.Conv2d(3, 8, 3, device=device).to(memory_format=torch.channels_last)


def test_a_model_has_its_own_strides_and_one_without_memory_the_files(tmp_path):
    path, own = tmp_path / "model.safetensors", convolution().weight.stride()
    fastrack.save_model(torch.nn.Conv2d(3, 8, 3), path, KEY)
    filled, live, empty = convolution(), fastrack.reloadable(convolution()), convolution("meta")
    fastrack.load_model(filled, path, KEY)
    live.reload(path, KEY)
    fastrack.load_model(empty, path, KEY, device="cpu")
    assert filled.weight.stride() == live.module.weight.stride() == own
    assert empty.weight.is_contiguous()
