"""``fastrack unseal``: authenticate and decrypt a file into a plain one."""

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from fastrack._cli import batch as many
from fastrack._cli.commands.folder import is_sealed_folder, refuse_options, unseal_one_folder
from fastrack._cli.commands.streams import (
    is_stream,
    open_sealed,
    refuse_with_output,
    require_one_stream,
    standard_output,
)
from fastrack._cli.console import clean, format_rate, pluralize, print_json, progress_bar, speed, stdout, taken_back
from fastrack._cli.files import (
    as_location,
    check_expected,
    check_sealed,
    check_target,
    load_engine,
    match_names,
    open_ring,
)
from fastrack._cli.options import AnchorFile, Expect, FileId, Force, JsonLines, KeyFiles, Out, Quiet, Recursive
from fastrack._util.atomic import made_parents
from fastrack._util.locations import require_local
from fastrack._util.units import format_size
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._files.reader import SealedFile
    from fastrack._keys.keyring import KeyRing
    from fastrack._sets.anchor import Anchor


def unseal(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE... TARGET",
            help="Sealed files, globs, - for standard input, or a sealed folder. Then the plain file: .safetensors, "
            ".npz or .npy; any other takes the bytes of one U8 tensor. Or a folder; - for standard output.",
        ),
    ],
    *,
    key: KeyFiles = None,
    out: Out = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this tensor, or those of a glob; may be repeated. If absent, all."),
    ] = None,
    plain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Copy this tensor, or those of a glob, though SOURCE stores it unencrypted; may be repeated.",
        ),
    ] = None,
    allow_plain: Annotated[
        bool, typer.Option("--allow-plain", help="Copy every tensor that SOURCE stores unencrypted.")
    ] = False,
    expect: Expect = None,
    file_id: FileId = None,
    anchor: AnchorFile = None,
    recursive: Recursive = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
) -> None:
    """Authenticate and decrypt files or a folder into plain ones.

    Tensors of --plain and --allow-plain are copied unchecked.
    """
    sources, target = many.split_target(paths, out)
    require_one_stream(*sources, *(key or ()))
    options = _Options(tensor or [], plain or [], allow_plain, expect, file_id, anchor, force)
    source = sources[0]
    is_folder = source.is_dir() and not recursive
    is_one = many.is_one(sources, recursive=recursive)
    if not is_one or (target.is_dir() and not is_folder):
        many.refuse_options({"--file-id": file_id and not is_one})
        _unseal_each(sources, target, open_ring(key), options, recursive=recursive, quiet=quiet, as_json=as_json)
        return
    if is_folder:
        if not is_sealed_folder(source):
            advice = (
                "expected fastrack.folder in it, as in a sealed folder, got none; --recursive takes the files in it"
            )
            raise IsADirectoryError(errno.EISDIR, advice, str(source))
        given = {"--tensor": tensor, "--plain": plain, "--allow-plain": allow_plain, "--expect": expect}
        refuse_options({**given, "--file-id": file_id, "--force": force})
        unseal_one_folder(source, target, key=key, anchor=anchor, quiet=quiet, as_json=as_json)
        return
    if is_stream(target):
        refuse_with_output({"--json": as_json})
        _unseal(source, standard_output(), open_ring(key), options)
        return
    check_target(target, force=force)
    report = _unseal(source, target, open_ring(key), options)
    with taken_back([target]):
        _show(report, quiet=quiet, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command that are about one file."""

    tensors: Sequence[str]
    plain: Sequence[str]
    allow_plain: bool
    expect: Sequence[str] | None
    file_id: str | None
    anchor: "Anchor | Path | None"
    force: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A plain file, and where it is from. `copied` has the names of tensors that were not protected."""

    source: str
    target: str
    key_id: str | None
    file_id: str | None
    names: list[str]
    copied: list[str]
    nbytes: int
    seconds: float

    errors = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "source": self.source,
            "target": self.target,
            "key_id": self.key_id,
            "file_id": self.file_id,
            "tensors": self.names,
            "bytes": self.nbytes,
            "not_protected": self.copied,
            "seconds": self.seconds,
            "gbps": speed(self.nbytes, self.seconds),
        }


def _show(report: Report, *, quiet: bool, as_json: bool) -> None:
    if as_json:
        print_json(**report.as_dict())
    elif not quiet:
        console = stdout()
        if report.copied:
            console.print(f"not protected, copied as stored: {', '.join(map(clean, report.copied))}")
        line = f"{clean(report.target)}: {pluralize(len(report.names), 'tensor')} in plain"
        console.print(f"{line}, {format_size(report.nbytes)}; {format_rate(report.nbytes, report.seconds)}")


def _unseal_each(
    paths: Sequence[Path],
    target: Path,
    ring: "KeyRing",
    options: _Options,
    *,
    recursive: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    from fastrack._sets.load_file import resolve_anchor

    require_local(target)
    anchor = resolve_anchor(options.anchor)
    options = replace(options, anchor=anchor)
    selection = many.select(paths, recursive=recursive, suffix=many.SUFFIX, target=target, anchor=anchor)
    many.require_distinct(selection)
    many.check_folder(target)
    load_engine("open")

    def work(source: many.Source, progress: Callable[[int], None]) -> Report:
        if source.is_sealed_folder:
            raise FormatError(f"{source.path}: expected a file, got a sealed folder. Unseal it by itself")
        report = _unseal(source.path, target / source.name, ring, options, progress)
        written.append(Path(report.target))
        return report

    written: list[Path] = []
    with made_parents(target / "file"), taken_back(written):
        tally = many.run_each("unsealing", selection.sources, work, member="source", as_json=as_json)
        line = f"{clean(str(target))}: {pluralize(tally.files - tally.failed, 'file')} in plain"
        copied = sum(len(report.copied) for report in tally.reports)
        if copied:
            line += f"; not protected, copied as stored: {pluralize(copied, 'tensor')}"
        many.finish(tally, line, as_json=as_json, quiet=quiet, selection=selection)


def _unseal(
    source: Path,
    target: Path | IO[bytes],
    ring: "KeyRing",
    options: _Options,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Decrypt one file. With `progress` it is one of several, whose names follow from what is in them."""
    from fastrack._files.streams import unseal_to_stream
    from fastrack._files.writer import unseal_file

    with open_sealed(source, file_id=options.file_id, anchor=options.anchor) as file:
        check_sealed(file, ring)
        check_expected(file, options.expect)
        names, plain = _choose(file, options)
        total = sum(file[name].nbytes if name in file else _size_of(file, name) for name in names)
        if progress is None:
            load_engine("open")
        elif isinstance(target, Path):
            target = _plain_path(target, file)
            if target.exists() and target.samefile(source):
                raise FormatError(f"{source}: expected another folder than its own, where plaintext would replace it")
        start = time.perf_counter()
        with (
            progress_bar("unsealing", total) if progress is None else nullcontext(progress) as advance,
            made_parents(target) if progress is not None and isinstance(target, Path) else nullcontext(),
        ):
            if isinstance(target, Path):
                check_target(target, force=options.force)
                unseal_file(file, target, ring, names=names, plain=plain, overwrite=options.force, progress=advance)
            else:
                unseal_to_stream(file, target, ring, names=names, plain=plain, progress=advance)
        seconds = time.perf_counter() - start
        copied = [name for name in names if name in file.plain]
        return Report(str(as_location(source)), str(target), file.key_id, file.file_id, names, copied, total, seconds)


def _plain_path(path: Path, file: "SealedFile") -> Path:
    """Return the path without the suffix that `seal` added to the name of a file of another format, if it did."""
    name = path.name.removesuffix(many.SUFFIX)
    suffix = Path(name).suffix.lower()
    is_bytes = (
        file.names == (name,) and file.describe(name).dtype == "U8" and (name not in file or file[name].dtype == "U8")
    )
    return path.with_name(name) if suffix in {".npy", ".npz"} or is_bytes else path


def _size_of(file: "SealedFile", name: str) -> int:
    stored = file.describe(name)
    return stored.stop - stored.start


def _choose(file: "SealedFile", options: _Options) -> tuple[list[str], list[str]]:
    """Return the names of the tensors to write, and of those that may be copied though they are unencrypted."""
    names, unknown = match_names(options.tensors, file.names)
    plain, missing = match_names(options.plain, file.names)
    if unknown or missing:
        listed = ", ".join(map(repr, sorted({*unknown, *missing})))
        raise FormatError(f"{file.path} has no tensor {listed}; it has {', '.join(map(repr, file.names))}")
    return names if options.tensors else list(file.names), list(file.plain) if options.allow_plain else plain
