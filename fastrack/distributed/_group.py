"""`SecureGroup`: collectives whose every message is sealed by its sender and opened by its receiver."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._util.fork import per_process, report
from fastrack._util.shown import shown
from fastrack.distributed._link import Link
from fastrack.distributed._messages import Slabs
from fastrack.distributed._operation import CollectiveOperation, Reduction, split
from fastrack.distributed._places import Place
from fastrack.distributed._session import EVERYONE, GroupSession, run_id
from fastrack.distributed._transport import PointToPoint, Transport
from fastrack.errors import AuthenticationError, ClosedError, DeviceError


class SecureGroup:
    """Ranks of `torch.distributed` that exchange only sealed messages.

    All ranks make the group together, and call its collectives in the same order. Each message has its own key,
    bound to the operation, its reduction, its number, the sender, the receiver, the dtype and the size. If a message
    is altered, repeated, misrouted or lost, **every** rank raises, and the group refuses all further operations:
    start the ranks again from the last checkpoint.

    Tensors are in host memory or on a GPU, contiguous, and of the same dtype and size on all ranks. Output tensors
    hold zeros after an error.

    Parameters
    ----------
    key : Key, KeyRing, KeyProvider or path
        Secret that only the ranks have, from one source or one per rank: a key file, unlocked grants, or keys from
        a broker. It seals nothing itself: the session secret is derived from it and from new random bytes of each
        rank, so that no key is used twice, even after a restart from a checkpoint. It is also derived from the global
        ranks in order, from the group's name and from `run`; and, where `init_process_group` of fastrack made the
        default process group, from the secret of that group.
    group : torch.distributed.ProcessGroup, optional
        Participating ranks; all by default. A separate gloo process group carries the messages.
    timeout : float
        Seconds to wait for a message of another rank.
    run : str, optional
        Name of the run, the same on all its ranks: ranks of another run with the same key are refused. By default that
        of the default process group, if fastrack made it, else the id that ``torchrun --rdzv-id`` was given. Where
        there is neither, runs that share a key are not told apart: use one key a run.

    Raises
    ------
    AuthenticationError
        If another rank has another key, is of another group or run, or the first messages were altered.
    ClosedError
        If fastrack made the default process group, and that has ended.
    UnknownKeyError
        If there is no key.

    Attributes
    ----------
    rank : int
        Rank of this process in the group.
    size : int
        Number of ranks.
    ranks : list of int
        Global ranks of the group's members.

    Notes
    -----
    `all_reduce` is a reduce-scatter and an all-gather. Each rank adds one shard of all ranks **in the order of ranks**,
    and seals the sum once for all ranks. While one slab of 4 MiB is sent, the next is sealed. Sums equal the same
    additions in plaintext, bit for bit. Tensors on a GPU are sealed and opened by its kernels, and host memory then
    holds only sealed chunks.

    The network sees sizes, times and who sends to whom. All ranks trust each other: each can send wrong gradients.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import fastrack
    >>> from fastrack.distributed import SecureGroup
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with SecureGroup(fastrack.Key.generate()) as group:
    ...     gradient = torch.ones(3)
    ...     _ = group.all_reduce(gradient)
    >>> gradient
    tensor([1., 1., 1.])
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        key: KeyLike | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 300.0,
        run: str | None = None,
    ) -> None:
        try:
            secret = sealing_key(key)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of gloo, if another rank has failed and gone
                PointToPoint.among(group, timeout).close()  # so that other ranks need not wait for the timeout
            raise
        self._setup(PointToPoint.among(group, timeout), secret, timeout, run)

    @classmethod
    def over(
        cls, transport: Transport, key: KeyLike | None = None, *, timeout: float = 300.0, run: str | None = None
    ) -> Self:
        """Make a group over another transport. Not public."""
        group = cls.__new__(cls)
        group._setup(transport, key, timeout, run)  # noqa: SLF001 - its own
        return group

    def _setup(self, transport: Transport, key: KeyLike | None, timeout: float, run: str | None) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.ranks = transport.ranks
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._failed: list[Told] = []
        try:
            within = _default_session()  # of the default group, whichever way torch or the program makes this one
            self._link = Link(transport, sealing_key(key), timeout, run_id(run, within), within)
        except BaseException:
            transport.close()
            raise
        # A single thread runs the operations in order, so that their messages never mix.
        self._thread = ThreadPoolExecutor(1, "fastrack-group")
        self._beginning = per_process(self, "_beginning", threading.Lock)
        self._maker = threading.current_thread()
        self._last: tuple[threading.Thread, Callable[[], Told | None]] = self._maker, lambda: None

    # Collectives

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum", *, async_op: bool = False) -> Any:
        """Reduce a tensor over all ranks, in place, by sum, mean, maximum or minimum, in the order of ranks.

        Parameters
        ----------
        tensor : torch.Tensor
            Tensor to change in place.
        op : {"sum", "mean", "max", "min"}
            Reduction, the same on all ranks.
        async_op : bool
            Return a `torch.futures.Future` of the tensor. Use the tensor only once it is done.

        Returns
        -------
        torch.Tensor or torch.futures.Future
            The filled or sent tensor.

        Raises
        ------
        AuthenticationError
            On every rank, if any message was altered, repeated, misrouted or lost.
        ClosedError
            If the group was closed, or an earlier operation failed.
        RuntimeError
            If an operation that another thread began is not done.
        """
        return self._reduced("all_reduce", tensor, op, async_op=async_op)

    def _reduced(self, kind: str, tensor: torch.Tensor, op: Reduction, *, async_op: bool) -> Any:
        """Reduce a tensor as `all_reduce` does, in messages that no operation of another kind accepts."""
        check(tensor)
        require_reduction(op, tensor)
        return self._run(lambda place: self._all_reduce(place, kind, tensor, op), tensor, async_op)

    def _all_reduce(self, place: Place, kind: str, tensor: torch.Tensor, op: Reduction) -> None:
        flat = tensor.view(-1)
        shards = [flat[part] for part in split(flat.numel(), self.size)]
        shard = shards[self.rank]
        with CollectiveOperation(self._link, place, kind, op) as messages:
            parts = [messages.receive(rank, self.rank, shard) for rank in self._link.others]
            sums = [messages.receive(rank, EVERYONE, shards[rank]) for rank in self._link.others]
            messages.send([messages.make(rank, shards[rank]) for rank in self._link.others])
            total = messages.make(EVERYONE, shard)
            for slab in range(len(total.slabs)):
                messages.add(slab, parts, shard, shard, op)
                total.send(slab)
            messages.open(sums, [shards[rank] for rank in self._link.others])

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Reduction = "sum", *, async_op: bool = False
    ) -> Any:
        """Fill `output` with this rank's shard of the sum, mean, maximum or minimum of the tensors of all ranks.

        Parameters
        ----------
        output : torch.Tensor
            Shard to fill.
        tensor : torch.Tensor
            Tensor on the same device, with `size` times as many elements as `output`.
        op, async_op
            As for `all_reduce`, with the same result and errors.

        Raises
        ------
        ValueError
            If the numbers of elements do not fit, or the dtypes differ.
        """
        check(output)
        check(tensor)
        self._require_shard(output, tensor)
        require_reduction(op, tensor)
        return self._run(lambda place: self._reduce_scatter(place, output, tensor, op), output, async_op)

    def _reduce_scatter(self, place: Place, output: torch.Tensor, tensor: torch.Tensor, op: Reduction) -> None:
        shards = list(tensor.view(self.size, -1).unbind())
        with CollectiveOperation(self._link, place, "reduce_scatter", op) as messages:
            parts = [messages.receive(rank, self.rank, output) for rank in self._link.others]
            messages.send([messages.make(rank, shards[rank]) for rank in self._link.others])
            for slab in range(len(Slabs(output.nbytes))):
                messages.add(slab, parts, shards[self.rank], output.view(-1), op)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Fill `output` with the tensors of all ranks, in order. Each rank seals its tensor once.

        Parameters
        ----------
        output : torch.Tensor
            Tensor to fill, with `size` times as many elements as `tensor`.
        tensor : torch.Tensor
            Tensor of this rank, on the same device. It may be a slice of `output`.
        async_op : bool
            As for `reduce_scatter`, with the same result and errors.
        """
        return self._gathered("all_gather", output, tensor, async_op=async_op)

    def _gathered(self, kind: str, output: torch.Tensor, tensor: torch.Tensor, *, async_op: bool) -> Any:
        """Gather tensors as `all_gather` does, in messages that no operation of another kind accepts."""
        check(output)
        check(tensor)
        self._require_shard(tensor, output)
        return self._run(lambda place: self._all_gather(place, kind, output, tensor), output, async_op)

    def _all_gather(self, place: Place, kind: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
        shards = list(output.view(self.size, -1).unbind())
        with CollectiveOperation(self._link, place, kind) as messages:
            others = [messages.receive(rank, EVERYONE, shards[rank]) for rank in self._link.others]
            messages.send([messages.make(EVERYONE, tensor)])
            if shards[self.rank].data_ptr() != tensor.data_ptr():
                shards[self.rank].copy_(tensor.view(-1))
            messages.open(others, [shards[rank] for rank in self._link.others])

    def broadcast(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> Any:
        """Copy a tensor of the rank `source` to all ranks. It is sealed once.

        Parameters
        ----------
        tensor : torch.Tensor
            Tensor to send on `source`, and to fill elsewhere.
        source : int
            Rank in the group.
        async_op : bool
            As for `all_reduce`, with the same result and errors.
        """
        return self._copied("broadcast", tensor, source, async_op=async_op)

    def _copied(self, kind: str, tensor: torch.Tensor, source: int, *, async_op: bool) -> Any:
        """Copy a tensor as `broadcast` does, in messages that no operation of another kind accepts."""
        check(tensor)
        self._require_rank(source)
        return self._run(lambda place: self._broadcast(place, kind, tensor, source), tensor, async_op)

    def _broadcast(self, place: Place, kind: str, tensor: torch.Tensor, source: int) -> None:
        with CollectiveOperation(self._link, place, kind, f"of {source}") as messages:
            if source == self.rank:
                messages.send([messages.make(EVERYONE, tensor)])
            else:
                messages.open([messages.receive(source, EVERYONE, tensor)], [tensor])

    def send(self, tensor: torch.Tensor, target: int, *, async_op: bool = False) -> Any:
        """Send a tensor to one rank, which calls `receive`, and wait until it is authenticated.

        Parameters
        ----------
        tensor : torch.Tensor
            Tensor to send.
        target : int
            Rank in the group.
        async_op : bool
            As for `all_reduce`, with the same result and errors.
        """
        check(tensor)
        self._require_rank(target, other=True)

        def work(place: Place) -> None:
            with CollectiveOperation(self._link, place, "send", source=self.rank, target=target) as messages:
                messages.send([messages.make(target, tensor)])

        return self._run(work, tensor, async_op, is_filled=False)

    def receive(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> Any:
        """Fill a tensor that the rank `source` sends with `send`.

        Parameters
        ----------
        tensor, source, async_op
            As for `send`, with the same result and errors; `tensor` is filled.
        """
        check(tensor)
        self._require_rank(source, other=True)

        def work(place: Place) -> None:
            with CollectiveOperation(self._link, place, "send", source=source, target=self.rank) as messages:
                messages.open([messages.receive(source, self.rank, tensor)], [tensor])

        return self._run(work, tensor, async_op)

    # The life of a group

    def close(self) -> None:
        """Wait for pending operations, wipe the secrets and close the connections.

        Call it on all ranks: closing one rank ends the operations of the others with an error.

        Raises
        ------
        AuthenticationError, ClosedError
            The error of an `async_op` operation that neither its future nor another operation has raised. If
            another exception ends the `with` statement, the error becomes a note on that exception.
        """
        if self._process == os.getpid():
            self._thread.shutdown(wait=True)
            self._end(ClosedError("expected an open group, got a closed one; make another on all ranks"))
            failed, self._failed = self._failed, []
            if failed and not any(future.is_told for future in failed):
                failed[0].wait()

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self._link.close()

    def _run(
        self, work: Callable[[Place], None], tensor: torch.Tensor, async_op: bool, *, is_filled: bool = True
    ) -> Any:
        """Run an operation on the thread of the group. On failure, clear its output and end the group."""
        try:
            self._require_open()
        except ClosedError:
            self._failed.clear()  # ClosedError names the error that ended the group
            raise
        place = self._link.place(tensor.device)
        ordered = place.order(lambda: work(place), tensor)
        future = Told(devices=place.devices)

        def run() -> None:
            try:
                self._require_open()
                with torch.no_grad():
                    ordered()
            except BaseException as error:  # noqa: BLE001 - raised again where the operation was started
                try:
                    self._end(error)
                    if is_filled:
                        place.clear(tensor)
                finally:
                    if async_op:
                        self._failed.append(future)
                    future.set_exception(error)
            else:
                future.set_result(tensor)

        if threading.current_thread() in self._thread._threads:  # noqa: SLF001 - no public name
            run()  # begun by a callback of the operation that has just ended: on every rank it is the next one
            return future if async_op else future.wait()
        task = self._submit(run, future)
        if async_op:
            return future
        try:
            task.result()
        except BaseException:  # an interrupt: leave no operation running
            self._link.transport.close()
            wait([task])
            raise
        return future.wait()

    def _submit(self, run: Callable[[], None], future: Told) -> Future[None]:
        """Have the group's thread run an operation. Refuse it beside another thread's: their order would be chance."""
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):  # noqa: SLF001 - of autograd, for the thread that trains
            thread = self._maker
        with self._beginning:
            begun, last = self._last[0], self._last[1]()
            if self.size > 1 and thread is not begun and last is not None and not last.done():
                raise RuntimeError(
                    "a sealed collective: expected one thread at a time, got one beside the unfinished operation of "
                    "another. Give each thread a group of its own, such as process_group=dist.new_group()"
                )
            self._last = thread, weakref.ref(future)
            self._thread.submit(setattr, self._link, "caller", "" if thread is self._maker else "of another thread")
            return self._thread.submit(run)

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise ClosedError("expected a group of this process, got another's; make a group in each process")
        if self._error is not None:
            raise ClosedError(
                f"expected an open group, got one that has ended: {self._error}. Make another on all ranks"
            ) from self._error

    def _require_shard(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        if shard.dtype != whole.dtype or shard.numel() * self.size != whole.numel():
            raise ValueError(
                f"a shard for {self.size} ranks: expected {whole.numel() / self.size:g} elements of {whole.dtype}, got "
                f"{shard.numel()} of {shard.dtype}. Pad the tensor"
            )
        if shard.device != whole.device:
            raise ValueError(
                f"a sealed collective: expected tensors on one device, got {shard.device} and {whole.device}. Move one"
            )

    def _require_rank(self, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            raise ValueError(f"expected {'another' if other else 'a'} rank of the group's {self.size}, got {rank}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            self.close()
        except (AuthenticationError, ClosedError, DeviceError) as failure:
            if error is None:
                raise
            error.add_note(f"The group had failed before: {failure}")

    def __del__(self) -> None:
        if hasattr(self, "_thread") and self._process == os.getpid():
            self._thread.shutdown(wait=False)
            self._link.close()
            if self._failed and not any(future.is_told for future in self._failed):
                report(f"an operation of a group failed, and no call was left to raise it: {self._error}. Call close()")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group stays in its process and cannot be pickled; make it in each process")

    def __repr__(self) -> str:
        state = "" if self._error is None else ", ended"
        return f"<SecureGroup: rank {self.rank} of {self.size}{state}>"


class Told(torch.futures.Future[Any]):
    """A future that records whether its result was asked for."""

    is_told = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"wait", "value", "then", "add_done_callback"}:
            self.is_told = True
        return super().__getattribute__(name)


def _default_session() -> GroupSession | None:
    """Return the session of the default process group, if that is sealed."""
    session = getattr(dist.group.WORLD, "session", None)
    return session if isinstance(session, GroupSession) else None


def check(tensor: torch.Tensor) -> None:
    """Raise an error unless a tensor is dense, contiguous, and in host memory or on a GPU."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"a sealed collective: expected a tensor on cpu or cuda, got one on {tensor.device}. Move it there first"
        )
    if tensor.layout != torch.strided or not tensor.is_contiguous() or type(tensor) is not torch.Tensor:
        raise ValueError(
            "a sealed collective: expected a plain contiguous tensor, got another; pass tensor.contiguous()"
        )


def require_reduction(op: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for an unknown reduction, and for means of integers."""
    if op not in ("sum", "mean", "max", "min"):
        raise ValueError(f"op=: expected 'sum', 'mean', 'max' or 'min', got {shown(op, 40)}")
    if op in ("max", "min") and tensor.is_complex():
        raise ValueError(f"op={op!r}: expected a real tensor, got {tensor.dtype}. Use op='sum'")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"op='mean': expected a floating-point tensor, got {tensor.dtype}. Use op='sum'")
