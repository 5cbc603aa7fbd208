"""``fastrack bench --toll``: what models make of published figures, beside the figures of papers."""

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from fastrack._cli.console import STDOUT, new_table
from fastrack._cli.measurements import narrow_console, show_paths, write_results
from fastrack._util.shown import format_size
from fastrack_bench import crossings, toll

if TYPE_CHECKING:
    from fastrack_bench.crossings import CallToll, KvToll, LoadToll, Report
    from fastrack_bench.toll import Figure, TrainingToll, TransferToll

    _Part = tuple[Sequence[Any], Callable[[Any, Console], None]]

SIZES = (65_536, 602_112, 4_816_896, 38_535_168, 1 << 30)  # bytes; 1, 8 and 64 images of 224 x 224 in float32
ALL = "all"
OTHERS = CALLS, KV, CONTEXTS, REPORTS = "calls", "kv", "contexts", "reports"  # besides the hops of ``tolls.toml``
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

CALL_NOTE = """\
MODELLED, not measured: a call costs the published price of each copy and launch, one after the other, and of its bytes;
a fill has the price of a launch, which is assumed, and the time of kernels is left out. stock: plain copies of what the
host holds unencrypted, one for each tensor. bounce: the host decrypts or encrypts on one core, beside the same copies.
direct: fastrack, with the counts of its test double; keys cross apart (before) or with the message (after). batch: of
two columns. 16 calls: none of them waits, and then one call waits for all."""
KV_NOTE = """\
MODELLED, not measured: 100 blocks of 2 MiB of 32 layers, priced as calls. pieces and one copy: vLLM's
swap_blocks_batch, of what the host holds unencrypted; whether a batch is charged for each of its 3,200 pieces or once
was not found. sealed: fastrack seals on the GPU, in slabs of 32 MiB, and only ciphertext crosses. All follow one
another."""
LOAD_NOTE = """\
MODELLED, not measured: that each context has a bridge of its own is assumed; together they are no faster than the link
is for a plain copy. Each slab is a copy and a launch. The number of small copies, which launch nothing, is the one that
gives the published time over one bridge."""

REPORT_NOTE = "Each line is as others published it, of their machine; nothing of it was measured or modelled here."


def bench_toll(
    name: str,
    sizes: Sequence[float] | None,
    ranks: Sequence[int] | None,
    caps: Sequence[float] | None,
    *,
    as_json: Path | None,
    quiet: bool,
) -> None:
    """Run the models, and write and print their results."""
    hops = [each for each in toll.load_data()["hops"] if each != toll.PLAIN]
    if name not in {ALL, *OTHERS, *hops}:
        raise typer.BadParameter(f"expected {ALL}, or one of {', '.join([*hops, *OTHERS])}", param_hint="--toll")
    given = [option for option, values in (("--size", sizes), ("--ranks", ranks), ("--bucket-cap-mb", caps)) if values]
    if name in OTHERS and given:
        raise typer.BadParameter(f"it does not go with --toll {name}; leave it out", param_hint=given[0])
    settings: dict[str, Any] = {"toll": name}
    parts, notes = [], []
    if name not in OTHERS:
        settings |= {"sizes": [int(size * toll.MIB) for size in sizes] if sizes else list(SIZES)}
        settings |= {"ranks": list(ranks or toll.RANKS), "caps_mib": list(caps or toll.CAPS)}
        parts, notes = _part_of_hops(name, hops if name == ALL else [name], settings), list(NOTES)
    for other, (model, show, note) in _OTHERS.items():
        if name in {ALL, other}:
            parts.append((model(), show))
            notes.append(note)
    notes = [" ".join(note.split()) for note in notes]
    sources = [] if name == REPORTS else _sources(crossings.parameters() if name in OTHERS else None)
    write_results(as_json, "toll", [row for rows, _ in parts for row in rows], "cpu", settings, [*notes, *sources])
    if as_json == STDOUT or quiet:
        return
    console = narrow_console()
    for rows, show in parts:
        show(rows, console)
    for note in notes:
        console.print(note)
    console.print()
    for source in sources:
        console.print(source)
    show_paths(console, JSON=as_json)


def _part_of_hops(name: str, hops: Sequence[str], settings: Mapping[str, Any]) -> "list[_Part]":
    """Return the rows of transfers, training and figures, each with the function that prints them."""
    paths = toll.transfers(settings["sizes"])
    trained = toll.trainings(list(toll.load_data()["models"]), hops, settings["ranks"], settings["caps_mib"])
    figures = [each for each in toll.figures() if name == ALL or each.by in {name, *(row.path for row in paths)}]
    return [(paths, show_transfers), (trained, show_trainings), (figures, show_figures)]


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
        table = new_table("ranks", *right, right=right, is_close=True)
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


def show_calls(rows: "Sequence[CallToll]", console: Console) -> None:
    """Print a table with a line for each way of each call, and from which size on the direct way is the quicker one."""
    bridges = _show_counts("calls in confidential mode, modelled: microseconds", rows, console)
    for way in (crossings.BEFORE, crossings.AFTER):
        sizes = [(bridge, crossings.break_even(bridge, way)) for bridge in bridges]
        told = [f"{b} {format_size(n) if n <= crossings.ONE_SLAB else 'more than 2 MiB'}" for b, n in sizes]
        done = "what this version does" if way == crossings.BUILT else "not what this version does"
        console.print(f"{way}, {done}, takes less than bounce from this size on: {', '.join(told)}")
    console.print()


def show_kv(rows: "Sequence[KvToll]", console: Console) -> None:
    """Print a table with a line for each way of a store and a restore of KV blocks."""
    _show_counts("KV blocks in confidential mode, modelled: microseconds", rows, console)


def _show_counts(title: str, rows: "Sequence[CallToll | KvToll]", console: Console) -> list[str]:
    """Print a table of counts and times, and return the bridges."""
    bridges = list(dict.fromkeys(row.bridge for row in rows))
    console.print(f"{title}\n", style="bold")
    right = ("in", "out", "launches", "fills", "KiB", *bridges)
    table = new_table("way", *right, right=right, is_close=True)
    for call, of_call in groupby(rows, key=lambda row: row.call):
        table.add_row(call, style="bold")
        group = list(of_call)
        for way in dict.fromkeys(row.way for row in group):
            of_way = [row for row in group if row.way == way]
            *counts, up, down = of_way[0].counts
            times = [f"{1e6 * row.seconds:.0f}" for row in of_way]
            table.add_row(way, *map(str, counts), f"{(up + down) / 1024:.0f}", *times)
    console.print(table)
    console.print()
    return bridges


def show_loads(rows: "Sequence[LoadToll]", console: Console) -> None:
    """Print a table with a line for each way of a load over each bridge, and a column for each number of contexts."""
    for name, of_load in groupby(rows, key=lambda row: row.load):
        load = toll.load_data()["loads"][name]
        console.print(f"{name}, {load['bytes'] / 1e9:.1f} GB, modelled: seconds by contexts\n", style="bold")
        right = ("copies", *map(str, crossings.CONTEXTS))
        table = new_table("bridge", "by", *right, right=right)
        for (bridge, way), of_way in groupby(of_load, key=lambda row: (row.bridge, row.way)):
            group = list(of_way)
            table.add_row(bridge, way, str(group[0].copies), *(f"{row.seconds:.1f}" for row in group))
        console.print(table)
        published = f"{load['seconds']:g} s, and {load['pooled']:g} s with a pool of contexts"
        console.print(f"\nPublished: {published}; {load['source']}, {load['date']}\n")


def show_reports(rows: "Sequence[Report]", console: Console) -> None:
    """Print a line for each figure of programs on confidential GPUs."""
    console.print("figures of programs on confidential GPUs\n", style="bold")
    for row in rows:
        console.print(str(row))
    console.print()


def _sources(names: Container[str] | None = None) -> list[str]:
    """Return a line for each parameter, or for each of these."""
    data = toll.load_data()["parameters"]
    return [
        f"{name}: {each['value']:g} {'' if each['unit'] == '1' else each['unit'] + ', '}{each['what']}; "
        + (f"{each['kind']}: {each['source']}, {each['date'].isoformat()}" if "source" in each else each["kind"])
        for name, each in data.items()
        if names is None or name in names
    ]


_OTHERS: "dict[str, tuple[Callable[[], Sequence[Any]], Callable[[Any, Console], None], str]]" = {
    CALLS: (crossings.call_tolls, show_calls, CALL_NOTE),
    KV: (crossings.kv_tolls, show_kv, KV_NOTE),
    CONTEXTS: (crossings.load_tolls, show_loads, LOAD_NOTE),
    REPORTS: (crossings.reports, show_reports, REPORT_NOTE),
}
