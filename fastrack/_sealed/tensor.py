"""`SealedTensor`, a sealed tensor in memory, and `SealedRows`, a handle on rows or on a box such as a shard."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastrack._crypto.base import HostMemory
from fastrack._crypto.gather import LazyRanges
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import Binding, Edition, MessageContext
from fastrack._sealed.file_header import encode_header
from fastrack._sealed.handle import Handle
from fastrack._sealed.indexing import Box, RowSelection, plan_rows
from fastrack._sealed.metadata import encode_fields, entry_of, read_contents
from fastrack._sealed.storage import Extent, Storage, StoredBytes, read_head
from fastrack._tensors import dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location
from fastrack._util.pickles import unpickle
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import FastrackError, FormatError, GrantError
from fastrack.format import HEADER_SIZE, message_size

Proof = tuple[bytes, bytes, Binding | None]
"""All values that authenticate the key of a message: its header, its encoded context, and its binding."""


@public
class SealedTensor(Handle):
    """Encrypted and authenticated tensor. It holds no secret, and can be stored and sent anywhere.

    `seal` and `load_file` make it. `to_bytes` and `from_bytes` store it. Pickle is for processes that trust each other:
    reading a pickle from anywhere else runs the code in it, before anything is authenticated.

    ``sealed[rows]`` is a handle (`SealedRows`) on rows along the first dimension, selected by an integer, a slice, an
    array of integers or a boolean mask. ``sealed[:, 2:4]`` selects along several dimensions, by integers and slices
    without a step. Opening a handle opens only the chunks that hold the selected part.

    Attributes
    ----------
    name : str
        Name of the tensor.
    dtype : str
        Element type by its safetensors name, such as ``"F32"``; equal to ``torch.float32``, ``numpy.float32`` and
        ``"float32"`` too, but hashed as its text: compare it, with a dtype of NumPy on the right.
    shape : tuple of int
        Shape of the tensor.
    ndim : int
        Number of its dimensions.
    nbytes : int
        Size of the plaintext in bytes.
    message : memoryview
        The Cobblestone message: header, then chunks.
    key_id : str
        Id of the key that opens it.
    path : pathlib.Path, URL or None
        File of the tensor, for error messages. It is not part of a pickle.
    scale : SealedTensor or None
        Scales of quantised values, of float32 or bfloat16, by which `to_device` widens them to bfloat16.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(6, dtype=np.int32).reshape(3, 2), key, name="x")
    >>> len(sealed.message)
    96
    >>> sealed[[2, 0]]
    <SealedRows of 'x' I32 [2, 2]>
    >>> copy = fastrack.SealedTensor.from_bytes(sealed.to_bytes())
    >>> fastrack.unseal(copy[[2, 0]], key, framework="numpy")
    array([[4, 5],
           [0, 1]], dtype=int32)
    """

    __slots__ = (
        "__weakref__",
        "_encoded_context",
        "_pinned_header",
        "_start",
        "_stop",
        "_storage",
        "binding",
        "context",
        "edition",
        "key_id",
        "nbytes",
        "path",
        "scale",
    )

    def __init__(
        self,
        context: MessageContext,
        message: Bytes | Extent,
        key_id: str,
        binding: Binding | None = None,
        path: Location | None = None,
        header: bytes | None = None,
        edition: Edition | None = None,
        scale: SealedTensor | None = None,
    ) -> None:
        if not isinstance(context, MessageContext):
            raise TypeError(
                f"SealedTensor: expected a context and a message, got {shown(context)}. Make one with "
                "seal(tensor, key, name)"
            )
        self.context = context
        self.scale = scale
        known = None if scale is None else scale.context
        if (known is not None or context.scale is not None) and known != context.scales:
            raise FormatError(
                f"tensor {context.name!r:.200}: expected the scales that it was sealed with, got others or none. "
                "Get both again from their owner"
            )
        self.edition = edition
        self._encoded_context: tuple[MessageContext, bytes] | None = None
        self._pinned_header = header
        self.path = path
        self.key_id = key_id
        self.binding = binding
        nbytes = self.nbytes = dtypes.nbytes(context.dtype, context.shape)
        if not isinstance(message, Extent):
            message = Extent(StoredBytes(message), 0, message.size)
        self._storage, start, stop = message
        self._start, self._stop = start, stop
        size = stop - start
        if size != message_size(nbytes):
            raise FormatError(
                f"tensor {context.name!r:.200} of {context.dtype} {list(context.shape)}: expected a message of "
                f"{message_size(self.nbytes)} bytes, got {size}; it was cut short or mislabelled. "
                "Get it again from its owner"
            )

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def dtype(self) -> dtypes.Dtype:
        return dtypes.DTYPES[self.context.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.context.shape

    @property
    def message(self) -> memoryview:
        return self.read_message(0, self.message_size).data.toreadonly()

    @property
    def header(self) -> bytes:
        """Header of the message, from the manifest if there is one, else from the file."""
        if self._pinned_header is not None:
            return self._pinned_header
        return self._storage.read(self._start, self._start + HEADER_SIZE)

    def proof(self) -> Proof:
        """Return all values that authenticate the key of the message: its header, its encoded context, its binding."""
        known, context = self._encoded_context, self.context
        if known is None or known[0] is not context:
            known = self._encoded_context = context, context.encode()
        header = self._pinned_header
        if header is None:
            header = self._storage.read(self._start, self._start + HEADER_SIZE)
        return header, known[1], self.binding

    @property
    def message_size(self) -> int:
        """Bytes of the message."""
        return self._stop - self._start

    @property
    def location(self) -> tuple[Storage, int]:
        """The storage of the message, and the start of the message in it."""
        return self._storage, self._start

    @property
    def chunks(self) -> Bytes:
        """Message without its header, as uint8 of one dimension."""
        return self._storage.view(self._start + HEADER_SIZE, self._stop)

    def read_message(self, start: int, stop: int) -> Bytes:
        """Return a part of the message, which begins with `header`."""
        first, last = self._start + start, min(self._start + stop, self._stop)
        part = self._storage.view(first, last)
        if self._pinned_header is None or start >= HEADER_SIZE:
            return part
        return np.concatenate((np.frombuffer(self._pinned_header[start:], np.uint8), part[HEADER_SIZE - start :]))

    @property
    def memory(self) -> HostMemory:
        """Memory of `chunks`."""
        return self._storage.memory(self._start + HEADER_SIZE, self._stop)

    def check_grant(self, key: Key) -> None:
        """Refuse a file, or a version of a set, outside the grant of the key."""
        if key.files is not None:
            file = self.context.file if self.binding is None else self.binding.file
            if file not in key.files:
                raise GrantError(
                    f"tensor {self.context.name!r:.200} is in file {file}, but key {key.id} was granted for other "
                    "files only; ask the owner for a grant that includes it"
                )
        if key.lineage is not None or key.least_version:
            lineage, version = self.edition or (None, 0)
            if lineage is None or lineage != (key.lineage or lineage) or version < key.least_version:
                got = "no anchor" if lineage is None else f"version {version} of lineage {lineage}"
                raise GrantError(
                    f"tensor {self.context.name!r:.200}: expected version {key.least_version} or later of "
                    f"{'a set' if key.lineage is None else f'lineage {key.lineage}'}, for which key {key.id} was "
                    f"granted, by an anchor, got {got}; open its file with anchor=, or ask the owner for another grant"
                )

    def add_path(self, error: FastrackError) -> None:
        """Add the path of the file to an error about this tensor."""
        if self.path is not None:
            error.path = self.path
            error.args = (f"{self.path}: {error}",)

    def to_bytes(self) -> bytes:
        """Return a sealed safetensors file that holds only this tensor. This needs no key.

        Returns
        -------
        bytes
            The message, after a header of some 600 bytes, and the message of its scales, if it has some. `from_bytes`
            and `load_file` read it.

        Raises
        ------
        ValueError
            If the tensor is part of a checkpoint.
        """
        context = self.context
        if context.kind != "tensor":
            raise ValueError(
                f"{context.name!r:.200} is part of a {context.kind}, and of no other file. Unseal it first"
            )
        tensors = [self] if self.scale is None else [self, self.scale]
        fields = encode_fields(context.file, self.key_id, {each.name: entry_of(each.context) for each in tensors})
        header = encode_header({each.name: ("U8", (each.message_size,)) for each in tensors}, fields, guarded=True)
        return b"".join((header, *(each.message for each in tensors)))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SealedTensor:
        """Read a file written by `to_bytes`. This runs no code, and decrypts and authenticates nothing.

        Parameters
        ----------
        data : bytes-like
            A sealed file that holds one tensor. It is copied.

        Raises
        ------
        FormatError
            If `data` is another file.
        """
        storage = StoredBytes(np.frombuffer(bytes(data), np.uint8))
        contents = read_contents(read_head(storage.read, storage.size), storage.size, Path("<bytes>"))
        plain = len(contents.stored) - len(contents.layouts)
        name, *others = sorted(contents.layouts, key=lambda name: contents.layouts[name].scale is None) or [""]
        scale = contents.layouts[name].scale if name else None
        if not name or others != ([scale.name] if scale else []) or plain or contents.kind != "tensor":
            raise FormatError(
                f"expected a sealed file of one tensor, got a {contents.kind} file of {len(contents.layouts)} sealed "
                f"and {plain} plain. Write it to disk, and open it with load_file or load_checkpoint"
            )
        key_id = contents.key_id
        assert key_id is not None

        def tensor(name: str, scale: SealedTensor | None = None) -> SealedTensor:
            context, binding = contents.context(name)
            extent = Extent(storage, *contents.stored[name][2:])
            return cls(context, extent, key_id, binding, Path("<bytes>"), scale=scale)

        return tensor(name, tensor(scale.name) if scale else None)

    def __getitem__(self, rows: Any) -> SealedRows:
        if isinstance(rows, tuple) or rows is Ellipsis:
            return select_slices(self, rows if isinstance(rows, tuple) else (rows,))
        return TensorRows(self, plan_rows(rows, self.shape, self.nbytes))

    def __iter__(self) -> Any:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SealedTensor {self.name!r} {self.dtype} {list(self.shape)} key {self.key_id[:8]}>"

    def __reduce__(self) -> tuple[object, ...]:
        message = bytes(self.message)
        more: tuple[object, ...] = self.edition, self.scale
        more = more[: 0 if more == (None, None) else 1 if self.scale is None else 2]
        return unpickle, ("SealedTensor", self.context, message, self.key_id, self.binding, *more)


set_up = SealedTensor.__init__.__wrapped__  # type: ignore[attr-defined]
"""Set up a new `SealedTensor`, without what explains arguments that do not fit: files have thousands of tensors."""


def restore_tensor(
    context: MessageContext,
    message: bytes,
    key_id: str,
    binding: Binding | None,
    edition: Edition | None = None,
    scale: SealedTensor | None = None,
) -> SealedTensor:
    """Return the tensor that a pickle describes."""
    return SealedTensor(context, np.frombuffer(message, np.uint8), key_id, binding, edition=edition, scale=scale)


def move_tensor(tensor: SealedTensor, storage: Storage) -> SealedTensor:
    """Return the tensor in another storage of its bytes."""
    start = tensor.location[1]
    message = Extent(storage, start, start + tensor.message_size)
    header = tensor._pinned_header  # noqa: SLF001 - of this module
    about = tensor.key_id, tensor.binding, tensor.path, header, tensor.edition, tensor.scale
    return SealedTensor(tensor.context, message, *about)


class MessageRanges(NamedTuple):
    """Part of a result that comes from one sealed tensor. `ranges` computes its byte ranges when it is called."""

    tensor: SealedTensor
    ranges: LazyRanges


@public
class SealedRows(Handle):
    """Handle on rows of sealed tensors that are not opened yet.

    ``sealed[rows]``, `SealedDataset` and `collate` make it; `to_device` and `unseal` open it. Rows of a sealed tensor
    can be indexed again, as ``sealed[:10][2]``.

    Attributes
    ----------
    name : str
        Name of the tensor; of the first, if there are several.
    dtype : str
        Element type, as of `SealedTensor`.
    shape : tuple of int
        Shape of the result.
    ndim : int
        Number of its dimensions.
    nbytes : int
        Size of the result in bytes.
    key_id : str
        Id of the key that opens it; of the first tensor's key, if there are several.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> rows = fastrack.seal(np.arange(10, dtype=np.uint8), key, name="x")[2:5]
    >>> rows
    <SealedRows of 'x' U8 [3]>
    >>> fastrack.unseal(rows, key, framework="numpy")
    array([2, 3, 4], dtype=uint8)
    """

    __slots__ = ("_dtype", "key_id", "name")

    name: str
    _dtype: str  # its text
    key_id: str
    needs_padding = False
    """True if the result has padding, which must be zeros."""

    @property
    def dtype(self) -> dtypes.Dtype:
        return dtypes.DTYPES[self._dtype]

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self._dtype, self.shape)

    def select(self, keys: KeyRing) -> Sequence[MessageRanges]:
        """Return `slices`, after `check_contexts` has authenticated their shapes."""
        self.check_contexts(keys)
        return self.slices()

    def slices(self) -> Sequence[MessageRanges]:
        """Return the slices of the result, one for each message. Their byte ranges are computed later."""
        raise NotImplementedError

    def check_contexts(self, keys: KeyRing) -> None:
        """Authenticate the shapes of further tensors that determine the selection of rows.

        An altered file of a dataset could otherwise drop or renumber the samples of other files.
        """

    def __repr__(self) -> str:
        return f"<SealedRows of {self.name!r} {self.dtype} {list(self.shape)}>"


class TensorRows(SealedRows):
    """Handle on rows of one sealed tensor, or on a box of it."""

    __slots__ = ("_plan", "_tensor")

    def __init__(self, tensor: SealedTensor, plan: RowSelection | Box) -> None:
        self.name = tensor.context.name
        self._dtype = tensor.context.dtype
        self.key_id = tensor.key_id
        self._tensor = tensor
        self._plan = plan

    @classmethod
    def of(cls, tensor: SealedTensor) -> TensorRows:
        """Return a handle on a whole tensor of any shape."""
        return cls(tensor, RowSelection(tensor.shape, tensor.nbytes, range(1)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._plan.shape

    def slices(self) -> Sequence[MessageRanges]:
        return (MessageRanges(self._tensor, self._plan.ranges),)

    def __getitem__(self, rows: Any) -> TensorRows:
        return TensorRows(self._tensor, self._plan.select(rows))

    def __reduce__(self) -> tuple[object, ...]:
        if isinstance(self._plan, Box):
            return unpickle, ("TensorBox", self._tensor, self._plan.offsets, self._plan.sizes, self._plan.shape)
        return unpickle, ("TensorRows", self._tensor, self._plan)


def select_slices(tensor: SealedTensor, index: tuple[Any, ...]) -> SealedRows:
    """Return the part of a tensor at an index of integers and slices of step 1, like NumPy.

    Raise IndexError if the index does not fit the tensor, and TypeError for other kinds of NumPy indices.
    """
    count = sum(item is Ellipsis for item in index)
    missing = len(tensor.shape) - len(index) + count
    if count > 1 or missing < 0:
        raise IndexError(
            f"index of tensor {tensor.name!r:.200}: expected at most {len(tensor.shape)} dimensions, and ... once, got "
            f"{shown(index, 100)}"
        )
    split = next((number for number, item in enumerate(index) if item is Ellipsis), len(index))
    whole = (slice(None),) * missing
    ranges, kept = [], []
    for item, extent in zip(index[:split] + whole + index[split + 1 :], tensor.shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(extent)
            if step != 1:
                raise TypeError(f"index of tensor {tensor.name!r:.200}: expected slices of step 1, got {shown(item)}")
            ranges.append((start, max(stop - start, 0)))
            kept.append(ranges[-1][1])
            continue
        if isinstance(item, bool) or not hasattr(item, "__index__") or getattr(item, "shape", ()) != ():
            raise TypeError(f"index of tensor {tensor.name!r:.200}: expected integers and slices, got {shown(item)}")
        row = operator.index(item)
        if not -extent <= row < extent:
            raise IndexError(f"index {row} of tensor {tensor.name!r:.200} is out of range: {extent} are there")
        ranges.append((row % extent, 1))
    offsets, sizes = tuple(offset for offset, _ in ranges), tuple(size for _, size in ranges)
    require_whole_bytes(tensor)
    return restore_box(tensor, offsets, sizes, tuple(kept))


def require_whole_bytes(tensor: SealedTensor) -> None:
    """Refuse to select parts of a tensor whose elements are smaller than a byte."""
    if dtypes.BITS[tensor.dtype] % 8:
        raise TypeError(
            f"part of tensor {tensor.name!r:.200}: expected elements of whole bytes, got {tensor.dtype}. Open it whole"
        )


def restore_box(
    tensor: SealedTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> TensorRows:
    """Return the part of a tensor that a pickle describes."""
    return TensorRows(tensor, Box(offsets, sizes, tensor.shape, dtypes.BITS[tensor.dtype] // 8, shape))
