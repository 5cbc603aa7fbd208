"""``fastrack bench --toll``: what a model makes of published figures, beside the figures of papers."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from fastrack._bench import toll
from fastrack._cli.console import STDOUT, new_table
from fastrack._cli.measurements import narrow_console, show_paths, write_results
from fastrack._util.shown import format_size

if TYPE_CHECKING:
    from fastrack._bench.toll import Figure, TrainingToll, TransferToll

SIZES = (65_536, 602_112, 4_816_896, 38_535_168, 1 << 30)  # bytes; 1, 8 and 64 images of 224 x 224 in float32
ALL = "all"
NOTES = (
    """\
MODELLED, not measured: every time is a + b n for a message of n bytes, with published parameters. Of the bounce path
each byte passes all stages, one after the other. A path that is not the one a figure was to be given by is there to
show the range. The papers name no sizes: those of the figures are one image and a batch of 64.""",
    """\
training: a ring of 2 (n - 1) hops a bucket, beside a backward pass that produces gradients as fast as their sizes
share its time; slowdown: over plain hops with buckets of 25 MiB. The compute of an iteration is assumed, by the peak
of an H100.""",
    """\
fitted: two parameters were chosen so that two figures of the paper come out, which are not reproduced by that. Only how
the slowdown grows with the ranks is the model's own.""",
)


def bench_toll(
    name: str,
    sizes: Sequence[float] | None,
    ranks: Sequence[int] | None,
    caps: Sequence[float] | None,
    *,
    as_json: Path | None,
    quiet: bool,
) -> None:
    """Run the model, and write and print its results."""
    hops = [each for each in toll.load_data()["hops"] if each != toll.PLAIN]
    if name not in {ALL, *hops}:
        raise typer.BadParameter(f"expected {ALL}, or one of {', '.join(hops)}", param_hint="--toll")
    chosen = hops if name == ALL else [name]
    nbytes = [int(size * toll.MIB) for size in sizes] if sizes else list(SIZES)
    paths = toll.transfers(nbytes)
    trained = toll.trainings(list(toll.load_data()["models"]), chosen, ranks or toll.RANKS, caps or toll.CAPS)
    figures = [each for each in toll.figures() if name == ALL or each.by in {name, *(row.path for row in paths)}]
    settings = {"toll": name, "sizes": nbytes, "ranks": list(ranks or toll.RANKS), "caps_mib": list(caps or toll.CAPS)}
    notes = [" ".join(note.split()) for note in NOTES]
    write_results(as_json, "toll", [*paths, *trained, *figures], "cpu", settings, [*notes, *_sources()])
    if as_json == STDOUT or quiet:
        return
    console = narrow_console()
    show_transfers(paths, console)
    show_trainings(trained, console)
    show_figures(figures, console)
    for note in notes:
        console.print(note)
    console.print()
    for source in _sources():
        console.print(source)
    show_paths(console, JSON=as_json)


def show_transfers(rows: "Sequence[TransferToll]", console: Console) -> None:
    """Print a table with a line for each path, and what it costs over a plain copy at each size."""
    console.print("transfers to a GPU, modelled: cost over a plain copy\n", style="bold")
    sizes = list(dict.fromkeys(format_size(row.nbytes) for row in rows))
    table = new_table("path", *sizes, right=tuple(sizes))
    for path, group in groupby(rows, key=lambda row: row.path):
        table.add_row(path, *(f"{row.cost:.1f}" for row in group))
    console.print(table)
    console.print()


def show_trainings(rows: "Sequence[TrainingToll]", console: Console) -> None:
    """Print a table for each hop, with a line for each model, number of ranks and cap."""
    for hop, of_hop in groupby(sorted(rows, key=lambda row: row.hop), key=lambda row: row.hop):
        group = list(of_hop)
        console.print(f"training, modelled; hop: {hop} ({', '.join(group[0].kinds)})\n", style="bold")
        right = ("cap MiB", "buckets", "messages", "scatter ms", "gather ms", "step ms", "slowdown")
        table = new_table("ranks", *right, right=right)
        table.padding = (0, 0, 0, 1)
        for model, of_model in groupby(group, key=lambda row: row.model):
            table.add_row(model, style="bold")
            for row in of_model:
                halves = f"{1e3 * row.scatter_reduce:.1f}", f"{1e3 * row.all_gather:.1f}"
                counts = str(row.ranks), f"{row.cap_mib:g}", str(row.buckets), str(row.messages)
                table.add_row(*counts, *halves, f"{1e3 * row.seconds:.1f}", f"{row.slowdown:.2f}")
        console.print(table)
        console.print()


def show_figures(rows: "Sequence[Figure]", console: Console) -> None:
    """Print a table of published figures, and what each model gives for them."""
    console.print("figures of papers\n", style="bold")
    table = new_table("by", "published", "modelled", "factor off", "", right=("published", "modelled", "factor off"))
    for (name, source), group in groupby(rows, key=lambda row: (row.name, f"{row.source}, {row.date}")):
        rows_of = list(group)
        table.add_row(f"{name}; counts within {rows_of[0].within:g}", style="bold")
        for row in rows_of:
            cells = f"{row.published:g}", f"{row.modelled:.2f}", f"{row.off:.2f}", row.verdict
            table.add_row(row.by, *cells)
        table.add_row(source, style="dim")
    console.print(table)
    training = toll.Training.of("GPT-2 XL")
    for hop in dict.fromkeys(row.by for row in rows if row.published == 3.03):
        cap = toll.cap_for(training, toll.line("hops", hop), 4, 3.03)
        told = "no cap gives" if cap is None else f"buckets of about {cap} MiB give"
        console.print(f"GPT-2 XL on 4 GPUs, hop {hop}: {told} 3.03 or less.")
    console.print()


def _sources() -> list[str]:
    data = toll.load_data()
    return [
        f"{name}: {each['value']:g} {'' if each['unit'] == '1' else each['unit'] + ', '}{each['what']}; "
        + (f"{each['kind']}: {each['source']}, {each['date'].isoformat()}" if "source" in each else each["kind"])
        for name, each in data["parameters"].items()
    ]
