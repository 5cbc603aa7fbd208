"""The stage of a qualification: a private folder beside the sealed one, with copies of links that rows change."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sets.anchor import Anchor
from fastrack._sets.entries import PlainEntry
from fastrack._sets.folder import SAFETENSORS, SealedFolder, compare_index, load_folder, size_of
from fastrack._transfer.api import to_device
from fastrack._util.atomic import temporary_name
from fastrack._util.endings import remove_own
from fastrack._util.regular_file import open_regular
from fastrack._util.rights import require_own
from fastrack.attest import Policy
from fastrack.errors import KeyPermissionError
from fastrack_bench.qualification.record import FAILED, NOT_ASKED, NOT_HERE, PASSED

MARK = ".fastrack-qualify"  # in a private folder, which is locked while its process lives
_CLONE = 0x40049409  # FICLONE of linux/fs.h: a copy that shares its blocks, where the file system can

Outcome = tuple[str, str]
"""The state of a row, and what it saw."""


class EndedError(Exception):
    """The end of a row that could not be run: its state, and the reason."""


def not_asked(reason: str) -> NoReturn:
    """End a row for which an option or the folder lacks something."""
    raise EndedError(NOT_ASKED, reason)


def not_here(reason: str) -> NoReturn:
    """End a row for which this machine lacks something."""
    raise EndedError(NOT_HERE, reason)


@dataclass(frozen=True, slots=True)
class Stage:
    """The folder that is qualified, and a private one for the rows. kept : what a row leaves to later ones."""

    opened: SealedFolder
    folder: Path
    ring: KeyRing
    policy: Path | None
    collateral: Path | None
    anchor: Path | None
    path: Path
    needles: list[bytes] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def rules(self) -> Policy:
        """The policy. Without one the row ends."""
        return not_asked("no --policy") if self.policy is None else Policy.from_toml(self.policy)

    def shards(self, count: int = 1) -> list[str]:
        """Return the names of the smallest files of weights."""
        names = [name for name in self.opened.sealed_names if name.lower().endswith(SAFETENSORS)]
        if len(names) < count:
            not_asked(f"the folder has {len(names)} sealed .safetensors files")
        return sorted(names, key=lambda name: size_of(self.opened.files[name]))[:count]

    def new(self, name: str) -> Path:
        """Return a path in a new folder."""
        return Path(tempfile.mkdtemp(dir=self.path)) / name

    @contextlib.contextmanager
    def copy(self) -> Iterator[Copy]:
        """Yield a copy of the folder, and remove it."""
        target = self.new("copy")
        for here, _, names in os.walk(self.folder):
            place = target / os.path.relpath(here, self.folder)
            place.mkdir()
            for name in names:
                (place / name).symlink_to(Path(here, name).resolve())
        try:
            yield Copy(self, target)
        finally:
            shutil.rmtree(target)

    def load(
        self,
        folder: Path | None = None,
        keys: KeySource | None = None,
        *,
        anchor: Anchor | None = None,
        first: str | None = None,
        take: Callable[[Any], None] = lambda _: None,
    ) -> int:
        """Open the folder or a copy, and all that is in it, a file that was changed `first`. Return the bytes.

        Each tensor is opened on the host, given to `take`, and dropped.
        """
        ring, nbytes = KeyRing.resolve(self.ring if keys is None else keys), 0
        opened = load_folder(self.folder if folder is None else folder, ring, anchor=anchor)
        for name in sorted(opened.files, key=lambda name: name != first):
            if isinstance(opened.files[name], PlainEntry):
                content = opened.read(name)
                compare_index(opened, name, content)
                nbytes += len(content)
                continue
            with opened.open(name) as file:
                for tensor in file.values():
                    array = to_device(tensor, keys=ring, framework="numpy")
                    take(array)
                    nbytes += array.nbytes
        return nbytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the folder, of links to its files. Methods that change one return its name."""

    stage: Stage
    path: Path

    def replace(self, name: str, write: Callable[[Path], object]) -> str:
        """Have a function write another file, or none."""
        (self.path / name).unlink()
        write(self.path / name)
        return name

    def swap(self, one: str, two: str) -> str:
        """Swap two files."""
        first, second = (self.path / name for name in (one, two))
        other = first.rename(self.path / "other")
        second.rename(first)
        other.rename(second)
        return one

    def edit(self, name: str, change: Callable[[BinaryIO], object]) -> str:
        """Change a file, which is copied first."""
        path, source = self.path / name, (self.path / name).resolve()
        path.unlink()
        with open_regular(source) as old, path.open("x+b") as new:
            try:
                fcntl.ioctl(new, _CLONE, old.fileno())
            except OSError:
                shutil.copyfileobj(old, new, 1 << 20)
            change(new)
        return name

    def cut(self, name: str) -> str:
        """Cut the last bytes off a file."""
        return self.edit(name, lambda file: file.truncate(file.seek(-5, os.SEEK_END)))

    def flip(self, name: str, part: float) -> str:
        """Flip a bit at a part of a file: 0.5 is its middle, and 1 its last byte."""

        def change(file: BinaryIO) -> None:
            place = int(file.seek(0, os.SEEK_END) * part) - 1
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

        return self.edit(name, change)


@contextlib.contextmanager
def private_folder(beside: Path) -> Iterator[Path]:
    """Yield a private folder, and remove it: beside another, or a temporary one where others could replace it.

    What processes that were killed left there is removed first.
    """
    parent = beside.resolve().parent
    try:
        require_own(parent)
    except KeyPermissionError:
        parent = Path(tempfile.gettempdir())
    if not os.access(parent, os.W_OK):
        parent = Path(tempfile.gettempdir())
    for left in parent.glob(".fastrack-*.part"):
        with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_NB):  # no folder, or one in use
            if (left / MARK).is_file() and left.stat().st_uid == os.geteuid():
                remove_own(left, os.getpid())
    path = temporary_name(parent)  # by such a name `fastrack doctor` finds it too
    path.mkdir(0o700)
    try:
        with _locked(path):
            (path / MARK).touch()
            yield path
    finally:
        remove_own(path, os.getpid())


@contextlib.contextmanager
def _locked(path: Path, how: int = 0) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(descriptor)


def list_files(folder: Path) -> dict[Path, tuple[int, ...]]:
    """Return the files of a folder: node, size and time of the last change of each."""
    paths = (Path(here, name) for here, _, names in os.walk(folder) for name in names)
    found = {path: path.stat() for path in paths if path.is_file()}
    return {path: (status.st_ino, status.st_size, status.st_mtime_ns) for path, status in found.items()}


def expect(kind: type[Exception], about: str, run: Callable[[], object], passed: str = PASSED) -> Outcome:
    """Run what has to raise an error of exactly this kind that tells what it is about. Any other, or none, fails."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - of any kind, to be told
        if type(error) is kind and about in str(error):
            return passed, f"{kind.__name__}: {about}"
        found = f"{type(error).__name__}: {error}"
    else:
        found = "none"
    return FAILED, f"expected {kind.__name__} about {about}, got {found}"
