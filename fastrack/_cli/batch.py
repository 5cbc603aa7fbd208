"""Several files in one process: the files that paths, globs and folders name, and the same work on each of them."""

import glob
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from fastrack._cli.commands.folder import is_sealed_folder
from fastrack._cli.commands.streams import is_stream
from fastrack._cli.console import pluralize, progress_bar, stdout
from fastrack._cli.errors import describe, name_source, show_errors
from fastrack._cli.files import as_location, check_directory
from fastrack._util.locations import Url
from fastrack._util.units import format_size
from fastrack.errors import FastrackError

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

SUFFIX = ".safetensors"
FOLDER = "expected a file, got a folder; --recursive takes the files in it"


@dataclass(frozen=True, slots=True)
class Source:
    """A file or a sealed folder to work on. `name` is its path in the folder of the target."""

    path: Path
    name: Path
    is_sealed_folder: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """The files that the paths of a command line name. `left_out` counts those of another suffix in folders."""

    sources: tuple[Source, ...]
    left_out: int = 0


class Report(Protocol):
    """The result of the work on one file."""

    @property
    def errors(self) -> Sequence[Exception]:
        """Errors of the file; empty if it is sound."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext that were worked on."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        ...


@dataclass(slots=True)
class Tally:
    """Totals over all files."""

    files: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    reports: list[Any] = field(default_factory=list)


def is_one(paths: Sequence[Path], *, recursive: bool) -> bool:
    """Return True if a command line names one file or folder, rather than files to be found."""
    return len(paths) == 1 and not recursive and not _is_glob(paths[0])


def split_target(paths: Sequence[Path], out: Path | None) -> tuple[list[Path], Path]:
    """Return the sources and the target, which is the last path unless an option names it."""
    if out is not None:
        return list(paths), out
    if len(paths) < 2:
        raise typer.BadParameter("expected a source and a target, got one path", param_hint="TARGET")
    return list(paths[:-1]), paths[-1]


def check_folder(target: Path) -> None:
    """Refuse what cannot be the folder of the targets. It is made for the first of them, so that none is left empty."""
    if isinstance(as_location(target), Url):
        return
    check_directory(target)
    if target.exists() and not target.is_dir():
        raise typer.BadParameter("expected a folder for several files, got a file", param_hint="TARGET")


def refuse_options(given: Mapping[str, object]) -> None:
    """Refuse options that several files do not take."""
    wrong = [option for option, value in given.items() if value]
    if wrong:
        reason = "expected one source and the path of one target, got several or a folder"
        raise typer.BadParameter(reason, param_hint=", ".join(wrong))


def select(
    paths: Sequence[Path],
    *,
    recursive: bool,
    suffix: str = "",
    target: Path | None = None,
    anchor: "Anchor | None" = None,
    inside: bool = False,
) -> Selection:
    """Return the files that paths, globs and, with `recursive`, folders name, each once; in folders those of `suffix`.

    What does not exist is returned too, for its error to be reported with those of other files, and with an anchor what
    its set has in a folder. A sealed folder is one source, as its files belong together. Files in the folder `target`
    are left out, unless they are named. With `inside`, links that lead out of a folder are refused.
    """
    from fastrack._sets.folder_writer import require_inside

    if any(map(is_stream, paths)):
        raise typer.BadParameter("expected - alone, got it with other files", param_hint="SOURCE")
    found: dict[Path, Source] = {}
    left_out = 0
    for path in (match for given in paths for match in _matches(given)):
        if not recursive or not path.is_dir() or is_sealed_folder(path):
            found.setdefault(path, Source(path, Path(path.name), is_sealed_folder(path)))
            continue
        for name, is_folder in _walk(path, target):
            if inside:
                require_inside(path / name, path)
            if is_folder or name.name.endswith(suffix):
                found.setdefault(path / name, Source(path / name, name, is_folder))
            else:
                left_out += 1
        for listed in map(Path, () if anchor is None else anchor.names_in(path)):
            if listed.name.endswith(suffix) and not (path / listed).exists():
                found.setdefault(path / listed, Source(path / listed, listed))
    return Selection(tuple(found.values()), left_out)


def require_distinct(selection: Selection) -> None:
    """Refuse files of one name, of which the folder of the target would hold one."""
    first: dict[Path, Path] = {}
    for source in selection.sources:
        other = first.setdefault(source.name, source.path)
        if other is not source.path:
            raise typer.BadParameter(
                f"expected files of distinct names, got {other} and {source.path}. Put them into different folders",
                param_hint="SOURCE",
            )


def run_each(
    verb: str,
    sources: Sequence[Source],
    work: Callable[[Source, Callable[[int], None]], Report],
    *,
    member: str,
    as_json: bool,
) -> Tally:
    """Work on each file, with one progress bar, and print the errors of each. An error ends the work on its file alone.

    With `as_json` there is one document for each file, on a line of its own; `member` has the path of one that failed.
    """
    tally, lines = Tally(), list[str]()
    sizes = [_size_of(source.path) for source in sources]
    start = time.perf_counter()
    try:
        with nullcontext(lambda _: None) if as_json else progress_bar(verb, sum(sizes)) as progress:
            for source, size in zip(sources, sizes, strict=True):
                counter = _Counter(progress)
                tally.files += 1
                errors: Sequence[BaseException]
                try:
                    if source.path.is_dir() and not source.is_sealed_folder:
                        raise IsADirectoryError(FOLDER)
                    report = work(source, counter)
                except BrokenPipeError:
                    raise
                except (FastrackError, OSError, MemoryError, ImportError, typer.BadParameter) as error:
                    errors, document = [error], {member: str(as_location(source.path)), "error": describe(error)}
                else:
                    errors, document = report.errors, report.as_dict()
                    tally.nbytes += report.nbytes
                    tally.reports.append(report)
                tally.failed += bool(errors)
                lines.extend(name_source(error, str(as_location(source.path))) for error in errors)
                if as_json:
                    sys.stdout.write(json.dumps(document) + "\n")
                counter.finish(size)
    finally:
        if not as_json:
            show_errors(lines)
        sys.stdout.flush()
    tally.seconds = time.perf_counter() - start
    return tally


def finish(tally: Tally, line: str, *, as_json: bool, quiet: bool, selection: Selection | None = None) -> None:
    """Print the summary of several files, and exit with 1 if one of them failed."""
    if not as_json and not quiet:
        console = stdout()
        if selection is not None and selection.left_out:
            console.print(f"left out: {pluralize(selection.left_out, 'file')} without the suffix {SUFFIX}")
        failed = f"{tally.failed} of {pluralize(tally.files, 'file')} FAILED; " if tally.failed else ""
        console.print(f"{failed}{line}; {format_size(tally.nbytes)} in {tally.seconds:.2f} s")
    if tally.failed:
        raise typer.Exit(1)


class _Counter:
    """Passes the progress of one file on."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._progress(count)

    def finish(self, size: int) -> None:
        """Count what is left of a file of this size."""
        self._progress(max(0, size - self._done))


def _is_glob(path: Path) -> bool:
    return glob.has_magic(str(path)) and not os.path.lexists(path)


def _matches(path: Path) -> list[Path]:
    if not _is_glob(path):
        return [path]
    return [Path(found) for found in sorted(glob.glob(str(path), recursive=True))] or [path]  # noqa: PTH207 - a text


def _walk(folder: Path, target: Path | None) -> Iterator[tuple[Path, bool]]:
    """Return the files in a folder and in those below it, in order; not those in `target`.

    A sealed folder below it is returned as one, with True beside it.
    """
    outside = None if target is None or target.resolve() == folder.resolve() else target.resolve()
    for here, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if outside is None or (Path(here) / name).resolve() != outside)
        for name in folders:
            if (Path(here) / name).is_symlink():
                raise OSError(None, "expected no link to a folder; name what it leads to", str(Path(here) / name))
        for name in [name for name in folders if is_sealed_folder(Path(here) / name)]:
            folders.remove(name)
            yield (Path(here) / name).relative_to(folder), True
        yield from (((Path(here) / name).relative_to(folder), False) for name in sorted(files))


def _raise(error: OSError) -> None:
    raise error


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
