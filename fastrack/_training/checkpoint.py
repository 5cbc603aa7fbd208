"""Checkpoints: the whole state of a training run in one sealed file, without pickle."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fastrack._crypto.keys import KeyLike, KeyRing, KeySource
from fastrack._devices import canonical
from fastrack._sealed.reader import SealedFile, load_file
from fastrack._sealed.tensor import SealedTensor, unseal
from fastrack._sealed.writer import write_checkpoint
from fastrack._tensors.arrays import Framework
from fastrack._training import state as skeleton
from fastrack._transfer.api import to_device
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError

_SKELETON = "skeleton"


@public
def save_checkpoint(path: str | os.PathLike[str], state: Any, *, key: KeyLike) -> None:
    """Seal the state of a training run into a new file: any nest of plain values and arrays.

    The file appears under its name when it is complete and on disk, in place of one that was there. It is written slab
    by slab, without a second copy of the arrays.

    Parameters
    ----------
    path : path
        The file to write; a ``.safetensors`` suffix is customary.
    state : nest
        Dicts (with keys of text and whole numbers), lists and tuples that hold None, booleans, whole numbers, floats,
        text, bytes, torch tensors, NumPy arrays and NumPy scalars. Such as ``{"model": model.state_dict(), "optimizer":
        optimizer.state_dict(), "rng": torch.get_rng_state(), "python": random.getstate(), "epoch": 3}``.
    key : Key or path
        The owner's key, or its key file.

    Raises
    ------
    TypeError
        If something in it is none of these, is not in host memory, or is of a dtype that safetensors lacks. Says where
        it stands.
    ValueError
        If it is nested more than 64 levels deep.
    OSError
        If the file cannot be written. A checkpoint that was there before stays, and nothing else is left behind.

    Notes
    -----
    What is secret: every value, the keys of the dicts and how all of it is nested. What is not: the number of arrays,
    their dtypes and shapes, and the size of the rest. An older checkpoint of the same key put in place of a newer one
    is not noticed; where that matters, keep the number of the epoch elsewhere too.
    """
    text, arrays = skeleton.encode_state(state)
    tensors = {str(number): array for number, array in enumerate(arrays)}
    write_checkpoint({_SKELETON: np.frombuffer(text, np.uint8), **tensors}, path, key)


@public
def load_checkpoint(path: str | os.PathLike[str], *, keys: KeySource | None = None, device: object = None) -> Any:
    """Open a checkpoint. Nothing of it is run, whoever wrote it.

    Parameters
    ----------
    path : path
        A file from `save_checkpoint`.
    keys : Key, path or iterable of these, optional
        As for `to_device`.
    device : str or torch.device, optional
        Where torch tensors go: "cpu", the default, or "cuda:N". The rest is opened in host memory. All torch tensors go
        there, the state of a random generator too, which ``torch.set_rng_state`` wants on the host.

    Returns
    -------
    nest
        What was saved: of the same types, but for an OrderedDict, which becomes a dict, and for parameters, which
        become tensors. Numbers are the same to the last bit. Arrays that shared their memory are one again.

    Raises
    ------
    AuthenticationError
        If the key is another one, or anything was altered.
    UnknownKeyError
        If the key that sealed it is not among `keys`.
    FormatError
        If it is no checkpoint.
    DeviceError, OSError
        As from `to_device` and `load_file`.
    """
    ring, where = KeyRing.resolve(keys), canonical(device)
    with load_file(path) as file:
        sealed = file.get(_SKELETON)
        if file.kind != "checkpoint" or sealed is None or sealed.dtype != "U8" or len(sealed.shape) != 1:
            raise FormatError(f"{file.path} is no checkpoint; load_file opens other sealed files")
        text = unseal(sealed, ring, framework="numpy").tobytes()
        loader = _Loader(file, ring, where)
        state = skeleton.decode_state(text, loader.fetch)
        if len(loader.fetched) + 1 != len(file.names):
            raise FormatError(f"{file.path} has tensors that its checkpoint knows nothing of; save it again")
    return state


class _Loader:
    """Opens the arrays of a checkpoint, each once."""

    def __init__(self, file: SealedFile, keys: KeyRing, device: str) -> None:
        self._file = file
        self._keys = keys
        self._device = device
        self.fetched: dict[int, tuple[Framework, Any]] = {}

    def fetch(self, number: int, framework: Framework) -> Any:
        if number not in self.fetched:
            device = self._device if framework == "torch" else None
            opened = to_device(self._sealed(number), device, keys=self._keys, framework=framework)
            self.fetched[number] = framework, opened
        stored, array = self.fetched[number]
        if stored != framework:
            raise FormatError(
                f"{self._file.path}: array {number} is of {stored} in one place, and {framework} in another"
            )
        return array

    def _sealed(self, number: int) -> SealedTensor:
        sealed = self._file.get(str(number))
        if sealed is None:
            raise AuthenticationError(
                f"{self._file.path} lacks array {number} of its checkpoint, or has it in plain; it was altered",
                tensor=str(number),
                path=self._file.path,
            )
        return sealed
