"""``fastrack import``: seal samples that are in files of other formats."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.console import clean, pluralize, reporter, tell
from fastrack._cli.files import load_engine, open_ring
from fastrack._cli.options import Json, KeyFile
from fastrack.errors import FormatError


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE... FOLDER",
            help="A folder of images by class, .txt, .jsonl, .tar (WebDataset), .parquet, .arrow or .feather files, or "
            "a folder of these; and the folder to write.",
        ),
    ],
    *,
    key: KeyFile = None,
    shard_size: Annotated[
        int, typer.Option("--shard-size", metavar="MIB", min=1, help="MiB of samples in a shard.")
    ] = 256,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in FOLDER after the samples that it has, of the same SOURCE.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Seal images, text, records or tables into a folder of shards, sample by sample.

    What was written when a run is interrupted, or killed, is kept for --resume, which compares it with SOURCE first.
    """
    from fastrack._samples.sources import import_samples

    if len(paths) < 2:
        raise typer.BadParameter("expected a source and a folder to write, got one path", param_hint="SOURCE... FOLDER")
    *sources, folder = paths
    owner = open_ring(key, to="seal").first
    load_engine("sealing")
    start = time.perf_counter()
    try:
        with reporter("importing:") as report:
            read = 0

            def progress(samples: int) -> None:
                nonlocal read
                read += samples
                report(f"{read} samples")

            count = import_samples(
                sources if len(sources) > 1 else sources[0],
                folder,
                owner,
                shard_size=shard_size << 20,
                resume=resume,
                progress=progress,
            )
    except KeyboardInterrupt as error:
        error.add_note(f"{folder} keeps its complete shards; --resume continues after them")
        raise
    except FormatError:
        raise
    except (ImportError, TypeError, ValueError) as error:  # of the data, of its format, or of the folder
        raise FormatError(str(error)) from None
    seconds = time.perf_counter() - start
    lines = [f"{clean(str(folder))}: {pluralize(count, 'sample')} sealed; {seconds:.1f} s", f"key: {owner.id}"]
    tell(
        lines,
        as_json=as_json,
        sources=[str(source) for source in sources],
        folder=str(folder),
        key_id=owner.id,
        samples=count,
        seconds=seconds,
    )
