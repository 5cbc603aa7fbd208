"""Check the wheels of a folder, as `make dist` builds them: ``python .ci/wheels.py FOLDER``."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

MODULE = "fastrack/_crypto/_native.abi3.so"
CUBINS = ("sm_80", "sm_90", "sm_100", "sm_120", "compute_100")
TAGS = {"cp311-abi3-manylinux_2_28_x86_64", "cp311-abi3-manylinux_2_28_aarch64", "py3-none-any"}
MOST = 2 << 20  # bytes of a file: the kernels for five architectures are 0.73 MB of it
GLIBC = (2, 28)


def main(folder: Path) -> None:
    """Raise AssertionError if a wheel is not right."""
    (bench,) = folder.glob("fastrack_bench-*.whl")  # which has code in Python only
    check_bench(bench)
    contents = {}
    for path in sorted(folder.glob("fastrack_io-*.whl")):
        with zipfile.ZipFile(path) as wheel:
            contents[path] = {name: wheel.read(name) for name in wheel.namelist()}
    assert {"-".join(path.stem.split("-")[2:]) for path in contents} == TAGS, sorted(contents)
    pure = next(path for path in contents if path.stem.endswith("-none-any"))
    made = [compiled(files) for path, files in contents.items() if path != pure]
    assert all(kernels == made[0] for kernels in made), "the wheels have different kernels"
    assert sorted(Path(name).stem.partition("-")[0] for name in made[0]) == sorted(CUBINS), sorted(made[0])
    for path, files in contents.items():
        assert path.stat().st_size <= MOST, f"{path.name} has {path.stat().st_size} bytes"
        check_record(files)
        assert (MODULE in files) == bool(compiled(files)) == (path != pure), path.name
        assert essence(files) == essence(contents[pure]), f"{path.name} and {pure.name} have different files"
        if path != pure:
            check_module(path)
        print(f"{path.name}: {path.stat().st_size} bytes, {len(files)} files")


def check_bench(path: Path) -> None:
    """Raise AssertionError if the wheel of fastrack-bench has more than its package."""
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    check_record(files)
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"fastrack_bench", f"{path.name.removesuffix('-py3-none-any.whl')}.dist-info"}, tops
    print(f"{path.name}: {path.stat().st_size} bytes, {len(files)} files")


def essence(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return what all wheels have alike: sources, metadata, entry points and licences."""
    others = {MODULE, *compiled(files)}
    return {n: data for n, data in files.items() if n not in others and not n.endswith(("/WHEEL", "/RECORD"))}


def compiled(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the kernels that are compiled for GPUs."""
    return {name: data for name, data in files.items() if name.endswith((".cubin.xz", ".ptx.xz"))}


def check_record(files: dict[str, bytes]) -> None:
    """Raise AssertionError if RECORD does not list each file with its size and digest."""
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    listed = {name: (digest, size) for name, digest, size in csv.reader(files[record].decode().splitlines())}
    assert listed.pop(record) == ("", "")
    assert listed == {
        name: (f"sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')}", str(len(data)))
        for name, data in files.items()
        if name != record
    }


def check_module(path: Path) -> None:
    """Raise AssertionError if auditwheel or abi3audit finds that a wheel needs more than its tag says."""
    shown = " ".join(run("auditwheel", "show", str(path)).split())
    found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', shown)
    assert found, shown
    # The module may take no more than a glibc that is older than that of the tag.
    assert (int(found[1]), int(found[2])) <= GLIBC, shown
    assert path.stem.endswith(f"_{found[3]}"), shown
    assert "external shared libraries are required" not in shown, shown
    run("abi3audit", "--strict", str(path))


def run(tool: str, *arguments: str) -> str:
    """Run a tool of this environment, and return its output."""
    command = [str(Path(sys.executable).parent / tool), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - of this project


if __name__ == "__main__":
    main(Path(sys.argv[1]))
