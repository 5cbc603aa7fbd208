"""Files that readers of fastrack's formats must open or refuse. Their keys are for tests and protect nothing.

>>> from fastrack_testkit import cases
>>> case = next(case for case in cases("sealed") if case.name == "size-1")
>>> case.expect, case.get("as"), len(case.payload) > 73
('success', 'tensor', True)
>>> case.result["tensors"]["a"]["shape"]
[1]
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Case", "cases", "parse"]
__version__ = "1.0.0"


@dataclass(frozen=True, slots=True)
class Case:
    """Hold what a reader is given, and what it has to come to."""

    kind: str
    """The form that is read, such as `sealed`."""
    name: str
    """The name of the file without its kind, by which a case is told from the others of its kind."""
    rule: str
    """The rule that the case tries; the kit's `rules.md` lists all."""
    expect: str
    """`success`, or the class of the failure."""
    fields: tuple[tuple[str, str], ...]
    """All lines in order, each a name and a value."""
    payload: bytes
    """The file, or the files one after another."""

    def get(self, name: str) -> str | None:
        """Return the value of the first line of this name, or None.

        >>> Case("sealed", "x", "r", "format", (("key", "00"), ("key", "01")), b"").get("key")
        '00'
        """
        return next(iter(self.all(name)), None)

    def all(self, name: str) -> list[str]:
        """Return the values of all lines of this name.

        >>> Case("sealed", "x", "r", "format", (("key", "00"), ("key", "01")), b"").all("key")
        ['00', '01']
        """
        return [value for line, value in self.fields if line == name]

    def files(self) -> dict[str, bytes]:
        """Return the files of the payload by their names; a payload that is one file has none.

        >>> Case("folder", "x", "r", "format", (("file", "1 a/b"), ("file", "2 c")), b"xyz").files()
        {'a/b': b'x', 'c': b'yz'}
        """
        files, at = {}, 0
        for value in self.all("file"):
            size, name = value.split(" ", 1)
            files[name] = self.payload[at : at + int(size)]
            at += int(size)
        return files

    @property
    def result(self) -> Any:
        """The values that a reader reads; None if it has to fail."""
        text = self.get("result")
        return None if text is None else json.loads(text)


def parse(data: bytes, name: str) -> Case:
    """Return the case of a file.

    Raises ValueError for a file of a later kit, or one that was cut or altered.

    >>> head = "kit: 1\\nkind: sealed\\nrule: sealed.tag\\nexpect: authentication\\nsha256: "
    >>> parse(f"{head}{hashlib.sha256(b'...').hexdigest()}\\n\\n...".encode(), "x").payload
    b'...'
    """
    head, end, payload = data.partition(b"\n\n")
    if not end:
        raise ValueError(f"{name}: expected an empty line after the head, got none; get the kit anew")
    fields = [(line, value) for line, _, value in (text.partition(": ") for text in head.decode().split("\n"))]
    first = dict(reversed(fields))
    if first.get("kit") != "1":
        raise ValueError(f"{name}: expected a case of kit 1, got {first.get('kit')}")
    if first.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise ValueError(f"{name}: expected a payload of its hash; get the kit anew")
    return Case(first["kind"], name, first["rule"], first["expect"], tuple(fields), payload)


def cases(kind: str | None = None) -> Iterator[Case]:
    """Yield all cases, or those of a kind, in the order of their names.

    Raises ValueError for a kind that the kit does not have, and for an archive that was cut or altered.

    >>> {case.kind for case in cases("sealed")}
    {'sealed'}
    """
    here = Path(__file__).parent
    folder = here / "cases" if (here / "cases").is_dir() else here.parent / "cases"
    kinds = sorted(path.stem for path in folder.glob("*.tar"))
    if kind is not None and kind not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}, got {kind!r}")
    return (case for each in kinds if kind in {None, each} for case in _read(folder, each))


def _read(folder: Path, kind: str) -> Iterator[Case]:
    lines = (folder / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    digests = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    with tarfile.open(folder / f"{kind}.tar", "r:") as archive:
        for member in archive:
            file = archive.extractfile(member)
            data = b"" if file is None else file.read()
            if digests.pop(member.name, None) != hashlib.sha256(data).hexdigest():
                raise ValueError(f"{member.name}: expected a case of its digest in SHA256SUMS; get the kit anew")
            yield parse(data, member.name.removeprefix(f"{kind}/"))
    for name in digests:
        if name.startswith(f"{kind}/"):
            raise ValueError(f"{name}: expected a case in {kind}.tar, got none; get the kit anew")
