"""The CUDA kernels through nvcc: no spills, few registers; and no code that the tests on the host do not run."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from helpers.kernel_host import SOURCE, constants

FOLDER = SOURCE.parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
NAMES = {f"{name}_{bits}" for name in ("prepare", "open", "seal", "gather") for bits in (128, 256)}
# Two blocks of 512 threads share the 65536 registers of a multiprocessor. `prepare` runs alone.
REGISTERS = 64
REGISTERS_ALONE = 128
# What one block may have on the oldest of these, and two blocks together, of which each takes 1 KiB for the system.
SHARED_OF_A_BLOCK = 163 * 1024
SHARED_OF_TWO = 164 * 1024 - 2 * 1024


@dataclass(frozen=True, slots=True)
class Usage:
    registers: int
    stack: int
    stores: int
    loads: int
    shared: int


@pytest.fixture(scope="module")
def reports(build_folder):
    """What ptxas says of every kernel, by architecture."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc to compile the kernels for a GPU")
    version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version)
    for path in sorted(FOLDER.glob("*.cu*")):
        digest.update(path.read_bytes())
    name = digest.hexdigest()[:16]

    def report(architecture):
        kept = build_folder / f"ptxas-{architecture}-{name}.txt"
        if not kept.exists():
            command = [
                nvcc,
                "-std=c++17",
                "-cubin",
                f"-arch={architecture}",
                "-Xptxas",
                "-v",
                "-o",
                "/dev/null",
                SOURCE,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert "warning" not in done.stderr, done.stderr
            for old in build_folder.glob(f"ptxas-{architecture}-*.txt"):
                old.unlink(missing_ok=True)
            kept.write_text(done.stderr)
        return parse(kept.read_text())

    with ThreadPoolExecutor(len(ARCHITECTURES)) as pool:
        found = dict(zip(ARCHITECTURES, pool.map(report, ARCHITECTURES), strict=True))
    print_table(found)
    return found


def parse(text):
    """The usage of every kernel in the output of `ptxas -v`."""
    usages = {}
    for part in text.split("Compiling entry function '")[1:]:
        stack, stores, loads = (
            int(number)
            for number in re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
            ).groups()
        )
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        usages[part.partition("'")[0]] = Usage(registers, stack, stores, loads, int(shared[1]) if shared else 0)
    return usages


def print_table(found):
    print(f"\n{'kernel':<14}" + "".join(f"{architecture:>10}" for architecture in found), "(registers)")  # noqa: T201
    for name in sorted(NAMES):
        columns = (usages.get(name) for usages in found.values())
        print(f"{name:<14}" + "".join(f"{usage.registers if usage else '-':>10}" for usage in columns))  # noqa: T201


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_there_for_every_architecture(reports, architecture):
    assert set(reports[architecture]) == NAMES


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills_or_has_a_stack(reports, architecture):
    for name, usage in reports[architecture].items():
        assert (name, usage.stack, usage.stores, usage.loads) == (name, 0, 0, 0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_blocks_share_the_registers_of_a_multiprocessor(reports, architecture):
    for name, usage in reports[architecture].items():
        limit = REGISTERS_ALONE if name.startswith("prepare") else REGISTERS
        assert usage.registers <= limit, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_has_static_shared_memory(reports, architecture):
    assert {usage.shared for usage in reports[architecture].values()} == {0}


def test_the_shared_memory_of_the_kernels_fits_a_multiprocessor():
    sizes = constants(SOURCE)
    assert 2 * sizes["SHARED_BYTES"] <= SHARED_OF_TWO
    assert sizes["GATHER_SHARED_BYTES"] <= SHARED_OF_A_BLOCK


def test_the_sizes_are_plain_numbers_that_the_host_can_read():
    assert set(constants(SOURCE)) == {"THREADS", "STATE_BYTES", "SHARED_BYTES", "GATHER_SHARED_BYTES"}
    assert constants(SOURCE)["STATE_BYTES"] % 16 == 0
    assert constants(SOURCE)["THREADS"] == 512


def test_no_system_header_is_included():
    for path in FOLDER.glob("*.cu*"):
        for name in re.findall(r"^\s*#\s*include\s*(.*)$", path.read_text(), re.MULTILINE):
            assert (FOLDER / name.strip('"')).is_file(), f"{path.name} includes {name}"


def test_what_runs_on_the_host_is_all_there_is():
    # Neither PTX nor code for the device alone, which these tests could not see.
    for path in FOLDER.glob("*.cu*"):
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.findall(r"\basm\b|__CUDA_ARCH__", code), path.name
