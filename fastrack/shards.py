"""Sealed files side by side, the same tensors of each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fastrack.errors import FormatError
from fastrack.files import SealedFile, load_file
from fastrack.sealed import Claim, SealedTensor

__all__ = ["PathLike", "Shards"]

PathLike = str | os.PathLike[str]


class Shards:
    """The same tensors of several sealed files. Where it was unpickled it opens them when they are first needed."""

    def __init__(self, paths: PathLike | Sequence[PathLike], names: Sequence[str] | None) -> None:
        given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not given:
            raise ValueError("a data set needs a sealed file, and no path was given")
        self.paths = [Path(path).absolute() for path in given]
        files = [load_file(path) for path in self.paths]
        for path, file in zip(self.paths, files, strict=True):
            if file.kind != "tensor":
                raise FormatError(f"{path} is a {file.kind}, and no file of samples; load_{file.kind} opens it")
        if names is None:
            names = list(files[0])
        if not names or isinstance(names, str):
            raise ValueError(f"columns= takes names of sealed tensors, of which {self.paths[0]} has {list(files[0])}")
        self.names = tuple(names)
        self.key_id = files[0].key_id or ""
        self._tensors: list[list[SealedTensor]] | None = [_tensors_of(file, self.names) for file in files]
        self.claims = [[tensor.claim for tensor in tensors] for tensors in self._tensors]
        for path, claims in zip(self.paths, self.claims, strict=True):
            for claim, first in zip(claims, self.claims[0], strict=True):
                if (claim.dtype, claim.shape[1:]) != (first.dtype, first.shape[1:]):
                    raise ValueError(
                        f"{path}: {claim.name!r} is {claim.dtype} {list(claim.shape)}, which does not go together "
                        f"with the {first.dtype} {list(first.shape)} of {self.paths[0]}"
                    )

    def __len__(self) -> int:
        return len(self.paths)

    def tensor(self, shard: int, column: int) -> SealedTensor:
        """The tensor of a column in a file."""
        if self._tensors is None:
            found = [_tensors_of(load_file(path), self.names) for path in self.paths]
            for path, tensors, claims in zip(self.paths, found, self.claims, strict=True):
                if [tensor.claim for tensor in tensors] != claims:
                    raise FormatError(f"{path} is not the file that this data set was made of; make it again")
            self._tensors = found  # only now, as other threads may look
        return self._tensors[shard][column]

    def __getstate__(self) -> tuple[list[Path], tuple[str, ...], str, list[list[Claim]]]:
        return self.paths, self.names, self.key_id, self.claims

    def __setstate__(self, state: tuple[list[Path], tuple[str, ...], str, list[list[Claim]]]) -> None:
        self.paths, self.names, self.key_id, self.claims = state
        self._tensors = None


def _tensors_of(file: SealedFile, names: Sequence[str]) -> list[SealedTensor]:
    for name in names:
        if name not in file:
            raise ValueError(
                f"{file.path} has no sealed tensor {name!r}; it has {', '.join(map(repr, file)) or 'none'}"
            )
    return [file[name] for name in names]
