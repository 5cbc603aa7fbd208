"""The wording of error messages, which is kept in ``messages.txt``. All are provoked through the public surface.

Elsewhere tests look at the type of an error, at its attributes, and at names and numbers in it.
"""

import base64
import contextlib
import difflib
import io
import json
import os
import pickle
import re
import runpy
import shlex
import signal
import sys
import threading
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from helpers import manifest_cases, wrong_calls
from helpers.tampering import relist, rewrite_file, tamper_file, tampered

import fastrack
from fastrack import (
    Channel,
    Key,
    KeyRing,
    SealedDataset,
    SealedTensor,
    StreamingSealedDataset,
    collate,
    load_file,
    save_file,
    seal,
    to_device,
)
from fastrack._cli.errors import KINDS

torch = pytest.importorskip("torch")

SNAPSHOT = Path(__file__).with_name("messages.txt")
LONGEST = 600
TYPES = {*fastrack.errors.__all__, "FileExistsError", "FileNotFoundError", "IsADirectoryError", "OSError"}
TYPES |= {"AttributeError", "BadParameter", "IndexError", "KeyError", "RuntimeError", "TypeError", "ValueError"}
TYPES |= {f"exit {status}" for status in (1, 2, *(status for status, _ in KINDS.values()))}
# Words that have a capital wherever they stand, the first words of torch's errors in loading, and names of arguments.
NAMES = ("CuPy", "FASTRACK_", "Key", "No such file", "NumPy", "SealedTensor", "Error(s) in loading ")
NAMES += ("ANCHOR: ", "FOLDER: ", "PATH: ", "SOURCE: ", "SOURCE... ", "TARGET: ")
PERSON = re.compile(r"\b(nobody|somebody|whoever)\b", re.IGNORECASE)

SECRET = bytes(range(32))
KEY, OTHER = Key.from_bytes(SECRET), Key.from_bytes(SECRET[::-1])
TABLE, BYTES = np.arange(6.0).reshape(3, 2), np.arange(40_000, dtype=np.uint8)
X, SCALAR = seal(TABLE, KEY, "x"), seal(np.array(1.0), KEY, "s")


def wiped():
    key = Key.generate()
    key.wipe()
    return key


def restricted():
    key = Key.from_bytes(SECRET)
    key.restrict(["ab" * 16])
    return key


def closed():
    with Channel(keys=KEY) as channel:
        return channel


def new(name="saved"):
    return Path(f"{name}-{len(list(Path().iterdir()))}.safetensors")


def saved(tensors, **options):
    path = new()
    save_file(tensors, path, KEY, **options)
    return path


def mounted(config="{}", **options):
    source, sealed = new("plain"), new("folder")
    source.mkdir()
    (source / "table.npy").write_bytes(b"")
    (source / "net.json").write_text(config)
    fastrack.seal_folder(source, sealed, KEY, plain=["net.json"])
    with fastrack.mount_folder(sealed, KEY, **options):
        raise AssertionError


def written_folder(name=None):
    """Write a folder with a file of this name, or none."""
    with fastrack.write_folder(new("folder"), KEY) as path:
        if name is not None:
            Path(path, name).write_bytes(b"")


def samples_of(*samples):
    with fastrack.DatasetWriter(new("samples"), KEY, shard_size=8) as writer:
        for sample in samples:
            writer.write(sample)
    return writer


def samples(*values, without=None):
    """Return a folder with a shard for each value, but one."""
    folder = samples_of(*({"x": value} for value in (*values, *values)))._folder
    if without is not None:
        (folder / f"shard-{without:06}.safetensors").unlink()
    return folder


def imported(name, content):
    Path(name).write_bytes(content)
    return fastrack.import_samples(name, new("samples"), KEY)


def twice():
    return samples_of(*[{"image": b"", "path": "x.png"}] * 2)._folder


def exported(sample, target, **options):
    return fastrack.export_samples(samples_of(sample)._folder, target, KEY, **options)


def altered(change, *, listed=False):
    """Return a sealed file of `x` with other metadata and tensors, or another list of them, made without the key."""
    path = saved({"x": TABLE})
    (relist if listed else rewrite_file)(path, change)
    return path


def marked(name, value):
    return altered(lambda metadata, _: metadata.update({f"fastrack.{name}": value}))


def entry(**values):
    return altered(lambda listed, _: listed["x"].update(values), listed=True)


def flipped(place=56):
    path = saved({"x": TABLE})
    tamper_file(path, "x", place)
    return path


def checkpoint(state=0):
    path = new("checkpoint")
    fastrack.save_checkpoint(path, state, key=KEY)
    return path


def key_file(name, change, mode=0o600):
    return written(name, Path("owner.key").read_bytes().replace(*change), mode)


def written(name, content, mode=0o600):
    Path(name).write_bytes(content)
    Path(name).chmod(mode)
    return name


def by_numpy(save, name, *arrays, **named):
    save(name, *arrays, **named)
    return name


def environment(value, call):
    with mock.patch.dict(os.environ, FASTRACK_KEY_FILE=value):
        return call()


def replaced():
    path = saved({"x": TABLE})
    data = pickle.dumps(SealedDataset(path))
    save_file({"x": TABLE}, path, KEY)
    return fastrack.unseal(pickle.loads(data)[0]["x"], KEY)


def gone():
    return pickle.loads(pickle.dumps(SealedDataset(saved({"x": TABLE}))[0]))


def wrapped_forward():
    module = torch.nn.Linear(2, 2)
    forward = module.forward
    module.forward = lambda x: forward(x) + 1
    return module


def with_lock():
    module = torch.nn.Linear(2, 2)
    module.lock = threading.Lock()
    return module


def nested(depth):
    return [nested(depth - 1)] if depth else 1


def stream(size, **options):
    return StreamingSealedDataset(SealedDataset("rows.safetensors"), size, **options)


def stream_state(**changes):
    return {**stream(2).state_dict(), **changes}


def records(data, offsets, name="data"):
    return SealedDataset.records(saved({name: np.asarray(data), "offsets": np.asarray(offsets)}), name, keys=KEY)


def model(**options):
    path = new("model")
    fastrack.save_model(torch.nn.Linear(2, 2, **options), path, key=KEY)
    return path


def loaded(features, path):
    return fastrack.load_model(torch.nn.Linear(2, features), path, keys=KEY)


def traced(path):
    with fastrack.trace(path), fastrack.trace("other.json"):
        pass


def run(line):
    """Run a command line with ``--json``, and return the error that it prints."""
    printed = io.StringIO()
    arguments = ["fastrack", *shlex.split(line), "--json"]
    patches = mock.patch.object(sys, "argv", arguments), mock.patch.object(signal, "signal")
    with patches[0], patches[1], contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        runpy.run_module("fastrack", run_name="__main__")
    error = json.loads(printed.getvalue())["error"]
    return error["type"], "\n".join([error["message"], *error.get("notes", ())])


CASES = {
    # Keys
    "Key: a path": lambda: Key("owner.key"),
    "Key.from_bytes: 31 bytes": lambda: Key.from_bytes(bytes(31)),
    "Key.from_bytes: zeros": lambda: Key.from_bytes(bytes(32)),
    "Key.generate: 192 bits": lambda: Key.generate(192),
    "Key.load: a damaged file": lambda: Key.load(key_file("damaged.key", (b":0001", b":0002"))),
    "Key.load: a file that others may read": lambda: Key.load(key_file("shared.key", (b"", b""), 0o640)),
    "Key.load: a key": lambda: Key.load(SECRET.hex()),
    "Key.load: a pipe": lambda: Key.load("pipe"),
    "Key.load: another file": lambda: Key.load(written("junk.key", b"junk")),
    "Key.save: a file that exists": lambda: KEY.save("owner.key"),
    "Key.save: a key that a grant restricts": lambda: restricted().save("restricted.key"),
    "Key: a pickle": lambda: pickle.dumps(KEY),
    "Key: wiped": lambda: seal(TABLE, wiped()),
    "KeyRing: an empty path": lambda: KeyRing(""),
    "KeyRing: bytes": lambda: KeyRing(SECRET),
    "KeyRing: a number": lambda: KeyRing(7),
    "KeyRing: an unknown key": lambda: KeyRing([KEY, OTHER])["f" * 32],
    "KeyRing: an unknown key for an empty ring": lambda: KeyRing()["f" * 32],
    "KeyRing: none to seal with": lambda: KeyRing().first,
    "KeyRing.resolve: a key in the environment": lambda: environment(SECRET.hex(), KeyRing.resolve),
    "KeyRing.resolve: no key": KeyRing.resolve,
    "KeyRing.resolve: no key, and an empty variable": lambda: environment("", KeyRing.resolve),
    # Sealed tensors
    "seal: a list": lambda: seal([1.0], KEY),
    "seal: a masked array": lambda: seal(np.ma.array([1, 2], mask=[0, 1]), KEY),
    "seal: a sparse tensor": lambda: seal(torch.eye(2).to_sparse(), KEY),
    "seal: a tensor without memory": lambda: seal(torch.ones(2, device="meta"), KEY),
    "seal: complex numbers of NumPy": lambda: seal(np.zeros(2, complex), KEY),
    "seal: complex numbers of torch": lambda: seal(torch.zeros(1, dtype=torch.complex128), KEY),
    "seal: another byte order": lambda: seal(np.zeros(2, ">i4"), KEY),
    "seal: key= of bytes": lambda: seal(TABLE, SECRET),
    "seal: a name of bytes": lambda: seal(TABLE, KEY, b"x"),
    "seal: a name that is a number": lambda: seal(TABLE, KEY, 5),
    "seal: no name": lambda: seal(TABLE, KEY, None),
    "seal: a name that is no Unicode": lambda: seal(TABLE, KEY, "\ud800"),
    "seal: text": lambda: seal(np.array(["text"]), KEY),
    "unseal: a framework without host memory": lambda: fastrack.unseal(X, KEY, framework="cupy"),
    "unseal: a framework that there is not": lambda: fastrack.unseal(X, KEY, framework=5),
    "unseal: an altered chunk": lambda: fastrack.unseal(tampered(X, 56), KEY),
    "unseal: an altered chunk of a file": lambda: fastrack.unseal(load_file(flipped())["x"], KEY),
    "unseal: an altered header": lambda: fastrack.unseal(tampered(X, 0), KEY),
    "unseal: a path": lambda: fastrack.unseal("two.safetensors", KEY),
    "unseal: a pytree": lambda: fastrack.unseal({"x": X}, KEY),
    "unseal: an array": lambda: fastrack.unseal(TABLE, KEY),
    "unseal: bytes": lambda: fastrack.unseal(X.to_bytes(), KEY),
    "unseal: another key": lambda: fastrack.unseal(X, OTHER),
    "unseal: no key": lambda: fastrack.unseal(X),
    "SealedTensor: a method of arrays": lambda: len(X.mean),
    "SealedTensor: as an array": lambda: np.asarray(X),
    "SealedTensor: as a tensor": lambda: torch.tensor(X),
    "SealedTensor: in a model": lambda: torch.nn.Linear(2, 1)(X),
    "SealedTensor: len of a scalar": lambda: len(SCALAR),
    "SealedTensor: a mask of another size": lambda: X[np.array([True])],
    "SealedTensor: a row that is out of range": lambda: X[3],
    "SealedTensor: rows by text": lambda: X["a"],
    "SealedTensor: rows of a scalar": lambda: SCALAR[0],
    "SealedTensor.from_bytes: cut short": lambda: SealedTensor.from_bytes(X.to_bytes()[:-1]),
    "SealedTensor.from_bytes: several tensors": lambda: SealedTensor.from_bytes(Path("two.safetensors").read_bytes()),
    "SealedTensor.to_bytes: of a checkpoint": lambda: bytes(load_file(checkpoint([TABLE]))["0"].to_bytes()),
    "SealedRows: len of a single row": lambda: len(seal(BYTES, KEY)[0]),
    # Manifests
    **manifest_cases.CASES,
    # Files
    "save_file: a checkpoint's tensor": lambda: saved({"0": load_file(checkpoint([TABLE]))["0"]}),
    "save_file: a directory": lambda: save_file({"x": TABLE}, ".", KEY),
    "save_file: swapped arguments": lambda: save_file("new.safetensors", {"x": TABLE}, KEY),
    "save_file: a pipe": lambda: save_file({"x": TABLE}, "pipe", KEY),
    "save_file: a reserved name": lambda: saved({"__metadata__": TABLE}),
    "save_file: the name of the guard": lambda: saved({"fastrack.guard": TABLE}),
    "mount_folder: memfd= of an absent file": lambda: mounted(memfd=["*.gguf"]),
    "mount_folder: code of another repository": lambda: mounted('{"auto_map": {"AutoModel": "a/b--c.D"}}', code=True),
    "mount_folder: a configuration of many levels": lambda: mounted("[" * 200_000),
    "write_folder: no weights": written_folder,
    "write_folder: a pickle": lambda: written_folder("pytorch_model.bin"),
    "save_file: a name that is a number": lambda: saved({5: TABLE}),
    "save_file: a name that is no Unicode": lambda: saved({"\ud800": TABLE}),
    "save_file: metadata by a reserved name": lambda: saved({"x": TABLE}, metadata={"fastrack.key": ""}),
    "to_device: sealed tensors in a namespace": lambda: to_device([SimpleNamespace(x=X)], keys=KEY),
    "to_device: a generator in a list": lambda: to_device([X, (each for each in [X])], keys=KEY),
    "save_file: no tensor": lambda: saved({"x": None}),
    "save_file: plain= of a sealed tensor": lambda: saved({"x": X}, plain=["x"]),
    "save_file: plain= of an absent tensor": lambda: saved({"x": TABLE}, plain=["y"]),
    "save_file: plain= of text": lambda: saved({"x": TABLE}, plain="x"),
    "save_file: rows": lambda: saved({"x": X[:2]}),
    "save_file: sealed by another name": lambda: saved({"y": X}),
    "save_file: sealed under another key": lambda: save_file({"x": X}, "other.safetensors", OTHER),
    "load_file: a dtype that there is not": lambda: load_file(entry(dtype="F33")),
    "load_file: a file id that is none": lambda: load_file(marked("file", "00")),
    "load_file: a key id that is none": lambda: load_file(marked("key", "00")),
    "load_file: a later kind": lambda: load_file(marked("kind", "later")),
    "load_file: a later version": lambda: load_file(marked("version", "2")),
    "load_file: a list that is none": lambda: load_file(marked("tensors", "[]")),
    "load_file: a member twice": lambda: load_file(marked("tensors", '{"x":1,"x":2}')),
    "load_file: a pipe": lambda: load_file("pipe"),
    "load_file: a shape that is none": lambda: load_file(entry(shape=[-1])),
    "load_file: a tensor that is lacking": lambda: load_file(altered(lambda _, tensors: tensors.clear())),
    "load_file: a tensor of another size": lambda: load_file(entry(shape=[4, 2])),
    "load_file: a binding that is none": lambda: load_file(entry(file="0" * 32, binding="00")),
    "load_file: another file id": lambda: load_file("two.safetensors", file_id="0" * 32),
    "load_file: not a safetensors file": lambda: load_file(written("junk", b"PK\3\4" + bytes(500))),
    "SealedFile: a tensor that is unencrypted": lambda: load_file("mixed.safetensors")["y"],
    "SealedFile: closed": lambda: (file := load_file("two.safetensors")).close() or file["x"],
    "verify_file: an altered chunk": lambda: fastrack.verify_file(flipped(), KEY),
    "verify_file: nothing sealed": lambda: fastrack.verify_file("plain.safetensors", KEY),
    "verify_file: not a safetensors file": lambda: fastrack.verify_file(written("text", b"text"), KEY),
    "seal_file: a member outside the archive": lambda: fastrack.seal_file(
        by_numpy(np.savez, "outside.npz", **{"../x": TABLE}), "new", KEY
    ),
    "seal_file: a sealed file": lambda: fastrack.seal_file("two.safetensors", "new", KEY),
    "seal_file: a single array as an archive": lambda: fastrack.seal_file(written("one.npz", b"\x93NUMPY"), "new", KEY),
    "seal_file: another byte order": lambda: fastrack.seal_file(
        by_numpy(np.save, "x.npy", np.zeros(2, ">f8")), "new", KEY
    ),
    "seal_file: name= of several": lambda: fastrack.seal_file("two.npz", "new", KEY, name="x"),
    "seal_file: objects": lambda: fastrack.seal_file(by_numpy(np.savez, "object.npz", np.array([{}])), "new", KEY),
    "seal_file: text": lambda: fastrack.seal_file(by_numpy(np.savez, "text.npz", np.array(["a"])), "new", KEY),
    "unseal_file: a member outside the archive": lambda: fastrack.unseal_file(saved({"../x": TABLE}), "new.npz", KEY),
    "unseal_file: an unencrypted tensor": lambda: fastrack.unseal_file("mixed.safetensors", "new.npz", KEY),
    "unseal_file: an absent tensor": lambda: fastrack.unseal_file("two.safetensors", "new.npz", KEY, names=["z"]),
    **{
        f"unseal_file: {kind} without the dtype": lambda name=name: fastrack.unseal_file(
            saved({"x": torch.ones(1).bfloat16()}), name, KEY
        )
        for kind, name in {"an archive": "new.npz", "an array": "new.npy"}.items()
    },
    "unseal_file: nothing sealed": lambda: fastrack.unseal_file("plain.safetensors", "new.npz", KEY),
    "unseal_file: numbers as bytes": lambda: fastrack.unseal_file(saved({"x": TABLE}), "new.bin", KEY),
    "unseal_file: several tensors as one": lambda: fastrack.unseal_file("two.safetensors", "new.npy", KEY),
    # Transfers
    "Channel: closed": lambda: closed().to_device(TABLE),
    "Channel: a pickle": lambda: pickle.dumps(closed()),
    "Channel: another device": lambda: Channel("tpu"),
    "Channel: share= of 2": lambda: Channel(share=2),
    "Channel: threads= of 0": lambda: Channel(threads=0),
    "Channel: threads= of -1": lambda: Channel(threads=-1),
    "to_device: a leaf that cannot be moved": lambda: to_device({"a": [TABLE, np.zeros(2, complex)]}),
    "to_device: a module": lambda: to_device(torch.nn.Linear(2, 2)),
    "to_device: a dtype": lambda: X.to(torch.float16),
    "to_device: a key as the device": lambda: to_device(X, SECRET.hex()),
    "to_device: a key file as the device": lambda: to_device(X, "owner.key"),
    "to_device: a path": lambda: to_device("two.safetensors"),
    "to_device: an altered chunk": lambda: to_device(tampered(X, 56), keys=KEY),
    "to_device: an altered header": lambda: to_device(tampered(X, 0), keys=KEY),
    "to_device: CuPy on the host": lambda: to_device(TABLE, framework="cupy"),
    "to_device: no key": lambda: to_device(X),
    "to_device: another key": lambda: to_device(X, keys=OTHER),
    "to_device: another device": lambda: to_device(TABLE, "tpu"),
    "to_device: out= and framework=": lambda: to_device(TABLE, out=TABLE.copy(), framework="numpy"),
    "to_device: out= in the same memory": lambda: to_device(TABLE, out=TABLE),
    "to_device: out= that is given twice": lambda: to_device([TABLE, TABLE], out=[(out := TABLE.copy()), out]),
    "to_device: out= of another shape": lambda: to_device([TABLE], out=[TABLE[:2].copy()]),
    "to_device: out= of another structure": lambda: to_device([TABLE], out={"x": TABLE}),
    "to_device: out= that is not contiguous": lambda: to_device(TABLE, out=np.zeros((2, 3)).T),
    "to_device: out= that requires a gradient": lambda: to_device(torch.ones(2), out=torch.ones(2, requires_grad=True)),
    "to_device: out= that is read-only": lambda: to_device(TABLE, out=np.broadcast_to(np.zeros(1), (3, 2))),
    "to_host: a tensor without memory": lambda: fastrack.to_host(torch.ones(2, device="meta"), key=KEY),
    "trace: a directory": lambda: traced("."),
    "synchronize: another device": lambda: fastrack.synchronize("tpu"),
    "trace: a path in no directory": lambda: traced("nowhere/trace.json"),
    "trace: two at a time": lambda: traced("trace.json"),
    # Training
    "SealedDataset: a checkpoint": lambda: SealedDataset(checkpoint([TABLE])),
    "SealedDataset: a file twice": lambda: SealedDataset(["rows.safetensors"] * 2, keys=KEY),
    "SealedDataset: a sample that is out of range": lambda: SealedDataset("rows.safetensors")[3],
    "SealedDataset: an absent column": lambda: SealedDataset("rows.safetensors", ["y"]),
    "SealedDataset: a column that is misspelt": lambda: SealedDataset("two.safetensors", ["y", "yy"]),
    "SealedDataset: a column that is unencrypted": lambda: SealedDataset("mixed.safetensors", ["y"]),
    "SealedDataset: another file id": lambda: SealedDataset("rows.safetensors", file_ids=["0" * 32]),
    "SealedDataset: columns= of text": lambda: SealedDataset("rows.safetensors", "x"),
    "SealedDataset: columns= of none": lambda: SealedDataset("rows.safetensors", []),
    "SealedDataset: columns of several lengths": lambda: SealedDataset("two.safetensors"),
    "SealedDataset: file_ids= of another length": lambda: SealedDataset("rows.safetensors", file_ids=[]),
    "SealedDataset: files of several dtypes": lambda: SealedDataset(["rows.safetensors", saved({"x": BYTES})]),
    "SealedDataset: no file": lambda: SealedDataset([]),
    "SealedDataset: no longer there": gone,
    "SealedDataset: replaced": replaced,
    "SealedDataset.records: data called lengths": lambda: records([1], [0, 1], "lengths"),
    "SealedDataset.records: data of two dimensions": lambda: records(TABLE, [0, 1]),
    "SealedDataset.records: offsets beyond the data": lambda: records([1, 2], [0, 3]),
    "SealedDataset.records: offsets of another dtype": lambda: records([1, 2], [0.0, 1.0]),
    "SealedDataset: plain_columns= of a sealed tensor": lambda: SealedDataset(
        "two.safetensors", ["x"], plain_columns=["y"]
    ),
    "SealedDataset: plain_columns= of an absent tensor": lambda: SealedDataset("rows.safetensors", plain_columns=["y"]),
    "SealedDataset: plain_columns= of another length": lambda: SealedDataset(
        saved({"x": TABLE, "p": BYTES}, plain=["p"]), plain_columns=["p"]
    ),
    "SealedDataset: a folder without its second shard": lambda: SealedDataset(samples(1, 2, without=1), keys=KEY),
    "SealedDataset.windows: only plain columns": lambda: SealedDataset(
        saved({"x": TABLE, "p": TABLE}, plain=["p"]), plain_columns=["p"]
    ).windows("p", 1),
    "DatasetWriter: another key": lambda: fastrack.DatasetWriter(samples(1), OTHER),
    "DatasetWriter: records= of text": lambda: fastrack.DatasetWriter("samples", KEY, records="x"),
    "DatasetWriter: shard_size= of 0": lambda: fastrack.DatasetWriter("samples", KEY, shard_size=0),
    "DatasetWriter: a pickle": lambda: pickle.dumps(fastrack.DatasetWriter("samples", KEY)),
    "DatasetWriter: a file of other columns": lambda: samples(1, 0.5),
    "DatasetWriter.write: other columns": lambda: samples_of({"x": 1}, {"y": 1}),
    "DatasetWriter.write: a reserved name": lambda: samples_of({"x.offsets": 1}),
    "DatasetWriter.write: nothing": lambda: samples_of({"x": None}),
    "DatasetWriter.write: an array of another length": lambda: samples_of({"x": np.ones(2)}, {"x": np.ones(3)}),
    "DatasetWriter.write: an integer of 65 bits": lambda: samples_of({"x": 2**64}),
    "DatasetWriter.write: after its end": lambda: samples_of().write({"x": 1}),
    "import_samples: a folder that has samples": lambda: fastrack.import_samples([{"x": 1}], samples(1), KEY),
    "import_samples: fewer samples than before": lambda: fastrack.import_samples([], samples(1), KEY, resume=True),
    "import_samples: a number": lambda: fastrack.import_samples(5, new("samples"), KEY),
    "import_samples: an unknown kind": lambda: imported("a.bin", b""),
    "import_samples: a spreadsheet": lambda: imported("a.xlsx", b""),
    "import_samples: a member for nulls": lambda: imported("a.jsonl", b'{"x": 1}\n{"x.valid": "1"}'),
    "import_samples: samples without names": lambda: fastrack.import_samples([(1, 2)], new("samples"), KEY),
    "import_samples: a dict of lists": lambda: fastrack.import_samples({"x": [1, 2]}, new("samples"), KEY),
    "import_samples: arrays of several shapes": lambda: fastrack.import_samples(
        [{"x": np.ones((2, 2))}, {"x": np.ones((3, 2))}], new("samples"), KEY
    ),
    "import_samples: half an emoji": lambda: imported("a.jsonl", b'{"x": "\\ud83d"}'),
    "import_samples: no JSON": lambda: imported("a.jsonl", b"x"),
    "import_samples: an empty archive": lambda: imported("a.tar", b""),
    "import_samples: a URL": lambda: fastrack.import_samples("s3://bucket/a.txt", new("samples"), KEY),
    "export_samples: a path that leads out": lambda: exported({"image": b"", "path": "../x"}, "out"),
    "export_samples: a path twice": lambda: fastrack.export_samples(twice(), "out", KEY),
    "export_samples: an absent column": lambda: exported({"x": 1}, "out.csv", columns=["y"]),
    "export_samples: another suffix": lambda: exported({"x": 1}, "out.xls"),
    "export_samples: arrays as CSV": lambda: exported({"x": np.ones(2)}, "out.csv"),
    "export_samples: bytes as CSV": lambda: exported({"x": b"\xff"}, "out.csv"),
    "export_samples: infinity as JSON": lambda: exported({"x": float("inf")}, "out.jsonl"),
    "export_samples: samples of no file": lambda: exported({"x": 1}, "out"),
    "export_samples: several lines as one": lambda: exported({"x": "a\nb"}, "out.txt"),
    "export_samples: two columns as lines": lambda: exported({"x": "a", "y": "b"}, "out.txt"),
    "open_bytes: a path": lambda: fastrack.open_bytes("rows.safetensors", KEY),
    "open_bytes: a table": lambda: fastrack.open_bytes(X, KEY),
    "StreamingSealedDataset: a batch of none": lambda: stream(0),
    "StreamingSealedDataset: a path": lambda: StreamingSealedDataset("rows.safetensors", 2),
    "StreamingSealedDataset: a rank alone": lambda: stream(2, rank=0),
    "StreamingSealedDataset: a rank that is not there": lambda: stream(2, rank=2, world_size=2),
    "StreamingSealedDataset: more ranks than samples": lambda: iter(stream(2, rank=0, world_size=2)),
    "StreamingSealedDataset.load_state_dict: another's state": lambda: stream(2).load_state_dict(stream_state(data=1)),
    "StreamingSealedDataset.load_state_dict: another seed": lambda: stream(2).load_state_dict(stream_state(seed=1)),
    "StreamingSealedDataset.load_state_dict: of a worker": lambda: stream(2).load_state_dict(stream_state(handed=1)),
    "StreamingSealedDataset.load_state_dict: no state": lambda: stream(2).load_state_dict({"model": 1}),
    "StreamingSealedDataset.load_state_dict: too far": lambda: stream(2).load_state_dict(stream_state(consumed=9)),
    "SealedDataset.windows: an absent column": lambda: SealedDataset("rows.safetensors").windows("y", 1),
    "SealedDataset.windows: size of 0": lambda: SealedDataset("rows.safetensors").windows("x", 0),
    "SealedDataset.windows: size of -1": lambda: SealedDataset("rows.safetensors").windows("x", -1),
    "SealedDataset.windows: step of 0": lambda: SealedDataset("rows.safetensors").windows("x", 1, 0),
    "collate: no samples": lambda: collate([]),
    "collate: samples of several lengths": lambda: collate([[1], [1, 2]]),
    "collate: sealed and not": lambda: collate([X[0], 1]),
    "collate: rows of several shapes": lambda: collate([X[0], X[:2]]),
    "collate: rows of several dtypes": lambda: collate([X[0], SealedDataset(saved({"x": BYTES}))[0]["x"]]),
    "wrap: a number": lambda: fastrack.wrap(5),
    "wrap: bytes": lambda: fastrack.wrap(b"train"),
    "wrap: nothing": lambda: fastrack.wrap(None),
    "wrap: another device": lambda: fastrack.wrap([], "tpu"),
    "wrap: a path": lambda: fastrack.wrap("two.safetensors"),
    "wrap: a pickle": lambda: pickle.dumps(fastrack.wrap([])),
    "wrap: a wrapped loader": lambda: fastrack.wrap(fastrack.wrap([])),
    "wrap: prefetch= of -1": lambda: fastrack.wrap([], prefetch=-1),
    "load_model: an unencrypted tensor": lambda: loaded(2, saved({"weight": TABLE, "bias": TABLE}, plain=["bias"])),
    "load_model: swapped arguments": lambda: fastrack.load_model("model.safetensors", torch.nn.Linear(2, 2), KEY),
    "load_model: other shapes": lambda: loaded(3, model()),
    "load_model: other tensors": lambda: loaded(2, model(bias=False)),
    "save_model: a module without memory": lambda: model(device="meta"),
    "save_model: swapped arguments": lambda: fastrack.save_model("model.safetensors", torch.nn.Linear(2, 2), KEY),
    "safe_open: another framework": lambda: fastrack.safe_open("two.safetensors", "tf"),
    "load_checkpoint: another sealed file": lambda: fastrack.load_checkpoint("two.safetensors", keys=KEY),
    "rehearse_save: an unencrypted file": lambda: fastrack.rehearse_save(
        lambda folder: written(f"{folder}/a.pt", b"a")
    ),
    "rehearse_save: nothing saved": lambda: fastrack.rehearse_save(str),
    "rehearse_save: a file elsewhere removed": lambda: fastrack.rehearse_save(
        lambda _: Path("rows.safetensors").unlink()
    ),
    "rehearse_save: a new folder": lambda: fastrack.rehearse_save(
        lambda _: fastrack.write_folder("sealed-model", KEY).__enter__()
    ),
    "save_checkpoint: a key with a tensor": lambda: checkpoint({"a": {(1, torch.ones(1)): 3}}),
    "reloadable: another type": lambda: fastrack.reloadable("model.safetensors"),
    "reloadable: a wrapped forward": lambda: fastrack.reloadable(wrapped_forward()),
    "reloadable: a module with a lock": lambda: fastrack.reloadable(with_lock()),
    "save_checkpoint: swapped arguments": lambda: fastrack.save_checkpoint({"a": 1}, "new.safetensors", KEY),
    "save_checkpoint: a class": lambda: checkpoint({"a": [torch.nn.ReLU]}),
    "save_checkpoint: another default factory": lambda: checkpoint({"a": defaultdict(lambda: 0)}),
    "save_checkpoint: a sparse tensor": lambda: checkpoint([torch.eye(2).to_sparse()]),
    "save_checkpoint: a tensor without memory": lambda: checkpoint([torch.ones(2, device="meta")]),
    "save_checkpoint: more than 64 levels": lambda: checkpoint(nested(70)),
    "save_checkpoint: text that is no Unicode": lambda: checkpoint(["\ud800"]),
    # Commands
    "fastrack key: another file": lambda: run("key owner.key two.npz"),
    "fastrack keygen: a file that exists": lambda: run("keygen owner.key"),
    "fastrack inspect: not a safetensors file": lambda: run(f"inspect {written('junk', b'junk' * 99)}"),
    "fastrack seal: a dash": lambda: run("seal - two.npz new --key owner.key"),
    "fastrack seal: a key in place of its path": lambda: run(f"seal two.npz new.safetensors --key {SECRET.hex()}"),
    "fastrack seal: a path in no directory": lambda: run("seal two.npz nowhere/new.safetensors --key owner.key"),
    "fastrack seal: a pipe": lambda: run("seal pipe new.safetensors --key owner.key"),
    "fastrack seal: a sealed file": lambda: run("seal two.safetensors new.safetensors --key owner.key"),
    "fastrack seal: a target that exists": lambda: run("seal two.npz two.safetensors --key owner.key"),
    "fastrack seal: an absent tensor": lambda: run("seal two.npz new.safetensors --plain z --key owner.key"),
    "fastrack seal: no key": lambda: run("seal two.npz new.safetensors"),
    "fastrack seal: the source as the target": lambda: run("seal two.npz two.npz --force --key owner.key"),
    "fastrack seal: several files as one": lambda: run("seal two.npz mixed.safetensors new.safetensors -k owner.key"),
    "fastrack unseal: a directory": lambda: run("unseal two.safetensors . --force --key owner.key"),
    "fastrack unseal: an unencrypted tensor": lambda: run("unseal mixed.safetensors new.npz --key owner.key"),
    "fastrack unseal: an absent tensor": lambda: run("unseal two.safetensors new.npy --tensor z --key owner.key"),
    "fastrack unseal: an altered chunk": lambda: run(f"unseal {flipped()} new.npz --key owner.key"),
    "fastrack unseal: several tensors as one": lambda: run("unseal two.safetensors new.npy --key owner.key"),
    "fastrack unseal: nothing sealed": lambda: run("unseal plain.safetensors new.npz --key owner.key"),
    "fastrack unseal: numbers as bytes": lambda: run("unseal two.safetensors new.txt --tensor x --key owner.key"),
    "fastrack unseal: a dataset as a safetensors file": lambda: run(f"unseal {samples(1)} new.npz --key owner.key"),
    "fastrack verify: a dataset that is not complete": lambda: run(f"verify {samples(1, 2, without=3)} -k owner.key"),
    "fastrack verify: a key file that is missing": lambda: environment("no.key", lambda: run("verify two.safetensors")),
    "fastrack verify: an unencrypted tensor": lambda: run("verify mixed.safetensors --expect y --key owner.key"),
    "fastrack verify: an absent tensor": lambda: run("verify two.safetensors --expect z --key owner.key"),
    "fastrack verify: another file id": lambda: run(f"verify two.safetensors --file-id {'0' * 32} --key owner.key"),
    "fastrack verify: another key": lambda: run("verify two.safetensors --key other.key"),
    "fastrack verify: no such file": lambda: run("verify missing.safetensors --key owner.key"),
    "fastrack verify: no key": lambda: run("verify two.safetensors"),
    "fastrack verify: nothing sealed": lambda: run("verify plain.safetensors --key owner.key"),
}  # fmt: skip
# Texts of Python, NumPy, torch, pydantic and Typer, which tell what went wrong within, and not what to do.
BARE = re.compile(
    r"object (is not|has no len|cannot be interpreted)|has no attribute '\w+'$|not supported between|bytes-like"
    r"|argument should be|positional argument[^:]*$|unexpected keyword argument '\w+'$|missing \d+ required[^:]*$"
    r"|takes no arguments|Input should|invalid data type|must contain tensors|No module named '\w+'$|^'?\w+'?$"
)


def text_of(error):
    """Return the message of an error, without the number of a system's error or the quotes of a `KeyError`."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return "\n".join([str(error.args[0] if error.args else ""), *getattr(error, "__notes__", ())])


def provoke(case):
    """Return the type and the message of the error of a case, or None for both."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, of sparse tensors
        try:
            result = case()
        except Exception as error:  # noqa: BLE001 - the message is what counts
            return type(error).__name__, text_of(error)
    return result if isinstance(result, tuple) else (None, None)


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages").resolve()
    with contextlib.chdir(folder):
        KEY.save("owner.key")
        OTHER.save("other.key")
        tensors = {"x": TABLE, "y": BYTES}
        np.savez("two.npz", **tensors)
        os.mkfifo("pipe", 0o600)
        save_file({"x": TABLE}, "rows.safetensors", KEY)
        for name, plain in {"two": "", "mixed": "y", "plain": "xy"}.items():
            save_file(tensors, f"{name}.safetensors", KEY, plain=list(plain))
        with mock.patch.dict(os.environ):
            os.environ.pop("FASTRACK_KEY_FILE", None)
            found = {name: provoke(case) for name, case in CASES.items()}
            with wrong_calls.prepared():
                found |= {name: provoke(case) for name, case in wrong_calls.CALLS.items()}
    return {name: (kind, text and text.replace(str(folder), "<folder>")) for name, (kind, text) in found.items()}


def settled(text):
    """Return the message with placeholders for ids and temporary files."""
    text = re.sub(r"uid \d+( or 0)?, who", "uid 0, who", text)
    text = text.replace(KEY.id, "<key id>").replace(OTHER.id, "<other key id>")
    text = re.sub(r"\b(?!(.)\1{31})[0-9a-f]{32}\b", "<id>", text)
    text = text.replace(f"uid {os.geteuid()} ", "uid 0 ")  # of the user who runs the tests
    return re.sub(r"\b(saved|checkpoint|model|samples)-\d+\.safetensors", r"\1.safetensors", text)


@pytest.mark.slow
def test_each_message_is_worded_as_in_the_snapshot(messages, request):
    found = "\n".join(f"{name}\n{kind}: {settled(text)}\n" for name, (kind, text) in sorted(messages.items()) if text)
    if request.config.getoption("--accept-messages"):
        SNAPSHOT.write_text(found, encoding="utf-8")
    expected = SNAPSHOT.read_text(encoding="utf-8")
    difference = difflib.unified_diff(expected.splitlines(), found.splitlines(), SNAPSHOT.name, "now", lineterm="")
    told = "accept the new wording by: python -m pytest tests/project/test_messages.py --accept-messages"
    if found != expected:
        pytest.fail("\n".join([told, *difference]), pytrace=False)


def faults(kind, text):
    """List what is wrong with a message: it is absent, secret, long, about persons, or of an unexpected type."""
    if not text:
        return ["no error"]
    spellings = [(one.hex(), repr(one)[2:], base64.b64encode(one).decode()) for one in (SECRET, SECRET[::-1])]
    written_out = [spelling[:16] for each in spellings for spelling in each]
    checks = {
        "a capital": text[0].isupper() and not (text.startswith(NAMES) or re.match(r"\w+\(\) ", text)),
        "a key": any(part in text for part in written_out),
        "a person": PERSON.search(text),
        "another type": kind not in TYPES,
        "too long": len(text) > LONGEST,
    }
    return [fault for fault, found in checks.items() if found]


def test_no_message_holds_a_key_or_speaks_of_persons_or_is_long(messages):
    assert len(messages) >= 120
    assert {name: found for name, case in messages.items() if (found := faults(*case))} == {}


def test_no_wrong_call_is_silent_or_answered_in_the_words_of_another_package(messages):
    answers = {name: messages[name] for name in wrong_calls.CALLS}
    assert len(answers) >= 120
    assert len(wrong_calls.LINES) >= 40
    assert {name: text for name, (_, text) in answers.items() if not text or BARE.search(text)} == {}
    advice = re.compile(r"\bexpected\b|\b[Dd]id you mean\b|make it first|[;:.] \S", re.DOTALL)
    assert {name: text for name, (_, text) in answers.items() if not advice.search(text)} == {}


def test_a_message_that_breaks_a_rule_is_found():
    for text, fault, kind in (
        ("", "no error", "TypeError"),
        ("Expected a key", "a capital", "TypeError"),
        (f"expected a path, got {SECRET.hex()}", "a key", "TypeError"),
        (f"expected a path, got {SECRET!r}", "a key", "TypeError"),
        (f"expected a path, got {base64.b64encode(SECRET).decode()}", "a key", "TypeError"),
        ("an array that nobody sealed", "a person", "TypeError"),
        ("x" * 601, "too long", "TypeError"),
        ("name 'x' is not defined", "another type", "NameError"),
    ):
        assert faults(kind, text) == [fault], text
