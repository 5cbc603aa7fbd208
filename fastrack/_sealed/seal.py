"""Seal tensors on the host, and open them there: `seal` and `unseal`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, overload

from fastrack._crypto.engine import get_engine
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext, new_file_id, require_name
from fastrack._sealed.message_headers import fetch_headers, prefetch
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.scales import scale_of
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Array, Framework
from fastrack._tensors.sharded import is_sharded, named_part
from fastrack._util.public import public
from fastrack.format import HEADER_SIZE, message_size

if TYPE_CHECKING:
    import torch


@public
def seal(tensor: Any, key: KeyLike | None = None, name: str = "tensor", *, scale: Any = None) -> SealedTensor:
    """Encrypt a tensor under a key, and bind it to its name, dtype and shape.

    Of a DTensor, for example in a module sharded by ``fully_shard``, each process seals its own part, and nothing is
    sent. The name has the position of the part in the whole: ``w[256:512, 0:64]``.

    Parameters
    ----------
    tensor : numpy.ndarray or torch.Tensor
        Tensor of any shape in host memory, of any dtype that safetensors has. Its values are sealed, in C order: it
        opens contiguous, whatever its strides are.
    key : KeyLike, optional
        The owner's key, its key file, or a provider. Defaults to the key of `use_keys`, then to
        ``FASTRACK_KEY_FILE`` (see `KeyRing`). 256 bits mean Cobblestone-256, 128 bits Cobblestone-128.
    name : str
        Name of the tensor. It is authenticated.
    scale : numpy.ndarray or torch.Tensor, optional
        Scales of quantised values: of float32 or bfloat16, for a tensor of float8_e4m3fn, float8_e5m2 or int8. One in
        all, or with the dimensions of the tensor one for each row ``[rows, 1]`` or block. They are sealed as
        ``name + "_scale"``, which the tensor is bound to; ``to_device(sealed, dtype="bfloat16")`` multiplies by them.

    Returns
    -------
    SealedTensor
        The message: 56 bytes more than the tensor, and 16 for each 16 KiB of it. It holds no secret.
        `SealedTensor.to_bytes` and `save_file` write it.

    Raises
    ------
    TypeError
        If `tensor` is not a tensor in host memory, its dtype has no safetensors name, or `name` is not text.
    ValueError
        If `tensor` is a DTensor with partial sums, or with `scale`, or the part of a process is not one range along
        each dimension. If the scales do not fit the tensor, or do not say which values share one.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(6, dtype=np.float32).reshape(2, 3), key, name="weights")
    >>> sealed.name, sealed.dtype, sealed.shape, sealed.nbytes
    ('weights', 'F32', (2, 3), 24)
    >>> fastrack.unseal(sealed, key, framework="numpy")
    array([[0., 1., 2.],
           [3., 4., 5.]], dtype=float32)

    Quantised values have scales, here one for each row:

    >>> values, scales = np.array([[1, -2], [3, 4]], np.int8), np.array([[0.5], [2]], np.float32)
    >>> sealed = fastrack.seal(values, key, name="weights", scale=scales)
    >>> sealed.scale
    <SealedTensor 'weights_scale' F32 [2, 1] key ...>
    >>> fastrack.to_device(sealed, keys=key, dtype="bfloat16", framework="torch").tolist()
    [[0.5, -1.0], [6.0, 8.0]]
    """
    require_name(name)  # before the key, in whose place it may be
    key, file = sealing_key(key), new_file_id()
    if is_sharded(tensor):
        if scale is not None:
            raise ValueError(
                "scale=: expected a tensor that is not sharded, got a DTensor. Seal it whole, or leave scale= out"
            )
        tensor, name = named_part(tensor, name)
    dtype, shape = arrays.dtype_and_shape(tensor)
    context = MessageContext(name, dtype, shape, file)
    if scale is None:
        return _seal(tensor, context, key)
    found = scale_of(dtype, shape, *arrays.dtype_and_shape(scale), f"{name}_scale")
    context = context._replace(scale=found)
    assert context.scales is not None
    return _seal(tensor, context, key, _seal(scale, context.scales, key))


def _seal(tensor: Any, context: MessageContext, key: Key, scale: SealedTensor | None = None) -> SealedTensor:
    plain = arrays.bytes_of(tensor)
    message = arrays.empty_bytes(message_size(plain.size))
    engine = get_engine()
    message_key, message[:HEADER_SIZE] = context.new_key(key)
    schedule = engine.expand_key(message_key)
    try:
        engine.seal_run(schedule, plain, message[HEADER_SIZE:], 0)
    finally:
        schedule.wipe()
        message_key.wipe()
    message.flags.writeable = False
    return SealedTensor(context, message, key.id, scale=scale)


@overload
def unseal(
    sealed: SealedTensor | SealedRows, keys: KeySource | None = None, *, framework: Literal["torch"] | None = None
) -> torch.Tensor: ...
@overload
def unseal(
    sealed: SealedTensor | SealedRows, keys: KeySource | None = None, *, framework: Literal["numpy"]
) -> Array: ...
@overload
def unseal(
    sealed: SealedTensor | SealedRows, keys: KeySource | None = None, *, framework: Framework | None = None
) -> Any: ...
@public
def unseal(
    sealed: SealedTensor | SealedRows, keys: KeySource | None = None, *, framework: Framework | None = None
) -> Any:
    """Authenticate and decrypt a sealed tensor, or rows of one, into host memory.

    The plaintext is on the host then, on purpose. `to_device` decrypts on a device.

    Parameters
    ----------
    sealed : SealedTensor or SealedRows
        Tensor or rows to decrypt.
    keys : KeySource, optional
        Keys that may open it: a key, a key file, a `KeyProvider`, a function that finds a key by its id, and all
        that `KeyRing` takes. Defaults as for `to_device`.
    framework : {"torch", "numpy"}, optional
        Framework of the result. By default torch if it is installed, else numpy.

    Returns
    -------
    torch.Tensor or numpy.ndarray
        Array of the sealed shape and dtype.

    Raises
    ------
    AuthenticationError
        If the key is wrong, or anything was altered. No plaintext is returned then.
    UnknownKeyError
        If the key that sealed it is not among `keys`.
    TypeError
        If `sealed` is of another type, or `framework` lacks its dtype.
    ModuleNotFoundError
        If `framework` is torch, and torch is missing.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(4), key)
    >>> fastrack.unseal(sealed, keys=key, framework="numpy")
    array([0, 1, 2, 3])
    >>> fastrack.unseal(sealed[1:3], keys=key, framework="numpy")
    array([1, 2])
    >>> fastrack.unseal(sealed, keys=fastrack.Key.generate())
    Traceback (most recent call last):
        ...
    fastrack.UnknownKeyError: ...
    """
    if not isinstance(sealed, (SealedTensor, SealedRows)):
        raise TypeError(
            f"unseal: expected SealedTensor or SealedRows, got {type(sealed).__name__}. {_advise_unseal(sealed)}"
        )
    arrays.require_installed(framework)
    framework = framework or arrays.default_framework()
    ring = KeyRing.resolve(sealed._own_keys if keys is None else keys)  # noqa: SLF001 - of this package
    if isinstance(sealed, SealedRows):
        return _unseal_rows(sealed, ring, framework)
    with OpenMessage(sealed, ring) as opened:
        memory = arrays.empty_bytes(sealed.nbytes)
        result = arrays.from_bytes(memory, sealed.context.dtype, sealed.shape, framework)
        opened.read(memory)
    return result


def _advise_unseal(given: object) -> str:
    if isinstance(given, (str, os.PathLike)):
        return "Open the tensors of a file with load_tensors"
    if isinstance(given, (bytes, bytearray, memoryview)):
        return "Read a tensor that was stored as bytes with SealedTensor.from_bytes"
    return "Open pytrees with to_device" if isinstance(given, (Mapping, list, tuple)) else "Seal it first"


def _unseal_rows(rows: SealedRows, keys: KeyRing, framework: Framework) -> Any:
    """Decrypt rows. Authenticate all headers before their sizes are used."""
    with ExitStack() as stack:
        parts = rows.select(keys)
        fetch_headers(tensor for tensor, _ in parts)
        opened = [(stack.enter_context(OpenMessage(tensor, keys)), ranges) for tensor, ranges in parts]
        prefetch(parts)
        memory = arrays.empty_bytes(rows.nbytes)
        result = arrays.from_bytes(memory, str(rows.dtype), rows.shape, framework)
        try:
            if rows.needs_padding:
                memory.fill(0)
            for message, ranges in opened:
                message.gather(ranges(), memory)
        except BaseException:
            memory.fill(0)
            raise
    return result
