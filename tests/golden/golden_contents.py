"""The plaintext of the golden files: functions of only names, dtypes and shapes, in which fastrack has no part.

README.md describes them. What stands here is fixed for ever, as the files are: add to it, but change nothing.
"""

import hashlib
import json
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from math import prod
from pathlib import Path

import numpy as np

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
NUMPY = {
    "BOOL": "?", "U8": "<u1", "I8": "<i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip


def content(label, size):
    """Return bytes that follow from a label."""
    return hashlib.shake_256(b"fastrack golden file\0" + label.encode()).digest(size)


def tensor_bytes(name, dtype, shape):
    """Return the plaintext of a tensor: any bits, which of floats may be NaN; of BOOL only 0 and 1."""
    found = content(f"{name} {dtype} {list(shape)}", prod(shape) * BITS[dtype] // 8)
    return bytes(byte & 1 for byte in found) if dtype == "BOOL" else found


def tensor(name, dtype, shape):
    """Return the tensor with that plaintext, of a dtype that NumPy has."""
    return np.frombuffer(tensor_bytes(name, dtype, shape), NUMPY[dtype]).reshape(shape)


def numbers(name, dtype, shape):
    """Return a tensor of whole numbers from 0 to 127, which every dtype of NumPy but BOOL has."""
    found = np.frombuffer(content(name, prod(shape)), np.uint8) & 127
    return found.astype(NUMPY[dtype]).reshape(shape)


# Keys and passphrases. They are for tests, and protect nothing.

SECRETS = {name: content(f"key {name}", size) for name, size in (("owner256", 32), ("owner128", 16), ("next256", 32))}
PASSPHRASE = "correct horse battery staple of a test"
LINEAGE = "0123456789abcdef" * 2
FILE_ID = "fedcba9876543210" * 2  # which one of the grants names
CHIP = "0123456789ABCDEF"  # of a GPU that some of the grants name
MARKS = [  # of a broker's log: what was put into quarantine, and lifted
    ("quarantined", "0123456789abcdef", {"by": "ada", "why": "stolen", "kind": "unseen", "held": 0}),
    ("quarantined", "5a" * 16, {"by": "ada", "why": "a new policy", "kind": "policy", "held": 1, "tell": "wait"}),
    ("lifted", "5a" * 16, {"by": "ben", "why": "wrong one"}),
]

# Wrapped keys: the provider, the algorithm and the parameters of each.

_URI = {"uri": "pkcs11:token=owner;object=wrapping"}
_AWS = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
_GOOGLE = "projects/p/locations/eu/keyRings/r/cryptoKeys/owner"
_AZURE = f"https://acme.vault.azure.net/keys/owner/{'0123456789abcdef' * 2}"
_PARENT = {"parent": "000b" + "5a" * 32}
WRAPPED = {
    "pkcs11-rsa-sha256": ("pkcs11", "RSA-OAEP-SHA256", _URI),
    "pkcs11-rsa-sha1": ("pkcs11", "RSA-OAEP-SHA1", _URI),
    "pkcs11-aes": ("pkcs11", "AES-KW", _URI),
    "tpm": ("tpm", "TPM2-SEALED", _PARENT),
    "tpm-pcrs": ("tpm", "TPM2-SEALED", _PARENT | {"pcrs": "sha256:0,7"}),
    "vault-transit": ("vault-transit", "transit", {"mount": "transit", "name": "owner"}),
    "aws-kms": ("aws-kms", "SYMMETRIC_DEFAULT", {"key": _AWS}),
    "gcp-kms": ("gcp-kms", "GOOGLE_SYMMETRIC_ENCRYPTION", {"key": _GOOGLE}),
    "azure-keyvault": ("azure-keyvault", "RSA-OAEP-SHA256", {"key": _AZURE}),
}

# Sealed files: names, dtypes and shapes. Elements of less than a byte fill whole bytes.

DTYPES = {f"{dtype} matrix": (dtype, (2, 4)) for dtype in BITS}
DTYPES |= {f"{dtype} empty": (dtype, (0, 4)) for dtype in BITS}
DTYPES |= {f"{dtype} scalar": (dtype, ()) for dtype, bits in BITS.items() if bits % 8 == 0}
SHAPES = {
    "scalar": ("F64", ()),
    "empty": ("F32", (0,)),
    "no rows": ("I32", (0, 3)),
    "no columns": ("U8", (3, 0, 2)),
    "one": ("U8", (1,)),
    "a byte less than a chunk": ("U8", (16383,)),
    "one chunk": ("I16", (2, 4096)),
    "a byte more than a chunk": ("U8", (16385,)),
    "three chunks": ("F32", (100, 100)),
    "many extents": ("I8", (1, 2, 3, 4, 5)),
    'é"\\\n\x7f/': ("I64", (3, 1)),
}
FEW_SHAPES = {name: SHAPES[name] for name in ("scalar", "empty", "one", "a byte more than a chunk")}
PLAIN = {"stored in plain": ("F32", (5, 2)), "an empty one in plain": ("I64", (0,))}
METADATA = {"licence": "CC0", "note": 'é"\\'}
MOVED = {"a": ("F32", (3, 4)), "b": ("U8", (300,)), "own": ("I64", (2,))}
SINGLE = ("alone", "F32", (5, 10))
ARRAYS = {"first": ("F32", (4, 5)), "second": ("I16", (7,))}  # of an .npz file
ARRAY = ("array", "U16", (9, 3))  # of an .npy file
WHOLE_FILE = content("whole file", 17_000)
STREAM = content("stream", 5_000)


# A folder of a model.

_WEIGHTS = {
    "model-00001-of-00002.safetensors": {"embed.weight": ("BF16", (16, 8)), "layer.0.weight": ("F32", (8, 8))},
    "model-00002-of-00002.safetensors": {"layer.1.weight": ("F16", (8, 8)), "head.weight": ("F8_E4M3", (4, 8))},
    "adapter/adapter_model.safetensors": {"lora_A": ("F32", (2, 8)), "lora_B": ("F32", (8, 2))},
}
_INDEX = {
    "metadata": {"total_size": 672},
    "weight_map": {name: file for file, found in list(_WEIGHTS.items())[:2] for name in found},
}
SEALED_IN_FOLDER = {*_WEIGHTS, "pytorch_model.bin"}
WEIGHTS = {name: found for file in list(_WEIGHTS)[:2] for name, found in _WEIGHTS[file].items()}


def folder():
    """Return the files of a folder by their names."""
    files = {name: plain_file(tensors, {"format": "pt"}) for name, tensors in _WEIGHTS.items()}
    return files | {
        "config.json": b'{"layers": 2, "name": "golden"}\n',
        "model.safetensors.index.json": json.dumps(_INDEX).encode(),
        "tokenizer.json": b'{"vocabulary": ["a", "b"]}',
        "tokenizer.model": content("tokenizer", 100),
        "README.md": "A model of no use, with an é.\n".encode(),
        "adapter/adapter_config.json": b'{"rank": 2}',
        "pytorch_model.bin": content("pickled weights", 17_000),
    }


def plain_file(tensors, metadata):
    """Return a safetensors file, written as its format says."""
    header, body = {"__metadata__": metadata}, b""
    for name, (dtype, shape) in tensors.items():
        data = tensor_bytes(name, dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


# Training: a module with two names for one weight, the state of a run, and one that two processes had.

MODULE = {"0.weight": (6, 4), "0.bias": (6,), "1.weight": (6, 6)}
SHARDED = {"model.weight": (6, 4), "optimizer.momentum": (5, 3)}
REPLICATED = {"model.bias": (6,)}
VALUES = {"step": 7, "optimizer.rate": 0.1, "name": "é", "betas": (0.9, 0.999), "nothing": None}


def run_state(torch):
    """Return a state with everything that a checkpoint may hold."""
    shared = torch.from_numpy(numbers("state shared", "F32", (5, 5)).copy())
    return {
        "model": {"weight": torch.from_numpy(numbers("state weight", "F32", (70, 70)).copy()), "again": shared},
        "half": torch.from_numpy(numbers("state half", "F32", (3, 3)).copy()).to(torch.bfloat16),
        "shared": shared,
        "empty": torch.zeros((0, 2)),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "numpy": numbers("state numpy", "I16", (2, 3)),
        "numpy scalar": np.float32(0.1),
        "numbers": [0, -1, 2**53, -(2**53), 2**53 + 1, -(2**200)],
        "floats": (0.1, -0.0, float("inf"), 5e-324),
        "text": 'é"\\\n\0',
        "bytes": bytes(range(256)),
        "truth": [True, False, None],
        "nested": {"a": ({}, [], ()), 3: {-4: "whole numbers are keys too"}},
    }


# Datasets. A sample is what SealedDataset gives a transform: bytes of records of U8, and lists of all others.

COUNT = 12


def written(row):
    """Return a sample that a DatasetWriter wrote."""
    return {
        "text": "é" * (row % 4) + f"line {row}",
        "raw": content(f"raw {row}", row * 7 % 40),
        "tokens": numbers(f"tokens {row}", "I32", (row % 5,)),
        "row": numbers(f"row {row}", "F32", (2, 3)),
        "label": row % 3,
        "ratio": row / 8,
        "truth": row % 2 == 0,
    }


PNG = b"\x89PNG\r\n\x1a\n"  # before the images below, but for those of 0.1, which took any bytes for an image
IMAGES = {
    f"{label}/{number}.png": content(f"image {label} {number}", 90) for label in ("cat", "dog") for number in "01"
}
LINES = ["first", "", "zweite Zeile, ü", "last"]
OBJECTS = [
    {"name": f"é{row}", "size": row, "ratio": row / 4, "tags": [row, row + 1], "more": {"a": [row]}} for row in range(4)
]
ARCHIVE = {
    f"{row:03}": {"png": content(f"archive {row}", 50 + row), "cls": row % 2, "json": b'{"a": 1}'} for row in range(4)
}
TABLE = {
    "number": [1, -2, 2**62],
    "small": [3, 4, 5],
    "ratio": [0.5, -0.25, 1e300],
    "name": ["", "é", "third"],
    "raw": [b"\0", b"", b"\xff\xfe"],
    "tokens": [[1, 2, 3], [], [4]],
    "day": [0, 20_000, -1],
}
OBJECTS_IN_MEMORY = [{"text": f"é{row}", "pair": numbers(f"pair {row}", "F64", (2,)), "label": row} for row in range(3)]
STREAM_SIZE = 500  # rows of columns that windows are cut from

# What version 0.1 did not write.

QUANTISED = {"w": ("F8_E4M3", (6, 32)), "v": ("I8", (4, 8))}
SCALES = {
    "w": ("w_scale", "F32", (6, 1), (1, 32)),
    "v": ("v_scale", "BF16", (2, 2), (2, 4)),
}  # with the block at the end
BLOCKS = {"0" * 64: 16385, "1" * 64: 100}  # from the hash of the tokens to the size


def later_state(torch):
    """Return a state with what checkpoints hold since 0.2."""
    weight = torch.nn.Parameter(torch.from_numpy(numbers("later weight", "F32", (3, 4)).copy()), requires_grad=False)
    return {
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "complex": 1.5 - 2j,
        "set": {1, "a", (2, 3)},
        "frozen": frozenset({None, 0.5}),
        "count": Counter({"é": 2}),
        "default": defaultdict(list, {"a": [1]}),
        "ordered": OrderedDict(b=1, a=2),
        "keys": {(1, "a"): 1, None: 2, 0.5: 3, b"x": 4},
        "path": Path("a/b"),
        "space": Namespace(rate=0.1),
        "array of bytes": bytearray(b"\0\1"),
        "weight": weight,
    }


# What version 0.2 did not write.


def formed_state(torch):
    """Return a state with what checkpoints hold since then: strides, and Fortran order."""
    image = torch.from_numpy(numbers("formed image", "F32", (2, 4, 5, 3)).copy()).permute(0, 3, 1, 2)
    return {
        "image": image,
        "one pixel": torch.from_numpy(numbers("formed pixel", "F32", (4, 1, 1, 3)).copy()).permute(0, 3, 1, 2),
        "weight": torch.nn.Parameter(torch.from_numpy(numbers("formed weight", "F32", (4, 6)).copy()).T),
        "row": torch.ones(1, 5)[:, :1],
        "numpy": numbers("formed numpy", "F32", (3, 2)).T,
    }
