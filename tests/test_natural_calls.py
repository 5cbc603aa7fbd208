"""Calls that a user of torch writes first: each does what it says, or is refused with the call that was meant."""

import copy
import io
import pickle
import subprocess
import sys
from collections import UserList, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.cases import each

import fastrack
import fastrack.transformers
from fastrack import Key, SealedDataset, SealedTensor, load_file, safe_open, seal, to_device
from fastrack._tensors.dtypes import BITS, DTYPES, NUMPY, to_torch
from fastrack.errors import DeviceError, UnknownKeyError

KEY = Key.from_bytes(bytes(range(32)))
SECRET = 71234.5
OTHER = torch.full((4, 3), SECRET)
HANDLE = seal(torch.ones(4, 3), KEY, "x")

# A call, the error that refuses it, and a part of the message that tells the way on.
REFUSED = {
    "to another tensor": (lambda: HANDLE.to(OTHER), TypeError, "got an object of type Tensor"),
    "the device of an array": (lambda: to_device(HANDLE, OTHER.numpy()), TypeError, "got an object of type ndarray"),
    "device first": (lambda: to_device("cpu", HANDLE), TypeError, "Call to_device(tensors, device)"),
    "device 0": (lambda: HANDLE.to(0), DeviceError, "'cuda:0'"),
    "device 1 of safe_open": (lambda: safe_open("x.safetensors", "pt", device=1), DeviceError, "'cuda:1'"),
    "key= of to": (lambda: HANDLE.to("cpu", key=KEY), TypeError, "non_blocking=False, dtype=None). Pass keys="),
    "key= of to_device": (lambda: to_device(HANDLE, key=KEY), TypeError, "Pass keys="),
    "key= of safe_open": (lambda: safe_open("x.safetensors", key=KEY), TypeError, "Pass keys="),
    "keys= of seal": (lambda: seal(OTHER, keys=KEY), TypeError, "Pass key="),
    "functions as one": (lambda: fastrack.wrap([1], transform=[str]), TypeError, "Compose several in one"),
    "the folder before the class": (
        lambda: fastrack.transformers.from_pretrained("model", dict),
        TypeError,
        "expected a class or a model of transformers, got 'model'. Call from_pretrained(cls, folder)",
    ),
    "key= of from_pretrained": (
        lambda: fastrack.transformers.from_pretrained(dict, "model", key=KEY),
        TypeError,
        "expected keys=, got key=",
    ),
    "the folder before the model": (
        lambda: fastrack.transformers.load_adapter("adapter", torch.nn.Linear(1, 1)),
        TypeError,
        "expected a class or a model of transformers, got 'adapter'",
    ),
    "key= of load_adapter": (
        lambda: fastrack.transformers.load_adapter(SimpleNamespace(load_adapter=print), "adapter", key=KEY),
        TypeError,
        "expected keys=, got key=",
    ),
    "no key to open with": (lambda: to_device(HANDLE), UnknownKeyError, "no key was given: pass keys= ("),
    "no key to seal with": (lambda: seal(OTHER), UnknownKeyError, "no key was given: pass key= ("),
    "no key on a channel": (lambda: fastrack.Channel().to_host(OTHER), UnknownKeyError, "given: pass key= ("),
    "keys by names": (
        lambda: to_device(HANDLE, keys={"owner": KEY}),
        TypeError,
        "keys= takes a mapping from ids to keys",
    ),
    "a path by a name": (lambda: seal(OTHER, {"owner": "x.key"}), TypeError, "key= takes a mapping from ids to keys"),
    "keys= of load_file": (lambda: load_file("x.safetensors", keys=KEY), TypeError, "load_tensors"),
    "device= of load_file": (lambda: load_file("x.safetensors", device="cpu"), TypeError, "load_tensors"),
    "a key of load_file": (
        lambda: load_file("x.safetensors", KEY),
        TypeError,
        "expected load_file(path, *, file_id=None",
    ),
    "the name before the key": (lambda: seal(OTHER, "name", KEY), TypeError, "a str, after the key"),
    "the key before the tensor": (lambda: seal(KEY, OTHER), TypeError, "takes a Key"),
    "a tensor as a key": (lambda: to_device(HANDLE, keys=OTHER), TypeError, "takes a Key"),
    "a handle of a tensor": (lambda: SealedTensor(OTHER, KEY), TypeError, "seal(tensor, key, name) makes one"),
    "a named handle": (lambda: SealedTensor(OTHER, KEY, "x"), TypeError, "seal(tensor, key, name)"),
    "a dataset of tensors": (
        lambda: SealedDataset({"x": OTHER}, KEY),
        TypeError,
        "SealedDataset(paths, columns, keys",
    ),
    "a dataset of a list": (lambda: SealedDataset([OTHER], KEY), TypeError, "SealedDataset(paths, columns, keys"),
    "a dataset of one tensor": (lambda: SealedDataset(OTHER), TypeError, "SealedDataset(paths, columns, keys"),
    "a key of a dataset": (
        lambda: SealedDataset("x.safetensors", KEY),
        TypeError,
        "SealedDataset(paths, columns, keys",
    ),
    "a writer for a key": (lambda: fastrack.DatasetWriter(KEY, "folder"), TypeError, "DatasetWriter(folder, key)"),
    "a dtype of values": (lambda: to_device(HANDLE, keys=KEY, dtype=OTHER), TypeError, "got an object of type Tensor"),
    "a deque": (lambda: to_device(deque([HANDLE]), keys=KEY), TypeError, "Make it a list"),
    "a set": (lambda: to_device({HANDLE}, keys=KEY), TypeError, "Make it a list"),
    "values": (lambda: to_device({"x": HANDLE}.values(), keys=KEY), TypeError, "Make it a list"),
    "a nested deque": (lambda: to_device({"x": [deque([HANDLE])]}, keys=KEY), TypeError, "leaf ['x'][0]: expected"),
    "items": (lambda: to_device({"x": HANDLE}.items(), keys=KEY), TypeError, "Make it a list"),
    "a list of a user": (lambda: to_device(UserList([HANDLE]), keys=KEY), TypeError, "Make it a list"),
    "a namespace": (lambda: to_device({"x": SimpleNamespace(y=HANDLE)}, keys=KEY), TypeError, "Make it a dict"),
    "deep": (lambda: to_device([deque([{"x": [UserList([HANDLE])]}])], keys=KEY), TypeError, "leaf [0]: expected"),
    "a nested generator": (lambda: to_device({"x": (each for each in [HANDLE])}), TypeError, "leaf ['x']: expected"),
    "a nested map": (lambda: to_device([map(str, [HANDLE])], keys=KEY), TypeError, "which may give some"),
    "a generator": (lambda: to_device((each for each in [HANDLE]), keys=KEY), TypeError, "Make a list"),
    "all samples": (lambda: to_device(SealedDataset("x.safetensors"), keys=KEY), TypeError, "use wrap"),
    "a collator of others": (
        lambda: torch.tensor([SealedDataset("x.safetensors")[0]["x"]]),
        RuntimeError,
        "collate with fastrack.collate",
    ),
}


@each(("call", "error", "told"), REFUSED.values(), REFUSED)
def test_a_call_is_refused_with_the_call_that_was_meant(call, error, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fastrack.save_file({"x": OTHER}, "x.safetensors", KEY)
    with pytest.raises(error) as caught:
        call()
    assert told in str(caught.value)
    assert "7123" not in str(caught.value)


def test_an_error_of_a_callback_is_no_error_of_the_call():
    with pytest.raises(TypeError, match=r"^'int' object is not callable$"):
        next(iter(fastrack.wrap([1], transform=lambda batch: batch())))
    own = SimpleNamespace(x=1)
    own.own = own
    kept = [deque([1]), {"a"}, UserList([[1], {"b": None}]), own]
    assert to_device(kept) == kept
    with io.StringIO("a file") as file:
        assert to_device([file]) == [file]


@each("name", sorted(BITS))
def test_a_sealed_dtype_is_equal_to_the_dtypes_and_names_of_torch_and_numpy(name):
    dtype = DTYPES[name]
    assert (dtype, hash(dtype), f"{dtype}", repr(dtype)) == (name, hash(name), name, repr(name))
    assert dtype not in {"nonsense", None, 4}
    assert (dtype != name) is False
    for again in (pickle.loads(pickle.dumps(dtype)), copy.deepcopy(dtype)):
        assert (type(again), again) == (str, name)
    if name in NUMPY:
        array = np.dtype(NUMPY[name])
        assert dtype == array == array.type
        assert dtype == array.name
        assert dtype == to_torch(name) == dtype
        assert (dtype == array.newbyteorder()) is (array.itemsize == 1)
    assert sum(dtype == to_torch(other) for other in NUMPY) == (name in NUMPY)


def test_the_dtype_of_a_handle_is_compared_with_torchs():
    assert HANDLE.dtype == HANDLE[1:].dtype == torch.float32
    assert HANDLE.dtype != torch.float64
    assert HANDLE.dtype in {"F32", "F64"}
    assert HANDLE.dtype in (torch.float32, torch.bfloat16)


def test_packages_are_attributes_that_are_imported_when_they_are_used():
    code = """
import fastrack, sys
assert not {"fastrack.grants", "fastrack.attest", "fastrack.providers"} & set(sys.modules)
fastrack.grants.Signer.generate(), fastrack.attest.Policy, fastrack.providers.Tpm, fastrack.format.CHUNK_SIZE
assert not {"torch", "fastrack.distributed"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not {"distributed", "ray"} & set(dir(fastrack)) - set(vars(fastrack))
