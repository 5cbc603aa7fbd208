"""States hold what torch takes from a file without running its code, and a test notices what torch adds to it."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import enum
import io
import json
import math
import pickle
import re
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._weights_only_unpickler import _get_allowed_globals

import fastrack
from fastrack import Key, load_checkpoint, save_checkpoint
from fastrack._training.checkpoints.state import decode_state, encode_state
from fastrack.errors import FormatError

KEY = Key.from_bytes(bytes(range(32)))


class Pair(NamedTuple):
    a: object
    b: object


class Colour(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


def through(state):
    """The state after it was encoded, and decoded with its own arrays."""
    text, arrays = encode_state(state)
    return decode_state(text, lambda number, _: arrays[number])


def exact(value):
    """Something that is equal for two values of one type and content."""
    kind = type(value)
    if isinstance(value, dict):
        more = getattr(value, "default_factory", None), exact(getattr(value, "_metadata", None))
        return kind, more, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(exact(item)) for item in value)
    if isinstance(value, argparse.Namespace):
        value = list(vars(value).items())
    if isinstance(value, (list, tuple)):
        return kind.__qualname__, [exact(item) for item in value]
    if isinstance(value, torch.Tensor):
        return kind, value.requires_grad, value.dtype, value.tolist()
    if kind in {float, complex}:
        return kind, np.array(value).tobytes()
    return kind, value


CONSTANTS = [
    torch.float8_e4m3fn,
    torch.qint8,
    torch.uint16,
    torch.sparse_coo,
    torch.channels_last,
    torch.per_tensor_affine,
]
VALUES = [
    *CONSTANTS,
    torch.Size([]),
    torch.Size([2, 3]),
    torch.Size([-1, 2**63 - 1, -(2**63)]),
    torch.device("cuda:1"),
    torch.device("meta"),
    complex(-0.0, math.inf),
    bytearray(b"\0\1"),
    {1, "a", (2, torch.float16), frozenset({None}), b"", 1.5, 2j},
    frozenset(),
    Counter({"a": 2, "b": 0.5}),
    OrderedDict([("b", 1), ("a", [])]),
    defaultdict(list, {"a": [1]}),
    defaultdict(OrderedDict),
    defaultdict(None, {1: 2}),
    *map(defaultdict, (complex, bytes, bytearray, frozenset, set, tuple)),
    {(1, "a"): 1, None: 2, True: 3, 2.5: 4, torch.Size([1]): 5, Pair(1, 2): 6, Path("a"): 7, torch.int8: 8},
    argparse.Namespace(lr=0.1, name="x", deep=argparse.Namespace(n=[1])),
    argparse.Namespace(**{"a b": 1}),
    Path("some") / "place",
    torch.nn.Parameter(torch.ones(2)),
    torch.nn.Parameter(torch.ones(2), requires_grad=False),
    torch.nn.Parameter(torch.arange(2), requires_grad=False),
    torch.ones(2, requires_grad=True),
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)], 0.1), [3, 3, 5]).state_dict(),
    torch.nn.BatchNorm1d(2).state_dict(),
]


@each("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_that_torch_has_in_states_comes_back_with_its_type(value):
    assert exact(through([value, {"again": value}])) == exact([value, {"again": value}])
    pickle.loads(pickle.dumps(through(value)))


def by_torch(value):
    """The value after torch has saved and loaded it, with `weights_only`."""
    stored = io.BytesIO()
    torch.save(value, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=True)


@each("value", VALUES, ids=lambda value: type(value).__name__)
def test_torch_gives_the_same_where_it_takes_the_value(value):
    try:
        expected = by_torch(value)
    except (pickle.UnpicklingError, TypeError):
        return  # states take more: paths, named tuples, namespaces, default dicts, memory formats
    assert exact(through(value)) == exact(expected)


# What torch takes without being asked. A name that is in neither of these is new in torch: decide about it.
TAKEN = r"""
    collections\.(OrderedDict|Counter) | builtins\.(bytearray|set|complex) | _codecs\.encode
    | torch\.(Size|Tensor|device|nn\.parameter\.Parameter|serialization\._get_layout)
    | torch\.(u?int\d+|float\d+(_\w+)?|bfloat16|bool|b?complex\d+|q?u?int\d+(x\d)?|quint\dx\d|bits\d+(x\d)?)
    | torch\.per_(tensor|channel)_\w+
    | torch\._utils\._rebuild_(tensor|tensor_v2|tensor_v3|parameter)
    | torch\.(Double|Short|Int|Bool|Long|Byte|Char|Float|BFloat16|Half)Tensor
"""
REFUSED = r"""
    torch\.(cuda\.)?(sparse\.)\w+Tensor | torch\.cuda\.\w+Tensor
    | torch\.(cuda\.|storage\.)?\w+Storage
    | torch\._utils\._rebuild_(qtensor|sparse_tensor|nested_tensor|wrapper_subclass|meta_tensor_no_storage)
    | torch\._utils\._rebuild_(parameter_with_state|device_tensor_from_numpy|device_tensor_from_cpu_tensor)
    | torch\._tensor\._rebuild_from_type_v2
"""


def test_each_type_that_torch_takes_is_known_here():
    names = [str(name) for name in _get_allowed_globals()]
    new = [name for name in names if not re.fullmatch(f"{TAKEN}|{REFUSED}", name, re.VERBOSE)]
    assert not new, "torch.load(weights_only=True) takes these too: hold or refuse them in checkpoints/state.py"
    assert len(names) > 50


def test_each_dtype_of_torch_comes_back():
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    assert through(dtypes) == dtypes
    assert len(dtypes) > 20


def test_a_namespace_may_have_any_name_in_it():
    state = argparse.Namespace()
    vars(state)["self"] = 1
    assert vars(through(state)) == {"self": 1}


def test_a_size_of_integers_of_numpy_comes_back_with_those_of_python():
    size = through(torch.Size(np.array([2, 3])))
    assert (type(size), list(map(type, size)), size) == (torch.Size, [int, int], (2, 3))


def test_one_parameter_in_two_places_is_one_parameter_again(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    save_checkpoint(tmp_path / "a", {"in": weight, "out": weight, "values": weight.data}, KEY)
    back = load_checkpoint(tmp_path / "a", KEY)
    assert back["in"] is back["out"]
    assert isinstance(back["in"], torch.nn.Parameter)
    assert back["in"].requires_grad
    assert back["values"].data_ptr() == back["in"].data_ptr()
    assert not back["values"].requires_grad


# Named tuples, classes, functions and enums


@contextlib.contextmanager
def allowing(names):
    """Let torch load these meanwhile. Torch 2.4 has no such block."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(names)
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_a_named_tuple_comes_back_equal_without_its_class():
    back = through({"pair": Pair(1, torch.ones(2)), "same": Pair(3, 4)})
    assert type(back["pair"]) is not Pair
    assert type(back["pair"]) is type(back["same"])
    assert back["same"] == Pair(3, 4)
    assert (back["pair"].a, back["same"]._asdict()) == (1, {"a": 3, "b": 4})
    assert encode_state(back["same"])[0] == encode_state(Pair(3, 4))[0]
    for again in (pickle.loads(pickle.dumps(back["same"])), copy.deepcopy(back["same"])):
        assert type(again) is type(back["same"])
        assert again == Pair(3, 4)


def test_a_named_tuple_whose_fields_python_renamed_comes_back():
    renamed = collections.namedtuple("Renamed", ["a", "def", "_c"], rename=True)  # noqa: PYI024
    back = through(renamed(1, 2, 3))
    assert (back._fields, back) == (("a", "_1", "_2"), (1, 2, 3))


def test_a_counter_stays_one_whatever_attributes_it_has():
    counter = Counter("aab")
    counter._metadata = {}
    assert type(through(counter)) is Counter


def test_a_named_tuple_whose_class_is_allowed_comes_back_as_that_class():
    text = encode_state(Pair(1, 2))[0]
    with allowing([Pair]):
        assert type(decode_state(text, None)) is Pair
    other = collections.namedtuple("Pair", "a c", module=__name__)  # noqa: PYI024
    with allowing([other]), pytest.raises(FormatError, match="fields that were saved"):
        decode_state(text, None)


def test_classes_functions_and_enums_are_held_where_torch_may_load_them():
    state = {"activation": torch.nn.ReLU, "loss": by_torch, "colour": Colour.RED, "mode": Mode.READ}
    allowed = [torch.nn.ReLU, Colour, Mode, (by_torch, "losses.mean")]
    with allowing(allowed):
        text = encode_state(state)[0]
        assert decode_state(text, None) == state
        assert b"losses.mean" in text
        with pytest.raises(TypeError, match="got Mode"):
            encode_state(Mode.READ | Mode.WRITE)  # it is no member
    with pytest.raises(FormatError, match=r"got 'torch\.nn\.modules\.activation\.ReLU'\. Name it there"):
        decode_state(text, None)


def test_only_members_of_enums_that_have_a_hash_are_found():
    no_hash = enum.Enum("NoHash", "RED", module=__name__)
    no_hash.__hash__ = None
    member = ["member", f"{__name__}.NoHash", "RED"]
    with allowing([Pair, by_torch, no_hash]):
        for entry in (
            ["member", f"{__name__}.Pair", "RED"],
            ["member", f"{by_torch.__module__}.{by_torch.__qualname__}", "RED"],
            ["set", [member]],
            ["dict", [[member, 1]]],
        ):
            with pytest.raises(FormatError):
                decode_state(json.dumps({"checkpoint": 1, "state": entry}).encode(), None)


@each("name", ["os.system", "builtins.eval", "torch.nn.modules.activation.ReLU", "torch.load", ""])
def test_a_name_in_a_skeleton_is_neither_imported_nor_called(name, monkeypatch):
    monkeypatch.setattr("importlib.import_module", lambda *_: pytest.fail("imported"))
    for entry in (["global", name], ["member", name, "RED"]):
        with pytest.raises(FormatError):
            decode_state(json.dumps({"checkpoint": 1, "state": entry}).encode(), None)


# What is refused


class Text(str):
    __slots__ = ()


class Extended(Pair):
    """A named tuple with an attribute besides its fields."""


def extended():
    pair = Extended(1, 2)
    pair.secret = 3
    return pair


def odd_namespace():
    namespace = argparse.Namespace()
    vars(namespace)[1] = 2
    return namespace


def tuple_with_fields(*fields):
    return type("Odd", (tuple,), {"__slots__": (), "_fields": fields})((1, 2))


SPARSE = torch.eye(2).to_sparse()
NESTED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
REFUSED_VALUES = [
    (lambda: 0, "got function"),
    (Colour.RED, "got Colour.*add_safe_globals"),
    (torch.nn.ReLU, "got type.*add_safe_globals"),
    (torch.nn.ReLU(), "got ReLU"),
    (range(4), "got range"),
    (slice(1), "got slice"),
    (object(), "got object"),
    (Text("a"), "got Text"),
    (PurePosixPath("a"), "got PurePosixPath"),
    (type("Bucket", (type(Path()),), {})("a"), "got Bucket"),
    (odd_namespace(), "got Namespace"),
    (tuple_with_fields("a", "a"), "got Odd"),
    (tuple_with_fields("a"), "got Odd"),
    (tuple_with_fields(1, 2), "got Odd"),
    (tuple_with_fields("fi", "ﬁ"), "got Odd"),
    ({10**5000: object()}, r"\[int\].*got object"),
    (np.dtype("f4"), "got Float32DType"),
    (extended(), "got Extended"),
    (torch.ones(1).untyped_storage(), "got UntypedStorage"),
    (torch.get_rng_state, "got function"),
    (SPARSE, r"torch.sparse_coo.*indices\(\) and values\(\)"),
    (NESTED, "NestedTensor"),
    (defaultdict(lambda: 0), "default factory"),
    ({torch.ones(1): 1}, "keys without arrays.*got Tensor"),
    ({(1, torch.ones(1)): 1}, "keys without arrays.*got tuple"),
    ({np.float32(47.11): 1}, "keys without arrays.*got float32"),
    ({torch.ones(1)}, "a member.*keys without arrays.*got Tensor"),
]


@each(("value", "match"), REFUSED_VALUES, ids=lambda value: type(value).__name__)
def test_what_no_state_holds_is_refused_with_its_place_and_without_its_values(value, match):
    with pytest.raises(TypeError, match=rf"state\['a'\]\[1\].*{match}") as info:
        encode_state({"a": [0, value]})
    assert not re.search(r"1\.\]|47\.11", str(info.value))


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantised_tensor_is_refused_with_what_to_store_instead():
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"not quantised, got torch.qint8. Store int_repr\(\)"):
        encode_state(quantised)


BAD = [
    ["set", [1, 1]],
    ["set", [["list", []]]],
    ["frozenset", [["torch", 0]]],
    ["set", 1],
    ["size", [-(2**63) - 1]],
    ["size", [1.0]],
]
BAD += [["size", [True]], ["size", [2**63]], ["size", ["1"]], ["device", "no"], ["device", 1], ["device", ""]]
BAD += [["constant", name] for name in ("", "float99", "nn", "load", "__name__", "onnx", "Tensor", 3)]
BAD += [["complex", "00" * 15], ["complex", "0"], ["bytearray", "0"], ["path", 1], ["path"], ["path", "a", "b"]]
BAD += [
    ["defaultdict", [], "eval"],
    ["defaultdict", []],
    ["defaultdict", [], 1],
    ["counter", [["a"]]],
    ["counter", []] * 2,
]
BAD += [["namespace", [[1, 2]]], ["ordered_dict", [["a", 1], ["a", 2]]], ["dict", [[["list", []], 1]]]]
BAD += [["namedtuple", "m.P", [["a b", 1]]], ["namedtuple", "m.P", [["_a", 1]]], ["namedtuple", "m.1", []]]
BAD += [["namedtuple", "m.P", [[1, 1]]], ["namedtuple", "m.P", [["a", 1], ["a", 1]]], ["namedtuple", "", []]]
BAD += [["namedtuple", "m.class", [["a", 1]]], ["namedtuple", "m.P", [["lambda", 1]]], ["namedtuple", 1, []]]
BAD += [["namedtuple", "m.P", [["fi", 1], ["ﬁ", 1]]], ["namedtuple", "m.P", [["_1", 1]]]]
BAD += [["parameter", 0], ["parameter", 0, 1], ["parameter", 0, True], ["torch", 0, True], ["numpy", 0, True]]
BAD += [["dict", [[["torch", 0], 1]]], ["dict", [[["tuple", [["torch", 0]]], 1]]]]


@each("entry", BAD, ids=str)
def test_an_entry_that_no_state_has_is_refused(entry):
    text = json.dumps({"checkpoint": 1, "state": entry}).encode()
    with pytest.raises(FormatError):
        decode_state(
            text, lambda _, framework: torch.zeros(2, dtype=torch.int64) if framework == "torch" else np.ones(1)
        )


def test_a_key_that_is_nested_without_end_is_refused():
    nest = "[]"
    for _ in range(400):
        nest = f'["tuple",[{nest}]]'
    for kind in ('["set",[%s]]', '["dict",[[%s,1]]]'):
        with pytest.raises(FormatError):
            decode_state(b'{"checkpoint":1,"state":%s}' % (kind % nest).encode(), None)


# Whatever is nested in whatever

text = st.text(st.characters(codec="utf-8"), max_size=4)
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | text | st.binary(max_size=4)
constants = st.sampled_from([*CONSTANTS, torch.device("cpu"), torch.Size([1, 2]), Path("a/b")])
keys = st.recursive(plain | constants, lambda inner: st.tuples(inner) | st.frozensets(inner, max_size=3), max_leaves=4)
nests = st.recursive(
    plain | constants | st.sets(keys, max_size=3) | st.binary(max_size=3).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.dictionaries(keys, inner, max_size=3).map(lambda items: defaultdict(dict, items))
        | st.dictionaries(st.sampled_from("abc"), inner).map(lambda items: argparse.Namespace(**items))
    ),
    max_leaves=12,
)


@given(nests)
@settings(deadline=None, max_examples=60)
def test_every_nest_comes_back_and_has_one_skeleton(state):
    text = encode_state(state)[0]
    back = decode_state(text, None)
    assert exact(back) == exact(state)
    assert encode_state(back)[0] == text


# Where states go


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_of_a_distributed_checkpoint_keep_their_types(tmp_path):
    import torch.distributed.checkpoint as dcp

    from fastrack.distributed import CheckpointReader, CheckpointWriter

    module = torch.nn.BatchNorm1d(2)
    values = {
        "size": torch.Size([2]),
        "kinds": {torch.float16},
        "pair": Pair(1, (2, {3: Path("a")})),
    }
    dcp.save({"m": module.state_dict(), **values}, storage_writer=CheckpointWriter(tmp_path, KEY), no_dist=True)
    state = {"m": torch.nn.BatchNorm1d(2).state_dict(), **dict.fromkeys(values)}
    dcp.load(state, storage_reader=CheckpointReader(tmp_path, KEY), no_dist=True)
    assert state["m"]._metadata == module.state_dict()._metadata
    assert {name: state[name] for name in values} == values
    assert type(state["size"]) is torch.Size


def test_a_state_without_torch_takes_no_torch():
    """The entries of torch are refused with what to install, and all others need none of it."""
    code = (
        "import sys; sys.modules['torch'] = None; import fastrack; from collections import Counter\n"
        "from fastrack._training.checkpoints.state import decode_state, encode_state\n"
        "state = {(1, 2): {3j}, 'n': Counter('a')}\n"
        "assert decode_state(encode_state(state)[0], None) == state\n"
        'decode_state(b\'{"checkpoint":1,"state":["constant","float32"]}\', None)'
    )
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: a checkpoint with values of torch needs torch" in done.stderr


def test_a_state_that_is_saved_is_the_state_that_is_loaded(tmp_path):
    save_checkpoint(tmp_path / "a", VALUES, KEY)
    assert exact(load_checkpoint(tmp_path / "a", KEY)) == exact(VALUES)
    assert fastrack.load_file(tmp_path / "a").kind == "checkpoint"
