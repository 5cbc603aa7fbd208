"""Mutants of the kernels, which `kernels.txt` lists: what to break, and the tests that notice.

Some changes alter no result, and so are no mutants:

- `carryless` may take an XOR for any of its sums: what a column holds above its lowest bit is masked away.
- `seal` may use one side for all chunks: with two barriers a chunk no write of the next meets a read of this one.
- `seal` may store 16 bytes for a short last block: what follows the text is zeros, and the tag takes their place later.
- A thread may encrypt blocks that do not exist, as it stores none of them.
- A row that was altered need not be zeros, nor `take_key` ask for its tag: one suffices, as a key of 0 bits is none.
- The fences of `Report.end` order what a device may reorder. Neither the shim nor the interpreter does.
"""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of the kernels."""

    name: str
    file: str
    old: str  # a text that the file has once
    new: str
    breaks: str
    tests: tuple[str, ...]  # that notice, as pytest names them in tests


def _read(text):
    """Yield the mutants of `kernels.txt`, whose first lines say how they are written."""
    header, *files = re.split(r"^\[(\S+)\]\n", text, flags=re.MULTILINE)
    tests = dict(re.findall(r"^(\w+) += (\S+)$", header, re.MULTILINE))
    for file, listed in zip(files[::2], files[1::2], strict=True):
        lines = listed.rstrip("\n").split("\n")
        for title, edit in zip(lines[::2], lines[1::2], strict=True):
            name, breaks, noticing = re.fullmatch(r"(\S+): (.*) \(([\w, ]+)\)", title).groups()
            text = edit.removeprefix("    ").replace(r"\n", "\n")
            old, new = (re.sub("«(.*?) => (.*?)»", kept, text, flags=re.DOTALL) for kept in (r"\1", r"\2"))
            yield Mutant(name, file, old, new, breaks, tuple(tests[test] for test in noticing.split(", ")))


MUTANTS = list(_read(Path(__file__).with_name("kernels.txt").read_text("utf-8")))
