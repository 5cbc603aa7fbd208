"""`to_device`, `to_host` and `synchronize`, on channels that are shared by the whole process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from fastrack._devices import DEFAULT, canonical
from fastrack._keys.keyring import KeyLike, KeySource
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext
from fastrack._sealed.handle import Handle, Options, Out
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Array, Bytes, Framework
from fastrack._tensors.sharded import is_sharded, named_part
from fastrack._transfer.channel import Channel, Group
from fastrack._util.fork import per_process
from fastrack._util.public import public
from fastrack._util.shown import shown

if TYPE_CHECKING:
    import torch

    from fastrack._transfer.channel import Tensors


@overload
def to_device(
    obj: Tensors, device: object = None, *, framework: Literal["torch"] | None = None, **options: Unpack[Options]
) -> torch.Tensor: ...
@overload
def to_device(
    obj: Tensors | Array, device: object = None, *, framework: Literal["numpy"], **options: Unpack[Options]
) -> Array: ...
@overload
def to_device(
    obj: object, device: object = None, *, framework: Framework | None = None, **options: Unpack[Options]
) -> Any: ...
@overload
def to_device(
    obj: object, device: object = None, *, framework: None = None, out: Out, **options: Unpack[Options]
) -> Out: ...
@public
def to_device(
    obj: Any,
    device: object = None,
    *,
    keys: KeySource | None = None,
    framework: Framework | None = None,
    out: Any = None,
    non_blocking: bool = False,
    dtype: object = None,
) -> Any:
    """Move tensors to a device, sealed on the way.

    A sealed tensor is sent as its owner sealed it, and is authenticated and decrypted on the device, chunk by chunk and
    in parallel. A plain tensor is sealed once, in parallel, under a key of only this transfer.

    Parameters
    ----------
    obj : array, SealedTensor, SealedRows, or a pytree of these
        Arrays of NumPy or torch in host memory, sealed tensors or rows of these, of any shape and of any dtype that
        safetensors has; or a pytree of dicts, lists, tuples, named tuples and dataclasses that holds them. Beside one,
        other leaves are returned unchanged: arrays of text, objects, dates or records, and objects of other classes,
        even if these hold tensors. Without one, what could be a tensor is refused: a list of numbers, a table, an
        image. So are arrays of other frameworks, which have ``__dlpack__``, sealed
        tensors in sets, views of dicts, deques and namespaces, and generators.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : KeySource, optional
        The keys of sealed tensors, as `KeyRing` takes them: a key, a key file, a `KeyProvider`, a function that finds a
        key by its id. Defaults to those of the sample's `SealedDataset`, if there are any, then to the keys of
        `use_keys`, then to ``FASTRACK_KEY_FILE``. Plain tensors need none.
    framework : {"torch", "numpy", "cupy"}, optional
        The framework of the results. Defaults to the framework of the input; for sealed tensors to torch if it is
        installed, else to numpy.
    out : array or pytree of arrays, optional
        Arrays to fill and return, in a pytree like `obj`: of the same shapes and dtypes, contiguous, on the device, and
        in memory of their own. Excludes `framework`. The first touch of fresh memory takes longer than the cipher, so
        a loop that reuses its arrays is faster.
    non_blocking : bool
        Return before the transfer is done, if the device can; later work on the device sees complete results. A failure
        is raised once, in the thread that made this call: by its next `to_device` to this device if the failure is
        known by then, and at the latest by its next call that waits: `synchronize`, `to_host`, or `to_device` without
        this option. The bytes of a failed chunk are zeros from the start; the other bytes of the result are the sealed
        ones. "cpu" always waits.
    dtype : torch.dtype or str, optional
        The dtype of the results. Quantised values, which have a `SealedTensor.scale`, are multiplied by their scales
        and widened to ``torch.bfloat16`` while they are opened; without `dtype` they come as they are. Any other tensor
        must have this dtype already.

    Returns
    -------
    array or pytree
        The same pytree, with arrays on the device. Plain arrays keep the order of their dimensions in memory, such as
        Fortran order; torch tensors their strides, such as those of ``channels_last``, and their subclass with its
        attributes. Slices and expanded tensors become contiguous, and sealed tensors are. Gradients are not copied:
        no result requires one, and in the place of a Parameter is a tensor.

    Raises
    ------
    AuthenticationError
        If a chunk or a header was altered, or the key is wrong. The error names the first such tensor of the pytree,
        and all arrays of `out` hold zeros.
    UnknownKeyError
        If the key of a sealed tensor was not given.
    DeviceError
        If the device cannot be used, or fails.
    TypeError, ValueError
        If a tensor cannot be moved (sparse, nested, complex128 or of another framework), or there is none, or if `out`
        or `dtype` does not fit. The message has the path of the leaf in the pytree.

    Notes
    -----
    An `AuthenticationError` or `DeviceError` may also come from an earlier transfer to this device that this thread did
    not wait for; nothing is moved then. If a thread or the process ends without another call, the failures of its
    transfers are reported as `ResourceWarning`, which Python shows with ``-X dev`` only, and to the logger "fastrack".

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(5.0), key, name="weights")
    >>> fastrack.to_device(sealed, keys=key, framework="numpy")
    array([0., 1., 2., 3., 4.])

    A plain array is sealed on its way. Leaves that are no tensors stay:

    >>> batch = fastrack.to_device({"x": np.ones((2, 2), np.float32), "label": "cat"})
    >>> batch["x"].shape, batch["label"]
    ((2, 2), 'cat')

    Fill an existing array, which is faster:

    >>> out = np.zeros(5)
    >>> fastrack.to_device(sealed, keys=key, out=out) is out
    True
    """
    dynamo = sys.modules.get("torch._C._dynamo.eval_frame")
    if dynamo is not None and callable(dynamo.get_eval_frame_callback()):  # torch.compile would trace the call
        torch = sys.modules["torch"]
        return torch.compiler.disable(to_device)(
            obj, device, keys=keys, framework=framework, out=out, non_blocking=non_blocking, dtype=dtype
        )
    if not isinstance(obj, (Handle, dict, list, tuple, np.ndarray)):
        _require_movable(obj)
    name = DEFAULT if device is None else device
    channel = _shared.channels.get(name) if isinstance(name, str) else None
    if channel is None:
        channel = _shared.channel(canonical(name))
    return channel._transfer(None, obj, keys, framework, out, non_blocking, dtype)  # noqa: SLF001 - of this package


# Has torch.compile break its graph at the call, as torch.compiler.disable does, which would import torch here.
to_device._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001


def _require_movable(obj: Any) -> None:
    """Refuse a path, a module or another source of tensors, which `to_device` would return unchanged."""
    if isinstance(obj, os.PathLike) or (isinstance(obj, str) and Path(obj).suffix == ".safetensors"):
        raise TypeError(f"expected tensors, got the path {shown(obj)}. Use load_file to open a sealed file")
    if hasattr(type(obj), "__next__") or (type(obj).__module__ == "fastrack" and not isinstance(obj, Mapping)):
        raise TypeError(f"expected tensors, got {shown(obj)}. Make a list of a generator, and use wrap for a dataset")
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    if isinstance(obj, module):
        raise TypeError(
            f"expected tensors, got a module, {type(obj).__name__}. Use load_model to fill it from a sealed file"
        )


@public
def to_host(x: Any, key: KeyLike | None = None, *, name: str = "tensor") -> SealedTensor:
    """Seal a tensor on the device that holds it, and copy it to the host sealed.

    Each process seals its own part of a DTensor, under a name with the part's position, like `seal`.

    Parameters
    ----------
    x : array
        An array of NumPy, torch or CuPy on any device, of any shape and of any dtype that safetensors has.
    key : KeyLike, optional
        The key to seal under, as `seal` takes it.
    name : str
        The name of the tensor. It is authenticated.

    Returns
    -------
    SealedTensor
        The message of `x`, in host memory.

    Raises
    ------
    TypeError
        If `x` is no array, or of a dtype that safetensors lacks.
    ValueError
        If `x` is a DTensor that `seal` refuses.
    AuthenticationError
        If an earlier transfer to the device that this thread did not wait for was altered.
    DeviceError
        If the device fails, or failed in an earlier transfer.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.to_host(np.eye(2, dtype=np.float32), key=key, name="weights")
    >>> sealed.name, sealed.dtype, sealed.shape
    ('weights', 'F32', (2, 2))
    >>> fastrack.unseal(sealed, key, framework="numpy").tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    if is_sharded(x):
        x, name = named_part(x, name)
    return _shared.channel(device_of(x)).to_host(x, key=key, name=name)


def seal_message(x: Any, context: MessageContext, key: Key, message: Bytes | None = None) -> Bytes:
    """Seal a tensor on the device that holds it, like `to_host`, and return a message bound to `context`.

    It is written to the memory of `message`, which has its size, if any is given.
    """
    return _shared.channel(device_of(x)).seal_message(x, context, key, message)


@public
def synchronize(device: object = None) -> None:
    """Wait for the transfers to a device that this thread started with ``non_blocking=True``.

    Each thread waits for its own.

    Parameters
    ----------
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".

    Raises
    ------
    AuthenticationError
        If a chunk was altered. Names the first altered tensor and chunk, with a note for each further failed transfer.
        Do not use the arrays of failed transfers. The next call raises failures of later transfers only.
    DeviceError
        If the device failed.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> parts = [fastrack.seal(np.full(3, number), key) for number in range(2)]
    >>> arrays = [fastrack.to_device(part, keys=key, framework="numpy", non_blocking=True) for part in parts]
    >>> fastrack.synchronize()
    >>> arrays
    [array([0, 0, 0]), array([1, 1, 1])]
    """
    channel = _shared.channels.get(canonical(device))
    if channel is not None:
        channel.synchronize()


def group(device: str) -> AbstractContextManager[Group]:
    """Return `Channel.group` of the shared channel to a device."""
    return _shared.channel(device).group()


class _Shared:
    """The shared channels, one for each device, opened when first needed."""

    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self._lock = per_process(self, "_lock", threading.Lock)

    def channel(self, device: str) -> Channel:
        with self._lock:
            if device not in self.channels:
                self.channels[device] = Channel(device)
            return self.channels[device]


_shared = _Shared()


def device_of(array: Any) -> str:
    """Return the name of the device that holds an array: "cpu" or "cuda:N"."""
    framework = arrays.framework_of(array)
    if framework == "cupy":
        return canonical(f"cuda:{array.device.id}")
    return canonical(array.device if framework == "torch" else None)
