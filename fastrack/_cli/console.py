"""Output of commands: text, tables, JSON and a progress bar."""

import contextlib
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, ClassVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

STDOUT = Path("-")
"""Standard output, as an argument names it."""

_WIDTH = 160  # columns, if standard output is no terminal
_GAP = 3  # columns of the terminal between those of a table
_DELAY = 1.0  # seconds of work before a progress bar appears


class _Failures(RegexHighlighter):
    """Colours what failed, on a terminal that has colours, unless NO_COLOR is set."""

    highlights: ClassVar[list[str]] = [r"(?P<red>^error:|\bFAILED\b)"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error: rich would end the process, and what is to be taken back would stay."""
        raise  # noqa: PLE0704 - rich calls this while it handles the error


def stdout() -> Console:
    """Return a console on standard output, with colours on a terminal only, and without markup."""
    # Names of tensors come from files, and may look like markup.
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = shutil.get_terminal_size().columns if is_known else _WIDTH
    return _Console(highlighter=_Failures(), markup=False, emoji=False, width=width, soft_wrap=True)


def print_lines(lines: Iterable[str | Table], console: Console | None = None) -> None:
    """Print lines and tables, on standard output unless there is another console."""
    console = console or stdout()
    for line in lines:
        shown = _fit(line, console.width) if isinstance(line, Table) else line
        if isinstance(shown, str):
            console.print(fold(shown, console.file), soft_wrap=True)
        else:
            console.print(shown, soft_wrap=False)


def fold(text: str, stream: IO[str]) -> str:
    """Return text for a stream: on a terminal in lines of its width, broken between words, else as it is."""
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(max(20, shutil.get_terminal_size().columns))
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def _fit(table: Table, width: int) -> Table | str:
    """Return a table whose columns break between words, or its cells one below another if it cannot be so narrow."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(cell_len, cells)) for cells in columns]
    least = [max((cell_len(word) for cell in cells for word in cell.split()), default=0) for cells in columns]
    room = width - _GAP * (len(columns) - 1)
    if sum(least) > room:
        names, *rows = zip(*columns, strict=True)
        return "\n\n".join(
            "\n".join(f"{name}: {cell}" if name else cell for name, cell in zip(names, row, strict=True) if cell)
            for row in rows
        )
    for _ in range(sum(widths) - room):
        widest = max(range(len(columns)), key=lambda index: (widths[index] > least[index], widths[index]))
        widths[widest] -= 1
    for column, size in zip(table.columns, widths, strict=True):
        column.width = size
    return table


def tell(lines: Iterable[str | Table], *, as_json: bool, quiet: bool = False, **document: Any) -> None:
    """Print the result of a command: for people unless they want quiet, or with ``--json`` as one document."""
    if as_json:
        print_json(**document)
    elif not quiet:
        print_lines(lines)


def note(text: str) -> None:
    """Print a line for people on stderr, which leaves standard output to documents."""
    console = _Console(stderr=True, highlighter=_Failures(), markup=False, emoji=False)
    console.print(fold(clean(text), sys.stderr), soft_wrap=True)


def new_table(*columns: str, right: tuple[str, ...] = (), is_close: bool = False) -> Table:
    """Return an empty table with these columns, `right` of them aligned to the right, perhaps close to each other."""
    padding = (0, 0, 0, 1) if is_close else (0, 1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=padding, highlight=True)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_json(**document: Any) -> None:
    """Print the document of a command with ``--json``, in ASCII."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.stdout.flush()


def print_error(document: dict[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Print an error: with ``--json`` as a document, else, or if that cannot be written, as lines on stderr."""
    if as_json:
        with contextlib.suppress(OSError):
            return print_json(error=document)
    for line in lines:
        note(line)
    return None


@contextlib.contextmanager
def taken_back(made: Iterable[Path], what: str = "plaintext") -> Iterator[None]:
    """Remove what was made if its report cannot be written to standard output: the command has failed then."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        paths = [path.resolve() for path in made]  # a link leads to the file that was written
        if not paths:
            raise
        for path in paths:
            remove(path)
        # Without a number: that a pipe has no reader is told as well, since what was asked for is gone.
        raise OSError(f"standard output: {error.strerror}; the {what} was removed again") from None


def remove(path: Path) -> None:
    """Remove a file or a folder that a command has made."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def clean(text: str) -> str:
    """Escape control characters, which could move a terminal's cursor: names come from files that are not trusted."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def pluralize(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``2 tensors``, ``2 entries``."""
    if count != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun}"


def format_rate(count: int, seconds: float) -> str:
    """Return a time as text, with the rate in GB/s from 1 MiB on."""
    text = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    return f"{text}, {speed(count, seconds):.2f} GB/s" if count >= 1 << 20 else text


def speed(count: int, seconds: float) -> float:
    """Return the rate in 1e9 bytes a second."""
    return count / max(seconds, 1e-9) / 1e9


@contextlib.contextmanager
def reporter(verb: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step on a terminal's stderr, after this verb, unless quiet."""
    status = Console(stderr=True, highlight=False, markup=False).status(verb)
    with status if sys.stderr.isatty() and not quiet else contextlib.nullcontext():
        yield lambda subject: status.update(f"{verb} {subject}")


@contextlib.contextmanager
def progress_bar(verb: str, total: int, *, files: int = 0) -> Iterator[Callable[..., None]]:
    """Yield a function to call with each number of bytes done, and with many files of files done.

    A bar appears on a terminal's stderr after a second.
    """
    if not sys.stderr.isatty():
        yield lambda _, **_files: None
        return
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(verb, total=total or None)
    timer = threading.Timer(_DELAY, progress.start)  # also if the first step takes longer
    timer.daemon = True
    start = time.monotonic()
    done = 0

    def advance(count: int, *, files: int = 0, of: int = files) -> None:
        nonlocal done
        done += files
        progress.update(task, advance=count, description=f"{verb} {done:,}/{of:,} files" if of else verb)
        if not progress.live.is_started and time.monotonic() - start >= _DELAY:
            progress.start()

    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()
        if progress.live.is_started:
            progress.stop()
