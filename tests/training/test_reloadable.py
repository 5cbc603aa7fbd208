"""A module is reloaded while it is called: each call has the weights of one file, and a bad file changes nothing."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import pickle
import random
import sys
import threading
import types
import weakref
from collections import Counter

import pytest
import torch
from helpers.cases import each
from helpers.forking import in_forked_child

import fastrack
from fastrack import Key, load_model, reloadable, save_model
from fastrack._models import generations
from fastrack.errors import FastrackError, UnknownKeyError

KEY = Key.from_bytes(bytes(range(7, 39)))


class Net(torch.nn.Module):
    """Its output has the value of each weight and buffer in a place of its own."""

    def __init__(self, value=0.0, layers=6):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in range(layers))
        self.tied = torch.nn.Linear(1, 1, bias=False)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("mean", torch.zeros(100_000))  # of several chunks
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.pause = lambda: None
        with torch.no_grad():
            for tensor in (*self.parameters(), self.mean):
                tensor.fill_(value)

    def forward(self, x):
        parts = [layer(x) for layer in self.layers]
        self.pause()
        return torch.cat([*parts, self.tied(x), self.mean[:1] * x, self.mean[-1:] * x])

    def twice(self, x):
        return torch.cat([self(x), self(x)])


def values(module):
    """Return the values of all weights in one call."""
    with torch.no_grad():
        return set(module(torch.ones(1)).tolist())


@pytest.fixture
def files(tmp_path):
    """Paths of sealed weights that are all 0, all 1, and all 2."""
    paths = [tmp_path / f"{value}.safetensors" for value in range(3)]
    for value, path in enumerate(paths):
        save_model(Net(value), path, KEY)
    return paths


# One generation a call


def answer_around(module, load):
    """Return the values of a call that `load` interrupts on another thread."""

    def pause():
        module.pause = lambda: None
        thread = threading.Thread(target=load)
        thread.start()
        thread.join(60)

    module.pause = pause
    return values(module)


def test_a_call_that_began_before_a_reload_ends_with_the_old_weights(files):
    plain = Net()
    assert answer_around(plain, lambda: load_model(plain, files[1], KEY)) == {0.0, 1.0}  # why this is here
    live = reloadable(Net())
    called = live.module
    load, found = functools.partial(live.reload, files[1], KEY), []

    def pause():
        called.pause = lambda: None
        thread = threading.Thread(target=load)
        thread.start()
        thread.join(60)
        found.append(values(live))

    called.pause = pause
    assert values(live) == {0.0}
    assert found == [{1.0}]
    assert values(live) == {1.0}


def test_a_method_has_the_weights_of_one_file_until_it_returns(files):
    live = reloadable(Net())
    method = live.twice
    live.reload(files[1], KEY)
    assert set(method(torch.ones(1)).tolist()) == {0.0}
    assert set(live.twice(torch.ones(1)).tolist()) == {1.0}


def watch(module, load, count):
    """The kinds of answers while weights are loaded `count` times."""
    stop, seen = threading.Event(), Counter()

    def infer():
        while not stop.is_set():
            found = values(module)
            seen["mixed" if len(found) > 1 else found.pop()] += 1

    threads = [threading.Thread(target=infer) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for number in range(count):
            load(number)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    return seen


def test_threads_see_no_mixed_weights_while_a_module_is_reloaded(files):
    live = reloadable(Net())
    seen = watch(live, lambda number: live.reload(files[number % 3], KEY), 15)
    assert seen["mixed"] == 0
    assert seen.total() > 0


@pytest.mark.nightly
def test_a_thousand_reloads_give_no_mixed_answer_where_loads_in_place_do(files, capsys):
    plain, live = Net(), reloadable(Net())
    control = watch(plain, lambda number: load_model(plain, files[number % 3], KEY), 1000)
    seen = watch(live, lambda number: live.reload(files[number % 3], KEY), 1000)
    with capsys.disabled():
        print(f"\n1,000 reloads: {dict(seen)}; 1,000 loads in place: {dict(control)}")  # noqa: T201
    assert seen["mixed"] == 0
    assert control["mixed"] > 0


def test_calls_of_asyncio_go_on_while_a_reload_runs_in_a_thread(files):
    live = reloadable(Net())

    async def serve():
        loading = asyncio.create_task(asyncio.to_thread(live.reload, files[2], KEY))
        seen = []
        while not loading.done():
            seen.append(values(live))
            await asyncio.sleep(0)
        await loading
        return seen

    assert all(found in ({0.0}, {2.0}) for found in asyncio.run(serve()))
    assert values(live) == {2.0}


@pytest.mark.slow  # it imports the compiler
@pytest.mark.parametrize("how", ["inner", "outer", "in place"])
def test_a_compiled_module_takes_new_weights_without_being_compiled_again(files, how):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    live = reloadable(torch.compile(Net(), backend=backend) if how == "inner" else Net())
    call = torch.compile(live, backend=backend) if how == "outer" else live
    if how == "in place":
        live.compile(backend=backend)
    assert values(call) == {0.0}
    count = len(compiled)
    assert count > 0
    for value in (1, 2):
        live.reload(files[value], KEY)
        assert values(call) == {float(value)}
    assert len(compiled) == count or not torch._dynamo.config.inline_inbuilt_nn_modules  # as in torch 2.4


# A bad file


def damage(path, target, random):
    """Write a copy that differs in one bit, is cut short, or begins in the middle: in its header or in its tensors."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    place = random.choice([random.randrange(1, begin), random.randrange(begin, len(content))])
    altered = content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
    target.write_bytes(random.choice([altered, altered, content[:place], content[place:] + content[:place]]))


def reload_damaged(files, tmp_path, count):
    """Reload from damaged files under inference, and return the kinds of errors and of answers."""
    live, random_bits, errors = reloadable(Net(1)), random.Random(1), Counter()

    def reload(_):
        damage(files[2], tmp_path / "damaged", random_bits)
        with pytest.raises(FastrackError) as info:
            live.reload(tmp_path / "damaged", KEY)
        errors[type(info.value).__name__] += 1

    return errors, watch(live, reload, count)


def test_a_damaged_file_leaves_the_weights_that_were_there(files, tmp_path):
    errors, seen = reload_damaged(files, tmp_path, 15)
    assert errors.total() == 15
    assert seen.keys() == {1.0}


@pytest.mark.nightly
def test_three_hundred_damaged_files_change_nothing(files, tmp_path, capsys):
    errors, seen = reload_damaged(files, tmp_path, 300)
    with capsys.disabled():
        print(f"\n300 damaged files: {dict(errors)}, answers: {dict(seen)}")  # noqa: T201
    assert errors.total() == 300
    assert seen.keys() == {1.0}


def test_another_key_another_module_and_no_file_leave_the_weights_that_were_there(files, tmp_path):
    live = reloadable(Net(1))
    save_model(Net(2, layers=5), tmp_path / "other", KEY)
    for path, keys, error in (
        (files[2], Key.generate(), UnknownKeyError),
        (tmp_path / "other", KEY, RuntimeError),
        (tmp_path / "absent", KEY, OSError),
    ):
        with pytest.raises(error):
            live.reload(path, keys)
        assert values(live) == {1.0}
    assert live.reload(tmp_path / "other", KEY, strict=False).missing_keys == ["layers.5.weight"]
    assert values(live) == {1.0, 2.0}  # as asked for: what the file does not have stays


# What a copy has


def test_old_weights_are_freed_when_the_last_call_has_ended(files):
    live = reloadable(Net())
    old = weakref.ref(live.module.mean)
    held = []
    live.module.pause = lambda: held.append(True) or live.reload(files[1], KEY)
    gc.disable()  # freed by themselves
    try:
        with torch.no_grad():
            assert set(live(torch.ones(1)).tolist()) == {0.0}
        assert old() is None
        assert held
    finally:
        gc.enable()


def test_a_gpu_is_waited_for_before_new_weights_are_used_and_before_old_ones_are_freed(files, monkeypatch):
    live, order = reloadable(Net()), []
    monkeypatch.setattr(generations, "_devices", lambda module: {module.layers[0].weight.item()})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append((device, values(live))))
    old = live.module
    live.reload(files[1], KEY)
    assert order == [(1.0, {0.0})]
    del old
    gc.collect()
    assert order == [(1.0, {0.0}), (0.0, {1.0})]


def test_a_file_with_two_tensors_for_a_tied_weight_leaves_the_old_weights(tmp_path):
    live = reloadable(Net(0))
    before, state = live.module, Net(1).state_dict()
    fastrack.save_file({**state, "tied.weight": state["tied.weight"] + 1}, tmp_path / "x", KEY)
    with pytest.raises(RuntimeError, match=r"tied\.weight: expected equal tensors"):
        live.reload(tmp_path / "x", KEY)
    assert live.module is before
    fastrack.save_file(state, tmp_path / "y", KEY)
    live.reload(tmp_path / "y", KEY)
    assert torch.equal(live.module.tied.weight, state["tied.weight"])


def test_tied_weights_buffers_modes_hooks_and_gradients_go_with_each_reload(files):
    seen = []
    first = Net(0)
    first.layers[1].weight.requires_grad_(requires_grad=False)
    first.layers[2].register_forward_hook(lambda *_: seen.append(1))
    live = reloadable(first)
    assert live.eval() is live
    live.to(torch.float64)
    live.reload(files[2], KEY)
    new = live.module
    assert new is not first
    assert new.tied.weight is new.layers[0].weight
    assert not any(part.training for part in live.modules())
    assert [parameter.requires_grad for parameter in new.parameters()].count(False) == 1
    assert {tensor.dtype for tensor in (*new.parameters(), *new.buffers())} == {torch.float64}
    assert torch.equal(new.table, first.table)
    assert new.table.data_ptr() != first.table.data_ptr()
    assert set(new(torch.ones(1, dtype=torch.float64)).tolist()) == {2.0}
    assert seen == [1]
    assert live.module.state_dict().keys() == Net().state_dict().keys()


def test_parameters_that_share_their_memory_share_it_after_a_reload(tmp_path):
    def make():
        module = torch.nn.ModuleDict(
            {"in": torch.nn.Linear(2, 2, bias=False), "out": torch.nn.Linear(2, 2, bias=False)}
        )
        module["out"].weight = torch.nn.Parameter(module["in"].weight.data)
        return module

    save_model(make(), tmp_path / "a", KEY)
    live = reloadable(make())
    live.reload(tmp_path / "a", KEY)
    assert live.module["in"].weight.data_ptr() == live.module["out"].weight.data_ptr()


@each("module", [torch.nn.LSTM(2, 3), torch.nn.MultiheadAttention(4, 2), torch.nn.BatchNorm1d(3)], ids=repr)
def test_modules_of_torch_are_reloaded(tmp_path, module):
    newer = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(1)
    save_model(newer, tmp_path / "a", KEY)
    live = reloadable(module)
    live.reload(tmp_path / "a", KEY)
    assert all(map(torch.equal, live.module.state_dict().values(), newer.state_dict().values()))


def test_a_module_on_the_meta_device_is_filled_on_the_device_of_the_first_reload(files):
    with torch.device("meta"):
        module = torch.nn.Linear(2, 3)
    save_model(torch.nn.Linear(2, 3), files[0], KEY)
    live = reloadable(module)
    live.reload(files[0], KEY, device="cpu")
    assert live.weight.device.type == "cpu"
    assert live(torch.ones(2)).shape == (3,)


def test_a_folder_is_reloaded_whole(tmp_path):
    (tmp_path / "plain").mkdir()
    import safetensors.torch

    safetensors.torch.save_file(torch.nn.Linear(2, 3).state_dict(), tmp_path / "plain" / "model.safetensors")
    fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", KEY)
    live = reloadable(torch.nn.Linear(2, 3))
    live.reload(fastrack.load_folder(tmp_path / "sealed", KEY), KEY)
    assert torch.equal(live.weight, safetensors.torch.load_file(tmp_path / "plain" / "model.safetensors")["weight"])


def test_a_reloadable_module_is_copied_and_pickled_with_its_module():
    live = reloadable(torch.nn.Linear(2, 3))
    for again in (copy.deepcopy(live), pickle.loads(pickle.dumps(live))):
        assert torch.equal(again.weight, live.weight)
        assert again.train().training
    with pytest.raises(AttributeError, match="no_such"):
        _ = live.no_such


def test_a_mode_that_was_there_is_set_again():
    live = reloadable(torch.nn.Dropout().eval())
    for each_live in (live, copy.deepcopy(live)):
        was = each_live.training
        each_live.eval()
        each_live.train(was)
        assert not each_live.module.training


def test_attributes_of_the_module_are_set_there(files):
    live = reloadable(Net())
    live.mean = torch.ones(100_000)
    live.scale = 2  # of its own, as the module has none
    live.pause = print
    assert values(live) == {0, 1}
    live.reload(files[1], KEY)
    assert (live.module.pause, live.scale, hasattr(live.module, "scale")) == (print, 2, False)
    outer = reloadable(torch.nn.Sequential(live))
    nested = reloadable(live)
    nested.module = outer
    assert nested.module is outer
    assert live.module is not outer


@each(
    ("change", "is_there"),
    [
        (lambda live: live.eval(), lambda net: not net.training),
        (lambda live: live.requires_grad_(False), lambda net: not net.layers[0].weight.requires_grad),
        (lambda live: live.load_state_dict(reloadable(Net(5)).state_dict()), lambda net: values(net) == {5.0}),
    ],
    ids=["mode", "gradients", "weights"],
)
def test_what_is_set_during_a_reload_is_not_lost(files, monkeypatch, change, is_there):
    live = reloadable(Net())
    load, threads = generations.load_model, []

    def load_and_set(*arguments, **options):
        threads.append(threading.Thread(target=change, args=[live]))
        threads[0].start()
        threads[0].join(0.05)
        assert threads[0].is_alive()  # it waits
        return load(*arguments, **options)

    monkeypatch.setattr(generations, "load_model", load_and_set)
    live.reload(files[1], KEY)
    threads[0].join(60)
    assert is_there(live.module)


def test_hooks_and_attributes_of_a_reloadable_module_go_with_its_copies(tmp_path):
    inner, seen = reloadable(torch.nn.Linear(1, 1)), []
    inner.register_forward_hook(lambda *_: seen.append(1))
    inner.label = "inner"
    outer = reloadable(torch.nn.Sequential(inner))
    save_model(outer.module, tmp_path / "a", KEY)
    outer.reload(tmp_path / "a", KEY)
    outer(torch.ones(1))
    copy.copy(inner)(torch.ones(1))
    assert outer.module[0] is not inner
    assert (outer.module[0].label, seen) == ("inner", [1, 1])


def test_attributes_of_parameters_go_with_each_reload(files):
    module = Net()
    module.layers[1].weight.tag = {"owner": module}
    live = reloadable(module)
    live.reload(files[1], KEY)
    assert live.layers[1].weight.tag["owner"] is live.module


def test_a_child_that_is_forked_during_a_reload_does_not_wait_for_it():
    live = reloadable(Net())
    with live._lock:
        assert in_forked_child(lambda: live.eval().training) is False


# What is refused, at once


def wrapped_forward():
    module = torch.nn.Linear(1, 1)
    forward = module.forward
    module.forward = lambda x: forward(x) + 1
    return module


def hooked():
    module = Net()
    module.layers[0].register_forward_hook(lambda *_: module.mean)
    return module


def parent_by_weak_reference():
    module = Net()
    module.layers[0].parent = weakref.ref(module)
    return module


def with_attribute(value):
    module = torch.nn.Linear(1, 1)
    module.attribute = value
    return module


def compiled_part():
    module = Net()
    module.layers[0]._compiled_call_impl = print  # as by `compile`, which imports the compiler
    return module


class Box:
    """An object that copy.deepcopy copies, though not where a function refers to it."""

    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def cached_method():
    module = Net()
    module.lookup = functools.lru_cache(maxsize=None)(module.twice)
    return module


def closure_on(box):
    return lambda x: x + box.held.mean[:1]


def closure_in_a_cache_in_an_object():
    module = Net()
    module.lookup = Box(functools.lru_cache(closure_on(Box(module))))
    return module


def hooked_by_an_object():
    module = Net()
    module.layers[0].register_forward_hook(closure_on(Box(module)))
    return module


REGISTRY = {}


def hook_with_a_global(*_):
    return [REGISTRY["net"].mean for _ in range(1)]  # in a function of its own, before Python 3.12


def hooked_by_a_global():
    REGISTRY["net"] = module = Net()
    module.layers[0].register_forward_hook(hook_with_a_global)
    return module


@pytest.fixture(autouse=True)
def _no_global():
    yield
    REGISTRY.clear()


@each(
    ("make", "match"),
    [
        (cached_method, "'lookup' refers to the origin"),
        (closure_in_a_cache_in_an_object, "'lookup' refers to the origin"),
        (hooked_by_an_object, "'_forward_hooks' refers to the origin"),
        (hooked_by_a_global, "'_forward_hooks' refers to the origin"),
        (wrapped_forward, "'forward' refers to the origin"),
        (hooked, "'_forward_hooks' refers to the origin"),
        (parent_by_weak_reference, "'parent' refers to the origin"),
        (lambda: with_attribute(threading.Lock()), "copy.deepcopy can copy, got Linear: TypeError"),
        (compiled_part, "Compile the result instead"),
        (lambda: torch.nn.Linear, "expected torch.nn.Module, got type"),
    ],
)
def test_a_module_whose_copies_would_not_be_apart_is_refused_at_once(make, match):
    with pytest.raises(TypeError, match=match):
        reloadable(make())


def scaled(scale):
    return lambda x: x * scale


def test_what_a_copy_has_of_its_own_is_no_reason_to_refuse_it(files):
    module = Net()
    module.bound = module.twice
    module.partial = functools.partial(torch.add, module.layers[1].weight)
    module.plain = types.SimpleNamespace(owner=module)
    module.closure = scaled(3)
    live = reloadable(module)
    live.reload(files[1], KEY)
    assert live.bound.__self__ is live.module
    assert live.partial(1).item() == 2.0
    assert live.plain.owner is live.module


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    module = transformers.LlamaForCausalLM(config)
    module(torch.ones(1, 3, dtype=torch.long))
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Transformer(8, 2, 1, 1, 8),
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        lambda: torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(2, 2)),
        pytest.param(llama, marks=pytest.mark.slow),  # it imports transformers
    ],
    ids=["transformer", "weight norm", "orthogonal", "llama"],
)
@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_modules_with_functions_of_libraries_are_reloaded(tmp_path, make):
    live = reloadable(make())
    save_model(live.module, tmp_path / "a", KEY)
    live.reload(tmp_path / "a", KEY)


def test_a_cache_that_knows_the_module_only_as_a_key_is_no_reason_to_refuse_it():
    module = Net()
    module.known = functools.cache(id)
    module.known(module)
    assert reloadable(module).module is module


def test_a_search_ends_where_a_function_leads_to_very_much(limited):
    limited(generations=10)
    seen = {}
    assert not generations._reaches(scaled([[] for _ in range(100)]), set(), seen)
    assert len(seen) == 10


def test_a_sharded_module_is_refused(monkeypatch):
    monkeypatch.setattr(generations, "is_sharded", lambda _: True)
    with pytest.raises(TypeError, match="got DTensors"):
        reloadable(torch.nn.Linear(1, 1))
