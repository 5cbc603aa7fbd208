"""``fastrack unseal``: authenticate and decrypt a file into a plain one."""

import errno
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from fastrack._cli import run as runner
from fastrack._cli.console import clean, pluralize
from fastrack._cli.errors import refuse_options
from fastrack._cli.files import (
    as_location,
    check_expected,
    check_new,
    check_sealed,
    check_target,
    is_sealed_folder,
    is_stream,
    match_names,
    open_ring,
)
from fastrack._cli.options import (
    AnchorFile,
    DryRun,
    Expect,
    FileId,
    Force,
    JsonLines,
    KeyFiles,
    Out,
    Quiet,
    Recursive,
    SkipUnchecked,
    split_names,
)
from fastrack._cli.run import Batch, Job, Meter, Report
from fastrack._cli.streams import open_sealed, require_files, require_one_stream, standard_output
from fastrack._files.reader import SealedFile
from fastrack._files.streams import unseal_to_stream
from fastrack._files.unseal_file import unseal_file
from fastrack._keys.keyring import KeyRing
from fastrack._samples.data_set import is_data_set, read_headers, warning_of
from fastrack._samples.export import export_samples
from fastrack._samples.stored import SHARD, read_data_set
from fastrack._samples.table_files import FORMS
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder import load_folder
from fastrack._sets.folder_writer import unseal_folder
from fastrack._sets.load_file import resolve_anchor
from fastrack._util.locations import require_local
from fastrack._util.new_folder import made_parents
from fastrack._util.shown import format_size
from fastrack.errors import FormatError

_NO_DATA_SET = "expected none without the folder of a dataset as SOURCE"


def unseal(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE... TARGET",
            help="Sealed files, globs, a sealed folder, a dataset, or - for standard input; then the target, or - for "
            "standard output. A TARGET with a suffix takes one SOURCE: .safetensors, .npz or .npy; any other takes the "
            "bytes of one U8 tensor; a dataset becomes .parquet, .arrow, .csv, .tsv, .jsonl or .txt. Any other TARGET "
            "is a folder.",
        ),
    ],
    *,
    key: KeyFiles = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this tensor, or those of a glob; may be repeated. If absent, all."),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", metavar="NAMES", help="Only these columns: a,b or '\"a,b\"'. May be repeated."),
    ] = None,
    recursive: Recursive = False,
    force: Force = False,
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
    out: Out = None,
    expect: Expect = None,
    file_id: FileId = None,
    anchor: AnchorFile = None,
    skip_existing: SkipUnchecked = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: JsonLines = False,
) -> None:
    """Authenticate and decrypt files, a folder or a dataset into plain ones.

    Tensors of --plain and --allow-plain are copied unchecked.
    """
    sources, target = runner.split_target(paths, out)
    source = sources[0]
    require_one_stream(*sources, *(key or ()))
    require_files(source, target, is_dry=dry_run)
    whole = len(sources) == 1 and source.is_dir() and not recursive
    is_file = is_stream(target) or (target.suffix != "" and not target.is_dir())
    many = runner.is_for_files(
        sources, target, is_file=is_file, named="with a suffix", recursive=recursive, whole=whole
    )
    refuse_options({"--skip-existing": force and skip_existing}, runner.NO_FORCE)
    refuse_options({"--columns": columns and (many or not is_data_set(source))}, _NO_DATA_SET)
    output: Path | IO[bytes] = target
    if many:
        refuse_options({"--file-id": file_id and (recursive or len(sources) > 1)}, runner.ONE)
        require_local(target)
    elif whole:
        options = {"--tensor": tensor, "--plain": plain, "--allow-plain": allow_plain, "--expect": expect}
        refuse_options({**options, "--file-id": file_id, "--skip-existing": skip_existing}, runner.NO_FOLDER)
        _check_folder(source, target, force=force)
    elif is_stream(target):
        refuse_options({"--json": as_json, "--skip-existing": skip_existing}, runner.NO_OUTPUT)
        output = standard_output()
    elif not (skip_existing and target.is_file()):
        if not tensor:
            _refuse_shard(source, target)
        check_target(target, force=force)
    ring = open_ring(key)
    anchored = resolve_anchor(anchor)
    opener = _Opener(ring, tensor or [], plain or [], allow_plain, expect, file_id, anchored, force, skip_existing)

    def work(job: Job, meter: Meter) -> Report | None:
        if many:
            return opener.unseal_into(target, job, meter)
        if is_data_set(job.source):
            return opener.export(source, target, split_names(columns or ()) or None, meter)
        return opener.unseal_folder(source, target, meter) if whole else opener.unseal(source, output, meter)

    def summarize(reports: Sequence[Report]) -> str:
        line = f"{clean(str(target))}: {runner.count_sound(reports)}, unencrypted"
        copied = sum(len(report.plain) for report in reports)
        return f"{line}; not protected, copied as stored: {pluralize(copied, 'tensor')}" if copied else line

    told: dict[str, Any] = {"as_json": as_json, "quiet": quiet, "is_dry": dry_run}
    batch = Batch.of(
        "unsealing", sources, target, many=many, recursive=recursive, suffix=runner.SUFFIX, anchor=anchored, **told
    )
    with made_parents(target / "any") if many and not dry_run else nullcontext():
        batch.run(work, summarize)


def _check_folder(source: Path, target: Path, *, force: bool) -> None:
    """Refuse a folder that is not sealed, or a target that it cannot have."""
    if is_data_set(source):
        _require_target(target, force=force)
    elif is_sealed_folder(source):
        refuse_options({"--force": force}, runner.NEW_FOLDER)
        check_new(target)
    else:
        advice = "expected a sealed folder or a dataset, got neither"
        raise IsADirectoryError(errno.EISDIR, f"{advice}; --recursive takes the files in it", str(source))


@dataclass(frozen=True, slots=True)
class _Opener:
    """The keys and the options for opening files."""

    ring: KeyRing
    tensors: Sequence[str]
    plain: Sequence[str]
    allow_plain: bool
    expect: Sequence[str] | None
    file_id: str | None
    anchor: Anchor | None
    force: bool
    skip_existing: bool

    def unseal(self, source: Path, target: Path | IO[bytes], meter: Meter, *, into: bool = False) -> Report | None:
        """Decrypt a file or standard input. Return no report if the plaintext is on standard output.

        With `into`, the content of the file determines the name of the target.
        """
        with open_sealed(source, file_id=self.file_id, anchor=self.anchor) as file:
            check_sealed(file, self.ring)
            check_expected(file, self.expect)
            names, plain = self._choose(file)
            total = sum(file[name].nbytes if name in file else _size_of(file, name) for name in names)
            if not isinstance(target, Path):
                with meter.run(total) as progress:
                    unseal_to_stream(file, target, self.ring, names=names, plain=plain, progress=progress)
                return None
            if into:
                target = _plain_path(target, file)
                if target.exists() and target.samefile(source):
                    advice = "expected another folder than its own, where plaintext would replace it"
                    raise FormatError(f"{source}: {advice}")
            if self.skip_existing and target.is_file():
                return runner.skip(source, target)
            with made_parents(target) if into and not meter.is_dry else nullcontext():
                check_target(target, force=self.force, many=into)
                with meter.run(total) as progress:
                    unseal_file(
                        file, target, self.ring, names=names, plain=plain, overwrite=self.force, progress=progress
                    )
            copied = [name for name in names if name in file.plain]
            line = f"{pluralize(len(names), 'tensor')}, unencrypted, {format_size(total)}"
            warning = [f"not protected, copied as stored: {', '.join(map(clean, copied))}"] if copied else []
            ids = {"key_id": file.key_id, "file_id": file.file_id}
            members = {**ids, "tensors": names, "bytes": total, "not_protected": copied}
            return meter.report(
                as_location(source), target, total, line, members, before=warning, plain=copied, plaintext=[target]
            )

    def unseal_into(self, folder: Path, job: Job, meter: Meter) -> Report | None:
        """Decrypt one of many files into a folder."""
        if is_sealed_folder(job.source) or is_data_set(job.source):
            kind = "dataset" if is_data_set(job.source) else "sealed folder"
            raise FormatError(f"{job.source}: expected a file, got a {kind}. Unseal it by itself")
        return self.unseal(job.source, folder / job.name, meter, into=True)

    def unseal_folder(self, source: Path, target: Path, meter: Meter) -> Report:
        """Decrypt a sealed folder into a new one."""
        folder = load_folder(source, self.ring, anchor=self.anchor)
        with meter.run(folder.nbytes) as progress:
            unseal_folder(folder, target, self.ring, progress=progress)
        line = f"{pluralize(len(folder.files), 'file')}, unencrypted, {format_size(folder.nbytes)}"
        ids = {"key_id": folder.key_id, "file_id": folder.file_id}
        members = {**ids, "files": list(folder.files), "bytes": folder.nbytes}
        return meter.report(source, target, folder.nbytes, line, members, plaintext=[target])

    def export(self, source: Path, target: Path, columns: list[str] | None, meter: Meter) -> Report:
        """Decrypt a dataset into a table, text or a folder."""
        headers = read_headers(source)
        with headers.open(headers.shards[0]) as file:
            check_sealed(file, self.ring)
        data = read_data_set(source, self.ring)
        total = headers.nbytes if len(headers.shards) > 1 else 0  # progress is by shards: of one it is not known
        with meter.run(total) as progress, runner.beginning_again(target):
            read = 0  # bytes of the shard that is written now

            def advance(nbytes: int) -> None:
                nonlocal read
                progress(read)
                read = nbytes

            try:
                export_samples(
                    source,
                    target,
                    self.ring,
                    columns=columns,
                    overwrite=self.force,
                    anchor=self.anchor,
                    progress=advance,
                )
                progress(read)
            except FormatError:
                raise
            except ValueError as error:
                raise FormatError(str(error)) from None
        nbytes = sum(headers.sizes[name] for name in columns or headers.columns) if meter.is_dry else meter.nbytes
        size = target.stat().st_size if target.is_file() and not meter.is_dry else nbytes
        odd = warning_of(data, source)
        warning = [] if odd is None else [clean(f"warning: {odd}")]
        line = f"{pluralize(data.samples, 'sample')}, unencrypted, {format_size(size)}"
        counts = {"samples": data.samples, "complete": data.is_whole, "bytes": nbytes}
        members = {"key_id": headers.key_id, **counts}
        return meter.report(source, target, nbytes, line, members, before=warning, brief=warning, plaintext=[target])

    def _choose(self, file: SealedFile) -> tuple[list[str], list[str]]:
        """Return the names of the tensors to write, and of unencrypted tensors that may be copied."""
        names, unknown = match_names(self.tensors, file.names)
        plain, missing = match_names(self.plain, file.names)
        if unknown or missing:
            listed = ", ".join(map(repr, sorted({*unknown, *missing})))
            raise FormatError(f"{file.path} has no tensor {listed}; it has {', '.join(map(repr, file.names))}")
        return names if self.tensors else list(file.names), list(file.plain) if self.allow_plain else plain


def _require_target(target: Path, *, force: bool) -> None:
    """Refuse a target that a dataset cannot have, or that is there."""
    suffix = target.suffix.lower()
    if is_stream(target) or (suffix and suffix not in FORMS):
        raise typer.BadParameter(
            f"expected a file that ends with {', '.join(FORMS)}, or the name of a folder, without a suffix, for a "
            f"dataset, got {target}. With --recursive, each shard becomes a plain safetensors file in a folder",
            param_hint="TARGET",
        )
    if suffix in FORMS:
        check_target(target, force=force)
    else:
        refuse_options({"--force": force}, runner.NEW_FOLDER)
        check_new(target)


def _refuse_shard(source: Path, target: Path) -> None:
    """Refuse a single shard for a table: its dataset is what becomes one."""
    is_shard = target.suffix.lower() in FORMS and SHARD.fullmatch(source.name) and is_data_set(source.parent)
    reason = f"expected the folder of a dataset, got one of its shards, {source}. Unseal the folder {source.parent}"
    refuse_options({"SOURCE": is_shard}, reason)


def _plain_path(path: Path, file: SealedFile) -> Path:
    """Return the path without the suffix that `seal` added to the name of a file of another format, if it did."""
    name = path.name.removesuffix(runner.SUFFIX)
    suffix = Path(name).suffix.lower()
    is_bytes = (
        file.names == (name,) and file.describe(name).dtype == "U8" and (name not in file or file[name].dtype == "U8")
    )
    return path.with_name(name) if suffix in {".npy", ".npz"} or is_bytes else path


def _size_of(file: SealedFile, name: str) -> int:
    stored = file.describe(name)
    return stored.stop - stored.start
