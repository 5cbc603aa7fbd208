"""The CUDA kernels through nvcc and NVRTC: few registers, no spills, and no code that the tests on the host do not run.

NVRTC is what compiles them where there is a GPU. Its wheel is a test dependency; ``make nvrtc`` fetches another
version, and ``FASTRACK_NVRTC`` names folders with more of them.
"""

import hashlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from helpers.kernel_host import SOURCE, constants
from helpers.kernel_nvrtc import KERNELS, OPTIONS, Nvrtc, find_libraries

FOLDER = SOURCE.parent
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
OTHERS = ("sm_86", "sm_89", "sm_120")  # other GPUs that the kernels run on
# What makes the wheels spills nothing. Older compilers, which lack `clmad`, may spill so many bytes of a thread.
PINNED, SPILLED = "nvrtc", 32
NAMES = set(KERNELS)
# Two blocks of 512 threads share the 65536 registers of a multiprocessor.
REGISTERS = 64
ALONE = 128  # of a block that has a multiprocessor for itself
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


def nvcc():
    """Read the report of the toolkit's compiler, by architecture."""
    found = shutil.which("nvcc")
    if found is None:
        pytest.skip("there is no nvcc to compile the kernels for a GPU")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout

    def compile_for(architecture):
        command = [found, "-std=c++17", "-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", "/dev/null", SOURCE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return f"nvcc {re.search(r'V([0-9.]+)', version)[1]}", compile_for


def nvrtc(index):
    """Read the report of NVRTC, by architecture."""
    libraries = find_libraries()
    if len(libraries) <= index:
        pytest.skip("there is no NVRTC wheel")
    try:
        loaded = Nvrtc.load(libraries[index])
    except OSError as error:
        pytest.skip(f"{libraries[index]} cannot be loaded: {error}")
    return f"NVRTC {loaded.name}", lambda architecture: loaded.compile(SOURCE, architecture, FOLDER)[1]


COMPILERS = {"nvcc": nvcc, "nvrtc": lambda: nvrtc(0)}
if len(find_libraries()) > 1:
    COMPILERS["nvrtc-other"] = lambda: nvrtc(1)


@pytest.fixture(scope="module", params=COMPILERS)
def reports(request, build_folder):
    """Return which compiler, and a function that reads the reports of ptxas on every kernel, by architecture."""
    name, compile_for = COMPILERS[request.param]()
    digest = hashlib.sha256(repr((name, OPTIONS)).encode())
    for path in sorted(FOLDER.glob("*.cu*")):
        digest.update(path.read_bytes())
    suffix = digest.hexdigest()[:16]

    def report(architecture):
        kept = build_folder / f"{request.param}-{architecture}-{suffix}.txt"
        if not kept.exists():
            text = compile_for(architecture)
            assert "warning" not in text, text
            for old in build_folder.glob(f"{request.param}-{architecture}-*.txt"):
                old.unlink(missing_ok=True)
            kept.write_text(text)
        return parse(kept.read_text())

    def read(architectures):
        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(architectures, pool.map(report, architectures), strict=True))
        print_table(name, found)
        return found

    return request.param, read


def parse(text):
    """The usage of every kernel in the output of `ptxas -v`."""
    usages = {}
    for part in text.split("Compiling entry function '")[1:]:
        spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        stack, stores, loads = map(int, spills.groups())
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        usages[part.partition("'")[0]] = Usage(registers, stack, stores, loads, int(shared[1]) if shared else 0)
    return usages


def print_table(compiler, found):
    print(f"\n{compiler:<14}" + "".join(f"{architecture:>10}" for architecture in found), "(registers+spilled)")  # noqa: T201
    for name in sorted(NAMES):
        usages = (each.get(name) for each in found.values())
        columns = (f"{usage.registers}+{usage.stack}" if usage else "-" for usage in usages)
        print(f"{name:<14}" + "".join(f"{column:>10}" for column in columns))  # noqa: T201


@pytest.mark.nightly  # by day the bounds of a launch limit registers, and test_cu_counts counts what is spilled
@pytest.mark.parametrize("architectures", [ARCHITECTURES, OTHERS])
def test_every_kernel_is_there_and_two_blocks_share_a_multiprocessor(reports, architectures):
    compiler, read = reports
    for architecture, usages in read(architectures).items():
        assert set(usages) == NAMES
        for name, usage in usages.items():
            case = architecture, name, usage
            assert usage.registers <= (ALONE if name in {"prepare", "unwrap"} else REGISTERS), case
            assert usage.shared == 0, case
            assert usage.stack <= SPILLED, case
            if compiler == PINNED:
                assert (usage.stack, usage.stores, usage.loads) == (0, 0, 0), case


def test_the_sizes_are_plain_numbers_and_the_shared_memory_fits_a_multiprocessor():
    sizes = constants(SOURCE)
    names = {"THREADS", "STATE_BYTES", "SHARED_BYTES", "GATHER_SHARED_BYTES", "KEY_BYTES", "SEGMENT_BYTES", "SEGMENTS"}
    names |= {"WIDENING_BYTES", "WIDENINGS", "SMALL_SHARED_BYTES", "PICK_SHARED_BYTES", "ROW_BYTES", "VERDICT_BYTES"}
    names |= {"PAGED_BYTES", "PAGED_PIECES", "PAGED_BLOCKS", "PAGED_PARTS"}
    assert set(sizes) == names
    assert sizes["STATE_BYTES"] % 16 == 0
    assert sizes["THREADS"] == 512
    assert 2 * max(sizes["SHARED_BYTES"], sizes["SMALL_SHARED_BYTES"]) <= SHARED_OF_TWO
    assert max(sizes["GATHER_SHARED_BYTES"], sizes["PICK_SHARED_BYTES"]) <= SHARED_OF_A_BLOCK


def test_what_runs_on_the_host_is_all_there_is():
    # Neither system headers nor code only for the device, which these tests could not see, but for the two halves of
    # one instruction, which have twins, and the choice among three ways of using it, all of which the tests run.
    for path in FOLDER.glob("*.cu*"):
        for name in re.findall(r"^\s*#\s*include\s*(.*)$", path.read_text(), re.MULTILINE):
            assert (FOLDER / name.strip('"')).is_file(), f"{path.name} includes {name}"
        code = re.sub(r"//.*", "", path.read_text())
        if path.name == "ghash.cuh":
            code = code.replace('asm("clmad.lo.u64 ', "").replace('asm("clmad.hi.u64 ', "")
            code = re.sub(r"^#elif( (\|\| )?__CUDA_ARCH__ == \d+)+$", "", code, flags=re.MULTILINE)
        if path.name == "widen.cuh":  # two instructions with twins, which no option turns into others
            code = code.replace('asm("mul.rn.f32 ', "").replace('asm("fma.rn.f32 ', "")
        assert not re.findall(r"\basm\b|__CUDA_ARCH__", code), path.name
