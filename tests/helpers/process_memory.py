"""Searches the memory of another process for secrets. Linux only."""

import re
from pathlib import Path

import numpy as np

_SPECIAL = ("[vvar]", "[vvar_vclock]", "[vsyscall]")


def find_in_process(pid, needles):
    """Return `{(name, region)}` of the needles in the writable memory of a process: in its stack, heap or other."""
    found = set()
    find = finder(needles)
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            name = fields[5] if len(fields) > 5 else ""
            if not fields[1].startswith("rw") or name in _SPECIAL:
                continue
            start, stop = (int(part, 16) for part in fields[0].split("-"))
            try:
                memory.seek(start)
                data = memory.read(stop - start)
            except (OSError, ValueError):
                continue
            region = re.sub(r"^(?!stack|heap).*", "other", name.strip("[]"))
            found |= {(needle, region) for needle in find(data)}
    return found


def finder(needles):
    """Return a function for the names of the needles in some bytes: one pass for all of them, by two bytes of each."""
    rare = {}  # two bytes, none of them zero as most of a memory is -> needles that have them, and at which offset
    for name, value in needles.items():
        offset = next(at for at in range(len(value) - 1) if value[at] and value[at + 1])
        rare.setdefault(int.from_bytes(value[offset : offset + 2], "little"), []).append((name, value, offset))
    is_rare = np.zeros(1 << 16, bool)
    is_rare[list(rare)] = True

    def find(data):
        for odd in (0, 1):
            words = np.frombuffer(data, "<u2", (len(data) - odd) // 2, odd)
            for index in np.flatnonzero(is_rare[words]):
                for name, value, offset in rare[int(words[index])]:
                    start = 2 * int(index) + odd - offset
                    if start >= 0 and data[start : start + len(value)] == value:
                        yield name

    return find
