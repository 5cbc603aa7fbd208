"""Checkpoints: the same to the last bit, secret and authentic, whole or not at all, and nothing in them is run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from helpers import by_hand, file_systems
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.sealed_files import write_file
from helpers.tampering import rewrite_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key, load_checkpoint, load_file, save_checkpoint, save_file, to_device
from fastrack._training.checkpoints.state import decode_state, encode_state
from fastrack.errors import AuthenticationError, DeviceError, FastrackError, FormatError, UnknownKeyError

SECRET = bytes(range(9, 41))
KEY = Key.from_bytes(SECRET)
ROOT = Path(fastrack.__file__).parents[1]
QUIET_NAN = float("nan")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.safetensors"


def through(state, path):
    save_checkpoint(path, state, key=KEY)
    return load_checkpoint(path, keys=KEY)


def exact(value):
    """Something that is equal for two values that are the same in type and in every bit."""
    kind = type(value)
    if kind in {dict, OrderedDict}:
        return kind, [(exact(key), exact(item)) for key, item in value.items()]
    if kind in {list, tuple}:
        return kind, [exact(item) for item in value]
    if kind is float:
        return kind, np.float64(value).tobytes()
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return "torch", value.dtype, tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return np.ndarray if kind is np.memmap else kind, value.dtype, value.shape, value.tobytes()
    return kind, value


# What was saved is loaded


INTEGERS = [0, -1, 2**53, 2**53 + 1, -(2**200), 10**6000]
FLOATS = [0.1, -0.0, math.inf, -math.inf, QUIET_NAN, 5e-324]
TEXTS = ["", 'text, \U0001f600 \x00 " \\', b"", bytes(range(256))]
NESTS = [[], (), {}, [1, [2, (3, [])]], (1, (2,)), {"a": 1, 1: "a", "1": 2, -(2**70): 3, "": {}}]
SCALARS = [np.float32(1.5), np.float64(-0.0), np.bool_(True), np.int64(-3), ml_dtypes.bfloat16(2.5)]
ARRAYS = [
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.array(7),
    np.empty((0, 4)),
    np.arange(12).reshape(3, 4).T[::2],
    np.arange(3).astype(ml_dtypes.bfloat16),
    torch.arange(6).reshape(2, 3),
    torch.tensor(2.5),
    torch.empty(0, 3),
    torch.randn(5, 6, dtype=torch.bfloat16).T,
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([True, False]),
    torch.arange(4.0, requires_grad=True),
]
GENERATORS = [
    torch.get_rng_state(),
    random.getstate(),
    np.random.get_state(),  # noqa: NPY002 - what people keep
    np.random.default_rng(0).bit_generator.state,
]
VALUES = [None, True, False, *INTEGERS, *FLOATS, *TEXTS, *NESTS, OrderedDict([("b", 1), ("a", 2)])]
VALUES += [*SCALARS, *ARRAYS, *GENERATORS]


@each("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_every_kind_of_value_comes_back_to_the_last_bit(path, value):
    back = through(value, path)
    assert exact(back) == exact(value)
    assert exact(through([{"x": (value, value)}], path)) == exact([{"x": (value, value)}])


def test_what_came_from_torch_goes_to_torch_and_the_rest_to_numpy(path):
    back = through({"t": torch.ones(2), "n": np.ones(2), "s": np.float64(1), "f": 1.0}, path)
    assert [type(value) for value in back.values()] == [torch.Tensor, np.ndarray, np.float64, float]
    back["t"] += 1  # may be written to
    back["n"] += 1


def test_a_mapped_array_becomes_an_array(path, tmp_path):
    mapped = np.memmap(tmp_path / "raw", np.float32, "w+", shape=(3, 4))
    assert type(through(mapped, path)) is np.ndarray


def test_arrays_that_share_their_memory_are_stored_once_and_are_one_again(path):
    weight, table = torch.randn(40, 50), np.ones((4, 5))
    back = through({"a": weight, "b": [weight, weight.detach()], "c": weight.T, "n": table, "m": table[:]}, path)
    assert back["a"] is back["b"][0] is back["b"][1]
    assert back["n"] is back["m"]
    assert back["c"].data_ptr() != back["a"].data_ptr()
    assert torch.equal(back["c"], weight.T)
    with load_file(path) as file:
        assert sorted(file) == ["0", "1", "2", "skeleton"]


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")) | st.binary()
keys = st.text(st.characters(codec="utf-8"), max_size=5) | st.integers()
nests = st.recursive(
    plain, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=20
)


@pytest.mark.slow
@given(nests)
@settings(deadline=None)
def test_every_nest_of_plain_values_comes_back(state):
    text, arrays = encode_state(state)
    assert not arrays
    assert exact(decode_state(text, None)) == exact(state)


def test_the_skeleton_is_what_the_format_says(path):
    state = {"w": torch.ones(3), 2: (1.5, [b"\x0f", -(2**60)]), "s": np.float32(1), "n": None, "é": True}
    save_checkpoint(path, state, key=KEY)
    with load_file(path) as file:
        text = file["skeleton"].to(keys=KEY, framework="numpy").tobytes()
        assert {name: (sealed.dtype, sealed.shape) for name, sealed in file.items()} == {
            "skeleton": ("U8", (len(text),)),
            "0": ("F32", (3,)),
            "1": ("F32", ()),
        }
    assert text == (
        rb'{"checkpoint":1,"state":["dict",[["w",["torch",0]],'
        rb'[2,["tuple",[["float","3ff8000000000000"],["list",[["bytes","0f"],["int","-1000000000000000"]]]]]],'
        rb'["s",["scalar",1]],["n",null],["\u00e9",true]]]}'
    )


def test_neither_names_nor_values_can_be_read_without_the_key(path):
    save_checkpoint(path, {"patients of dr house": "a secret sentence", "rate": 0.125}, key=KEY)
    content = path.read_bytes()
    assert b"patients" not in content
    assert b"sentence" not in content
    with pytest.raises(UnknownKeyError):
        load_checkpoint(path, keys=Key.generate())


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import fastrack, numpy as np
key = fastrack.Key.from_bytes(bytes(range(32)))
fastrack.save_checkpoint(sys.argv[1], {"a": np.arange(3), "b": [np.float32(2)]}, key=key)
state = fastrack.load_checkpoint(sys.argv[1], keys=key)
assert state["a"].tolist() == [0, 1, 2] and type(state["b"][0]) is np.float32
"""


@pytest.mark.slow
def test_a_checkpoint_without_tensors_of_torch_needs_no_torch(path):
    run(WITHOUT_TORCH, path)


def test_a_device_that_does_not_exist_is_named_before_anything_is_opened(path):
    save_checkpoint(path, {"a": 1}, key=KEY)
    with pytest.raises(DeviceError, match="tpu"):
        load_checkpoint(path, keys=KEY, device="tpu")


# What cannot be kept


class Text(str):
    __slots__ = ()


@each(
    ("state", "match"),
    [
        ({5: len}, r"state\[5\]: .* got builtin_function_or_method"),
        (Text("a"), r"state: .* got Text"),
        (["\ud800"], r"state\[0\]: .*Unicode"),
        ({"\ud800": 1}, r"state\['\\ud800'\]: .*Unicode"),
        ({"a": np.array(["text"])}, r"state\['a'\]: .* <U4"),
        ({"a": np.array([None])}, r"state\['a'\]: .* object"),
        ([np.str_("a")], r"state\[0\]: .* <U1"),
        ([np.datetime64("2026-01-01")], r"state\[0\]: .* datetime64"),
        ([torch.zeros(1, dtype=torch.complex128)], r"state\[0\]: .*torch\.complex128"),
        ([np.ma.masked_array([1], [True])], r"state\[0\]: .* got MaskedArray"),
        ([torch.eye(2).to_sparse()], r"state\[0\]: .*torch\.sparse_coo"),
        ([torch.ones(2, device="meta")], r"state\[0\]: .* meta"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_named_with_its_place(path, state, match):
    with pytest.raises(TypeError, match=match):
        save_checkpoint(path, state, key=KEY)
    assert not path.exists()


def test_a_nest_that_holds_itself_is_refused(path):
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(ValueError, match="64 levels"):
        save_checkpoint(path, state, key=KEY)


def test_the_deepest_nest_comes_back(path):
    state = 1
    for _ in range(64):
        state = {"a": state}
    assert through(state, path) == state
    with pytest.raises(ValueError, match="64 levels"):
        save_checkpoint(path, [state], key=KEY)


# What was altered, and what is no checkpoint


def put(path, text, tensors=None, plain=()):
    """A checkpoint by someone who has the key and writes what they like."""
    named = {"skeleton": np.frombuffer(text, np.uint8), **(tensors or {})}
    write_file(named, path, KEY, plain=plain, kind="checkpoint")


def of(state):
    return json.dumps({"checkpoint": 1, "state": state}).encode()


NO_CHECKPOINTS = [b"", b"\xff", b"1", b"[]", b"{}"]
NO_CHECKPOINTS += [
    b'{"checkpoint":1%b}' % rest for rest in (b"", b',"state":1,"more":1', b',"state":NaN', b',"state":1e5')
]
NO_CHECKPOINTS += [b'{"checkpoint":%b,"state":1}' % version for version in (b"2", b"true", b"1.0")]
NO_CHECKPOINTS += [b'{"checkpoint":1,"state":%b}' % state for state in (b"9" * 5000, b"[" * 100_000 + b"]" * 100_000)]
NO_STATES = [{}, [], 1, ["list"], ["list", [], []], ["list", {}], ["list", "ab"], ["eval", "exit()"], [["list"], []]]
NO_STATES += [["dict", items] for items in ({}, [["a"]], ["ab"], [["a", 1], ["a", 2]], [[["list", []], 1]])]
NO_STATES += [["state_dict", []], ["state_dict", [["a"]], None], ["state_dict", [], ["dict"]], ["state_dict", {}, 1]]
NO_STATES += [["dict", [[["dict", []], 1]]], ["float", "00"], ["float", 1], ["bytes", "0"], ["bytes", None]]
NO_STATES += [["int", digits] for digits in (5, "", "-", "1_0", " 1", "0x1")]
NO_STATES += [["torch", -1], ["torch", True], ["torch", "0"], ["scalar", 0], ["list", [["torch", 0], ["numpy", 0]]]]


@each("text", [*NO_CHECKPOINTS, *map(of, NO_STATES)], ids=lambda text: text[:40].decode(errors="replace"))
def test_garbage_of_someone_who_has_the_key_is_refused(path, text):
    put(path, text, {"0": np.ones(2)})
    with pytest.raises(FormatError):
        load_checkpoint(path, keys=KEY)


def test_a_nest_that_is_too_deep_is_refused(path):
    state = 1
    for _ in range(65):
        state = ["list", [state]]
    put(path, of(state))
    with pytest.raises(FormatError, match="64 levels"):
        load_checkpoint(path, keys=KEY)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.sampled_from(["list", "tuple", "dict", "int", "float", "bytes", "torch", "numpy", "scalar", "0", ""])
    | st.sampled_from(
        ["set", "frozenset", "size", "constant", "device", "complex", "counter", "namedtuple", "parameter"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


def zero(_, framework):
    return torch.zeros(()) if framework == "torch" else np.zeros(())


@given(json_values)
@settings(deadline=None)
def test_whatever_the_skeleton_says_only_a_format_error_comes_of_it(state):
    with contextlib.suppress(FormatError):
        decode_state(of(state), zero)


@pytest.mark.parametrize(
    "tensors", [{"a": np.ones(3)}, {"skeleton": np.ones(3)}, {"skeleton": np.ones((2, 2), np.uint8)}], ids=str
)
def test_another_sealed_file_is_no_checkpoint(path, tensors):
    save_file(tensors, path, KEY)
    with pytest.raises(FormatError, match="another sealed"):
        load_checkpoint(path, keys=KEY)


def test_a_file_that_was_sealed_under_the_names_of_a_checkpoint_is_none(path):
    upload = {"skeleton": np.frombuffer(of(["list", []]), np.uint8)}
    save_file(upload, path, KEY)
    with pytest.raises(FormatError, match="a checkpoint"):
        load_checkpoint(path, keys=KEY)
    relabel(path, "checkpoint")  # which needs no key
    with pytest.raises(AuthenticationError) as caught:
        load_checkpoint(path, keys=KEY)
    assert (caught.value.tensor, caught.value.chunk) == ("skeleton", None)


def test_a_checkpoint_is_no_other_sealed_file(path):
    save_checkpoint(path, {"w": np.ones((4, 4), np.float32)}, key=KEY)
    for load in (
        lambda: fastrack.SealedDataset(path, ["0"], keys=KEY),
        lambda: fastrack.load_model(torch.nn.Linear(4, 4, bias=False), path, keys=KEY),
        lambda: fastrack.load_tensors(path, keys=KEY),
        lambda: fastrack.safe_open(path, keys=KEY),
    ):
        with pytest.raises(FormatError, match=r"run\.safetensors.*load_checkpoint"):
            load()
    fastrack.verify_file(path, KEY)
    relabel(path, None)
    with fastrack.load_file(path) as file, pytest.raises(AuthenticationError):
        fastrack.unseal(file["0"], KEY)


def test_an_unknown_kind_is_refused(path):
    save_file({"a": np.ones(3)}, path, KEY)
    relabel(path, "tensor")  # has one spelling: no entry
    with pytest.raises(FormatError, match="'tensor'"):
        fastrack.load_file(path)


def relabel(path, kind):
    def change(metadata, _):
        metadata.pop("fastrack.kind", None)
        metadata.update({"fastrack.kind": kind} if kind else {})

    rewrite_file(path, change)


@each(
    "text",
    [
        *(of([kind, "4711 is secret"]) for kind in ("later", "float", "int", "bytes", "torch", "list")),
        of({"4711 is secret": 1}),
        of(["dict", [["4711 is secret", 1], ["4711 is secret", 1]]]),
        b'{"checkpoint":"4711 is secret","state":1}',
        b'{"checkpoint":1,"state":4711.5}',
        b'{"checkpoint":1,"state":"4711 is secret',
        b'{"checkpoint":1,"4711 is secret":2}',
    ],
)
def test_no_error_of_a_skeleton_shows_what_it_holds(path, text):
    put(path, text)
    with pytest.raises(FormatError) as caught:
        load_checkpoint(path, keys=KEY)
    assert "4711" not in "".join(traceback.format_exception(caught.value))


def test_nothing_that_nobody_vouches_for_is_taken(path):
    put(path, of(1), plain=["skeleton"])
    with pytest.raises(FormatError, match="a checkpoint"):
        load_checkpoint(path, keys=KEY)
    put(path, of(["torch", 0]), {"0": np.ones(3)}, plain=["0"])
    with pytest.raises(AuthenticationError, match="message 0"):
        load_checkpoint(path, keys=KEY)
    put(path, of(["torch", 1]), {"0": np.ones(3)})
    with pytest.raises(AuthenticationError, match="message 1"):
        load_checkpoint(path, keys=KEY)
    put(path, of(["torch", 0]), {"0": np.ones(3), "more": np.ones(3)}, plain=["more"])
    with pytest.raises(FormatError, match="its skeleton"):
        load_checkpoint(path, keys=KEY)


@pytest.mark.slow
def test_a_flipped_bit_is_found_wherever_it_is(path, tmp_path):
    state = {"a": torch.arange(5000.0), "b": [1, 2.5, "text"], "c": np.arange(7)}
    save_checkpoint(path, state, key=KEY)
    content = path.read_bytes()
    altered = tmp_path / "altered"
    step = len(content) // 300
    for place in [*range(0, 2000, 7), *range(2000, len(content), step), len(content) - 1]:
        wrong = bytearray(content)
        wrong[place] ^= 1
        altered.write_bytes(wrong)
        try:
            back = load_checkpoint(altered, keys=KEY)
        except FastrackError:
            continue
        assert exact(back) == exact(state), place  # of the header, only what means nothing may change


@given(st.data())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_checkpoint_that_was_cut_short_is_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "cut"
    save_checkpoint(path, {"a": torch.arange(50.0)}, key=KEY)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises((FastrackError, ValueError)):
        load_checkpoint(path, keys=KEY)


def test_arrays_of_another_checkpoint_cannot_be_put_in(path, tmp_path):
    for name, value in (("one", 1.0), ("two", 2.0)):
        save_checkpoint(tmp_path / name, {"w": torch.full((100,), value)}, key=KEY)
    other = safetensors.numpy.load(by_hand.drop_guard((tmp_path / "two").read_bytes()))["0"]
    rewrite_file(tmp_path / "one", lambda _, tensors: tensors.update({"0": other}), path)
    with pytest.raises(AuthenticationError) as caught:
        load_checkpoint(path, keys=KEY)
    assert caught.value.tensor == "0"


# Whole or not at all


@each("part", [0, 0.1, 0.5, 0.9, 0.999])
def test_a_full_disk_leaves_the_checkpoint_that_was_there(path, part):
    state = {"epoch": 2, "w": torch.ones(1000)}
    save_checkpoint(path, state, key=KEY)
    room = int(part * path.stat().st_size)
    save_checkpoint(path, {"epoch": 1}, key=KEY)
    with pytest.raises(OSError, match="free some"), file_systems.full(room):
        save_checkpoint(path, state, key=KEY)
    assert load_checkpoint(path, keys=KEY) == {"epoch": 1}
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def run(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(__file__).parent]))}
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], env=environment, check=True, timeout=120)


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_that_was_there(path):
    save_checkpoint(path, {"epoch": 1}, key=KEY)

    def save():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # so that the kernel kills it when its file is half written
        with file_systems.full(200_000):
            # An array of NumPy: in a forked child torch waits for threads that stayed with its parent.
            save_checkpoint(path, {"epoch": 2, "w": np.ones(50_000)}, key=KEY)

    with pytest.raises(AssertionError, match=f"status {signal.SIGXFSZ:d}"):
        in_forked_child(save)
    assert load_checkpoint(path, keys=KEY) == {"epoch": 1}
    save_checkpoint(path, {"epoch": 3}, key=KEY)
    assert load_checkpoint(path, keys=KEY) == {"epoch": 3}


# Training


class Training:
    """Adam, dropout and a shuffling loader: all of what must be kept for the next step to be the same."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - as training code does
        self.model = torch.nn.Sequential(
            torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Dropout(0.4),
            torch.nn.Linear(40, 1),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.generator = torch.Generator().manual_seed(seed)
        data = torch.randn(60, 12, generator=torch.Generator().manual_seed(0))
        pairs = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
        self.loader = torch.utils.data.DataLoader(pairs, 16, shuffle=True, generator=self.generator)
        self.losses = []

    def epochs(self, count):
        for _ in range(count):
            for data, target in self.loader:
                noise = random.random() + np.random.rand()  # noqa: NPY002 - as training code does
                loss = torch.nn.functional.mse_loss(self.model(data) * noise, target)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
            self.schedule.step()

    def save(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "torch": torch.get_rng_state(),
            "loader": self.generator.get_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - as training code does
            "losses": self.losses,
        }
        save_checkpoint(path, state, key=KEY)

    def load(self, path):
        state = load_checkpoint(path, keys=KEY)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["torch"])
        self.generator.set_state(state["loader"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002 - as training code does
        self.losses = state["losses"]

    def outcome(self):
        return exact([self.losses, self.model.state_dict(), self.optimizer.state_dict()])


@pytest.fixture
def _own_threads_and_seeds():
    threads, states = torch.get_num_threads(), (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002


@pytest.mark.usefixtures("_own_threads_and_seeds")
def test_training_that_was_resumed_is_the_same_as_training_that_was_not(path):
    whole = Training(1)
    whole.epochs(5)
    first = Training(1)
    first.epochs(2)
    first.save(path)
    resumed = Training(2)
    resumed.load(path)
    resumed.epochs(3)
    assert resumed.outcome() == whole.outcome()
    assert len(set(whole.losses)) == 20


RESUME = """
import sys, torch
from test_checkpoint import Training
torch.set_num_threads(1)
training = Training(7)
training.load(sys.argv[1])
training.epochs(3)
training.save(sys.argv[2])
"""


@pytest.mark.nightly
@pytest.mark.usefixtures("_own_threads_and_seeds")
def test_training_may_be_resumed_in_another_process(path, tmp_path):
    whole = Training(1)
    whole.epochs(2)
    whole.save(path)
    whole.epochs(3)
    run(RESUME, path, tmp_path / "end")
    resumed = Training(3)
    resumed.load(tmp_path / "end")
    assert resumed.outcome() == whole.outcome()


def test_a_checkpoint_of_many_small_arrays_is_loaded_in_little_time(path):
    state = [torch.full((3,), float(number)) for number in range(500)]
    save_checkpoint(path, state, key=KEY)
    to_device(torch.ones(1))
    start = time.perf_counter()
    back = load_checkpoint(path, keys=KEY)
    assert time.perf_counter() - start < 5
    assert exact(back) == exact(state)


def test_the_state_dict_of_a_module_keeps_its_metadata(key, tmp_path):
    class Old(torch.nn.Module):
        _version = 7

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
            self.found = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)

    module = torch.nn.Sequential(Old(), torch.nn.BatchNorm1d(3))
    save_checkpoint(tmp_path / "run.safetensors", {"model": module.state_dict(), "step": 1}, key=key)
    found = load_checkpoint(tmp_path / "run.safetensors", keys=key)["model"]
    assert found._metadata == module.state_dict()._metadata
    assert list(found) == list(module.state_dict())
    module.load_state_dict(found)
    assert module[0].found == 7
