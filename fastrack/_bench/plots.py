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
    from fastrack._bench.runner import Measured

COLOURS = ("#8c2d19", "#d9773b", "#c9b458", "#2f6f8f", "#b5b5b5")  # from the bounce path to the plain copy


def check_picture(path: Path) -> None:
    """Raise an error if matplotlib is not installed, or does not support the suffix."""
    if "matplotlib" not in sys.modules and find_spec("matplotlib") is None:
        raise FastrackError("matplotlib is not installed: pip install 'fastrack-io[demo]'")
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
    """Write a figure to a file, in the format of its suffix; as SVG with its text as text, and without a date."""
    from matplotlib import rc_context

    form = path.suffix[1:].lower()
    with new_file(path) as file, rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastrack"}):
        content = io.BytesIO()
        figure.savefig(content, dpi=150, format=form, metadata={"Date": None} if form == "svg" else None)
        file.write(content.getbuffer())


def _fit(axes: Any, speeds: Sequence[float]) -> None:
    """Set ticks at 1, 2 and 5 times powers of ten, with room below the slowest bar and above the fastest."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_ylim(0.8 * min(speeds), 1.6 * max(speeds))
