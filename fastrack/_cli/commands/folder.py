"""The commands ``seal``, ``unseal`` and ``verify`` on a folder, such as that of a model."""

import errno
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fastrack._cli.commands.grant import Grantees
from fastrack._cli.console import (
    clean,
    format_rate,
    new_table,
    pluralize,
    print_json,
    progress_bar,
    speed,
    stdout,
    taken_back,
)
from fastrack._cli.errors import describe, message_of, refuse_values, show_errors
from fastrack._cli.files import check_directory, load_engine, open_ring
from fastrack._util.units import format_size

if TYPE_CHECKING:
    from fastrack._keys.keyring import KeyRing
    from fastrack._sets.anchor import Anchor
    from fastrack._sets.folder import FileCheck, SealedFolder


def is_sealed_folder(path: Path) -> bool:
    """Return True if a path is a folder with an index, which `seal` made."""
    from fastrack._sets.folder import INDEX

    return (path / INDEX).is_file()


def refuse_options(given: Mapping[str, object]) -> None:
    """Refuse options that a folder does not take."""
    wrong = [option for option, value in given.items() if value]
    if wrong:
        raise typer.BadParameter("expected none with a folder", param_hint=", ".join(wrong))


def seal_one_folder(
    source: Path,
    target: Path,
    *,
    key: str | None,
    plain: list[str] | None,
    to: list[Path] | None,
    sign: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Seal a folder into a new one."""
    from fastrack._keys.keys import Key
    from fastrack._sets.entries import walk
    from fastrack._sets.folder import load_folder
    from fastrack._sets.folder_writer import seal_folder

    _check_new(target)
    grantees = Grantees.load(to, sign, target, force=False) if to else None
    owner = Key.generate() if grantees else open_ring(key, to="seal").first
    total = sum(path.stat().st_size for path in walk(source).values())
    load_engine("seal")
    start = time.perf_counter()
    with progress_bar("sealing", total) as progress, refuse_values("--plain"):
        seal_folder(source, target, owner, plain=plain or (), progress=progress)
    seconds = time.perf_counter() - start
    folder = load_folder(target, owner)
    sealed, readable, left_out = folder.sealed_names, folder.plain_names, _left_out(source, folder)
    if grantees:
        try:
            grantees.grant_files(owner, folder.file_ids)
        except BaseException:
            shutil.rmtree(target)
            raise
    if as_json:
        print_json(
            source=str(source),
            target=str(target),
            key_id=folder.key_id,
            grants=str(grantees.path) if grantees else None,
            files=sealed,
            bytes=folder.nbytes,
            not_protected=readable,
            readable={"files": readable},
            left_out=left_out,
            seconds=seconds,
            gbps=speed(folder.nbytes, seconds),
        )
        return
    console = stdout()
    if not quiet:
        size, count = format_size(folder.nbytes), pluralize(len(readable), "file")
        line = f"{clean(str(target))}: sealed {pluralize(len(sealed), 'file')} and copied {count}"
        console.print(f"{line}, {size}; {format_rate(folder.nbytes, seconds)}")
        console.print(f"key: {folder.key_id}")
        if grantees:
            granted = f"granted to {pluralize(len(grantees.recipients), 'recipient')}; the key was not kept"
            console.print(f"{clean(str(grantees.path))}: {granted}")
        console.print("anyone can read the names, dtypes and shapes of all tensors, and the names of all files")
    if readable:  # said in full, however quiet: all else is sealed
        console.print(f"not protected, anyone can read {', '.join(map(clean, readable))}")
    if left_out:
        console.print(f"left out: {', '.join(map(clean, left_out))}")


def unseal_one_folder(
    source: Path, target: Path, *, key: list[str] | None, anchor: Path | None, quiet: bool, as_json: bool
) -> None:
    """Decrypt a sealed folder into a new one."""
    from fastrack._sets.folder import load_folder
    from fastrack._sets.folder_writer import unseal_folder

    _check_new(target)
    ring = open_ring(key)
    folder = load_folder(source, ring, anchor=anchor)
    load_engine("open")
    start = time.perf_counter()
    with progress_bar("unsealing", folder.nbytes) as progress:
        unseal_folder(folder, target, ring, progress=progress)
    seconds = time.perf_counter() - start
    line = f"{clean(str(target))}: {pluralize(len(folder.files), 'file')} in plain, {format_size(folder.nbytes)}"
    with taken_back([target]):
        if as_json:
            print_json(
                source=str(source),
                target=str(target),
                key_id=folder.key_id,
                file_id=folder.file_id,
                files=list(folder.files),
                bytes=folder.nbytes,
                seconds=seconds,
                gbps=speed(folder.nbytes, seconds),
            )
        elif not quiet:
            stdout().print(f"{line}; {format_rate(folder.nbytes, seconds)}")


@dataclass(frozen=True, slots=True)
class FolderReport:
    """The result of the verification of a sealed folder."""

    path: str
    folder: "SealedFolder"
    checks: "list[FileCheck]"
    seconds: float

    @property
    def errors(self) -> list[Exception]:
        """The errors of the files that are not authentic."""
        return [check.error for check in self.checks if check.error is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self.folder.nbytes

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        errors = self.errors
        document = {
            "path": self.path,
            "key_id": self.folder.key_id,
            "file_id": self.folder.file_id,
            "ok": not errors,
            "files": [
                {
                    "name": check.name,
                    "sealed": check.sealed,
                    "bytes": check.nbytes,
                    "ok": check.error is None,
                    "message": None if check.error is None else str(check.error),
                }
                for check in self.checks
            ],
            "bytes": self.nbytes,
            "seconds": self.seconds,
            "gbps": speed(self.nbytes, self.seconds),
        }
        return {**document, "error": describe(errors[0])} if errors else document


def check_folder(
    path: Path, ring: "KeyRing", anchor: "Anchor | None", progress: Callable[[int], None] | None = None
) -> FolderReport:
    """Authenticate all files of a sealed folder. Without `progress` a progress bar is shown."""
    from fastrack._sets.folder import load_folder

    folder = load_folder(path, ring, anchor=anchor)
    load_engine("verify")
    start = time.perf_counter()
    with progress_bar("verifying", folder.nbytes) if progress is None else nullcontext(progress) as advance:
        checks = folder.check(ring, progress=advance)
    return FolderReport(str(path), folder, checks, time.perf_counter() - start)


def verify_one_folder(
    path: Path, *, key: list[str] | None, anchor: "Anchor | None", quiet: bool, as_json: bool
) -> None:
    """Authenticate all files of a sealed folder, and exit with 1 if one of them is bad."""
    report = check_folder(path, open_ring(key), anchor)
    if as_json:
        print_json(**report.as_dict())
    elif quiet:
        show_errors(map(message_of, report.errors))
    else:
        _show_report(report)
    if report.errors:
        raise typer.Exit(1)


def _show_report(report: FolderReport) -> None:
    console = stdout()
    table = new_table("", "name", "", "size", right=("size",))
    for check in report.checks:
        state = "ok" if check.error is None else "FAILED"
        table.add_row(state, clean(check.name), "sealed" if check.sealed else "plain", format_size(check.nbytes))
    console.print(table, soft_wrap=False)
    console.print()
    errors = report.errors
    for error in errors:
        console.print(clean(str(error)))
    console.print(f"key: {report.folder.key_id}")
    console.print(f"file id: {report.folder.file_id}")
    count = pluralize(len(report.checks), "file")
    verdict = f"{len(errors)} of {count} FAILED" if errors else f"{count}, each as its owner sealed or copied it"
    console.print(
        f"{clean(report.path)}: {verdict}; {format_size(report.nbytes)} in {format_rate(report.nbytes, report.seconds)}"
    )


def _check_new(target: Path) -> None:
    check_directory(target)
    if target.exists() or target.is_symlink():
        advice = "exists, and no folder is replaced. Name one that does not exist"
        raise FileExistsError(errno.EEXIST, advice, str(target))


def _left_out(source: Path, folder: "SealedFolder") -> list[str]:
    found = (path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in folder.files)
