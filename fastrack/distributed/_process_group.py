"""`init_process_group`: the default process group of `torch.distributed`, with every message sealed."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._keys.keys import Key
from fastrack.distributed._group import SecureGroup
from fastrack.distributed._operation import Reduction
from fastrack.distributed._session import GroupSession
from fastrack.distributed._transport import PointToPoint
from fastrack.errors import FastrackError

BACKEND = "fastrack"
DEVICES = ["cpu", "cuda"]
Tensors = Sequence[torch.Tensor]

_REDUCTIONS: list[tuple[Any, Reduction]] = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
]


def init_process_group(
    key: KeyLike | None = None, *, timeout: float = 300.0, run: str | None = None, **options: Any
) -> None:
    """Make the default process group of `torch.distributed`, with every operation sealed or refused.

    Call it instead of torch's function of this name, before a model is wrapped. `DistributedDataParallel`, FSDP2 and
    all other users of torch's collectives then send only sealed messages: gradients, weights, buffers, norms,
    objects. So do all groups and meshes that are made later, unless they name another backend: each has a session of
    its own, which is derived from that of the default group. Operations that `SecureGroup` lacks are refused before
    anything is sent: `torch.distributed.send`, `recv` and `all_to_all`, products, sparse tensors.

    Parameters
    ----------
    key : Key, KeyRing, KeyProvider or path
        Secret that only the ranks have, as for `SecureGroup`.
    timeout : float
        Seconds to wait for a message of another rank.
    run : str, optional
        Name of the run, as for `SecureGroup`: ranks of another run with the same key are refused. By default the id
        that ``torchrun --rdzv-id`` was given. Without either use one key a run.
    **options
        As for `torch.distributed.init_process_group`: `init_method`, `store`, `rank`, `world_size`, and `device_id`,
        which has no effect. An existing default process group, as in a worker of Ray Train, is destroyed with all
        other groups, and the new group takes over its store, rank and size.

    Raises
    ------
    AuthenticationError
        If another rank has another key, is of another group or run, or the first messages were altered.
    UnknownKeyError
        If there is no key.
    RuntimeError
        If a model or a mesh uses an existing process group: it would send plaintext.

    Notes
    -----
    A failed operation raises where torch waits for it; `backward` raises a `RuntimeError` that names the
    `AuthenticationError`. `torch.distributed.destroy_process_group` closes the groups, and raises the error of an
    operation that the program did not wait for. `gather` and `scatter` send all tensors to all ranks.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import fastrack
    >>> from fastrack.distributed import init_process_group
    >>> init_process_group(fastrack.Key.generate(), store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.module.weight.grad
    tensor([[1., 1.]])
    >>> dist.destroy_process_group()
    """
    secret = sealing_key(key)
    if dist.is_initialized():
        options = {**_end_plain_groups(), **options}
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=DEVICES)
    dist.init_process_group(BACKEND, timeout=timedelta(seconds=timeout), pg_options=(secret, run), **options)


def _end_plain_groups() -> dict[str, Any]:
    """Destroy all process groups, and return the options for the next default group.

    Raise RuntimeError if an object, such as a wrapped model, still holds a plain group: it would send through the
    destroyed group.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public accessor
    options = {"store": store, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
    plain = [weakref.ref(group) for group in groups if not isinstance(group, SealedProcessGroup)]
    del groups
    _forget(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    if any(group() is not None for group in plain):
        raise RuntimeError(
            "making a sealed process group: expected that nothing has the one that was there, got a model, a mesh or a "
            "variable that does. Call init_process_group before a model is wrapped and a mesh is made"
        )
    return options


def _forget(default: Any) -> None:
    """Replace a group in the default arguments of functions by None, which means the current default group.

    Modules such as `torch.distributed.nn.functional` capture the default group when imported.
    """
    for function in gc.get_objects():
        if type(function) is FunctionType and any(value is default for value in function.__defaults__ or ()):
            defaults: tuple[Any, ...] = function.__defaults__ or ()
            function.__defaults__ = tuple(None if value is default else value for value in defaults)


def _make_group(given: Any, options: Any) -> SealedProcessGroup:
    """Make a group for torch. Only the default group is given a key and a run; later groups share them."""
    seconds = given.timeout.total_seconds()
    world = dist.group.WORLD
    key, run = options if isinstance(options, tuple) else (options, None)  # of another backend: refused as no key
    if key is None and isinstance(world, SealedProcessGroup):
        key, seconds = world.key, min(seconds, world.seconds)
    key = sealing_key(key)
    ranks = given.global_ranks_in_group or list(range(given.group_size))
    # A store may outlive its groups. Each rank numbers its groups, so that none finds the addresses of an old one.
    made = given.store.add(f"made {given.group_rank}", 1)
    store = dist.distributed_c10d.PrefixStore(f"{BACKEND}/{made}", given.store)
    transport = PointToPoint(store, given.group_rank, ranks, seconds, f"{given.group_id} {made}")
    return SealedProcessGroup(SecureGroup.over(transport, key, timeout=seconds, run=run), key, seconds)


_DEFAULTS = SimpleNamespace(reduceOp=dist.ReduceOp.SUM, rootRank=0)  # of torch, where a hook gives no options
_Base: Any = dist.ProcessGroup  # its Python types have overloads that torch does not call


class SealedProcessGroup(_Base):  # type: ignore[misc]
    """A process group that delegates to a `SecureGroup`. It has no backend that could send plaintext.

    Torch calls its methods by name, from Python and C++: an operation that is missing here fails.
    """

    def __init__(self, group: SecureGroup, key: Key, seconds: float) -> None:
        super().__init__(group.rank, group.size)
        self.key = key
        self.seconds = seconds
        self._group = group
        self._names = {"name": "", "description": ""}

    @property
    def session(self) -> GroupSession:
        """The session, which those of later groups are derived from if this is the default group."""
        return self._group._link.session  # noqa: SLF001 - of this package

    def broadcast(self, tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        return self._copy("broadcast", tensors, opts)

    def _copy(self, kind: str, tensors: Tensors, opts: Any) -> _Work:
        begin = self._group._copied  # noqa: SLF001 - of this package
        return _Work([begin(kind, item.detach(), opts.rootRank, async_op=True) for item in tensors], tensors)

    def allreduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        return self._reduce("all_reduce", tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        return self._reduce(f"reduce to {opts.rootRank}", tensors, opts)

    def _reduce(self, kind: str, tensors: Tensors, opts: Any) -> _Work:
        op = _reduction(opts)
        return _Work([self._reduced(kind, item.detach(), op, async_op=True) for item in tensors], tensors)

    @property
    def _reduced(self) -> Any:
        return self._group._reduced  # noqa: SLF001 - of this package

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULTS) -> _Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        return self._gather("all_gather", outputs, tensors)

    def _gather(self, kind: str, outputs: Tensors, tensors: Tensors) -> _Work:
        pairs, begin = zip(outputs, tensors, strict=True), self._group._gathered  # noqa: SLF001 - of this package
        return _Work([begin(kind, out.detach(), own.detach(), async_op=True) for out, own in pairs], outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = _DEFAULTS) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        op = _reduction(opts)
        pairs = zip(outputs, tensors, strict=True)
        futures = [self._group.reduce_scatter(out.detach(), all_.detach(), op, async_op=True) for out, all_ in pairs]
        return _Work(futures, outputs)

    def reduce_scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = _DEFAULTS) -> _Work:
        return self.reduce_scatter_single_coalesced(outputs, [_joined(parts) for parts in tensors], opts)

    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        return self._gather_lists("all_gather", outputs, tensors)

    def gather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = _DEFAULTS) -> _Work:
        return self._gather_lists(f"gather to {opts.rootRank}", outputs, tensors)

    def _gather_lists(self, kind: str, outputs: Sequence[Tensors], tensors: Tensors) -> _Work:
        wholes = [own.new_empty(self._group.size * own.numel()) for own in tensors]
        work = self._gather(kind, wholes, tensors)
        work.fill += zip(wholes, outputs, strict=False)  # `gather` has outputs only at its root
        return work

    def scatter(self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = _DEFAULTS) -> _Work:
        (output,) = outputs
        whole = _joined(tensors[0]) if tensors else output.new_empty(self._group.size * output.numel())
        work = self._copy("scatter", [whole], opts)
        work.fill.append((whole.view(self._group.size, -1)[self._group.rank], [output]))
        return work

    def barrier(self, opts: Any = None) -> _Work:
        return _Work([self._reduced("barrier", torch.zeros(1), "sum", async_op=True)], [])

    def refuse(self, *_: Any, **__: Any) -> _Work:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            f"a process group of the backend {BACKEND!r}: expected a collective that is sealed, got another call, such "
            "as an all-to-all, a send, a receive or a split. Use the methods of a SecureGroup, or dist.new_group()"
        )

    send = recv = recv_anysource = alltoall = alltoall_base = all_to_all_single = allgather_coalesced = refuse
    monitored_barrier = split_group = merge_remote_group = set_timeout = _start_coalescing = _end_coalescing = refuse

    # What torch asks beside operations. The group is its own backend on each device, so that no other one is used.

    _device_types = tuple(torch.device(kind) for kind in DEVICES)
    supports_splitting = supports_coalescing = supports_shrinking = supports_time_estimate = False
    get_group_store = dist.distributed_c10d._get_process_group_store  # noqa: SLF001 - torch has no public accessor

    def supports_tensor_alloc(self, _: Any) -> bool:
        return False

    def _get_backend(self, device: Any) -> Any:
        return self if torch.device(device).type in DEVICES else super()._get_backend(device)

    # Names of torch before 2.13 in Python, and operations that do not differ here.
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        self._group.close()

    def abort(self) -> None:
        self._group._link.transport.close()  # noqa: SLF001 - of this package
        with contextlib.suppress(FastrackError):  # of pending operations, for what waits for these
            self._group.close()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name, like the names below
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802
        return self._names["name"]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._names["name"] = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._names["description"]

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._names["description"] = description


class _Work(dist.Work):
    """Operations that torch waits for. `fill` pairs results with the tensors that they are copied to."""

    def __init__(self, futures: Sequence[torch.futures.Future[Any]], result: Any) -> None:
        super().__init__()
        self._futures = futures
        self._result = list(result)
        self.fill: list[tuple[torch.Tensor, Tensors]] = []

    def wait(self, timeout: timedelta | None = None) -> bool:
        for future in self._futures:
            future.wait()
        while self.fill:
            _split(*self.fill.pop())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(future.done() for future in self._futures)

    def is_success(self) -> bool:
        return self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - returned
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        def result(_: Any) -> Any:
            self.wait()  # raises: torch takes the exception of another future for its result
            return self._result

        return torch.futures.collect_all(list(self._futures)).then(result)


def _joined(tensors: Tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _split(whole: torch.Tensor, targets: Tensors) -> None:
    for target, part in zip(targets, whole.view(len(targets), -1), strict=True):
        target.detach().copy_(part.view_as(target))


def _reduction(opts: Any) -> Reduction:
    op = getattr(opts, "reduceOp", opts)  # a hook may give it as it is
    for known, name in _REDUCTIONS:
        if op == known:
            return name
    raise ValueError(f"a sealed collective: expected ReduceOp.SUM, AVG, MAX or MIN, got {op.op}. Choose one of these")


# Torch also calls these from compiled code, and would compile them.
_untraced: Any = torch._disable_dynamo  # type: ignore[attr-defined] # noqa: SLF001 - `torch.compiler.disable` is slow to import
for _class in (SealedProcessGroup, _Work):
    for _name, _method in list(vars(_class).items()):
        if callable(_method) and not _name.startswith("__"):
            setattr(_class, _name, _untraced(_method))
