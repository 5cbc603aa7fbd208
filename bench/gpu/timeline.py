"""Time the copy and the opening of each slab of a transfer, by the device's clock."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from statistics import median

from bench.gpu.channels import channel_on
from bench.gpu.gpu import Skip, WrongResultError
from bench.gpu.host_data import noise
from bench.gpu.timing import Row, Times, wall
from fastrack import Key, seal
from fastrack._transfer.timeline import recording
from fastrack._transfer.trace_file import spans_of

_RUNS = 7


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds from the start of the first copy on, as pairs of start and end, a pair a slab."""

    size: int
    copies: tuple[tuple[float, float], ...]
    opens: tuple[tuple[float, float], ...]
    seconds: float  # of the whole call, by the host's clock
    fill: float  # the share of `seconds` for filling slabs on the host

    @property
    def overlap(self):
        """Return the share of the opening time with a copy at the same time."""
        pairs = product(self.opens, self.copies)
        both = sum(max(0.0, min(stop, end) - max(start, begin)) for (start, stop), (begin, end) in pairs)
        return both / _total(self.opens) if _total(self.opens) else 0.0

    @property
    def span(self):
        """Seconds from the first copy's start to the last opening's end."""
        return max(stop for _, stop in self.opens)

    def as_dict(self):
        slabs = [{"copy": copy, "open": opened} for copy, opened in zip(self.copies, self.opens, strict=True)]
        return {
            "size": self.size,
            "seconds": self.seconds,
            "span": self.span,
            "copying": _total(self.copies),
            "opening": _total(self.opens),
            "overlap": self.overlap,
            "fill": self.fill,
            "slabs": slabs,
        }


def _total(spans):
    return sum(stop - start for start, stop in spans)


def measure(gpu, plan, show):
    """A row of all runs' times. The run of the median time goes to `show`."""
    if gpu.driver.confidential:
        raise Skip("in confidential mode events have no true times")
    key = Key.generate(256)
    sealed, out = seal(noise(plan.timeline_size), key), gpu.array(plan.timeline_size)
    runs = []
    with channel_on(gpu.driver, key) as channel:
        for _ in range(_RUNS + 1):
            before = channel.stats
            with recording() as spans:
                seconds = wall(channel.to_device, sealed, out=out)
            after = channel.stats
            fill = (after.fill - before.fill) / max(after.seconds - before.seconds, 1e-9)
            runs.append(_timeline(spans_of(spans), plan.timeline_size, seconds, fill))
    runs = sorted(runs[1:], key=lambda run: run.seconds)
    chosen = runs[len(runs) // 2]
    for (_, copied), (opened, _) in zip(chosen.copies, chosen.opens, strict=True):
        if opened < copied - 1e-5:
            raise WrongResultError("a slab was opened before it was there")
    taken = [run.seconds for run in runs]
    share = median(run.overlap for run in runs)
    print(f"    {len(chosen.copies)} slabs; while {100 * share:.0f} % of the opening, something was being copied")
    show(chosen)
    yield Row("timeline", "to_device, sealed, with events", plan.timeline_size, Times(taken))


def _timeline(spans, size, seconds, fill):
    """Pick the device's work out of the recorded spans."""
    there = [span for span in spans if span.process != "host"]
    zero = min((span.start for span in there), default=0)
    copies, opens = (
        tuple(((span.start - zero) / 1e9, (span.stop - zero) / 1e9) for span in there if span.name == name)
        for name in ("copy", "open")
    )
    if not copies or len(copies) != len(opens):
        raise WrongResultError(f"{len(copies)} slabs were copied and {len(opens)} opened")
    return Timeline(size, copies, opens, seconds, fill)
