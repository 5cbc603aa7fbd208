"""``fastrack seal``: encrypt the tensors of files."""

import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import typer

from fastrack._cli import run as runner
from fastrack._cli.commands.grant import Grantees, Sign, To
from fastrack._cli.commands.inspect import Contents, ListedTensor, read_contents
from fastrack._cli.console import clean, pluralize
from fastrack._cli.errors import refuse_options, refuse_values
from fastrack._cli.files import (
    as_location,
    check_new,
    check_source,
    check_target,
    is_sealed_folder,
    is_stream,
    match_names,
    open_ring,
)
from fastrack._cli.options import RULE, DryRun, Force, JsonLines, KeyFile, Out, Quiet, Recursive, SkipExisting
from fastrack._cli.run import Batch, Job, Meter, Report
from fastrack._cli.streams import require_files, require_one_stream, standard_output
from fastrack._files.importers import open_plain
from fastrack._files.reader import SealedFile
from fastrack._files.seal_file import name_tensor
from fastrack._files.streams import seal_stream
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sets.entries import walk
from fastrack._sets.folder import load_folder
from fastrack._sets.folder_writer import files_to_seal, plain_files, seal_folder, unread_files
from fastrack._util.locations import Url
from fastrack._util.new_folder import made_parents
from fastrack._util.shown import format_size
from fastrack.errors import FormatError, UnknownKeyError


def seal(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE... TARGET",
            help="Files, globs, a folder, or - for standard input; then the target, or - for standard output. Tensors "
            f"are those of .safetensors, .npy and .npz files; any other file is sealed as bytes. {RULE}",
        ),
    ],
    *,
    key: KeyFile = None,
    recursive: Recursive = False,
    force: Force = False,
    plain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Store this tensor, or file of a folder, or those of a glob, unencrypted; may be repeated.",
        ),
    ] = None,
    to: To = None,
    sign: Sign = None,
    skip_existing: SkipExisting = False,
    dry_run: DryRun = False,
    out: Out = None,
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
    quantize: Annotated[
        Literal["fp8", "int8"] | None,
        typer.Option(
            help="Quantise the weights of a model's linear layers, in its folder, to half of bfloat16's bytes."
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: JsonLines = False,
) -> None:
    """Encrypt files, which may be larger than memory, or a folder such as a model's.

    With --to, under a new key that goes only to the recipients, in TARGET.grants.
    """
    sources, target = runner.split_target(paths, out)
    source = sources[0]
    require_one_stream(*sources, key)
    require_files(source, target, is_dry=dry_run)
    refuse_options({"--to": to and key is not None}, "expected --key or --to, got both; `fastrack grant` grants a key")
    refuse_options({"--format": form and not is_stream(source)}, "expected - as SOURCE; of a file its suffix tells")
    refuse_options({"--skip-existing": force and skip_existing}, runner.NO_FORCE)
    whole = len(sources) == 1 and source.is_dir() and not recursive
    many = _are_many(sources, target, recursive=recursive, whole=whole)
    output: Path | IO[bytes] = target
    if many:
        refuse_options({"--quantize": quantize}, runner.A_MODEL)
        refuse_options({"--to": to, "--name": name and (recursive or len(sources) > 1)}, runner.ONE)
    elif whole:
        refuse_options({"--name": name, "--drop-metadata": drop_metadata, "--force": force}, runner.NO_FOLDER)
        _check_new_folder(target, to, skip_existing=skip_existing, is_quantized=quantize is not None)
    elif quantize:
        refuse_options({"--quantize": quantize}, runner.A_MODEL)
    elif is_stream(target):
        refuse_options({"--to": to, "--json": as_json, "--skip-existing": skip_existing}, runner.NO_OUTPUT)
        output = standard_output()
    elif not skip_existing:
        check_target(target, force=force)
    grantees = Grantees.load(to, sign, target, force=force) if to else None
    owner = Key.generate() if grantees else open_ring(key, to="seal").first
    sealer = _Sealer(owner, grantees, plain or [], name, drop_metadata, force, skip_existing, form, quantize)

    def work(job: Job, meter: Meter) -> Report | None:
        if whole:
            return sealer.seal_folder(source, target, meter)
        if not many:
            return sealer.seal_new(source, output, meter)
        return sealer.seal_new(job.source, _target_of(job, target), meter, into=True)

    def summarize(reports: Sequence[Report]) -> str:
        line = f"{clean(str(target))}: {_done(dry_run)} {runner.count_sound(reports)} under key {owner.id}"
        plain_count = sum(len(report.plain) for report in reports)
        return f"{line}, and left {pluralize(plain_count, 'tensor')} unencrypted" if plain_count else line

    told: dict[str, Any] = {"as_json": as_json, "quiet": quiet, "is_dry": dry_run}
    Batch.of("sealing", sources, target, many=many, recursive=recursive, inside=True, **told).run(work, summarize)


def _done(is_dry: bool) -> str:
    return "would seal" if is_dry else "sealed"


def _are_many(sources: Sequence[Path], target: Path, *, recursive: bool, whole: bool) -> bool:
    """Return True if the target is a folder for files: by its name, not by what is there, nor how many sources are."""
    name = str(target).partition("?")[0] if isinstance(as_location(target), Url) else str(target)
    is_file, named = is_stream(target) or name.lower().endswith(runner.SUFFIX), f"that ends in {runner.SUFFIX}"
    return runner.is_for_files(sources, target, is_file=is_file, named=named, recursive=recursive or whole, whole=whole)


def _check_new_folder(target: Path, to: list[Path] | None, *, skip_existing: bool, is_quantized: bool) -> None:
    """Refuse to replace a folder, and options that do not apply on this machine or in a store."""
    if isinstance(as_location(target), Url):
        refuse_options({"--to": to}, "expected a path as TARGET, beside which grants are written, got a URL")
        refuse_options({"--skip-existing": skip_existing and is_quantized}, "expected it without --quantize, got both")
    else:
        refuse_options({"--skip-existing": skip_existing}, runner.NO_FOLDER)
        check_new(target)


def _target_of(job: Job, folder: Path) -> Path:
    """Return the path of one of many targets in their folder."""
    path = folder / job.name
    return path if path.suffix.lower() == runner.SUFFIX else path.with_name(path.name + runner.SUFFIX)


@dataclass(frozen=True, slots=True)
class _Sealer:
    """The key and the options for sealing files."""

    owner: Key
    grantees: Grantees | None
    plain: Sequence[str]
    name: str | None
    drop_metadata: bool
    force: bool
    skip_existing: bool
    form: Literal["npy", "safetensors"] | None
    quantize: Literal["fp8", "int8"] | None

    def seal_new(self, source: Path, target: Path | IO[bytes], meter: Meter, *, into: bool = False) -> Report | None:
        """Seal a file unless its target exists and is to be left. With `into`, make the folder of the target."""
        if into and is_sealed_folder(source):
            raise FormatError(f"{source}: expected a file, got a folder that is sealed already")
        if not isinstance(target, Path):
            return self.seal(source, target, meter)
        is_local = not isinstance(as_location(target), Url)
        if self.skip_existing and is_local and target.is_file():
            self._require_own(target)
            return runner.skip(source, target)
        try:
            with made_parents(target) if into and is_local and not meter.is_dry else nullcontext():
                check_target(target, force=self.force, many=into)
                return self.seal(source, target, meter)
        except FileExistsError:
            if self.skip_existing and not is_local:  # a server tells at the end
                return runner.skip(source, target)
            raise

    def _require_own(self, target: Path) -> None:
        """Refuse a target that is left as it is, but is no file that was sealed under this key."""
        expected = f"{target}: expected a file sealed under {self.owner.id}, to leave it as it is, got"
        try:
            with SealedFile(target) as file:
                found = file.key_id
                authenticate_headers(list(file.values()), KeyRing(self.owner))
        except UnknownKeyError:
            raise FormatError(f"{expected} one under {found}. Move it away") from None
        except FormatError:
            found = None
        if found is None:
            raise FormatError(f"{expected} another or a damaged one. Move it away")

    def seal(self, source: Path, target: Path | IO[bytes], meter: Meter) -> Report | None:
        """Seal a file or standard input. Return no report if the sealed file is on standard output."""
        total = 0 if is_stream(source) else check_source(source)
        if self.name is None and not source.name.isprintable() and _is_no_text(source.name):
            advice = "rename the file, or name its tensor with --name"
            raise FormatError(
                f"{source}: expected a name in UTF-8, by which its tensor is called, got another; {advice}"
            )
        if isinstance(target, Path):
            _refuse_same(source, target)
        try:
            plain = self._find_plain(source)
            with meter.run(total) as progress:
                seal_stream(
                    sys.stdin.buffer if is_stream(source) else source,
                    as_location(target) if isinstance(target, Path) else target,
                    self.owner,
                    plain=plain,
                    name=self.name,
                    metadata={} if self.drop_metadata else None,
                    overwrite=self.force,
                    progress=progress,
                    form=self.form,
                )
        except TypeError as error:  # an error of the data, such as an array of text
            raise FormatError(f"{source}: {error}") from None
        if not isinstance(target, Path):
            return None
        contents = self._foresee(source, plain, meter.stored) if meter.is_dry else read_contents(target)
        if self.grantees and not meter.is_dry:
            self.grantees.grant(self.owner, [str(contents.file_id)], target)
        return self._report(source, target, contents, meter)

    def _foresee(self, source: Path, plain: Sequence[str], size: int) -> Contents:
        """Return what a dry run would write."""
        with open_plain(source) as (tensors, metadata):
            listed = tuple(
                ListedTensor(name, tensor.dtype, tensor.shape, name not in plain, tensor.nbytes, 0, 0)
                for name, tensor in name_tensor(tensors, self.name, str(source)).items()
            )
            kept = {} if self.drop_metadata else metadata
            return Contents("", None, None, None, None, None, None, size, listed, kept)

    def seal_folder(self, source: Path, target: Path, meter: Meter) -> Report:
        """Seal a folder into a new one."""
        total, place = sum(path.stat().st_size for path in walk(source).values()), as_location(target)
        with meter.run(total) as progress, refuse_values("--plain"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "seal_folder: ")  # the report has its own line
            seal_folder(
                source,
                place,
                self.owner,
                plain=self.plain,
                quantize=self.quantize,
                resume=self.skip_existing,
                progress=progress,
            )
        files: Collection[str]
        if meter.is_dry:
            found, nbytes = files_to_seal(source), total
            files, readable = found, sorted(plain_files(found, source, self.plain))
            sealed = [name for name in files if name not in readable]
        else:
            folder = load_folder(place, self.owner)
            files, nbytes, readable, sealed = folder.files, folder.nbytes, folder.plain_names, folder.sealed_names
        names = (path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file())
        left_out = sorted(name for name in names if name not in files)
        if self.grantees and not meter.is_dry:
            self.grantees.grant(self.owner, folder.file_ids, target)
        copied = "copy" if meter.is_dry else "copied"
        counts = f"{pluralize(len(sealed), 'file')} and {copied} {pluralize(len(readable), 'file')}"
        brief = []  # printed even with --quiet: everything else is sealed
        if readable:
            brief.append(f"not protected, anyone can read {', '.join(map(clean, readable))}")
        if unread := unread_files(files, readable):
            brief.append(f"found by libraries only in host memory, by mount_folder: {', '.join(map(clean, unread))}")
        if left_out:
            brief.append(f"left out: {', '.join(map(clean, left_out))}")
        members = {
            "key_id": self.owner.id,
            "grants": self._grants,
            "files": sealed,
            "bytes": nbytes,
            "not_protected": readable,
            "readable": {"files": readable},
            "left_out": left_out,
        }
        after = [
            f"key: {self.owner.id}",
            *self._granted(),
            "anyone can read the names, dtypes and shapes of all tensors, and the names of all files",
            *brief,
        ]
        line = f"{_done(meter.is_dry)} {counts}, {format_size(nbytes)}"
        return meter.report(source, place, nbytes, line, members, after=after, brief=brief)

    @property
    def _grants(self) -> str | None:
        return str(self.grantees.path) if self.grantees else None

    def _granted(self) -> list[str]:
        """Return a line on the recipients, if there are any."""
        if self.grantees is None:
            return []
        count = pluralize(len(self.grantees.recipients), "recipient")
        return [f"{clean(str(self.grantees.path))}: granted to {count}; the key was not kept"]

    def _report(self, source: Path, target: Path, contents: Contents, meter: Meter) -> Report:
        """Return the report on a file after writing it."""
        sealed = [entry for entry in contents.tensors if entry.sealed]
        unsealed = [entry for entry in contents.tensors if not entry.sealed]
        sealed_bytes, left_bytes = (sum(entry.plain_bytes for entry in entries) for entries in (sealed, unsealed))
        names, metadata = [entry.name for entry in contents.tensors], list(contents.metadata)
        location = str(as_location(target))
        counts = f"{pluralize(len(sealed), 'tensor')}, {format_size(sealed_bytes)}"
        line = f"{_done(meter.is_dry)} {counts}"
        if unsealed:
            line += f", and left {pluralize(len(unsealed), 'tensor')} unencrypted, {format_size(left_bytes)}"
        readable = (("names, dtypes and shapes of", names), ("metadata", metadata))
        listed = ", ".join(clean(repr(entry.name)) for entry in unsealed)
        plain = [entry.name for entry in unsealed]
        members = {
            "key_id": self.owner.id,
            "grants": self._grants,
            "tensors": [entry.name for entry in sealed],
            "bytes": sealed_bytes,
            "not_protected": plain,
            "plain_bytes": left_bytes,
            "target_bytes": contents.file_bytes,
            "readable": {"names": names, "metadata": metadata},
        }
        after = [
            f"key: {self.owner.id}",
            *(
                f"anyone can read the {subject} {clean(', '.join(map(repr, texts))):.300}"
                for subject, texts in readable
                if texts
            ),
            *self._granted(),
        ]
        brief = [f"{clean(location)}: not protected, anyone can read {listed}"] if unsealed else []
        return meter.report(
            source, location, contents.plain_bytes, line, members, after=after, brief=brief, plain=plain
        )

    def _find_plain(self, source: Path) -> list[str]:
        """Return the names of the tensors to leave unencrypted."""
        if not self.plain:
            return []
        reason = "expected a file, as what is left unencrypted has to be aligned"
        refuse_options({"--plain": is_stream(source)}, reason)
        with open_plain(source) as (tensors, _):
            present = list(tensors) if self.name is None else [self.name]
        names, unknown = match_names(self.plain, present)
        if unknown:
            missing, known = ", ".join(map(repr, sorted(unknown))), ", ".join(map(repr, present)) or "none"
            raise typer.BadParameter(f"no tensor {missing} in {source}; it has {known}", param_hint="--plain")
        return names


def _is_no_text(name: str) -> bool:
    """Return True for a name that is not in UTF-8, and would be that of a tensor."""
    return Path(name).suffix.lower() not in {".npz", runner.SUFFIX} and any(
        "\ud800" <= char <= "\udfff" for char in name
    )


def _refuse_same(source: Path, target: Path) -> None:
    if source.suffix.lower() != ".safetensors" and target.exists() and target.samefile(source):
        raise typer.BadParameter(
            f"expected another file than SOURCE, got {target} again, which would become a safetensors file under the "
            "name of another format. Name one with the suffix .safetensors",
            param_hint="TARGET",
        )
