"""Run a command on one file, folder or stream, or on many files: expand the paths, work on each, print the reports."""

import contextlib
import glob
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import typer
from rich.table import Table

from fastrack._cli.console import clean, format_rate, pluralize, print_lines, progress_bar, speed, taken_back
from fastrack._cli.errors import Terminated, error_document, log_origin, message_of, name_source, show_errors, status_of
from fastrack._cli.files import as_location, check_directory, is_sealed_folder, is_stream, load_engine
from fastrack._keys.keys import key_file_id
from fastrack._samples.data_set import is_data_set
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder_writer import require_inside
from fastrack._util.key_text import has_key, refuse_key_text
from fastrack._util.locations import Url, without_password
from fastrack._util.shown import HIDDEN, format_size
from fastrack._util.trial import dry_run
from fastrack.errors import FastrackError

_log = logging.getLogger("fastrack")
SUFFIX = ".safetensors"
ONE = "expected one source and the path of one target, got several or a folder"  # for `refuse_options`
NO_FOLDER = "expected none with a folder"
NEW_FOLDER = "expected none, as no folder is replaced. Name a new folder as TARGET"
A_MODEL = "expected the folder of a model as SOURCE, and no --recursive"
NO_FORCE = "expected it without --force, got both"
NO_OUTPUT = "expected none with standard output"
A_FOLDER = "expected a file, got a folder; --recursive takes the files in it"
_MOST_ALIKE = 20  # errors of one kind that are all shown
_FIRST_ALIKE = 3  # of more than that
Verb = Literal["sealing", "unsealing", "verifying", "rekeying", "reading"]
_DONE = {
    "sealing": "sealed",
    "unsealing": "unsealed",
    "verifying": "verified",
    "rekeying": "rekeyed",
    "reading": "read",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A file, a folder or a stream to work on. `name` is its path in the folder of the targets."""

    source: Path
    name: Path


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a job.

    document : for programs; lines : the same as text; brief : the lines of these with --quiet, and of one of many jobs
    nbytes : of plaintext; plain : names of tensors that are not protected; errors : of content that is not authentic
    plaintext : paths that were written, and are removed if standard output does not take the report
    skipped : nothing was done, because the target exists
    """

    document: Mapping[str, Any]
    lines: Sequence[str | Table] = ()
    brief: Sequence[str] = ()
    nbytes: int = 0
    plain: Sequence[str] = ()
    plaintext: Sequence[Path] = ()
    errors: Sequence[Exception] = ()
    skipped: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the document, with the first error."""
        return {**self.document, "error": error_document(self.errors[0])} if self.errors else dict(self.document)


@dataclass(slots=True)
class Meter:
    """The progress of a job and the time that it takes. Many jobs share one progress bar, by its function `shared`."""

    verb: Verb
    shared: Callable[..., None] | None
    is_dry: bool
    seconds: float = 0.0
    nbytes: int = 0
    stored: int = 0  # bytes of the file that a dry run would make

    @contextlib.contextmanager
    def run(self, total: int) -> Iterator[Callable[..., None]]:
        """Take the time of the block, and yield a function to call with each number of bytes done.

        In a dry run the block ends where it would make a file.
        """
        load_engine(self.verb)  # outside the time of the report
        with contextlib.nullcontext(self.shared) if self.shared else progress_bar(self.verb, total) as advance:

            def count(nbytes: int) -> None:
                self.nbytes += nbytes
                advance(nbytes)

            start = time.perf_counter()
            with self._foreseeing() if self.is_dry else contextlib.nullcontext():
                yield count
            self.seconds = time.perf_counter() - start

    @contextlib.contextmanager
    def _foreseeing(self) -> Iterator[None]:
        """Leave the block where it would make its first file, folder or object, and keep the size of that."""

        def end(size: int) -> NoReturn:
            self.stored = size
            raise _Foreseen

        token = dry_run.set(end)
        try:
            with contextlib.suppress(_Foreseen):
                yield
        finally:
            dry_run.reset(token)

    def describe(self, nbytes: int) -> dict[str, float | bool]:
        """Return the time and the rate for `nbytes` bytes, as members of a document."""
        if self.is_dry:
            return {"dry_run": True}
        return {"seconds": self.seconds, "gbps": speed(nbytes, self.seconds)}

    def report(
        self,
        source: object,
        target: object,
        nbytes: int,
        line: str,
        members: Mapping[str, Any],
        *,
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        **more: Any,
    ) -> Report:
        """Return the report on a target: a line with the time and the rate for `nbytes` bytes, and lines around it."""
        rate = "nothing was written" if self.is_dry else format_rate(nbytes, self.seconds)
        return Report(
            {"source": str(source), "target": str(target), **members, **self.describe(nbytes)},
            lines=[*before, f"{clean(str(target))}: {line}; {rate}", *after],
            nbytes=nbytes,
            **more,
        )


class _Foreseen(Exception):  # noqa: N818 - no error
    """The end of a dry run."""


Work = Callable[[Job, Meter], Report | None]  # None if standard output has the result itself
Summary = Callable[[Sequence[Report]], str]


@dataclass(frozen=True, slots=True)
class Batch:
    """The files of a command line, what is done with them, and how it is told.

    many : several files may be named, each of which has a document of its own, where `member` names it
    left_out : the number of files of another suffix in folders; target : the folder for the results of many
    """

    verb: Verb
    jobs: Sequence[Job]
    many: bool = False
    left_out: int = 0
    target: Path | None = None
    member: str = "source"
    as_json: bool = False
    quiet: bool = False
    is_dry: bool = False

    @classmethod
    def of(
        cls,
        verb: Verb,
        paths: Sequence[Path],
        target: Path | None = None,
        *,
        many: bool,
        recursive: bool = False,
        suffix: str = "",
        anchor: Anchor | None = None,
        inside: bool = False,
        **told: Any,
    ) -> Self:
        """Return a job for each file that paths and globs name, and with `recursive` for each file of a folder.

        Files in a folder must end with `suffix`. A job for a missing file reports its error along with other files;
        with an anchor, files of its set that a folder lacks get one too. A sealed folder is one job, as its files
        belong together. Files in `target` are left out unless they are named. With `inside`, links that lead out of a
        folder are refused.
        """
        if not many:
            return cls(verb, [Job(paths[0], Path(paths[0].name))], **told)
        if any(map(is_stream, paths)):
            raise typer.BadParameter("expected - alone, got it with other files", param_hint="SOURCE")
        by_path: dict[Path, Job] = {}
        left_out = 0
        for path in matches(paths):
            if not recursive or not path.is_dir() or is_sealed_folder(path):
                by_path.setdefault(path, Job(path, Path(path.name)))
                continue
            names = list(_walk(path, target))
            if inside:
                for name in names:
                    require_inside(path / name, path)
            taken = [name for name in names if name.name.endswith(suffix) or (path / name).is_dir()]
            left_out += len(names) - len(taken)
            listed = map(Path, () if anchor is None else anchor.names_in(path))
            taken += [name for name in listed if name.name.endswith(suffix) and not (path / name).exists()]
            by_path |= {path / name: Job(path / name, name) for name in taken if path / name not in by_path}
        if target is not None:
            _check_targets(by_path.values(), target)
        return cls(verb, list(by_path.values()), many, left_out, target, **told)

    def run(self, work: Work, summary: Summary = lambda _: "", *, in_full: bool | None = None) -> None:
        """Work on each job, print the reports, and exit with the status of their kind if there are errors.

        An error of a single job fails the command. With many jobs it belongs to its file; the others go on, unless
        credentials were refused, and a `summary` follows. Full reports of many jobs are printed `in_full`, by default
        of one, and in a dry run. With the folder of a target, an interruption says how to go on.
        """
        reports, plaintext, later = list[Report](), list[Path](), list[str]()
        in_full = self.is_dry or (len(self.jobs) == 1 if in_full is None else in_full)

        def take(report: Report) -> None:
            reports.append(report)
            plaintext.extend(() if self.is_dry else report.plaintext)  # what is there is not of this run
            if self.as_json:
                sys.stdout.write(json.dumps(report.as_dict(), indent=None if self.many else 2) + "\n")
            elif self.quiet or (self.many and not in_full):
                later.extend(report.brief)  # below the bar
            else:
                print_lines([*report.lines, ""] if len(self.jobs) > 1 and report.lines else report.lines)

        start = time.perf_counter()
        with _exit_if_failed(reports), taken_back(plaintext):
            try:
                if self.many:
                    with contextlib.nullcontext() if self.is_dry else self._counted(reports):
                        self._work_on_each(work, take)
                elif (report := work(self.jobs[0], self._begin(self.jobs[0]))) is not None:
                    take(report)
            finally:
                if self.as_json:
                    sys.stdout.flush()  # finished jobs are reported, even after an error
                elif self.many or self.quiet:
                    show_errors(_fold(reports, self.member if self.many else None))
            for_people = self.many and not self.as_json
            print_lines([*later, *(["Nothing was written."] if self.is_dry and for_people else [])])
            if for_people and not self.quiet and not (in_full and len(self.jobs) == 1):
                print_lines(self._close(reports, summary, time.perf_counter() - start))

    def _work_on_each(self, work: Work, take: Callable[[Report], None]) -> None:
        load_engine(self.verb)  # here, so that it fails once for the command, not for each file
        sizes = [_size_of(job.source) for job in self.jobs]
        with progress_bar(self.verb, sum(sizes), files=len(sizes)) as progress:
            for job, size in zip(self.jobs, sizes, strict=True):
                meter = self._begin(job, progress)
                try:
                    is_whole = is_sealed_folder(job.source) or (self.verb != "sealing" and is_data_set(job.source))
                    if job.source.is_dir() and not is_whole:
                        raise IsADirectoryError(A_FOLDER)
                    report = work(job, meter)
                except BrokenPipeError:
                    raise
                except (FastrackError, OSError, MemoryError, ImportError, typer.BadParameter) as error:
                    log_origin(error)
                    error.__cause__ = error.__context__ = None  # frames of tracebacks hold results and open files
                    report = Report({self.member: str(as_location(job.source))}, errors=(error.with_traceback(None),))
                assert report is not None
                take(report)
                progress(max(0, size - meter.nbytes), files=1)
                if any(getattr(error, "is_refusal", False) for error in report.errors):
                    break  # a PIN would be sent for each file

    def _begin(self, job: Job, shared: Callable[..., None] | None = None) -> Meter:
        """Log that a job begins, and return its meter."""
        name = without_password(str(job.source))
        _log.debug("%s %s", self.verb, HIDDEN if has_key(name, may_be_id=True) else name)
        return Meter(self.verb, shared, self.is_dry)

    def _close(self, reports: Sequence[Report], summary: Summary, seconds: float) -> list[str]:
        """Return the lines below the reports on many files."""
        failed = sum(bool(report.errors) for report in reports)
        skipped = sum(report.skipped for report in reports)
        lines = [f"left as they are: {pluralize(skipped, 'file')} with a target that exists"] if skipped else []
        lines += [f"left out: {pluralize(self.left_out, 'file')} without the suffix {SUFFIX}"] if self.left_out else []
        if rest := len(self.jobs) - len(reports):
            lines.append(f"not tried: {pluralize(rest, 'file')}, as credentials were refused")
        verdict = f"{failed} of {pluralize(len(reports), 'file')} FAILED; " if failed else ""
        nbytes = format_size(sum(report.nbytes for report in reports))
        return [*lines, f"{verdict}{summary(reports)}; {nbytes} in {seconds:.2f} s"]

    @contextlib.contextmanager
    def _counted(self, reports: Sequence[Report]) -> Iterator[None]:
        """Add to an interruption how many files are done, and how to go on."""
        try:
            yield
        except (KeyboardInterrupt, Terminated) as error:
            done = sum(not report.errors for report in reports)
            text = f"{done:,} of {len(self.jobs):,} files {_DONE[self.verb]}"
            if self.target is not None:
                text += f" into {clean(str(as_location(self.target)))}. Run it again with --skip-existing to go on"
            error.add_note(text)
            raise


@contextlib.contextmanager
def _exit_if_failed(reports: Sequence[Report]) -> Iterator[None]:
    """Exit behind the block with the status of the errors, which say more than a reader that has ended."""
    try:
        yield
    except BrokenPipeError:
        if not any(report.errors for report in reports):
            raise
    if failed := [error for report in reports for error in report.errors]:
        raise typer.Exit(status_of(failed))


def split_target(paths: Sequence[Path], out: Path | None) -> tuple[list[Path], Path]:
    """Return the sources, which globs match, and the target, which is the last path unless an option names it."""
    if out is None and len(paths) < 2:
        raise typer.BadParameter("expected a source and a target, got one path", param_hint="TARGET")
    return (matches(paths[:-1]), paths[-1]) if out is None else (matches(paths), out)


def is_one(paths: Sequence[Path], *, recursive: bool) -> bool:
    """Return True if a command line names one file, folder or stream, rather than files to be found."""
    return len(paths) == 1 and not recursive and not _is_glob(paths[0])


def is_for_files(
    sources: Sequence[Path], target: Path, *, is_file: bool, named: str, recursive: bool, whole: bool
) -> bool:
    """Return True if the target is a folder for files: not a file, nor a folder for one that is taken as a whole.

    A target `is_file` by its name, which has to be one `named` so.
    """
    if not is_file and len(sources) == 1 and is_stream(sources[0]):
        reason = f"expected a name {named} for standard input, or -, got {target}"
        raise typer.BadParameter(reason, param_hint="TARGET")
    if is_file and (recursive or len(sources) > 1):
        got = f"{len(sources)} of them" if len(sources) > 1 else "a folder"
        reason = f"expected one file for a TARGET that is a file, got {got}. Name a folder as TARGET: {target.stem}"
        raise typer.BadParameter(reason, param_hint="SOURCE")
    if not is_file and not whole and isinstance(as_location(target), Path) and target.exists() and not target.is_dir():
        reason = f"expected a folder, or a name {named}, got {target}, which is another file"
        if key_file_id(target) is not None:
            reason = f"expected a folder or a file {named}, got {target}, which is a key; --key names a key"
        raise typer.BadParameter(reason, param_hint="TARGET")
    return not is_file and not whole


def count_sound(reports: Sequence[Report]) -> str:
    """Return the number of files without errors, with the noun."""
    return pluralize(sum(not report.errors and not report.skipped for report in reports), "file")


def skip(source: Path, target: Path) -> Report:
    """Return the report on a job of which nothing was done, because its target exists."""
    location = str(as_location(target))
    line = f"{clean(location)}: exists, and was left as it is"
    return Report({"source": str(source), "target": location, "skipped": True}, lines=[line], skipped=True)


@contextlib.contextmanager
def beginning_again(target: Path) -> Iterator[None]:
    """Add to an interruption that nothing was left of a target which is there when it is complete."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        error.add_note(f"nothing was left of {clean(str(target))}; the same command begins again")
        raise


def _fold(reports: Sequence[Report], member: str | None) -> Iterator[str]:
    """Yield the errors of reports, with their file. Of many of one kind, yield a few and the number of the others."""
    kinds = dict[str, list[str]]()
    for report in reports:
        source = "" if member is None else report.document[member]
        for error in report.errors:
            # What errors of one kind have in common: not the file, and no numbers, names and ids.
            kind = re.sub(r"'[^']*'|[0-9a-f]{32}|\d+", "", message_of(error).replace(source, "")).split(": ")[-1]
            kinds.setdefault(f"{type(error).__name__} {kind}", []).append(name_source(error, source))
    for messages in kinds.values():
        shown = messages if len(messages) <= _MOST_ALIKE else messages[:_FIRST_ALIKE]
        yield from shown
        if shown is not messages:
            yield f"... and {len(messages) - len(shown):,} more like these, which --json names"


def _check_targets(jobs: Iterable[Job], target: Path) -> None:
    """Refuse two files of one name for the target folder, and a target that cannot be a folder.

    The first file makes the folder, so that no empty folder is left behind.
    """
    first: dict[Path, Path] = {}  # names, and the file that has each
    for job in jobs:
        other = first.setdefault(job.name, job.source)
        if other is not job.source:
            raise typer.BadParameter(
                f"expected files of distinct names, got {other} and {job.source}. Put them into different folders",
                param_hint="SOURCE",
            )
    if isinstance(as_location(target), Url):
        return
    refuse_key_text(target, may_be_id=True)
    check_directory(target)
    if target.exists() and not target.is_dir():
        raise typer.BadParameter("expected a folder for several files, got a file", param_hint="TARGET")


def _is_glob(path: Path) -> bool:
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def matches(paths: Sequence[Path]) -> list[Path]:
    """Return the paths that globs match, as a shell does; a glob that matches none stands for itself."""
    found = {path: sorted(glob.glob(str(path), recursive=True)) for path in paths if _is_glob(path)}  # noqa: PTH207
    return [Path(match) for path in paths for match in found.get(path) or [str(path)]]


def _walk(folder: Path, target: Path | None) -> Iterator[Path]:
    """Return the files in a folder tree, in order, without files in `target`. A sealed folder counts as a file."""
    outside = None if target is None or target.resolve() == folder.resolve() else target.resolve()
    for here, folders, files in os.walk(folder, onerror=_raise):
        parent = Path(here)
        folders[:] = sorted(name for name in folders if outside is None or (parent / name).resolve() != outside)
        for name in folders:
            if (parent / name).is_symlink():
                raise OSError(None, "expected no link to a folder; name what it leads to", str(parent / name))
        sealed = [name for name in folders if is_sealed_folder(parent / name)]
        folders[:] = [name for name in folders if name not in sealed]
        yield from ((parent / name).relative_to(folder) for name in (*sealed, *sorted(files)))


def _raise(error: OSError) -> None:
    raise error


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
