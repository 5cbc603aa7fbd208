"""`Vault`: tensors that wait, sealed, in memory, files or stores that need no trust."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, MutableMapping
from typing import Any, NoReturn, Self

import numpy as np

from fastrack._devices import canonical, confidential
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext, new_file_id, require_name
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes, Framework
from fastrack._transfer.api import device_of, seal_message, to_device
from fastrack._transfer.prefetch import PrefetchLoader
from fastrack._transfer.slots import Slots, file_slots
from fastrack._util.endings import report_at_end
from fastrack._util.fork import register_fork_reset
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import AuthenticationError, ClosedError
from fastrack.format import message_size

_REUSED = 1 << 20  # bytes from which on a result in host memory is in a slot: allocators reuse smaller ones


@public
class Ticket:
    """Claim on a tensor in a `Vault`. It tells the tensor from all others, and stays in its process.

    The place of the tensor in the vault is free again when the ticket is dropped, or nothing refers to it any more.

    Attributes
    ----------
    name : str
        Name that the tensor was put under, for messages. Several may have the same.
    dtype : str
        Element type by its safetensors name.
    shape : tuple of int
        Shape of the tensor.
    nbytes : int
        Size of the tensor in bytes.
    device : str
        Device that the tensor was on, "cpu" or "cuda:N".

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> fastrack.Vault().put("block", np.zeros((2, 3), np.float32))
    <Ticket 'block' F32 [2, 3]>
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_framework",
        "_key_id",
        "_place",
        "_strides",
        "device",
        "dtype",
        "name",
        "nbytes",
        "shape",
    )

    def __init__(
        self, context: MessageContext, place: Bytes | _Entry, key_id: str, device: str, framework: Framework
    ) -> None:
        self._context, self._key_id, self._framework = context, key_id, framework
        self._place: Bytes | _Entry | None = place
        self._strides: tuple[int, ...] | None = None  # unless they are those of a new tensor
        self.device = device
        self.name, self.dtype, self.shape = context.name, dtypes.DTYPES[context.dtype], context.shape
        self.nbytes = dtypes.nbytes(context.dtype, context.shape)

    def __repr__(self) -> str:
        return f"<Ticket {shown(self.name, 200)} {self.dtype} {list(self.shape)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"pickling the ticket of {shown(self.name, 200)} failed: it stays in the process of its vault. Send the "
            "tensor sealed: to_host seals it under a key that the other process has"
        )


@public
class Vault:
    """Tensors that wait, sealed, in memory, files or stores that need no trust.

    Each tensor is sealed on its device when it is put, under a key of its own, and opened there when it is got back. So
    tensors may wait in any number and be got in any order, by any thread. What was altered in between does not open,
    and neither does what waited in the same place before, or another tensor. The keys are only in this process, and
    end with it.

    Places are made once and used again. Tensors that are got back to "cpu" are in such memory as well, which is used
    again once nothing refers to the tensor.

    Parameters
    ----------
    store : path or MutableMapping, optional
        Where the sealed tensors wait. By default in host memory. A folder: in files there, which have no names and end
        with the process. A mapping from names to bytes, such as ``fsspec.get_mapper(url)``: in a store, from which they
        are removed when they are dropped; what a killed process leaves there can never be opened.
    require : {"confidential"}, optional
        Refuse tensors on any device but a GPU in confidential mode, as for `fastrack.Channel`.

    Raises
    ------
    NotADirectoryError, FileNotFoundError
        If `store` is a path, and there is no folder.

    Notes
    -----
    On "cuda" nothing but ciphertext leaves the GPU. On "cpu" the tensors are in host memory before and after: a vault
    protects what waits, in files and stores above all, which administrators, other machines and backups read.

    A forked child has a vault of its own, which is empty.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> with fastrack.Vault() as vault:
    ...     tickets = [vault.put(f"block {number}", np.full(3, number)) for number in range(3)]
    ...     last, first = vault.get(tickets[2]), vault.get(tickets[0])
    ...     print(first, last)
    [0 0 0] [2 2 2]
    """

    def __init__(
        self, store: str | os.PathLike[str] | MutableMapping[str, Any] | None = None, *, require: str | None = None
    ) -> None:
        self._require = confidential.requirement(require)
        self._store: MutableMapping[str, Any] | None = None
        if store is None:
            self._slots = Slots()
        elif isinstance(store, (str, os.PathLike)):
            with os.scandir(store):
                pass
            self._slots = file_slots(store)
        elif isinstance(store, MutableMapping):
            self._store, self._slots = store, Slots()
        else:
            raise TypeError(f"store=: expected a folder or a mapping of names to bytes, got {shown(store)}. Name one")
        self._results = Slots()
        own = self._own = _Own()
        self._watch = report_at_end(
            self, lambda: own.kept and f"{len(own.kept)} tensors of a vault were left in its store"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, or of files, of all places, used and free."""
        return self._slots.nbytes

    def put(self, name: str, tensor: Any) -> Ticket:
        """Seal a tensor on the device that holds it, and keep it.

        Parameters
        ----------
        name : str
            Name for messages. It is authenticated, and need not be unique.
        tensor : array
            An array of NumPy, torch or CuPy on any device, of any shape and of any dtype that safetensors has. It may
            be changed or deleted afterwards.

        Returns
        -------
        Ticket
            What `get` and `drop` take.

        Raises
        ------
        TypeError
            If `tensor` is no dense array, or of a dtype that safetensors lacks.
        OSError
            If the disk is full, or the store fails. Nothing is kept then.
        ClosedError
            If the vault was closed.
        DeviceError, AuthenticationError
            As from `fastrack.to_host`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastrack
        >>> vault, block = fastrack.Vault(), np.arange(4)
        >>> ticket = vault.put("block", block)
        >>> block[:] = 0
        >>> vault.get(ticket)
        array([0, 1, 2, 3])
        """
        require_name(name)
        confidential.check(device_of(tensor), self._require)
        key = self._open_key()
        dense, strides = arrays.in_memory_order(tensor) if arrays.framework_of(tensor) == "torch" else (tensor, None)
        dtype, shape = arrays.dtype_and_shape(dense)
        framework = arrays.framework_of(dense)
        assert framework is not None  # or it would have no dtype
        context = MessageContext(name, dtype, shape, new_file_id())
        message = self._slots.take(message_size(dtypes.nbytes(dtype, shape)))
        seal_message(dense, context, key, message)
        place: Bytes | _Entry = message
        if self._store is not None:
            self._remove_dropped()
            place = _Entry(context.file, self._own.dropped)
            self._own.kept.add(place.name)
            self._store[place.name] = message.tobytes()
            if self._own.key is not key:  # closed meanwhile
                self._own.dropped.append(place.name)
                self._remove_dropped()
                self._open_key()
        ticket = Ticket(context, place, key.id, device_of(dense), framework)
        if strides is not None:
            ticket._strides = strides  # noqa: SLF001 - of this module
            ticket.shape = tuple(tensor.shape)
        return ticket

    def get(self, ticket: Ticket, *, device: object = None, out: Any = None) -> Any:
        """Authenticate and decrypt a tensor on a device. It stays in the vault until it is dropped.

        Parameters
        ----------
        ticket : Ticket
            Ticket of the tensor.
        device : str or torch.device, optional
            "cpu" or "cuda:N". By default the device that the tensor was on.
        out : array, optional
            Array to fill and return, as for `fastrack.to_device`, with the order of dimensions in memory that a new
            one would have.

        Returns
        -------
        array
            The tensor, of its framework; on another device of NumPy in the place of CuPy, or the other way round. A
            dense tensor of torch has its strides; all others are contiguous, arrays in Fortran order too.

        Raises
        ------
        AuthenticationError
            If what waited was altered, lost or swapped. Nothing of it was handed out, and `out` holds zeros.
        ClosedError
            If the vault was closed, or the ticket was dropped.
        ValueError
            If the ticket is of another vault or process, or `out` does not fit.
        DeviceError, OSError
            If the device or the store fails.

        Examples
        --------
        >>> import numpy as np
        >>> import fastrack
        >>> vault = fastrack.Vault()
        >>> ticket, out = vault.put("block", np.ones(2)), np.empty(2)
        >>> vault.get(ticket, out=out) is out, out
        (True, array([1., 1.]))
        """
        sealed, ring = self._find(ticket)
        strides = ticket._strides  # noqa: SLF001 - of this module
        place = ticket.device if device is None else canonical(device)
        confidential.check(place, self._require)
        # NumPy has no arrays on a GPU, and CuPy has none on "cpu".
        is_shared = place == ticket.device or ticket._framework == "torch"  # noqa: SLF001 - of this module
        framework = ticket._framework if is_shared else "numpy" if place == "cpu" else "cupy"  # noqa: SLF001
        try:
            if out is not None:
                moved = out if strides is None else out.permute(arrays.outermost_first(strides))
                to_device(sealed, place, keys=ring, out=moved)
                return out
            result = open_reused(self._results, sealed, place, ring, framework)
        except AuthenticationError as error:
            raise _altered(ticket, error.chunk) from None
        return result if strides is None else arrays.with_strides(result, strides)

    def drop(self, ticket: Ticket) -> None:
        """Forget a tensor. Its place is free as soon as no `get` reads from it.

        Parameters
        ----------
        ticket : Ticket
            Ticket of the tensor. One that was dropped before, or is of another vault, is left alone.

        Raises
        ------
        OSError
            If the store fails.

        Examples
        --------
        >>> import numpy as np
        >>> import fastrack
        >>> vault = fastrack.Vault()
        >>> ticket = vault.put("block", np.ones(2))
        >>> vault.drop(ticket)
        >>> vault.get(ticket)
        Traceback (most recent call last):
            ...
        fastrack.ClosedError: 'block': expected a ticket ... Put the tensor again
        """
        key = self._own.key
        if key is not None and ticket._key_id == key.id:  # noqa: SLF001 - of this module
            ticket._place = None  # noqa: SLF001 - of this module
        self._remove_dropped()

    def prefetch(self, tickets: Iterable[Ticket]) -> PrefetchLoader[Ticket]:
        """Open tensors ahead of their use, in a thread, up to 64 MiB or one tensor that were not taken.

        Parameters
        ----------
        tickets : iterable of Ticket
            Tickets of the tensors, in the order in which they are likely to be taken.

        Returns
        -------
        PrefetchLoader
            Hands each tensor out once: ``take(ticket)`` in any order, or by iterating over pairs of ticket and tensor.
            ``close``, or the end of its ``with`` block, cancels what was not opened yet.

        Raises
        ------
        AuthenticationError, ClosedError, ValueError, DeviceError, OSError
            From ``take`` and ``close``, as from `get`.

        Examples
        --------
        >>> import numpy as np
        >>> import fastrack
        >>> vault = fastrack.Vault()
        >>> tickets = [vault.put(f"block {number}", np.full(2, number)) for number in range(3)]
        >>> with vault.prefetch(tickets) as blocks:
        ...     print(blocks.take(tickets[2]), blocks.take(tickets[0]))
        [2 2] [0 0]
        """
        return PrefetchLoader({ticket: ticket for ticket in tickets}, self.get)

    def close(self) -> None:
        """Forget the keys, so that what waits can never be opened again, and remove it from the store.

        Raises
        ------
        OSError
            If the store fails.
        """
        self._watch.detach()
        own = self._own
        key, own.key = own.key, None
        if key is not None:
            key.wipe()
        own.dropped.extend(tuple(own.kept))
        self._remove_dropped()

    def _open_key(self) -> Key:
        if self._own.key is None:
            raise ClosedError("this vault was closed; make another one")
        return self._own.key

    def _find(self, ticket: Ticket) -> tuple[SealedTensor, KeyRing]:
        key, place = self._open_key(), ticket._place  # noqa: SLF001 - of this module
        if ticket._key_id != key.id:  # noqa: SLF001 - of this module
            raise ValueError(
                f"{shown(ticket.name, 200)}: expected a ticket of this vault and this process, got another one. Get "
                "the tensor from the vault that it was put into"
            )
        if place is None:
            raise ClosedError(
                f"{shown(ticket.name, 200)}: expected a ticket that is kept, got one that was dropped. Put the tensor "
                "again"
            )
        if isinstance(place, _Entry):
            assert self._store is not None
            size = message_size(ticket.nbytes)
            message = np.zeros(size, np.uint8)  # which does not open
            with contextlib.suppress(KeyError, TypeError, ValueError, BufferError):  # it has none, or no bytes
                found = np.frombuffer(self._store[place.name], np.uint8)
                message = found if found.size == size else message
            place = message
        return SealedTensor(ticket._context, place, key.id), KeyRing(key)  # noqa: SLF001 - of this module

    def _remove_dropped(self) -> None:
        own = self._own
        while self._store is not None:
            try:
                name = own.dropped.popleft()
            except IndexError:
                return
            try:
                with contextlib.suppress(KeyError):
                    del self._store[name]
            except BaseException:
                own.dropped.append(name)  # for the next call
                raise
            own.kept.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Vault{'' if self._own.key is not None else ', closed'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("pickling a vault failed: its keys stay in its process. Make one where it is needed")


class _Own:
    """Key and names of a vault, which each process has of its own."""

    def __init__(self) -> None:
        self.key: Key | None = Key.generate()  # of all messages; None once the vault was closed
        self.kept: set[str] = set()  # names of messages in the store
        # Names of those that nothing refers to. The garbage collector adds to it at any moment, in any thread.
        self.dropped: deque[str] = deque()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Start over with a key of this process, and leave what the store has to the parent."""
        self.kept, self.dropped = set(), deque()
        if self.key is not None:
            self.key.wipe()
            self.key = Key.generate()


def open_reused(
    slots: Slots,
    sealed: SealedTensor,
    device: object,
    keys: KeySource,
    framework: Framework,
    dtype: str | None = None,
) -> Any:
    """Open a tensor on a device, like `to_device`, in host memory in a slot: the first touch of new memory is slow."""
    kind = sealed.context.dtype if dtype is None else dtype
    size = dtypes.nbytes(kind, sealed.shape)
    if size < _REUSED or canonical(device) != "cpu":
        return to_device(sealed, device, keys=keys, framework=framework, dtype=dtype)
    out = arrays.from_bytes(slots.take(size), kind, sealed.shape, framework)
    return to_device(sealed, device, keys=keys, out=out, dtype=dtype)


class _Entry:
    """A message in a store. The garbage collector, which may run anywhere, removes nothing: it leaves the name."""

    __slots__ = ("_dropped", "name")

    def __init__(self, name: str, dropped: deque[str]) -> None:
        self.name, self._dropped = name, dropped

    def __del__(self) -> None:
        self._dropped.append(self.name)


def _altered(ticket: Ticket, chunk: int | None = None) -> AuthenticationError:
    where = "" if chunk is None else f", chunk {chunk}"
    return AuthenticationError(
        f"{shown(ticket.name, 200)}{where}: expected what was put into the vault, got something that was altered, lost "
        "or swapped, so nothing of it was handed out. Compute it again, and distrust the memory, disk or store",
        tensor=ticket.name,
        chunk=chunk,
    )
