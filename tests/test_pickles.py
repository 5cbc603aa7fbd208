"""Pickles name what is public, and stay readable when modules move."""

import base64
import pickle
import pickletools

import numpy as np
import pytest

import fastrack
from fastrack import FormatError, Key, SealedDataset, collate, load_file, save_file, seal, unseal

KEY = Key.from_bytes(bytes(range(32)))

# A tensor, rows of it by numbers and by a slice, and a batch of two of its rows.
STORED = """
gASVYwIAAAAAAABdlCiMCGZhc3RyYWNrlIwJX3VucGlja2xllJOUKIwMU2VhbGVkVGVuc29ylGgDKIwOTWVzc2FnZUNvbnRleHSUjAF4lIwDVTE2lEsD
SwKGlIwgOTBkMjg2NWFkMDE4ZWM3OGJjOGU5YjQwZGU4MmY3ZTiUjAZ0ZW5zb3KUdJRSlENUAOeMHs3rOF1J/fkTD0wksmYWeIlsRcUeDVfnIBCIZkXo
/vy9wkGUpvEbAWK+BwIrG/nNZp7SBN+wlfAw1wdIA/Ra0dVjFljdqF9AehH9u+9APLi/lIwgOGYzMjMzNDM0OTk1YzEwOTY1OWRhZjVhNzM0M2RiMGKU
TnSUUpRoA4wKVGVuc29yUm93c5RoEGgDKIwHUm93UGxhbpRLAksChpRLBIwWbnVtcHkuX2NvcmUubXVsdGlhcnJheZSMDF9yZWNvbnN0cnVjdJSTlIwF
bnVtcHmUjAduZGFycmF5lJOUSwCFlEMBYpSHlFKUKEsBSwKFlGgXjAVkdHlwZZSTlIwCaTiUiYiHlFKUKEsDjAE8lE5OTkr/////Sv////9LAHSUYolD
EAIAAAAAAAAAAAAAAAAAAACUdJRidJRSlIeUUpRoA2gRaBBoAyhoEksCSwKGlEsEjAhidWlsdGluc5SMBXJhbmdllJOUSwFLA0sBh5RSlHSUUpSHlFKU
aAOMC1N0YWNrZWRSb3dzlF2UKGgDaBFoEGgDKGgSSwKFlEsEaC9LAEsBSwGHlFKUdJRSlIeUUpRoA2gRaBBoAyhoEksChZRLBGgvSwJLA0sBh5RSlHSU
UpSHlFKUZYaUUpRlLg==
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": np.arange(12).reshape(6, 2), "y": np.arange(6)}, path, KEY)
    return path


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.safetensors"
    save_file({"y": np.arange(6), "offsets": np.array([0, 2, 6])}, path, KEY)
    return SealedDataset.records(path, "y", "offsets", keys=KEY)


def names_in(data):
    """The modules of the functions and classes that a pickle names."""
    strings, found = [], set()
    for operation, argument, _ in pickletools.genops(data):
        if operation.name == "STACK_GLOBAL":
            found.add(tuple(strings[-2:]))
        elif isinstance(argument, str):
            strings.append(argument)
    return found


def test_stored_bytes_are_read():
    tensor, chosen, sliced, batch = pickle.loads(base64.b64decode(STORED))
    plain = np.arange(6, dtype=np.uint16).reshape(3, 2)
    for handle, rows in ((tensor, [0, 1, 2]), (chosen, [2, 0]), (sliced, [1, 2]), (batch, [0, 2])):
        assert np.array_equal(fastrack.to_device(handle, keys=KEY, framework="numpy"), plain[rows])
    assert np.array_equal(unseal(tensor, KEY, framework="numpy"), plain)
    assert (tensor.name, tensor.shape, tensor.key_id) == ("x", (3, 2), KEY.id)


def test_no_private_module_is_named(path, records):
    handles = [
        load_file(path),
        load_file(path)["x"],
        load_file(path)["x"][[1, 2]],
        load_file(path)["x"][1:4],
        seal(np.zeros(1), KEY),
        SealedDataset(path, columns=["x", "y"]),
        SealedDataset(path, columns=["x"])[2],
        SealedDataset(path, columns=["x"]).__getitems__([1, 2]),
        SealedDataset(path, columns=["y"]).windows("y", 3),
        records,
        records[0],
        collate([load_file(path)["x"][0], load_file(path)["x"][3]]),
        collate([load_file(path)["x"][[0, 1]], load_file(path)["x"][[3, 3]]]),
    ]
    for handle in handles:
        named = {(module, name) for module, name in names_in(pickle.dumps(handle, 4)) if module.startswith("fastrack")}
        assert named == {("fastrack", "_unpickle")}, handle


def test_an_object_of_another_version_is_refused():
    with pytest.raises(FormatError, match="'Later'"):
        fastrack._unpickle("Later", 1)
