"""Several sealed files that have the same tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastrack._sealed.reader import SealedFile
from fastrack._sealed.tensor import MessageContext, SealedTensor
from fastrack._util.pickles import unpickle
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._sealed.anchor import Anchor
    from fastrack._sealed.entries import SealedEntry

PathLike = str | os.PathLike[str]


class Shards:
    """The same tensors of several sealed files. After unpickling, the files are opened when they are first needed."""

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        names: Sequence[str] | None,
        file_ids: Sequence[str] | None = None,
        anchor: Anchor | PathLike | None = None,
    ) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not given:
            raise ValueError("paths: expected one sealed file or more, got none")
        self.paths = [Path(path).absolute() for path in given]
        self._entries: list[SealedEntry] | None = None
        files = self._open() if anchor is None else self._open_anchored(anchor)
        for path, file in zip(self.paths, files, strict=True):
            if file.kind != "tensor":
                raise FormatError(
                    f"{path}: expected a file of samples, got a {file.kind}. Open it with load_{file.kind}"
                )
        _require_distinct(files, file_ids)
        if names is None:
            names = list(files[0])
        if not names or isinstance(names, str):
            raise ValueError(
                f"columns=: expected a sequence of names of sealed tensors, got {names!r:.200}; {self.paths[0]} has "
                f"{list(files[0])!s:.300}"
            )
        self.names = tuple(names)
        self.key_id = files[0].key_id or ""
        self._tensors: list[list[SealedTensor]] | None = [_tensors_of(file, self.names) for file in files]
        self.contexts = [[tensor.context for tensor in tensors] for tensors in self._tensors]
        for path, contexts in zip(self.paths, self.contexts, strict=True):
            for context, first in zip(contexts, self.contexts[0], strict=True):
                if (context.dtype, context.shape[1:]) != (first.dtype, first.shape[1:]):
                    raise ValueError(
                        f"{path}: {context.name!r:.200}: expected {first.dtype} and rows as in {list(first.shape)} of "
                        f"{self.paths[0]}, got {context.dtype} {list(context.shape)}"
                    )

    def __len__(self) -> int:
        return len(self.paths)

    def tensor(self, shard: int, column: int) -> SealedTensor:
        """Return the tensor of a column in a file."""
        if self._tensors is None:
            opened = [_tensors_of(file, self.names) for file in self._open()]
            for path, tensors, contexts in zip(self.paths, opened, self.contexts, strict=True):
                if [tensor.context for tensor in tensors] != contexts:
                    raise FormatError(f"{path} was replaced since this data set was made. Make the data set again")
            self._tensors = opened  # only now, as other threads may read it
        return self._tensors[shard][column]

    def _open(self) -> list[SealedFile]:
        """Open all files, as the entries of their manifest have them if there are any."""
        entries: Sequence[SealedEntry | None] = self._entries or [None] * len(self.paths)
        return [SealedFile(path, entry=entry) for path, entry in zip(self.paths, entries, strict=True)]

    def _open_anchored(self, anchor: Anchor | PathLike) -> list[SealedFile]:
        """Open all files as one version of their manifest lists them."""
        from fastrack._sealed.anchor import Anchor

        anchor = Anchor.resolve(anchor)
        self._entries = [anchor.sealed_entry(path) for path in self.paths]
        files = self._open()
        anchor.advance()
        return files

    def __reduce__(self) -> tuple[object, ...]:
        pinned = () if self._entries is None else (self._entries,)
        return unpickle, ("Shards", list(map(str, self.paths)), self.names, self.key_id, self.contexts, *pinned)


def restore_shards(
    paths: list[str],
    names: tuple[str, ...],
    key_id: str,
    contexts: list[list[MessageContext]],
    entries: list[SealedEntry] | None = None,
) -> Shards:
    """Return the files that a pickle describes. They are opened when they are first needed."""
    shards = Shards.__new__(Shards)
    shards.paths, shards.names, shards.key_id, shards.contexts = [Path(path) for path in paths], names, key_id, contexts
    shards._entries, shards._tensors = entries, None  # noqa: SLF001 - its own
    return shards


def _require_distinct(files: Sequence[SealedFile], file_ids: Sequence[str] | None) -> None:
    """Refuse a file with another id than expected, and two files with one id: a file and its copy."""
    if file_ids is not None:
        expected = [file_ids] if isinstance(file_ids, str) else list(file_ids)
        if len(expected) != len(files):
            raise ValueError(f"file_ids=: expected {len(files)}, one for each path, got {len(expected)}")
        for file, file_id in zip(files, expected, strict=True):
            if file.file_id != file_id:
                raise FormatError(
                    f"{file.path}: expected the file id {file_id:.50}, got {file.file_id}. Get it again from its owner"
                )
    first: dict[str | None, SealedFile] = {}
    for file in files:
        if file.file_id is not None and file.file_id in first:
            raise FormatError(
                f"{file.path}: expected each file once, got {first[file.file_id].path} again or a copy of it: both "
                f"have the id {file.file_id}. Remove one of them"
            )
        first[file.file_id] = file


def _tensors_of(file: SealedFile, names: Sequence[str]) -> list[SealedTensor]:
    for name in names:
        if name not in file:
            raise ValueError(
                f"{file.path} has no sealed tensor {name!r:.200}; it has {', '.join(map(repr, file)) or 'none':.300}"
            )
    return [file[name] for name in names]
