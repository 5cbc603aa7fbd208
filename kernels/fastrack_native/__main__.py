"""Make the module `_native`, unless there is one of these sources: ``python -m fastrack_native``."""

from __future__ import annotations

import argparse
import os
import platform
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from fastrack._crypto import native

PATH = Path(__file__).parents[2] / "fastrack/_crypto/_native.abi3.so"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fastrack_native", description=__doc__)
    parser.add_argument("--architecture", default=platform.machine(), help="x86_64 or aarch64; by default this one")
    parser.add_argument("--output", type=Path, default=PATH, metavar="FILE", help="by default in the package")
    options = parser.parse_args()
    if options.architecture == platform.machine() and _is_current(options.output):
        options.output.touch()
        return
    start = time.perf_counter()
    # numba reads these when it is imported. It lowers, for any CPU; all is optimised afterwards.
    for name in [name for name in os.environ if name.startswith("NUMBA_")]:
        del os.environ[name]
    os.environ |= {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "0"}
    print("making fastrack's native extension ...", flush=True)  # noqa: T201
    from fastrack_native.build import link, make_object
    from fastrack_native.compiler import TARGETS

    target = TARGETS[options.architecture]
    linker = link(make_object(target, name="_native"), target, options.output)
    size, seconds = options.output.stat().st_size, time.perf_counter() - start
    print(f"{options.output.name} for {target.architecture}: {size >> 10} KiB, linked by {linker}, {seconds:.0f} s")  # noqa: T201


def _is_current(path: Path) -> bool:
    """Return whether a module is there, is of these sources, and can be loaded."""
    if not path.exists():
        return False
    spec = spec_from_file_location("_native", path)
    assert spec is not None
    try:
        return native.is_of_these_sources(module_from_spec(spec))
    except ImportError:
        return False


if __name__ == "__main__":
    main()
