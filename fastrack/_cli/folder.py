"""The commands ``seal``, ``unseal`` and ``verify`` on a folder, such as that of a model."""

import errno
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fastrack._cli.console import clean, format_rate, new_table, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.files import check_directory, load_engine, open_ring
from fastrack._cli.grant import Grantees
from fastrack._cli.guard import describe
from fastrack._util.units import format_size

if TYPE_CHECKING:
    from fastrack._sealed.anchor import Anchor
    from fastrack._sealed.folder import SealedFolder


def is_sealed_folder(path: Path) -> bool:
    """Return True if a path is a folder with an index, which `seal` made."""
    from fastrack._sealed.folder import INDEX

    return (path / INDEX).is_file()


def refuse_options(given: Mapping[str, object]) -> None:
    """Refuse options that a folder does not take."""
    wrong = [option for option, value in given.items() if value]
    if wrong:
        raise typer.BadParameter("expected none with a folder", param_hint=", ".join(wrong))


def seal_one_folder(
    source: Path, target: Path, *, key: str | None, to: list[Path] | None, sign: Path | None, as_json: bool
) -> None:
    """Seal a folder into a new one."""
    from fastrack._crypto.keys import Key
    from fastrack._sealed.folder import load_folder
    from fastrack._sealed.folder_writer import seal_folder
    from fastrack._sealed.publish import walk

    _check_new(target)
    grantees = Grantees.load(to, sign, target, force=False) if to else None
    owner = Key.generate() if grantees else open_ring(key).first
    total = sum(path.stat().st_size for path in walk(source).values())
    load_engine("seal")
    start = time.perf_counter()
    with progress_bar("sealing", total) as progress:
        seal_folder(source, target, owner, progress=progress)
    seconds = time.perf_counter() - start
    folder = load_folder(target, owner)
    sealed, plain, left_out = folder.sealed_names, folder.plain_names, _left_out(source, folder)
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
            readable={"files": plain},
            left_out=left_out,
            seconds=seconds,
            gbps=speed(folder.nbytes, seconds),
        )
        return
    console = stdout()
    line = f"{clean(str(target))}: sealed {pluralize(len(sealed), 'file')} and copied {pluralize(len(plain), 'file')}"
    console.print(f"{line}, {format_size(folder.nbytes)}; {format_rate(folder.nbytes, seconds)}")
    console.print(f"key: {folder.key_id}")
    if grantees:
        granted = f"granted to {pluralize(len(grantees.recipients), 'recipient')}; the key was not kept"
        console.print(f"{clean(str(grantees.path))}: {granted}")
    if plain:
        console.print(f"anyone can read {clean(', '.join(plain)):.1000}")
    console.print("anyone can read the names, dtypes and shapes of all tensors, and the names of all files")
    if left_out:
        console.print(f"left out: {clean(', '.join(left_out)):.1000}")


def unseal_one_folder(source: Path, target: Path, *, key: list[str] | None, anchor: Path | None, as_json: bool) -> None:
    """Decrypt a sealed folder into a new one."""
    from fastrack._sealed.folder import load_folder
    from fastrack._sealed.folder_writer import unseal_folder

    _check_new(target)
    ring = open_ring(key)
    folder = load_folder(source, ring, anchor=anchor)
    load_engine("open")
    start = time.perf_counter()
    with progress_bar("unsealing", folder.nbytes) as progress:
        unseal_folder(folder, target, ring, progress=progress)
    seconds = time.perf_counter() - start
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
        return
    line = f"{clean(str(target))}: {pluralize(len(folder.files), 'file')} in plain, {format_size(folder.nbytes)}"
    stdout().print(f"{line}; {format_rate(folder.nbytes, seconds)}")


def verify_one_folder(path: Path, *, key: list[str] | None, anchor: "Anchor | None", as_json: bool) -> None:
    """Authenticate all files of a sealed folder, and exit with 1 if one of them is bad."""
    from fastrack._sealed.folder import load_folder

    ring = open_ring(key)
    folder = load_folder(path, ring, anchor=anchor)
    load_engine("verify")
    start = time.perf_counter()
    with progress_bar("verifying", folder.nbytes) as progress:
        checks = folder.check(ring, progress=progress)
    seconds = time.perf_counter() - start
    errors = [check.error for check in checks if check.error is not None]
    if as_json:
        files = [
            {
                "name": check.name,
                "sealed": check.sealed,
                "bytes": check.nbytes,
                "ok": check.error is None,
                "message": None if check.error is None else str(check.error),
            }
            for check in checks
        ]
        document: dict[str, Any] = {"error": describe(errors[0])} if errors else {}
        print_json(
            path=str(path),
            key_id=folder.key_id,
            file_id=folder.file_id,
            ok=not errors,
            files=files,
            bytes=folder.nbytes,
            seconds=seconds,
            gbps=speed(folder.nbytes, seconds),
            **document,
        )
    else:
        console = stdout()
        table = new_table("", "name", "", "size", right=("size",))
        for check in checks:
            state = "ok" if check.error is None else "FAILED"
            table.add_row(state, clean(check.name), "sealed" if check.sealed else "plain", format_size(check.nbytes))
        console.print(table, soft_wrap=False)
        console.print()
        for error in errors:
            console.print(clean(str(error)))
        console.print(f"key: {folder.key_id}")
        console.print(f"file id: {folder.file_id}")
        count = pluralize(len(checks), "file")
        verdict = f"{len(errors)} of {count} FAILED" if errors else f"{count}, each as its owner sealed or copied it"
        console.print(
            f"{clean(str(path))}: {verdict}; {format_size(folder.nbytes)} in {format_rate(folder.nbytes, seconds)}"
        )
    if errors:
        raise typer.Exit(1)


def _check_new(target: Path) -> None:
    check_directory(target)
    if target.exists() or target.is_symlink():
        advice = "exists, and no folder is replaced. Name one that does not exist"
        raise FileExistsError(errno.EEXIST, advice, str(target))


def _left_out(source: Path, folder: "SealedFolder") -> list[str]:
    found = (path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
    return sorted(name for name in found if name not in folder.files)
