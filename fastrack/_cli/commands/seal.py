"""``fastrack seal``: encrypt the tensors of files."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from rich.console import Console

from fastrack._cli import batch as many
from fastrack._cli.commands.folder import refuse_options, seal_one_folder
from fastrack._cli.commands.grant import Grantees, Sign, To
from fastrack._cli.commands.inspect import Contents, Entry, read_contents
from fastrack._cli.commands.streams import is_stream, refuse_with_output, require_one_stream, standard_output
from fastrack._cli.console import clean, format_rate, pluralize, print_json, progress_bar, speed, stdout
from fastrack._cli.files import as_location, check_source, check_target, load_engine, match_names, open_ring
from fastrack._cli.options import Force, JsonLines, KeyFile, Out, Quiet, Recursive
from fastrack._util.atomic import made_parents
from fastrack._util.locations import Url
from fastrack._util.units import format_size
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._keys.keys import Key


def seal(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE... TARGET",
            help=".safetensors, .npy or .npz files; any other is sealed as bytes. Globs, - for standard input, or a "
            "folder. Then the sealed file, usually a .safetensors, or a folder for several; - for standard output.",
        ),
    ],
    *,
    key: KeyFile = None,
    out: Out = None,
    plain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Store this tensor, or file of a folder, or those of a glob, unencrypted; may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the tensor, for a SOURCE of one tensor. If absent, the name of the file."
        ),
    ] = None,
    drop_metadata: Annotated[
        bool, typer.Option("--drop-metadata", help="Leave out the metadata of SOURCE, which is stored unencrypted.")
    ] = False,
    form: Annotated[
        Literal["npy", "safetensors"] | None,
        typer.Option("--format", help="Seal the tensors of standard input in this format. If absent, its bytes."),
    ] = None,
    to: To = None,
    sign: Sign = None,
    recursive: Recursive = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
) -> None:
    """Encrypt the tensors of files, which may be larger than memory; or a folder, such as that of a model.

    With --to, under a new key that goes to the recipients alone, in TARGET.grants.
    """
    from fastrack._keys.keys import Key

    sources, target = many.split_target(paths, out)
    require_one_stream(*sources, key)
    if to and key is not None:
        raise typer.BadParameter("expected --key or --to, got both; `fastrack grant` grants a key", param_hint="--to")
    options = _Options(plain or [], name, drop_metadata, force, form)
    source = sources[0]
    if form is not None and not is_stream(source):
        raise typer.BadParameter("expected - as SOURCE; of a file its suffix tells", param_hint="--format")
    is_folder = source.is_dir() and not recursive
    is_one = many.is_one(sources, recursive=recursive)
    if not is_one or (target.is_dir() and not is_folder):
        many.refuse_options({"--to": to, "--name": name and not is_one})
        _seal_each(sources, target, key, options, recursive=recursive, quiet=quiet, as_json=as_json)
        return
    if is_folder:
        refuse_options({"--name": name, "--drop-metadata": drop_metadata, "--force": force})
        seal_one_folder(source, target, key=key, plain=plain, to=to, sign=sign, quiet=quiet, as_json=as_json)
        return
    if is_stream(target):
        refuse_with_output({"--to": to, "--json": as_json})
        _seal(source, standard_output(), open_ring(key, to="seal").first, options)
        return
    check_target(target, force=force)
    grantees = Grantees.load(to, sign, target, force=force) if to else None
    owner = Key.generate() if grantees else open_ring(key, to="seal").first
    seconds = _seal(source, target, owner, options)
    report = Report.of(source, target, owner.id, seconds, grantees.path if grantees else None)
    if grantees:
        grantees.grant(owner, str(report.contents.file_id), target)
    if as_json:
        print_json(**report.as_dict())
    elif quiet:
        _show_left(report)
    else:
        show_report(report, stdout())
        if grantees:
            granted = f"granted to {pluralize(len(grantees.recipients), 'recipient')}; the key was not kept"
            stdout().print(f"{clean(str(grantees.path))}: {granted}")


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of the command that are about the sealed file."""

    plain: Sequence[str]
    name: str | None
    drop_metadata: bool
    force: bool
    form: Literal["npy", "safetensors"] | None


@dataclass(frozen=True, slots=True)
class Report:
    """A sealed file, and where it is from."""

    source: str
    target: str
    key_id: str
    grants: str | None
    contents: Contents
    seconds: float

    errors = ()

    @classmethod
    def of(cls, source: Path, target: Path, key_id: str, seconds: float, grants: Path | None = None) -> Self:
        """Return the report on a file that was written just now."""
        path = None if grants is None else str(grants)
        return cls(str(source), str(as_location(target)), key_id, path, read_contents(target), seconds)

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext of all tensors."""
        return self.contents.plain_bytes

    @property
    def sealed(self) -> list[Entry]:
        """The tensors that are encrypted."""
        return [entry for entry in self.contents.tensors if entry.sealed]

    @property
    def left(self) -> list[Entry]:
        """The tensors that are not."""
        return [entry for entry in self.contents.tensors if not entry.sealed]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        names = [entry.name for entry in self.contents.tensors]
        return {
            "source": self.source,
            "target": self.target,
            "key_id": self.key_id,
            "grants": self.grants,
            "tensors": [entry.name for entry in self.sealed],
            "bytes": sum(entry.plain_bytes for entry in self.sealed),
            "not_protected": [entry.name for entry in self.left],
            "plain_bytes": sum(entry.plain_bytes for entry in self.left),
            "target_bytes": self.contents.file_bytes,
            "readable": {"names": names, "metadata": list(self.contents.metadata)},
            "seconds": self.seconds,
            "gbps": speed(self.nbytes, self.seconds),
        }


def show_report(report: Report, console: Console) -> None:
    """Print the report."""
    sealed, left = report.sealed, report.left
    size = format_size(sum(entry.plain_bytes for entry in sealed))
    line = f"{clean(report.target)}: sealed {pluralize(len(sealed), 'tensor')}, {size}"
    if left:
        size = format_size(sum(entry.plain_bytes for entry in left))
        line += f", and left {pluralize(len(left), 'tensor')} in plain, {size}"
    console.print(f"{line}; {format_rate(report.nbytes, report.seconds)}")
    console.print(f"key: {report.key_id}")
    names = [entry.name for entry in report.contents.tensors]
    for subject, texts in (("names, dtypes and shapes of", names), ("metadata", list(report.contents.metadata))):
        if texts:
            console.print(f"anyone can read the {subject} {clean(', '.join(map(repr, texts))):.300}")


def _show_left(report: Report) -> None:
    """Print the tensors that anyone can read, which no option keeps quiet about."""
    if report.left:
        names = ", ".join(clean(repr(entry.name)) for entry in report.left)
        stdout().print(f"{clean(report.target)}: not protected, anyone can read {names}")


def _seal_each(
    paths: Sequence[Path],
    target: Path,
    key: str | None,
    options: _Options,
    *,
    recursive: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    owner = open_ring(key, to="seal").first
    selection = many.select(paths, recursive=recursive, target=target, inside=True)
    many.require_distinct(selection)
    many.check_folder(target)
    load_engine("seal")

    def work(source: many.Source, progress: Callable[[int], None]) -> Report:
        if source.is_sealed_folder:
            raise FormatError(f"{source.path}: expected a file, got a folder that is sealed already")
        path = target / source.name
        if path.suffix.lower() != many.SUFFIX:
            path = path.with_name(path.name + many.SUFFIX)
        with nullcontext() if isinstance(as_location(path), Url) else made_parents(path):
            check_target(path, force=options.force)
            seconds = _seal(source.path, path, owner, options, progress)
        return Report.of(source.path, path, owner.id, seconds)

    tally = many.run_each("sealing", selection.sources, work, member="source", as_json=as_json)
    line = f"{clean(str(target))}: sealed {pluralize(tally.files - tally.failed, 'file')} under key {owner.id}"
    for report in () if as_json else tally.reports:
        _show_left(report)
    left = sum(len(report.left) for report in tally.reports)
    if left:
        line += f", and left {pluralize(left, 'tensor')} in plain"
    many.finish(tally, line, as_json=as_json, quiet=quiet)


def _seal(
    source: Path,
    target: Path | IO[bytes],
    owner: "Key",
    options: _Options,
    progress: Callable[[int], None] | None = None,
) -> float:
    """Seal one file, and return how many seconds it took. Without `progress` a progress bar is shown."""
    from fastrack._files.streams import seal_stream

    total = 0 if is_stream(source) else check_source(source)
    if isinstance(target, Path):
        _refuse_same(source, target)
    try:
        plain = _find_plain(source, options)
        if progress is None:
            load_engine("seal")
        start = time.perf_counter()
        with progress_bar("sealing", total) if progress is None else nullcontext(progress) as advance:
            seal_stream(
                sys.stdin.buffer if is_stream(source) else source,
                as_location(target) if isinstance(target, Path) else target,
                owner,
                plain=plain,
                name=options.name,
                metadata={} if options.drop_metadata else None,
                overwrite=options.force,
                progress=advance,
                form=options.form,
            )
    except TypeError as error:  # an error of the data, such as an array of text
        raise FormatError(f"{source}: {error}") from None
    return time.perf_counter() - start


def _refuse_same(source: Path, target: Path) -> None:
    if source.suffix.lower() != ".safetensors" and target.exists() and target.samefile(source):
        raise typer.BadParameter(
            f"expected another file than SOURCE, got {target} again, which would become a safetensors file under the "
            "name of another format. Name one with the suffix .safetensors",
            param_hint="TARGET",
        )


def _find_plain(source: Path, options: _Options) -> list[str]:
    """Return the names of the tensors to leave in plain."""
    if not options.plain:
        return []
    if is_stream(source):
        raise typer.BadParameter("expected a file, as what is left in plain has to be aligned", param_hint="--plain")
    from fastrack._files.importers import open_plain

    with open_plain(source) as (tensors, _):
        present = list(tensors) if options.name is None else [options.name]
    found, unknown = match_names(options.plain, present)
    if unknown:
        missing, known = ", ".join(map(repr, sorted(unknown))), ", ".join(map(repr, present)) or "none"
        raise typer.BadParameter(f"no tensor {missing} in {source}; it has {known}", param_hint="--plain")
    return found
