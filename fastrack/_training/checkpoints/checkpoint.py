"""Checkpoints: the whole state of a training run in one sealed file, without pickle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from fastrack._devices import canonical
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile
from fastrack._files.writer import write_sealed
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._models.sharded import save_gathered
from fastrack._sealed.seal import unseal
from fastrack._sealed.tensor import SealedTensor
from fastrack._sets.load_file import load_file
from fastrack._tensors.arrays import Framework
from fastrack._tensors.sharded import is_sharded
from fastrack._training.checkpoints.state import decode_state, encode_state
from fastrack._transfer.api import to_device
from fastrack._util.locations import locate, require_path
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor

_SKELETON = "skeleton"


@public
def save_checkpoint(path: str | os.PathLike[str], state: Any, key: KeyLike | None = None) -> None:
    """Seal the state of a training run, any pytree of plain values and arrays, into a new file.

    The file replaces an existing one when it is complete and on disk. It is written slab by slab, without a second copy
    of the arrays.

    Parameters
    ----------
    path : path
        The file to write; a ``.safetensors`` suffix is customary.
    state : pytree
        What ``torch.load(weights_only=True)`` takes, with dense tensors in host memory, NumPy arrays and NumPy scalars,
        paths, named tuples and `argparse.Namespace`, such as ``{"model": model.state_dict(), "optimizer":
        optimizer.state_dict(), "rng": torch.get_rng_state(), "python": random.getstate(), "epoch": 3}``. A class, a
        function or a member of an enum is stored by its name, if ``torch.serialization.add_safe_globals`` has it.
    key : KeyLike, optional
        The owner's key, as `seal` takes it.

    Raises
    ------
    TypeError
        If a value is of another type, is not in host memory, or is of a dtype without a safetensors name. The message
        has its path in the pytree.
    ValueError
        If the pytree is more than 64 levels deep.
    OSError
        If the file cannot be written. An existing checkpoint stays then, and no part of the new one is left behind.
    RuntimeError
        If the process of rank 0 could not write the file, in the other processes.

    Notes
    -----
    A state with DTensors is saved by all processes together, like a sharded module by `save_model`: each calls this
    with a state of the same structure, and the state of rank 0 is written. It opens with whole tensors, contiguous.

    Every value is encrypted, and so are the keys of the dicts and the nesting. Not encrypted are the number of arrays,
    their dtypes and shapes, and the size of the rest. An `Anchor` detects an older checkpoint in place of a newer one
    if each checkpoint is published with `publish` after it was saved.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_checkpoint("run.safetensors", {"epoch": 3, "weights": np.ones(2)}, key=key)
    >>> fastrack.load_checkpoint("run.safetensors", keys=key)
    {'epoch': 3, 'weights': array([1., 1.])}
    """
    require_path(path, "save_checkpoint(path, state, key)")
    save_state(path, state, key)


def save_state(path: str | os.PathLike[str], state: Any, key: KeyLike | None, file_id: str | None = None) -> None:
    """Save a checkpoint, of all processes, or under a file id that must be new."""
    text, arrays = encode_state(state)
    tensors = {str(number): array for number, array in enumerate(arrays)}
    tensors = {_SKELETON: np.frombuffer(text, np.uint8), **tensors}
    if any(map(is_sharded, arrays)):
        save_gathered(tensors, path, key, kind="checkpoint")
    else:
        plain = {name: PlainTensor.of(tensor) for name, tensor in tensors.items()}
        write_sealed(plain, locate(path), sealing_key(key), frozenset(), {}, None, kind="checkpoint", file_id=file_id)


@public
def load_checkpoint(
    path: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    device: object = None,
    anchor: Anchor | str | os.PathLike[str] | None = None,
) -> Any:
    """Open a checkpoint. No code from the file is run.

    Parameters
    ----------
    path : path
        A file from `save_checkpoint`.
    keys : KeySource, optional
        As for `to_device`.
    device : str or torch.device, optional
        Device of all torch tensors: "cpu", the default, or "cuda:N". The rest is opened in host memory. The state of a
        random generator goes to the device too, and ``torch.set_rng_state`` expects it on the host.
    anchor : Anchor or path, optional
        As for `load_file`.

    Returns
    -------
    pytree
        The saved state, with the same types, dtypes and shapes. Numbers are equal to the last bit. Dense tensors have
        their strides, such as those of ``channels_last``, and dense NumPy arrays the order of their dimensions, such as
        Fortran order; slices and expanded tensors are contiguous. Arrays that were equal views of one memory are one
        array; other views of it have memory of their own. A named tuple whose class
        ``torch.serialization.add_safe_globals`` does not have is an equal one with the same fields.

    Raises
    ------
    AuthenticationError
        If the key is wrong, or anything was altered.
    UnknownKeyError
        If the key that sealed it is not among `keys`.
    FormatError
        If it is not a checkpoint, or has a class, function or enum that ``torch.serialization.add_safe_globals`` lacks.
    DeviceError, RollbackError, SignatureError, OSError
        As from `to_device` and `load_file`.

    Examples
    --------
    >>> import random
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_checkpoint("run.safetensors", {"python": random.getstate(), "step": 100}, key=key)
    >>> state = fastrack.load_checkpoint("run.safetensors", keys=key)
    >>> random.setstate(state["python"])
    >>> state["step"]
    100
    """
    with load_file(path, anchor=anchor) as file:
        return open_checkpoint(file, KeyRing.resolve(keys), device)


def open_checkpoint(file: SealedFile, ring: KeyRing, device: object = None) -> Any:
    """Return the state in an open file, as `load_checkpoint` does."""
    target = canonical(device)
    sealed = file.get(_SKELETON)
    if file.kind != "checkpoint" or sealed is None or sealed.dtype != "U8" or len(sealed.shape) != 1:
        kind = "another sealed file. Open it with load_file" if file else "a file of which nothing is sealed"
        raise FormatError(f"{file.path}: expected a checkpoint, got {kind}")
    fetched: dict[int, tuple[Framework, Any]] = {}

    def fetch(number: int, framework: Framework) -> Any:
        if number not in fetched:
            message = find_message(file, str(number))
            on = target if framework == "torch" else None
            fetched[number] = framework, to_device(message, on, keys=ring, framework=framework)
        stored, opened = fetched[number]
        if stored != framework:
            raise FormatError(
                f"{file.path}: array {number}: expected {stored}, as elsewhere in its skeleton, got {framework}"
            )
        return opened

    state = decode_state(unseal(sealed, ring, framework="numpy").tobytes(), fetch)
    if len(fetched) + 1 != len(file.names):
        expected = f"expected {len(fetched) + 1} tensors by its skeleton"
        raise FormatError(f"{file.path}: {expected}, got {len(file.names)}. Save it again")

    return state


def find_message(file: SealedFile, name: str) -> SealedTensor:
    """Return a message that a checkpoint refers to."""
    sealed = file.get(name)
    if sealed is None:
        raise AuthenticationError(
            f"{file.path}: expected message {name} of its checkpoint, got none, or a plain one; it was altered. Get "
            "the file that was saved",
            tensor=name,
            path=file.path,
        )
    return sealed
