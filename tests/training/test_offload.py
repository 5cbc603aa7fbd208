"""`offload`: weights are open while they are used, one ahead, and nothing else is."""

import io
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.forking import in_forked_child
from helpers.tampering import tamper_file

import fastrack
from fastrack._models.offload import Weights
from fastrack.errors import AuthenticationError, DeviceError, FormatError, UnknownKeyError

pytest.importorskip("accelerate")

from accelerate.hooks import remove_hook_from_submodules

BATCH = torch.randn(4, 600, generator=torch.Generator().manual_seed(3))
MIB = 1 << 20


class Net(torch.nn.Module):
    """Layers of more than a MiB, the last one tied to the first, with a buffer that is saved and one that is not."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(600, 600)
        self.norm = torch.nn.BatchNorm1d(600)
        self.middle = torch.nn.Linear(600, 600)
        self.last = torch.nn.Linear(600, 600, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((600,), 2.0), persistent=False)
        self.eval()

    def forward(self, batch):
        return self.last(torch.relu(self.middle(self.norm(self.first(batch))))) * self.scale


@pytest.fixture
def path(tmp_path, key):
    fastrack.save_model(Net(), tmp_path / "net.safetensors", key)
    return tmp_path / "net.safetensors"


@pytest.fixture(params=["file", "folder", "vault", "vault in files"])
def offloaded(request, tmp_path, path, key):
    """An offloaded net, of which nothing is in memory before."""
    if request.param.startswith("vault"):
        return fastrack.offload(Net(), fastrack.Vault(tmp_path if "files" in request.param else None))
    net = Net(seed=7)
    if request.param == "folder":
        (tmp_path / "plain").mkdir()
        fastrack.unseal_file(path, tmp_path / "plain/model.safetensors", key)
        fastrack.seal_folder(tmp_path / "plain", tmp_path / "sealed", key)
        path = tmp_path / "sealed"
    return fastrack.offload(net, path, key)


def test_weights_have_their_strides_from_a_vault_and_are_contiguous_from_a_file(tmp_path, key):
    def convolution():
        return torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    class Whole(torch.nn.Module):  # the hooks open the weights for it
        def __init__(self):
            super().__init__()
            self.convolution = convolution()

        def forward(self):
            return self.convolution.weight.stride()

    fastrack.save_model(Whole(), tmp_path / "net.safetensors", key)
    strides = [
        fastrack.offload(Whole(), source, key, preload_module_classes=["Whole"])()
        for source in (fastrack.Vault(), tmp_path / "net.safetensors")
    ]
    assert strides == [convolution().weight.stride(), torch.empty(8, 3, 3, 3).stride()]


def test_results_are_those_of_the_whole_module(offloaded):
    expected = Net()(BATCH)
    for _ in range(3):
        assert torch.equal(offloaded(BATCH), expected)
        assert all(parameter.is_meta for parameter in offloaded.parameters())


def test_two_weights_are_in_memory_and_each_is_made_once(path, key, monkeypatch):
    held = []
    original = Weights.__init__

    def init(self, openers):
        held.append(next(iter(openers.values())).args[0])  # the slots
        original(self, openers)

    monkeypatch.setattr(Weights, "__init__", init)
    net = fastrack.offload(Net(), path, key)
    with torch.inference_mode():
        for _ in range(3):
            net(BATCH)
    [slots] = held
    assert slots.nbytes <= 2 * (600 * 600 * 4 + MIB // 8)


def test_a_module_on_the_meta_device_needs_nothing_in_memory(path, key):
    with torch.device("meta"):
        net = Net()
    net.scale = torch.full((600,), 2.0)
    fastrack.offload(net, path, key, device="cpu")
    assert not net.norm.running_mean.is_meta
    net.eval()
    assert torch.equal(net(BATCH), Net()(BATCH))


def test_an_altered_weight_is_refused_when_its_module_is_called(path, key):
    net = fastrack.offload(Net(), path, key)
    net(BATCH)
    tamper_file(path, "middle.weight", 40_000)
    for _ in range(2):
        with pytest.raises(AuthenticationError, match=r"middle\.weight.*chunk 2"):
            net(BATCH)
    tamper_file(path, "middle.weight", 40_000)
    assert torch.equal(net(BATCH), Net()(BATCH))


def test_what_does_not_fit_is_told_before_the_module_changes(path, key, tmp_path):
    net = torch.nn.Sequential(Net())
    with pytest.raises(RuntimeError, match="Missing key"):
        fastrack.offload(net, path, key)
    with pytest.raises(UnknownKeyError):
        fastrack.offload(Net(), path, fastrack.Key.generate())
    other = Net()
    other.middle = torch.nn.Linear(600, 8)
    with pytest.raises(RuntimeError, match="size mismatch"):
        fastrack.offload(other, path, key)
    fastrack.save_file({}, tmp_path / "empty.safetensors", key)
    with pytest.raises(FormatError):
        fastrack.offload(Net(), tmp_path / "empty.safetensors", key)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        fastrack.offload({}, path, key)
    assert not any(parameter.is_meta for parameter in [*net.parameters(), *other.parameters()])


class Reading(torch.nn.Module):
    """A module that uses the weight of another one, without calling that."""

    def __init__(self, use):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64, bias=False)
        self.use = use

    def forward(self, batch):
        return self.use(batch, self.inner.weight)


linear = torch.nn.functional.linear
USES = {
    "itself": linear,
    "transposed": lambda batch, weight: batch @ weight.T,
    "a part": lambda batch, weight: linear(batch, weight[:4]),
    "data": lambda batch, weight: linear(batch, weight.data),
    "computed": lambda batch, weight: linear(batch, weight.double().float() * 2),
    "joined": lambda batch, weight: linear(batch, torch.cat([weight, weight])),
    "in a list": lambda batch, weight: torch.cat([batch, weight]),
}


@pytest.mark.parametrize("use", USES)
def test_a_weight_that_is_not_open_is_not_computed_with(use):
    """torch 2.13 would return memory that nobody has written to."""
    net = fastrack.offload(Reading(USES[use]), fastrack.Vault())
    with torch.inference_mode(), pytest.raises(RuntimeError, match="preload_module_classes"):
        net(torch.ones(2, 64))
    net = Reading(USES[use])
    expected = net(torch.ones(2, 64))
    fastrack.offload(net, fastrack.Vault(), preload_module_classes=["Reading"])
    with torch.inference_mode():
        assert torch.equal(net(torch.ones(2, 64)), expected)


def test_a_file_with_two_tensors_for_a_tied_weight_is_refused(tmp_path, key):
    state, module = Net().state_dict(), Net(seed=7)
    fastrack.save_file({**state, "last.weight": state["last.weight"] + 1}, tmp_path / "x", key)
    with pytest.raises(RuntimeError, match=r"first\.weight, last\.weight: expected equal tensors"):
        fastrack.offload(module, tmp_path / "x", key)
    assert torch.equal(module.first.weight, Net(seed=7).first.weight)


def test_attention_without_preloading_is_refused():
    net = torch.nn.MultiheadAttention(64, 4, bias=False, batch_first=True)
    fastrack.offload(net, fastrack.Vault())
    with pytest.raises(RuntimeError, match="preload_module_classes"):
        net(*[torch.ones(2, 5, 64)] * 3)


def test_modules_that_keep_weights_elsewhere_or_have_hooks_are_refused(path, key):
    with pytest.raises(TypeError, match="LSTM"):
        fastrack.offload(torch.nn.Sequential(torch.nn.LSTM(4, 4)), fastrack.Vault())
    net = fastrack.offload(Net(), path, key)
    with pytest.raises(TypeError, match="remove_hook_from_submodules"):
        fastrack.offload(net, path, key)
    remove_hook_from_submodules(net)
    net.last.weight = net.first.weight
    fastrack.load_model(net, path, key)
    assert torch.equal(net(BATCH), Net()(BATCH))
    assert torch.equal(fastrack.offload(net, path, key)(BATCH), Net()(BATCH))
    with pytest.raises(TypeError, match="saving an offloaded weight failed"):
        torch.save(net.state_dict(), io.BytesIO())
    with torch.device("meta"):
        net = torch.nn.Linear(600, 600)
    fastrack.save_model(torch.nn.Linear(600, 600), path, key)
    for _ in range(2):
        fastrack.offload(net, path, key)
        expected = net(BATCH)
        remove_hook_from_submodules(net)
    fastrack.load_model(net, path, key, device="cpu")
    assert torch.equal(net(BATCH), expected)
    assert torch.equal(pickle.loads(pickle.dumps(net))(BATCH), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_call_that_is_interrupted_keeps_no_other_thread_waiting(path, key, error):
    net = fastrack.offload(Net(), path, key)

    def interrupt(*_):
        raise error

    handle = net.middle.register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        net(BATCH)
    handle.remove()
    with ThreadPoolExecutor(1) as threads:
        assert torch.equal(threads.submit(net, BATCH).result(20), Net()(BATCH))


def test_threads_wait_for_each_other(path, key):
    net, expected = fastrack.offload(Net(), path, key), Net()(BATCH)
    with ThreadPoolExecutor(3) as threads, torch.no_grad():
        assert all(threads.map(lambda _: torch.equal(net(BATCH), expected), range(30)))
        assert all(threads.map(lambda _: torch.equal(net.forward(BATCH), expected), range(30)))
    tamper_file(path, "middle.weight", 40_000)
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            net(BATCH)
    with ThreadPoolExecutor(1) as threads, pytest.raises(AuthenticationError):
        threads.submit(net, BATCH).result(20)


def test_parameters_may_share_memory_and_get_the_dtype_of_the_file(tmp_path, key):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)).half()
    net[1].weight = torch.nn.Parameter(net[0].weight.data)
    expected = net(torch.ones(2, 8).half())
    fastrack.save_model(net, tmp_path / "half.safetensors", key)
    assert torch.equal(fastrack.offload(net, tmp_path / "half.safetensors", key)(torch.ones(2, 8).half()), expected)
    with torch.device("meta"):
        made = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
        made[1].weight = made[0].weight
    fastrack.offload(made, tmp_path / "half.safetensors", key)
    assert torch.equal(made(torch.ones(2, 8).half()), expected)


class Hiding(torch.nn.Linear):
    def state_dict(self, *args, **options):
        found = super().state_dict(*args, **options)
        return {name: tensor for name, tensor in found.items() if name != "bias"}


def test_what_cannot_be_opened_is_told_before_the_module_changes(tmp_path, key):
    net = Hiding(8, 8)
    fastrack.save_file({"weight": net.weight.detach()}, tmp_path / "part.safetensors", key)
    with pytest.raises(RuntimeError, match="'bias'"):
        fastrack.offload(net, tmp_path / "part.safetensors", key)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError):
            fastrack.offload(net, fastrack.Vault(), device="cuda:0")
    assert not net.weight.is_meta


AT_THE_END = """
import threading, time, torch, fastrack
vault = fastrack.Vault()
net = fastrack.offload(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), vault)
tickets = [vault.put("x", torch.full((2,), number)) for number in range(3)]
ahead = vault.prefetch(tickets)
def late():
    threading.main_thread().join()
    print(tuple(net(torch.ones(1, 4)).shape), ahead.take(tickets[2]).tolist())
threading.Thread(target=late).start()
"""


@pytest.mark.nightly
def test_it_works_when_the_interpreter_ends():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("(1, 4) [2, 2]\n", 0), done.stderr


def test_a_module_that_reads_its_submodules_is_opened_whole():
    torch.manual_seed(0)
    net = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    batch = torch.randn(2, 5, 64)
    expected = net(batch, batch, batch)[0]
    fastrack.offload(net, fastrack.Vault(), preload_module_classes=["MultiheadAttention"])
    assert torch.equal(net(batch, batch, batch)[0], expected)


def test_removing_the_hooks_gives_the_weights_back():
    net = fastrack.offload(Net(), fastrack.Vault())
    remove_hook_from_submodules(net)
    assert torch.equal(net.middle.weight, Net().middle.weight)
    assert torch.equal(net(BATCH), Net()(BATCH))


@pytest.fixture
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures(
    "_one_thread"
)  # a forked child has no others of OpenMP, and more of them add up in another order
def test_a_forked_child_opens_by_itself(path, key):
    net = fastrack.offload(Net(), path, key)
    expected = net(BATCH)
    assert in_forked_child(lambda: torch.equal(net(BATCH), expected))


# The order in which weights are asked for.


class Opened:
    """Openers that note what they opened, and in which thread."""

    def __init__(self, names):
        self.log = []
        self.weights = Weights({name: lambda name=name: self.open(name) for name in names})

    def open(self, name):
        self.log.append((name, threading.current_thread() is threading.main_thread()))
        if name == "broken":
            raise AuthenticationError("broken")
        return name


def test_the_next_one_opens_ahead_in_the_order_of_the_last_pass():
    opened = Opened("abcd")
    for _ in range(3):
        assert [opened.weights[name] for name in "acbd"] == list("acbd")
    log = [name for name, _ in opened.log]
    assert log[-3:] == ["c", "b", "d"]
    assert log.count("a") == 3
    assert [in_main for _, in_main in opened.log[-4:]] == [True, False, False, False]
    assert len(opened.weights) == 4
    assert "e" not in opened.weights
    assert opened.weights != {}


def test_a_failure_ahead_is_that_of_its_weight():
    opened = Opened(["a", "broken", "c"])
    assert opened.weights["a"] == "a"
    assert opened.weights["c"] == "c"
    assert opened.weights["a"] == "a"
    with pytest.raises(AuthenticationError):
        opened.weights["broken"]
    assert opened.weights["c"] == "c"
