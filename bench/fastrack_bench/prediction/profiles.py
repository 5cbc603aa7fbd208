"""Profiles: how long the stages of transfers, files and collectives took on one machine, by size."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from fastrack._documents.canonical import parsing, require
from fastrack._documents.strict import unique
from fastrack.errors import FormatError

TO_DEVICE, TO_HOST = "to_device", "to_host"
PLAIN_TENSOR, COPY, BOUNCE = "to_device, plain tensor", "plain copy", "bounce"
SAVE, LOAD, LOAD_COLD = "save", "load", "load, from disk"
RANDOM, CONTIGUOUS = "random rows", "contiguous rows"
LOADER = ", DataLoader"  # behind the name of rows: by torch's loader
ALL_REDUCE = "all-reduce"

MIN_RUNS = 3
_LARGEST_FILE = 64 << 20  # bytes
_LARGEST_SIZE = 1 << 50  # bytes of a message
_LONGEST = 1e7  # seconds
_NORMAL = (1.6449, 0.6745)  # the 95th and the 75th percentile of a normal distribution
_STEPS = {"+ overlap": "", "bounce": f", {BOUNCE}", "plain copy": f", {COPY}"}  # of `fastrack bench`
_PATHS = {  # of tables of paths
    "plain copy": f"{TO_DEVICE}, {COPY}",
    "bounce": f"{TO_DEVICE}, {BOUNCE}",
    "direct": TO_DEVICE,
    "direct, plain tensor": PLAIN_TENSOR,
}


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Something that takes time by its bytes. Numbers that it does not have are 0."""

    name: str
    threads: int = 0
    row: int = 0  # bytes of each row
    ranks: int = 0

    def __str__(self) -> str:
        parts = [self.name]
        if self.row:
            parts.append(f"{self.row} bytes each")
        if self.ranks:
            parts.append(f"{self.ranks} ranks")
        if self.threads:
            parts.append(f"{self.threads} thread{'s' if self.threads > 1 else ''}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Point:
    """The runs of a stage at one size."""

    size: int  # bytes
    runs: tuple[float, ...]  # seconds, in the order in which they were measured
    is_summary: bool = False  # the runs are percentiles, or one median, in the place of what was measured

    @property
    def seconds(self) -> float:
        """The lower quartile of the runs: the time that other work of the machine disturbs little."""
        return lower_quartile(self.runs)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that was measured."""

    cpu: str
    threads: int
    device: str = "cpu"
    caches: tuple[int, ...] | None = None  # bytes of the caches of data, from the smallest; None if they are unknown
    features: tuple[str, ...] = ()  # of the CPU, ascending

    def __str__(self) -> str:
        return f"{self.cpu}, {self.threads} threads, {self.device}"

    def may_be(self, other: Machine) -> bool:
        """Return whether another one is of the same kind, as far as both are known."""
        same = (self.cpu, self.threads, self.device) == (other.cpu, other.threads, other.device)
        alike = (self.features or other.features) == (other.features or self.features)
        return same and alike and (self.caches or other.caches) == (other.caches or self.caches)


@dataclass(frozen=True, slots=True)
class Profile:
    """The stages of one machine, each with its points by ascending size."""

    source: str  # for people: the name of the file
    machine: Machine
    stages: Mapping[Stage, tuple[Point, ...]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of a stage at one size, as a document has them."""

    stage: Stage
    size: int
    seconds: Sequence[float]

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON, with seconds of four digits."""
        return {**asdict(self.stage), "size": self.size, "seconds": [float(f"{each:.4g}") for each in self.seconds]}


def lower_quartile(seconds: Sequence[float]) -> float:
    """Return the lower quartile of some seconds."""
    return seconds[0] if len(seconds) == 1 else quantiles(seconds, n=4, method="inclusive")[0]


def read_profile(path: Path) -> Profile:
    """Read what `fastrack plan measure`, `fastrack bench` or `fastrack bench --collectives` wrote.

    Raise `FormatError` if it is none of these.
    """
    with parsing(f"{path}: profile: expected JSON of `fastrack plan measure` or `bench --json`", "measure again"):
        document = read_json(path)
        return parse_profile(document, path.name)


def read_profiles(paths: Sequence[Path]) -> list[Profile]:
    """Read profiles as `read_profile` does. Where files of two folders have one name, their paths name them."""
    names = Counter(path.name for path in paths)
    read = [read_profile(path) for path in paths]
    return [
        replace(profile, source=str(path)) if names[path.name] > 1 else profile
        for path, profile in zip(paths, read, strict=True)
    ]


def read_json(path: Path) -> Any:
    """Read a JSON document of limited size, without repeated members. Raise ValueError if it is none."""
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError(f"expected at most {_LARGEST_FILE} bytes, got more")
    return json.loads(content, object_pairs_hook=unique)


def parse_profile(document: Any, source: str) -> Profile:
    """Return the profile in a document. Raise one of the errors that `parsing` converts if it holds none."""
    require(isinstance(document, dict), "machine")
    if "traceEvents" in document:
        raise FormatError(f"{source}: expected a profile, got a trace. Name it with --trace, beside a --profile")
    machine, settings = member(document, "machine", dict), document.get("settings", {})
    require(isinstance(settings, dict), "settings")
    cpu, caches = member(machine, "cpu", dict), machine.get("caches")
    require(caches is None or isinstance(caches, list), "caches")
    features = cpu.get("features", {})
    require(isinstance(features, dict), "features")
    found = Machine(
        cpu=_text(member(cpu, "model"), "model"),
        threads=_count(settings.get("threads", member(cpu, "threads")), "threads"),
        device=_text(settings.get("device", "cpu"), "device"),
        features=tuple(sorted(_text(name, "features") for name, has in features.items() if has is True)),
        caches=None if caches is None else tuple(sorted(_size(size, "caches") for size in caches)),
    )
    stages: dict[Stage, dict[int, Point]] = {}
    for stage, point in _points(document, found.threads):
        of_stage = stages.setdefault(stage, {})
        require(point.size not in of_stage, f"size {point.size} of {stage}, which is given twice; its second row")
        of_stage[point.size] = point
    if not stages:
        raise ValueError("it has no measurements of at least three runs")
    ascending = {stage: tuple(by_size[size] for size in sorted(by_size)) for stage, by_size in stages.items()}
    return Profile(source, found, ascending)


def _points(document: Mapping[str, Any], threads: int) -> Iterator[tuple[Stage, Point]]:
    """Yield the points of a document of any kind, those of fewer than three runs left out."""
    for row in _rows(document, "plan"):
        numbers = (_number(member(row, name), name) for name in ("threads", "row", "ranks"))
        stage = Stage(_text(member(row, "name"), "name"), *numbers)
        runs = tuple(_seconds(value) for value in member(row, "seconds", list))
        if len(runs) >= MIN_RUNS:
            yield stage, Point(_size(member(row, "size")), runs)
    for row in _rows(document, "ablation"):
        step = member(row, "step", str)
        if step in _STEPS and _number(member(row, "runs"), "runs") >= MIN_RUNS:
            yield Stage(_text(member(row, "direction"), "direction") + _STEPS[step], threads), _summary(row)
    for row in _rows(document, "collectives"):
        if member(row, "subject") == ALL_REDUCE and _number(member(row, "runs"), "runs") >= MIN_RUNS:
            name = f"{ALL_REDUCE}, {_text(member(row, 'way'), 'way')}"
            yield Stage(name, ranks=_count(member(row, "ranks"), "ranks")), _summary(row)
    for row in _rows(document, "rows"):
        path = row.get("path")
        if isinstance(path, str) and path in _PATHS and _number(member(document, "repeat"), "repeat") >= MIN_RUNS:
            # These tables have only the median.
            point = Point(_size(member(row, "size")), (_seconds(member(row, "seconds")),), is_summary=True)
            yield Stage(_PATHS[path], threads), point


def member(of: Any, name: str, kind: type = object) -> Any:
    """Return a member of an object in JSON. Raise ValueError with its name if it is absent, or no such value."""
    if not isinstance(of, dict) or name not in of:
        raise ValueError(f"expected an object with a member {name!r}")
    require(isinstance(of[name], kind), name)
    return of[name]


def _rows(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = document.get(name, [])
    require(isinstance(rows, list) and all(isinstance(row, dict) for row in rows), name)
    return list(rows)


def _summary(row: Mapping[str, Any]) -> Point:
    """Return a point of a median and two quartiles. Its tails are those of two halves of log-normal distributions."""
    median, both = _seconds(member(row, "seconds")), member(row, "quartiles", list)
    require(len(both) == 2, "quartiles")
    lower, upper = map(_seconds, both)
    require(lower <= median <= upper, "quartiles")
    tail = _NORMAL[0] / _NORMAL[1]
    runs = median * (lower / median) ** tail, lower, median, upper, median * (upper / median) ** tail
    return Point(_size(member(row, "size")), runs, is_summary=True)


def _seconds(value: Any) -> float:
    require(type(value) in {int, float} and math.isfinite(value) and 1e-9 <= value <= _LONGEST, "seconds")
    return float(value)


def _size(value: Any, name: str = "size") -> int:
    require(type(value) is int and 1 <= value <= _LARGEST_SIZE, name)
    return int(value)


def _number(value: Any, name: str) -> int:
    require(type(value) is int and 0 <= value <= _LARGEST_SIZE, name)
    return int(value)


def _count(value: Any, name: str) -> int:
    require(_number(value, name) >= 1, name)
    return int(value)


def _text(value: Any, name: str) -> str:
    require(isinstance(value, str) and value.isprintable() and 1 <= len(value) <= 80, name)
    return str(value)
