"""Private copies of the files of a sealed folder that are not sealed."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Self

from fastrack._sets.folder import SealedFolder

CODE = ".py"


class PrivateCopy:
    """A folder that only this user can open, and that is removed at the end of the ``with`` block or with its owner."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fastrack-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def keep_for(self, owner: object) -> None:
        """Keep it as long as an object that may refer to it lives, such as a tokenizer to its vocabulary."""
        with contextlib.suppress(TypeError):  # tuples, say, cannot be referred to weakly
            weakref.finalize(owner, shutil.rmtree, self.path, ignore_errors=True)
            self._remove.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()


def private_copy(folder: SealedFolder, *, code: bool = False) -> PrivateCopy:
    """Return a copy of all files that are not sealed, as they were authenticated, and of code only if asked for."""
    copy = PrivateCopy()
    for name in folder.plain_names:
        if code or not name.endswith(CODE):
            path = copy.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(folder.read(name))
    return copy


def refuse_foreign_code(copy: Path, folder: SealedFolder) -> None:
    """Refuse configurations that refer to code of other repositories, which nothing authenticates."""
    for path in copy.rglob("*.json"):
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue  # which is no configuration that could refer to anything
        if isinstance(document, dict) and "--" in json.dumps(document.get("auto_map")):
            raise ValueError(
                f"{folder.place(path.relative_to(copy).as_posix())}: trust_remote_code=: expected code in this folder, "
                "got a reference to another repository. Put the code into the folder, and seal it again"
            )
