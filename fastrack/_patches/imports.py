"""Call a function for a module: now if it is imported, or else as soon as it is."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fastrack._patches.attributes import note

Prepare = Callable[[ModuleType], None]


def when_imported(table: Mapping[str, Prepare]) -> None:
    """Prepare the modules of a table, by their names. What a function raises, the import raises."""
    for name, prepare in table.items():
        if name in sys.modules:
            prepare(sys.modules[name])
    finder = _Finder(table)
    sys.meta_path.insert(0, finder)
    note(finder.end)


class _Finder(MetaPathFinder):
    """Finder that leaves modules to the others, and prepares those of its table once their code has run."""

    def __init__(self, table: Mapping[str, Prepare]) -> None:
        self._table = table
        self._context = copy_context()  # of the call, which takes back what is replaced in other threads, too
        self._inside: set[tuple[str, int]] = set()  # modules that are being found, and the threads that do

    def end(self) -> None:
        """Prepare no more modules."""
        self._table = {}
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        here = name, threading.get_ident()
        if name not in self._table or here in self._inside:
            return None
        self._inside.add(here)
        try:
            spec = find_spec(name)
        finally:
            self._inside.discard(here)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_prepare(module: ModuleType) -> None:
            execute(module)
            prepare = self._table.get(name)  # none any more, if the call has failed meanwhile
            if prepare is not None:
                self._context.copy().run(prepare, module)

        loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec
