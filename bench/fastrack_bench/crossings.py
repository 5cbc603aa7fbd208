"""Model of what calls cost on the bridge of a GPU in confidential mode, by counts and published prices. Not measured.

A call puts copies, launches, fills and bytes on the bridge. The counts of `direct` are those of a test double, which a
test compares with `CALLS`; ``tolls.toml`` has the prices, ``reports.toml`` what others measured of whole programs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastrack.format import message_size
from fastrack_bench import toll

CONTEXTS = (1, 2, 4, 8)
SLABS = {"slabs of 8 MiB": 8 << 20, "slabs of 32 MiB": 32 << 20}  # the largest elsewhere, and in confidential mode
ONE_SLAB = 2 << 20  # bytes, up to which a message has the counts of the smallest
STOCK, BOUNCE, BEFORE, AFTER = "stock", "bounce", "direct before", "direct after"


class Counts(NamedTuple):
    """Copies, launches, fills and bytes of a call."""

    uploads: int
    downloads: int
    launches: int
    fills: int
    up: int
    down: int


class Call(NamedTuple):
    """A call by plain copies of its tensors, and by fastrack with keys that cross apart, and with wrapped ones."""

    plain: Counts
    before: Counts
    after: Counts


# What `direct` is now. A test holds the counts of that name; the other is what was before.
BUILT = AFTER

# Plain, before, after: copies in and out, launches, fills, bytes in and out.
_COUNTS = {
    "to_device 4 KiB": ((1, 0, 0, 0, 4096, 0), (2, 1, 2, 3, 4160, 112), (1, 1, 1, 0, 4192, 24)),
    "to_device 1 MiB": ((1, 0, 0, 0, 1_048_576, 0), (2, 1, 2, 3, 1_049_664, 112), (1, 1, 1, 0, 1_049_696, 24)),
    "to_device 64 MiB": ((1, 0, 0, 0, 67_108_864, 0), (11, 1, 11, 3, 67_174_464, 112), (4, 1, 5, 1, 67_174_496, 24)),
    "nest, 200 x 8 KiB": ((200, 0, 0, 0, 1_638_400, 0), (2, 1, 3, 3, 1_653_888, 12_352), (1, 1, 2, 0, 1_654_416, 24)),
    "batch of 32 rows": ((2, 0, 0, 0, 32_768, 0), (3, 1, 4, 3, 330_696, 832), (1, 1, 2, 0, 330_024, 24)),
    "16 calls of 4 KiB": ((16, 0, 0, 0, 65_536, 0), (32, 16, 32, 48, 66_560, 1792), (16, 1, 16, 0, 67_072, 2048)),
    "to_host 4 KiB": ((0, 1, 0, 0, 0, 4096), (1, 2, 2, 3, 48, 4224), (0, 1, 1, 0, 0, 4128)),
    "to_host 1 MiB": ((0, 1, 0, 0, 0, 1_048_576), (1, 2, 2, 3, 48, 1_049_728), (0, 1, 1, 0, 0, 1_049_632)),
}
CALLS = {name: Call(*(Counts(*each) for each in counts)) for name, counts in _COUNTS.items()}


@dataclass(frozen=True, slots=True)
class CallToll:
    """Modelled call by one way over one bridge."""

    call: str
    way: str
    bridge: str
    counts: Counts
    seconds: float
    over_stock: float  # time over that of the plain copies, over the same bridge

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "call", **asdict(self), "counts": self.counts._asdict()}


def price(counts: Counts, bridge: str, on_host: int = 0) -> float:
    """Return the seconds of a call, of which the host encrypts or decrypts so many bytes on one core.

    All follow one another. A fill has the price of a launch, which is assumed. What kernels take is left out.
    """
    line = toll.line("bridges", bridge)
    copies = (counts.uploads + counts.downloads) * line.message + (counts.up + counts.down) * line.byte
    launch = toll.parameter(toll.load_data()["bridges"][bridge]["launch"])
    return copies + (counts.launches + counts.fills) * launch + on_host / toll.parameter("aes-core")


def parameters() -> set[str]:
    """Return the names of the parameters that these models are made of, the prices of all bridges among them."""
    bridges = toll.load_data()["bridges"].values()
    return {"aes-core", "pinned"}.union(*({*each["message"], each["launch"], *each["bytes"]} for each in bridges))


def call_tolls() -> list[CallToll]:
    """Return each call by each way over each bridge."""
    rows = []
    for name, call in CALLS.items():
        plain = call.plain.up + call.plain.down
        ways = {STOCK: (call.plain, 0), BOUNCE: (call.plain, plain), BEFORE: (call.before, 0), AFTER: (call.after, 0)}
        for bridge in toll.load_data()["bridges"]:
            stock = price(call.plain, bridge)
            for way, (counts, on_host) in ways.items():
                seconds = price(counts, bridge, on_host)
                rows.append(CallToll(name, way, bridge, counts, seconds, seconds / stock))
    return rows


def break_even(bridge: str, way: str) -> float:
    """Return the bytes of a message of one slab from which on `way` takes less time than the bounce path."""
    call = CALLS["to_device 4 KiB"]
    counts = call.before if way == BEFORE else call.after
    extra = price(counts._replace(up=0, down=0), bridge) - price(call.plain._replace(up=0), bridge)
    return extra * toll.parameter("aes-core")


# 100 KV blocks of 2 MiB, of 32 layers. vLLM 0.33 gives `swap_blocks_batch` an address for each layer of each block
# (v1/kv_offload/cpu/gpu_worker.py). Whether the driver charges a batch for each or once was not found: both stand here.
# Sealed: keys go up in one copy before a store and behind the blocks of a load; slabs of 32 MiB; a fill wipes the keys.
_KV_BLOCKS, _KV_LAYERS, _KV_BLOCK = 100, 32, 2 << 20
_KV_PLAIN, _KV_SEALED = _KV_BLOCKS * _KV_BLOCK, _KV_BLOCKS * message_size(_KV_BLOCK)
_KV_PIECES, _KV_KEYS, _KV_VERDICTS = _KV_BLOCKS * _KV_LAYERS, _KV_BLOCKS * 64, 4 * _KV_BLOCKS
KV = {
    "store": {
        "pieces": Counts(0, _KV_PIECES, 0, 0, 0, _KV_PLAIN),
        "one copy": Counts(0, 1, 0, 0, 0, _KV_PLAIN),
        "sealed": Counts(1, 7, 8, 1, _KV_KEYS, _KV_SEALED),
    },
    "restore": {
        "pieces": Counts(_KV_PIECES, 0, 0, 0, _KV_PLAIN, 0),
        "one copy": Counts(1, 0, 0, 0, _KV_PLAIN, 0),
        "sealed": Counts(8, 1, 8, 1, _KV_SEALED + _KV_KEYS, _KV_VERDICTS),
    },
}


@dataclass(frozen=True, slots=True)
class KvToll:
    """Modelled store or restore of KV blocks by one way over one bridge."""

    call: str
    way: str
    bridge: str
    counts: Counts
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "kv", **asdict(self), "counts": self.counts._asdict()}


def kv_tolls() -> list[KvToll]:
    """Return stores and restores of KV blocks by each way over each bridge."""
    return [
        KvToll(call, way, bridge, counts, price(counts, bridge))
        for call, ways in KV.items()
        for bridge in toll.load_data()["bridges"]
        for way, counts in ways.items()
    ]


@dataclass(frozen=True, slots=True)
class LoadToll:
    """Modelled load of a model into one GPU over the bridges of several contexts or processes."""

    load: str
    bridge: str
    way: str
    contexts: int
    copies: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "load", **asdict(self)}


def load_tolls() -> list[LoadToll]:
    """Return each load of ``tolls.toml`` by each number of contexts.

    Each context has a bridge of its own, which is assumed, and takes as much of the copies as the others. All of them
    share the link, whose speed is that of a plain copy. The number of small copies is that which gives the published
    time over one bridge.
    """
    data = toll.load_data()
    rows = []
    for name, load in data["loads"].items():
        for bridge, each in data["bridges"].items():
            line, launch, nbytes = toll.line("bridges", bridge), toll.parameter(each["launch"]), load["bytes"]
            ways = {way: (-(-nbytes // size), line.message + launch) for way, size in SLABS.items()}
            if bridge == load["bridge"]:
                small = round((load["seconds"] - nbytes * line.byte) / line.message)
                ways = {"small copies": (small, line.message), **ways}
            for way, (copies, fixed) in ways.items():
                alone, shared = copies * fixed + nbytes * line.byte, nbytes / toll.parameter("pinned")
                rows += [LoadToll(name, bridge, way, count, copies, max(alone / count, shared)) for count in CONTEXTS]
    return rows


@dataclass(frozen=True, slots=True)
class Report:
    """Figure that others published and no model here gives."""

    fields: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "report", **self.fields}

    def __str__(self) -> str:
        each = self.fields
        low, high = each["value"] if isinstance(each["value"], list) else (each["value"], None)
        value = f"{low:g}" if high is None else f"{low:g} to {high:g}"
        doubt = " (of a vendor, doubtful)" if each.get("doubtful") else ""
        return f"{each['gpu']}: {each['what']}: {value} {each['unit']}{doubt}; {each['source']}, {each['date']}"


def reports() -> list[Report]:
    """Return the figures of ``reports.toml``."""
    text = Path(__file__).with_name("reports.toml").read_text(encoding="utf-8")
    return [Report(each) for each in tomllib.loads(text)["reports"]]
