"""Open the sealed folders of ``fastrack run`` in the processes of its program, below the private copies of these."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastrack._patches.safetensors import add_handler
from fastrack._util.fork import per_process
from fastrack.errors import RollbackError

VARIABLE = "FASTRACK_RUN"
"""The environment variable that ``fastrack run`` sets for its program: the folders of its descriptions."""

DESCRIPTION = "run.json"

_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)


def attach() -> None:
    """Open files of the private copies from now on, in this process and those that it forks."""
    add_handler("safe_open", functools.partial(_ask, "open_mounted"))
    add_handler("serialize_file", functools.partial(_ask, "refuse_mounted", at=1))


def block_keys(*, is_shared: bool) -> str | None:
    """Return the source of the key of KV blocks, if ``fastrack run`` has one for this process.

    It is what ``--kv-key`` names; else, for blocks that no other server and no later start reads, a random one.
    """
    found: dict[str, str] = next((each["blocks"] for each in _describe().values()), {})
    return found.get("named") or (None if is_shared else found.get("random"))


def _ask(name: str, *args: Any, at: int = 0, **options: Any) -> Any:
    """Have a mounted folder handle a call, once this process has opened the sealed one. Leave other calls."""
    path = args[at] if len(args) > at else options.get("filename")
    if not isinstance(path, (str, bytes, os.PathLike)):
        return NotImplemented
    found = os.path.realpath(os.fsdecode(path))
    root = next((root for root in _describe() if found.startswith(f"{root}/")), None)
    if root is None:
        return NotImplemented
    from fastrack._models import mounts

    with _lock:
        if not mounts.is_mounted(root):
            _open(root, _describe()[root])
    return getattr(mounts, name)(*args, **options)


def _open(root: str, description: Mapping[str, Any]) -> None:
    """Open a sealed folder, and refuse another one than the launcher opened."""
    from fastrack._keys.keyring import KeyRing
    from fastrack._models.mounts import Mount
    from fastrack._sets.folder import load_folder

    # What cannot be reached in the launcher's memory is not merely absent: no error would tell of another vocabulary.
    held = [each for each in description["keys"] if each.startswith("/proc/")]
    if lost := next((each for each in (*map(Path, held), *Path(root).rglob("*")) if not each.exists()), None):
        raise RollbackError(
            f"{lost}: expected memory of `fastrack run`, got none: it was killed, or this process has another /proc. "
            "Start the program again, in one namespace with it",
            path=lost,
        )
    ring = KeyRing.resolve(description["keys"])
    folder = load_folder(description["folder"], ring)
    if folder.file_id != description["index"]:
        raise RollbackError(
            f"{folder.path}: expected the folder that `fastrack run` opened, got another one, which took its place. "
            "Start the program again",
            path=folder.path,
        )
    Mount.attach(Path(root), folder, ring)


@functools.cache
def _describe() -> dict[str, dict[str, Any]]:
    """Return the private copies of folders by their paths, those of the innermost launcher first."""
    found: dict[str, Any] = {}
    # TMPDIR may have colons: paths begin with a slash.
    for place in filter(None, re.split(f"{os.pathsep}(?=/)", os.environ.get(VARIABLE, ""))):
        # Of a launcher that was killed, whose copies are gone, too, or of another user, whose copies are private.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            found |= json.loads(Path(place, DESCRIPTION).read_text(encoding="utf-8"))
    return found
