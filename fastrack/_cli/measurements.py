"""Documents and lists of written files, for the commands that measure."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from fastrack._cli.console import STDOUT, print_json, stdout
from fastrack._cli.machine import read_caches, read_cpu, read_memory, read_software
from fastrack._devices.graphics import read_graphics
from fastrack._util.atomic import new_file

_WIDTH = 130  # columns of a table of steps, whose words would be broken in fewer
_NUMBERS = re.compile(r"\[\n\s+([-+\d.e,\s]+?)\n\s*\]")  # a list of numbers, which is read more easily on one line
_NARROW = 80  # columns that a line is easily read in


def narrow_console() -> Console:
    """Return a console on standard output with lines of at most 80 columns, which end between words."""
    console = stdout()
    console.width = min(console.width, _NARROW)
    console.soft_wrap = False
    return console


def wide_console() -> Console:
    """Return a console on standard output that breaks no words of a table."""
    console = stdout()
    console.width = max(console.width, _WIDTH)
    return console


def write_results(
    path: Path | None, member: str, rows: Sequence[Any], device: str, settings: dict[str, Any], notes: Sequence[str]
) -> None:
    """Write rows as JSON to a file or to standard output, with the machine, the software and the settings."""
    from fastrack._crypto.engine import get_engine

    if path is None:
        return
    machine: dict[str, Any] = {"cpu": asdict(read_cpu()), "memory": asdict(read_memory()), "caches": read_caches()}
    if device != "cpu":
        machine["graphics"] = asdict(read_graphics())
    engine = get_engine()
    document = {
        "machine": machine,
        "software": read_software(),
        "settings": {**settings, "engine": engine.name, "threads": engine.threads},
        "notes": list(notes),
        member: [row.as_dict() for row in rows],
    }
    if path == STDOUT:
        print_json(**document)
    else:
        with new_file(path) as file:
            text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(document, indent=2))
            file.write((text + "\n").encode())


def show_paths(console: Console, **paths: Path | None) -> None:
    """Print the files that were written, by label."""
    for label, path in paths.items():
        if path is not None:
            console.print(f"\n{label}: {path}", soft_wrap=True)
