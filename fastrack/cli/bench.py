"""``fastrack bench``: the paths to a device, measured side by side on this machine."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastrack.cli.console import new_table, print_json, size_of, stdout
from fastrack.cli.files import check_directory
from fastrack.cli.machine import read_cpu, read_memory, read_software
from fastrack.cli.options import Bits, Json
from fastrack.errors import FastrackError

if TYPE_CHECKING:
    from fastrack.figures import Figure
    from fastrack.measure import Row

__all__ = ["bench", "draw_rows", "keep_promises", "measure", "require", "show_figures", "show_rows"]

SIZES = (16.0, 64.0, 256.0)


def bench(
    *,
    size: Annotated[
        list[float] | None,
        typer.Option(
            metavar="MIB", min=1 / 1024, show_default="16, 64, 256", help="Size of a tensor in MiB; may be repeated."
        ),
    ] = None,
    bits: Annotated[Bits, typer.Option(help="Size of the AES keys.")] = Bits.AES_256,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds; figures are medians.")] = 9,
    picture: Annotated[Path | None, typer.Option(metavar="PATH", help="Save a bar chart here, say a .png.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the direct path against the bounce path and a plain copy. The machine should be idle.

    Without --size, also measure the figures that fastrack promises, next to what they are to reach.
    """
    if picture is not None:
        require("matplotlib")
        check_directory(picture)
    rows = measure(size or SIZES, int(bits), repeat)
    promises = [] if size else keep_promises(rows, repeat)
    if picture is not None:
        draw_rows(rows, picture)
    if as_json:
        print_json({"machine": _machine(), "bits": int(bits), "repeat": repeat, **_documents(rows, promises)})
        return
    console = stdout()
    show_rows(rows, console)
    if promises:
        console.print()
        show_figures(promises, console)
    if picture is not None:
        console.print(f"\nPicture: {picture}", soft_wrap=True)


def require(package: str) -> None:
    """Refuse to go on without a package of the extra `demo`.

    Raises
    ------
    FastrackError
        If it is not installed.
    """
    if package not in sys.modules and find_spec(package) is None:
        raise FastrackError(f"{package} is not installed: pip install 'fastrack[demo]'")


def measure(sizes: Sequence[float], bits: int, repeat: int) -> "list[Row]":
    """Measure every path at these sizes (MiB), with a word on a terminal's stderr about what goes on."""
    from fastrack.measure import path_table

    with _status() as say:
        return path_table(sizes, bits=bits, repeat=repeat, progress=say)


def keep_promises(rows: "Sequence[Row]", repeat: int) -> "list[Figure]":
    """Measure the figures that fastrack promises; those of paths are taken from `rows`."""
    from fastrack.figures import figures

    with _status() as say:
        return figures(rows, repeat=repeat, file_mib=max(row.size for row in rows) * 4 >> 20 or 1, progress=say)


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True, highlight=False, markup=False).status("measuring") as status:
        yield lambda what: status.update(f"measuring {what}")


def show_rows(rows: "Sequence[Row]", console: Console) -> None:
    """Print the figures as a table, by size."""
    table = new_table(
        "size", "path", "GB/s", "ms", "x bounce", "of copy", right=("size", "GB/s", "ms", "x bounce", "of copy")
    )
    for size, group in groupby(rows, key=lambda row: row.size):
        for place, row in enumerate(group):
            table.add_row(
                size_of(size) if place == 0 else "",
                row.path,
                f"{row.gbps:.2f}",
                f"{1000 * row.seconds:.2f}",
                "" if row.over_bounce is None else f"{row.over_bounce:.2f}",
                "" if row.of_copy is None else f"{100 * row.of_copy:.0f} %",
            )
        table.add_section()
    console.print(table)
    console.print("\nGB/s: 1e9 bytes of plaintext a second, median. x bounce: times as fast as the bounce path.")


def show_figures(figures: "Sequence[Figure]", console: Console) -> None:
    """Print the promised figures as a table."""
    table = new_table("figure", "measured", "to reach", "", right=("measured", "to reach"))
    for figure in figures:
        sign, verdict = "<=" if figure.at_most else ">=", "" if figure.is_met else "MISSED"
        table.add_row(
            figure.name, f"{figure.value:.2f} {figure.unit}", f"{sign} {figure.reach:g} {figure.unit}", verdict
        )
    console.print(table)


def draw_rows(rows: "Sequence[Row]", path: Path, losses: Sequence[float] = ()) -> None:
    """Save the figures as a bar chart: a group of bars a size, a colour a path. Losses, if any, are a curve beside it.

    Raises
    ------
    FastrackError
        If matplotlib is not installed, or cannot write such a file.
    """
    require("matplotlib")
    from matplotlib.figure import Figure  # its own canvas: no window, no global state

    sizes = list(dict.fromkeys(row.size for row in rows))
    paths = list(dict.fromkeys(row.path for row in rows))
    width = 0.8 / len(paths)
    bars_width = 2.0 + 3.2 * max(2, len(sizes))
    figure = Figure(figsize=(bars_width + 4 * bool(losses), 4.5), layout="constrained")
    if losses:
        beside, axes = figure.subplots(1, 2, width_ratios=[4, bars_width])
        _draw_losses(losses, beside)
    else:
        axes = figure.subplots()
    for place, name in enumerate(paths):
        here = [row for row in rows if row.path == name]
        left = [sizes.index(row.size) - 0.4 + width * (place + 0.5) for row in here]
        bars = axes.bar(left, [row.gbps for row in here], 0.9 * width, label=name)
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.set_xticks(range(len(sizes)), [size_of(size) for size in sizes])
    axes.set_ylabel("GB/s of plaintext")
    axes.set_title("Paths to the device cpu (median; higher is better)")
    figure.legend(loc="outside right upper", fontsize=8)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # a suffix it does not know
        raise FastrackError(f"{path}: {error}") from None


def _draw_losses(losses: Sequence[float], axes: Any) -> None:
    axes.semilogy(range(1, len(losses) + 1), losses)
    axes.set_xlabel("epoch")
    axes.set_title("Loss, on sealed and on plain data alike", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _documents(rows: "Sequence[Row]", figures: "Sequence[Figure]") -> dict[str, Any]:
    return {
        "rows": [row.as_dict() for row in rows],
        **({"promised": [figure.as_dict() for figure in figures]} if figures else {}),
    }


def _machine() -> dict[str, Any]:
    return {"software": read_software(), "cpu": asdict(read_cpu()), "memory": asdict(read_memory())}
