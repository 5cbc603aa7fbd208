"""`to_device`, `to_host` and `synchronize`, on channels that the whole process shares."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fastrack._crypto.keys import KeyLike, KeySource
from fastrack._devices import canonical
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework
from fastrack._transfer.channel import Channel
from fastrack._util.fork import register_fork_reset
from fastrack._util.public import public


@public
def to_device(
    obj: Any,
    device: object = None,
    *,
    keys: KeySource | None = None,
    framework: Framework | None = None,
    out: Any = None,
    non_blocking: bool = False,
) -> Any:
    """Move tensors to a device, sealed on the way.

    A sealed tensor goes as its owner sealed it, and is authenticated and decrypted on the device, chunk by chunk and in
    parallel. A plain tensor is sealed once, in parallel, under a key made for this transfer.

    Parameters
    ----------
    obj : tensor, sealed tensor, rows of one, or a nest of these
        Arrays of NumPy or torch in host memory, `SealedTensor`, `SealedRows`; or any nest of dicts, lists, tuples,
        named tuples and dataclasses that holds them. Other leaves pass untouched: arrays of text, objects, dates or
        records, and objects of other classes, whatever tensors these hold.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : Key, path or iterable of these, optional
        Where the keys of sealed tensors are looked for. Absent, the environment variable ``FASTRACK_KEY_FILE`` names a
        key file. Plain tensors need none.
    framework : {"torch", "numpy", "cupy"}, optional
        What the results are arrays of. Absent, the framework that came in; for sealed tensors torch if it is installed,
        else numpy.
    out : array or nest of arrays, optional
        Arrays to fill, built like `obj`: same shapes and dtypes, contiguous, on the device, in memory of their own, and
        not both this and `framework`. They are returned. Fresh memory costs more to touch than the cipher does, so a
        loop that fills the same arrays again is faster.
    non_blocking : bool
        Return before the work is done, where the device can; what is handed to the device from then on finds the
        results complete. A failure is raised to the thread that made this call, once, and to no other: by its next
        `to_device` to this device if it is known by then, and at the latest by its next call that waits: `synchronize`,
        or `to_host` or `to_device` without this option. The place of a chunk that failed holds zeros from the start,
        and the rest of the result what was sealed. "cpu" finishes first.

    Returns
    -------
    The same nest, with arrays on the device in it. Tensors of torch keep the order of their dimensions in memory, such
    as ``channels_last``, and subclasses stay what they are, with their attributes; a gradient is not carried over.

    Raises
    ------
    AuthenticationError
        If a chunk, a header or the key is not what the owner used. What was to receive the tensor holds zeros; tensors
        of the nest that were moved before it stay.
    UnknownKeyError
        If the key of a sealed tensor was not given.
    DeviceError
        If the device cannot be used, or fails.
    TypeError, ValueError
        If a tensor cannot be moved, as one that is sparse, nested or of complex128, or `out` does not fit. Says where
        in the nest it stands.

    Notes
    -----
    The first and the third may also be of an earlier transfer to this device that the same thread did not wait for;
    then nothing was moved. If a thread ends, or the process, without another call, the failures of its transfers are
    reported as `ResourceWarning`, which Python shows with ``-X dev`` only, and to the logger "fastrack".
    """
    _require_no_mistake(obj)
    channel = _shared.channel(canonical(device))
    return channel.to_device(obj, keys=keys, framework=framework, out=out, non_blocking=non_blocking)


def _require_no_mistake(obj: Any) -> None:
    """Refuse what would pass untouched and was hardly meant to."""
    if isinstance(obj, os.PathLike) or (isinstance(obj, str) and Path(obj).suffix == ".safetensors"):
        raise TypeError(f"expected tensors, got the path {os.fspath(obj)!r:.80}; load_file opens a sealed file")
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    if isinstance(obj, module):
        raise TypeError(
            f"expected tensors, got a module, {type(obj).__name__}; load_model fills one from a sealed file"
        )


@public
def to_host(x: Any, *, key: KeyLike, name: str = "tensor") -> SealedTensor:
    """Seal a tensor where it is, and bring it to the host sealed.

    Parameters
    ----------
    x : array
        On any device.
    key : Key or path
        The key to seal it under, or its key file.
    name : str
        What to call it. Part of what is authenticated.

    Returns
    -------
    SealedTensor

    Raises
    ------
    TypeError
        If it is no array, or of a dtype that safetensors lacks.
    AuthenticationError, DeviceError
        If the device fails, or an earlier transfer to it that this thread did not wait for has failed.
    """
    return _shared.channel(_device_of(x)).to_host(x, key=key, name=name)


@public
def synchronize(device: object = None) -> None:
    """Wait for the transfers to a device that this thread started with ``non_blocking=True``.

    Those that other threads started are theirs to wait for.

    Parameters
    ----------
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".

    Raises
    ------
    AuthenticationError
        If a chunk was not what its owner sealed: the first such tensor and chunk, with a note for each further transfer
        that failed. What was returned for these is not to be used. The next call raises failures of later transfers
        only.
    DeviceError
        If the device failed.
    """
    channel = _shared.find(canonical(device))
    if channel is not None:
        channel.synchronize()


def group(device: str) -> AbstractContextManager[Callable[..., Any]]:
    """Return `Channel.group` of the channel to a device."""
    return _shared.channel(device).group()


class _Shared:
    """The channels, one a device, opened when first needed."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()

    def channel(self, device: str) -> Channel:
        with self._lock:
            if device not in self._channels:
                self._channels[device] = Channel(device)
            return self._channels[device]

    def find(self, device: str) -> Channel | None:
        with self._lock:
            return self._channels.get(device)


_shared = _Shared()


def _device_of(array: Any) -> str:
    framework = arrays.framework_of(array)
    if framework == "cupy":
        return canonical(f"cuda:{array.device.id}")
    return canonical(array.device if framework == "torch" else None)
