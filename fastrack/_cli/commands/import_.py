"""``fastrack import``: seal samples that are in files of other formats."""

import contextlib
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastrack._cli.console import clean, pluralize, print_lines, reporter, tell
from fastrack._cli.errors import is_of_location, refuse_options
from fastrack._cli.files import as_location, is_stream, load_engine, open_ring
from fastrack._cli.options import Json, KeyFile, Quiet, split_names
from fastrack._keys.keyring import KEY_FILE_VARIABLE
from fastrack._samples.blocks import VALID, Column
from fastrack._samples.csv.cell_types import Schema
from fastrack._samples.imports import STORED, Import
from fastrack._samples.sources import open_import
from fastrack._util.shown import format_size, shown
from fastrack.errors import FormatError, UnknownKeyError

_WIDTH = 80  # columns of a line of the report
_LISTED = 12  # columns that are named, at most
_SHARD_SIZE = 256  # MiB
_SMALL_SHARD = 32  # MiB
_MIB = 1 << 20
_PARAMETER = re.compile(
    r"(?<![\w./'-])(append|columns|nulls|resume|shard_size|skip_existing|types)=(?:True)?(?=[\s:;,.)]|$)"
)
_OPTIONS = {"nulls": "null", "types": "type"}  # whose parameters have other names


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE... FOLDER",
            help="A folder of images or .npy files, by class; .csv, .tsv, .txt, .jsonl, .tar (WebDataset), .parquet, "
            ".arrow or .feather files, or a folder of them; the folder to write.",
        ),
    ],
    *,
    key: KeyFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="The folder, in place of the last path.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", metavar="NAMES", help="Store only these columns: a,b or '\"a,b\"'. May be repeated."),
    ] = None,
    null: Annotated[
        list[str] | None,
        typer.Option("--null", metavar="TEXTS", help="Cells of CSV that stand for nulls: NA,null. May be repeated."),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="NAME=TYPE", help="bool, float, int or text for a column of CSV. Repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the last run; SOURCE is compared first.")
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Add the samples of SOURCE to the dataset in FOLDER.")
    ] = False,
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="With these two: leave out unchanged files of FOLDER.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and check all of SOURCE, and write nothing.")
    ] = False,
    shard_size: Annotated[
        int, typer.Option("--shard-size", metavar="MIB", min=1, help="MiB of samples in a shard.")
    ] = _SHARD_SIZE,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Seal images, text, records or tables into a folder of shards, sample by sample."""
    paths = [*paths, *([] if out is None else [out])]
    *sources, target = paths
    refuse_options({"SOURCE... FOLDER": not sources}, "expected a source and a folder to write, got one path")
    if any(map(is_stream, (*sources, target))):
        raise typer.BadParameter("expected files and a folder, got -. Put standard input into a file of their suffix")
    is_file = target.suffix == ".safetensors" and not (target.is_dir() or append or resume)
    refuse_options({"FOLDER": is_file}, f"expected a folder, got {target}, a file's name. Leave .safetensors out")
    advice = "resume what was interrupted, then append"
    refuse_options({"--append": resume and append}, f"expected it or --resume, got both; {advice}")
    is_alone = skip_existing and not (resume or append)
    refuse_options({"--skip-existing": is_alone}, "expected --append or --resume beside it, got neither")
    folder = as_location(target)
    names = split_names(columns or ())
    refuse_options({"--columns": not all(names)}, "expected names with commas between them, got an empty one")
    schema = _schema_of(null or (), types or ())
    owner = None if dry_run and not (resume or append) else _open_key(key)
    load_engine("sealing")
    start = time.perf_counter()
    work = open_import(
        sources if len(sources) > 1 else sources[0],
        folder,
        schema,
        resume=resume,
        append=append,
        skip_existing=skip_existing,
        chosen=names or None,
        is_dry=dry_run,
    )
    given: dict[str, Any] = {"--key": key, "--columns": columns, "--skip-existing": skip_existing}
    given |= {"--null": null, "--type": types, "--shard-size": shard_size if shard_size != _SHARD_SIZE else None}
    with _telling_how_far(work, paths, {**given, "--append": append}), reporter("importing:", quiet=quiet) as report:
        work.work(owner, shard_size * _MIB, lambda _: report(_count(work)))
    seconds = time.perf_counter() - start
    command = _command(paths, {**given, "--append": append, "--resume": resume}) if dry_run else None
    if quiet and not as_json:
        print_lines(_list_skipped([each for each in work.skipped if each[1] != STORED]))  # unasked
        return
    tell(
        _report(work, seconds, None if owner is None else owner.id, key, command),
        as_json=as_json,
        sources=[str(source) for source in sources],
        folder=str(folder),
        key_id=None if owner is None else owner.id,
        samples=work.samples,
        added=work.samples - work.before,
        columns=[{"name": name, "type": text} for name, text in _describe_columns(work.columns)],
        files=work.begun,
        bytes=work.nbytes,
        skipped=[{"file": name, "reason": reason} for name, reason in work.skipped],
        notes=work.notes,
        dry_run=dry_run,
        seconds=seconds,
    )


def _schema_of(nulls: Sequence[str], types: Sequence[str]) -> Schema:
    """Return the schema that --null and --type give."""
    pairs = [text.rpartition("=") for text in types]
    for (name, _, _), text in zip(pairs, types, strict=True):
        refuse_options({"--type": not name}, f"expected name=type, got {shown(text)}")
        is_list = re.search("=(bool|float|int|text),", name)
        refuse_options({"--type": is_list}, f"expected one name=type, got {shown(text)}. Repeat --type")
    try:
        return Schema.of([null for text in nulls for null in text.split(",")], {name: kind for name, _, kind in pairs})
    except ValueError as error:
        raise typer.BadParameter(str(error).partition("=: ")[2], param_hint="--type") from None


def _open_key(source: str | None) -> Any:
    if source is None and not os.environ.get(KEY_FILE_VARIABLE):
        raise UnknownKeyError(
            "no key was given. Make one by `fastrack keygen owner.key`, and add --key owner.key (or set "
            f"{KEY_FILE_VARIABLE}=owner.key)"
        )
    return open_ring(source, to="seal").first


def _count(work: Import) -> str:
    """Return the files, samples and bytes that were read."""
    place = work.place if work.begun else None
    files = pluralize(work.begun, "file") if place is None else f"file {place[0]} of {place[1]}"
    return f"{files}, {pluralize(work.read, 'sample')}, {format_size(work.nbytes)}"


@contextlib.contextmanager
def _telling_how_far(work: Import, paths: Sequence[Path], given: Mapping[str, Any]) -> Iterator[None]:
    """Add to an error how far the import came, and the command that goes on."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        is_stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
        if (is_stopped or (work.read and work.is_storing)) and not work.is_dry:
            for line in _notes_on(work, paths, given, is_stopped=is_stopped):
                error.add_note(line)
        if error.args and isinstance(error.args[0], str):
            # The message names parameters of `import_samples`, whose options are meant here.
            error.args = (_as_options(error.args[0]), *error.args[1:])
        is_told = isinstance(error, FormatError) or is_of_location(error)
        if isinstance(error, (ImportError, TypeError, ValueError)) and not is_told:
            told = FormatError(str(error))  # of the data, of its format, or of the folder
            for line in getattr(error, "__notes__", ()):
                told.add_note(line)
            raise told from None
        raise


def _as_options(text: str) -> str:
    return _PARAMETER.sub(lambda match: f"--{_OPTIONS.get(match[1], match[1]).replace('_', '-')}", text)


def _notes_on(work: Import, paths: Sequence[Path], given: Mapping[str, Any], *, is_stopped: bool) -> list[str]:
    place, file = work.place, clean(work.current)
    stopped = f"; stopped in {file}{f', file {place[0]} of {place[1]}' if place else ''}" if file else ""
    if work.is_begun:
        again = _command(paths, {**given, "--append": None, "--resume": True})
        return [f"{work.folder} has {pluralize(work.samples, 'sample')} now{stopped}", f"to go on: {again}"]
    notes = [f"nothing was stored{stopped}", "the same command begins again"]
    if is_stopped and work.read and (given["--shard-size"] or _SHARD_SIZE) > _SMALL_SHARD:
        notes.append(f"--shard-size {_SMALL_SHARD} would keep more")
    return notes


def _command(paths: Sequence[Path], given: Mapping[str, Any]) -> str:
    words = ["fastrack", "import", *(str(as_location(path)) for path in paths)]
    for option, value in given.items():
        for each in value if isinstance(value, list) else [value] if value else []:
            words += [option] if each is True else [option, str(each)]
    return shlex.join(words)


def _report(work: Import, seconds: float, key_id: str | None, key: str | None, command: str | None) -> list[str]:
    """Return the result of an import in a few lines, and its notes."""
    added, folder = work.samples - work.before, str(work.folder)
    told = f"{pluralize(added, 'sample')} {'added' if work.before else 'sealed'}"
    if command is not None:
        told = f"{pluralize(added, 'sample')} to {'add' if work.before else 'seal'}"
    of = f", of {pluralize(work.begun, 'file')}" if work.begun else ""
    total = f", {work.samples} in all" if work.before else ""
    lines = [f"{clean(folder)}: {told}{of} ({format_size(work.nbytes)} of values read){total}; {seconds:.1f} s"]
    lines += _list_columns(_describe_columns(work.columns))
    if work.classes:
        lines.append(
            _fit("labels: ", [f"{number} {name}" for name, number in work.classes.items()], more="... {} more")
        )
    lines += _list_skipped(work.skipped)
    lines += [f"note: {_as_options(clean(note))}" for note in work.notes]
    if command is not None:
        return [*lines, f"Nothing was written. Next: {clean(command)}"]
    keys = f', keys="{key}"' if key is not None and Path(key).exists() else ""
    in_python = f'in Python: fastrack.SealedDataset("{folder}"{keys})'
    if not isinstance(work.folder, Path):
        return [*lines, f"key: {key_id}", clean(f"Next: {in_python}")]
    return [
        *lines,
        f"key: {key_id}",
        clean(f"Next: fastrack inspect {shlex.quote(folder)}"),
        clean(f"      {in_python}"),
    ]


def _list_skipped(skipped: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line on the files that were left out, by the reason, if there are any."""
    reasons = {reason: [name for name, why in skipped if why == reason] for _, reason in skipped}
    groups = [f"{len(names)} {why} ({names[0]}{', ...' * (len(names) > 1)})" for why, names in reasons.items()]
    return [_fit("skipped: ", groups)] if groups else []


def _list_columns(columns: Sequence[tuple[str, str]]) -> list[str]:
    """Return the columns in lines: of many the first, and the number of the others by type."""
    items = [f"{clean(name)} ({text})" for name, text in columns[:_LISTED]]
    if len(columns) > _LISTED:
        counts = Counter(text for _, text in columns[_LISTED:]).most_common(_LISTED)
        first, *others = [f"{count} of {text}" for text, count in counts]
        items += [f"and {len(columns) - _LISTED} more: {first}", *others]
    lines = ["columns: " + items[0]]
    for item in items[1:]:
        if len(lines[-1]) + len(", ,") + len(item) <= _WIDTH:
            lines[-1] += f", {item}"
        else:
            lines[-1] += ","
            lines.append(" " * len("columns: ") + item)
    return lines


def _fit(start: str, items: Sequence[str], *, more: str = "{} more") -> str:
    """Return as many items as there is room for in a line, and the number of the others."""
    line = start
    for index, item in enumerate(map(clean, items)):
        comma, left = ", " if index else "", len(items) - index - 1
        rest = f", {more.format(left)}" if left else ""
        if index and len(line) + len(comma) + len(item) + len(rest) > _WIDTH:
            return f"{line}, {more.format(left + 1)}"
        line += comma + item
    return line


_DTYPES = {"I": "integers", "U": "integers without sign", "F": "numbers", "BF": "numbers", "C": "complex numbers"}
_ARROW = {"date": "dates", "timestamp": "times", "time": "times of day", "duration": "durations", "decimal": "decimals"}
_ARROW |= {"large_string": "text", "string": "text", "large_binary": "bytes", "binary": "bytes"}


def _describe_columns(columns: Mapping[str, Column]) -> list[tuple[str, str]]:
    """Return the name of each column and what it holds, in plain words; nulls are told with their column."""
    nulls = {name.removesuffix(VALID) for name in columns if name.endswith(VALID)} & columns.keys()
    return [
        (name, _describe(column) + (" or null" if name in nulls else ""))
        for name, column in columns.items()
        if not (name.endswith(VALID) and name.removesuffix(VALID) in nulls)
    ]


def _describe(column: Column) -> str:
    from fastrack._samples.arrow_types import describe_type

    if column.type == "json":
        return "JSON"
    if column.type.startswith("arrow:"):
        kind = describe_type(column)
        return next((words for start, words in _ARROW.items() if kind.startswith(start)), kind)
    if column.shape is None and column.dtype == "U8":
        return "text" if column.type == "text" else "bytes"
    match = re.match(r"([A-Z]+)(\d+)", column.dtype)
    numbers = "yes or no"
    if match:
        numbers = _DTYPES[match[1]] if match[2] == "64" else f"{match[2]}-bit {_DTYPES[match[1]]}"
    if column.shape is None:
        return f"lists of {numbers}"
    return f"{'x'.join(map(str, column.shape))} arrays of {numbers}" if column.shape else numbers
