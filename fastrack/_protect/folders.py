"""Sealed folders that other libraries write: `write_folder`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrack._files.importers import PlainTensor
from fastrack._files.writer import by_alignment, plain_names, write_sealed
from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._keys.keys import Key
from fastrack._protect.safetensors_files import describe
from fastrack._sealed.file_header import encode_header
from fastrack._sets.entries import walk
from fastrack._sets.folder_writer import FolderIndex, plain_files
from fastrack._util.atomic import new_folder
from fastrack._util.locations import locate_local
from fastrack._util.public import public
from fastrack._util.replacing import replace_everywhere

_drafts: dict[str, _Draft] = {}  # by the paths of their folders


@public
@contextlib.contextmanager
def write_folder(
    target: str | os.PathLike[str], key: KeyLike | None = None, *, plain: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the path of a private folder; what a library writes there becomes a sealed folder, like by `seal_folder`.

    What safetensors writes there, in this process and any thread, is sealed at once, tensor by tensor, and is on no
    disk in plain. Configuration, code, documentation and tokenizers of a model stay plain, as `seal_folder` says. Other
    files are refused: pickles of torch, for example. So it serves ``save_pretrained`` of transformers, PEFT and
    diffusers, and ``save`` of sentence-transformers. `load_folder` and `mount_folder` open the result.

    Parameters
    ----------
    target : path
        The sealed folder to make. It has that name when the block ended well and it is on disk, and replaces nothing.
    key : KeyLike, optional
        The owner's key, as for `seal`.
    plain : iterable of str
        Further files to leave plain, as for `seal_folder`.

    Yields
    ------
    str
        Path of the folder to write to, which only you may open. It is removed at the end.

    Raises
    ------
    ValueError
        If the library wrote no weights, or a file that is neither sealed nor stays plain. What it held was on a disk in
        plain until then. Also if `plain` names no file.
    FormatError
        If tensors cannot be sealed, or a link leads outside.
    OSError
        If a file cannot be written, or `target` exists. No part of `target` is left behind then.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> from safetensors.numpy import save_file
    >>> key = fastrack.Key.generate()
    >>> with fastrack.write_folder("sealed", key) as path:  # model.save_pretrained(path), for example
    ...     save_file({"weight": np.ones((2, 3))}, f"{path}/model.safetensors")
    >>> fastrack.load_folder("sealed", key).weights()
    {'weight': <SealedTensor 'weight' F64 [2, 3] key ...>}
    """
    place, owner, chosen = locate_local(target), sealing_key(key), plain_names(plain)
    with new_folder(place) as folder, tempfile.TemporaryDirectory(prefix="fastrack-") as name:
        path = os.path.realpath(name)
        draft = _Draft(Path(path), folder, owner)
        _install()
        _drafts[path] = draft
        try:
            yield path
        finally:
            del _drafts[path]
        draft.finish(chosen)


class _Draft:
    """The folder that a library writes to, and the sealed folder beside it."""

    def __init__(self, path: Path, folder: Path, owner: Key) -> None:
        self._path, self._folder, self._owner = path, folder, owner
        self._headers: dict[str, bytes] = {}  # as the files would have them in plain

    def write(self, name: str, tensors: Mapping[str, PlainTensor], metadata: Mapping[str, str]) -> None:
        """Seal what would become a file, and leave a stub in its place."""
        out = self._folder / name
        out.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(tensors, out, self._owner, frozenset(), {"format": "pt", **metadata}, None)
        entries = {each: (tensor.dtype, tensor.shape) for each, tensor in tensors.items()}
        self._headers[name] = encode_header(by_alignment(entries), metadata)
        (self._path / name).write_bytes(encode_header({}, {"format": "pt"}, guarded=True))

    def finish(self, plain: frozenset[str]) -> None:
        files = walk(self._path)
        kept = plain_files(files, self._path, plain)
        other = sorted(files.keys() - kept - self._headers.keys())
        if other or not files.keys() & self._headers.keys():
            raise ValueError(
                f"write_folder: expected weights in .safetensors files, got {', '.join(map(repr, other)) or 'none'}. "
                "Let the library write safetensors, and name what may stay plain with plain="
            )
        for name in self._headers.keys() - files.keys():  # which the library removed again
            (self._folder / name).unlink()
        index = FolderIndex(self._folder)
        for name, path in sorted(files.items()):
            if name in self._headers:
                index.add_sealed(name, self._headers[name], path)
            else:
                index.copy(name, path)
        index.write(self._owner)


def _install() -> None:
    """Replace the function by which safetensors writes files, once more if another replacement came since."""
    import safetensors

    original: Any = safetensors.serialize_file
    if hasattr(original, "fastrack_drafts"):
        return

    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        found = os.path.realpath(os.fspath(filename)) if _drafts else ""
        for root, draft in tuple(_drafts.items()):
            if found.startswith(f"{root}/"):
                return draft.write(found[len(root) + 1 :], describe(tensors), dict(metadata or {}))
        return original(tensors, filename, metadata)

    serialize_file.fastrack_drafts = True  # type: ignore[attr-defined]
    replace_everywhere(original, serialize_file)
