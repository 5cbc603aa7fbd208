"""Count what the kernels take for a full chunk: machine instructions by pipe, and what their interpreted PTX does.

`counts.json` has the counts of the present kernels, by the NVRTC that compiles them when fastrack is built.
"""

import json
import os
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.gpu import known, sass
from bench.gpu.launches import ByteRuns
from fastrack._crypto.base import Scaling
from fastrack._crypto.gather import GatherPlan
from fastrack._devices.cuda import cubins
from fastrack._devices.cuda.nvrtc import CUBINS, KERNELS, MAIN, find_kernels, read_kernels
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

FILE = Path(__file__).with_name("counts.json")
# Those that process chunks, but for `pick`, whose loop over chunks has the expansion of keys in it, too.
COUNTED = tuple(name for name in KERNELS if name not in {"prepare", "unwrap"} and not name.startswith("pick"))
HOLES = "sm_90-holes"
ARCHITECTURES = {**{name: (name,) for name in CUBINS}, HOLES: ("sm_90", "-DFASTRACK_CLMAD=0")}
MEASURES = ("sass", "ptx")
TOLERANCE = 0.02
ROW = 2048  # bytes of a piece that the counted gather copies
PIECE = 4096  # bytes of a piece of the counted block of paged memory
INTERPRETED = "sm_90"


def read():
    """Return the counts that were agreed on."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(counts):
    """Agree on counts: a line for each kernel."""
    lines = {name: [f'  "{kernel}": {json.dumps(each)}' for kernel, each in counts[name].items()] for name in MEASURES}
    body = ",\n".join(f' "{name}": {{\n' + ",\n".join(each) + "\n }" for name, each in lines.items())
    FILE.write_text(f'{{\n "nvrtc": "{counts["nvrtc"]}",\n{body}\n}}\n', encoding="utf-8")


def compiler():
    """Return the version of the NVRTC that is installed, or None."""
    return version(cubins.PACKAGE) if cubins.find_libraries() else None


def compile_for(architecture, folder=None):
    """Return the cubin and the PTX of the kernels in a folder, or of fastrack's."""
    sources = read_kernels(folder) if folder else find_kernels()
    headers = {path.name: path.read_bytes() for path in sorted(sources.folder.glob("*.cuh"))}
    target, *more = ARCHITECTURES[architecture]
    options = (*cubins.OPTIONS, f"-arch={target}", *more)
    nvrtc = cubins.Nvrtc(cubins.find_libraries()[0])
    cubin, ptx, _ = nvrtc.compile_program(MAIN, sources.code.encode(), headers, options)
    return cubin, ptx.rstrip(b"\0").decode()


def count_machine_code(architecture, cubin, kernels=COUNTED):
    """Return instructions of a thread for 16 bytes by kernel and architecture, part of the work, and pipe."""
    listing, counts = sass.disassemble(cubin), {}
    for kernel in kernels:
        counts[f"{kernel} {architecture}"] = {
            part: {pipe: round(number, 2) for pipe, number in sorted(pipes.items()) if number}
            for part, pipes in sass.count(listing, kernel).items()
        }
    return counts


def interpret(text, kernels=COUNTED):
    """Return, by kernel, what one more full chunk takes: instructions of warps, passes of shared memory, sectors."""
    return {kernel: _of_a_chunk(text, kernel) for kernel in kernels}


def count(architectures=tuple(ARCHITECTURES), kernels=COUNTED, folder=None):
    """Count kernels, by some 20 s of compiling and interpreting. The PTX that is interpreted is of one architecture."""
    machine, text = {}, None
    for architecture in architectures:
        cubin, ptx = compile_for(architecture, folder)
        machine |= count_machine_code(architecture, cubin, kernels)
        text = ptx if text is None or architecture == INTERPRETED else text
    return {
        "nvrtc": compiler(),
        "sass": machine,
        "ptx": interpret(text, kernels),
    }


def changes(agreed, found, place=""):
    """Yield sentences about counts that differ by more than the tolerance, or that only one side has."""
    for name in sorted({*agreed, *found}):
        old, new = agreed.get(name, 0), found.get(name, 0)
        if name == "nvrtc":
            continue
        if isinstance(old or new, dict):
            yield from changes(old or {}, new or {}, f"{place}{name}, ")
        elif abs(new - old) > TOLERANCE * old:
            yield f"{place}{name}: {old} before, {new} now"


def _of_a_chunk(text, kernel):
    one, two = (_launch(text, kernel, chunks) for chunks in (1, 2))
    two.subtract(one)
    return {name: number for name, number in sorted(two.items()) if number}


def _launch(text, kernel, chunks):
    from bench.gpu.ptx import PtxGpu

    gpu, (what, bits) = PtxGpu(text), kernel.split("_")
    runs, plain, key, nonce = ByteRuns(gpu), os.urandom(chunks * CHUNK_SIZE), os.urandom(int(bits) // 8), os.urandom(12)
    state, whole = runs.prepare(key, nonce), known.seal(key, nonce, plain)
    sealed, pieces = whole[: chunks * SEALED_CHUNK_SIZE], [PIECE] * (len(plain) // PIECE)
    if what in {"open", "small"}:
        right = (runs.open_run if what == "open" else runs.small_run)(state, sealed) == (None, plain)
    elif what == "seal":
        right = runs.seal_run(state, plain, ends=False) == sealed
    elif what == "keep":
        right = runs.keep_run(state, plain, pieces) == whole
    elif what == "restore":
        right = runs.restore_run(state, whole, pieces) == (None, True, plain)
    elif what == "widen":  # of the formats that models have, with a scale for each row
        how = Scaling(bytes(4 * len(plain) // ROW), "F32", "F8_E4M3", ROW, 1, ROW)
        right = runs.widen_run(state, sealed, how)[0] is None
    else:
        right = runs.gather(state, sealed, _rows(chunks), len(plain) + 1, len(plain)) == (None, plain)
    if not right:
        raise ValueError(f"{kernel} gave a wrong answer on its interpreted PTX")
    name, report = gpu.reports[-1]
    assert name == kernel
    shared = [site for site in report.sites if ".shared" in site.name]
    lookups = [site for site in shared if site.name.startswith("ld") and site.size == 4]
    counts = Counter()
    for name, number in report.instructions.items():
        counts[f"instructions {name.split('.')[0]}"] += number
    found = {
        "lookups": sum(site.requests for site in lookups),
        "passes of lookups": sum(site.passes for site in lookups),
        "passes": sum(site.passes for site in shared),
        "passes at least": sum(site.requests for site in shared),
        "sectors read": sum(site.sectors for site in report.sites if not site.writes),
        "sectors written": sum(site.sectors for site in report.sites if site.writes),
    }
    return counts + Counter(found)


def _rows(chunks):
    """Return a plan that copies whole chunks, row by row."""
    rows = CHUNK_SIZE // ROW
    table = [(ROW * (row % rows), ROW * row, ROW) for row in range(chunks * rows)]
    starts = np.arange(chunks + 1, dtype=np.int64) * rows
    return GatherPlan(np.arange(chunks, dtype=np.int64), starts, np.array(table, np.int64))
