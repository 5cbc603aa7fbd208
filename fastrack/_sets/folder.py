"""Sealed folders: files that belong together, such as a model, under one key and one index."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fastrack._documents.canonical import decode, parsing, require
from fastrack._files.reader import SealedFile
from fastrack._files.verify import raise_first, verify_file
from fastrack._files.writer import Progress
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.contexts import Edition
from fastrack._sealed.file_header import StoredTensor, parse_header
from fastrack._sealed.seal import unseal
from fastrack._sealed.tensor import SealedTensor
from fastrack._sets.anchor import Anchor
from fastrack._sets.entries import Entry, PlainEntry, SealedEntry, walk
from fastrack._sets.load_file import load_file
from fastrack._sets.manifest import parse_entry
from fastrack._sets.weight_maps import compare_shards, is_weight_map
from fastrack._tensors import dtypes
from fastrack._util.locations import Location, join, locate
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError, RollbackError

INDEX = "fastrack.folder"
FILES, HEADER = "files", "header/"  # the tensor of the index that lists the files, and the prefix of those with headers
FORMAT = 1
SAFETENSORS = ".safetensors"
# Suffixes of weights, and of states of training, in other formats: larger than what a model has besides, and often read
# by code that maps files. What is none of these, by whatever name, is what a library reads beside weights.
OTHER_WEIGHTS = re.compile(
    r".*\.(bin|pt|pth|ckpt|pkl|pickle|gguf|ggml|onnx|onnx_data|h5|hdf5|msgpack|npy|npz|tflite)",
    re.IGNORECASE | re.DOTALL,
)
_STEMS = ("model", "adapter_model", "diffusion_pytorch_model")  # of the names that libraries give to files of weights


@public
def load_folder(
    path: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    anchor: Anchor | str | os.PathLike[str] | None = None,
) -> SealedFolder:
    """Open a sealed folder: authenticate its index, which lists and pins its files.

    Parameters
    ----------
    path : path or URL
        A folder that `seal_folder` made.
    keys : KeySource, optional
        As for `unseal`. The index is sealed.
    anchor : Anchor or path, optional
        The index has to match its owner's newest manifest, as for `load_file`, which fixes the version of the whole
        folder. Without an anchor an older copy of the whole folder is authentic.

    Returns
    -------
    SealedFolder
        The files of the folder. Each is compared with the index when it is opened.

    Raises
    ------
    AuthenticationError
        If the index was altered, or sealed by another key.
    UnknownKeyError
        If its key is not among `keys`.
    FormatError, RollbackError, SignatureError, OSError
        As from `load_file`, of the index.

    Examples
    --------
    >>> import os
    >>> import numpy as np
    >>> import fastrack
    >>> from safetensors.numpy import save_file
    >>> os.mkdir("model")
    >>> save_file({"weight": np.ones((2, 3))}, "model/model.safetensors")
    >>> key = fastrack.Key.generate()
    >>> fastrack.seal_folder("model", "sealed", key)
    >>> folder = fastrack.load_folder("sealed", key)
    >>> list(folder.files)
    ['model.safetensors']
    >>> folder.weights()
    {'weight': <SealedTensor 'weight' F64 [2, 3] key ...>}
    """
    path = locate(path)
    index = join(path, INDEX)
    if isinstance(path, Path) and path.is_dir() and not os.path.lexists(index):
        advice = "no such file, so this is no sealed folder; `fastrack seal` makes one. Name files of others one by one"
        raise FileNotFoundError(errno.ENOENT, advice, str(index))
    ring = KeyRing.resolve(keys)
    with load_file(index, anchor=anchor) as file:
        if file.kind != "folder" or FILES not in file:
            raise FormatError(f"{index}: expected the index of a sealed folder, got a {file.kind} file. Get it again")
        if file.plain or any(tensor.dtype != "U8" or len(tensor.shape) != 1 for tensor in file.values()):
            raise FormatError(
                f"{index}: expected sealed vectors of bytes, got other tensors. Get it again from its owner"
            )
        contents = {name: unseal(tensor, ring, framework="numpy").tobytes() for name, tensor in file.items()}
        assert file.key_id is not None
        assert file.file_id is not None
        return SealedFolder(path, file.key_id, file.file_id, contents, file.edition)


def open_folder(
    source: SealedFolder | str | os.PathLike[str], keys: KeyRing, anchor: Anchor | str | os.PathLike[str] | None
) -> SealedFolder:
    """Open a sealed folder by its path, or return an open one, which takes no anchor."""
    if not isinstance(source, SealedFolder):
        return load_folder(source, keys, anchor=anchor)
    if anchor is not None:
        raise ValueError("anchor=: expected none beside an open folder, got one. Give it to load_folder")
    return source


@dataclass(frozen=True, slots=True)
class FileCheck:
    """Result of `SealedFolder.check` for one file. `error` is None if it is authentic."""

    name: str
    sealed: bool
    nbytes: int
    error: Exception | None


@public
class SealedFolder:
    """Files of a sealed folder, as its index lists them. `load_folder` makes it.

    Attributes
    ----------
    path : pathlib.Path or URL
        Path of the folder, or its URL.
    key_id : str
        Id of the key that sealed it.
    file_id : str
        Id of its index.
    files : mapping of str to entries
        Entries of the index, by the names of the files.

    Examples
    --------
    >>> import os
    >>> import numpy as np
    >>> import fastrack
    >>> from safetensors.numpy import save_file
    >>> os.mkdir("model")
    >>> save_file({"weight": np.ones((2, 3))}, "model/model.safetensors")
    >>> with open("model/vocab.txt", "w") as file:
    ...     _ = file.write("a b c")
    >>> key = fastrack.Key.generate()
    >>> fastrack.seal_folder("model", "sealed", key, plain=["vocab.txt"])
    >>> folder = fastrack.load_folder("sealed", key)
    >>> folder.read("vocab.txt")
    b'a b c'
    >>> with folder.open("model.safetensors") as file:
    ...     print(file["weight"].shape)
    (2, 3)
    """

    def __init__(
        self,
        path: Location,
        key_id: str,
        file_id: str,
        contents: Mapping[str, bytes],
        edition: Edition | None = None,
    ) -> None:
        self.path, self.key_id, self.file_id = path, key_id, file_id
        self._edition = edition  # of the index, and so of all files
        self._headers = {name.removeprefix(HEADER): content for name, content in contents.items() if name != FILES}
        self.files: Mapping[str, Entry] = parse_index(contents[FILES], path)
        sealed = {HEADER + name for name, entry in self.files.items() if isinstance(entry, SealedEntry)}
        if not contents.keys() <= {FILES, *sealed}:
            raise FormatError(f"{path}: expected an index of headers of its sealed files, got others. Get it again")

    def open(self, name: str) -> SealedFile:
        """Open a sealed file, after its header was compared with the index.

        Parameters
        ----------
        name : str
            Its name in the index: its path in the folder, with ``/`` between folders.

        Raises
        ------
        KeyError
            If the index lists no such file, or one that is not sealed.
        RollbackError
            If it is another file, is missing, or is of another seal.
        AuthenticationError, FormatError, OSError
            As from `load_file`.
        """
        entry = self.files[name]
        if isinstance(entry, PlainEntry):
            raise KeyError(f"{name!r} is stored unencrypted; folder.read({name!r}) returns it")
        with self._present(name) as path:
            return SealedFile(path, entry=replace(entry, edition=self._edition))

    def read(self, name: str) -> bytes:
        """Return the content of a file that is not sealed, such as a configuration, once it was authenticated.

        Parameters
        ----------
        name : str
            Its name in the index.

        Raises
        ------
        KeyError
            If the index lists no such file, or one that is sealed.
        AuthenticationError
            If it has other content. `RollbackError` if it is missing.
        OSError
            If it cannot be read.
        """
        entry = self.files[name]
        if isinstance(entry, SealedEntry):
            raise KeyError(f"{name!r} is sealed; folder.open({name!r}) opens it")
        with self._present(name) as path:
            return entry.read(path)

    def weights(self, subfolder: str = "", variant: str | None = None) -> dict[str, SealedTensor]:
        """Return the weights of a model: all tensors of ``model.safetensors``, or of the shards that its index names.

        The names of adapters and diffusion models are known too. Without such a file, all ``.safetensors`` files count.
        Scales of weights that `seal_folder` quantised are left out: ``dtype="bfloat16"`` opens these as the model's.

        Parameters
        ----------
        subfolder : str
            The folder in the sealed folder that holds the model.
        variant : str, optional
            The variant in the names of the files, such as ``fp16``.

        Raises
        ------
        FormatError
            If there are none, or two files have a tensor of one name; or the index and the shards do not fit.
        RollbackError, AuthenticationError, OSError
            As from `open` and `read`.
        """
        names = self._weight_files(f"{subfolder}/" if subfolder else "", f".{variant}" if variant else "")
        with contextlib.ExitStack() as stack:
            return merge_tensors(own_tensors(self, name, stack.enter_context(self.open(name))) for name in names)

    def verify(self, keys: KeySource | None = None, *, progress: Progress | None = None) -> None:
        """Authenticate every file, and every chunk of those that are sealed. Nothing is written.

        Parameters
        ----------
        keys, progress
            As for `verify_file`.

        Raises
        ------
        RollbackError
            If a file is missing, is not in the index, or is of another seal.
        AuthenticationError
            If a file was altered. All are checked first; notes of the error name the others.
        UnknownKeyError
            If the key is not among `keys`.
        FormatError, OSError
            As from `load_file`.
        """
        raise_first(check.error for check in self.check(keys, progress=progress))

    def check(self, keys: KeySource | None = None, *, progress: Progress | None = None) -> list[FileCheck]:
        """Check all files as `verify` does, and return one `FileCheck` for each, foreign ones too."""
        ring = KeyRing.resolve(keys)
        checks = []
        for name, entry in self.files.items():
            error: Exception | None = None
            try:
                if isinstance(entry, PlainEntry):
                    compare_index(self, name, self.read(name))
                    if progress is not None:
                        progress(entry.size)
                else:
                    with self.open(name) as file:
                        if file:
                            verify_file(file, ring, progress=progress)
            except (AuthenticationError, FormatError, OSError) as raised:
                error = raised
            checks.append(FileCheck(name, isinstance(entry, SealedEntry), size_of(entry), error))
        for name, path in walk(self.path).items() if isinstance(self.path, Path) else ():
            if name not in self.files and name != INDEX:
                foreign = RollbackError(
                    f"{path}: expected a file that {self.place(INDEX)} lists, got another. Remove it", path=path
                )
                checks.append(FileCheck(name, False, path.stat().st_size, foreign))
        return checks

    def place(self, name: str) -> Location:
        """Return the path or the URL of a file."""
        return join(self.path, name)

    @property
    def sealed_names(self) -> list[str]:
        """Names of the files that are sealed."""
        return [name for name, entry in self.files.items() if isinstance(entry, SealedEntry)]

    @property
    def plain_names(self) -> list[str]:
        """Names of the files that are stored as they were."""
        return [name for name, entry in self.files.items() if isinstance(entry, PlainEntry)]

    @property
    def file_ids(self) -> list[str]:
        """Ids of the index and of all sealed files, for grants."""
        return [self.file_id, *(entry.file for entry in self.files.values() if isinstance(entry, SealedEntry))]

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes, without what sealing adds."""
        return sum(map(size_of, self.files.values()))

    def header(self, name: str) -> bytes | None:
        """Return the header that a safetensors file had before it was sealed; None for a file that was sealed whole."""
        return self._headers.get(name)

    def _weight_files(self, prefix: str, variant: str) -> list[str]:
        for stem in _STEMS:
            whole = f"{prefix}{stem}{variant}{SAFETENSORS}"
            index = f"{prefix}{stem}{SAFETENSORS}.index{variant}.json"
            if index in self.files:
                return self._shards(prefix, index)
            if whole in self.files:
                return [whole]
        names = [name for name in self.files if name.startswith(prefix) and "/" not in name.removeprefix(prefix)]
        names = [name for name in names if name.lower().endswith(SAFETENSORS)]
        if not names or variant:
            raise FormatError(
                f"{self.place(prefix)}: expected a model{variant}{SAFETENSORS} or its index, got neither. Name the "
                "folder of a model"
            )
        return names

    def _shards(self, prefix: str, index: str) -> list[str]:
        try:
            content = self.read(index)
            shards = sorted({prefix + shard for shard in json.loads(content)["weight_map"].values()})
            if not all(isinstance(self.files[shard], SealedEntry) for shard in shards):
                raise KeyError("a shard that is not sealed")  # noqa: TRY301 - told below
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FormatError(
                f"{self.place(index)}: expected a weight_map with names of sealed files in {INDEX}, got another: "
                f"{error!s:.200}. Get the folder again from its owner"
            ) from None
        compare_index(self, index, content)
        return shards

    @contextlib.contextmanager
    def _present(self, name: str) -> Iterator[Location]:
        """Yield the path of a file. A missing file raises an error about the folder."""
        path = self.place(name)
        try:
            yield path
        except FileNotFoundError:
            raise RollbackError(
                f"{path}: expected this file by {self.place(INDEX)}, got none. Get the folder again from its owner",
                path=path,
            ) from None

    def __repr__(self) -> str:
        return f"<SealedFolder {str(self.path)!r}: {len(self.sealed_names)} sealed, {len(self.plain_names)} plain>"


def size_of(entry: Entry) -> int:
    """Return the size of a file in bytes, without what sealing adds."""
    if isinstance(entry, PlainEntry):
        return entry.size
    return sum(dtypes.nbytes(dtype, tuple(shape)) for dtype, shape, _ in entry.sealed.values())


def compare_index(folder: SealedFolder, name: str, content: bytes) -> None:
    """Refuse the content of an index of shards that does not fit the shards of a folder. Other files pass."""

    def names_in(shard: str) -> Iterable[str] | None:
        entry, header = folder.files[shard], folder.header(shard)
        if isinstance(entry, PlainEntry):
            return None
        return entry.sealed if header is None else names_before(header, folder.place(shard))

    if is_weight_map(name):
        advice = "get the folder again from its owner, who seals the whole model"
        compare_shards(folder.path, name, content, folder.files, names_in, advice)


def parse_index(content: bytes, path: Location) -> dict[str, Entry]:
    """Return the entries in an index. A holder of the key made it, but the program may have been faulty."""
    index = join(path, INDEX)
    with parsing(f"{index} is not the index of a sealed folder", "get it again from its owner"):
        document = decode(content, {"files", "format"}, {"format": FORMAT})
        require(not any(members.get("plain") for members in document["files"].values()), "plain")
        return {name: parse_entry(name, members, str(index)) for name, members in document["files"].items()}


def names_before(header: bytes | None, path: Location) -> dict[str, StoredTensor]:
    """Return the tensors of a file before it was sealed, by its header: quantised ones as BF16, without scales."""
    return {} if header is None else parse_header(header, None, path)[1]


def own_tensors(folder: SealedFolder, name: str, file: SealedFile) -> dict[str, SealedTensor]:
    """Return the tensors that a file had before `seal_folder` quantised some: without the scales of these."""
    scales = {scale.name for tensor in file.values() if (scale := tensor.scale) is not None}
    if scales:
        scales -= names_before(folder.header(name), folder.place(name)).keys()
    return {each: tensor for each, tensor in file.items() if each not in scales}


def is_widened(tensor: SealedTensor, weights: Mapping[str, SealedTensor]) -> bool:
    """Return whether a weight stands for the product with its scales, which are not among the weights then."""
    return tensor.scale is not None and tensor.scale.name not in weights


def merge_tensors(files: Iterable[Mapping[str, SealedTensor]]) -> dict[str, SealedTensor]:
    """Merge the sealed tensors of files, whose names must differ."""
    tensors: dict[str, SealedTensor] = {}
    for file in files:
        for name, tensor in file.items():
            if name in tensors:
                raise FormatError(
                    f"{tensor.path}: expected other tensors than in {tensors[name].path}, got {name!r:.200} again. "
                    "Open the files one by one"
                )
            tensors[name] = tensor
    return tensors
