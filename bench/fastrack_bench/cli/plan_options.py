"""Options of ``fastrack plan``: sizes, elements, periods, profiles."""

import re
from pathlib import Path
from typing import Annotated

import typer

from fastrack._cli.documents import parse_period
from fastrack._cli.files import check_source
from fastrack._cli.streams import open_sealed

_UNITS = {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)")
_LARGEST = 1 << 50  # bytes, or elements
_SECONDS = 1e7  # of compute, at most

Profiles = Annotated[
    list[Path] | None,
    typer.Option("--profile", "-p", metavar="JSON", help="What `plan measure` or `bench` wrote; may be repeated."),
]
Figures = Annotated[
    list[str] | None,
    typer.Option(
        "--published",
        metavar="NAME",
        help="Published figures of confidential GPUs: all, or a path or hop of `bench --toll`.",
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Threads of the host; as many as were measured if absent.")
]
Size = Annotated[str | None, typer.Option(metavar="SIZE", help="Bytes, such as 64MiB or 1.5GiB.")]
Elements = Annotated[str | None, typer.Option(metavar="N", help="Elements in the place of bytes, such as 7B or 350M.")]
Dtype = Annotated[str, typer.Option(metavar="DTYPE", help="The type of elements, which gives their bytes.")]
Trace = Annotated[Path | None, typer.Option(metavar="JSON", help="A trace of `fastrack.trace` or `bench --timeline`.")]
Overlap = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="SHARE", help="How much goes on beside compute: 0 to 1; a range if absent."),
]
Picture = Annotated[Path | None, typer.Option(metavar="PATH", help="Save a picture of the stages here, as .png.")]
Compute = Annotated[float, typer.Option(min=0.0, max=_SECONDS, metavar="SECONDS", help="Seconds of compute of a step.")]


def parse_size(text: str, option: str) -> int:
    """Return the bytes of an option, such as 64MiB, 1.5GiB or 4096."""
    match = _NUMBER.fullmatch(text)
    size = None if match is None or match[2] not in _UNITS else float(match[1]) * (1 << _UNITS[match[2]])
    if size is None or not 1 <= size <= _LARGEST:
        raise typer.BadParameter(f"expected a size as 4096, 64MiB or 1.5GiB, got {text!r:.40}", param_hint=option)
    return int(size)


def bytes_of(size: str | None, elements: str | None, dtype: str) -> int:
    """Return the bytes of a job, which are given, or those of its elements."""
    if (size is None) == (elements is None):
        raise typer.BadParameter("expected it, or --elements, and not both", param_hint="--size")
    if size is not None:
        return parse_size(size, "--size")
    match = _NUMBER.fullmatch(elements or "")
    count = None if match is None or match[2] not in _COUNTS else float(match[1]) * _COUNTS[match[2]]
    if count is None or not 1 <= count <= _LARGEST:
        raise typer.BadParameter(
            f"expected a number as 7B, 350M or 4096, got {elements!r:.40}", param_hint="--elements"
        )
    return nbytes_of(count, dtype)


def nbytes_of(count: float, dtype: str) -> int:
    """Return the bytes of so many elements."""
    from fastrack._tensors.dtypes import BITS, DTYPES

    known = next((name for name, each in DTYPES.items() if each == dtype), None)
    if known is None:
        raise typer.BadParameter(f"expected a name as float32 or bfloat16, got {dtype!r:.40}", param_hint="--dtype")
    return max(1, int(count * BITS[known]) // 8)


def seconds_of(text: str | None, option: str) -> float | None:
    """Return the seconds of an option, None if it is absent."""
    return None if text is None else parse_period(text, option).total_seconds()


def sizes_of(model: Path) -> tuple[list[int], int]:
    """Return the bytes of the files of a model, and the number of their tensors, by their headers."""
    paths = [path for path in sorted(model.rglob("*.safetensors")) if path.is_file()] if model.is_dir() else [model]
    if not paths:
        raise typer.BadParameter(f"{model}: expected files named .safetensors, got none", param_hint="MODEL")
    sizes, tensors = [], 0
    for path in paths:
        sizes.append(check_source(path))
        with open_sealed(path) as file:
            tensors += len(file.names)
    return sizes, tensors
