"""`ReloadableModule`: each generation of weights is a module of its own, and a call takes one of them."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from fastrack._keys.keyring import KeySource
from fastrack._sets.folder import SealedFolder
from fastrack._tensors.sharded import is_sharded
from fastrack._training.model import load_model
from fastrack._util.fork import register_fork_reset

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

_HOLDERS = (dict, list, tuple, set, frozenset, MethodType, partial, CellType)


class ReloadableModule(torch.nn.Module):
    """Module that calls its ``module``, and replaces it as a whole. `fastrack.reloadable` makes it."""

    module: torch.nn.Module

    def __init__(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected torch.nn.Module, got {type(module).__name__}. Call reloadable(module)")
        if any(map(is_sharded, _tensors(module))):
            raise TypeError(
                "module: expected tensors that are whole in this process, got DTensors. Processes do not reload at one "
                "moment; stop the calls, and fill the shards with load_model"
            )
        if any(part._compiled_call_impl for part in module.modules()):  # noqa: SLF001 - copies are not compiled
            raise TypeError("module: expected one before its compile(), got a compiled one. Compile the result instead")
        _copy(module, {id(tensor): tensor for tensor in _tensors(module)})  # refuses now what a reload would
        super().__init__()
        self.training = module.training  # for those who set a mode, and then again the one that was
        self.reset_after_fork()
        self.module = module
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Make a new lock."""
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReloadableModule, (self.module,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_modules", {}).get("module")
        if name == "module" or name in self.__dict__ or hasattr(type(self), name) or not hasattr(module, name):
            super().__setattr__(name, value)
            return
        with self._lock:  # after a reload that has begun, so that it is not lost
            setattr(self.module, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the newest module. It is read once, so that all weights of a call are of one generation."""
        module = self.module
        if torch.compiler.is_compiling():  # a graph would read it again for each weight
            torch._dynamo.graph_break()  # noqa: SLF001 - documented under this name
        return module(*args, **kwargs)

    def reload(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | SealedFolder,
        keys: KeySource | None = None,
        *,
        device: object = None,
        strict: bool = True,
        anchor: Anchor | str | os.PathLike[str] | None = None,
    ) -> Any:
        """Load sealed weights, like `load_model`, and use them in all calls from now on."""
        with self._lock:
            fresh = _copy(self.module, {})
            target = getattr(fresh, "_orig_mod", fresh)  # the module in a compiled one, whose names the file has
            outcome = load_model(target, path, keys, device=device, strict=strict, anchor=anchor)
            _synchronize(_devices(fresh))  # callers may use other streams
            old, self.module = self.module, fresh
            # Python drops a module as soon as its last call returns, when its kernels may not have run yet.
            weakref.finalize(old, _synchronize, _devices(old)).atexit = False
        return outcome

    def train(self, mode: bool = True) -> ReloadableModule:
        """Set the mode of the newest module, after a reload that has begun, so that it is not lost."""
        with self._lock:
            super().train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> ReloadableModule:
        with self._lock:  # of `to`, `cuda`, `half` and the like
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _devices(module: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in _tensors(module) if tensor.is_cuda}


def _synchronize(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _copy(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """Return a copy from which nothing of its origin can be reached, except for the values of `memo`."""
    own = {id(part) for part in (*module.modules(), *_tensors(module))} - memo.keys()
    try:
        for parameter in module.parameters():
            if id(parameter) not in memo and type(parameter) is torch.nn.Parameter:
                # As plain tensors, since copies of parameters do not share their memory as the parameters do.
                memo[id(parameter)] = torch.nn.Parameter(copy.deepcopy(parameter.data, memo), parameter.requires_grad)
        fresh = copy.deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"module: expected one that copy.deepcopy can copy, got {type(module).__name__}: {type(error).__name__}. "
            "Load a second module with load_model, and switch to it"
        ) from error
    for part in fresh.modules():
        for name, held in vars(part).items():
            if _reaches(held, own):
                raise TypeError(
                    f"module: expected one whose copies are apart from it, got {type(part).__name__}, in which "
                    f"{name!r:.80} refers to the origin, for example by the closure of a wrapped forward. Move it to a "
                    "method"
                )
    return fresh


def _reaches(start: object, targets: set[int]) -> bool:
    """Return whether an object refers to a target by containers, functions, methods and weak references."""
    pending, seen = [start], {}
    while pending:
        held: Any = pending.pop()
        if id(held) in targets:
            return True
        if id(held) in seen:
            continue
        seen[id(held)] = held  # kept alive, so that no other object gets its id
        if isinstance(held, FunctionType):  # whose referents include all globals of its module
            pending += [held.__closure__, held.__defaults__, held.__kwdefaults__, held.__dict__]
        elif isinstance(held, weakref.ref):
            pending.append(held())
        elif isinstance(held, _HOLDERS):
            pending += gc.get_referents(held)
    return False
