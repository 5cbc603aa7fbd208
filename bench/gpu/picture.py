"""The figures as a picture: the timeline, and the paths by size."""

from bench.gpu.plan import size_of
from bench.gpu.transfers import BACK, BOUNCE, LOCKED, PAGEABLE, PARALLEL_BOUNCE, PLAIN, SEALED

_PATHS = (LOCKED, PAGEABLE, SEALED, PLAIN, BACK, PARALLEL_BOUNCE, BOUNCE)


def draw(rows, timeline, path):
    """Save it, without absent measurements."""
    from matplotlib.figure import Figure  # its own canvas: no window, no global state

    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 2))
    _draw_timeline(above, timeline)
    _draw_paths(below, [row for row in rows if row.step == "transfers"])
    figure.savefig(path, dpi=150)


def _draw_timeline(axes, timeline):
    if timeline is None:
        axes.set_axis_off()
        return
    for height, spans in ((1, timeline.copies), (0, timeline.opens)):
        for number, (start, stop) in enumerate(spans):
            begin, width = 1e3 * start, 1e3 * (stop - start)
            axes.barh(height, width, left=begin, height=0.8, color=("#3b6ea5", "#a5c4e4")[number % 2])
    axes.set_yticks([0, 1], ["open", "copy"])
    axes.set_xlabel("ms")
    axes.set_title(
        f"to_device(sealed), {size_of(timeline.size)}: each slab is copied, then opened while the next is copied "
        f"({100 * timeline.overlap:.0f} % of the opening)"
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_paths(axes, rows):
    sizes = sorted({row.size for row in rows})
    for name in _PATHS:
        mine = {row.size: row.gbps for row in rows if row.path == name}
        if mine:
            axes.plot([sizes.index(size) for size in mine], list(mine.values()), marker="o", label=name)
    axes.set_xticks(range(len(sizes)), [size_of(size) for size in sizes])
    axes.set_ylabel("GB/s of plaintext")
    axes.set_title("Paths to the device and back (median; higher is better)")
    if rows:
        axes.legend(fontsize=8)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
