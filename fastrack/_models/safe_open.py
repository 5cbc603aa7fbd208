"""`safe_open` and `load_tensors`: sealed files for programs that were written for safetensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypedDict, Unpack, overload

from fastrack._devices import canonical
from fastrack._files.reader import SealedFile
from fastrack._files.writer import Progress
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._models.lazy_weights import SealedWeight, lazy_weights
from fastrack._models.mapped_pages import in_parts, open_once
from fastrack._models.progress import reported
from fastrack._sealed.scales import WIDENED
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._sets.folder import is_widened
from fastrack._sets.load_file import load_file
from fastrack._tensors import dtypes
from fastrack._tensors.arrays import Array, Framework
from fastrack._transfer.prefetch import Plan, PrefetchLoader, TensorMeta
from fastrack._util.public import explained, public
from fastrack._util.shown import list_names, shown
from fastrack.errors import FormatError

if TYPE_CHECKING:
    import torch

    from fastrack._sets.anchor import Anchor

_FRAMEWORKS: Final[dict[str, Framework]] = {
    "pt": "torch",
    "torch": "torch",
    "pytorch": "torch",
    "np": "numpy",
    "numpy": "numpy",
    "cupy": "cupy",
}


class _Options(TypedDict, total=False):
    keys: KeySource | None
    anchor: Anchor | str | os.PathLike[str] | None
    dtype: object
    progress: Progress | bool | None


@overload
def load_tensors(
    path: str | os.PathLike[str],
    device: object = None,
    *,
    framework: Literal["pt", "torch", "pytorch"] | None = None,
    **options: Unpack[_Options],
) -> dict[str, torch.Tensor]: ...
@overload
def load_tensors(
    path: str | os.PathLike[str],
    device: object = None,
    *,
    framework: Literal["np", "numpy"],
    **options: Unpack[_Options],
) -> dict[str, Array]: ...
@overload
def load_tensors(
    path: str | os.PathLike[str], device: object = None, *, framework: str | None = None, **options: Unpack[_Options]
) -> dict[str, Any]: ...
@public
def load_tensors(
    path: str | os.PathLike[str],
    device: object = None,
    *,
    keys: KeySource | None = None,
    framework: str | None = None,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    dtype: object = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Open all sealed tensors of a file on a device, like ``load_file`` of safetensors: on a GPU in one transfer.

    Parameters
    ----------
    path : path
        The sealed file.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : KeySource, optional
        As for `to_device`.
    framework : {"pt", "torch", "np", "numpy", "cupy"}, optional
        As for `safe_open`.
    anchor : Anchor or path, optional
        As for `load_file`.
    dtype : torch.dtype or str, optional
        As for `to_device`. With it the scales of quantised values are left out.
    progress : callable or bool, optional
        Called with the number of bytes that were opened since, after each part of a load into host memory, and once on
        a GPU. By default a load of more than a second shows that in a line on a terminal, on stderr. False, or
        ``FASTRACK_PROGRESS=0`` in the environment, shows nothing.

    Returns
    -------
    dict of str to array
        The tensors by their names. Unencrypted tensors of the file are left out.

    Raises
    ------
    AuthenticationError, UnknownKeyError, DeviceError, TypeError
        As from `to_device`.
    ValueError
        If `framework` is unknown.
    FormatError
        If nothing in the file is sealed, if it is a checkpoint, or as from `load_file`.
    RollbackError, SignatureError, OSError
        As from `load_file`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(3), "y": np.ones(2)}, "data.safetensors", key)
    >>> fastrack.load_tensors("data.safetensors", keys=key, framework="numpy")
    {'x': array([0, 1, 2]), 'y': array([1., 1.])}
    """
    with safe_open(path, framework, device, keys=keys, anchor=anchor, dtype=dtype) as reader:
        file = reader._source.file  # noqa: SLF001 - of this module
        if not file and file.names:
            raise FormatError(
                f"{file.path}: expected sealed tensors, got only unencrypted ones. `fastrack seal` seals a file; "
                "load_file(path).plain reads it as it is"
            )
        nbytes = sum(reader._source.tensors[name].nbytes for name in reader.offset_keys())  # noqa: SLF001
        with reported(nbytes, progress) as advance:
            return reader._get_tensors(advance)  # noqa: SLF001 - of this module


class Source(NamedTuple):
    """A sealed file that a reader reads, the tensors of it that are asked for by their names, and what opens these.

    Attributes
    ----------
    file : which the reader closes
    tensors : in the order of the file. Those whose scales are not among them open as their product with these
    metadata : of the file before it was sealed
    transfer : like `to_device`, with keys
    dtype : of what it opens, as for `to_device`. With it `offset_keys` leaves out scales
    is_lazy : whether slices for torch open where they go to
    """

    file: SealedFile
    tensors: Mapping[str, SealedTensor]
    metadata: Mapping[str, str]
    transfer: Callable[..., Any]
    dtype: object = None
    is_lazy: bool = False


def require_tensors(file: SealedFile) -> None:
    """Refuse a sealed file of another kind, whose tensors are named by numbers."""
    if file.kind != "tensor":
        raise FormatError(f"{file.path}: expected a file of tensors, got a {file.kind}. Open it with load_{file.kind}")


@public
class safe_open:  # noqa: N801 - the name that safetensors gave it
    """Sealed file with the methods of ``safetensors.safe_open``: tensors and slices are opened as asked.

    Parameters
    ----------
    filename : path
        The sealed file. Only its header is read.
    framework : {"pt", "torch", "np", "numpy", "cupy"}, optional
        Framework of the tensors. By default torch if it is installed, else numpy.
    device : str or torch.device, optional
        "cpu", the default, or "cuda:N".
    keys : KeySource, optional
        As for `to_device`. The defaults are looked up when the first tensor is opened.
    anchor : Anchor or path, optional
        As for `load_file`.
    dtype : torch.dtype or str, optional
        As for `to_device`. With it the scales of quantised values are left out.

    Raises
    ------
    ValueError
        If `framework` is unknown.
    DeviceError
        If the kind of `device` is unknown.
    FormatError, RollbackError, SignatureError, OSError
        As from `load_file`.

    Notes
    -----
    Names, shapes and dtypes are unauthenticated claims of the file until a tensor is opened. Unencrypted tensors are
    left out. `load_file` returns handles instead, which travel in batches; one call opens several.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(6).reshape(3, 2)}, "data.safetensors", key, metadata={"format": "np"})
    >>> with fastrack.safe_open("data.safetensors", framework="np", keys=key) as file:
    ...     print(file.keys(), file.metadata())
    ...     x = file.get_tensor("x")
    ...     part = file.get_slice("x")
    ...     print(part.get_shape(), part.get_dtype(), part[1:].tolist())
    ['x'] {'format': 'np'}
    [3, 2] I64 [[2, 3], [4, 5]]
    >>> x.tolist()
    [[0, 1], [2, 3], [4, 5]]
    """

    @explained
    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str | None = None,
        device: object = None,
        *,
        keys: KeySource | None = None,
        anchor: Anchor | str | os.PathLike[str] | None = None,
        dtype: object = None,
    ) -> None:
        kind, target = framework_of(framework), canonical(device)
        transfer = partial(open_once, keys=None if keys is None else KeyRing.resolve(keys))
        file = load_file(filename, anchor=anchor)
        require_tensors(file)
        self._read(Source(file, file, file.metadata, transfer, dtype), kind, target)

    def _read(self, source: Source, framework: Framework | None, device: str) -> None:
        self._source, self._framework, self._device = source, framework, device
        is_lazy = source.is_lazy and framework in {None, "torch"}
        self._weights = lazy_weights(source.tensors, source.transfer, device) if is_lazy else None
        self._metas: dict[str, TensorMeta] | None = None

    def keys(self) -> list[str]:
        """Return the names of the sealed tensors, in alphabetical order."""
        return sorted(self.offset_keys())

    def offset_keys(self) -> list[str]:
        """Return the names of the sealed tensors, in the order of the file."""
        tensors, dtype = self._source.tensors, self._source.dtype
        scales = () if dtype is None else {each.scale.name for each in tensors.values() if each.scale is not None}
        return [name for name in tensors if name not in scales]

    def metadata(self) -> dict[str, str] | None:
        """Return the owner's metadata of the file, None without any. It is neither encrypted nor authenticated."""
        return dict(self._source.metadata) or None

    def get_tensor(self, name: str) -> Any:
        """Open a tensor on the device."""
        tensor = self._source.tensors[name]
        return self._open(tensor, self._dtype_of(tensor))

    def get_tensors(self) -> dict[str, Any]:
        """Open all sealed tensors on the device: on a GPU in one transfer, a large file in host memory in parts."""
        return self._get_tensors(lambda _: None)

    def _get_tensors(self, advance: Progress) -> dict[str, Any]:
        names, groups = self.offset_keys(), dict[object, dict[str, SealedTensor]]()
        for name in names:
            tensor = self._source.tensors[name]
            groups.setdefault(self._dtype_of(tensor), {})[name] = tensor
        opened: dict[str, Any] = {}
        for dtype, group in groups.items():
            for part in in_parts(list(group), self._device, group.__getitem__):
                opened |= self._open({name: group[name] for name in part}, dtype)
                advance(sum(group[name].nbytes for name in part))
        return {name: opened[name] for name in names}

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return dtype, shape and offsets of a tensor, from only the header, like safetensors 0.9."""
        if self._metas is None:
            self._metas, start = {}, 0
            for each in self.offset_keys():
                tensor = self._source.tensors[each]
                dtype = WIDENED if is_widened(tensor, self._source.tensors) else tensor.dtype
                stop = start + dtypes.nbytes(dtype, tensor.shape)
                self._metas[each] = TensorMeta(dtype, list(tensor.shape), (start, stop))
                start = stop
        if name not in self._metas:
            raise KeyError(f"{self._source.file.path}: tensor {shown(name)}: {list_names(name, self._metas)}")
        return self._metas[name]

    def prefetch(self, plan: Plan | None = None, *, device: object = None, threads: int = 8) -> PrefetchLoader[str]:
        """Open tensors in the background, ahead of their use, like safetensors 0.9, and on any device.

        Each is handed out once, by ``take(name)`` or by iterating over names and tensors. 64 MiB are open ahead.

        Parameters
        ----------
        plan : mapping of str to slice or None, optional
            The names of the tensors, each with a slice of its rows, or None for the whole. All tensors by default.
        device : str or torch.device, optional
            The device; that of the file by default.
        threads : int
            As safetensors takes it, without effect: one thread opens, with all cores for each tensor.
        """
        names = self.offset_keys()
        wanted = dict.fromkeys(names) if plan is None else dict(plan)
        sealed = {name: self._source.tensors[name] for name in wanted}
        places = {name: place for place, name in enumerate(names)}
        ordered = sorted(sealed, key=lambda name: places.get(name, len(places)))  # scales come last, if asked for
        target = self._device if device is None else canonical(f"cuda:{device}" if isinstance(device, int) else device)
        parts = {name: sealed[name] if (rows := wanted[name]) is None else sealed[name][rows] for name in ordered}

        def open_part(part: SealedTensor | SealedRows) -> Any:
            return self._open(part, self._dtype_of(sealed[part.name]), target)

        return PrefetchLoader(parts, open_part)

    def get_slice(self, name: str) -> Slice | SealedWeight:
        """Return a slice object for a tensor. Indexing it opens a part, out of only the part's chunks.

        It has ``get_shape()`` and ``get_dtype()``, and takes the indices of `SealedTensor`, or ``...`` for the whole
        tensor.
        """
        if self._weights is not None:
            part: SealedWeight = self._weights[name][...]
            return part
        return Slice(partial(self._open, dtype=self._source.dtype), self._source.tensors[name])

    def _dtype_of(self, tensor: SealedTensor) -> object:
        return WIDENED if is_widened(tensor, self._source.tensors) else self._source.dtype

    def _open(self, sealed: Any, dtype: object, device: str | None = None) -> Any:
        return self._source.transfer(sealed, device or self._device, framework=self._framework, dtype=dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.file.close()

    def __repr__(self) -> str:
        return f"<safe_open of {self._source.file!r} on {self._device}>"


def read_source(source: Source, framework: Framework | None, device: str) -> safe_open:
    """Return a reader of tensors that are open as sealed ones."""
    reader = safe_open.__new__(safe_open)
    reader._read(source, framework, device)  # noqa: SLF001 - of this module
    return reader


class Slice:
    """Tensor of an open file. Indexing it opens the part that is asked for."""

    __slots__ = ("_open", "_sealed")

    def __init__(self, open_part: Callable[[Any], Any], sealed: SealedTensor) -> None:
        self._open = open_part
        self._sealed = sealed

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._sealed.shape)

    def get_dtype(self) -> str:
        """Return the dtype of the tensor, by its safetensors name."""
        return self._sealed.dtype

    def __getitem__(self, index: Any) -> Any:
        return self._open(self._sealed if index is Ellipsis else self._sealed[index])


def framework_of(name: str | None) -> Framework | None:
    """Return a framework by its name here or in safetensors."""
    if name is not None and name not in _FRAMEWORKS:
        raise ValueError(f"framework=: expected one of {', '.join(_FRAMEWORKS)}, got {shown(name, 40)}")
    return None if name is None else _FRAMEWORKS[name]
