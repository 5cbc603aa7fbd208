"""``fastrack warmup``: compile what processes on this machine will need."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from fastrack._cli.compiled_code import needed_units
from fastrack._cli.console import clean, pluralize, print_json, stdout
from fastrack._cli.nvml import read_graphics
from fastrack._cli.options import Json
from fastrack._cli.selftest import check_cuda
from fastrack._util.units import format_size
from fastrack.errors import DeviceError

if TYPE_CHECKING:
    from fastrack._crypto.library import Loaded


def warmup(*, as_json: Json = False) -> None:
    """Compile what fastrack needs on this machine, so that processes load it from disk."""
    from fastrack._crypto import engine, forms, library

    if not forms.is_compiling():
        raise DeviceError(
            "nothing was compiled: expected numba to compile, got NUMBA_DISABLE_JIT=1, which switches its compiler "
            "off. Unset it"
        )
    start = time.perf_counter()
    units = needed_units()
    for unit in units:
        library.load(unit)
    _require_kept(record for record in library.loaded() if record.unit in units)
    name = engine.selected_engine().name  # this tests it
    cuda = check_cuda() if read_graphics().gpus else None  # this compiles the kernels
    seconds = time.perf_counter() - start
    records = [record for record in library.loaded() if record.unit in units]
    folders = list(dict.fromkeys(str(record.path.parent) for record in records if record.path is not None))
    compiled = sum(record.compiled for record in records)
    size = sum(record.size for record in records)
    if as_json:
        print_json(
            folders=folders,
            engine=name,
            units=[
                {"name": each.unit.name, "path": str(each.path), "bytes": each.size, "compiled": each.compiled}
                for each in records
            ],
            compiled=compiled,
            bytes=size,
            cuda=None if cuda is None else asdict(cuda),
            seconds=seconds,
        )
        return
    console = stdout()
    done = (
        f"compiled {compiled} of {pluralize(len(units), 'unit')}" if compiled else f"all {len(units)} units were there"
    )
    console.print(f"{done}, for the engine {name}: {format_size(size)} of code, {seconds:.1f} s")
    for folder in folders:
        console.print(f"kept in {clean(folder)}")
    if cuda is not None:
        problem = f"not usable: {clean(cuda.problem)}" if cuda.problem else "kernels compiled, which CuPy keeps"
        console.print(f"GPU: {problem}")


def _require_kept(records: Iterable["Loaded"]) -> None:
    """Raise OSError if the code of a unit could not be written."""
    from fastrack._crypto import code_cache

    for record in records:
        error = record.problem
        if error is not None:
            message = (
                f"compiled code cannot be kept here: {error.strerror or error}. Set {code_cache.VARIABLE} to a folder "
                "that can be written to, for this command and where fastrack runs"
            )
            raise OSError(error.errno, message, str(code_cache.folders()[0])) from error
