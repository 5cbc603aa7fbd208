"""Sources of `fastrack plan`: profiles that were measured on one machine, and the published figures of others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar, Protocol

from fastrack._util.shown import list_names
from fastrack_bench import toll
from fastrack_bench.prediction.curves import REACH, Curve, Estimate, OutOfReachError
from fastrack_bench.prediction.profiles import ALL_REDUCE, LOAD, LOAD_COLD, TO_DEVICE, Machine, Profile, Stage

UNVALIDATED = "MODELLED from published figures, NOT VALIDATED on a confidential GPU"
_REDUCED = f"{ALL_REDUCE}, sealed"  # the one way of all-reduce whose hops are encrypted, as those of the figures are


class Source(Protocol):
    """Something that knows how long a stage takes."""

    @property
    def name(self) -> str:
        """The machine, for people."""

    @property
    def label(self) -> str:
        """A warning about every time of it; may be empty."""

    def each(self) -> list[tuple[str, Source]]:
        """Return what it is made of, by names; one entry or none where there is nothing to compare."""

    def at(self, stage: Stage, size: float) -> Estimate:
        """Return the estimate of a stage. Raise `OutOfReachError` if nothing near was measured."""

    def rows(self, name: str, threads: int, row: int, batch: int) -> Estimate:
        """Return the estimate of a batch of rows of so many bytes."""

    def threads(self, name: str) -> list[int]:
        """Return the numbers of threads that are known of a stage, ascending."""

    def ranks(self, name: str) -> list[int]:
        """Return the numbers of ranks that are known of a stage, ascending."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Profiles of one machine. Where several have a stage, estimates are ranges."""

    machine: Machine
    profiles: tuple[Profile, ...]
    label: ClassVar[str] = ""  # it was measured

    @property
    def name(self) -> str:
        """The machine, for people."""
        return str(self.machine)

    def each(self) -> list[tuple[str, Source]]:
        """Return the profiles one by one."""
        return [(profile.source, Measured(self.machine, (profile,))) for profile in self.profiles]

    def at(self, stage: Stage, size: float) -> Estimate:
        """Return the estimate of a stage, the range of all profiles that have it."""
        having = [profile for profile in self.profiles if stage in profile.stages]
        if not having:
            raise self._missing(stage)
        return _range_of(lambda profile: Curve.of(profile, stage).at(size), having)

    def rows(self, name: str, threads: int, row: int, batch: int) -> Estimate:
        """Return the estimate of a batch of rows, between the sizes of rows that were measured.

        A row touches one chunk of 16 KiB or more, whatever its bytes, so that batches of equal numbers of rows are
        compared, whose chunks grow with the bytes of a row.
        """
        known = sorted({stage.row for stage in self._stages() if stage.name == name and stage.threads == threads})
        if not known:
            raise self._missing(Stage(name, threads, row))
        if not known[0] / REACH <= row <= known[-1] * REACH:
            raise OutOfReachError(
                f"planning {name} failed: expected rows of {known[0] / REACH:.0f} to {known[-1] * REACH:.0f} bytes, "
                f"four times past what was measured, got {row}. Measure them, or plan for other rows"
            )
        at = bisect_left(known, row)
        if at == 0:  # shorter ones: as many chunks, of which less is taken
            return self.at(Stage(name, threads, known[0]), known[0] * batch)
        if at < len(known) and known[at] == row:
            return self.at(Stage(name, threads, row), row * batch)
        if at == len(known):  # longer ones: whole chunks, whose bytes count
            return self.at(Stage(name, threads, known[-1]), row * batch)
        below, above = (self.at(Stage(name, threads, each), each * batch) for each in known[at - 1 : at + 1])
        share = (row - known[at - 1]) / (known[at] - known[at - 1])
        between = below.times(1 - share) + above.times(share)
        # The wider interval of both, as it is their difference that is uncertain here.
        low = between.least * min(each.low / each.least for each in (below, above))
        high = between.most * max(each.high / each.most for each in (below, above))
        return replace(between, low=low, high=high)

    def threads(self, name: str) -> list[int]:
        """Return the numbers of threads that were measured."""
        return sorted({stage.threads for stage in self._stages() if stage.name == name and stage.threads})

    def ranks(self, name: str) -> list[int]:
        """Return the numbers of ranks that were measured."""
        return sorted({stage.ranks for stage in self._stages() if stage.name == name and stage.ranks})

    def _stages(self) -> set[Stage]:
        return {stage for profile in self.profiles for stage in profile.stages}

    def _missing(self, stage: Stage) -> OutOfReachError:
        names = sorted({each.name for each in self._stages()})
        if stage.name not in names:
            return OutOfReachError(
                f"planning failed: expected a profile that measured {stage.name!r}; {list_names(stage.name, names)}. "
                "Run `fastrack plan measure`"
            )
        same = sorted(str(each) for each in self._stages() if each.name == stage.name)
        return OutOfReachError(
            f"planning failed: expected one of {'; '.join(same[:8])}; got {stage}. Nothing between is predicted: "
            "name one of these, or measure it"
        )


@dataclass(frozen=True, slots=True)
class Published:
    """Models of `tolls.toml`, made of published figures of confidential GPUs. Where they differ, they give a range."""

    paths: tuple[str, ...]  # of transfers
    hops: tuple[str, ...]
    name: ClassVar[str] = "confidential GPU, by published figures"
    label: ClassVar[str] = UNVALIDATED

    @classmethod
    def of(cls, names: Iterable[str]) -> Published:
        """Return the models by their names; "all" is each of them but the fitted hop, which is in no paper."""
        paths, hops = _published()
        asked = list(names)
        known = ("all", *dict.fromkeys((*paths, *hops)))
        for name in asked:
            if name not in known:
                raise OutOfReachError(f"planning failed: expected one of {', '.join(known)}, got {name!r:.40}")
        if "all" in asked:
            return cls(tuple(paths), tuple(name for name in hops if name != toll.FITTED))
        return cls(tuple(name for name in paths if name in asked), tuple(name for name in hops if name in asked))

    def each(self) -> list[tuple[str, Source]]:
        """Return the models one by one."""
        by_path = [(f"{path} (transfer)", Published((path,), ())) for path in self.paths]
        return [*by_path, *((f"{hop} (hop)", Published((), (hop,))) for hop in self.hops)]

    def at(self, stage: Stage, size: float) -> Estimate:
        """Return the estimate of a stage: what the driver's way of confidential GPUs takes."""
        if stage.name == _REDUCED and self.hops:
            steps = 2 * (stage.ranks - 1)  # of a ring, with a part of the message each
            seconds = [steps * toll.line("hops", name)(size / stage.ranks) for name in self.hops]
        elif stage.name in {TO_DEVICE, LOAD} and self.paths:
            seconds = [toll.line("transfers", name)(size) for name in self.paths]
        else:
            raise self._missing(stage.name)
        return Estimate(min(seconds), min(seconds), max(seconds), max(seconds))

    def _missing(self, stage: str) -> OutOfReachError:
        paths, hops = _published()
        named = hops if stage == _REDUCED else paths if stage in {TO_DEVICE, LOAD} else []
        failed = f"planning {stage} by published figures failed"
        if named:
            kind, other = ("hop", "transfer") if named is hops else ("transfer", "hop")
            given = ", ".join((*self.paths, *self.hops))
            return OutOfReachError(
                f"{failed}: expected the name of a {kind}, one of {', '.join(named)}; got {given}, a {other}. Name one"
            )
        advice = "Plan for files in the page cache (--cached), or measure it" if stage == LOAD_COLD else "Measure it"
        return OutOfReachError(
            f"{failed}: expected a transfer to a GPU or {_REDUCED}; no published figure is about anything else. "
            f"{advice}: `fastrack plan measure`"
        )

    def rows(self, name: str, threads: int, row: int, batch: int) -> Estimate:
        """Return the estimate of a batch of rows, which the host has gathered: one message."""
        return self.at(Stage(TO_DEVICE, threads), row * batch)

    def threads(self, name: str) -> list[int]:
        """Return nothing: no figure is by threads."""
        return []

    def ranks(self, name: str) -> list[int]:
        """Return the numbers of ranks that are compared elsewhere."""
        return list(toll.RANKS)


def _published() -> tuple[list[str], list[str]]:
    """Return the names of the transfers and of the hops that confidential GPUs pay."""
    data = toll.load_data()
    paths = [name for name, each in data["transfers"].items() if "over" in each]
    return paths, [name for name in data["hops"] if name != toll.PLAIN]


def by_machine(profiles: Iterable[Profile]) -> list[Measured]:
    """Return profiles by machine, in their order."""
    groups: list[list[Profile]] = []
    for profile in profiles:
        group = next((each for each in groups if all(profile.machine.may_be(other.machine) for other in each)), None)
        if group is None:
            groups.append([profile])
        else:
            group.append(profile)
    return [Measured(group[0].machine, tuple(group)) for group in groups]


def _range_of(predict: Callable[[Profile], Estimate], profiles: Sequence[Profile]) -> Estimate:
    """Return the range of those profiles that reach. Raise the error of the first if none does."""
    found, failed = list[Estimate](), list[OutOfReachError]()
    for profile in profiles:
        try:
            found.append(predict(profile))
        except OutOfReachError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return reduce(Estimate.between, found)
