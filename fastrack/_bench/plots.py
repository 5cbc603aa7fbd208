"""Charts of measurements, with matplotlib, which the extra `demo` installs."""

import io
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrack._util.atomic import new_file
from fastrack._util.shown import format_size
from fastrack.errors import FastrackError

if TYPE_CHECKING:
    from fastrack._bench.collectives import Collective
    from fastrack._bench.runner import Measured
    from fastrack._bench.visits import Visit
    from fastrack._bench.workloads import Workload

COLOURS = ("#8c2d19", "#d9773b", "#c9b458", "#2f6f8f", "#b5b5b5")  # from the bounce path to the plain copy
_OF_WAYS = {"bounce": COLOURS[0], "direct": COLOURS[3], "sealed": COLOURS[3], "plain": COLOURS[4]}


def require(package: str) -> None:
    """Raise an error if a package of the extra `demo` is not installed."""
    if package not in sys.modules and find_spec(package) is None:
        raise FastrackError(f"{package} is not installed: pip install 'fastrack-io[demo]'")


def check_picture(path: Path) -> None:
    """Raise an error if matplotlib is not installed, or does not support the suffix."""
    require("matplotlib")
    from matplotlib.figure import Figure

    if path.suffix[1:].lower() not in Figure().canvas.get_supported_filetypes():
        raise FastrackError(f"{path}: expected a suffix that matplotlib supports; name it .png, .svg or .pdf")


def draw_ablation(rows: "Sequence[Measured]", device: str, path: Path, losses: Sequence[float] = ()) -> None:
    """Save a bar chart of the speed of every step, on a logarithmic scale: one panel for each direction.

    Bars are grouped by size, and labelled with the speed relative to the bounce path. Losses are a curve below.
    `check_picture` tells whether the chart can be saved.
    """
    keys = map(attrgetter("direction", "size", "step"), rows)
    directions, sizes, steps = (list(dict.fromkeys(values)) for values in zip(*keys, strict=True))
    count = len(directions) + bool(losses)
    figure, panels = new_figure(3 + 2.2 * max(2, len(sizes)), 3.6 * count, count)
    for axes in panels[1 : len(directions)]:
        axes.sharey(panels[0])
    width = 0.84 / len(steps)
    for axes, direction in zip(panels, directions, strict=False):
        for number, step in enumerate(steps):
            here = [row for row in rows if (row.direction, row.step) == (direction, step)]
            x = [sizes.index(row.size) - 0.42 + width * (number + 0.5) for row in here]
            colour = COLOURS[number % len(COLOURS)]
            bars = axes.bar(x, [row.gbps for row in here], 0.92 * width, label=step, color=colour)
            axes.bar_label(bars, [f"{row.over_bounce:.1f}x" for row in here], fontsize=7, padding=1)
        axes.set_xticks(range(len(sizes)), [format_size(size) for size in sizes])
        axes.set_yscale("log")
        axes.set_ylabel("GB/s of plaintext")
        axes.set_title(direction, fontsize=10)
        axes.yaxis.grid(visible=True, which="major", linewidth=0.4)
    if losses:
        panels[-1].semilogy(range(1, len(losses) + 1), losses)
        panels[-1].set_xlabel("epoch")
        panels[-1].set_title("Loss, on sealed and on plain data alike", fontsize=10)
    _fit(panels[0], [row.gbps for row in rows])
    figure.suptitle(f"Steps to fastrack on {device} (median; label: speed relative to bounce)", fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(steps), fontsize=9)
    save_figure(figure, path)


def draw_collectives(rows: "Sequence[Collective]", path: Path) -> None:
    """Save a bar chart of times relative to gloo, a panel for each number of ranks, and of the steps of a collective.

    Steps are shown for the largest bucket, or the first model if there is none. `check_picture` tells whether the
    chart can be saved.
    """
    ranks = sorted({row.ranks for row in rows})
    subjects = list(dict.fromkeys((row.subject, row.size) for row in rows))
    ways = list(dict.fromkeys(row.way for row in sorted(rows, key=lambda row: row.way == "alone")))
    figure, panels = new_figure(3 + 1.5 * max(3, len(subjects)), 3 * (len(ranks) + 1), len(ranks) + 1)
    width = 0.84 / len(ways)
    for axes, count in zip(panels, ranks, strict=False):
        for number, way in enumerate(ways):
            here = [row for row in rows if (row.ranks, row.way) == (count, way)]
            x = [subjects.index((row.subject, row.size)) - 0.42 + width * (number + 0.5) for row in here]
            bars = axes.bar(x, [row.over_gloo for row in here], 0.92 * width, label=way, color=COLOURS[-1 - number])
            axes.bar_label(bars, [f"{row.over_gloo:.2f}" for row in here], fontsize=7, padding=1)
        axes.axhline(1, linewidth=0.6, color="black")
        axes.set_xticks(range(len(subjects)), [f"{subject}\n{format_size(size)}" for subject, size in subjects])
        axes.set_ylabel("time relative to gloo")
        axes.set_title(f"{count} ranks", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), fontsize=9)
    _draw_steps(panels[-1], rows)
    figure.suptitle("Collectives and iterations of training (median)", fontsize=11)
    save_figure(figure, path)


def draw_workloads(rows: "Sequence[Workload]", device: str, path: Path) -> None:
    """Save a bar chart of the steps of each case: compute, and transfers on top, over the step with a plain copy.

    `check_picture` tells whether the chart can be saved.
    """
    cases = list(dict.fromkeys((row.model, row.mode, row.batch) for row in rows))
    ways = list(dict.fromkeys(row.way for row in rows))
    figure, (axes,) = new_figure(2 + 1.1 * max(4, len(cases)), 4.5)
    width = 0.84 / len(ways)
    for number, way in enumerate(ways):
        here = [row for row in rows if row.way == way]
        x = [cases.index((row.model, row.mode, row.batch)) - 0.42 + width * (number + 0.5) for row in here]
        compute = [row.over_plain * (1 - row.share) for row in here]
        axes.bar(x, compute, 0.92 * width, color="#d9d9d9", label="compute" if number == 0 else None)
        colour = _OF_WAYS.get(way, COLOURS[2])
        bars = axes.bar(x, [row.over_plain * row.share for row in here], 0.92 * width, compute, color=colour, label=way)
        axes.bar_label(bars, [f"{row.over_plain:.2f}" for row in here], fontsize=6, padding=1)
    axes.axhline(1, linewidth=0.6, color="black")
    axes.set_xticks(range(len(cases)), [f"{model}\n{mode}\n{batch}" for model, mode, batch in cases], fontsize=7)
    axes.set_ylabel("time of a step over that with a plain copy")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(ways) + 1, fontsize=9)
    figure.suptitle(f"Workloads on {device}; compute {rows[0].of_compute}", fontsize=11)
    save_figure(figure, path)


def draw_visits(rows: "Sequence[Visit]", path: Path) -> None:
    """Save a bar chart of the seconds of each way by buffer. `check_picture` tells whether the chart can be saved."""
    buffers = list(dict.fromkeys(row.buffer for row in rows))
    figure, (axes,) = new_figure(2 + 1.3 * max(4, len(buffers)), 4)
    for number, way in enumerate(dict.fromkeys(row.way for row in rows)):
        here = [row for row in rows if row.way == way]
        x = [buffers.index(row.buffer) - 0.21 + 0.42 * number for row in here]
        bars = axes.bar(x, [row.seconds for row in here], 0.39, color=_OF_WAYS[way], label=way)
        axes.bar_label(bars, [f"{row.over_bounce:.2f}" for row in here], fontsize=7, padding=1)
    axes.set_xticks(range(len(buffers)), ["all" if size is None else f"{size / 1e6:g} MB" for size in buffers])
    axes.set_xlabel("data buffer")
    axes.set_ylabel("seconds (label: over bounce)")
    axes.legend(fontsize=9)
    figure.suptitle("All data of a holder through a buffer, on cpu (median)", fontsize=11)
    save_figure(figure, path)


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Any, Any]:
    """Return a figure of so many inches, and its panels, one below the other."""
    from matplotlib.figure import Figure  # its own canvas: no window, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file, in the format of its suffix."""
    with new_file(path) as file:
        content = io.BytesIO()
        figure.savefig(content, dpi=150, format=path.suffix[1:].lower())
        file.write(content.getbuffer())


def _draw_steps(axes: Any, rows: "Sequence[Collective]") -> None:
    """Stack the steps of the largest bucket, a bar for each way and number of ranks."""
    subject = rows[0].subject
    size = max(row.size for row in rows if row.subject == subject)
    shown = [row for row in rows if (row.subject, row.size) == (subject, size) and row.steps]
    base = [0.0] * len(shown)
    for number, step in enumerate(dict.fromkeys(step for row in shown for step in row.steps)):
        heights = [1000 * row.steps[step] for row in shown]
        axes.bar(range(len(shown)), heights, 0.6, base, label=step, color=f"C{number}")
        base = [below + height for below, height in zip(base, heights, strict=True)]
    axes.set_xticks(range(len(shown)), [f"{row.way}\n{row.ranks} ranks" for row in shown], fontsize=8)
    axes.set_ylabel("ms on rank 0")
    axes.set_title(f"Steps of {subject}, {format_size(size)}", fontsize=10)
    axes.legend(fontsize=7)


def _fit(axes: Any, speeds: Sequence[float]) -> None:
    """Set ticks at 1, 2 and 5 times powers of ten, with room below the slowest bar and above the fastest."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(0.8 * min(speeds), 1.6 * max(speeds))
