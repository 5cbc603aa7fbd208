"""``fastrack plan``: what transfers, epochs, checkpoints, collectives and loading will take, from measurements."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fastrack._cli.console import print_json, reporter
from fastrack._cli.errors import handle_errors
from fastrack._cli.files import check_target
from fastrack._cli.machine import read_cpu
from fastrack._cli.measurements import narrow_console, show_paths, write_results
from fastrack._cli.options import Force, Json
from fastrack._cli.program import Program
from fastrack_bench.cli.plan_options import (
    Compute,
    Dtype,
    Elements,
    Figures,
    Overlap,
    Picture,
    Profiles,
    Size,
    Threads,
    Trace,
    bytes_of,
    nbytes_of,
    parse_size,
    seconds_of,
    sizes_of,
)
from fastrack_bench.cli.plan_tables import LEGEND, show_plan, show_rows, show_schedules, show_summaries

if TYPE_CHECKING:
    from fastrack_bench.prediction.jobs import Plan, Schedule
    from fastrack_bench.prediction.profiles import Row
    from fastrack_bench.prediction.sources import Source
    from fastrack_bench.prediction.traces import Observed

_NOTES = (
    """\
A run is one call, timed; runs of a point are spread over rounds of all sizes. save syncs the file to the disk. load
reads a file of one tensor from the page cache; load, from disk reads it after the kernel was asked to forget it.""",
    """\
Rows are of a file in the page cache, and each batch has others. Ranks of collectives are processes of this machine, by
gloo on loopback.""",
)

_NO_DISK = """\
load, from disk was not measured: the files were in memory (tmpfs), or this system forgets no file on request. Name a
folder on a disk: --directory."""

app = typer.Typer(
    cls=Program, add_completion=False, help="Predict what transfers, epochs, checkpoints and loading will take."
)


@app.command()
@handle_errors
def measure(
    target: Annotated[Path, typer.Argument(metavar="JSON", help="The file to write.")],
    *,
    largest: Annotated[str, typer.Option(metavar="SIZE", help="The largest message.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=3, max=1000, metavar="N", help="Rounds over all sizes.")] = 7,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, max=16, metavar="N", help="Ranks of collectives; 2; may be repeated.")
    ] = None,
    no_collectives: Annotated[bool, typer.Option("--no-collectives", help="Leave collectives out.")] = False,
    directory: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to put files meanwhile.")] = None,
    force: Force = False,
) -> None:
    """Measure the stages that the others predict from. It takes three minutes; the machine should be idle."""
    from fastrack_bench.prediction import gather

    most = parse_size(largest, "--largest")
    check_target(target, force=force)
    chosen = () if no_collectives else tuple(dict.fromkeys(ranks or gather.RANKS))
    with tempfile.TemporaryDirectory(dir=directory) as folder, reporter("measuring") as report:
        rows = gather.measure_stages(Path(folder), largest=most, rounds=rounds, ranks=chosen, progress=report)
    notes = [" ".join(note.split()) for note in (*_NOTES, *(() if _has_disk(rows) else (_NO_DISK,)))]
    settings = {"device": "cpu", "largest": most, "rounds": rounds, "ranks": list(chosen)}
    write_results(target, "plan", rows, "cpu", settings, notes)
    console = narrow_console()
    show_rows(rows, console)
    if not _has_disk(rows):
        console.print(notes[-1])
    show_paths(console, Profile=target)


def _has_disk(rows: "Sequence[Row]") -> bool:
    from fastrack_bench.prediction.profiles import LOAD_COLD

    return any(row.stage.name == LOAD_COLD for row in rows)


@app.command()
@handle_errors
def transfer(
    *,
    profile: Profiles = None,
    published: Figures = None,
    size: Size = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    count: Annotated[int, typer.Option(min=1, max=1_000_000_000, metavar="N", help="Messages.")] = 1,
    stage: Annotated[str, typer.Option(metavar="STAGE", help="A stage that `plan measure` lists.")] = "to_device",
    threads: Threads = None,
    trace: Trace = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Predict messages of one size, one after the other."""
    from fastrack_bench.prediction.jobs import plan_transfer

    nbytes = bytes_of(size, elements, dtype)
    observed = None if trace is None else _observed(trace, stage)

    def predict(source: "Source") -> "Plan":
        return plan_transfer(source, stage, nbytes, _threads(source, stage, threads), count=count, observed=observed)

    _predict(predict, profile, published, picture, as_json=as_json)


@app.command()
@handle_errors
def epoch(
    *,
    profile: Profiles = None,
    published: Figures = None,
    samples: Annotated[int, typer.Option(min=1, max=10**15, metavar="N", help="Samples of the dataset.")],
    row: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a sample, such as 602112 or 2KiB.")],
    batch: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Samples of a batch.")],
    pattern: Annotated[Literal["random", "contiguous"], typer.Option(help="How samples are chosen.")] = "random",
    compute: Compute = 0.0,
    overlap: Overlap = None,
    without_loader: Annotated[
        bool, typer.Option("--without-loader", help="Rows are indexed, and do not come from a DataLoader.")
    ] = False,
    threads: Threads = None,
    trace: Trace = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Predict an epoch of sealed samples, with the compute of each step."""
    from fastrack_bench.prediction.jobs import Epoch, plan_epoch
    from fastrack_bench.prediction.profiles import LOADER

    if overlap is not None and trace is not None:
        raise typer.BadParameter("it goes without --trace, which shows it; leave one out", param_hint="--overlap")
    if trace is not None:
        overlap = _overlap(trace, compute)
    nbytes, indexed = parse_size(row, "--row"), f"{pattern} rows"

    def predict(source: "Source") -> "Plan":
        by_loader = f"{indexed}{LOADER}"
        name = indexed if without_loader or not source.threads(by_loader) else by_loader
        count = _threads(source, name, threads)
        return plan_epoch(source, Epoch(samples, nbytes, batch, compute, name, count, overlap))

    _predict(predict, profile, published, picture, as_json=as_json)


@app.command()
@handle_errors
def checkpoint(
    *,
    profile: Profiles = None,
    size: Size = None,
    elements: Elements = None,
    dtype: Dtype = "float32",
    mean_between: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="The mean time between revocations: how often to save.")
    ] = None,
    restart: Annotated[str, typer.Option(metavar="PERIOD", help="From a revocation until the state is loaded.")] = "1m",
    notice: Annotated[
        str | None, typer.Option(metavar="PERIOD", help="From the notice of a revocation to its end.")
    ] = None,
    threads: Threads = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Predict a checkpoint, and tell how often to save on machines that are taken away."""
    from fastrack_bench.prediction.jobs import plan_by_each, plan_checkpoint, schedules

    nbytes = bytes_of(size, elements, dtype)
    mean, wait = (seconds_of(text, name) for text, name in ((mean_between, "--mean-between"), (restart, "--restart")))
    within = seconds_of(notice, "--notice")
    plans: list[Plan] = []
    found: list[list[Schedule]] = []
    sources = _sources(profile, None, picture)
    for source in sources:
        count = _threads(source, "save", threads)
        predict = partial(plan_checkpoint, size=nbytes, threads=count, notice=within)
        plans.append(plan_by_each(source, predict))
        if mean is not None:
            found.append(schedules(source, nbytes, count, mean, wait or 0.0))
    _tell(plans, sources, picture, as_json=as_json, schedules=found)


@app.command()
@handle_errors
def collective(
    *,
    profile: Profiles = None,
    published: Figures = None,
    size: Size = None,
    elements: Elements = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="GPT-2 small, medium, large or XL.")] = None,
    dtype: Dtype = "float32",
    ranks: Annotated[int, typer.Option(min=2, max=100_000, metavar="N", help="Ranks.")] = 2,
    bucket_cap: Annotated[
        float, typer.Option("--bucket-cap-mb", min=0.001, max=1e6, metavar="MIB", help="The size of DDP's buckets.")
    ] = 25.0,
    way: Annotated[str, typer.Option(metavar="WAY", help="sealed, plain, naive or gloo.")] = "sealed",
    compute: Compute = 0.0,
    overlap: Overlap = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Predict the all-reduce of gradients in buckets, beside a backward pass of --compute seconds."""
    from fastrack_bench import toll
    from fastrack_bench.prediction.jobs import plan_collective

    if model is None:
        sizes = [bytes_of(size, elements, dtype)]
    else:
        known = list(toll.load_data()["models"])
        if model not in known:
            raise typer.BadParameter(f"expected one of {', '.join(known)}", param_hint="--model")
        sizes = [nbytes_of(count, dtype) for count in toll.Training.of(model).gradients]

    def predict(source: "Source") -> "Plan":
        return plan_collective(source, sizes, way, ranks, bucket_cap, compute=compute, overlap=overlap)

    _predict(predict, profile, published, picture, as_json=as_json)


@app.command()
@handle_errors
def load(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A .safetensors file, or a folder of them.")
    ] = None,
    *,
    profile: Profiles = None,
    published: Figures = None,
    size: Size = None,
    elements: Elements = None,
    dtype: Dtype = "bfloat16",
    tensors: Annotated[
        int | None, typer.Option(min=1, max=10**9, metavar="N", help="Tensors of all files; as MODEL has, or 1.")
    ] = None,
    cached: Annotated[bool, typer.Option("--cached", help="The files are in the page cache.")] = False,
    threads: Threads = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Predict loading a model to the device: a file or a folder, or so many bytes in one file."""
    from fastrack_bench.prediction.jobs import plan_load

    if model is not None and (size is not None or elements is not None):
        raise typer.BadParameter("it goes without MODEL, whose bytes are known; leave one out", param_hint="--size")
    sizes, counted = ([bytes_of(size, elements, dtype)], 1) if model is None else sizes_of(model)
    count = tensors or counted

    def predict(source: "Source") -> "Plan":
        return plan_load(source, sizes, _threads(source, "load", threads), is_cold=not cached, tensors=count)

    _predict(predict, profile, published, picture, as_json=as_json)


@app.command()
@handle_errors
def validate(
    profiles: Annotated[list[Path], typer.Argument(metavar="JSON...", help="Profiles, one a machine.")],
    *,
    later: Annotated[
        Path | None, typer.Option(metavar="JSON", help="A later profile of the first machine, to predict as well.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Leave out sizes that were measured, predict them, and print how far off that is."""
    from fastrack_bench.prediction.profiles import read_profile, read_profiles
    from fastrack_bench.prediction.validation import leave_out, leave_out_rows, predict_later, reach_past

    read = read_profiles(profiles)
    groups = {}
    for profile in read:
        by = f"{profile.source}: {profile.machine}"
        groups[f"{by}; left out"] = leave_out(profile)
        groups[f"{by}; of every second size, left out"] = leave_out(profile, every=2)
        groups[f"{by}; four times past what is used"] = reach_past(profile)
        groups[f"{by}; rows, all of one size left out"] = leave_out_rows(profile)
    if later is not None:
        groups[f"{later.name}, predicted from {read[0].source}"] = predict_later(read[0], read_profile(later))
    found = {title: list(trials.summaries()) for title, trials in groups.items() if trials.trials or trials.refused}
    if as_json:
        print_json(validation={title: [asdict(each) for each in summaries] for title, summaries in found.items()})
        return
    console = narrow_console()
    for title, summaries in found.items():
        show_summaries(title, summaries, console)
    console.print(" ".join(_VALIDATION.split()))


_VALIDATION = """\
sizes: how many were left out. gap: the largest factor between the neighbours that were used. error, bytes/bw, noise:
median; 90th percentile, of predictions, of bytes over the bandwidth of the largest size, and of one half of the runs as
a prediction of the other. covers: runs; lower quartiles, in the 90 % interval, made without the size. width: its upper
end over its lower one."""


def _predict(
    predict: "Callable[[Source], Plan]",
    profiles: Sequence[Path] | None,
    published: Sequence[str] | None,
    picture: Path | None,
    *,
    as_json: bool,
) -> None:
    """Predict a job by each machine, and print the plans."""
    from fastrack_bench.prediction.jobs import plan_by_each

    sources = _sources(profiles, published, picture)
    _tell([plan_by_each(source, predict) for source in sources], sources, picture, as_json=as_json)


def _observed(path: Path, operation: str) -> "Observed":
    from fastrack_bench.prediction.traces import read_trace

    found = read_trace(path)
    if operation not in found:
        raise typer.BadParameter(f"expected a trace with {operation}; it has {', '.join(found)}", param_hint="--trace")
    return found[operation]


def _overlap(trace: Path, compute: float) -> float | None:
    overlap = _observed(trace, "to_device").overlap_with(compute)
    if overlap is None and compute:
        raise typer.BadParameter(
            "expected a trace of steps with one to_device each, by one thread, at an even pace no quicker than "
            "--compute; this one does not tell what is hidden. Give --overlap in its place",
            param_hint="--trace",
        )
    return overlap


def _sources(profiles: Sequence[Path] | None, published: Sequence[str] | None, picture: Path | None) -> "list[Source]":
    """Return the machines to plan for: of the profiles first, then by published figures."""
    from fastrack._bench.plots import check_picture
    from fastrack_bench.prediction.profiles import read_profiles
    from fastrack_bench.prediction.sources import Published, by_machine

    if picture is not None:
        if not profiles:
            raise typer.BadParameter("it goes with --profile, whose points it shows", param_hint="--picture")
        check_picture(picture)
        check_target(picture, force=True)
    if not profiles and not published:
        raise typer.BadParameter("expected a file of `fastrack plan measure`, or --published", param_hint="--profile")
    found: list[Source] = [*by_machine(read_profiles(profiles or ()))]
    return [*found, Published.of(published)] if published else found


def _threads(source: "Source", stage: str, asked: int | None) -> int:
    """Return the threads that were asked for, or the most of those that were measured, 0 if none are known."""
    known = source.threads(stage)
    return (asked or max(known)) if known else 0


def _tell(
    plans: "Sequence[Plan]",
    sources: "Sequence[Source]",
    picture: Path | None,
    *,
    as_json: bool,
    schedules: "Sequence[Sequence[Schedule]]" = (),
) -> None:
    """Print plans, or one document."""
    from fastrack_bench.prediction.picture import draw_plan
    from fastrack_bench.prediction.sources import Measured

    read = [profile for source in sources if isinstance(source, Measured) for profile in source.profiles]
    cpu = read_cpu()
    notes = [
        f"{profile.source} is of another machine: {profile.machine.cpu}, {profile.machine.threads} threads; this one "
        f"is {cpu.model}, {cpu.threads} threads"
        for profile in read
        if (profile.machine.cpu, profile.machine.threads) != (cpu.model, cpu.threads)
    ]
    if picture is not None:
        draw_plan(read, plans, picture)
    if as_json:
        documents = [plan.as_dict() for plan in plans]
        for document, found in zip(documents, schedules, strict=False):
            document["schedules"] = [asdict(each) for each in found]
        print_json(plans=documents, notes=notes)
        return
    console = narrow_console()
    for index, plan in enumerate(plans):
        show_plan(plan, console)
        if schedules:
            show_schedules(schedules[index], console)
        console.print()
    for note in (*notes, *([LEGEND] if read else [])):
        console.print(note)
    show_paths(console, Picture=picture)
