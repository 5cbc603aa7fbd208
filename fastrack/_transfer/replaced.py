"""Functions of safetensors, replaced for the process.

Its `safe_open` opens sealed files where an opener says so, and its `serialize_file` leaves files to savers.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from fastrack._util.fork import after_fork
from fastrack._util.replacing import replace, replace_everywhere

Opener = Callable[[Any, Any, Any], Any]
"""Return an open file for (path, framework, device), or None if the original shall open it."""
Saver = Callable[[str, Any, Any], bool]
"""Take a file to write: (path without links, tensors, metadata). Return False if the original shall write it."""

_openers: tuple[Opener, ...] = ()
_savers: tuple[Saver, ...] = ()
_lock = threading.Lock()


def install() -> None:
    """Replace ``safetensors.safe_open`` wherever it is held. A further call does nothing.

    The class is the same for all threads and decides by the path: no block of one thread changes what another sees.
    """
    import safetensors

    with _lock:
        if not hasattr(safetensors.safe_open, "fastrack_original"):
            replace_everywhere(safetensors.safe_open, _replacement(safetensors.safe_open))


def add_opener(opener: Opener) -> None:
    """Ask `opener` about each file first, before those that were added earlier. Adding it again does nothing."""
    with _lock:
        if opener not in _openers:
            replace(sys.modules[__name__], "_openers", (opener, *_openers))


def remove_opener(opener: Opener) -> None:
    """Ask `opener` no more."""
    with _lock:
        replace(sys.modules[__name__], "_openers", tuple(each for each in _openers if each != opener))


def install_saver(saver: Saver) -> None:
    """Ask `saver` before ``safetensors.serialize_file`` writes, once more if that was replaced since by others."""
    import safetensors

    with _lock:
        if not hasattr(safetensors.serialize_file, "fastrack_original"):
            replace_everywhere(safetensors.serialize_file, _saving(safetensors.serialize_file))
        if saver not in _savers:
            replace(sys.modules[__name__], "_savers", (saver, *_savers))


def _saving(original: Any) -> Any:
    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        found = os.path.realpath(os.fsdecode(filename))
        was_taken = any(saver(found, tensors, metadata) for saver in _savers)
        return None if was_taken else original(tensors, filename, metadata)

    serialize_file.fastrack_original = original  # type: ignore[attr-defined]
    return serialize_file


def _replacement(original: Any) -> type:
    class safe_open:  # noqa: N801 - the name that safetensors gave it
        """``safetensors.safe_open``, which opens sealed files too."""

        fastrack_original = original

        def __new__(cls, filename: Any, framework: Any = "pt", device: Any = "cpu", **options: Any) -> Any:
            for opener in _openers:
                opened = opener(filename, framework, device)
                if opened is not None:
                    return opened
            return original(filename, framework, device, **options)

    return safe_open


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - a lost thread may hold it
    _lock = threading.Lock()


after_fork(_renew_lock)
