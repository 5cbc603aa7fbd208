"""`offload`: a module whose weights are opened when they are needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial, update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

from fastrack._devices import canonical
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._models.load import fill, plan_load, require_module
from fastrack._sets.folder import SealedFolder
from fastrack._tensors import dtypes
from fastrack._tensors.arrays import installed
from fastrack._tensors.sharded import is_sharded
from fastrack._tensors.storages import storage_key
from fastrack._transfer.api import to_device
from fastrack._transfer.slots import Slots
from fastrack._transfer.vault import Ticket, Vault, open_reused
from fastrack._util.extras import require
from fastrack._util.fork import per_process
from fastrack._util.public import public

if TYPE_CHECKING or installed("torch"):
    import torch
    from torch.utils._pytree import tree_map
if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

Opener = Callable[[], "torch.Tensor"]
Module = TypeVar("Module", bound="torch.nn.Module")


@public
def offload(
    module: Module,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | SealedFolder | Vault,
    keys: KeySource | None = None,
    *,
    device: object = None,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> Module:
    """Take the weights out of a torch module. Each is opened when the module that it is in is called.

    A weight is authenticated and decrypted on the device while the one before it is used, and released once its module
    was called: two weights are in memory, and not the model. Call the module in ``torch.inference_mode()``, as autograd
    would keep them. The hooks are Accelerate's, as of its ``cpu_offload``; its ``remove_hook_from_submodules`` ends it,
    and leaves weights that were tied apart.
    Threads that call it, not a module in it, wait for each other. After an exception in a ``forward`` the weights of
    that module stay open until it is called again.

    Parameters
    ----------
    module : torch.nn.Module
        Module, on the meta device or any other. Its parameters are on the meta device afterwards. Buffers stay: those
        of `source` are filled.
    source : path, sequence of paths, SealedFolder or Vault
        Sealed file or folder with the weights, as for `load_model`, which has to stay. Or a vault, into which the
        parameters of `module` are put.
    keys : KeySource, optional
        As for `to_device`. A vault needs none.
    device : str or torch.device, optional
        Device of the forward pass, "cpu" or "cuda:N". By default the one that the parameters are on, or "cpu".
    anchor : Anchor or path, optional
        As for `load_model`.
    preload_module_classes : collection of str, optional
        Names of classes of modules that use parameters of their submodules without calling these, as
        ``torch.nn.MultiheadAttention`` does. All that is in such a module is opened for its ``forward``.

    Returns
    -------
    torch.nn.Module
        The same module.

    Raises
    ------
    AuthenticationError
        As from `load_model`; and from ``forward``, if a weight was altered.
    ModuleNotFoundError
        If accelerate is missing.
    TypeError
        If the module is sharded, recurrent (``torch.nn.LSTM`` and others, which keep their weights in a list), or was
        offloaded or dispatched before.
    RuntimeError
        As from `load_model`; and from ``forward``, if a module uses a weight of another one without calling that.
    UnknownKeyError, FormatError, RollbackError, SignatureError, OSError, DeviceError
        As from `load_model` and `Vault.put`.

    Examples
    --------
    >>> import fastrack
    >>> import torch
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_model(torch.nn.Linear(3, 2), "model.safetensors", key=key)
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(3, 2)
    >>> model = fastrack.offload(model, "model.safetensors", key)  # doctest: +SKIP
    >>> model(torch.ones(1, 3)).shape  # doctest: +SKIP
    torch.Size([1, 2])
    """
    require("torch", "offload", "torch")
    require_module(module, "offload(module, path, keys)")
    require("accelerate", "offload", "accelerate")
    import accelerate  # type: ignore[import-untyped,unused-ignore]

    _refuse_modules(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            raise TypeError(
                f"{name!r:.200}: expected a module on one device, got a DTensor. Offload it before it is sharded"
            )
    if device is None:
        device = next((each.device for each in parameters.values() if not each.is_meta), "cpu")
    target = canonical(device)
    to_device((), target)  # raises if there is no such device, before anything changes
    if isinstance(source, Vault):
        openers = _put(source, parameters, target)
    else:
        openers = _plan(module, source, parameters, KeyRing.resolve(keys), target, anchor)
    weights: Any = Weights(openers)
    preloaded = None if preload_module_classes is None else list(preload_module_classes)
    accelerate.cpu_offload(module, torch.device(target), state_dict=weights, preload_module_classes=preloaded)
    guard(module)
    return module


def _refuse_modules(module: Any) -> None:
    for each in module.modules():
        if hasattr(each, "_hf_hook"):
            raise TypeError(
                "module: expected one without Accelerate's hooks, got one that has some, as it was offloaded or "
                "dispatched before. Call accelerate.hooks.remove_hook_from_submodules(module) first"
            )
        if isinstance(each, torch.nn.RNNBase):
            raise TypeError(
                f"module: expected weights that are only parameters, got {type(each).__name__}, which keeps them in "
                "another list too. Offload the modules beside it"
            )


def _put(vault: Vault, parameters: Mapping[str, Any], device: str) -> dict[str, Opener]:
    tickets: dict[int, Ticket] = {}  # by the ids of parameters, which may have several names
    for name, parameter in parameters.items():
        if id(parameter) not in tickets:
            tickets[id(parameter)] = vault.put(name, parameter)
    return {name: partial(vault.get, tickets[id(parameter)], device=device) for name, parameter in parameters.items()}


def _plan(
    module: Any, source: Any, parameters: Mapping[str, Any], keys: KeyRing, device: str, anchor: Any
) -> dict[str, Opener]:
    """Fill the buffers, and return what opens each parameter."""
    steps, *_ = plan_load(module, source, keys, device, anchor, strict=True)
    by_memory = {storage_key(step.tensor): step for step in steps}
    for name, parameter in parameters.items():
        if storage_key(parameter) not in by_memory:
            raise RuntimeError(
                f"{name!r:.200}: expected a parameter that the module's state_dict has whole, got another one. "
                "Offload a module without it"
            )
    chosen = {name: by_memory[storage_key(parameter)] for name, parameter in parameters.items()}
    for name, step in chosen.items():
        parameter = parameters[name]
        for owner, attribute in step.owners:  # on the meta device, where it gets the dtype of the file
            empty = torch.empty(parameter.shape, dtype=dtypes.to_torch(step.dtype), device="meta")
            owner._parameters[attribute] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)  # noqa: SLF001
    later = {id(step) for step in chosen.values()}
    fill([step for step in steps if id(step) not in later], keys)
    return openers_of({name: (step.sealed, step.dtype) for name, step in chosen.items()}, keys, device)


@cache
def _placeholder_class() -> Any:
    class Refusing:
        """Tensor that may be on the meta device, where it is not computed with, nor is a result of it.

        torch 2.13 computes `linear` with a weight on the meta device, and returns memory without writing to it.
        """

        @classmethod
        def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = list(_tensors((args, kwargs or {})))
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - documented under this name
                empty = [each for each in given if each.is_meta]
                if empty and len(empty) < len(given):
                    raise RuntimeError(
                        f"an offloaded weight of {list(empty[0].shape)} was used: expected a call of the module it is "
                        "in, got a use of its parameter. Name the class of the module that uses it in "
                        "preload_module_classes="
                    )
                result = function(*args, **(kwargs or {}))
                return tree_map(lambda each: _guarded(each, Derived), result) if empty else result

    class Derived(Refusing, torch.Tensor):
        """A part of a weight that is not open, or what was computed of it on the meta device."""

        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError(
                "saving an offloaded weight failed: expected one in memory, got one that is opened when its module is "
                "called. Remove the hooks first: accelerate.hooks.remove_hook_from_submodules(module)"
            )

    class Placeholder(Refusing, torch.nn.Parameter):
        """A weight that is open or on the meta device."""

        is_placeholder = True

        def __reduce_ex__(self, protocol: Any) -> Any:
            plain: Any = torch.nn.Parameter(self.detach(), self.requires_grad)  # which refuses if it is not open
            return plain.__reduce_ex__(protocol)

    return Placeholder


def _guarded(value: Any, kind: Any) -> Any:
    return value.as_subclass(kind) if type(value) is torch.Tensor and value.is_meta else value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from _tensors(value)


def guard(module: Any) -> None:
    """Refuse computing with weights that are not open, and let one thread at a time call the module.

    Accelerate's hooks put weights into the module, and take them out under the other threads.
    """
    for owner in module.modules():
        held = owner._parameters  # noqa: SLF001 - where Accelerate's hooks put weights
        for name, parameter in held.items():
            if type(parameter) is torch.nn.Parameter and parameter.is_meta:
                held[name] = _placeholder_class()(parameter.detach(), requires_grad=parameter.requires_grad)
    # In the place of Accelerate's `forward`, which ends with its hooks.
    module.forward = update_wrapper(partial(_OneThread().call, module.forward), module.forward)


class _OneThread:
    """Calls of one thread at a time."""

    def __init__(self) -> None:
        self._lock = per_process(self, "_lock", threading.RLock)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function once no other thread does."""
        with self._lock:
            return function(*args, **kwargs)


def openers_of(weights: Mapping[str, tuple[Any, str]], keys: KeySource, device: object) -> dict[str, Opener]:
    """Return what opens each sealed tensor in its dtype on a device, in memory that is used again on "cpu"."""
    slots = Slots()
    return {
        name: partial(open_reused, slots, sealed, device, keys, "torch", dtype)
        for name, (sealed, dtype) in weights.items()
    }


class Weights(Mapping[str, "torch.Tensor"]):
    """Weights of a module by their names, for Accelerate's hooks. Each opens when it is asked for.

    The one that was asked for next the last time opens meanwhile, in a thread. At first that is the next in the order
    of the names. The first one of a pass does not: it would take memory until the next pass, if there is one.
    """

    def __init__(self, openers: Mapping[str, Opener]) -> None:
        self._openers = openers
        names = list(openers)
        self._following = dict(zip(names, [*names[1:], *names[:1]], strict=True))
        self._first = self._last = ""
        self._lock = per_process(self, "_lock", threading.Lock)
        self._thread = per_process(self, "_thread", partial(ThreadPoolExecutor, 1, "fastrack-offload"))
        self._ahead: tuple[str, Future[torch.Tensor]] | None = per_process(self, "_ahead", lambda: None)

    def __getitem__(self, name: str) -> torch.Tensor:
        with self._lock:
            open_weight, ahead = self._openers[name], self._ahead
            if self._last:
                self._following[self._last] = name
            self._first = self._first or name
            self._last, following, self._ahead = name, self._following[name], None
            if following not in {name, self._first}:
                with suppress(RuntimeError):  # the interpreter ends
                    self._ahead = following, self._thread.submit(self._openers[following])
        if ahead is not None and ahead[0] == name:
            return ahead[1].result()
        if ahead is not None:
            ahead[1].cancel()
        return open_weight()

    __eq__, __hash__ = object.__eq__, object.__hash__  # a comparison of values would open them

    def __iter__(self) -> Iterator[str]:
        return iter(self._openers)

    def __len__(self) -> int:
        return len(self._openers)
