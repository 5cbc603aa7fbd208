"""Charts of collectives, workloads and visits, with matplotlib, which the extra `demo` of fastrack-io installs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrack._bench.plots import COLOURS, new_figure, save_figure
from fastrack._util.shown import format_size

if TYPE_CHECKING:
    from fastrack_bench.collectives import Collective
    from fastrack_bench.visits import Visit
    from fastrack_bench.workloads import Workload

_OF_WAYS = {"bounce": COLOURS[0], "direct": COLOURS[3], "sealed": COLOURS[3], "plain": COLOURS[4]}


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
