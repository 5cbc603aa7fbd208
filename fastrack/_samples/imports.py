"""`Import`: samples of a source, stored in a folder of shards, once each."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from fastrack._keys.keyring import KeyLike
from fastrack._keys.keys import Key
from fastrack._samples.blocks import LABEL, PATH, Column
from fastrack._samples.import_writer import ImportWriter
from fastrack._samples.stored import Part, StoredSamples, shards_in
from fastrack._util.locations import Location, Url
from fastrack._util.shown import shown
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._samples.readers import Source

STORED = "stored already"
"""Why a file is left out that the dataset has."""

_HAS_SAMPLES = "Append others (append=True), resume their source (resume=True), or choose another folder"
_Name = tuple[str, str]  # of a file, after the column that has it: "" if shards tell it


Batches = Iterator[tuple[str | None, Mapping[str, Any]]]
"""Values of each column, in several samples of one file, after the name of the file: None if they are of none."""


@dataclass
class Import:
    """An import into `folder` of what `open_source` opens, several times if need be.

    After an error too it tells how far it came.
    """

    open_source: Callable[[Mapping[str, Column]], tuple[Source | None, Batches]]
    folder: Location
    resume: bool = False
    append: bool = False
    skip_existing: bool = False
    chosen: Sequence[str] | None = None
    records: Iterable[str] = ()
    is_dry: bool = False

    samples: int = field(default=0, init=False)  # that the folder has
    before: int = field(default=0, init=False)  # that it had
    nbytes: int = field(default=0, init=False)  # of the samples that were read
    read: int = field(default=0, init=False)  # samples
    file: str = field(default="", init=False)  # of the samples that were read last
    begun: int = field(default=0, init=False)  # files of which samples were read
    columns: dict[str, Column] = field(default_factory=dict, init=False)
    skipped: list[tuple[str, str]] = field(default_factory=list, init=False)  # files that were left out, and why
    _number: int = field(default=0, init=False)  # of the file that is read, among those of the source
    _classes: dict[str, int] = field(default_factory=dict, init=False)
    _files: Source | None = field(default=None, init=False)
    is_storing: bool = field(default=False, init=False)  # no longer comparing the source with what the folder has
    is_begun: bool = field(default=False, init=False)  # the folder has samples of this run

    def __post_init__(self) -> None:
        if self.resume and self.append:
            raise ValueError("append=: expected append= or resume=, got both. Resume what was interrupted, then append")
        if self.skip_existing and not self.append and not self.resume:
            raise ValueError("skip_existing=: expected append= or resume= beside it, got neither. Add one")
        if isinstance(self.chosen, str):
            raise TypeError(f"columns=: expected names, got one text. Give [{shown(self.chosen, 200)}]")
        if self.chosen is not None and not self.chosen:
            raise ValueError("columns=: expected a name or more, got none. Name the columns to store")

    def work(self, key: KeyLike | None, shard_size: int, progress: Callable[[int], None] | None = None) -> int:
        """Read the source and store what is new. Return the number of samples that the folder has."""
        if self.is_dry and key is None and not self.resume and not self.append:
            if self._find_shards():
                raise _refusal(FileExistsError, errno.EEXIST, f"{self.folder} has samples already. {_HAS_SAMPLES}")
            key = Key.generate()  # which seals nothing
        with ImportWriter(self.folder, key, is_dry=self.is_dry, records=self.records, shard_size=shard_size) as writer:
            try:
                self.before = writer.there.samples
                self._require_beginning(writer)
                expected = writer.resume() if self.resume and writer.there.shards else None
                leaves_out = self.skip_existing
                if expected is not None:
                    leaves_out |= writer.there.shards[-1][1].left_out  # a run goes on as it began
                existing: frozenset[_Name] = frozenset()
                if self.append or leaves_out:
                    self._classes = classes_in(writer.read_earlier([PATH, LABEL]))
                if leaves_out:
                    writer.leave_out_existing()
                    existing = self._find_existing(writer)
                elif self.append or (expected is not None and writer.there.is_complete and writer.run):
                    self._require_new_files(writer)
                self._store(writer, expected, existing, progress)
                writer.close()
            finally:
                self.samples, self.columns = writer.stored, writer.columns
                self.is_begun = self.resume or len(self._find_shards(writer)) > len(writer.there.shards)
        return self.samples

    def _find_shards(self, writer: ImportWriter | None = None) -> Sequence[object]:
        """Return the shards in the folder. Those of a store are as many as the writer knows: asking might fail."""
        if isinstance(self.folder, Url):
            return shards_in(self.folder) if writer is None else range(writer.shards)
        return shards_in(self.folder) if self.folder.is_dir() else []

    def _require_beginning(self, writer: ImportWriter) -> None:
        """Refuse a folder with samples, unless they are resumed, or appended to after the end of their last run."""
        there = writer.there
        if self.append and not there.shards:
            message = f"{self.folder} has no dataset to append to. Import the first source without append="
            raise _refusal(FileNotFoundError, errno.ENOENT, message)
        if self.resume or not there.shards or (self.append and there.is_complete is not False):
            return
        files = there.shards[-1][1].files
        state = f"{self.folder} has {there.samples} samples already"
        advice = _HAS_SAMPLES
        if there.is_complete is False:
            state = f"{self.folder} has {there.samples} samples of an import that was interrupted, or still runs"
            state += f", in {shown(files[-1][0], 80)}" if files and files[-1][0] else ""
            advice = "Give its source again with resume=True, or choose another folder"
        elif there.is_complete is None:  # of version 0.1, which does not tell
            advice = "Resume their import with its source (resume=True), or choose another folder"
        raise _refusal(FileExistsError, errno.EEXIST, f"{state}. {advice}")

    def _store(
        self,
        writer: ImportWriter,
        expected: StoredSamples | None,
        existing: frozenset[_Name],
        progress: Callable[[int], None] | None,
    ) -> None:
        for part in self._read(writer):
            with self._naming_file():
                for start, stop in _stretches_without(existing, part):
                    new = {name: block.part(start, stop) for name, block in part.blocks.items()}
                    writer.write_batch(new, file=part.file or None)
            self.is_storing = expected is None or expected.is_compared
            self.read += part.count
            self.nbytes += sum(block.data.size for block in part.blocks.values())
            if progress is not None:
                progress(part.count)
        if self._files is not None:
            self.skipped += self._files.skipped
        if expected is not None:
            self.is_storing = False
            expected.require_whole_run()
        if not self.read:
            raise FormatError(f"{self._source}: expected a sample or more, got none. Name another source")

    def _read(self, writer: ImportWriter) -> Iterator[Part]:
        """Open the source, and return its samples in the columns of the folder."""
        self._files, batches = self._open(writer)
        self.file, self.begun, self._number = "", 0, 0
        while True:
            with self._naming_file():
                name, batch = next(batches, (None, None))
                if batch is None:
                    return
                blocks = writer.fit(batch)
                part = Part(name or "", blocks, 0, next(iter(blocks.values())).count)
                for (_, file), _, _ in _names_in(part):
                    self.begun += file != self.file
                    self.file = file
            yield part

    @contextlib.contextmanager
    def _naming_file(self) -> Iterator[None]:
        """Name the file of the last samples in errors of its values."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if self._files is None or str(self._files.current) in str(error):
                raise
            raise FormatError(f"{self._files.current}: {error}") from None

    @property
    def place(self) -> tuple[int, int] | None:
        """Number of the file that was read last, and of all files; None if they are not known beforehand."""
        files = self._files
        if files is None:
            return None
        while self._number < len(files.paths) and files.paths[self._number] is not files.current:
            self._number += 1
        if self._number == len(files.paths):
            self._number = 0
            return None
        return self._number + 1, len(files.paths)

    @property
    def notes(self) -> list[str]:
        """Remarks on the files of the source, such as columns that became text by a cell."""
        return [] if self._files is None else self._files.notes

    @property
    def classes(self) -> Mapping[str, int]:
        """The label of each class of the source; none without the columns that tell them."""
        return self._files.classes if self._files is not None and {PATH, LABEL} <= self.columns.keys() else {}

    @property
    def current(self) -> str:
        """Name of the file that was read last; "" if the source is no file."""
        return "" if self._files is None else self._files.name_of(self._files.current)

    @property
    def _source(self) -> str:
        return "import_samples" if self._files is None or not self._files.paths else str(self._files.paths[0])

    def _open(self, writer: ImportWriter) -> tuple[Source | None, Batches]:
        files, batches = self.open_source(writer.there.columns)
        if files is not None and self._classes:
            self._require_classes(files.classes)
        return files, batches

    def _require_classes(self, given: Mapping[str, int]) -> None:
        """Refuse classes of a source that have other numbers than in the folder: a source numbers those it has."""
        option = "skip_existing=" if self.skip_existing else "append=" if self.append else "resume="
        of_number = {number: name for name, number in self._classes.items()}
        for name, number in given.items():
            if self._classes.get(name, number) == number and of_number.get(number, name) == name:
                continue
            last = of_number[max(of_number)]
            early = next((each for each in given if each not in self._classes and each < last), None)
            if early is not None:
                raise ValueError(
                    f"{option}: expected new classes that sort after {shown(last, 80)}, the last one that "
                    f"{self.folder} has, as classes are numbered in their order, got {shown(early, 80)}. Rename its "
                    "folder, or import all anew into another folder"
                )
            of = f", which is that of {shown(of_number[number], 80)}" if number in of_number else ""
            raise ValueError(
                f"{option}: expected the class {shown(name, 80)} with a label of its own, as {self.folder} has it, "
                f"got {number}{of}. Give a folder with all classes, and skip_existing="
            )

    def _require_new_files(self, writer: ImportWriter) -> None:
        """Refuse files that the folder has of earlier runs: they would be in it twice, and none can be taken out."""
        files, _ = self._open(writer)
        if files is None:
            return
        last = {name for part in writer.read_last([PATH]) for (_, name), _, _ in _names_in(part)}
        added = {files.name_of(path) for path in files.paths} - last
        earlier = {name for part in writer.read_earlier([PATH]) for (_, name), _, _ in _names_in(part)}
        if added & earlier:
            expected = "append=: expected new files" if self.append else "resume=: expected its source, and new files"
            raise ValueError(
                f"{expected}, got {shown(min(added & earlier), 80)}, a name that {self.folder} has. Leave out files "
                "that it has by skip_existing=, or rename them"
            )

    def _find_existing(self, writer: ImportWriter) -> frozenset[_Name]:
        """Return the files of the source that the folder has. Raise ValueError if one of them has other samples now."""
        stored, found = _digest_files(writer.read_earlier()), _digest_files(self._read(writer))
        kinds = {column for column, _ in (*stored, *found)}
        if len(kinds) > 1 or not all(name for _, name in (*stored, *found)):
            raise ValueError(
                f"skip_existing=: expected a source of files, and {self.folder} made of such files, got samples of no "
                "file or files of another kind. Leave it out, and give only new files"
            )
        if self._files is not None:  # those without samples too
            names = {(column, self._files.name_of(path)) for path in self._files.paths for column in kinds}
            found |= dict.fromkeys(stored.keys() & names - found.keys(), ())
        gone = {digest: name for (_, name), digest in stored.items() if (_, name) not in found}
        for name, digest in found.items():
            if stored.get(name, digest) != digest:
                if (times := self._times(writer, name)) > 1:
                    raise ValueError(
                        f"skip_existing=: expected {shown(name[1], 80)} once in {self.folder}, got it {times} times, "
                        "as it was appended again. Import all anew into another folder, or give only new files"
                    )
                raise ValueError(
                    f"skip_existing=: expected {shown(name[1], 80)} as {self.folder} has it, got other samples in it. "
                    "Give it as it was, and what is new in a file of its own"
                )
            if name not in stored and digest in gone:
                raise ValueError(
                    f"skip_existing=: expected new samples in {shown(name[1], 80)}, got those that {self.folder} has "
                    f"of {shown(gone[digest], 80)}, which is no longer in the source. Name it so again, or leave it out"
                )
        self.skipped = [(name, STORED) for _, name in found if (_, name) in stored]
        return frozenset(stored.keys() & found.keys())

    def _times(self, writer: ImportWriter, name: _Name) -> int:
        """Return how many of the runs before this one stored a file."""
        runs = {about.run for _, about in writer.there.shards} - {writer.run}
        parts = ((run, part) for run in runs for part in writer.read_earlier([PATH], run))
        return len({run for run, part in parts for each, _, _ in _names_in(part) if each == name})


def _refusal(kind: type[OSError], number: int, message: str) -> OSError:
    """Return an error whose text is only the message: with a name of a file, Python puts the number before it."""
    error = kind(message)
    error.errno = number
    return error


def _names_in(part: Part) -> Iterator[tuple[_Name, int, int]]:
    """Return the name of each file that samples of a part are of, with the first of these samples and their number."""
    path = part.blocks.get(PATH)
    if part.file or path is None or path.column != Column("U8", None):
        yield ("", part.file), part.start, part.count
        return
    for index in range(part.start, part.start + part.count):
        yield (PATH, path.between(index, index + 1).tobytes().decode("utf-8", "surrogateescape")), index, 1


def classes_in(parts: Iterable[Part]) -> dict[str, int]:
    """Return the label of each class, the first folder in the paths of samples; none if paths and labels disagree."""
    classes: dict[str, int] = {}
    for part in parts:
        labels = part.blocks.get(LABEL)
        if part.file or labels is None or labels.column != Column("I64", ()):
            return {}
        for (_, path), at, _ in _names_in(part):
            label = int(labels.between(at, at + 1).view(np.int64)[0])
            if "/" not in path or classes.setdefault(path.partition("/")[0], label) != label:
                return {}
    return classes


def _stretches_without(existing: frozenset[_Name], part: Part) -> Iterator[tuple[int, int]]:
    """Return the first sample, and the one after the last, of each stretch of samples of no such file."""
    if not existing:
        yield part.start, part.start + part.count
        return
    for name, start, count in _names_in(part):
        if name not in existing:
            yield start, start + count


def _digest_files(parts: Iterable[Part]) -> dict[_Name, tuple[bytes, ...]]:
    """Return a digest of the samples of each file, however they are divided among parts."""
    found: dict[_Name, tuple[bytes, ...]] = {}
    pieces = ((name, part.blocks, start, count) for part in parts for name, start, count in _names_in(part))
    for name, same in groupby(pieces, itemgetter(0)):
        hashes: dict[tuple[str, bool], Any] = {}
        for _, blocks, start, count in same:
            for column in blocks.keys() - {name[0]}:  # a name is no content: a renamed file is found by its digest
                block = blocks[column]
                values = hashes.setdefault((column, False), hashlib.blake2b(digest_size=16))
                values.update(block.between(start, start + count))
                if block.ends is not None:
                    lengths = hashes.setdefault((column, True), hashlib.blake2b(digest_size=16))
                    lengths.update(np.diff(block.ends[start : start + count + 1]).astype(np.int64))
        digests = [f"{column!r}{hashes[column].hexdigest()}" for column in sorted(hashes)]
        digest = hashlib.blake2b("".join(digests).encode("utf-8", "surrogateescape"), digest_size=16).digest()
        found[name] = (*found.get(name, ()), digest)
    return found
