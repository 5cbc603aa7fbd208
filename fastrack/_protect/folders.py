"""Sealed folders that other libraries write: `write_folder`."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import by_alignment, plain_names, write_sealed
from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._keys.keys import Key
from fastrack._patches.safetensors import add_handler
from fastrack._protect.safetensors_files import describe
from fastrack._sealed.file_header import encode_header
from fastrack._sets.folder import SAFETENSORS, names_before
from fastrack._sets.folder_writer import FolderIndex, compare_indexes, files_to_seal, plain_files
from fastrack._util.endings import remove_own, report_at_end
from fastrack._util.locations import locate_local
from fastrack._util.new_folder import new_folder
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular

_drafts: dict[str, _Draft] = {}  # by the paths of their folders
_TOKEN = "fastrack.draft"  # noqa: S105 - the name of a member of metadata
_LONGEST_STUB = 4096  # bytes; they have some 250


@public
@contextlib.contextmanager
def write_folder(
    target: str | os.PathLike[str], key: KeyLike | None = None, *, plain: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the path of a private folder; what a library writes there becomes a sealed folder, like by `seal_folder`.

    What safetensors writes there, in this process and any thread, is sealed at once, tensor by tensor, and is on no
    disk unencrypted. Such a file may be moved, copied, replaced and removed there. Configuration, code, documentation
    and tokenizers of a model stay plain, as `seal_folder` says. Other files are refused: pickles of torch, for example.
    So it serves ``save_pretrained`` of transformers, PEFT and diffusers, and ``save`` of sentence-transformers.
    `load_folder` and `mount_folder` open the result.

    Parameters
    ----------
    target : path
        The sealed folder to make. It has that name when the block ended well and it is on disk, and replaces nothing.
    key : KeyLike, optional
        The owner's key, as for `seal`.
    plain : iterable of str
        Further files to leave plain, as for `seal_folder`, except ``.safetensors`` files.

    Yields
    ------
    str
        Path of the folder to write to, which only you may open. It is removed at the end.

    Raises
    ------
    ValueError
        If the library wrote no weights, or a file that is neither sealed nor stays plain, or a ``.safetensors`` file by
        other functions than those of safetensors. What it held was on a disk unencrypted until then. Also if `plain`
        names no file.
    FormatError
        If tensors cannot be sealed, or a file has a name that `seal_folder` refuses, or is a link that leads outside;
        or an index of shards does not fit these.
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
    with new_folder(place) as folder, _private_folder() as path:
        draft = _Draft(path, folder, owner)
        add_handler("serialize_file", _save_in_draft)
        _drafts[str(path)], sealed = draft, draft.sealed
        watch = report_at_end(draft, lambda: sealed and f"{place}: {len(sealed)} sealed files were not stored")
        try:
            yield str(path)
        finally:
            del _drafts[str(path)]
            if not isinstance(sys.exception(), GeneratorExit):  # of the garbage collector, in place of an end
                watch.detach()
        draft.finish(chosen)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Yield an empty folder, and remove it at the end. A forked child that leaves the block leaves it to its parent."""
    path, process = Path(tempfile.mkdtemp(prefix="fastrack-")).resolve(), os.getpid()
    try:
        yield path
    finally:
        remove_own(path, process)


class _Draft:
    """The folder that a library writes to, and the sealed folder beside it.

    A stub stands for each sealed file, and has a token of its own: under whatever name a stub is in the end, moved or
    copied by the library, there is the file that it stands for.
    """

    def __init__(self, path: Path, folder: Path, owner: Key) -> None:
        self._path, self._folder, self._owner = path, folder, owner
        self._process = os.getpid()
        self.sealed: dict[bytes, tuple[Path, bytes]] = {}  # by stubs: files, and the headers that they had before

    def write(self, path: str, tensors: Mapping[str, PlainTensor], metadata: Mapping[str, str]) -> None:
        """Seal what would become a file, and leave a stub in its place."""
        token = secrets.token_hex(16)
        sealed = self._folder / f".{token}"  # which no name of a file of the folder can be
        write_sealed(tensors, sealed, self._owner, frozenset(), metadata, None)
        entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        stub = encode_header({}, {"format": "pt", _TOKEN: token}, guarded=True)
        self.sealed[stub] = sealed, encode_header(by_alignment(entries), metadata)
        Path(path).write_bytes(stub)

    def finish(self, plain: frozenset[str]) -> None:
        """Give the sealed files the names of their stubs, copy what stays plain, and write the index."""
        if os.getpid() != self._process:
            return
        files = files_to_seal(self._path)
        kept = plain_files(files, self._path, plain)
        begins = {name: _beginning(path) for name, path in files.items()}
        stubs = {name: content for name, content in begins.items() if content in self.sealed}
        # Another stub, and weights that something else than safetensors wrote, stay plain by no name.
        other = {name for name in files if name.lower().endswith(SAFETENSORS) or _TOKEN.encode() in begins[name]}
        other = (other | (files.keys() - kept)) - stubs.keys()
        if other or not stubs:
            raise ValueError(
                "write_folder: expected .safetensors files that safetensors wrote in this block, and what stays plain, "
                f"got {', '.join(map(repr, sorted(other))) or 'none':.300}. Let the library save with safetensors, and "
                "name what else may stay plain with plain="
            )
        headers = {name: self.sealed[stub][1] for name, stub in stubs.items()}
        compare_indexes(self._path, files, lambda name: names_before(headers.get(name), files[name]))
        index, left = FolderIndex(self._folder), Counter(stubs.values())
        for name, path in files.items():
            if name in stubs:
                left[stubs[name]] -= 1
                index.place_sealed(name, *self.sealed[stubs[name]], path, is_last=not left[stubs[name]])
            else:
                index.copy(name, path)
        for stub, (sealed, _) in self.sealed.items():
            if stub not in left:  # which the library removed, or wrote over
                sealed.unlink()
        index.write(self._owner)


def _beginning(path: Path) -> bytes:
    """Return as much of a file as shows whether it is a stub."""
    with open_regular(path) as file:
        return file.read(_LONGEST_STUB)


def _save_in_draft(tensors: Any, filename: Any, metadata: Any = None) -> Any:
    if _drafts:
        path = os.path.realpath(os.fsdecode(filename))
        for root, draft in tuple(_drafts.items()):
            if path.startswith(f"{root}/"):
                return draft.write(path, describe(tensors), dict(metadata or {}))
    return NotImplemented
