"""``fastrack verify``: authenticate every chunk of a file."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fastrack._cli import batch as many
from fastrack._cli.commands.folder import (
    FolderReport,
    check_folder,
    is_sealed_folder,
    refuse_options,
    verify_one_folder,
)
from fastrack._cli.commands.publish import report as show_manifest
from fastrack._cli.commands.streams import open_sealed, require_one_stream
from fastrack._cli.console import clean, format_rate, new_table, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.errors import describe, message_of, show_errors
from fastrack._cli.files import as_location, check_expected, check_sealed, load_engine, open_ring
from fastrack._cli.options import AnchorFile, Expect, FileId, JsonLines, KeyFiles, Quiet, Recursive
from fastrack._util.units import format_size

if TYPE_CHECKING:
    from fastrack._files.reader import TensorCheck
    from fastrack._keys.keyring import KeyRing
    from fastrack._sets.anchor import Anchor


def verify(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Sealed files, globs, or - for standard input; a sealed folder; with --anchor any folder.",
        ),
    ],
    *,
    key: KeyFiles = None,
    expect: Expect = None,
    file_id: FileId = None,
    anchor: AnchorFile = None,
    recursive: Recursive = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
) -> None:
    """Check that every chunk of files or a folder is what its owner sealed; or that a folder is as its manifest says.

    Writes nothing but the anchor.
    """
    anchored = _open_anchor(anchor)
    require_one_stream(*paths, *(key or ()))
    if not many.is_one(paths, recursive=recursive):
        many.refuse_options({"--file-id": file_id})
        _verify_each(paths, open_ring(key), expect, anchored, recursive=recursive, quiet=quiet, as_json=as_json)
        return
    [path] = paths
    if is_sealed_folder(path) and (key or anchored is None):
        refuse_options({"--expect": expect, "--file-id": file_id})
        verify_one_folder(path, key=key, anchor=anchored, quiet=quiet, as_json=as_json)
        return
    if path.is_dir():
        _verify_folder(path, anchored, key=key or expect or file_id, as_json=as_json)
        return
    ring = open_ring(key)
    report = verify_contents(path, ring, expect=expect, file_id=file_id, anchor=anchored)
    if as_json:
        print_json(**report.as_dict())
    elif quiet:
        show_errors(map(message_of, report.errors))
    else:
        show_report(report, stdout())
    if report.errors:
        raise typer.Exit(1)


def _verify_each(
    paths: Sequence[Path],
    ring: "KeyRing",
    expect: Sequence[str] | None,
    anchor: "Anchor | None",
    *,
    recursive: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    selection = many.select(paths, recursive=recursive, suffix=many.SUFFIX, anchor=anchor)
    load_engine("verify")

    def work(source: many.Source, progress: Callable[[int], None]) -> Report | FolderReport:
        if source.is_sealed_folder:
            return check_folder(source.path, ring, anchor, progress)
        return verify_contents(source.path, ring, progress, expect=expect, anchor=anchor)

    tally = many.run_each(
        "verifying",
        selection.sources,
        work,
        member="path",
        as_json=as_json,
    )
    reports = [report for report in tally.reports if isinstance(report, Report)]
    count = sum(len(report.checks) for report in reports if not report.errors)
    plain = sum(len(report.plain) for report in reports)
    files = sum(not report.errors for report in reports)
    line = f"every chunk of {pluralize(count, 'sealed tensor')} in {pluralize(files, 'file')} is authentic"
    folders = sum(not report.errors for report in tally.reports) - files
    if folders:
        line += f", and all files of {pluralize(folders, 'sealed folder')}"
    if plain:
        line += f"; not protected, so not checked: {pluralize(plain, 'tensor')} in plain"
    many.finish(tally, line, as_json=as_json, quiet=quiet, selection=selection)


def _open_anchor(path: Path | None) -> "Anchor | None":
    if path is None:
        return None
    from fastrack._sets.anchor import Anchor

    return Anchor(path)


def _verify_folder(path: Path, anchor: "Anchor | None", *, key: object, as_json: bool) -> None:
    if anchor is None:
        raise typer.BadParameter(
            "expected a file, a sealed folder, or an anchor to compare this folder with its manifest, got a folder "
            "alone; --recursive takes the files in it",
            param_hint="FILE",
        )
    if key:
        raise typer.BadParameter(
            "expected none with a folder, which is compared with its manifest; verify its files one by one",
            param_hint="--key, --expect, --file-id",
        )
    show_manifest(anchor.verify(path), path, as_json=as_json, ok=True)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification. `plain` has the names of unprotected tensors, which were not checked."""

    path: str
    key_id: str | None
    file_id: str | None
    checks: "tuple[TensorCheck, ...]"
    plain: tuple[str, ...]
    checked_bytes: int
    seconds: float

    @property
    def errors(self) -> list[Exception]:
        """The errors of the tensors that are not authentic."""
        return [check.error for check in self.checks if check.error is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext that were checked."""
        return self.checked_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        errors = self.errors
        document = {
            "path": self.path,
            "key_id": self.key_id,
            "file_id": self.file_id,
            "ok": not errors,
            "tensors": [
                {
                    "name": check.name,
                    "dtype": check.dtype,
                    "shape": list(check.shape),
                    "bytes": check.nbytes,
                    "ok": check.error is None,
                    "chunk": getattr(check.error, "chunk", None),
                    "message": None if check.error is None else str(check.error),
                }
                for check in self.checks
            ],
            "not_protected": list(self.plain),
            "bytes": self.checked_bytes,
            "seconds": self.seconds,
            "gbps": speed(self.checked_bytes, self.seconds),
        }
        return {**document, "error": describe(errors[0])} if errors else document


def verify_contents(
    path: Path,
    ring: "KeyRing",
    progress: Callable[[int], None] | None = None,
    *,
    expect: Sequence[str] | None = None,
    file_id: str | None = None,
    anchor: "Anchor | None" = None,
) -> Report:
    """Return the report on a file, which is opened once. Without `progress` a progress bar is shown."""
    from fastrack._files.reader import check_file

    checked = 0
    with open_sealed(path, file_id=file_id, anchor=anchor) as file:
        check_sealed(file, ring)
        check_expected(file, expect)
        shown: AbstractContextManager[Callable[[int], None]]
        if progress is None:
            load_engine("verify")
            shown = progress_bar("verifying", sum(tensor.nbytes for tensor in file.values()))
        else:
            shown = nullcontext(progress)
        with shown as advance:

            def count(size: int) -> None:
                nonlocal checked
                checked += size
                advance(size)

            start = time.perf_counter()
            checks = tuple(check_file(file, ring, progress=count))
            seconds = time.perf_counter() - start
        if anchor is not None:
            for name in file.plain:
                file.stored(name)  # which compares it with the manifest
        plain = () if anchor is not None else tuple(file.plain)
    return Report(str(as_location(path)), file.key_id, file.file_id, checks, plain, checked, seconds)


def show_report(report: Report, console: Console) -> None:
    """Print the report as a table."""
    table = new_table("", "name", "dtype", "shape", "size", "failed at", right=("size",))
    for check in report.checks:
        chunk = getattr(check.error, "chunk", None)
        place = "header" if chunk is None else f"chunk {chunk}"
        table.add_row(
            "ok" if check.error is None else "FAILED",
            clean(check.name),
            check.dtype,
            str(list(check.shape)),
            format_size(check.nbytes),
            "" if check.error is None else place,
        )
    console.print(table, soft_wrap=False)
    console.print()
    for check in report.checks:
        if check.error is not None:
            console.print(clean(str(check.error)))
    if report.plain:
        names = ", ".join(map(clean, report.plain))
        console.print(f"not protected, so not checked: {names} (stored in plain)")
    console.print(f"key: {report.key_id}")
    console.print(f"file id: {report.file_id}")
    failed = sum(check.error is not None for check in report.checks)
    count = pluralize(len(report.checks), "sealed tensor")
    verdict = f"{failed} of {count} FAILED" if failed else f"every chunk of {count} is authentic"
    size = report.checked_bytes
    console.print(f"{clean(report.path)}: {verdict}; {format_size(size)} in {format_rate(size, report.seconds)}")
