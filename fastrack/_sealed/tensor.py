"""Sealed tensors in memory: `seal`, `unseal`, and the handles `SealedTensor` and `SealedRows`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Self

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto import engine as aead
from fastrack._crypto.base import GatherPlan
from fastrack._crypto.cobblestone import HEADER_SIZE, SALT_SIZE, MessageKey
from fastrack._crypto.keys import Key, KeyLike, KeyRing, KeySource
from fastrack._sealed.indexing import ByteRanges, RowPlan, plan_rows
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes, Framework
from fastrack._util.pickles import unpickle
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError, UnknownKeyError

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
Kind = Literal["tensor", "checkpoint"]
"""The use that a message was sealed for, and the first part of its context."""


@public
def seal(tensor: Any, key: KeyLike, name: str = "tensor") -> SealedTensor:
    """Encrypt a tensor for the holders of `key`, and bind it to its name, dtype and shape.

    Parameters
    ----------
    tensor : numpy.ndarray or torch.Tensor
        In host memory, of any dtype that safetensors has.
    key : Key or path
        The owner's key. 256 bits mean Cobblestone-256, 128 bits Cobblestone-128.
    name : str
        What the tensor is called. Part of what is authenticated.

    Returns
    -------
    SealedTensor
        Of 56 bytes more than the tensor, and 16 for each 16 KiB of it. Can be stored, sent and shown to anyone;
        `SealedTensor.to_bytes` and `save_file` write it.

    Raises
    ------
    TypeError
        If it is no tensor in host memory, or its dtype has no safetensors name.
    """
    key = Key.of(key)
    dtype, shape = arrays.describe(tensor)
    plain = arrays.bytes_of(tensor)
    context = MessageContext(name, dtype, shape, new_file_id())
    message = arrays.empty_bytes(cobblestone.message_size(plain.size))
    engine = aead.get_engine()
    salt, message_key = context.new_key(key)
    schedule = engine.expand_key(message_key)
    try:
        engine.seal_run(schedule, plain, message[HEADER_SIZE:], 0)
    finally:
        schedule.wipe()
        message_key.wipe()
    write_header(message, salt, message_key)
    message.flags.writeable = False
    return SealedTensor(context, message, key.id)


@public
def unseal(
    sealed: SealedTensor | SealedRows, keys: KeySource | None = None, *, framework: Framework | None = None
) -> Any:
    """Authenticate and decrypt a sealed tensor, or rows of one, into host memory.

    This is the deliberate way to plaintext on the host; `to_device` is the way to a device.

    Parameters
    ----------
    sealed : SealedTensor or SealedRows
        What to open.
    keys : Key, path or iterable of these, optional
        Where the tensor's key is looked for. Absent, the environment variable ``FASTRACK_KEY_FILE`` names a key file.
    framework : {"torch", "numpy"}, optional
        What the result is an array of: torch if it is installed, else numpy.

    Raises
    ------
    AuthenticationError
        If the key is another one, or anything was altered. Nothing is returned then.
    UnknownKeyError
        If the key that sealed it is not among `keys`.
    TypeError
        If it is not sealed, or `framework` has no such dtype.
    """
    if not isinstance(sealed, (SealedTensor, SealedRows)):
        raise TypeError(f"expected a sealed tensor or rows of one, not {type(sealed).__name__}, which nobody sealed")
    framework = framework or arrays.default_framework()
    ring = KeyRing.resolve(keys)
    if isinstance(sealed, SealedRows):
        return _unseal_rows(sealed, ring, framework)
    with OpenMessage(sealed, ring) as opened:
        memory = arrays.empty_bytes(sealed.nbytes)
        result = arrays.from_bytes(memory, sealed.dtype, sealed.shape, framework)
        opened.read(memory)
    return result


def _unseal_rows(rows: SealedRows, keys: KeyRing, framework: Framework) -> Any:
    """Open rows: all headers first, as the memory and the plans are of the size that these authenticate."""
    rows.check_contexts(keys)
    with ExitStack() as stack:
        opened = [(stack.enter_context(OpenMessage(tensor, keys)), ranges) for tensor, ranges in rows.slices()]
        memory = arrays.empty_bytes(rows.nbytes)
        result = arrays.from_bytes(memory, rows.dtype, rows.shape, framework)
        try:
            if rows.needs_padding:
                memory.fill(0)
            for message, ranges in opened:
                message.gather(ranges().pieces(), memory)
        except BaseException:
            memory.fill(0)
            raise
    return result


@dataclass(frozen=True, slots=True)
class MessageContext:
    """What a message claims to be; its key is derived from this, so a false claim fails before a chunk is opened."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    kind: Kind = "tensor"

    def encode(self) -> bytes:
        """Return the bytes that bind a message to its claim: a label with its kind, and canonical JSON.

        Raises
        ------
        TypeError, FormatError
            If the name is no text, or none that Unicode can encode.
        """
        if not isinstance(self.name, str):
            raise TypeError(f"a tensor's name must be text, not {self.name!r}")
        fields = {"dtype": self.dtype, "file": self.file, "name": self.name, "shape": list(self.shape)}
        try:
            return f"fastrack/{self.kind}@1\0{_CANONICAL.encode(fields)}".encode()
        except UnicodeEncodeError:
            raise FormatError(f"a tensor's name must be Unicode text, not {self.name!r}") from None

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("MessageContext", self.name, self.dtype, self.shape, self.file, self.kind)

    def new_key(self, key: Key) -> tuple[bytes, MessageKey]:
        """A fresh salt and the message key that follows from it."""
        salt = os.urandom(SALT_SIZE)
        return salt, cobblestone.derive(key.material(), salt, self.encode())

    def open_header(self, header: bytes, key: Key) -> MessageKey:
        """The message key, after the header's commitment was checked.

        Raises
        ------
        AuthenticationError
            If the header is not that of a message with this claim under this key.
        """
        try:
            return cobblestone.open_header(header, key.material(), self.encode())
        except AuthenticationError as error:
            raise AuthenticationError(f"tensor {self.name!r:.200}: {error}", tensor=self.name) from None


@dataclass(frozen=True, slots=True)
class Binding:
    """The file that a message sealed earlier was put into, and the header by which the key's owner vouches for that.

    Without it anyone could put tensors of several files of one owner together, and pass them off as one file.
    """

    file: str
    header: bytes

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("Binding", self.file, self.header)

    @classmethod
    def new(cls, context: MessageContext, file: str, key: Key) -> Binding:
        """Bind the message of that claim to a file. The header is that of a message without chunks."""
        salt = os.urandom(SALT_SIZE)
        message_key = cobblestone.derive(key.material(), salt, _binding_context(context, file))
        commitment = message_key.commitment
        message_key.wipe()
        return cls(file, salt + commitment)

    def check(self, context: MessageContext, key: Key) -> None:
        """Authenticate that the owner put the message into the file.

        Raises
        ------
        AuthenticationError
            If the key is another one, or the message was put there by someone else.
        """
        try:
            cobblestone.open_header(self.header, key.material(), _binding_context(context, self.file)).wipe()
        except AuthenticationError:
            raise AuthenticationError(
                f"tensor {context.name!r:.200}: it was sealed for another file, and its binding to this one does not "
                "match: another key made it, or it was altered; get the file again from its owner",
                tensor=context.name,
            ) from None


def _binding_context(context: MessageContext, file: str) -> bytes:
    """Return what a binding authenticates: the file, and by its context the message that was put into it."""
    return f"fastrack/binding@1\0{file}\0".encode() + context.encode()


def _to(
    self: SealedTensor | SealedRows,
    device: object = None,
    *,
    keys: KeySource | None = None,
    framework: Framework | None = None,
    out: Any = None,
    non_blocking: bool = False,
) -> Any:
    """Open it on a device: the same as `fastrack.to_device` of it."""
    from fastrack._transfer.api import to_device

    return to_device(self, device, keys=keys, framework=framework, out=out, non_blocking=non_blocking)


def _refuse_array(self: SealedTensor | SealedRows, *_: object, **__: object) -> NoReturn:
    """Refuse what NumPy and torch would make of handles: an array of objects."""
    raise TypeError(f"{self!r} is sealed, and no array; open it with to_device or unseal")


@public
class SealedTensor:
    """One tensor, sealed. It holds no secret: it can be stored, sent and shown to anyone.

    `to_bytes` and `from_bytes` keep it. Pickle serves processes that trust each other: reading a pickle that came from
    anywhere else runs whatever code is in it, before anything is authenticated.

    ``sealed[rows]`` is a handle on some of its rows (along the first dimension), given by an integer, a slice, an array
    of integers or a boolean mask. Opening it opens only the chunks that hold those rows.

    Attributes
    ----------
    name : str
        What it is called.
    dtype : str
        Its element type, by its safetensors name, such as ``"F32"``.
    shape : tuple of int
        Its shape.
    nbytes : int
        Bytes of its plaintext.
    message : memoryview
        The Cobblestone message: header, then chunks.
    key_id : str
        The id of the key that opens it.
    path : pathlib.Path or None
        The file that it was taken from, for errors to name. It does not travel with a pickle.
    """

    __slots__ = ("_message", "binding", "context", "key_id", "nbytes", "path")

    def __init__(
        self,
        context: MessageContext,
        message: Bytes,
        key_id: str,
        binding: Binding | None = None,
        path: Path | None = None,
    ) -> None:
        self.context = context
        self.path = path
        self.key_id = key_id
        self.binding = binding
        self.nbytes = dtypes.nbytes(context.dtype, context.shape)
        self._message = message
        if message.size != cobblestone.message_size(self.nbytes):
            raise FormatError(
                f"tensor {context.name!r:.200} of {context.dtype} {list(context.shape)} takes a message of "
                f"{cobblestone.message_size(self.nbytes)} bytes, but has {message.size}; it was cut short or "
                "mislabelled"
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
        return self._message.data.toreadonly()

    @property
    def chunks(self) -> Bytes:
        """The message without its header, as `uint8`."""
        return self._message[HEADER_SIZE:]

    def open_header(self, keys: KeyRing) -> MessageKey:
        """The message key, if the right key is among `keys` and the header is sound."""
        try:
            if self.binding is not None:
                self.binding.check(self.context, keys[self.key_id])
            return self.context.open_header(self._message[:HEADER_SIZE].tobytes(), keys[self.key_id])
        except (AuthenticationError, UnknownKeyError) as error:
            if self.path is not None:
                error.path = self.path
                error.args = (f"{self.path}: {error}",)
            raise

    to = _to
    __array__ = _refuse_array

    def to_bytes(self) -> bytes:
        """Return a sealed safetensors file that holds this tensor alone, to be stored or sent. Takes no key.

        Returns
        -------
        bytes
            The message and a header of some 400 bytes. `from_bytes` and `load_file` read it.
        """
        from fastrack._sealed.writer import encode_one_tensor

        return encode_one_tensor(self)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> SealedTensor:
        """Read what `to_bytes` wrote. Nothing of it is run, decrypted or authenticated; opening it authenticates it.

        Parameters
        ----------
        data : bytes-like
            A sealed file that holds one tensor. Copied.

        Raises
        ------
        FormatError
            If it is no such file.
        """
        from fastrack._sealed.reader import read_one_tensor

        return read_one_tensor(bytes(data))

    def __getitem__(self, rows: Any) -> SealedRows:
        return TensorRows(self, plan_rows(rows, self.shape, self.nbytes))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<SealedTensor {self.name!r} {self.dtype} {list(self.shape)} key {self.key_id[:8]}>"

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("SealedTensor", self.context, self._message.tobytes(), self.key_id, self.binding)


def restore_tensor(context: MessageContext, message: bytes, key_id: str, binding: Binding | None) -> SealedTensor:
    """Make the tensor that a pickle holds."""
    return SealedTensor(context, np.frombuffer(message, np.uint8), key_id, binding)


class TensorSlice(NamedTuple):
    """The part of a result that one sealed tensor gives. `ranges` computes its byte ranges when it is called."""

    tensor: SealedTensor
    ranges: Callable[[], ByteRanges]


@public
class SealedRows:
    """Rows of sealed tensors: a handle, of which nothing is opened yet.

    Made by ``sealed[rows]``, by `SealedDataset` and by `collate`.

    Attributes
    ----------
    name : str
        What the tensor is called; the first of them, if they are several.
    dtype : str
        The element type, by its safetensors name.
    shape : tuple of int
        The shape of the result.
    nbytes : int
        Bytes of the result.
    key_id : str
        The id of the key that opens it; the first, if they are several.
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
        """Whether the slices leave bytes of the result to be zeros."""
        return False

    def slices(self) -> Sequence[TensorSlice]:
        """Return the slices of the result, one for each message. Their byte ranges are not computed yet."""
        raise NotImplementedError

    def check_contexts(self, keys: KeyRing) -> None:
        """Authenticate the shapes that tell which rows these are, of tensors that are not in `slices`.

        Raises
        ------
        AuthenticationError
            If another file of the same data set was altered, so that samples may be missing or have other numbers.
        """

    to = _to
    __array__ = _refuse_array

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a single row of a vector has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<SealedRows of {self.name!r} {self.dtype} {list(self.shape)}>"


class TensorRows(SealedRows):
    """Rows of one sealed tensor."""

    __slots__ = ("_plan", "_tensor")

    def __init__(self, tensor: SealedTensor, plan: RowPlan) -> None:
        self.name = tensor.context.name
        self.dtype = tensor.context.dtype
        self.key_id = tensor.key_id
        self._tensor = tensor
        self._plan = plan

    @classmethod
    def of(cls, tensor: SealedTensor) -> TensorRows:
        """Return the handle on all of a tensor, which need not have rows."""
        return cls(tensor, RowPlan(tensor.shape, tensor.nbytes, range(1)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self._plan.shape

    def slices(self) -> Sequence[TensorSlice]:
        return (TensorSlice(self._tensor, self._plan.ranges),)

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("TensorRows", self._tensor, self._plan)


class OpenMessage:
    """A message whose header was checked, ready to be read on the host; a context that wipes its key."""

    def __init__(self, sealed: SealedTensor, keys: KeyRing) -> None:
        self._sealed = sealed
        self._engine = aead.get_engine()
        message_key = sealed.open_header(keys)
        self._schedule = self._engine.expand_key(message_key)
        message_key.wipe()

    def read(self, memory: Bytes) -> None:
        """Open all of it into `memory`.

        Raises
        ------
        AuthenticationError
            If a chunk is not what was sealed; `memory` holds zeros then.
        """
        bad = self._engine.open_run(self._schedule, self._sealed.chunks, memory, 0)
        if bad is not None:
            memory.fill(0)
            raise bad_chunk(self._sealed.name, bad, path=self._sealed.path)

    def gather(self, pieces: GatherPlan, memory: Bytes) -> None:
        """Open some of it into their places in `memory`. Else as `read`."""
        bad = self._engine.open_gather(self._schedule, self._sealed.chunks, memory, pieces)
        if bad is not None:
            memory.fill(0)
            raise bad_chunk(self._sealed.name, bad, path=self._sealed.path)

    def read_run(self, memory: Bytes, first: int) -> None:
        """Open the run of whole chunks from `first` on that fills `memory`, or the message's end."""
        bad = self._engine.open_run(self._schedule, self._run(first, memory.size), memory, first)
        if bad is not None:
            memory.fill(0)
            raise bad_chunk(self._sealed.name, bad, path=self._sealed.path)

    def verify_run(self, first: int, size: int) -> int | None:
        """The first chunk whose tag is wrong among those that hold `size` bytes from chunk `first` on, or None."""
        return self._engine.verify_run(self._schedule, self._run(first, size), first)

    def _run(self, first: int, size: int) -> Bytes:
        start = first * cobblestone.SEALED_CHUNK_SIZE
        return self._sealed.chunks[start : start + cobblestone.segment_size(first, size, self._sealed.nbytes)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._schedule.wipe()


def write_header(message: Bytes, salt: bytes, key: MessageKey) -> None:
    """Put the salt and the commitment in their place at the head of a message."""
    message[:SALT_SIZE] = np.frombuffer(salt, np.uint8)
    message[SALT_SIZE:HEADER_SIZE] = np.frombuffer(key.commitment, np.uint8)


def bad_chunk(
    name: str | None,
    chunk: int,
    outcome: str = "nothing of the tensor was handed out",
    *,
    path: Path | None = None,
) -> AuthenticationError:
    """Return the error for a chunk that is not what its owner sealed, or for `BAD_PLAN`."""
    place = "" if path is None else f"{path}: "
    if chunk < 0:
        return AuthenticationError(
            f"{place}rows of tensor {name!r:.200}: the list of their places was altered on its way to the device, so "
            f"{outcome}; move them again, and if that fails too, distrust the machine",
            tensor=name,
            path=path,
        )
    return AuthenticationError(
        f"{place}tensor {name!r:.200}, chunk {chunk}: the ciphertext or its tag was altered, so {outcome}; get the "
        "message again from its owner, and run `fastrack verify` on the file it came in",
        tensor=name,
        chunk=chunk,
        path=path,
    )


def new_file_id() -> str:
    """A random name for a file, which its messages are bound to: 16 bytes, in hexadecimal."""
    return os.urandom(16).hex()
