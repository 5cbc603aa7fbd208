"""Sealed tensors in memory: `seal`, `unseal`, `SealedTensor` and handles on rows, `SealedRows`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.base import HostMemory
from fastrack._crypto.cobblestone import HEADER_SIZE, MessageKey
from fastrack._crypto.engine import get_engine
from fastrack._crypto.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._crypto.keys import Key
from fastrack._sealed.contexts import Binding, Edition, MessageContext, new_file_id
from fastrack._sealed.fetching import fetch, fetch_headers, fetch_range
from fastrack._sealed.handle import NOT_OPEN, Handle
from fastrack._sealed.indexing import LazyRanges, RowPlan, plan_rows
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.storage import Extent, Storage, StoredBytes
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes, Framework
from fastrack._tensors.sharded import is_sharded, named_part
from fastrack._util.locations import Location
from fastrack._util.pickles import unpickle
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FastrackError, FormatError, GrantError, UnknownKeyError


@public
def seal(tensor: Any, key: KeyLike | None = None, name: str = "tensor") -> SealedTensor:
    """Encrypt a tensor under a key, and bind it to its name, dtype and shape.

    Of a DTensor, as in a module that ``fully_shard`` has sharded, each process seals the part that it has, and nothing
    is sent. The name has the place of the part in the whole: ``w[256:512, 0:64]``.

    Parameters
    ----------
    tensor : numpy.ndarray or torch.Tensor
        Tensor of any shape in host memory, of any dtype that safetensors has.
    key : KeyLike, optional
        The owner's key, or its key file, or a provider of one; by default that of `use_keys` or of
        ``FASTRACK_KEY_FILE``, as `KeyRing` says. 256 bits mean Cobblestone-256, 128 bits Cobblestone-128.
    name : str
        Name of the tensor. It is authenticated.

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
        If `tensor` is a DTensor with partial sums, or of which a process has no single range along each dimension.

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
    """
    key = sealing_key(key)
    if is_sharded(tensor):
        tensor, name = named_part(tensor, name)
    dtype, shape = arrays.describe(tensor)
    plain = arrays.bytes_of(tensor)
    context = MessageContext(name, dtype, shape, new_file_id())
    message = arrays.empty_bytes(cobblestone.message_size(plain.size))
    engine = get_engine()
    message_key, message[:HEADER_SIZE] = context.new_key(key)
    schedule = engine.expand_key(message_key)
    try:
        engine.seal_run(schedule, plain, message[HEADER_SIZE:], 0)
    finally:
        schedule.wipe()
        message_key.wipe()
    message.flags.writeable = False
    return SealedTensor(context, message, key.id)


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
        that `KeyRing` takes. By default those of `use_keys`, else those that ``FASTRACK_KEY_FILE`` names.
    framework : {"torch", "numpy"}, optional
        Framework of the result. By default torch if it is installed, else numpy.

    Returns
    -------
    torch.Tensor or numpy.ndarray
        Array of the sealed shape and dtype.

    Raises
    ------
    AuthenticationError
        If the key is another one, or anything was altered. No plaintext is returned then.
    UnknownKeyError
        If the key that sealed it is not among `keys`.
    TypeError
        If `sealed` is neither of these types, or `framework` lacks its dtype.
    ModuleNotFoundError
        If `framework` is torch, which is not installed.

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
    ring = KeyRing.resolve(keys)
    if isinstance(sealed, SealedRows):
        return _unseal_rows(sealed, ring, framework)
    with OpenMessage(sealed, ring) as opened:
        memory = arrays.empty_bytes(sealed.nbytes)
        result = arrays.from_bytes(memory, sealed.dtype, sealed.shape, framework)
        opened.read(memory)
    return result


def _advise_unseal(given: object) -> str:
    if isinstance(given, (str, os.PathLike)):
        return "Open the tensors of a file with load_tensors"
    if isinstance(given, (bytes, bytearray, memoryview)):
        return "Read a tensor that was stored as bytes with SealedTensor.from_bytes"
    return "Open pytrees with to_device" if isinstance(given, (Mapping, list, tuple)) else "Seal it first"


def _unseal_rows(rows: SealedRows, keys: KeyRing, framework: Framework) -> Any:
    """Decrypt rows. All headers are authenticated before anything of the size that they claim is done."""
    rows.check_contexts(keys)
    with ExitStack() as stack:
        parts = rows.slices()
        fetched = fetch_headers(tensor for tensor, _ in parts)
        opened = [(stack.enter_context(OpenMessage(tensor, keys)), ranges) for tensor, ranges in parts]
        fetched = None if fetched is None else fetch(parts)
        memory = arrays.empty_bytes(rows.nbytes)
        result = arrays.from_bytes(memory, rows.dtype, rows.shape, framework)
        try:
            if rows.needs_padding:
                memory.fill(0)
            for message, ranges in opened:
                message.gather(ranges(), memory)
        except BaseException:
            memory.fill(0)
            raise
        del fetched  # which was needed until now
    return result


@public
class SealedTensor(Handle):
    """Encrypted and authenticated tensor. It holds no secret, and can be stored and sent anywhere.

    `seal` and `load_file` make it. `to_bytes` and `from_bytes` store it. Pickle is for processes that trust each other:
    reading a pickle from anywhere else runs the code in it, before anything is authenticated.

    ``sealed[rows]`` is a handle (`SealedRows`) on rows along the first dimension, selected by an integer, a slice, an
    array of integers or a boolean mask. ``sealed[:, 2:4]`` selects along several dimensions, by integers and slices
    without a step. Opening it opens only the chunks that hold those rows or that part.

    Attributes
    ----------
    name : str
        Name of the tensor.
    dtype : str
        Element type by its safetensors name, such as ``"F32"``.
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
        File that it was taken from, for errors to name. It is not part of a pickle.

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
    ) -> None:
        self.context = context
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
        if size != cobblestone.message_size(nbytes):
            raise FormatError(
                f"tensor {context.name!r:.200} of {context.dtype} {list(context.shape)}: expected a message of "
                f"{cobblestone.message_size(self.nbytes)} bytes, got {size}; it was cut short or mislabelled. "
                "Get it again from its owner"
            )

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def dtype(self) -> str:
        return self.context.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.context.shape

    @property
    def message(self) -> memoryview:
        return self.read_message(0, self.message_size).data.toreadonly()

    @property
    def header(self) -> bytes:
        """Header of the message; that of the manifest if there is one, whatever is in the file by now."""
        if self._pinned_header is not None:
            return self._pinned_header
        return self._storage.read(self._start, self._start + HEADER_SIZE)

    @property
    def encoded_context(self) -> bytes:
        """Context string of the key derivation, which is made once for a context."""
        kept, context = self._encoded_context, self.context
        if kept is None or kept[0] is not context:
            kept = self._encoded_context = context, context.encode()
        return kept[1]

    @property
    def message_size(self) -> int:
        """Bytes of the message."""
        return self._stop - self._start

    @property
    def origin(self) -> tuple[Storage, int]:
        """The storage of the message, and where in it the message begins."""
        return self._storage, self._start

    @property
    def chunks(self) -> Bytes:
        """Message without its header, as uint8 of one dimension."""
        return self._storage.view(self._start + HEADER_SIZE, self._stop)

    def read_message(self, start: int, stop: int) -> Bytes:
        """Return a part of the message, which begins with `header`."""
        first, last = self._start + start, min(self._start + stop, self._stop)
        fetched = fetch_range(self._storage, first, last)
        part = self._storage.view(first, last)
        del fetched  # which was needed until the view was there
        if self._pinned_header is None or start >= HEADER_SIZE:
            return part
        return np.concatenate((np.frombuffer(self._pinned_header[start:], np.uint8), part[HEADER_SIZE - start :]))

    @property
    def memory(self) -> HostMemory:
        """The same, for native code."""
        return self._storage.memory(self._start + HEADER_SIZE, self._stop)

    def open_header(self, keys: KeyRing) -> MessageKey:
        """Return the message key, after the header and the binding, if there is one, were authenticated."""
        try:
            key = keys[self.key_id]
            self.check_origin(key)
            return self._open_header(key)
        except (AuthenticationError, GrantError, UnknownKeyError) as error:
            self.add_path(error)
            raise

    def _open_header(self, key: Key) -> MessageKey:
        try:
            return self.context.open_header(self.header, key)
        except AuthenticationError:
            fetched = fetch_range(self._storage, self._start, self._start + HEADER_SIZE)
            if fetched is None or self._pinned_header is not None:
                raise
            fetched.fetch_again()
            return self.context.open_header(self.header, key)

    def check_origin(self, key: Key) -> None:
        """Authenticate the binding, if there is one, and refuse a file that the key was not granted for."""
        if key.is_restricted:
            self.check_grant(key)
        if self.binding is not None:
            self.binding.check(self.context, key)

    def check_grant(self, key: Key) -> None:
        """Refuse a file or a version of a set that the key was not granted for."""
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
        """Return a sealed safetensors file that holds this tensor alone. This takes no key.

        Returns
        -------
        bytes
            The message, after a header of some 400 bytes. `from_bytes` and `load_file` read it.

        Raises
        ------
        ValueError
            If the tensor is part of a checkpoint.
        """
        from fastrack._sealed.writer import encode_one_tensor

        return encode_one_tensor(self)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SealedTensor:
        """Read a file written by `to_bytes`. Nothing of it is run, decrypted or authenticated before it is opened.

        Parameters
        ----------
        data : bytes-like
            A sealed file that holds one tensor. It is copied.

        Raises
        ------
        FormatError
            If `data` is not such a file.
        """
        from fastrack._sealed.reader import read_one_tensor

        return read_one_tensor(bytes(data))

    def __getitem__(self, rows: Any) -> SealedRows:
        if isinstance(rows, tuple) or rows is Ellipsis:
            from fastrack._sealed.boxes import select_slices

            return select_slices(self, rows if isinstance(rows, tuple) else (rows,))
        return TensorRows(self, plan_rows(rows, self.shape, self.nbytes))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len(): expected one dimension or more, got {self!r}, {NOT_OPEN}")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SealedTensor {self.name!r} {self.dtype} {list(self.shape)} key {self.key_id[:8]}>"

    def __reduce__(self) -> tuple[object, ...]:
        message = bytes(self.message)
        anchored = () if self.edition is None else (self.edition,)
        return unpickle, ("SealedTensor", self.context, message, self.key_id, self.binding, *anchored)


def restore_tensor(
    context: MessageContext, message: bytes, key_id: str, binding: Binding | None, edition: Edition | None = None
) -> SealedTensor:
    """Return the tensor that a pickle describes."""
    return SealedTensor(context, np.frombuffer(message, np.uint8), key_id, binding, edition=edition)


class TensorSlice(NamedTuple):
    """Part of a result that comes from one sealed tensor. `ranges` computes its byte ranges when it is called."""

    tensor: SealedTensor
    ranges: LazyRanges


@public
class SealedRows(Handle):
    """Handle on rows of sealed tensors, none of which is opened yet.

    ``sealed[rows]``, `SealedDataset` and `collate` make it; `to_device` and `unseal` open it. Rows of a sealed tensor
    can be indexed again, as ``sealed[:10][2]``.

    Attributes
    ----------
    name : str
        Name of the tensor; of the first, if there are several.
    dtype : str
        Element type by its safetensors name.
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

    __slots__ = ("dtype", "key_id", "name")

    name: str
    dtype: str
    key_id: str

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.dtype, self.shape)

    @property
    def needs_padding(self) -> bool:
        """True if the slices leave bytes of the result that must be zeros."""
        return False

    def slices(self) -> Sequence[TensorSlice]:
        """Return the slices of the result, one for each message. Their byte ranges are computed later."""
        raise NotImplementedError

    def check_contexts(self, keys: KeyRing) -> None:
        """Authenticate the shapes that the selection of rows depends on, beside those of the tensors in `slices`.

        Samples may be missing or have other numbers if a file of the same data set was altered.
        """

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len(): expected one dimension or more, got {self!r}, {NOT_OPEN}")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<SealedRows of {self.name!r} {self.dtype} {list(self.shape)}>"


class TensorRows(SealedRows):
    """Handle on rows of one sealed tensor."""

    __slots__ = ("_plan", "_tensor")

    def __init__(self, tensor: SealedTensor, plan: RowPlan) -> None:
        self.name = tensor.context.name
        self.dtype = tensor.context.dtype
        self.key_id = tensor.key_id
        self._tensor = tensor
        self._plan = plan

    @classmethod
    def of(cls, tensor: SealedTensor) -> TensorRows:
        """Return a handle on a whole tensor of any shape."""
        return cls(tensor, RowPlan(tensor.shape, tensor.nbytes, range(1)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._plan.shape

    def slices(self) -> Sequence[TensorSlice]:
        return (TensorSlice(self._tensor, self._plan.ranges),)

    def __getitem__(self, rows: Any) -> TensorRows:
        return TensorRows(self._tensor, self._plan.select(rows))

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("TensorRows", self._tensor, self._plan)
