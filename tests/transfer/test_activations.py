"""`sealed_activations`: gradients are equal bit for bit, and nothing that was altered enters one."""

import contextlib
import gc

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastrack
from fastrack.errors import AuthenticationError, ClosedError

LEAST = 4096


def block(seed=0):
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
    return torch.nn.Sequential(layer, torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))


BATCH = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(3))


def gradients(model, backward):
    model.zero_grad()
    backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def plain(model):
    torch.manual_seed(1)
    model(BATCH).square().mean().backward()


@pytest.fixture(params=["memory", "folder", "store"])
def vault(request, tmp_path):
    return fastrack.Vault({"memory": None, "folder": tmp_path, "store": {}}[request.param])


@pytest.mark.slow
def test_gradients_are_those_of_the_plain_step(vault):
    model = block()

    def sealed():
        torch.manual_seed(1)
        with fastrack.sealed_activations(vault, min_bytes=LEAST) as used:
            loss = model(BATCH).square().mean()
        assert used is vault
        assert vault._store or vault._slots._used > 10 * LEAST
        loss.backward()

    expected, sizes = gradients(model, lambda: plain(model)), []
    for _ in range(3):
        found = gradients(model, sealed)
        assert all(map(torch.equal, found, expected))
        gc.collect()
        sizes.append(vault.nbytes)
        assert vault.nbytes == vault._slots._spare  # every place is free again
    assert len(set(sizes)) == 1
    vault.drop(vault.put("end", torch.ones(1)))
    gc.collect()
    vault.close()
    assert not vault._store


def test_an_altered_tensor_enters_no_gradient():
    model, vault = block(), fastrack.Vault()
    tickets = []
    put = vault.put
    vault.put = lambda name, tensor: tickets.append(put(name, tensor)) or tickets[-1]
    with fastrack.sealed_activations(vault, min_bytes=LEAST):
        loss = model(BATCH).square().mean()
    tickets[0]._place[200] ^= 1
    with pytest.raises(AuthenticationError, match="'activation'"):
        loss.backward()
    assert model[0].self_attn.in_proj_weight.grad is None
    closed = fastrack.Vault()
    with fastrack.sealed_activations(closed, min_bytes=LEAST):
        loss = model(BATCH).square().mean()
    closed.close()
    with pytest.raises(ClosedError):
        loss.backward()


def saved(function, min_bytes=LEAST):
    """The sizes that are sealed, and the shapes that stay."""
    vault, sizes = fastrack.Vault(), []
    put = vault.put
    vault.put = lambda name, tensor: sizes.append(tensor.nbytes) or put(name, tensor)
    with fastrack.sealed_activations(vault, min_bytes=min_bytes):
        result = function()
    return sizes, result


def test_parameters_and_what_is_small_or_repeated_stay():
    linear = torch.nn.Linear(64, 64)
    value = torch.ones(32, 64, requires_grad=True)
    assert saved(lambda: linear(value * 1))[0] == [value.nbytes]
    assert saved(lambda: linear(value * 1), min_bytes=value.nbytes + 1)[0] == []
    assert saved(lambda: value.exp() * torch.ones(1, 64).expand(32, 64))[0] == [value.nbytes]
    assert saved(lambda: torch.sparse.mm(torch.eye(64).to_sparse(), torch.ones(64, 64, requires_grad=True)))[0] == []
    assert saved(lambda: value.to(torch.complex128).exp())[0] == []


def test_a_tensor_that_several_save_is_sealed_once_until_it_changes():
    weights = [torch.ones(64, 64, requires_grad=True) for _ in range(3)]
    given = torch.ones(32, 64, requires_grad=True)

    def step():
        value = given * 1
        products = [value @ weight for weight in weights]
        value.add_(1)  # plain autograd would refuse the backward pass
        return sum(products).sum() + (value @ weights[0]).sum()

    sizes, loss = saved(step)
    assert sizes == [given.nbytes] * 2
    loss.backward()
    assert torch.equal(weights[1].grad, torch.full((64, 64), 32.0))
    assert torch.equal(weights[0].grad, torch.full((64, 64), 32.0 + 64.0))


def test_another_tensor_in_the_same_memory_is_another():
    """The second tensor may get the address of the first, which is gone, and has its shape and version."""
    weight = torch.ones(64, 64, requires_grad=True)

    def step():
        total = torch.zeros(())
        for number in range(6):
            value = torch.full((32, 64), float(number))
            total = total + (value @ weight).sum()
            del value
        return total

    sizes, loss = saved(step)
    assert len(sizes) == 6
    loss.backward()
    assert torch.equal(weight.grad, torch.full((64, 64), 32.0 * sum(range(6))))


def test_what_others_write_to_is_sealed_each_time():
    """A batch is no result of autograd: its loader fills it again, which no version tells."""
    weights, buffer = [torch.ones(64, 64, requires_grad=True) for _ in range(2)], np.ones((32, 64), np.float32)
    batch = torch.from_numpy(buffer)

    def step():
        first = (batch @ weights[0]).sum()
        buffer[:] = 5
        return first + (batch @ weights[1]).sum()

    sizes, loss = saved(step)
    assert len(sizes) == 2
    loss.backward()
    assert [weight.grad[0, 0].item() for weight in weights] == [32, 160]


def test_conjugates_and_negatives_are_other_tensors():
    value = torch.randn(64, dtype=torch.complex64, requires_grad=True)
    weights = [torch.ones(64, dtype=torch.complex64, requires_grad=True) for _ in range(2)]

    def step():
        made = value * 1
        return ((made * weights[0]).sum() + (made.conj() * weights[1]).sum()).real + (made.conj().imag.exp()).sum()

    step().backward()
    expected = [each.grad.clone() for each in (value, *weights)]
    for each in (value, *weights):
        each.grad = None
    saved(step, min_bytes=64)[1].backward()
    assert all(map(torch.equal, expected, [each.grad for each in (value, *weights)]))


@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_what_stays_must_not_change_in_place(min_bytes):
    """autograd does not check what hooks keep. What is sealed is a copy."""
    linear, value = torch.nn.Linear(64, 64), torch.randn(32, 64)

    def step():
        result = torch.sigmoid(linear(value))
        gradient = result * (1 - result)
        result += 1
        return result.sum(), gradient.detach()

    _, (loss, gradient) = saved(step, min_bytes=min_bytes)
    if min_bytes > value.nbytes:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()
        assert torch.allclose(linear.bias.grad, gradient.sum(0), atol=1e-5)
    optimizer = torch.optim.SGD(linear.parameters(), 0.1)
    _, loss = saved(lambda: linear((value * 1).requires_grad_()).sum())
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_that_gets_other_memory_is_used_with_that():
    leaf = torch.full((64,), 4.0, requires_grad=True)
    _, loss = saved(lambda: leaf.square().sum())
    leaf.data = torch.ones(64)
    loss.backward()
    assert leaf.grad[0] == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay():
    values = torch.nested.nested_tensor([torch.ones(4, 64), torch.ones(9, 64)], requires_grad=True)
    sizes, loss = saved(lambda: (values * values).to_padded_tensor(0.0).sum(), min_bytes=1)
    loss.backward()
    assert sizes == []


def test_graphs_are_kept_differentiated_twice_and_checkpointed():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    batch = torch.randn(64, 64, requires_grad=True)

    def twice(block):
        with block:
            value = model(batch).sum()
            [gradient] = torch.autograd.grad(value, batch, create_graph=True)
        gradient.square().sum().backward(retain_graph=True)
        gradient.square().sum().backward()

    expected = gradients_of(model, lambda: twice(contextlib.nullcontext()))
    found = gradients_of(model, lambda: twice(fastrack.sealed_activations(min_bytes=LEAST)))
    assert all(map(torch.equal, expected, found))

    def step():
        with fastrack.sealed_activations(min_bytes=LEAST):
            value = checkpoint(model, batch, use_reentrant=False).sum()
        value.backward()

    expected = gradients_of(model, lambda: model(batch).sum().backward())
    assert all(map(torch.equal, expected, gradients_of(model, step)))


def gradients_of(model, backward):
    model.zero_grad()
    backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
