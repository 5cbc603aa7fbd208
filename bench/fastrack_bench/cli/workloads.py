"""``fastrack bench --workloads``: requests and training steps of known models, by each way that feeds them."""

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fastrack._cli.console import STDOUT, new_table, reporter
from fastrack._cli.measurements import narrow_console, show_paths, write_results
from fastrack.errors import FastrackError
from fastrack_bench.charts import draw_workloads

if TYPE_CHECKING:
    from fastrack_bench.workloads import Workload

NOTES = (
    """\
Inputs go to the device and results come back, both sealed for their owner: the scores of all classes, or of the next
token. A training step gets its batch; its loss is not moved. Each transfer ends before the compute begins, and that
before the result is moved. plain: a copy. bounce: the host opens what the owner sealed, and seals it anew for the
device. direct: fastrack.""",
    """\
A/A: the time of a step over the time of the same step, measured again in the same rounds. Ratios that differ less than
it does from 1 say nothing. saved: the part of the bounce path's overhead over a plain copy that direct saves.""",
)
REAL = """\
compute: measured on this device, once for a case, with random weights. On cpu it is so long that transfers hardly show:
no claim is made of these steps."""
MODEL = """\
compute: MODELLED, not measured, by operations and an assumed share of a GPU's published peak (of the ResNet a derived
one), or by an assumed 4 us for each kernel where that is longer, as in batches of 1 and 8; the transfers are those of
this machine. No published times by batch were found for it."""


def bench_workloads(
    compute: str | None, device: str, bits: int, repeat: int, *, picture: Path | None, as_json: Path | None, quiet: bool
) -> None:
    """Measure, and write and print the results."""
    from fastrack_bench import workloads

    timed: workloads.Compute
    if compute is not None:
        timed, kind = workloads.modelled_compute(compute), workloads.MODELLED
    else:
        for package, command in (("torch", "'fastrack-io[torch]'"), ("transformers", "transformers")):
            if find_spec(package) is None:
                raise FastrackError(f"{package} is not installed: pip install {command}; or add --compute h100")
        from fastrack_bench.compute import measured_compute

        timed, kind = measured_compute(device), workloads.MEASURED
    with reporter("measuring") as report:
        rows = workloads.measure_workloads(workloads.CASES, device, bits, repeat, timed, kind, progress=report)
    notes = [" ".join(note.split()) for note in (*NOTES, MODEL if compute else REAL)]
    settings = {"device": device, "bits": bits, "repeat": repeat, "compute": compute}
    write_results(as_json, "workloads", rows, device, settings, notes)
    if picture is not None:
        draw_workloads(rows, device, picture)
    if as_json == STDOUT or quiet:
        return
    console = narrow_console()
    show_workloads(rows, console)
    for note in notes:
        console.print(note)
    show_paths(console, Picture=picture, JSON=as_json)


def show_workloads(rows: "list[Workload]", console: Console) -> None:
    """Print a table with a line for each case and way."""
    right = ("transfers ms", "step ms", "share", "÷ plain", "A/A", "saved")
    table = new_table("", *right, right=right, is_close=True)
    for _, group in groupby(rows, key=lambda row: (row.model, row.mode, row.batch)):
        of_case = list(group)
        model, mode, batch = of_case[0].model, of_case[0].mode, of_case[0].batch
        table.add_row(f"{model}, {mode}, {batch}", style="bold")
        for row in of_case:
            times = f"{1e3 * row.transfer:.3f}", f"{1e3 * row.step:.2f}", f"{100 * row.share:.1f} %"
            saved = "" if row.removed is None else f"{100 * row.removed:.0f} %"
            table.add_row(row.way, *times, f"{row.over_plain:.3f}", f"{row.again:.3f}", saved)
    console.print(table)
    console.print()
