"""Model what bounds the kernels, by counts: ``python -m bench.gpu.bound [--kernel NAME] [--architecture sm_90]``.

Nothing here was measured on a GPU. Instructions are counted in what NVRTC compiles, passes of shared memory and sectors
where its PTX is interpreted. The GB/s are modelled: they follow from these counts and from published figures of a GPU.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from bench import chunk_sizes
from bench.gpu import counts, sass
from bench.tables import markdown
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

DESIGN = Path(__file__).parents[2] / "kernels/DESIGN.md"
BLOCK = 16  # bytes that the counts are for
_BEGIN, _END = "<!-- Made by `python -m bench.gpu.bound --write`. -->\n", "<!-- The end of what is made. -->\n"
# The PTX for one architecture is interpreted; what shared memory and sectors are asked for is the same for all.
_OPEN, _PRESENT = "open_256", "sm_90"

# Lanes a clock of a multiprocessor, by "Throughput of native arithmetic instructions", CUDA C++ Programming Guide,
# for compute capabilities 8.0, 9.0 and 10.0: 64 for logic, shifts, additions and multiplications of integers. Four
# schedulers issue 32 each, and shared memory has 32 banks. The guide names neither IMAD.WIDE, for which others measured
# 22.9 on a B200 and half of IMAD's 64 is usual, nor CLMAD: others measured 29 on a B200; A100 and H100 are unknown.
ISSUE, ALU, MULTIPLY, WIDE, BANKS = 128, 64, 64, (32, 22.9), 32
_MULTIPLY = "64, 22.9 to 32"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures: multiprocessors, their clock, GB/s of the memory, lanes a clock of CLMAD if known."""

    multiprocessors: int
    ghz: float
    memory: int
    clmad: float | None
    source: str

    def gbps(self, clocks):
        """Return the speed if a multiprocessor needs so many clocks for 16 bytes."""
        return self.multiprocessors * self.ghz * BLOCK / clocks


GPUS = {
    "A100 SXM": Gpu(108, 1.41, 2039, None, "NVIDIA's A100 whitepaper and datasheet; boost clock"),
    "H100 SXM": Gpu(132, 1.755, 3350, None, "NVIDIA's H100 whitepaper; boost clock of the PCIe card, SXM: 1.98"),
    "B200": Gpu(148, 1.965, 8000, 29, "memory: NVIDIA's datasheet; the others as reported by users"),
}
USUAL = {"sm_80": "A100 SXM", "sm_90": "H100 SXM", counts.HOLES: "H100 SXM", "sm_100": "B200"}


def lines(kernel, machine_code, interpreted, gpu):
    """Return rows: a resource, what 16 bytes take of it, its lanes a clock, and the clocks at best and at worst."""
    pipes, blocks = _sum(machine_code), CHUNK_SIZE // BLOCK
    clocks = _clocks(pipes, gpu)
    # Between one pass and four for 16 bytes that all lanes share.
    passes = interpreted["passes at least"] / blocks, interpreted["passes"] / blocks
    moved = (SEALED_CHUNK_SIZE + _written(kernel)) / blocks
    device = 2 * (moved * gpu.multiprocessors * gpu.ghz / gpu.memory,)
    rows = [
        ("issue", f"{pipes['all']:.0f}", str(ISSUE), clocks["issue"]),
        ("ALU", f"{pipes['alu']:.0f}", str(ALU), clocks["alu"]),
        ("IMAD, IDP + IMAD.WIDE", f"{pipes['multiply']:.0f} + {pipes['wide']:.0f}", _MULTIPLY, clocks["multiply"]),
        ("shared memory, passes", f"{BANKS} x {_range(passes, 1)}", str(BANKS), passes),
        ("device memory, bytes", f"{moved:.0f}", f"{gpu.memory} GB/s", device),
    ]
    if pipes["clmad"]:
        rows.insert(3, ("CLMAD", f"{pipes['clmad']:.0f}", str(gpu.clmad or "unknown"), clocks.get("clmad")))
    least = tuple(max(row[-1][end] for row in rows if row[-1]) for end in (0, 1))
    phases = [_clocks(_sum(machine_code, parts), gpu).values() for parts in (("aes",), ("ghash",), ("once", "rest"))]
    apart = tuple(sum(max(each[end] for each in phase) for phase in phases) for end in (0, 1))
    return [*rows, ("the least of these", "", "", least), ("phases never overlap", "", "", apart)]


def _written(kernel):
    return CHUNK_SIZE * (2 if kernel.startswith("widen") else 1)


def _sum(machine_code, parts=sass.PARTS):
    return {pipe: sum(machine_code[part].get(pipe, 0) for part in parts) for pipe in ("all", *sass.PIPES)}


def _clocks(pipes, gpu):
    clocks = {"issue": 2 * (pipes["all"] / ISSUE,), "alu": 2 * (pipes["alu"] / ALU,)}
    clocks["multiply"] = tuple(pipes["multiply"] / MULTIPLY + pipes["wide"] / lanes for lanes in WIDE)
    clocks["shared"] = tuple((pipes["shared"] + passes * pipes["shared.128"]) / BANKS for passes in (1, 4))
    return clocks | ({"clmad": 2 * (pipes["clmad"] / gpu.clmad,)} if gpu.clmad else {})


def _range(values, digits):
    low, high = (f"{value:.{digits}f}" for value in values)
    return low if low == high else f"{low} to {high}"


def table(kernel, machine_code, interpreted, gpu):
    """Return the rows of `lines` as text, with GB/s; for an unknown rate, the one below which it would be the limit."""
    rows = lines(kernel, machine_code, interpreted, gpu)
    yield "modelled", "for 16 bytes", "lanes a clock", "clocks", "GB/s"
    for name, number, lanes, clocks in rows:
        if clocks:
            yield name, number, lanes, _range(clocks, 1), _range([gpu.gbps(each) for each in clocks], 0)
        else:
            yield name, number, f"limit if < {float(number) / rows[-2][-1][0]:.1f}", "", lanes


def tables():
    """Return the tables of DESIGN.md, from the counts that were agreed on."""
    agreed = counts.read()
    machine_code, gpu = agreed["sass"][f"{_OPEN} {_PRESENT}"], GPUS[USUAL[_PRESENT]]
    sectors = [agreed["ptx"][_OPEN][f"sectors {what}"] for what in ("read", "written")]
    return f"""
Instructions of a thread for 16 bytes of a full chunk, `{_OPEN}`, {_PRESENT}, NVRTC {agreed["nvrtc"]}:

{markdown(_parts(machine_code))}
What a multiprocessor needs, and the GB/s of {gpu.multiprocessors} at {gpu.ghz} GHz ({USUAL[_PRESENT]}), modelled:

{markdown(table(_OPEN, machine_code, agreed["ptx"][_OPEN], gpu))}
A chunk reads {sectors[0]} sectors of 32 bytes, of which 513 are its own and the others, of the key's state, come from
caches; it writes {sectors[1]}. The same of other kernels, modelled; {counts.HOLES} is {_PRESENT} without `clmad`:

{markdown(_others(agreed))}
Other sizes of chunks: the bytes of tags, speeds of `cpu` relative to 16 KiB (measured, `python -m bench.chunk_sizes`),
instructions of `{_OPEN}` (modelled), and the message whose chunks fill two blocks of every multiprocessor of an H100:

{markdown(chunk_sizes.table(machine_code))}
"""


def _parts(machine_code):
    names = {"aes": "AES", "ghash": "GHASH", "once": "keystream start and tag, by one warp of 16"}
    names |= {"rest": "load, sum up, compare, store: at most"}
    yield "part", "ALU", "IMAD, IDP", "IMAD.WIDE", "CLMAD", "shared memory", "all"
    for part, pipes in {**machine_code, "**all**": _sum(machine_code)}.items():
        columns = [("alu",), ("multiply",), ("wide",), ("clmad",), ("shared", "shared.128"), ("all",)]
        numbers = (sum(pipes.get(pipe, 0) for pipe in column) for column in columns)
        yield names.get(part, part), *(f"{number:.0f}" for number in numbers)


def _others(agreed):
    yield "kernel", "for", "instructions", "GPU", "the least, GB/s", "phases never overlap, GB/s"
    for name, machine_code in agreed["sass"].items():
        kernel, architecture = name.split()
        if kernel in counts.COUNTED and (kernel == _OPEN or architecture == _PRESENT):
            gpu, instructions = USUAL.get(architecture, ""), f"{_sum(machine_code)['all']:.0f}"
            rows = [*table(kernel, machine_code, agreed["ptx"][kernel], GPUS[gpu])] if gpu else [[""], [""]]
            yield f"`{kernel}`", architecture, instructions, gpu, *(row[-1] for row in rows[-2:])


def show(options):
    """Print what bounds a kernel."""
    gpu = options.gpu or USUAL.get(options.architecture)
    if gpu is None:
        sys.exit(f"modelling {options.architecture} failed: expected a GPU with published figures. Name one with --gpu")
    kernel, architecture, folder = options.kernel, options.architecture, options.folder
    agreed = counts.count([architecture], [kernel], folder) if folder else counts.read()
    given = agreed["sass"][f"{kernel} {architecture}"], agreed["ptx"][kernel], GPUS[gpu]
    if options.json:
        keys = ("resource", "for 16 bytes", "lanes a clock", "clocks")
        rows = [dict(zip(keys, row, strict=True)) for row in lines(kernel, *given)]
        rows = [row | {"gbps": [given[2].gbps(each) for each in row["clocks"] or ()]} for row in rows]
        what = {"kernel": kernel, "architecture": architecture, "nvrtc": agreed["nvrtc"], "gpu": gpu}
        print(json.dumps({**what, "modelled": rows, "instructions": given[0], "interpreted": given[1]}, indent=1))
        return
    print(
        f"{kernel} {architecture}, NVRTC {agreed['nvrtc']}, on {gpu}: {given[2].multiprocessors} x {given[2].ghz} GHz"
    )
    print(f"({given[2].source})")
    rows = [*table(kernel, *given)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *row in rows:
        print("  ".join([name.ljust(widths[0]), *map(str.rjust, row, widths[1:])]).rstrip())
    passes, spilled = given[1]["passes of lookups"] / given[1]["lookups"], _sum(given[0])["local"]
    read, written = (given[1][f"sectors {what}"] for what in ("read", "written"))
    print(f"sectors a chunk: {read} read, {written} written (at least 513 and {_written(kernel) // 32})")
    print(f"passes of a table lookup: {passes:g}; accesses to spilled registers for 16 bytes: {spilled:g}")


def main(argv):
    """Print what bounds a kernel, or write the tables of DESIGN.md, or agree on the counts."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.bound", description="Print what bounds a kernel.")
    parser.add_argument("--kernel", choices=counts.COUNTED, default=_OPEN)
    parser.add_argument("--architecture", choices=counts.ARCHITECTURES, default=_PRESENT)
    parser.add_argument("--gpu", choices=GPUS, help="whose figures to use; by default one of that architecture")
    parser.add_argument("--folder", type=Path, help="count these kernels; by default those agreed on")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--accept", action="store_true", help="count the kernels, and agree on the counts")
    parser.add_argument("--write", action="store_true", help="write the tables of kernels/DESIGN.md")
    options = parser.parse_args(argv)
    if (options.accept or options.folder) and not (sass.find_disassembler() and counts.compiler()):
        sys.exit(
            f"counting failed: expected NVRTC and nvdisasm. Run `pip install {counts.cubins.PACKAGE} {sass.WHEEL}`"
        )
    if options.accept:
        found = counts.count()
        print(*counts.changes(counts.read(), found), sep="\n")
        counts.write(found)
    if options.write:
        before, _, rest = DESIGN.read_text(encoding="utf-8").partition(_BEGIN)
        DESIGN.write_text(before + _BEGIN + tables() + _END + rest.partition(_END)[2], encoding="utf-8")
    if not (options.accept or options.write):
        show(options)


if __name__ == "__main__":
    main(sys.argv[1:])
