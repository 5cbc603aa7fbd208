"""Targets of the fuzzer: any bytes at all give only documented errors, and never plaintext that was not sealed.

Seeds are the same in every run, random salts included, so that inputs kept from earlier runs mean the same.
"""

import gc
import io
import json
import os
import pickle
import resource
import warnings
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from helpers import engines
from rich.console import Console

import fastrack
from fastrack import (
    AuthenticationError,
    FormatError,
    Key,
    KeyPermissionError,
    SealedDataset,
    SealedTensor,
    UnknownKeyError,
)
from fastrack._cli.commands.inspect import describe_contents, read_contents
from fastrack._cli.console import print_lines
from fastrack._crypto.gather import GatherPlan
from fastrack._keys.keys import key_file_id
from fastrack._sealed import message_headers, messages
from fastrack._tensors import arrays, dtypes
from fastrack._training.checkpoints import state as skeleton
from fastrack.format import CHUNK_SIZE, message_size
from fuzz import mutators
from fuzz.common import FOLDER, attempt, clear, put, require, same_salts
from fuzz.documents import Exchanges, GrantsFiles, KeyPairs, WrappedKeys
from fuzz.engines import Engines
from fuzz.evidence import EventLogs, GpuReports, OcspResponses, Policies, Rims, SnpReports, TdxQuotes
from fuzz.manifests import Anchors, Manifests
from fuzz.recombined import Recombined

KEYS = [Key.from_bytes(bytes(range(32))), Key.from_bytes(bytes(range(16)))]
RING = fastrack.KeyRing(KEYS)
MEMORY = 256 << 20  # bytes that the largest resident size may grow by within one input
FILES = 64  # files that may be open besides those of others, before garbage is collected
LARGEST = 1 << 20  # bytes of a tensor of a made-up shape, at most
REFUSALS = (AuthenticationError, UnknownKeyError)

TENSORS = {
    "image": np.arange(10_000, dtype=np.float32).reshape(100, 100),  # three chunks
    "label": np.arange(7, dtype=np.int64),
    "scale": np.array(0.25),
    "none": np.empty((3, 0), np.int16),
    "open": np.arange(20, dtype=np.uint8),  # stored unencrypted
}
QUANTISED = {"w": np.arange(12, dtype=np.int8).reshape(3, 4), "s": np.ones((3, 1), np.float32)}
SMALL = {"x": np.arange(3, dtype=np.float16)}


def guarded(target, data):
    """Run a target, and look at what it leaves behind."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target.run(data)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    require(grown <= MEMORY + 64 * len(data), f"{len(data)} bytes of input took {grown} bytes of memory")
    _require_few_files()


def _require_few_files():
    """Find files that were left open. A sealed file and its plain tensors know each other, so some stay for a while."""
    if _open_files() - _open_by_others > FILES:
        gc.collect()
        left = _open_files() - _open_by_others
        require(left <= FILES // 2, f"{left} files were left open")


def _open_files():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - of Linux


def take_open_files():
    """Take the files that are open now for those of others."""
    global _open_by_others  # noqa: PLW0603 - the process has one table of files
    gc.collect()
    _open_by_others = _open_files()


take_open_files()


def sealed_file(key, tensors=TENSORS, **options):
    path = FOLDER / "seed.safetensors"
    with same_salts():
        fastrack.save_file(tensors, path, key, **options)
    data = path.read_bytes()
    path.unlink()
    return data


# Sealed files.


class Files:
    """`load_file`, `verify_file`, `inspect`, `unseal_file`, and all ways to open what is in a file."""

    name = "file"
    mutate = staticmethod(mutators.mutate_file)

    def seeds(self):
        return [
            *(sealed_file(key, plain=["open"], metadata={"note": "a"}) for key in KEYS),
            sealed_file(KEYS[0], SMALL),
            sealed_file(KEYS[0], QUANTISED, scales={"w": "s"}),
            sealed_file(KEYS[0], TENSORS, plain=list(TENSORS)),
            sealed_file(KEYS[0], {}),
        ]

    def run(self, data):
        path = put("file.safetensors", data)
        examine(path)
        if zlib.crc32(data) % 16 == 0:
            self._rewrite(path)

    def _rewrite(self, path):
        """Decrypt the whole file. It may have been altered all the same: in its names, or in what was plain before."""
        target = FOLDER / "plain.safetensors"
        try:
            with fastrack.load_file(path) as file:
                fastrack.unseal_file(file, target, RING, plain=file.plain)
        except (*REFUSALS, FormatError):
            require(not target.exists(), "a file that could not be unsealed left something behind")
        else:
            with fastrack.load_file(target) as plain, fastrack.load_file(path) as file:
                require(set(plain.plain) == set(file.names), "a tensor was lost on the way")
                for name in file:
                    memory = plain.stored(name)[2]
                    require(is_known(file[name], memory), f"{name!r} was unsealed to what nobody sealed")
        target.unlink(missing_ok=True)
        require(not list(FOLDER.glob(".fastrack-*")), "a temporary file was left behind")


class Metadata:
    """The text of `fastrack.tensors`, in a file whose messages have the sizes that it claims wherever they can."""

    name = "metadata"
    mutate = staticmethod(mutators.mutate_json)

    def __init__(self):
        header, self._body = mutators.split(sealed_file(KEYS[0]))
        self._header = json.loads(header)
        self._marks = self._header.pop("__metadata__")

    def seeds(self):
        text = self._marks["fastrack.tensors"].encode()
        marks = json.loads(mutators.split(sealed_file(KEYS[0], QUANTISED, scales={"w": "s"}))[0])["__metadata__"]
        return [
            text,
            marks["fastrack.tensors"].encode(),
            b"{}",
            text.replace(b",", b" , "),
            text.replace(b'"F32"', b'"BF16"').replace(b"100", b"200", 1),
        ]

    def run(self, data):
        examine(put("metadata.safetensors", self._file(data.decode(errors="replace"))))

    def _file(self, text):
        header, parts, start = {"__metadata__": {**self._marks, "fastrack.tensors": text}}, [], 0
        claims = mutators.parse(text)
        for name, entry in (claims if isinstance(claims, dict) else {}).items():
            first, stop = self._header.get(name, {}).get("data_offsets", (0, 0))
            size = _size_of(entry)
            parts.append(self._body[first:stop][:size].ljust(size, b"\0"))
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
            start += size
        return mutators.join(mutators.write(header), b"".join(parts))


def _size_of(entry):
    """Bytes of the message that an entry claims, if it claims any that is not too long."""
    try:
        size = message_size(dtypes.nbytes(entry["dtype"], tuple(entry["shape"])))
    except Exception:  # noqa: BLE001 - whatever it is, fastrack is to find it
        return 72
    return size if type(size) is int and size <= LARGEST else 72


def examine(path):
    """Read everything of a file in every way. What opens must be what was sealed."""
    contents = attempt(lambda: read_contents(path), FormatError)
    file = attempt(lambda: fastrack.load_file(path), FormatError)
    require((contents is None) == (file is None), "inspect and load_file disagree")
    if file is None:
        return
    if path.stat().st_size % 4 == 0:
        print_lines(describe_contents(contents), Console(file=io.StringIO()))
    with file:
        repr(file), len(file.metadata), file.file_id, file.key_id
        opened = [open_one(file[name]) for name in file]
        for name in file.plain:
            attempt(lambda name=name: file.plain[name].tobytes(), TypeError)
    good = attempt(lambda: [fastrack.verify_file(path, RING)], *REFUSALS, FormatError)
    require(bool(good) == (bool(opened) and all(opened)), "verify_file and unseal disagree")


def open_one(sealed):
    """Open a sealed tensor in every way, and return whether it opened."""
    is_good = attempt(lambda: _read_bytes(sealed), *REFUSALS) is not None
    for framework in ("numpy", "torch"):
        opened = attempt(lambda f=framework: fastrack.unseal(sealed, RING, framework=f), TypeError, *REFUSALS)
        require(opened is None or is_good, f"{sealed!r} opened in one way and not in another")
        if opened is not None:
            found = arrays.dtype_and_shape(opened)
            require(found == (sealed.dtype, sealed.shape), f"{sealed!r} became {found}")
            require(is_known(sealed, arrays.bytes_of(opened)), f"{sealed!r} opened to what nobody sealed")
    rows = attempt(lambda: sealed[-1:], IndexError, TypeError)
    if rows is not None:
        row = attempt(lambda: fastrack.to_device(rows, keys=RING, framework="numpy"), TypeError, *REFUSALS)
        require(row is None or not row.size or is_good or sealed.nbytes > CHUNK_SIZE, "rows opened alone")
        require(row is None or not row.size or _ends_with(sealed, row), f"the last row of {sealed!r} is wrong")
    if sealed.scale is not None:
        widened = attempt(lambda: fastrack.to_device(sealed, keys=RING, framework="torch", dtype="BF16"), *REFUSALS)
        is_right = widened is None or (
            is_good and widened.tolist() == QUANTISED[sealed.name].tolist()
        )  # the scales are 1
        require(is_right, f"{sealed!r} was widened to what nobody sealed")
    return is_good


def _read_bytes(sealed):
    memory = np.full(sealed.nbytes, 0xA5, np.uint8)
    with messages.OpenMessage(sealed, RING) as opened:
        try:
            opened.read(memory)
        except AuthenticationError:
            require(not memory.any(), f"{sealed!r} failed and left bytes behind")
            raise
    require(is_known(sealed, memory), f"{sealed!r} opened to what nobody sealed")
    return memory


def is_known(sealed, memory):
    """Check that this was sealed under that name, dtype and shape."""
    known = (TENSORS | SMALL | QUANTISED).get(sealed.name)
    return (
        known is not None
        and arrays.dtype_and_shape(known) == (sealed.dtype, sealed.shape)
        and arrays.bytes_of(known).tobytes() == memory.tobytes()
    )


def _ends_with(sealed, row):
    known = (TENSORS | SMALL | QUANTISED).get(sealed.name)
    return known is not None and known.tobytes().endswith(row.tobytes())


# Messages.


class Messages:
    """A message of which anything may have been altered, opened by every engine and through `to_device`.

    The first byte chooses the tensor and the key, the rest is its message.
    """

    name = "message"
    sizes = (0, 5, 16384, 40_000)

    def __init__(self):
        self._sealed = [self._seal(size, key) for size in self.sizes for key in KEYS]
        self._engines = [engines.make(name) for name in engines.NAMES if name not in engines.EMULATED]

    def _seal(self, size, key):
        with same_salts():
            return fastrack.seal(np.random.default_rng(size).integers(1, 256, size, np.uint8), key, name="m")

    def seeds(self):
        return [bytes([at]) + bytes(sealed.message) for at, sealed in enumerate(self._sealed)]

    @staticmethod
    def mutate(data, random):
        if not data or random.random() < 0.05:
            return random.randbytes(1) + data[1:]
        return data[:1] + mutators.mutate_message(data[1:], random)

    def run(self, data):
        original = self._sealed[data[0] % len(self._sealed) if data else 0]
        message = np.frombuffer(data[1:], np.uint8)
        sealed = attempt(lambda: SealedTensor(original.context, message, original.key_id), FormatError)
        require((sealed is None) == (message.size != len(original.message)), "the size of a message was misjudged")
        if sealed is None:
            return
        is_whole = data[1:] == bytes(original.message)
        plain = np.random.default_rng(original.nbytes).integers(1, 256, original.nbytes, np.uint8)
        out = np.full(original.nbytes, 0xA5, np.uint8)
        done = attempt(lambda: fastrack.to_device(sealed, keys=RING, out=out), AuthenticationError)
        require((done is not None) == is_whole, "to_device misjudged a message")
        require(np.array_equal(out, plain if is_whole else np.zeros_like(plain)), "out= holds what it should not")
        self._with_each_engine(sealed, plain, is_whole=is_whole)

    def _with_each_engine(self, sealed, plain, *, is_whole):
        key = attempt(lambda: message_headers.open_header(sealed, RING), AuthenticationError)
        if key is None:
            require(not is_whole, "a good header was refused")
            return
        pieces = GatherPlan(*_all_pieces(plain.size))
        for engine in self._engines:
            schedule = engine.expand_key(key)
            for opened in (
                lambda out, e=engine, s=schedule: e.open_run(s, sealed.chunks, out, 0),
                lambda out, e=engine, s=schedule: e.open_gather(s, sealed.chunks, out, pieces),
            ):
                out = np.full(plain.size, 0xA5, np.uint8)
                bad = opened(out)
                require((bad is None) == is_whole, f"{engine.name} misjudged a message")
                require(bad == engine.verify_run(schedule, sealed.chunks, 0), f"{engine.name} disagrees with itself")
                require(np.isin(out, 0).sum() + (out == plain).sum() == out.size, "bytes that nobody sealed came out")
            schedule.wipe()
        key.wipe()


def _all_pieces(size):
    """A gather of all chunks of a message."""
    count = size // CHUNK_SIZE + 1
    starts = np.arange(count) * CHUNK_SIZE
    table = np.stack([np.zeros(count, np.int64), starts, np.minimum(size - starts, CHUNK_SIZE)], axis=1)
    return np.arange(count), np.arange(count + 1), np.ascontiguousarray(table)


# Key files.


class KeyFiles:
    """`Key.load`. The first byte is the file's mode."""

    name = "key"

    def seeds(self):
        return [bytes([0o600 & 0xFF]) + bytes(key._format()) for key in KEYS]

    @staticmethod
    def mutate(data, random):
        if random.random() < 0.1:
            return random.randbytes(1) + data[1:]
        return data[:1] + mutators.mutate_bytes(data[1:], random)

    def run(self, data):
        path = put("some.key", data[1:])
        path.chmod(0o600 | (data[0] & 0o77 if data else 0))
        shared = path.stat().st_mode & 0o77
        try:
            key = attempt(lambda: Key.load(path), FormatError)
        except KeyPermissionError:
            require(shared, "a key file of one's own was refused")
            return
        require(not shared or (key is None and key_file_id(path) is None), "a key file of others was read")
        if key is not None:
            require(bytes(key._format()).rstrip(b"\n") == data[1:].removesuffix(b"\n"), "two texts give one key")


# Checkpoints.


class Pair(NamedTuple):
    first: int
    second: int


class Skeletons:
    """The skeleton of a checkpoint, as whoever has the key may write it."""

    name = "skeleton"
    mutate = staticmethod(mutators.mutate_json)
    arrays = (np.arange(6, dtype=np.float32).reshape(2, 3), np.array(3, np.int64))

    def seeds(self):
        import torch

        state = {
            "model": {"w": torch.zeros(3), "b": self.arrays[0]},
            "step": np.float64(1.5),
            "rng": (3, (2**80, -5), None),
            1: [True, 0.5, float("nan"), b"\0\1", "text", [], {}],
        }
        kinds = [torch.Size([2]), torch.float16, torch.device("cpu"), 1j, bytearray(b"a"), {(1, "a"), frozenset()}]
        kinds += [Counter("a"), OrderedDict(a=1), defaultdict(list, {None: 1}), Namespace(a=1), Path("a"), Pair(1, 2)]
        kinds += [torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), torch.nn.ReLU().state_dict()]
        kinds += [torch.ones(3, 2).T, torch.nn.Parameter(torch.ones(3, 2).T), np.ones((3, 2)).T]
        return [skeleton.encode_state(value)[0] for value in (state, [], "a", kinds)]

    def run(self, data):
        used = []

        def fetch(number, framework):
            used.append(number)
            return _array_of(framework, self.arrays[number % 2])

        state = attempt(lambda: [skeleton.decode_state(data, fetch)], FormatError)
        if state is not None:
            saved = attempt(lambda: skeleton.encode_state(state[0]), TypeError)  # it may hold text that is no Unicode
            if saved is not None:
                again, taken = saved
                read = skeleton.decode_state(again, lambda number, kind: _array_of(kind, _plain_array(taken[number])))
                require(skeleton.encode_state(read)[0] == again, "a state does not survive being saved")
            pickle.dumps(state)
        if state is not None or zlib.crc32(data) % 8 == 0:
            self._load(data, used)

    def _load(self, data, used):
        path = FOLDER / "checkpoint.safetensors"
        tensors = {str(number): self.arrays[number % 2] for number in range(min(max(used, default=-1) + 1, 8))}
        fastrack.save_file({"skeleton": np.frombuffer(data, np.uint8), **tensors}, path, KEYS[0])
        attempt(lambda: fastrack.load_checkpoint(path, keys=RING), FormatError, AuthenticationError)


def _plain_array(array):
    return array.detach().numpy() if hasattr(array, "detach") else np.asarray(array)


def _array_of(framework, array):
    return array if framework == "numpy" else __import__("torch").from_numpy(array)


# Datasets.


class DataSets:
    """`SealedDataset` of rows, windows and records: files of any shapes, and any choice of samples."""

    name = "dataset"
    mutate = staticmethod(mutators.mutate_json)

    def seeds(self):
        rows = {"x": ["F32", [9, 4]], "y": ["I64", [9]]}
        cases = [
            {"shards": [rows], "rows": [0, 8, 3, 3], "window": [2, 1], "offsets": [0, 2, 2, 9], "columns": ["x", "y"]},
            {"shards": [rows, {"x": ["F32", [0, 4]], "y": ["I64", [0]]}, rows], "rows": [17, -1], "window": [3, 3]},
            {"shards": [{"x": ["F16", [3000, 7]]}], "rows": [2999, 0, 1500], "window": [5, 2], "offsets": [0]},
            {"shards": [{"x": ["U8", [4, 0]]}], "rows": [], "window": [1, 9], "offsets": [3, 3]},
        ]
        return [mutators.write(case) for case in cases]

    def run(self, data):
        case = mutators.parse(data)
        shards = self._shards(case) if isinstance(case, dict) else []
        if not shards:
            return
        paths = [FOLDER / f"shard-{number}.safetensors" for number in range(len(shards))]
        for path, shard in zip(paths, shards, strict=True):
            fastrack.save_file(shard, path, KEYS[0])
        try:
            self._rows(case, shards, paths)
            self._records(case, shards)
        finally:
            clear()

    def _shards(self, case):
        shards = case.get("shards")
        if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
            return []
        return [self._arrays(shard) for shard in shards[:4]]

    def _arrays(self, shard):
        made = {}
        for name, entry in list(shard.items())[:4]:
            array = attempt(lambda entry=entry: _array(*entry), Exception)
            if array is not None and name.isprintable() and name != "__metadata__" and name.isascii():
                made[name] = array
        return made

    def _rows(self, case, shards, paths):
        data = attempt(lambda: SealedDataset(paths, case.get("columns"), keys=RING), ValueError, TypeError)
        if data is None:
            return
        whole = {name: np.concatenate([shard[name] for shard in shards]) for name in data.columns}
        require(all(len(data) == len(array) for array in whole.values()), "the number of samples is wrong")
        self._choose(data, whole, case.get("rows"))
        window = case.get("window")
        if not isinstance(window, list) or len(window) != 2 or not all(type(n) is int and n < 1000 for n in window):
            return
        name = data.columns[0]
        windows = attempt(lambda: data.windows(name, *window), ValueError)
        require((windows is None) == (min(window) < 1), "a window was misjudged")
        if windows is not None:
            size, step = window
            starts = [range(0, len(shard[name]) - size + 1, step) for shard in shards]
            pieces = [s[name][at : at + size] for s, r in zip(shards, starts, strict=True) for at in r]
            empty = np.empty((0, size, *whole[name].shape[1:]), whole[name].dtype)
            self._choose(windows, {name: np.stack(pieces) if pieces else empty}, case.get("rows"))

    def _choose(self, data, whole, rows):
        for choice in [rows, *rows[:4]] if isinstance(rows, list) else [rows]:
            if isinstance(choice, bool):  # the first or second sample here, as in a list, and not in NumPy
                continue
            sample = attempt(lambda choice=choice: data[choice], IndexError, TypeError, ValueError, OverflowError)
            if sample is None:
                continue
            for name, handle in sample.items():
                opened = fastrack.to_device(handle, keys=RING, framework="numpy")
                expected = whole[name][np.asarray(choice, np.int64) if isinstance(choice, list) else choice]
                require(opened.shape == expected.shape, f"{choice} of {name!r} has the wrong shape")
                require(opened.tobytes() == expected.tobytes(), f"{choice} of {name!r} is wrong")

    def _records(self, case, shards):
        offsets = attempt(lambda: np.array(case.get("offsets"), np.int64), Exception)
        if offsets is None or offsets.size > 100 or not shards[0]:
            return
        flat = next(iter(shards[0].values())).reshape(-1)
        path = FOLDER / "records.safetensors"
        fastrack.save_file({"data": flat, "offsets": offsets}, path, KEYS[0])
        data = attempt(lambda: SealedDataset.records(path, keys=RING), FormatError, TypeError)
        sound = offsets.ndim == 1 and offsets.size > 0
        sound = sound and all(one <= other for one, other in pairwise([0, *offsets.tolist(), flat.size]))
        require((data is not None) == sound, "offsets were misjudged")
        for number in range(len(data) if data is not None else 0):
            record = fastrack.to_device(data[number], keys=RING, framework="numpy")["data"]
            expected = flat[offsets[number] : offsets[number + 1]]
            require(record.tobytes() == expected.tobytes(), f"record {number} is wrong")


def _array(dtype, shape):
    size = dtypes.nbytes(dtype, shape)
    assert size <= LARGEST
    assert len(shape) <= 32
    content = np.random.default_rng(size).integers(0, 2, size, np.uint8)
    return content.view(dtypes.to_numpy(dtype)).reshape(shape)


# Plain files that are to be sealed.


class PlainFiles:
    """`seal_file` of files that claim to be of NumPy or safetensors. The first byte is the kind."""

    name = "plain"
    kinds = ("a.npy", "a.npz", "a.safetensors", "a.bin")

    def seeds(self):
        made = []
        for array in (np.arange(12.0).reshape(3, 4), np.array(True), np.asfortranarray(np.ones((2, 3), np.float16))):
            one, several = io.BytesIO(), io.BytesIO()
            np.save(one, array)
            np.savez_compressed(several, x=array, y=np.arange(3))
            made += [b"\0" + one.getvalue(), b"\1" + several.getvalue()]
        return [*made, b"\2" + sealed_file(KEYS[0], TENSORS, plain=list(TENSORS)), b"\3abc"]

    @staticmethod
    def mutate(data, random):
        kinds = {b"\0": mutators.mutate_array, b"\1": mutators.mutate_archive, b"\2": mutators.mutate_file}
        return data[:1] + kinds.get(data[:1], mutators.mutate_bytes)(data[1:], random)

    def run(self, data):
        path = put(self.kinds[data[0] % 4 if data else 3], data[1:])
        target = FOLDER / "sealed.safetensors"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, of files of Python 2
            done = attempt(lambda: fastrack.seal_file(path, target, KEYS[0]) or True, FormatError, TypeError)
        require(target.exists() == bool(done), "a file that could not be sealed left something behind")
        if done:
            fastrack.verify_file(target, RING) if fastrack.load_file(target) else None
            self._compare(path, target)
        clear()

    def _compare(self, path, target):
        with fastrack.load_file(target) as file:
            if path.suffix == ".npy":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    plain = np.load(path, allow_pickle=False)
                opened = fastrack.unseal(file["a"], RING, framework="numpy")
                require(opened.tobytes() == plain.tobytes(), "an array was sealed wrongly")
            elif path.suffix == ".bin":
                opened = fastrack.unseal(file[path.name], RING, framework="numpy")
                require(opened.tobytes() == path.read_bytes(), "a file was sealed wrongly")


TARGETS = (
    Files,
    Metadata,
    Messages,
    KeyFiles,
    Skeletons,
    DataSets,
    PlainFiles,
    Engines,
    Recombined,
    Manifests,
    Anchors,
    TdxQuotes,
    EventLogs,
    SnpReports,
    GpuReports,
    Rims,
    OcspResponses,
    Policies,
    Exchanges,
    GrantsFiles,
    KeyPairs,
    WrappedKeys,
)


def make(name):
    kinds = {kind.name: kind for kind in TARGETS}
    if name not in kinds:
        raise ValueError(f"no such target: {name}; there are {', '.join(kinds)}")
    return kinds[name]()
