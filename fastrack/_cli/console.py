"""What commands print: text, tables, documents and a progress bar."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

_WIDE = 160  # columns, where there is no terminal to ask
_PATIENCE = 1.0  # seconds of work before a bar appears


def stdout() -> Console:
    """A console on standard output. Colours only on a terminal; markup is text, since names come from files."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDE
    return Console(highlight=False, markup=False, emoji=False, width=width, soft_wrap=False)


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with these columns, those of `right` aligned to it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def print_json(document: Any) -> None:
    """The one document of a command that was given ``--json``, in ASCII."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.stdout.flush()


def clean(text: str) -> str:
    """Escape what could move a terminal's cursor or break a line: names come from files that anyone may have made."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def pluralize(count: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_rate(count: int, seconds: float) -> str:
    """How long it took, and how fast that was, if it was enough to tell."""
    text = f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    return f"{text}, {speed(count, seconds):.2f} GB/s" if count >= 1 << 20 else text


def speed(count: int, seconds: float) -> float:
    """Gigabytes (10^9 bytes) a second."""
    return count / max(seconds, 1e-9) / 1e9


@contextlib.contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with each number of bytes done. A bar shows on a terminal's stderr, for work over a second."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(what, total=total or None)
    begun = time.monotonic()

    def advance(count: int) -> None:
        progress.advance(task, count)
        if not progress.live.is_started and time.monotonic() - begun >= _PATIENCE:
            progress.start()

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()
