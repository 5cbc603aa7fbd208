"""`ReloadableModule`: each generation of weights is a module of its own, and a call takes one of them."""

from __future__ import annotations

import copy
import dis
import functools
import gc
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fastrack._keys.keyring import KeySource
from fastrack._models.load import load_model, require_module
from fastrack._sets.folder import SealedFolder
from fastrack._tensors.sharded import is_sharded
from fastrack._util.fork import per_process

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

_CACHE = type(functools.cache(id))
_ENDS = (str, bytes, type, ModuleType, CodeType, FrameType, logging.Logger)
_MOST = 200_000  # objects that are looked at: a function's globals may lead to all of the process


class ReloadableModule(torch.nn.Module):
    """Module that calls its ``module``, and replaces it as a whole. `fastrack.reloadable` makes it."""

    module: torch.nn.Module

    def __init__(self, module: torch.nn.Module) -> None:
        require_module(module, "reloadable(module)")
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
        self._lock = per_process(self, "_lock", threading.Lock)  # first: `__setattr__` takes it for the module
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        state = {**vars(self), "_modules": {**self._modules}}  # hooks and attributes of its own
        for name in ("_lock", "_compiled_call_impl"):
            state.pop(name, None)
        return ReloadableModule, (self.module,), state

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
        require: str | None = None,
    ) -> Any:
        """Load sealed weights, like `load_model`, and use them in all calls from now on."""
        with self._lock:
            fresh = _copy(self.module, {})
            target = getattr(fresh, "_orig_mod", fresh)  # the module in a compiled one, whose names the file has
            outcome = load_model(target, path, keys, device=device, strict=strict, anchor=anchor, require=require)
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

    def requires_grad_(self, requires_grad: bool = True) -> ReloadableModule:
        """Set what needs gradients in the newest module, after a reload that has begun."""
        with self._lock:
            super().requires_grad_(requires_grad)
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load plain weights into the newest module, after a reload that has begun."""
        with self._lock:
            return super().load_state_dict(*args, **kwargs)

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
    shared = list(memo.values())
    try:
        fresh = _deepcopy(module, memo)
    except Exception as error:
        raise TypeError(
            f"module: expected one that copy.deepcopy can copy, got {type(module).__name__}: {type(error).__name__}. "
            "Load a second module with load_model, and switch to it"
        ) from error
    seen = {id(part): part for part in (*fresh.modules(), *shared)}
    for part in fresh.modules():
        for name, held in vars(part).items():
            if _reaches(held, own, seen):
                raise TypeError(
                    f"module: expected one whose copies are apart from it, got {type(part).__name__}, in which "
                    f"{name!r:.80} refers to the origin, for example by the closure of a wrapped forward. Move it to a "
                    "method"
                )
    return fresh


def _deepcopy(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    plain = [each for each in module.parameters() if id(each) not in memo and type(each) is torch.nn.Parameter]
    for parameter in plain:
        # As plain tensors, since copies of parameters do not share their memory as the parameters do.
        memo[id(parameter)] = torch.nn.Parameter(copy.deepcopy(parameter.data, memo), parameter.requires_grad)
    for parameter in plain:
        vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))
    return copy.deepcopy(module, memo)


def _reaches(start: object, targets: set[int], seen: dict[int, Any]) -> bool:
    """Return whether an object refers to a target other than by what was seen, which it adds to.

    A deep copy has the functions of its origin, and whatever these refer to. So all objects are followed, the nearest
    first, but for classes, loggers, and what chooses a generation by itself.
    """
    pending = deque([start])
    while pending and len(seen) < _MOST:
        held = pending.popleft()
        if id(held) in targets:
            return True
        if id(held) not in seen and not _is_end(type(held)):  # not isinstance, which asks a proxy's referent
            seen[id(held)] = held  # kept alive, so that no other object gets its id
            pending += _referents(held)
    return False


def _is_end(kind: type) -> bool:
    # Of a compiler: it guards on the objects that its code is called with.
    return issubclass(kind, (*_ENDS, ReloadableModule)) or str(kind.__module__).startswith("torch._dynamo.")


def _referents(held: Any) -> Iterable[Any]:
    kind = type(held)
    if kind is FunctionType:  # whose referents include all globals of its module
        return [held.__closure__, held.__defaults__, held.__kwdefaults__, held.__dict__, *_globals_of(held)]
    if kind is _CACHE:  # its keys may be modules, and are found by no other module
        return [held.__wrapped__]
    return [held()] if issubclass(kind, weakref.ref) else gc.get_referents(held)


def _globals_of(function: FunctionType) -> list[Any]:
    known = function.__globals__
    if str(known.get("__name__")).partition(".")[0] == "torch":  # whose caches have modules of anybody
        return []
    return [known[name] for name in _global_names(function.__code__) if name in known]


def _global_names(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a function in it
            yield from _global_names(constant)
