"""Torch's own files: `torch.save` and `torch.load`, pickles of tensors, and what else in torch writes storages.

Functions below `torch.save` are replaced, and not `torch.save` itself: callers that hold it by another name are sealed.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from fastrack._patches.attributes import replace, replace_everywhere
from fastrack._protect.archive import Archive
from fastrack._protect.refusals import refusal, refuse
from fastrack._protect.sealing import Protection, Sink, find_sealed, is_path, open_stream, seal_stream, stream_of
from fastrack._protect.tape import Tape
from fastrack._util.fork import per_process
from fastrack.errors import FormatError


@dataclass(frozen=True, slots=True)
class _Target:
    """Place for torch to write to, instead of the opened file. Only the functions below can write to it."""

    target: Any


def install(protection: Protection) -> None:
    """Replace the functions. `AttributeError` if this torch has other ones."""
    import torch

    files = torch.serialization
    opened = files._open_file_like

    def open_file_like(source: Any, mode: str) -> Any:
        if "w" in mode:
            return contextlib.nullcontext(_Target(source))
        sealed = find_sealed(source)
        return opened(source, mode) if sealed is None else open_stream(protection, sealed)

    saving = [name for name in dir(torch._C) if "save" in name.lower() and callable(getattr(torch._C, name))]
    replace_everywhere(
        (files._save, _sealing(protection, files, files._save, is_archive=True)),
        (files._legacy_save, _sealing(protection, files, files._legacy_save, is_archive=False)),
        (files._open_zipfile_writer, lambda target: contextlib.nullcontext(_Target(target))),
        (opened, open_file_like),
        (torch.from_file, _reading_only(torch.from_file)),
        # What opens an archive itself: torch.package, torch.export and what packs compiled models.
        (torch._C.PyTorchFileWriter, refuse("torch._C.PyTorchFileWriter")),
        *((getattr(torch._C, name), refuse(f"torch._C.{name}")) for name in saving),
    )
    for kind in (torch._C.ScriptModule, torch._C.ScriptFunction):
        for name in [name for name in dir(kind) if "save" in name]:
            replace(kind, name, refuse(f"TorchScript's {name}"))
    _replace_maps(protection, torch)
    _replace_reader(protection, torch)


def _sealing(protection: Protection, files: Any, write: Any, *, is_archive: bool) -> Callable[..., None]:
    """Return what seals in the place of a function that writes an object into an open file, or into an archive."""

    @functools.wraps(write)
    def save(obj: Any, target: Any = None, pickle_module: Any = pickle, *args: Any, **options: Any) -> None:
        if target is None:
            target = options.pop("zip_file", None)
        if not isinstance(target, _Target):  # opened by others, such as sockets and files of experiments of torch
            raise refusal(f"torch.serialization.{write.__name__}")
        if files._serialization_tls.skip_data:
            raise refusal("torch.serialization.skip_data", "It leaves room for values to be written later. Omit it")
        tape = Tape(pickle_module)

        def run(sink: Sink, checked: bool) -> None:
            if not is_archive:
                write(obj, sink, tape, *args, **options)
                return
            archive = Archive(sink.write, checked and files.get_crc32_options(), files._get_storage_alignment())
            write(obj, archive, tape, *args, **options)
            archive.write_end_of_file()

        seal_stream(protection, run, target.target)
        flush = None if is_path(target.target) else getattr(target.target, "flush", None)
        if flush is not None:
            flush()

    return save


def _reading_only(from_file: Any) -> Callable[..., Any]:
    def tensor_from_file(filename: Any, shared: bool | None = None, *args: Any, **options: Any) -> Any:
        if shared:
            raise refusal("torch.from_file(shared=True)", "Map it with shared=False")
        if find_sealed(filename) is not None:
            raise FormatError(f"{filename}: expected values for torch.from_file, got a sealed file. Use torch.load")
        return from_file(filename, shared, *args, **options)

    return tensor_from_file


def _replace_maps(protection: Protection, torch: Any) -> None:
    """Open sealed files where torch maps a file, and refuse maps that are written to."""
    mapped, write_file = torch.UntypedStorage.from_file, torch.UntypedStorage._write_file

    def storage_from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> Any:
        if shared:  # also of a sealed file: what is written to the tensor would be lost
            raise refusal("torch.UntypedStorage.from_file(shared=True)", "Map it with shared=False, or MAP_PRIVATE")
        sealed = find_sealed(filename)
        if sealed is not None:  # read whole in the place of the map: the file has no plaintext that could be mapped
            with open_stream(protection, sealed) as stream:
                whole = torch.empty(stream.seek(0, 2), dtype=torch.uint8)
                stream.seek(0)
                stream.readinto(whole.numpy())
                return whole.untyped_storage()
        return mapped(filename, shared, nbytes)

    def write_storage(storage: Any, file: Any, is_real_file: bool, *args: Any) -> Any:
        if is_real_file or not isinstance(file, Sink):
            raise refusal("torch.UntypedStorage._write_file")
        return write_file(storage, file, is_real_file, *args)

    replace(torch.UntypedStorage, "from_file", staticmethod(storage_from_file))
    replace(torch.UntypedStorage, "_write_file", write_storage)


def _replace_reader(protection: Protection, torch: Any) -> None:
    """Open sealed files where a program opens an archive itself, such as loaders that read a tensor when it is used."""
    kind = torch._C.PyTorchFileReader
    construct = kind.__init__  # and not the class, whose instances C++ tells by their type
    streams: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def open_archive(reader: Any, source: Any) -> None:
        sealed = find_sealed(source)
        stream = None if sealed is None else stream_of(protection, sealed)  # the reader holds it, and nothing else
        try:
            construct(reader, source if stream is None else stream)
        except RuntimeError as error:
            raise getattr(stream, "error", None) or error from None
        if stream is not None:
            stream.turn = per_process(stream, "turn", threading.Lock)
            streams[reader] = stream

    def in_turn(method: Any) -> Callable[..., Any]:
        @functools.wraps(method)
        def called(reader: Any, *args: Any) -> Any:  # or C++ waits for its lock with Python's, for which a read waits
            with getattr(streams.get(reader), "turn", contextlib.nullcontext()):
                return method(reader, *args)

        return called

    replace(kind, "__init__", open_archive)
    for name in [name for name in vars(kind) if not name.startswith("_")]:
        replace(kind, name, in_turn(vars(kind)[name]))
