"""``fastrack bench`` with what is measured, or modelled, in place of its paths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.commands import bench as paths
from fastrack._cli.errors import handle_errors

app = typer.Typer(add_completion=False)


@app.command()
@handle_errors
def bench(
    *,
    size: paths.Size = None,
    bits: paths.KeyBits = "256",
    repeat: paths.Rounds = 9,
    collectives: Annotated[
        bool, typer.Option("--collectives", help="Measure sealed collectives and training in their place.")
    ] = False,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", min=2, max=16, help="With --collectives or --toll, the number of ranks; may be repeated."
        ),
    ] = None,
    toll: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model what confidential GPUs charge instead: all, exchange, set-up, host, fitted, calls, kv, contexts"
            " or reports.",
        ),
    ] = None,
    workloads: Annotated[
        bool, typer.Option("--workloads", help="Measure requests and training steps of known models in their place.")
    ] = False,
    compute: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --workloads, model the compute as that of a GPU: h100."),
    ] = None,
    visits: Annotated[
        bool, typer.Option("--visits", help="Measure all data of a holder through buffers of several sizes instead.")
    ] = False,
    bucket_cap: Annotated[
        list[float] | None,
        typer.Option(
            "--bucket-cap-mb",
            metavar="MIB",
            min=0.001,
            help="With --toll, the size of DDP's buckets; 25 is its default, whose first has 1 MiB; may be repeated.",
        ),
    ] = None,
    device: paths.Device = "cpu",
    picture: paths.Picture = None,
    timeline: paths.Timeline = None,
    as_json: paths.Results = None,
    wide: paths.Wide = False,
    quiet: paths.Quiet = False,
) -> None:
    """Measure the steps from the bounce path to fastrack, in both directions. The machine should be idle."""
    from fastrack._devices import canonical

    device = canonical(device)
    _check_options(collectives or toll is not None, ranks, device, timeline)
    _check_toll(toll, bucket_cap, collectives, picture)
    _check_workloads(workloads, compute, size, timeline, collectives or toll is not None)
    _check_visits(visits, device, size, timeline, workloads or collectives or toll is not None)
    paths.check_targets(picture, timeline, as_json)
    if visits:
        from fastrack_bench.cli.visits import bench_visits

        bench_visits(int(bits), repeat, picture=picture, as_json=as_json, quiet=quiet)
        return
    if workloads:
        from fastrack_bench.cli.workloads import bench_workloads

        bench_workloads(compute, device, int(bits), repeat, picture=picture, as_json=as_json, quiet=quiet)
        return
    if toll is not None:
        from fastrack_bench.cli.tolls import bench_toll

        bench_toll(toll, size, ranks, bucket_cap, as_json=as_json, quiet=quiet)
        return
    if collectives:
        from fastrack_bench.cli.collectives import bench_collectives

        shown = {"wide": wide, "quiet": quiet}
        bench_collectives(ranks, size, bits=int(bits), repeat=repeat, picture=picture, as_json=as_json, **shown)
        return
    # As in `--picture --toll`, where the name of an option is a value.
    files = {"picture": picture, "timeline": timeline, "as_json": as_json}
    paths.bench(size=size, bits=bits, repeat=repeat, device=device, wide=wide, quiet=quiet, **files)


def _check_options(is_other: bool, ranks: Sequence[int] | None, device: str, timeline: Path | None) -> None:
    """Refuse options that do not go with each other. `is_other`: something else than transfers is measured."""
    if ranks and not is_other:
        raise typer.BadParameter("it goes with --collectives or --toll; add one", param_hint="--ranks")
    if is_other and (device != "cpu" or timeline is not None):
        hint = "--timeline" if device == "cpu" else "--device"
        raise typer.BadParameter("it does not go with --collectives or --toll; leave one out", param_hint=hint)


def _check_toll(toll: str | None, caps: Sequence[float] | None, collectives: bool, picture: Path | None) -> None:
    if toll is None and caps:
        raise typer.BadParameter("it goes with --toll; add that", param_hint="--bucket-cap-mb")
    if toll is not None and (collectives or picture is not None):
        hint = "--collectives" if collectives else "--picture"
        raise typer.BadParameter("it does not go with --toll; leave one of them out", param_hint=hint)


def _check_workloads(
    workloads: bool, compute: str | None, sizes: Sequence[float] | None, timeline: Path | None, is_other: bool
) -> None:
    if compute is not None and not workloads:
        raise typer.BadParameter("it goes with --workloads; add that", param_hint="--compute")
    if workloads and (is_other or sizes or timeline is not None):
        hint = "--size" if sizes else "--timeline" if timeline is not None else "--collectives or --toll"
        raise typer.BadParameter("it does not go with --workloads; leave one of them out", param_hint=hint)


def _check_visits(
    visits: bool, device: str, sizes: Sequence[float] | None, timeline: Path | None, is_other: bool
) -> None:
    if visits and (is_other or sizes or timeline is not None or device != "cpu"):
        others = "--collectives, --toll or --workloads"
        hint = others if is_other else "--size" if sizes else "--device" if device != "cpu" else "--timeline"
        raise typer.BadParameter("it does not go with --visits; leave one of them out", param_hint=hint)
