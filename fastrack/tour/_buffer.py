"""The one buffer of a visit: a holder's plaintext is there and nowhere else, and it is overwritten and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastrack._devices import canonical
from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing
from fastrack._tensors import dtypes
from fastrack._transfer.api import to_device
from fastrack._util.public import public
from fastrack.errors import AuthenticationError
from fastrack.format import chunk_count

_ALIGNMENT = 256  # bytes, as CUDA's allocator
_PIECE = 16 << 20  # bytes that are read back at a time


@public
class DataBuffer:
    """One buffer on a device, into which sealed files of a holder are opened, one after another.

    The tensors that `open` returns are views of it, valid until the next call. `scrub` overwrites what was used and
    reads it back, so views that were kept show zeros. Copies that training code makes of them, such as activations and
    gradients, lie elsewhere in the memory of the device, as does what its caches kept: on a GPU only a reset clears
    those.

    Parameters
    ----------
    size : int
        The size in bytes.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".

    Attributes
    ----------
    size : int
        The size in bytes.
    chunks : int
        The number of authenticated chunks that were opened into it.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> from fastrack import tour
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(4, dtype=np.int64)}, "shard.safetensors", key)
    >>> buffer = tour.DataBuffer(1024)
    >>> with fastrack.load_file("shard.safetensors") as file:
    ...     x = buffer.open(file, fastrack.KeyRing(key))["x"]
    >>> int(x.sum()), buffer.scrub(), int(x.sum())
    (6, 32, 0)
    """

    def __init__(self, size: int, device: object = None) -> None:
        import torch

        if size < 1:
            raise ValueError(f"making a buffer failed: expected a size of 1 byte or more, got {size}")
        self.size = size
        self.chunks = 0
        self._device = canonical(device)
        # Its pages are there before data come.
        self._memory: Any = torch.zeros(size, dtype=torch.uint8, device=str(self._device))
        self._used = 0

    def open(self, file: SealedFile, keys: KeyRing) -> Mapping[str, Any]:
        """Open all tensors of a sealed file into this buffer, over the ones before.

        Returns
        -------
        dict of str to torch.Tensor
            The tensors by their names, of their dtypes and shapes: views of the buffer.

        Raises
        ------
        ValueError
            If they do not fit, or the file has tensors that are not sealed.
        AuthenticationError, UnknownKeyError
            As from `to_device`. The buffer holds zeros then.
        """
        if file.plain:
            raise ValueError(
                f"{file.path}: expected a file with everything sealed, got {len(file.plain)} plain tensors"
            )
        places, end = find_places(file)
        if end > self.size:
            raise ValueError(
                f"{file.path}: expected at most {self.size} bytes for the buffer, got {end}. Seal smaller shards, or "
                "make the buffer larger"
            )
        views = {name: self._view(file[name], *place) for name, place in places.items()}
        self._used = max(self._used, end)
        try:
            to_device({name: file[name] for name in views}, self._device, keys=keys, out=views)
        except BaseException:
            self.scrub()
            raise
        self.chunks += sum(chunk_count(file[name].nbytes) for name in views)
        return views

    def scrub(self) -> int:
        """Overwrite with zeros what was used, read it back, and return its size in bytes.

        Raise `AuthenticationError` if the memory does not hold zeros then.
        """
        used, self._used = self._used, 0
        region = self._memory[:used]
        region.zero_()
        for start in range(0, used, _PIECE):
            if bool(region[start : start + _PIECE].any()):
                raise AuthenticationError(
                    f"scrubbing a buffer on {self._device}: expected zeros, got other bytes. Reset the device"
                )
        return used

    def _view(self, tensor: Any, start: int, length: int) -> Any:
        shape = dtypes.torch_shape(tensor.dtype, tensor.shape)
        return self._memory[start : start + length].view(dtypes.to_torch(tensor.dtype)).view(shape)

    def __repr__(self) -> str:
        return f"<DataBuffer of {self.size} bytes on {self._device}, {self._used} used>"


def find_places(file: SealedFile) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the start and the length of each tensor in a buffer, and the end of the last one, in bytes."""
    places, start, end = {}, 0, 0
    for name in file:
        length = file[name].nbytes
        places[name] = start, length
        end = start + length
        start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return places, end
