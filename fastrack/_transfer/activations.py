"""`sealed_activations`: what the backward pass needs waits sealed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from fastrack._tensors import dtypes
from fastrack._tensors.storages import storage_key
from fastrack._transfer.vault import Ticket, Vault
from fastrack._util.extras import require
from fastrack._util.public import public

if TYPE_CHECKING:
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef


@public
@contextlib.contextmanager
def sealed_activations(vault: Vault | None = None, *, min_bytes: int = 1 << 20) -> Iterator[Vault]:
    """Keep the tensors that autograd saves for the backward pass sealed in a vault, off the device.

    On a GPU this takes the activations out of its memory, as ``torch.autograd.graph.save_on_cpu`` does, and nothing but
    ciphertext leaves it. On "cpu" it takes them out of memory with a vault whose store is a folder, for example.

    The block holds the forward pass. The backward pass may be in it or after it, and opens each tensor when it gets
    there. A place in the vault is free again once autograd is done with its tensor.

    Parameters
    ----------
    vault : Vault, optional
        Where the tensors wait. Pass the same one at each step, so that its places are made once. By default a vault in
        host memory, for this block.
    min_bytes : int
        Bytes of the tensors that are sealed. Smaller ones stay where they are, and so do parameters, other leaves that
        require a gradient and views of these, sparse tensors and tensors of subclasses, such as DTensor.

    Yields
    ------
    Vault
        The vault.

    Raises
    ------
    AuthenticationError
        From ``backward``, if a tensor was altered while it waited. No gradient is computed from it.
    RuntimeError
        From ``backward``, as without the block, if a tensor that stays was changed in place.
    OSError, DeviceError
        From the forward and the backward pass, as from `Vault.put` and `Vault.get`.

    Notes
    -----
    Values are the same bit for bit, and so are gradients, but where an operation has saved a part of a tensor: it gets
    the part contiguous, and torch may sum it in another order. A tensor that several operations save is sealed once.
    What stays is refused if it is changed in place before it is used, as autograd does; what is sealed may be changed.
    Changes that autograd does not count (through ``.data``, NumPy or kernels of one's own) between two saves of one
    result are not seen by the second one.
    The block goes around a function that ``torch.compile`` has compiled, and not into it.

    Examples
    --------
    >>> import torch
    >>> import fastrack
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> vault, batch = fastrack.Vault(), torch.ones(8, 64)
    >>> with fastrack.sealed_activations(vault, min_bytes=1024):
    ...     loss = model(batch).mean()
    >>> loss.backward()
    >>> model[0].weight.grad.shape
    torch.Size([64, 64])
    """
    require("torch", "sealed_activations", "torch")
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    kept = Vault() if vault is None else vault
    saved: weakref.WeakValueDictionary[Hashable, _Sealed] = weakref.WeakValueDictionary()

    def pack(tensor: torch.Tensor) -> _Kept | _Sealed:
        if not _can_wait(tensor, min_bytes):
            return _Kept(tensor)
        if tensor.grad_fn is None:  # others may write to it, such as the loader of the next batch
            return _Sealed(kept.put("activation", tensor))
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        # While the reference is kept no other storage has its address; the version counts changes in place.
        same = storage.cdata, storage_key(tensor), tensor._version  # noqa: SLF001
        found = saved.get(same)
        if found is None:
            found = saved[same] = _Sealed(kept.put("activation", tensor), storage)
        return found

    def unpack(packed: _Kept | _Sealed) -> torch.Tensor:
        return packed.tensor if isinstance(packed, _Kept) else kept.get(packed.ticket)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield kept


class _Kept:
    """A tensor that stays. autograd leaves it to hooks to refuse one that is changed in place before it is used."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output that is saved as it is would refer to itself. What is detached counts changes with the tensor.
        # A leaf has nothing to refer to, and may get other memory.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version  # noqa: SLF001 - documented under this name

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, if it is as it was."""
        version = self._tensor._version  # noqa: SLF001 - documented under this name
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(self._tensor.shape)}: expected version {self._version}, got {version}. Change a copy of it"
            )
        return self._tensor


class _Sealed:
    """A tensor that waits. The weak reference to its storage keeps the address of that from being given to another."""

    __slots__ = ("__weakref__", "storage", "ticket")

    def __init__(self, ticket: Ticket, storage: StorageWeakRef | None = None) -> None:
        self.ticket, self.storage = ticket, storage


def _can_wait(tensor: torch.Tensor, min_bytes: int) -> bool:
    """Return whether a tensor can be sealed, has so many bytes, and is not alive anyway, as a parameter is."""
    import torch

    if tensor.is_nested:
        return False
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - documented under this name
    if isinstance(base, torch.nn.Parameter) or (base.is_leaf and base.requires_grad):
        return False
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return False
    if not min_bytes <= tensor.nbytes <= tensor.untyped_storage().nbytes():  # else it is expanded
        return False
    with contextlib.suppress(TypeError):
        return tensor.device.type in {"cpu", "cuda"} and bool(dtypes.from_torch(tensor.dtype))
    return False
