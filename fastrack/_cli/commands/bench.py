"""``fastrack bench``: measure the steps from the bounce path to fastrack."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fastrack._bench.plots import check_picture, draw_ablation
from fastrack._cli.console import STDOUT, new_table, reporter
from fastrack._cli.files import check_target
from fastrack._cli.measurements import narrow_console, show_paths, wide_console, write_results
from fastrack._cli.options import Bits
from fastrack._util.shown import format_size

if TYPE_CHECKING:
    from fastrack._bench.endpoints import Direction
    from fastrack._bench.runner import Measured

SIZES = (0.0625, 1.0, 16.0, 256.0, 1024.0)
_LARGEST = 2047  # MiB: a chain is one call of OpenSSL, which takes less than 2 GiB
Size = Annotated[
    list[float] | None,
    typer.Option(metavar="MIB", min=1 / 1024, max=_LARGEST, help="Size of a tensor in MiB; may be repeated."),
]
KeyBits = Annotated[Bits, typer.Option(help="Size of the AES keys.")]
Rounds = Annotated[
    int, typer.Option(metavar="N", min=1, help="Rounds of tensors above 16 MiB; smaller ones take more.")
]
Device = Annotated[str, typer.Option(metavar="NAME", help="The device: cpu, or cuda:N.")]
Picture = Annotated[Path | None, typer.Option(metavar="PATH", help="Save a bar chart here, such as a .png.")]
Timeline = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Save a trace of one transfer of each kind here, for Perfetto.")
]
Results = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write all results here as JSON; - is stdout.")
]
Wide = Annotated[bool, typer.Option("--wide", help="Print all columns, in lines of 130 characters.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table.")]


def bench(
    *,
    size: Size = None,
    bits: KeyBits = "256",
    repeat: Rounds = 9,
    device: Device = "cpu",
    picture: Picture = None,
    timeline: Timeline = None,
    as_json: Results = None,
    wide: Wide = False,
    quiet: Quiet = False,
) -> None:
    """Measure the steps from the bounce path to fastrack, in both directions. The machine should be idle."""
    from fastrack._bench.runner import trace_transfers
    from fastrack._bench.steps import notes
    from fastrack._devices import canonical

    device = canonical(device)
    check_targets(picture, timeline, as_json)
    rows = measure(size or SIZES, device=device, bits=int(bits), repeat=repeat)
    settings = {"device": device, "bits": int(bits), "repeat": repeat, "sizes_mib": list(size or SIZES)}
    write_results(as_json, "ablation", rows, device, settings, notes(device))
    if picture is not None:
        draw_ablation(rows, device, picture)
    if timeline is not None:
        trace_transfers(max(row.size for row in rows), timeline, device=device, bits=int(bits))
    if as_json == STDOUT or quiet:
        return
    console = wide_console() if wide else narrow_console()
    if wide:
        show_ablation(rows, device, console)
    else:
        show_speeds(rows, device, console)
        console.print("\nMore columns: --wide. All figures: --json.")
    show_paths(console, Picture=picture, Timeline=timeline, JSON=as_json)


def check_targets(picture: Path | None, timeline: Path | None, as_json: Path | None) -> None:
    """Refuse files that cannot be written, before the measurement takes minutes."""
    if picture is not None:
        check_picture(picture)
    for path in (picture, timeline, as_json):
        if path is not None and path != STDOUT:
            check_target(path, force=True)


def measure(
    sizes: Sequence[float],
    *,
    device: str,
    bits: int,
    repeat: int,
    directions: "Sequence[Direction]" = ("to_device", "to_host"),
) -> "list[Measured]":
    """Measure every step at these sizes (MiB), and show progress on a terminal's stderr."""
    from fastrack._bench.runner import ablate

    with reporter("measuring") as report:
        return ablate(sizes, directions=directions, device=device, bits=bits, repeat=repeat, progress=report)


_SPEEDS = {"step": 14, "time, ms": 8, "times bounce": 6, "of copy": 5}  # columns, and how many their words take
_FULL_WIDTH = 60  # columns of a table none of whose lines is wrapped
_FASTER = 1.005  # of the speed of a copy: more than 100 %, as shown
_BUSY = "more than 100 %: the machine did other work while it copied; measure again when it is idle"
_RATIOS = "time: median; times bounce: speed over bounce's; of copy: over a plain copy's"


def show_speeds(rows: "Sequence[Measured]", device: str, console: Console) -> None:
    """Print a table for each direction, with a line for each size and step, and what they mean below."""
    from fastrack._bench.steps import MEANINGS, notes

    for direction, of_direction in groupby(rows, key=lambda row: row.direction):
        if direction != rows[0].direction:
            console.print()
        if rows[0].direction != rows[-1].direction:
            console.print(f"{direction}, {device}\n", style="bold")
        table = new_table(is_close=True)
        for name, narrow in _SPEEDS.items():
            width = narrow if console.width < _FULL_WIDTH else None
            table.add_column(name, justify="left" if name == "step" else "right", width=width)
        for size, group in groupby(of_direction, key=lambda row: row.size):
            table.add_row(format_size(size), style="bold")
            for row in group:
                times = f"{row.over_bounce:.1f}", f"{100 * row.of_copy:.0f} %"
                table.add_row(row.step, _ms(row.seconds), *times)
        console.print(table)
    for name, meaning in MEANINGS.items():
        console.print(f"{name}: {meaning}")
    # On a GPU a model stands for two of the steps, which no table may leave out.
    for line in (_RATIOS, *_busy(rows), *(notes(device) if device != "cpu" else ())):
        console.print(line)


def _busy(rows: "Sequence[Measured]") -> list[str]:
    return [_BUSY] if any(row.of_copy >= _FASTER for row in rows) else []


def show_ablation(rows: "Sequence[Measured]", device: str, console: Console) -> None:
    """Print one table for each direction, with a line for each step and size, and notes below."""
    from fastrack._bench.steps import notes

    speeds = ("runs", "GB/s", "p50\nms", "p99\nms", "max\nms", "CPU\ns/GiB", "traffic")
    right = (*speeds, "x\nbounce", "x\nprevious", "of\ncopy", "cost")
    for direction, of_direction in groupby(rows, key=lambda row: row.direction):
        console.print(f"{direction}, {device}\n", style="bold")
        table = new_table("size", "step", *right, right=("size", *right))
        for size, group in groupby(of_direction, key=lambda row: row.size):
            for index, row in enumerate(group):
                table.add_row(
                    format_size(size) if index == 0 else "",
                    row.step,
                    str(row.runs),
                    f"{row.gbps:.2f}",
                    _ms(row.seconds),
                    "-" if row.p99 is None else _ms(row.p99),
                    _ms(row.max),
                    f"{row.cpu_per_gib:.3f}",
                    str(row.estimated_traffic),
                    f"{row.over_bounce:.2f}",
                    "" if row.over_previous is None else f"{row.over_previous:.2f}",
                    f"{100 * row.of_copy:.0f} %",
                    f"{row.cost:.2f}",
                )
            table.add_section()
        console.print(table, soft_wrap=False)
        for name, passes in {row.step: row.passes for row in rows if row.direction == direction}.items():
            console.print(f"  {name}: {', '.join(passes)}")
        console.print()
    for line in (_LEGEND, *notes(device)):
        console.print(line)


_LEGEND = """\
GB/s: 1e9 bytes of plaintext a second, at the median, which is p50. p99: "-" for fewer than 100 runs. CPU: seconds of
all threads of the host. Traffic: bytes of memory read and written for each byte of plaintext, ESTIMATED as two for
each pass listed, not measured. x bounce, x previous: speed relative to that step. Of copy: speed relative to the plain
copy. Cost: time relative to the plain copy.
"""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.1 else f"{1000 * seconds:.1f}"
