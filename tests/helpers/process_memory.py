"""Searches the memory of another process for secrets. Linux only."""

import re
from pathlib import Path

_SPECIAL = ("[vvar]", "[vvar_vclock]", "[vsyscall]")


def find_in_process(pid, needles):
    """Return `{(name, region)}` of the needles in the writable memory of a process: in its stack, heap or other."""
    found = set()
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
            found |= {(needle, region) for needle, value in needles.items() if value in data}
    return found
