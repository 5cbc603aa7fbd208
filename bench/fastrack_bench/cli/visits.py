"""``fastrack bench --visits``: visits of a holder by buffer, beside the table of GPU Travelling."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fastrack._cli.console import STDOUT, new_table, reporter
from fastrack._cli.measurements import narrow_console, show_paths, write_results
from fastrack_bench.charts import draw_visits

if TYPE_CHECKING:
    from fastrack_bench.visits import Published, Visit

NOTES = (
    """\
A holder, another process, sends 600 MB of tokens over loopback, which go to cpu through a buffer of this size that is
wiped after each use; the next hand-over is asked for meanwhile. bounce: TLS 1.3, and then the bounce path: the host
seals what came for the device. sealed: the holder has sealed its data beforehand and sends them through plain TCP, and
fastrack opens them. Pieces have 4 MB, and those of bounce 2, as each is fastest; connections are open before.""",
    """\
A/A: the time over that of the same way, measured again in the same rounds. Ratios that differ less than it does from 1
say nothing.""",
    """\
shares: of the time that transfers take beside training, which is MODELLED: 1230 s for these data, inferred from the
paper's slides; and images for a ResNet-50 on an H100, 64 at a time, by assumed parameters.""",
    """\
paper: published, of other machines, and not measured here. model: 7.4 s for each buffer beside 1230 s, both inferred
from the slides, which a loopback cannot show.""",
)


def bench_visits(bits: int, repeat: int, *, picture: Path | None, as_json: Path | None, quiet: bool) -> None:
    """Measure, and write and print the results."""
    from fastrack_bench import visits
    from fastrack_bench.holder import Load

    with reporter("measuring") as report:
        load = Load(visits.TOTAL, visits.PIECE, bits)
        rows = visits.measure_visits(load, visits.BUFFERS, repeat, progress=report)
    paper = visits.published()
    notes = [" ".join(note.split()) for note in NOTES]
    settings = {"bits": bits, "repeat": repeat, "bytes": load.total, "piece": load.piece}
    write_results(as_json, "visits", [*rows, *paper], "cpu", settings, [*notes, visits.source()])
    if picture is not None:
        draw_visits(rows, picture)
    if as_json == STDOUT or quiet:
        return
    console = narrow_console()
    show_seconds(rows, console)
    show_shares(rows, paper, console)
    for note in (*notes, visits.source()):
        console.print(note)
    show_paths(console, Picture=picture, JSON=as_json)


def show_seconds(rows: "Sequence[Visit]", console: Console) -> None:
    """Print a table with a line for each buffer: seconds in both ways."""
    right = ("buffers", "bounce s", "sealed s", "÷ bounce", "A/A", "a buffer, ms")
    table = new_table("buffer", *right, right=right, is_close=True)
    for buffer, (bounce, sealed) in _by_buffer(rows):
        each = f"{1e3 * bounce.each:.1f}; {1e3 * sealed.each:.1f}"
        again = f"{bounce.again:.2f}; {sealed.again:.2f}"
        seconds = f"{bounce.seconds:.3f}", f"{sealed.seconds:.3f}", f"{sealed.over_bounce:.2f}"
        table.add_row(buffer, str(bounce.buffers), *seconds, again, each)
    console.print(table)
    console.print()


def show_shares(rows: "Sequence[Visit]", paper: "Sequence[Published]", console: Console) -> None:
    """Print a table of shares beside modelled training, and those of the paper."""
    console.print("shares of the time, %; training and model: modelled\n", style="bold")
    right = ("1230 s: bounce", "sealed", "images: bounce", "sealed", "paper", "model")
    table = new_table("buffer", *right, right=right, is_close=True)
    known = {row.buffer: row for row in paper if row.modelled is not None}
    for buffer, (bounce, sealed) in _by_buffer(rows):
        shares = [f"{100 * row.share:.3f}" for row in (bounce, sealed)]
        heavy = [f"{100 * row.share_heavy:.1f}" for row in (bounce, sealed)]
        row = known.get(bounce.buffer)
        cells = ("", "") if row is None else (f"{100 * row.share:.3f}", f"{100 * (row.modelled or 0):.3f}")
        table.add_row(buffer, *shares, *heavy, *cells)
    console.print(table)
    for row in paper:
        if row.modelled is None:
            console.print(f"The paper's own way, {row.way}: {100 * row.share:.2f} %.")
    console.print()


def _by_buffer(rows: "Sequence[Visit]") -> "list[tuple[str, list[Visit]]]":
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row.buffer)]
    return [(title(group[0].buffer), group) for group in groups]


def title(buffer: int | None) -> str:
    """Return how a table names a buffer."""
    return "uncapped" if buffer is None else f"{buffer / 1e6:g} MB"
