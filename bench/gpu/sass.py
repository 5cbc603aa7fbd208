"""Count the machine instructions that a thread executes for 16 bytes of a full chunk, by pipe and by part of the work.

A full chunk at aligned addresses is followed through the basic blocks of a cubin's listing. Code for short chunks that
is in no loop of its own counts as executed, so that `rest` is a few instructions too many.
"""

import itertools
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, files

WHEEL = "nvidia-cuda-nvdisasm"
BLOCKS = 2  # of 16 bytes, that a thread works of a full chunk
WARPS = 16  # that share what one of them does for a chunk
ROUNDS = {"128": 10, "256": 14}
LOOKUPS = 100  # that a keystream has at least
PARTS = ("aes", "ghash", "once", "rest")  # `once` is done by one warp for a chunk
PIPES = ("alu", "multiply", "wide", "clmad", "shared", "shared.128", "local")
LABEL = re.compile(r"^\.(L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(?:\{\s*)?((?:@!?U?P\w+\s+)*)([A-Z0-9_.]+)(.*?);")
TARGET = re.compile(r"\((\.L_x_\d+)\)")
_PIPE_OF = {"IMAD": "multiply", "IDP": "multiply", "CLMAD": "clmad", "LDS": "shared", "STS": "shared"} | {
    **dict.fromkeys(("LDL", "STL"), "local"),
    **dict.fromkeys(("BMSK", "BREV", "CS2R", "IADD", "IADD3", "IMNMX", "ISETP", "LEA", "LOP3", "PLOP3", "PRMT"), "alu"),
    **dict.fromkeys(("SEL", "SGXT", "SHF", "VIADD", "VIMNMX"), "alu"),
}


def find_disassembler():
    """Return the path of nvdisasm, from NVIDIA's wheel or the toolkit, or None."""
    try:
        found = [str(file.locate()) for file in files(WHEEL) or () if file.name == "nvdisasm"]
    except PackageNotFoundError:
        found = []
    return found[0] if found else shutil.which("nvdisasm") or shutil.which("nvdisasm", path="/usr/local/cuda/bin")


def disassemble(cubin):
    """Return the listing of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([find_disassembler(), "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def count(listing, kernel):
    """Count one kernel of a listing: for each part, instructions by pipe, and `all` of them."""
    operations, labels = _parse(listing, kernel)
    loops = _loops(operations, labels)
    # The loop over the chunks of a segment has a barrier, and is within one over segments.
    inside = {loop: _content(operations, loop) for loop in loops}
    around = (loop for loop, content in inside.items() if content["BAR"] and content["LDS"] > LOOKUPS)
    start, stop = min(around, key=lambda loop: loop[1] - loop[0])
    inner = [loop for loop in loops if start <= loop[0] and loop[1] < stop]
    parts = {part: Counter() for part in PARTS}
    blocks = _blocks(operations, labels, start, stop)
    most = max(_content(operations, block)["LDS"] for block in blocks)
    for block in blocks:
        content = _content(operations, block)
        loop = next((loop for loop in inner if loop[0] <= block[0] and block[1] <= loop[1]), None)
        part, times = _kind(content, _content(operations, loop) if loop else None, most, ROUNDS[kernel[-3:]])
        for name, _ in operations[block[0] : block[1]]:
            for pipe in {"all", _pipe(name)}:
                parts[part][pipe] += times / BLOCKS
    return parts


def _pipe(name):
    if name.startswith("IMAD.WIDE"):
        return "wide"
    if name.startswith(("LDS.128", "STS.128")):
        return "shared.128"
    return _PIPE_OF.get(name.split(".")[0], "other")


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
