"""An object store in memory, for fsspec: an object has its name when it is complete.

`ObjectStore.before` is called with the name of each operation, and may raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class ObjectStore(MemoryFileSystem):
    """A store of its own, under ``shelf://``."""

    protocol = "shelf"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    before: Callable[[str], None] = staticmethod(lambda operation: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("shelf://", "memory://", 1))

    def _open(self, path, mode="rb", **options):
        if mode == "rb":
            return super()._open(path, mode, **options)
        self.before("open")
        return _Upload(self, self._strip_protocol(path))

    def pipe_file(self, path, value, **_):
        path = self._strip_protocol(path)
        self.store[path] = MemoryFile(self, path, value)

    def rm_file(self, path):
        self.before("remove")
        super().rm_file(path)

    def find(self, path, **options):
        self.before("find")
        return super().find(path, **options)

    @classmethod
    def names(cls, folder=""):
        """Return the names of all objects below a folder."""
        return sorted(name.removeprefix(f"/{folder}/") for name in cls.store if name.startswith(f"/{folder}"))

    @classmethod
    def clear(cls):
        cls.store.clear()
        cls.before = staticmethod(lambda operation: None)


class _Upload(MemoryFile):
    def write(self, data):
        self.fs.before("write")
        return super().write(data)

    def commit(self):
        self.fs.before("commit")
        super().commit()


fsspec.register_implementation("shelf", ObjectStore, clobber=True)
