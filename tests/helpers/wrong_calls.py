"""Calls that people write before they have read the page: in Python and on the command line, each of them wrong."""

import contextlib
import io
import shlex
from pathlib import Path

import numpy as np
import torch

import fastrack
from fastrack import Anchor, DatasetWriter, Key, KeyRing, SealedDataset, StreamingSealedDataset
from fastrack.grants import Identity, Recipient, Signer, Verifier
from helpers.commands import invoke

KEY = Key.from_bytes(bytes(range(32)))
X = np.arange(6.0).reshape(3, 2)
SEALED = fastrack.seal(X, KEY, "x")


class Foreign:
    """An array of another framework."""

    def __dlpack__(self, **options):
        return X.__dlpack__(**options)

    def __dlpack_device__(self):
        return X.__dlpack_device__()


class Table:
    """A table, such as one of pandas."""

    def __dataframe__(self):
        raise NotImplementedError


class Image:
    """An image, such as one of PIL."""

    __array_interface__ = X.__array_interface__


@contextlib.contextmanager
def prepared():
    """Go to a new folder with what the calls name."""
    Path("calls").mkdir()
    with contextlib.chdir("calls"):
        _prepare()
        yield


def _prepare():
    KEY.save("owner.key")
    fastrack.save_file({"x": X}, "rows.safetensors", KEY)
    for name in ("people", "plain folder", "shared"):
        Path(name).mkdir()
    Path("shared").chmod(0o777)
    Path("plain folder", "a.npy").write_bytes(b"")
    Path("reader").touch()
    for name in ("people.csv", "more1.csv", "more2.csv"):
        Path(name).write_text("age,town\n44,Oslo\n")
    fastrack.import_samples("people.csv", "people", KEY)


def line(words):
    """Run a command line in this process, and return its exit status and its line on standard error."""
    result = invoke(shlex.split(words), b"")
    said = result.stderr.removeprefix("error: ").removesuffix("\n")
    return (f"exit {result.exit_code}", said) if result.exit_code else (None, None)


def data():
    return SealedDataset("people", keys=KEY)


NO_PATHS = {"bytes": b"x.safetensors", "an open file": io.BytesIO(), "a Key": KEY, "None": None}
TAKE_PATHS = {
    "load_file": fastrack.load_file,
    "load_tensors": lambda path: fastrack.load_tensors(path, keys=KEY),
    "save_file": lambda path: fastrack.save_file({"x": X}, path, KEY),
    "seal_file": lambda path: fastrack.seal_file(path, "out.safetensors", KEY),
    "seal_file, target": lambda path: fastrack.seal_file("people.csv", path, KEY),
    "unseal_file": lambda path: fastrack.unseal_file(path, "out.npy", KEY),
    "verify_file": lambda path: fastrack.verify_file(path, keys=KEY),
    "safe_open": fastrack.safe_open,
    "SealedDataset": SealedDataset,
    "import_samples, folder": lambda path: fastrack.import_samples("people.csv", path, KEY),
    "export_samples": lambda path: fastrack.export_samples(path, "out.csv", KEY),
    "seal_folder": lambda path: fastrack.seal_folder(path, "out", KEY),
    "mount_folder": lambda path: fastrack.mount_folder(path, KEY).__enter__(),
    "write_folder": lambda path: fastrack.write_folder(path, KEY).__enter__(),
    "load_checkpoint": lambda path: fastrack.load_checkpoint(path, keys=KEY),
    "load_model": lambda path: fastrack.load_model(torch.nn.Linear(1, 1), path, keys=KEY),
    "Key.load": Key.load,
    "Key.save": KEY.save,
    "Anchor": Anchor,
    "Recipient.load": Recipient.load,
    "publish": lambda path: fastrack.publish(path, signer=Signer.generate()),
    "trace": lambda path: fastrack.trace(path).__enter__(),
}
PYTHON = {
    f"{name}: {kind} as a path": lambda take=take, path=path: take(path)
    for name, take in TAKE_PATHS.items()
    for kind, path in NO_PATHS.items()
}
PYTHON |= {
    # Keywords of classes and context managers.
    "SealedDataset: key=": lambda: SealedDataset("people", key=KEY),
    "SealedDataset: shuffle=": lambda: SealedDataset("people", shuffle=True),
    "Channel: key=": lambda: fastrack.Channel("cpu", key=KEY),
    "DatasetWriter: keys=": lambda: DatasetWriter("out", keys=KEY),
    "DatasetWriter: no folder": lambda: DatasetWriter(key=KEY),
    "StreamingSealedDataset: batch_size=": lambda: StreamingSealedDataset(data(), batch_size=4),
    "Vault: path=": lambda: fastrack.Vault(path="out"),
    "KeyRing: key=": lambda: KeyRing(key=KEY),
    "use_keys: nothing": fastrack.use_keys,
    "Key: nothing": Key,
    "Anchor: owner=": lambda: Anchor("out", owner=KEY),
    "PreemptionNotice: seconds=": lambda: fastrack.PreemptionNotice(seconds=3),
    "Signer: nothing": Signer,
    "Identity: path=": lambda: Identity(path="out"),
    "Recipient: path=": lambda: Recipient(path="out"),
    "Verifier: path=": lambda: Verifier(path="out"),
    "attest.Policy: path=": lambda: fastrack.attest.Policy(path="out"),
    "attest.collect_evidence: nothing": fastrack.attest.collect_evidence,
    "kv.BlockFolder: key=": lambda: fastrack.kv.BlockFolder(key=KEY),
    "providers.Tpm: pcr=": lambda: fastrack.providers.Tpm(pcr=1),
    "mount_folder: key=": lambda: fastrack.mount_folder("people", key=KEY),
    "trace: file=": lambda: fastrack.trace(file="out"),
    # What holds no tensor, and tensors of others.
    "to_device: a list of numbers": lambda: fastrack.to_device([1.0, 2.0]),
    "to_device: a dict of numbers": lambda: fastrack.to_device({"age": 44}),
    "to_device: a table": lambda: fastrack.to_device(Table()),
    "to_device: an image": lambda: fastrack.to_device(Image()),
    "to_device: an array of another framework": lambda: fastrack.to_device(Foreign()),
    "to_device: one among others": lambda: fastrack.to_device({"x": X, "y": [Foreign()]}),
    "wrap: lists of numbers": lambda: list(fastrack.wrap([[1, 2], [3, 4]], prefetch=0)),
    "wrap: images": lambda: list(fastrack.wrap([Image()])),
    "wrap: prefetch= as a text": lambda: fastrack.wrap([X], prefetch="2"),
    "seal: a list": lambda: fastrack.seal([1, 2], KEY),
    "seal: a dict": lambda: fastrack.seal({"x": X}, KEY),
    "seal: a table": lambda: fastrack.seal(Table(), KEY),
    "to_host: an array of another framework": lambda: fastrack.to_host(Foreign(), KEY),
    "unseal: an array": lambda: fastrack.unseal(X, KEY),
    "save_file: an array without a name": lambda: fastrack.save_file(X, "out.safetensors", KEY),
    "save_file: a text": lambda: fastrack.save_file({"x": "text"}, "out.safetensors", KEY),
    "save_file: a tensor on meta": lambda: fastrack.save_file(
        {"weight": torch.ones(2, device="meta")}, "out.safetensors", KEY
    ),
    "save_file: swapped": lambda: fastrack.save_file("out.safetensors", {"x": X}, KEY),
    # Names that are not there.
    "load_file: a name nearby": lambda: fastrack.load_file("row.safetensors"),
    "load_file: another suffix": lambda: fastrack.load_file("rows.safetensor"),
    "SealedDataset: a name nearby": lambda: SealedDataset("peopel"),
    "SealedDataset: a pattern without a match": lambda: SealedDataset("nothing*.safetensors"),
    "Key.load: a name nearby": lambda: Key.load("onwer.key"),
    "import_samples: a name nearby": lambda: fastrack.import_samples("poeple.csv", "out", KEY),
    "import_samples: a pattern without a match": lambda: fastrack.import_samples("nothing*.csv", "out", KEY),
    "seal_folder: a name nearby": lambda: fastrack.seal_folder("plain foldr", "out", KEY),
    "load_folder: a name nearby": lambda: fastrack.load_folder("peopel", KEY),
    "export_samples: a name nearby": lambda: fastrack.export_samples("peopel", "out.csv", KEY),
    "save_file: into no folder": lambda: fastrack.save_file({"x": X}, "nowhere/out.safetensors", KEY),
    "seal_file: into no folder": lambda: fastrack.seal_file("people.csv", "nowhere/out.safetensors", KEY),
    "seal_folder: into no folder": lambda: fastrack.seal_folder("people", "nowhere/out", KEY),
    "Key.save: into no folder": lambda: KEY.save("nowhere/out.key"),
    "Key.save: where others may write": lambda: KEY.save("shared/out.key"),
    "Signer.save: where others may write": lambda: Signer.generate().save("shared/out.signer"),
    "fastrack.load": lambda: fastrack.load,
    "fastrack.encrypt": lambda: fastrack.encrypt,
    "fastrack.SealedDataSet": lambda: fastrack.SealedDataSet,
    "fastrack.attest.Polcy": lambda: fastrack.attest.Polcy,
    # Samples and batches.
    "DatasetWriter.write: a list": lambda: DatasetWriter("out", KEY).write([1]),
    "DatasetWriter.write: None": lambda: DatasetWriter("out", KEY).write(None),
    "DatasetWriter: shard_size= as a text": lambda: DatasetWriter("out", KEY, shard_size="1G"),
    "import_samples: shard_size= as a text": lambda: fastrack.import_samples("people.csv", "out", KEY, shard_size="1"),
    "import_samples: numbers": lambda: fastrack.import_samples([1, 2], "out", KEY),
    "import_samples: bytes": lambda: fastrack.import_samples(b"people.csv", "out", KEY),
    "import_samples: na_values=": lambda: fastrack.import_samples("people.csv", "out", KEY, na_values="NA"),
    "import_samples: dtype=": lambda: fastrack.import_samples("people.csv", "out", KEY, dtype={"age": "float"}),
    "import_samples: columns= with a capital": lambda: fastrack.import_samples(
        "people.csv", "out", KEY, columns=["Age"]
    ),
    "import_samples: columns= as a text": lambda: fastrack.import_samples("people.csv", "out", KEY, columns="age"),
    "collate: a number": lambda: fastrack.collate(3),
    "collate: other keys": lambda: fastrack.collate([{"a": 1}, {"b": 2}]),
    "SealedDataset: a column by a number that is none": lambda: data()["age"],
    "SealedDataset: beyond the end": lambda: data()[10],
    "StreamingSealedDataset: a path": lambda: StreamingSealedDataset("people", 2),
    "publish: a key as the signer": lambda: fastrack.publish("rows.safetensors", signer=KEY),
    "PreemptionNotice: a number": lambda: fastrack.PreemptionNotice(3),
    "Key.generate: 512 bits": lambda: Key.generate(512),
    "sealed: a method of torch": lambda: SEALED.cuda,
}
LINES = {
    "import people.csv out --sep ; -k owner.key",
    "rekey people --to new.key -k owner.key",
    "import people.csv out --shard-size 0 -k owner.key",
    "import people.csv out --shard-size many -k owner.key",
    "import people.csv out.safetensors -k owner.key",
    "import people.csv out.safetensors/ -k owner.key",
    "import people.csv out --force -k owner.key",
    "import people.csv out -f -k owner.key",
    "import people.csv out --overwrite -k owner.key",
    "import people.csv -o people -k owner.key",
    "import -o out -k owner.key",
    "import - out -k owner.key",
    "import people.csv - -k owner.key",
    "import 'nothing*.csv' out -k owner.key",
    "import poeple.csv out -k owner.key",
    "import people.csv out --columns height -k owner.key",
    "import people.csv out",
    "seal 'nothing*.csv' out -k owner.key",
    "seal people.csv out.safetensors/ -k owner.key",
    "seal people.csv nowhere/out.safetensors -k owner.key",
    "verify rows.safetensors -k 'owner.*'",
    "verify rows.safetensors -k 'nothing.*'",
    "verify row.safetensors -k owner.key",
    "inspect 'nothing*'",
    "key 'nothing*.key'",
    "keygen out/",
    "keygen shared/out.key",
    "keygen shared/out.key --signer",
    "keygen nowhere/out.key",
    "keygen out.key --bits 512",
    "anchor out/ --owner reader",
    "help seal unseal",
    "help attest verify offer",
    "help nonsense",
    "--seal people.csv out",
    "--sael people.csv out",
    "--encrypt people.csv out",
    "-k owner.key seal people.csv out",
    "bench --size 0",
    "bench --repeat few",
    "bench --device tpu",
    "broker serve --port 70000",
    "plan epoch --samples 0 --row 1KiB --batch 10",
    "plan transfer --size large",
    "index nowhere -k owner.key",
    "grant owner.key",
    "attest nonsense",
}
CALLS = PYTHON | {f"fastrack {words}": lambda words=words: line(words) for words in LINES}
