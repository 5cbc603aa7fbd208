"""Count the machine instructions that a kernel spends on a block of 16 bytes.

    python -m helpers.kernel_sass sm_90 FOLDER...

compiles the kernels of each folder with NVRTC, disassembles them with the toolkit's nvdisasm, and counts what a thread
executes for one full chunk at aligned addresses, by basic blocks. Code for short chunks that is in no loop of its own
counts as executed, so that `rest` is a few instructions too many.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from helpers.kernel_host import SOURCE
from helpers.kernel_nvrtc import Nvrtc, find_libraries

BLOCKS = 2  # of 16 bytes, that a thread works of a full chunk
WARPS = 16  # that share what one of them does for a chunk
ROUNDS = {"128": 10, "256": 14}
LABEL = re.compile(r"^\.(L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:\{\s*)?((?:@!?U?P\w+\s+)*)([A-Z0-9_.]+)(.*?);")
TARGET = re.compile(r"\((\.L_x_\d+)\)")


@dataclass(frozen=True, slots=True)
class Count:
    """Instructions of one thread for a block of 16 bytes, and those of a thread to fill the tables."""

    aes: float
    ghash: float
    once: float  # by one warp, for a chunk
    rest: float
    fill: int

    @property
    def all(self):
        return self.aes + self.ghash + self.once + self.rest


def find_disassembler():
    """Return the path of nvdisasm, or None."""
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")


def disassemble(cubin):
    """Return the listing of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([find_disassembler(), "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def count(listing, kernel):
    """Count one kernel of a listing."""
    operations, labels = _parse(listing, kernel)
    first = next(place for place, (name, _) in enumerate(operations) if name.startswith("BAR"))
    loops = _loops(operations, labels)
    longest = max(stop - start for start, stop in loops if start > first)
    # The loop over the chunks of a segment is within one over segments.
    start, stop = min(
        (loop for loop in loops if loop[0] > first and 2 * (loop[1] - loop[0]) > longest),
        key=lambda loop: loop[1] - loop[0],
    )
    inner = [loop for loop in loops if start <= loop[0] and loop[1] < stop]
    parts = {"aes": 0.0, "ghash": 0.0, "once": 0.0, "rest": 0.0}
    blocks = _blocks(operations, labels, start, stop)
    most = max(_content(operations, block)["LDS"] for block in blocks)
    for block in blocks:
        size, content = block[1] - block[0], _content(operations, block)
        loop = next((loop for loop in inner if loop[0] <= block[0] and block[1] <= loop[1]), None)
        part, times = _kind(content, _content(operations, loop) if loop else None, most, ROUNDS[kernel[-3:]])
        parts[part] += size * times
    return Count(**{part: number / BLOCKS for part, number in parts.items()}, fill=first)


def _kind(content, loop, most, rounds):
    """Name the part that a basic block belongs to, and how often a thread executes it for a chunk."""
    lookups = (loop or content)["LDS"]
    product = (loop or content)["IMAD.WIDE"] > 40 or (loop or content)["CLMAD"] > 0
    if product and (loop or lookups < 16):
        found = "ghash", (BLOCKS if loop else 0)  # the product outside of the loop is for short chunks
    elif loop:  # byte by byte; a round of one block, that is a tag's, or of two; or a whole keystream
        found = ("rest", 0) if lookups < 16 else ("once", (rounds - 3) / WARPS) if lookups < 24 else ("aes", rounds - 3)
        found = ("aes", BLOCKS) if lookups > 60 else found
    elif content["LDS"] == most:
        found = "aes", 1
    else:
        found = ("once", 1 / WARPS) if lookups > 15 else ("rest", 1)
    return found


def _parse(listing, kernel):
    lines = listing.split("\n")
    start = next(place for place, line in enumerate(lines) if line.startswith(f".text.{kernel}:"))
    operations, labels = [], {}
    for line in lines[start + 1 :]:
        if re.match(r"\s*\.(text\.|section)", line):
            break
        label = LABEL.match(line.strip())
        if label:
            labels[f".{label[1]}"] = len(operations)
            continue
        found = INSTRUCTION.search(line)
        if found:
            operations.append((found[2], found[1] + found[3]))
    return operations, labels


def _loops(operations, labels):
    """Return loops as (first, past the last): branches that go back. Those after the end return from code set aside."""
    loops = []
    end = max(place for place, (name, _) in enumerate(operations) if name == "EXIT")
    for place, (name, operands) in enumerate(operations[:end]):
        target = TARGET.search(operands)
        if name in {"BRA", "BRA.U"} and target and labels[target[1]] < place:
            loops.append((labels[target[1]], place + 1))
    return loops


def _blocks(operations, labels, start, stop):
    ends = {place + 1 for place, (name, _) in enumerate(operations) if name.split(".")[0] in {"BRA", "EXIT", "BAR"}}
    cuts = sorted({start, stop, *(cut for cut in {*labels.values(), *ends} if start < cut < stop)})
    return list(itertools.pairwise(cuts))


def _content(operations, block):
    names = Counter()
    for name, _ in operations[block[0] : block[1]]:
        names["IMAD.WIDE" if name.startswith("IMAD.WIDE") else name.split(".")[0]] += 1
    return names


def main(architecture, *folders):
    library = Nvrtc.load(find_libraries()[0])
    print(f"NVRTC {library.name}, {architecture}; instructions of a thread for 16 bytes")  # noqa: T201
    print(f"{'':<26}{'AES':>8}{'GHASH':>8}{'once':>8}{'rest':>8}{'all':>8}{'a byte':>8}{'fill':>8}")  # noqa: T201
    for folder in map(Path, folders or (SOURCE.parent,)):
        cubin, _ = library.compile(folder / SOURCE.name, architecture, folder)
        listing = disassemble(cubin)
        for kernel in ("open_256", "open_128", "seal_256", "seal_128"):
            found = count(listing, kernel)
            numbers = (found.aes, found.ghash, found.once, found.rest, found.all)
            columns = "".join(f"{number:>8.0f}" for number in numbers) + f"{found.all / 16:>8.1f}{found.fill:>8}"
            print(f"{folder.name:<16} {kernel} {columns}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
