"""``fastrack bench --collectives``: measure sealed collectives and training with them, next to plain ones."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fastrack._cli.console import STDOUT, new_table, reporter
from fastrack._cli.measurements import narrow_console, show_paths, wide_console, write_results
from fastrack._util.shown import format_size
from fastrack.errors import FastrackError
from fastrack_bench.charts import draw_collectives

if TYPE_CHECKING:
    from fastrack_bench.collectives import Collective

RANKS = (2, 3, 4)
SIZES = (1.0, 5.0, 25.0, 100.0)

_OF_STEPS = """\
Steps are of rank 0. wait: for messages of other ranks. drain: until all was sent. confirm: the ranks tell each other
that all was authentic."""
NOTES = (
    """\
Ranks are processes of this machine that share its processors and talk by gloo on loopback. A run takes as long as on
its slowest rank; the median of the runs is given.""",
    """\
gloo: all_reduce of torch.distributed, unencrypted, as DistributedDataParallel calls it. plain: fastrack's algorithm and
transport, with a copy in place of the cipher. naive: a ring that decrypts, adds and encrypts at each of its 2 (n - 1)
hops, by OpenSSL, on the same transport. sealed: fastrack. alone: an iteration without any collective.""",
    """\
An iteration is a forward and a backward pass and a step of SGD, on one thread for each rank; the size is that of all
gradients. Collectives run beside the backward pass, so that their steps may take longer than they cost.""",
    _OF_STEPS,
    """\
The paper on data parallel training in GPU TEEs (arXiv 2501.11771), where every hop of the ring encrypts: an iteration
on 4 GPUs takes 8.68 times as long on average, 41.6 times for GPT-2 XL, and 3.03 times with large buckets. Comparable:
the order of the ways, and whether it gets worse with more ranks. Not comparable: the factors. Here processors compute,
no bus and no bounce buffer lies between the ranks, and a processor that trains slowly hides more of the communication
than a GPU does.""",
)


def bench_collectives(
    ranks: Sequence[int] | None,
    sizes: Sequence[float] | None,
    *,
    bits: int,
    repeat: int,
    picture: Path | None,
    as_json: Path | None,
    wide: bool,
    quiet: bool,
) -> None:
    """Measure, and write and print the results."""
    if find_spec("torch") is None:
        raise FastrackError("torch is not installed: pip install 'fastrack-io[torch]'")
    from fastrack_bench import models
    from fastrack_bench.collectives import measure_collectives

    ranks, sizes = list(ranks or RANKS), list(sizes or SIZES)
    with reporter("measuring") as report:
        rows = measure_collectives(ranks, sizes, bits=bits, repeat=repeat, specs=models.SPECS, progress=report)
    settings = {"bits": bits, "repeat": repeat, "ranks": ranks, "sizes_mib": sizes}
    write_results(as_json, "collectives", rows, "cpu", settings, [" ".join(note.split()) for note in NOTES])
    if picture is not None:
        draw_collectives(rows, picture)
    if as_json == STDOUT or quiet:
        return
    console = wide_console() if wide else narrow_console()
    if wide:
        show_collectives(rows, console)
    else:
        show_times(rows, console)
    show_paths(console, Picture=picture, JSON=as_json)


def show_times(rows: "Sequence[Collective]", console: Console) -> None:
    """Print a table for each number of ranks with only the times, and notes below."""
    for ranks, of_ranks in groupby(rows, key=lambda row: row.ranks):
        console.print(f"{ranks} ranks\n", style="bold")
        table = new_table("way", "ms", "÷ gloo", right=("ms", "÷ gloo"))
        for (subject, size), group in groupby(of_ranks, key=lambda row: (row.subject, row.size)):
            table.add_row(f"{subject}, {format_size(size)}", style="bold")
            for row in group:
                table.add_row(row.way, f"{1000 * row.seconds:.1f}", f"{row.over_gloo:.2f}")
        console.print(table)
        console.print()
    for note in NOTES:
        if note is not _OF_STEPS:
            console.print(" ".join(note.split()))


def show_collectives(rows: "Sequence[Collective]", console: Console) -> None:
    """Print a table for each number of ranks, with a line for each way, and notes below."""
    from fastrack_bench.collectives import STEPS

    right = ("size", "runs", "ms", "÷ gloo", *STEPS)
    for ranks, of_ranks in groupby(rows, key=lambda row: row.ranks):
        console.print(f"{ranks} ranks\n", style="bold")
        table = new_table("", "size", "way", *right[1:], right=right)
        for (subject, size), group in groupby(of_ranks, key=lambda row: (row.subject, row.size)):
            for index, row in enumerate(group):
                table.add_row(
                    *((subject, format_size(size)) if index == 0 else ("", "")),
                    row.way,
                    str(row.runs),
                    f"{1000 * row.seconds:.1f}",
                    f"{row.over_gloo:.2f}",
                    *(f"{1000 * row.steps[step]:.1f}" if step in row.steps else "" for step in STEPS),
                )
            table.add_section()
        console.print(table, soft_wrap=False)
        console.print()
    for note in NOTES:
        console.print(note)
