"""`protect_checkpoints`: what this process writes of tensors is sealed, or refused, from the call on."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from types import NoneType
from typing import Any

from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._patches import attributes
from fastrack._protect import canary, distributed_files, refusals, safetensors_files, torch_files, trainers, versions
from fastrack._protect.sealing import Protection
from fastrack._util.extras import require
from fastrack._util.fork import per_process
from fastrack._util.public import public
from fastrack.errors import FastrackError

_active: Protection | None = None
_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)


@public
def protect_checkpoints(key: KeyLike | None = None, *, keys: KeySource | None = None) -> None:
    """Seal the checkpoints of this process, whatever writes them, and refuse what cannot be sealed.

    From the call to the end of the process, in every thread, tensors are sealed that go through ``torch.save``,
    pickles of tensors, ``safetensors`` and ``torch.distributed.checkpoint``, and so through trainers and libraries that
    save with them. The same functions open sealed files again, and plain ones as before. What writes tensors in another
    way is refused where it can be seen: :doc:`/protect` lists both.

    Parameters
    ----------
    key : KeyLike, optional
        The owner's key, as for `seal`.
    keys : KeySource, optional
        Further keys that open checkpoints, such as those of an earlier run.

    Raises
    ------
    FastrackError
        If a version of torch, safetensors, transformers, lightning or accelerate is installed that is not covered, and
        does not write with the functions of one that is, or if a file that was written as a trial, of random numbers,
        was not sealed. Nothing is changed then. Also if the process is protected by another key already.
    ImportError
        If torch is not installed.
    TypeError, UnknownKeyError, FormatError, KeyPermissionError, OSError
        As for `seal` and `KeyRing`.

    Notes
    -----
    There is no way back. A second call with the same key does nothing. Forked processes inherit the protection, and
    those of ``torch.multiprocessing.spawn`` protect themselves if the keys are paths. Other spawned processes have to
    call this function, as each process of ``torchrun`` does.

    Examples
    --------
    >>> import torch
    >>> import fastrack
    >>> fastrack.protect_checkpoints(fastrack.Key.generate())  # doctest: +SKIP
    >>> torch.save({"weights": torch.ones(3)}, "checkpoint.pt")  # doctest: +SKIP
    >>> torch.load("checkpoint.pt")  # doctest: +SKIP
    {'weights': tensor([1., 1., 1.])}
    """
    require("torch", "protect_checkpoints", "protect")
    owner = sealing_key(key)
    with _lock:
        if _active is not None:
            if _active.owner.id != owner.id or keys is not None:
                raise FastrackError(
                    f"protect_checkpoints: expected no second call, or one with only key {_active.owner.id}, got key "
                    f"{owner.id}{'' if keys is None else ' and keys='}. Name all keys in the first call"
                )
            return
        protection = Protection(owner, KeyRing(owner if keys is None else [owner, keys]))
        versions.require_covered()
        canary.import_all()
        with attributes.all_or_nothing():
            with canary.naming_what_is_missing():
                torch_files.install(protection)
                safetensors_files.install(protection)
                distributed_files.install(protection)
                refusals.install()
                trainers.install()
                _protect_spawned(key, keys)
            canary.sing()
        attributes.replace(sys.modules[__name__], "_active", protection)


def _protect_spawned(key: KeyLike | None, keys: KeySource | None) -> None:
    """Have processes that torch spawns protect themselves first."""
    import torch.multiprocessing

    processes: Any = torch.multiprocessing
    start = processes.start_processes

    @functools.wraps(start)
    def start_processes(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        method = inspect.signature(start).bind(fn, *args, **options).arguments.get("start_method", "spawn")
        if method != "fork":
            if not isinstance(key, (str, os.PathLike, NoneType)) or not isinstance(keys, (str, os.PathLike, NoneType)):
                raise FastrackError(
                    "torch.multiprocessing.spawn: expected protect_checkpoints to have been given paths, from which "
                    "spawned processes get their keys, got other sources. Name key files there, or use torchrun"
                )
            fn = functools.partial(_run_protected, fn, key, keys)
        return start(fn, *args, **options)

    attributes.replace_everywhere((start, start_processes))


def _run_protected(function: Callable[..., Any], key: KeyLike | None, keys: KeySource | None, *args: Any) -> Any:
    """Call the function of a spawned process, which is protected first."""
    protect_checkpoints(key, keys=keys)
    return function(*args)


def active() -> Protection | None:
    """Return the keys of this process if it is protected."""
    return _active
