"""Write sealed folders, and plain ones again: `seal_folder` and `unseal_folder`."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from fastrack._documents.canonical import encode
from fastrack._files.importers import open_plain, whole_file
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile
from fastrack._files.unseal_file import write_plaintext
from fastrack._files.writer import Progress, by_alignment, describe_scales, open_target, plain_names, write_sealed
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import new_file_id
from fastrack._sealed.file_header import encode_header
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sealed.scales import WIDENED, Scale
from fastrack._sealed.storage import HEADER_LIMIT, HEADER_PREFIX
from fastrack._sets.anchor import Anchor
from fastrack._sets.entries import Entry, PlainEntry, SealedEntry, walk
from fastrack._sets.folder import (
    FILES,
    FORMAT,
    HEADER,
    INDEX,
    OTHER_WEIGHTS,
    SAFETENSORS,
    SealedFolder,
    is_widened,
    names_before,
    open_folder,
)
from fastrack._sets.manifest import is_name
from fastrack._sets.quantize import Quantizer
from fastrack._sets.weight_maps import compare_shards, is_weight_map
from fastrack._util.atomic import new_file
from fastrack._util.locations import Location, Url, join, locate_local, locate_target
from fastrack._util.new_folder import made_parents, new_folder
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import AuthenticationError, FormatError

_BLOCK = 1 << 20
_PRIVATE = 0o700  # the mode of a folder of plaintext
# The folder of a model has a configuration and weights under the names that libraries give them. The folder of a
# pipeline has an index, and weights in the folders below it.
_CONFIGURATIONS = ("config.json", "adapter_config.json")
_PIPELINE = "model_index.json"
_ADAPTER = "adapter_"
_STEMS = r"(model|adapter_model|diffusion_pytorch_model|pytorch_model|open_clip_model)"
_WEIGHTS = re.compile(rf"{_STEMS}([.-].*)?\.(safetensors|bin)", re.DOTALL)
# The index of shards reveals no more than their headers, and stays plain in any folder.
_SHARDS = re.compile(rf"{_STEMS}\.(safetensors|bin)\.index(\.[^.]+)?\.json")
# Names of configuration, code, documentation and tokenizers, which stay plain only in the folder of a model.
_PLAIN = re.compile(
    r".*\.(json|txt|md|py|jinja|ya?ml|tiktoken|spm|bpe)|(.*tokenizer.*|spiece|sentencepiece.*)\.model|"
    r"licen[cs]e|notice|readme",
    re.IGNORECASE | re.DOTALL,
)


@public
def seal_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    plain: Iterable[str] = (),
    quantize: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> None:
    """Seal a folder, such as a model, into a new folder with files of the same names.

    Files of tensors (``.safetensors``) are sealed tensor by tensor, and all others whole, whatever their suffix. Two
    kinds stay plain, for anyone to read: files in `plain`; and configuration, code, documentation and tokenizers of a
    model (``.json``, ``.txt``, ``.md``, ``.py``, ``.jinja``, ``.yaml``, and names of tokenizers). These are in or below
    a folder that has a ``config.json`` or ``adapter_config.json`` and weights, such as ``model.safetensors`` or
    ``pytorch_model.bin``, or a ``model_index.json`` above them. The index of shards stays plain in any folder.

    The weights of a model with a ``quantization_config`` are bound to their scales (``weight_scale``,
    ``weight_scale_inv``), as by `seal`. They open as they are, and with ``dtype="bfloat16"`` widened.

    An index, ``fastrack.folder``, lists all files and is sealed under the same key. A file from another seal
    in place of a listed one is refused, and so is an altered plain file.

    With `quantize`, the weights of linear layers become values of 8 bits and a float32 scale for each row: half the
    bytes of bfloat16 to store and to decrypt. Readers of the folder see these weights as bfloat16, multiplied by their
    scales. So does `unseal_folder`, which does not restore what was rounded.

    Parameters
    ----------
    source : path
        The folder. Files and folders in it whose names begin with a dot are left out, as are manifests, proofs and
        grants. A link that leads outside the folder is refused.
    target : path or URL
        The folder to make. It has that name when it is complete and on disk, and replaces nothing. In a store it is
        there when its index is, which is written last.
    key : KeyLike, optional
        The owner's key, as for `seal`.
    plain : iterable of str
        Files to copy unchanged: their paths in the folder, or globs of them, whose ``*`` stands for slashes too. A
        glob takes a link in only if it takes in the file that this leads to.
    quantize : {"fp8", "int8"}, optional
        Quantise to float8_e4m3fn or int8, with compressed-tensors (extra ``quantize``): floating-point tensors of two
        dimensions, of 128 rows and columns or more, whose names end in ``.weight``, in the ``.safetensors`` files
        beside a ``config.json``. Names of embeddings, norms, heads, routers and adapters are left out.
    resume : bool
        Go on with a folder in a store whose sealing was interrupted. What is there is downloaded, authenticated and
        compared with its source, not sealed again.
    progress : callable, optional
        Called with the number of bytes done since the previous call.

    Warns
    -----
    UserWarning
        If a model has files that are neither weights nor stay plain: libraries find these only by `mount_folder`.

    Raises
    ------
    FormatError
        If the folder holds nothing that would be sealed, or a link that leads outside, or is sealed already; or an
        index of shards names tensors or files that are not there, or leaves some out; or a file cannot be sealed, or
        has a name with ``?``, ``#`` or ``::`` where `target` is in a store; or `quantize` is given for a model that is
        quantised, has no such weights, or infinite ones; or the store has other files than those of `source`, or other
        content in them, and `resume` is given.
    ModuleNotFoundError
        If `quantize` is given, and compressed-tensors is not installed.
    OSError
        If a file cannot be read or written, or `target` exists. On this machine no part of `target` is left behind
        then. In a store what was sealed is left, which opens as no folder, and `resume` goes on with it.
    ValueError
        If `source` is a URL, `target` one with a query, `plain` names no file of the folder, or `quantize` is unknown;
        or `resume` is given for a folder on this machine, or beside `quantize`.

    Examples
    --------
    >>> import json, os
    >>> import numpy as np
    >>> import fastrack
    >>> from safetensors.numpy import save_file
    >>> os.mkdir("model")
    >>> save_file({"weight": np.ones((2, 3))}, "model/model.safetensors")
    >>> with open("model/config.json", "w") as file:
    ...     json.dump({"layers": 1}, file)
    >>> key = fastrack.Key.generate()
    >>> fastrack.seal_folder("model", "sealed", key)
    >>> sorted(os.listdir("sealed"))
    ['config.json', 'fastrack.folder', 'model.safetensors']
    >>> fastrack.unseal_folder("sealed", "back", key)
    >>> sorted(os.listdir("back"))
    ['config.json', 'model.safetensors']
    """
    source, target, owner = locate_local(source), locate_target(target), sealing_key(key)
    if resume and (isinstance(target, Path) or quantize is not None):
        got = "beside quantize=, which rounds" if quantize is not None else "with a path"
        raise ValueError(f"resume=: expected it with the URL of a store as target, got it {got}. Leave it out")
    files = files_to_seal(source)
    for name in files:
        join(target, name)  # before anything is stored, as a store may have no such name
    kept = plain_files(files, source, plain_names(plain))
    if kept == files.keys():
        names = f"{', '.join(map(repr, files)):.300}, which stay plain" if files else "none"
        raise FormatError(f"{source}: expected a file to seal, got {names}. Name another folder")
    if unread := unread_files(files, kept):
        warnings.warn(
            f"seal_folder: {source}: libraries find {', '.join(map(repr, unread)):.300} only by mount_folder, in host "
            "memory. plain= leaves a file as it is, which anyone can read then",
            stacklevel=3,  # above what explains arguments
        )
    compare_indexes(source, files, lambda shard: names_before(_header_of(files[shard]), files[shard]))
    quantizer = None if quantize is None else Quantizer(quantize)
    there = _find_begun(target, files, resume=resume) if isinstance(target, Url) else set()
    with new_folder(target) if isinstance(target, Path) else _kept_after_errors(target) as folder:
        index = FolderIndex(folder)
        for name, path in files.items():
            if name in kept:
                index.copy(name, path, progress, is_there=name in there)
                continue
            config = files.get(str(PurePosixPath(name).with_name("config.json")))
            quantization = _quantization(config)
            target_file = _Target(index.place(name), owner, progress, name in there)
            entry, header = _seal(path, target_file, quantization, None if config is None else quantizer)
            index.add(name, entry, header)
        if quantizer is not None and not quantizer.count:
            raise FormatError(
                f"{source}: quantize=: expected weights of linear layers in .safetensors files beside a config.json, "
                "got none. Seal the folder without it"
            )
        index.write(owner)


class FolderIndex:
    """The index of a new sealed folder, on this machine or in a store."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder
        self._entries: dict[str, Entry] = {}
        self._headers: dict[str, PlainTensor] = {}

    def place(self, name: str) -> Location:
        """Return the location of a file, in a folder that is there."""
        place = join(self._folder, name)
        if isinstance(place, Path):
            place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def copy(self, name: str, path: Path, progress: Progress | None = None, *, is_there: bool = False) -> None:
        """Copy a file that stays plain, unless it is there, and list it."""
        place = self.place(name)
        report = progress or (lambda _: None)
        if is_there:
            entry = PlainEntry.of(path)
            try:
                report(len(entry.read(place)))
            except AuthenticationError:
                raise _is_other(place, path) from None
        else:
            digest, size, replaces = hashlib.sha256(), 0, isinstance(place, Path)
            with open_regular(path) as file, open_target(place, path.stat().st_size, overwrite=replaces) as out:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    size += len(block)
                    out.write(block)
                    report(len(block))
            entry = PlainEntry(size, digest.hexdigest())
        self._entries[name] = entry

    def place_sealed(self, name: str, sealed: Path, header: bytes, path: Path, *, is_last: bool) -> None:
        """Give a sealed file of this machine its name, or its copy unless it `is_last`, and list it. It was `path`."""
        if is_last:
            os.replace(sealed, self.place(name))  # noqa: PTH105 - the folder may be an open descriptor
        else:
            self.copy(name, sealed)
        with SealedFile(join(self._folder, name)) as file:
            entry = SealedEntry.of(file)
            _require_layout(header, entry, file, path)
        self.add(name, entry, header)

    def add(self, name: str, entry: SealedEntry, header: bytes | None) -> None:
        """List a sealed file by its entry."""
        self._entries[name] = entry
        if header is not None:
            self._headers[HEADER + name] = _bytes(header)

    def write(self, owner: Key) -> None:
        """Seal the index into the folder."""
        document = {"files": {name: entry.members() for name, entry in self._entries.items()}, "format": FORMAT}
        tensors = {**self._headers, FILES: _bytes(encode(document))}
        place = join(self._folder, INDEX)
        replaces = isinstance(place, Path)
        write_sealed(tensors, place, owner, frozenset(), {}, None, kind="folder", overwrite=replaces)


def _find_begun(target: Url, files: Mapping[str, Path], *, resume: bool) -> set[str]:
    """Return the names of the files that an interrupted run has stored, or refuse a folder of a store."""
    from fastrack._remote.upload import list_names

    there = set(list_names(target))
    if INDEX in there:
        message = "exists, and no folder is replaced. Name one that does not exist"
        raise FileExistsError(errno.EEXIST, message, str(target))
    if there and not resume:
        message = f"has {len(there)} objects. Resume the run that left them (resume=, --skip-existing), or name another"
        raise FileExistsError(errno.EEXIST, message, str(target))
    if others := there - files.keys():
        raise FormatError(
            f"{target}: resume=: expected only files of the source, got {min(others)!r:.200}. Give the source as it "
            "was, or name another target"
        )
    return there


@contextmanager
def _kept_after_errors(target: Url) -> Iterator[Url]:
    """Add to an error that files of the folder stay. All are sealed, except what stays plain by its name."""
    try:
        yield target
    except BaseException as error:
        error.add_note(f"{target}: what was stored stays, and opens as no folder; resume it (resume=, --skip-existing)")
        raise


def files_to_seal(source: Path) -> dict[str, Path]:
    """Return the files of a folder by their names, in order. Refuse those that a sealed folder cannot have."""
    files = dict(sorted(walk(source).items()))
    for name, path in files.items():
        if not is_name(name):
            raise FormatError(
                f"{str(path)!r:.300}: expected a name of Unicode text without control characters and backslashes. "
                "Rename it"
            )
    if INDEX in files:
        raise FormatError(f"{source} is sealed already, as it has a {INDEX}; `fastrack unseal` opens it")
    for path in files.values():
        require_inside(path, source)
    return files


def compare_indexes(source: Path, files: Mapping[str, Path], names_in: Callable[[str], Iterable[str] | None]) -> None:
    """Refuse indexes of shards that do not fit these, before a model is sealed that loads as another one."""
    for name in filter(is_weight_map, files):
        advice = "save the model again, whole, or remove what is left of another save"
        compare_shards(source, name, files[name].read_bytes(), files, names_in, advice)


def require_inside(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of a folder: its target was not meant to be sealed with the folder."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder.resolve()):
        raise FormatError(
            f"{str(path)!r:.300}: expected a file of the folder, got a link that leads outside. Put a copy in its "
            "place, as `cp -rL` does with all links of a folder"
        )


def plain_files(found: Mapping[str, Path], source: Path, patterns: Iterable[str]) -> set[str]:
    """Return the names of the files to copy unchanged."""
    root = source.resolve()
    # A link also counts by the name of its target: a plain link would reveal a target that is sealed.
    names = {name: {name, Path(os.path.realpath(path)).relative_to(root).as_posix()} for name, path in found.items()}
    kept: set[str] = set()
    for pattern in sorted(patterns):
        globbed = {name for name, both in names.items() if len(fnmatch.filter(both, pattern)) == len(both)}
        matches = {pattern} & found.keys() or globbed
        if not matches:
            raise ValueError(f"plain=: expected a file of {source} or a glob of some, got {pattern!r:.200}. Correct it")
        kept |= matches
    weights, models = _models_in(found)
    return kept | {name for name, both in names.items() if all(_is_plain(alias, weights, models) for alias in both)}


def unread_files(found: Collection[str], kept: Collection[str]) -> list[str]:
    """Return the files of a model that are neither weights nor plain, and that libraries may look for beside these."""
    names = [name for name in found if name not in kept and not name.lower().endswith(SAFETENSORS)]
    models = _models_in(found)[1]
    return [name for name in names if not OTHER_WEIGHTS.fullmatch(name) and _is_below(name, models)]


def _is_plain(name: str, weights: set[str], models: set[str]) -> bool:
    folder, _, last = name.rpartition("/")
    if _SHARDS.fullmatch(last) and folder in weights:
        return True
    return _PLAIN.fullmatch(last) is not None and _is_below(name, models)


def _models_in(names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the folders with weights, and the folders of models."""
    split = [name.rpartition("/") for name in names]
    weights = {folder for folder, _, last in split if _WEIGHTS.fullmatch(last)}
    models = weights & {folder for folder, _, last in split if last in _CONFIGURATIONS}
    pipelines = {folder for folder, _, last in split if last == _PIPELINE}
    pipelines = {folder for folder in pipelines if any(_is_below(f"{inner}/", {folder}) for inner in weights)}
    return weights, models | pipelines


def _is_below(name: str, folders: Iterable[str]) -> bool:
    """Return True if a file is in one of these folders or below it; the outermost one has no name."""
    return any(not folder or name.startswith(f"{folder}/") for folder in folders)


def _quantization(config: Path | None) -> Mapping[str, Any] | None:
    """Return how a model was quantised, by its configuration, or None if it was not."""
    try:
        found = None if config is None else json.loads(config.read_bytes())["quantization_config"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _pairs(tensors: Mapping[str, PlainTensor], quantization: Mapping[str, Any]) -> dict[str, Scale]:
    """Return the scales of the weights that are a product of values and scales, and of nothing else."""
    block = quantization.get("weight_block_size")
    pairs: dict[str, Scale] = {}
    for name in tensors:
        if f"{name}_zero_point" in tensors or f"{name}_g_idx" in tensors:
            continue
        for scale in {f"{name}_scale", f"{name}_scale_inv"} & tensors.keys():
            with suppress(ValueError, TypeError):  # another geometry: they open as they are
                pairs |= describe_scales(tensors, {name: scale}, None if block is None else tuple(block))
    return pairs


@dataclass(frozen=True, slots=True)
class _Target:
    """A file of the new folder. `is_there` is True if an interrupted run has stored it."""

    place: Location
    key: Key
    progress: Progress | None
    is_there: bool

    def seal(
        self,
        path: Path,
        tensors: Mapping[str, PlainTensor],
        metadata: Mapping[str, str],
        header: bytes | None,
        scales: Mapping[str, Scale],
    ) -> SealedEntry:
        """Seal the tensors of a source, unless they are there; return what is there now."""
        file_id, replaces = None, isinstance(self.place, Path)
        if not self.is_there:
            file_id, places = new_file_id(), (self.place, self.key, frozenset[str]())
            write_sealed(tensors, *places, metadata, self.progress, file_id=file_id, scales=scales, overwrite=replaces)
        with SealedFile(self.place, file_id) as file:
            entry = SealedEntry.of(file)
            if entry.plain:  # the index would list what nothing has authenticated, and no source has had
                raise _is_other(self.place, path)
            if isinstance(self.place, Url):
                # A store may answer with another file of the key. Of this id, which is new, one can only have the
                # messages that were sealed above.
                authenticate_headers(list(file.values()), KeyRing(self.key))
                found = {name: tensor.context.scale for name, tensor in file.items()}
                if found != {name: scales.get(name) for name in tensors} or file.metadata != metadata:
                    raise _is_other(self.place, path)
            names = list(file) if header is None else _require_layout(header, entry, file, path)
            if self.is_there:
                self._compare(path, file, header, names)
        return entry

    def _compare(self, path: Path, file: SealedFile, header: bytes | None, names: list[str]) -> None:
        """Authenticate a file that is there, and refuse one whose content is not that of the source."""
        with open_regular(path) as source:
            out: Any = _Comparison(source)
            out.write(header or b"")
            for name in names:
                write_plaintext(file[name], KeyRing(self.key), out, self.progress)
            if not out.is_same or source.read(1):
                raise _is_other(self.place, path)


def _is_other(place: Location, path: Path) -> FormatError:
    return FormatError(
        f"{place}: expected what was sealed from {path}, got another file. Give the source as it was, or name another "
        "target"
    )


class _Comparison:
    """A file to write to that compares what is written with what another file holds."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.is_same = True

    def write(self, data: Any) -> int:
        self.is_same = self.is_same and self._file.read(len(data)) == bytes(data)
        return len(data)


def _seal(
    path: Path, target: _Target, quantization: Mapping[str, Any] | None, quantizer: Quantizer | None
) -> tuple[SealedEntry, bytes | None]:
    """Seal one file; return its entry, and the header of a safetensors file, which restores its layout."""
    if path.suffix.lower() != SAFETENSORS:
        return target.seal(path, {path.name: whole_file(path)}, {}, None, {}), None
    header = _header_of(path)
    with open_plain(path) as (found, stored):
        tensors, pairs = found, {} if quantization is None else _pairs(found, quantization)
        if quantizer is not None and not path.name.startswith(_ADAPTER):
            if quantization is not None:
                raise FormatError(
                    f"{path}: quantize=: expected a model without quantization_config, got one that is quantised "
                    "already. Seal it as it is"
                )
            tensors, pairs = quantizer.split(found, target.progress)
            if pairs:
                before = {name: (WIDENED if name in pairs else each.dtype, each.shape) for name, each in found.items()}
                header = encode_header(by_alignment(before), stored)
        return target.seal(path, tensors, stored, header, pairs), header


def _header_of(path: Path) -> bytes:
    """Return the header of a safetensors file, which is not checked."""
    with open_regular(path) as file:
        prefix = file.read(HEADER_PREFIX)
        size = int.from_bytes(prefix, "little")
        return prefix + file.read(size) if size <= HEADER_LIMIT else prefix


def _bytes(content: bytes) -> PlainTensor:
    return PlainTensor.of(np.frombuffer(content, np.uint8))


def _require_layout(header: bytes, entry: SealedEntry, file: SealedFile, path: Location) -> list[str]:
    """Return the names in a safetensors header, in the order of the bytes, if it describes the tensors of the file.

    It may list quantised values as BF16: as what they are with their scales, which it leaves out then.
    """
    try:
        tensors = {name: [each.dtype, list(each.shape)] for name, each in names_before(header, path).items()}
    except FormatError:
        tensors = {}
    found = {name: tensor[:2] for name, tensor in entry.sealed.items()}
    for name, tensor in file.items():
        if tensor.scale is not None and tensor.scale.name not in tensors:
            found[name] = [WIDENED, list(tensor.shape)]
            found.pop(tensor.scale.name, None)
    if entry.plain or tensors != found:
        raise FormatError(f"{path} changed while it was read, or its header does not fit it. Seal it again")
    return list(tensors)


@public
def unseal_folder(
    source: SealedFolder | str | os.PathLike[str],
    target: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Decrypt a sealed folder into a new folder, with byte for byte the original files.

    Parameters
    ----------
    source : path, URL or SealedFolder
        The sealed folder, by its path, its URL, or opened by `load_folder`.
    target : path
        The folder to make, which only you may open (mode 0700); those above it are made too. It has that name when it
        is complete and on disk, and replaces nothing. A killed process leaves its plaintext in
        ``.fastrack-….part``.
    keys : KeySource, optional
        As for `unseal`.
    anchor : Anchor or path, optional
        As for `load_folder`. Only for a folder given by its path or URL.
    progress : callable, optional
        Called with the number of bytes written since the previous call.

    Raises
    ------
    AuthenticationError
        If a file was altered. `RollbackError` if one is missing, or of another seal.
    UnknownKeyError, FormatError, SignatureError
        As from `load_folder`.
    OSError
        If a file cannot be read or written, or `target` exists. No part of `target` is left behind then.
    ValueError
        If `target` is a URL, or an anchor is given for a folder that is open.

    Examples
    --------
    >>> from pathlib import Path
    >>> import fastrack
    >>> Path("run").mkdir()
    >>> _ = Path("run/optimizer.bin").write_bytes(b"moments")
    >>> key = fastrack.Key.generate()
    >>> fastrack.seal_folder("run", "sealed", key)
    >>> fastrack.unseal_folder("sealed", "back", key)
    >>> Path("back/optimizer.bin").read_bytes()
    b'moments'
    """
    ring, out_folder = KeyRing.resolve(keys), locate_local(target)
    opened = open_folder(source, ring, anchor)
    # The folders above may be missing, for example in a run that is resumed on another machine.
    with made_parents(out_folder), new_folder(out_folder, mode=_PRIVATE) as folder:
        for name, entry in opened.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(entry, PlainEntry):
                content = opened.read(name)
                with new_file(path) as out:
                    out.write(content)
                if progress is not None:
                    progress(len(content))
            else:
                with new_file(path, mode=_PRIVATE & 0o666) as out:
                    write_unsealed(opened, name, out, ring, progress)


def write_unsealed(
    folder: SealedFolder, name: str, out: IO[bytes], keys: KeyRing, progress: Progress | None = None
) -> None:
    """Decrypt a file of a sealed folder: the bytes that it had."""
    header, entry = folder.header(name), folder.files[name]
    assert isinstance(entry, SealedEntry)
    with folder.open(name) as file:
        if header is None:
            names = list(file)
            found = [(each, tensor.dtype, len(tensor.shape)) for each, tensor in file.items()]
            if entry.plain or file.kind != "tensor" or found != [(name.rpartition("/")[2], "U8", 1)]:
                raise FormatError(
                    f"{file.path}: expected one vector of bytes of the file's name by {INDEX}, got others. Get it again"
                )
        else:
            names = _require_layout(header, entry, file, file.path)
            out.write(header)
        before = {name: file[name] for name in names}
        for tensor_name in names:
            tensor = file[tensor_name]
            write_plaintext(tensor, keys, out, progress, widened=is_widened(tensor, before))
