"""Sealed folders as folders that other libraries load: `mount_folder`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fastrack._devices import canonical
from fastrack._files.writer import Progress, plain_names
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._models.foreign_code import refuse_foreign_code, without_foreign_code
from fastrack._models.mapped_pages import open_once
from fastrack._models.progress import reported
from fastrack._models.safe_open import Source, framework_of, read_source, safe_open
from fastrack._patches.safetensors import add_handler
from fastrack._sealed.file_header import encode_header, parse_header
from fastrack._sets.entries import SealedEntry
from fastrack._sets.folder import (
    OTHER_WEIGHTS,
    SAFETENSORS,
    SealedFolder,
    compare_index,
    open_folder,
    own_tensors,
    size_of,
)
from fastrack._sets.folder_writer import write_unsealed
from fastrack._util.endings import remove_own
from fastrack._util.fork import report
from fastrack._util.public import public
from fastrack.errors import FastrackError

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

_LARGEST = 64 << 20  # bytes of a sealed file that opens in memory unasked: vocabularies have up to some 30 MiB
_MOST = 128  # such files: each takes a descriptor, of which a process often has 1024
# Of a file that does not open unasked. Its first byte is in no UTF-8, and begins no pickle, protocol buffer or JSON:
# where root opens it all the same, what reads it fails, and takes no line of it for a word.
_CLOSED = b"\xff sealed by fastrack, and not opened unasked: name it in memfd= of mount_folder\n"
_mounts: dict[str, Mount] = {}  # by the paths of their folders


@public
@contextlib.contextmanager
def mount_folder(
    folder: SealedFolder | str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    code: bool = False,
    memfd: Iterable[str] = (),
    progress: Progress | bool | None = None,
) -> Iterator[str]:
    """Yield the path of a private folder, from which libraries load a sealed one as if it were plain.

    It has copies of the files that are not sealed, such as configuration, once they were authenticated. In the place of
    each sealed ``.safetensors`` file is a stub, which ``safetensors.safe_open`` of this process, and so
    ``safetensors.torch.load_file``, opens as the sealed file: each tensor is authenticated and decrypted when it is
    asked for, on the device that it is asked for, and none touches a disk. The folder is removed at the end.

    No other sealed file is merely absent, as libraries then make up another tokenizer, for example. What is no weights,
    such as a vocabulary, is decrypted into host memory, as by `memfd`: the 128 smallest files, of at most 64 MiB each.
    Weights in other formats, such as pickles, and larger files are there without the right to read them, and a note to
    an error of the block names them.

    It serves ``from_pretrained`` of diffusers and PEFT, sentence-transformers, timm, and what else reads weights by
    ``safe_open``. `fastrack.transformers.from_pretrained` refuses, besides, arguments that would load something else.

    Parameters
    ----------
    folder : path, URL or SealedFolder
        A folder that `seal_folder` or `write_folder` made.
    keys : KeySource, optional
        As for `unseal`.
    anchor : Anchor or path, optional
        As for `load_folder`. Only for a folder given by its path or URL.
    code : bool
        Copy authenticated Python files too, for ``trust_remote_code=True``, which needs it. A configuration that refers
        to code of another repository is refused then. Otherwise such references lead nowhere in its copy, so that
        ``trust_remote_code=True`` finds no code, and runs none.
    memfd : iterable of str
        Names, or globs, of sealed weights for loaders that map or read files by themselves, as in C++ (GGUF, ONNX).
        Each is decrypted whole into host memory at once, where this user's processes can read it until the end, and
        which may be swapped: also where the weights go to a GPU. Only on Linux.
    progress : callable or bool, optional
        As for `load_tensors`, of the files of `memfd`. Weights that a library loads are shown by the library.

    Yields
    ------
    str
        Path of the folder, which only you may open, and which is for reading.

    Raises
    ------
    AuthenticationError
        If a file or a chunk was altered. `RollbackError` if a file is missing, or of another seal. At the end of the
        block, too, if a library had passed over such an error, or had raised another one for it.
    ValueError
        If `code` refers to another repository, or `memfd` names no sealed file.
    OSError
        If a file cannot be read, at the end of the block too, or if a library saves weights to the folder.
    UnknownKeyError, FormatError, SignatureError
        As from `load_folder`; also if an index of shards does not fit these.

    Examples
    --------
    >>> import os
    >>> import numpy as np
    >>> import fastrack
    >>> from safetensors.numpy import load_file, save_file
    >>> os.mkdir("model")
    >>> save_file({"weight": np.ones((2, 3))}, "model/model.safetensors")
    >>> key = fastrack.Key.generate()
    >>> fastrack.seal_folder("model", "sealed", key)
    >>> with fastrack.mount_folder("sealed", key) as path:
    ...     load_file(f"{path}/model.safetensors")["weight"].shape
    (2, 3)
    """
    ring = KeyRing.resolve(keys)
    options: dict[str, Any] = {"code": code, "memfd": plain_names(memfd), "progress": progress}
    with Mount(open_folder(folder, ring, anchor), ring, **options) as mount:
        yield str(mount.path)


class Mount:
    """A private folder that stands for a sealed one: a new one, or that `at` a path. Files in `hidden` are left out."""

    def __init__(
        self,
        folder: SealedFolder,
        keys: KeyRing,
        *,
        code: bool = False,
        memfd: Iterable[str] = (),
        hidden: Iterable[str] = (),
        at: Path | None = None,
        progress: Progress | bool | None = None,
    ) -> None:
        self._begin(Path(tempfile.mkdtemp(prefix="fastrack-")).resolve() if at is None else at, folder, keys)
        self._remove = weakref.finalize(self, remove_own, self.path, os.getpid())
        self._closed: list[str] = []  # names of sealed files that do not open here
        try:
            named = {name: None for pattern in memfd for name in self._match(pattern, code)}
            self._fill(code, {*hidden, *named})
            with reported(sum(size_of(folder.files[name]) for name in named), progress) as advance:
                for name in named:
                    self._open_in_memory(name, refuse_foreign_code, advance)
            _make_read_only(self.path)
        except BaseException:
            self._end()
            raise
        add_handler("safe_open", open_mounted)
        add_handler("serialize_file", refuse_mounted)
        _mounts[str(self.path)] = self

    @classmethod
    def attach(cls, path: Path, folder: SealedFolder, keys: KeyRing) -> None:
        """Open files below a private folder that another process fills and removes."""
        mount = cls.__new__(cls)
        mount._begin(path, folder, keys, is_reported=True)  # noqa: SLF001 - of this class
        _mounts[str(path)] = mount

    def _begin(self, path: Path, folder: SealedFolder, keys: KeyRing, *, is_reported: bool = False) -> None:
        self.path, self.folder, self._keys = path, folder, keys
        self._failure: FastrackError | OSError | None = None
        self._is_reported = is_reported  # as no block raises it at its end
        self._descriptors = contextlib.ExitStack()

    def _fill(self, code: bool, hidden: set[str]) -> None:
        stub = encode_header({}, {"format": "pt"}, guarded=True)  # what does not ask `safe_open` is told so
        confine = refuse_foreign_code if code else without_foreign_code
        names = [name for name in self.folder.files if name not in hidden and (code or not _is_code(name))]
        whole = {name for name in self.folder.sealed_names if not self._is_weights(name)}.intersection(names)
        sizes = {name: size_of(self.folder.files[name]) for name in whole if not OTHER_WEIGHTS.fullmatch(name)}
        small = [name for name in sorted(sizes, key=sizes.__getitem__) if sizes[name] <= _LARGEST][:_MOST]
        opened = set(small if hasattr(os, "memfd_create") else ())
        for name in opened:
            self._open_in_memory(name, confine)
        for name in names:
            if name in opened:
                continue
            path = self._place(name)
            if name in whole:
                self._closed.append(name)
                path.write_bytes(_CLOSED)
                path.chmod(0)
                continue
            content = stub if self._is_weights(name) else self.folder.read(name)
            compare_index(self.folder, name, content)
            path.write_bytes(confine(content, self.folder.place(name)) if _is_configuration(name) else content)
            path.chmod(0o400)

    def _is_weights(self, name: str) -> bool:
        return name.lower().endswith(SAFETENSORS) and isinstance(self.folder.files.get(name), SealedEntry)

    def _match(self, pattern: str, code: bool) -> list[str]:
        names = [name for name in fnmatch.filter(self.folder.sealed_names, pattern) if code or not _is_code(name)]
        if not names:
            raise ValueError(f"memfd=: expected a sealed file of {self.folder.path}, got {pattern!r:.200}. Correct it")
        return names

    def _open_in_memory(
        self, name: str, confine: Callable[[bytes, Any], bytes], progress: Progress | None = None
    ) -> None:
        descriptor = os.memfd_create("fastrack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._descriptors.callback(os.close, descriptor)
        with open(descriptor, "w+b", closefd=False) as out:
            write_unsealed(self.folder, name, out, self._keys, progress)
            if _is_configuration(name):
                out.seek(0)
                content = out.read()
                compare_index(self.folder, name, content)
                out.seek(0)
                out.truncate()
                out.write(confine(content, self.folder.place(name)))
        # From now on no process changes it, not even this one.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        # A child process may open it by the path.
        self._place(name).symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")

    def _place(self, name: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def open(self, name: str, framework: str, device: object) -> safe_open | None:
        """Open a file of weights; return None for any other. Slices for torch open when they are moved, or used."""
        if not self._is_weights(name):
            return None
        kind, target = framework_of(framework), canonical(f"cuda:{device}" if isinstance(device, int) else device)
        with self.noted():
            file = self.folder.open(name)
        header = self.folder.header(name)  # of the plain file, to whose metadata 0.2 added a format
        metadata = file.metadata if header is None else parse_header(header, None, file.path)[0]
        tensors = own_tensors(self.folder, name, file)
        return read_source(Source(file, tensors, metadata, self.transfer, is_lazy=True), kind, target)

    def transfer(self, sealed: Any, device: object, **options: Any) -> Any:
        """Open sealed tensors, like `to_device` with the keys of this folder."""
        with self.noted():
            return open_once(sealed, device, keys=self._keys, **options)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Remember a failure, as libraries catch errors of weights and go on, or raise others."""
        try:
            yield
        except (FastrackError, OSError) as error:  # a missing file is a FastrackError here: the index lists it
            if self._is_reported and self._failure is None:
                report(str(error))
            self._failure = self._failure or error
            raise

    def keep_for(self, owner: object) -> None:
        """Keep the folder while `owner` lives, which may refer to it: a tokenizer to its vocabulary."""
        with contextlib.suppress(TypeError):  # tuples, say, cannot be referred to weakly
            weakref.finalize(owner, remove_own, self.path, os.getpid())
            weakref.finalize(owner, self._descriptors.pop_all().close)
            self._remove.detach()

    def _end(self) -> None:
        _mounts.pop(str(self.path), None)
        self._remove()
        self._descriptors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._end()
        if self._closed and isinstance(error, Exception) and error is not self._failure:
            names = ", ".join(map(repr, self._closed))
            error.add_note(f"{self.folder.path}: not opened unasked, as memfd= does: {names:.300}")
        if self._failure is not None and error is not self._failure and (error is None or isinstance(error, Exception)):
            raise self._failure from None


def open_mounted(filename: Any, framework: Any = "pt", device: Any = "cpu", **_: Any) -> Any:
    """Open a file of a mounted folder, and no other."""
    mount, found = _find_mount(filename)
    opened = None if mount is None else mount.open(found[len(f"{mount.path}/") :], framework, device)
    return NotImplemented if opened is None else opened


def refuse_mounted(_tensors: Any, filename: Any, *_: Any, **__: Any) -> Any:
    """Refuse to write a file into a mounted folder, and no other."""
    mount, found = _find_mount(filename)
    if mount is None:
        return NotImplemented
    advice = (
        "expected a folder to save to, got a sealed one that is mounted, and ends with its block. Save to the path "
        "of fastrack.write_folder"
    )
    with mount.noted():
        raise OSError(errno.EROFS, advice, found)


def is_mounted(path: str) -> bool:
    """Return whether a path is that of a mounted folder."""
    return path in _mounts


def _find_mount(path: Any) -> tuple[Mount | None, str]:
    """Return the mounted folder that a path leads into, and the path without links."""
    if not _mounts or not isinstance(path, (str, bytes, os.PathLike)):
        return None, ""
    found = os.path.realpath(os.fsdecode(path))
    return next((mount for root, mount in tuple(_mounts.items()) if found.startswith(f"{root}/")), None), found


def _make_read_only(folder: Path) -> None:
    """Take the rights to write from a folder, and from the folders in it. Root writes anyway."""
    for here, _, _ in os.walk(folder, topdown=False):
        Path(here).chmod(0o500)


def _is_code(name: str) -> bool:
    return name.lower().endswith(".py")


def _is_configuration(name: str) -> bool:
    return name.lower().endswith(".json")
