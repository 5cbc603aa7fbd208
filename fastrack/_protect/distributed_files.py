"""Checkpoints of `torch.distributed.checkpoint`: its writer and reader of folders become those of fastrack.

Methods of the classes are replaced, and not the classes: instances and subclasses that exist already are sealed too.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

from fastrack._patches.attributes import replace, replace_everywhere
from fastrack._protect.refusals import refusal
from fastrack._protect.sealing import Protection
from fastrack._util.locations import Url, locate_target
from fastrack._util.trial import current
from fastrack.errors import FastrackError

_WRITING = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
_READING = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
_UNRANKED = {"read_metadata", "set_up_storage_reader"}  # torch's own take a rank, and may read only its part
_PLAIN = ".metadata"  # torch's description of a plain checkpoint
_PLAIN_SHARD = re.compile(r"__\d+_\d+\.distcp")
_SEALED = "_fastrack_sealed"  # the attribute of a writer or reader of torch that holds the one of fastrack


def install(protection: Protection) -> None:
    """Replace the methods, and refuse other writers. `AttributeError` if this torch has other ones."""
    from torch.distributed.checkpoint import filesystem, state_dict_saver

    from fastrack.distributed import CheckpointReader, CheckpointWriter
    from fastrack.distributed._description import NAME

    writer, reader = filesystem._FileSystemWriter, filesystem.FileSystemReader

    def sealed_writer(plain: Any) -> Any:
        _require_no_options(plain)
        if not plain.overwrite and _has(plain, NAME):
            raise FastrackError(f"{plain.path}: expected no checkpoint with overwrite=False, got one. Name another")
        sealed = CheckpointWriter(plain.path, key=protection.owner)
        plain.save_id = sealed.storage_meta().save_id
        return sealed

    def sealed_reader(plain: Any) -> Any:
        if not _has(plain, NAME):
            return None
        if _has(plain, _PLAIN):  # torch has saved here without protection, before or afterwards
            raise FastrackError(
                f"{plain.path}: expected one checkpoint, got a sealed and a plain one. Remove {NAME} or {_PLAIN}"
            )
        _require_no_options(plain)
        sealed = CheckpointReader(plain.path, keys=protection.ring)
        sealed.load_id = plain.load_id
        return sealed

    for kind, names, make in ((writer, (*_WRITING, "storage_meta"), sealed_writer), (reader, _READING, sealed_reader)):
        for name in names:
            _delegate(kind, name, make)
        _renew(kind)
    _refuse_other_writers(writer, CheckpointWriter, state_dict_saver)
    _refuse_streams(filesystem.FileSystem)


def _has(plain: Any, name: str) -> bool:
    return bool(plain.fs.exists(plain.fs.concat_path(plain.path, name)))


def _remove_plain(plain: Any) -> None:
    """Remove a plain checkpoint that a sealed one has replaced, the description first, as torch would have done."""
    if _has(plain, _PLAIN) and current() is None:
        for name in sorted(Path(str(path)).name for path in plain.fs.ls(str(plain.path))):
            if name == _PLAIN or _PLAIN_SHARD.fullmatch(name):
                plain.fs.rm_file(plain.fs.concat_path(plain.path, name))


def _require_no_options(plain: Any) -> None:
    """Refuse options of fsspec that torch was given, as fastrack opens the store by its URL, and would not have them.

    They are named without their values, which may be secrets.
    """
    options = getattr(getattr(plain.fs, "fs", None), "storage_options", None)  # of torch's FsspecWriter and reader
    location = locate_target(plain.path)
    if options and isinstance(location, Url):
        from fastrack._remote.filesystem import find_store

        own = find_store(location)[0].storage_options
        names = ", ".join(sorted(name for name in options if options[name] != own.get(name)))
        if names:
            raise FastrackError(
                f"{location}: expected the options of its store in the configuration of fsspec or in the environment, "
                f"got {names:.200} as arguments. Set them there: see the page Files on servers"
            )


def _delegate(kind: Any, name: str, make: Any) -> None:
    """Have a method call that of the sealed writer or reader, if there is one."""
    method = vars(kind).get(name)
    if method is None:  # inherited: torch has moved its own
        raise AttributeError(name=name)

    @functools.wraps(method)
    def delegated(self: Any, *args: Any, **options: Any) -> Any:
        held = vars(self)
        if _SEALED not in held:
            held[_SEALED] = make(self)
        if held[_SEALED] is None:
            return method(self, *args, **options)
        if name in _UNRANKED:
            options.clear()
        result = getattr(held[_SEALED], name)(*args, **options)
        if name == "finish":
            _remove_plain(self)
        return result

    replace(kind, name, delegated)


def _renew(kind: Any) -> None:
    """Have `reset`, with which each save and load begins, make a new sealed writer or reader."""
    reset = kind.reset

    @functools.wraps(reset)
    def renewed(self: Any, *args: Any, **options: Any) -> None:
        vars(self).pop(_SEALED, None)
        reset(self, *args, **options)

    replace(kind, "reset", renewed)


def _refuse_other_writers(kind: Any, own: type, saver: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    save = saver._save_state_dict
    signature = inspect.signature(save)
    if "storage_writer" not in signature.parameters:
        raise AttributeError("storage_writer")
    methods = {name: vars(kind)[name] for name in _WRITING}

    @functools.wraps(save)
    def checked(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        writer = given["storage_writer"]
        is_replaced = all(getattr(type(writer), name, None) is method for name, method in methods.items())
        if not isinstance(writer, own) and not is_replaced:
            raise refusal(
                f"torch.distributed.checkpoint with a {type(writer).__name__}",
                "Give it a FileSystemWriter, or a fastrack.distributed.CheckpointWriter",
            )
        try:
            return save(*args, **options)
        except CheckpointException as error:
            # Torch wraps Ctrl-C, and the SystemExit of a signal's handler, too, which programs would not see as such.
            is_alone = given.get("no_dist", False) or not dist.is_initialized()
            ended, _ = error.failures.get(0 if is_alone else dist.get_rank(given.get("process_group")), (error, None))
            if isinstance(ended, Exception):
                raise
            raise ended from None

    replace_everywhere((save, checked))


def _refuse_streams(kind: Any) -> None:
    """Refuse what a subclass of torch's writer would write itself."""
    create = kind.create_stream

    @functools.wraps(create)
    def create_stream(self: Any, path: Any, mode: str) -> Any:
        if set(mode) & set("wax+"):
            raise refusal("torch.distributed.checkpoint's FileSystem.create_stream")
        return create(self, path, mode)

    replace(kind, "create_stream", create_stream)
