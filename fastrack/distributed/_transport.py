"""Carry bytes from rank to rank, without protection against reading or altering."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from fastrack._util.fork import register_fork_reset


class Pending(Protocol):
    """A pending send or receive."""

    def wait(self, seconds: float) -> None:
        """Wait until the buffer may be used again. Raise OSError on failure or timeout."""


class Transport(Protocol):
    """Point-to-point messages among the ranks of a group. Messages of two ranks arrive in order."""

    rank: int
    size: int
    ranks: list[int]  # global ranks
    name: str  # of the group that it connects

    def send(self, data: torch.Tensor, target: int) -> Pending:
        """Begin to send uint8 (n,) in host memory. Raise OSError if the connection is lost."""

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        """Begin to receive uint8 (n,) into host memory."""

    def close(self) -> None:
        """Cancel all sends and receives, also on the ranks at the other end. It may be called twice."""


class PointToPoint:
    """`Transport` over gloo, with its own connections. Ranks find each other through a store.

    `rank` is the index of this process in `ranks`. `name` is the name that all these ranks know the group by.
    """

    def __init__(self, store: Any, rank: int, ranks: list[int], seconds: float, name: str) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = ranks
        self.name = name
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, self.size, timedelta(seconds=seconds))
        register_fork_reset(self)

    @classmethod
    def among(cls, group: dist.ProcessGroup | None, seconds: float) -> Self:
        """Connect the ranks of a process group."""
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"a group of the ranks {ranks}: expected one of them, got rank {dist.get_rank()}")
        # Not `dist.new_group`, which reuses the name of a closed group: ranks would find its addresses.
        device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"
        chosen = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8).to(device)
        dist.broadcast(chosen, ranks[0], group)
        name = bytes(chosen.tolist()).hex()
        default = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public accessor
        return cls(dist.distributed_c10d.PrefixStore(f"fastrack/{name}", default), rank, ranks, seconds, name)

    def reset_after_fork(self) -> None:
        """Drop the parent's connections. They are never deleted: that waits for the parent's threads."""
        _of_parents.append(self._gloo)
        self._gloo = None

    def send(self, data: torch.Tensor, target: int) -> Pending:
        return self._begin("send", data, target)

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        return self._begin("recv", buffer, source)

    def _begin(self, call: str, data: torch.Tensor, peer: int) -> Pending:
        gloo = self._gloo
        if gloo is None:
            raise ConnectionError("the connection was closed")
        try:
            return _Work(getattr(gloo, call)([data], peer, 0), data)
        except RuntimeError as error:
            raise _lost(error) from error

    def close(self) -> None:
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            with suppress(RuntimeError):
                gloo.abort()


_of_parents: list[Any] = []  # connections in a forked child


class _Work:
    """`Pending` on a work of torch."""

    def __init__(self, work: dist.Work, data: torch.Tensor) -> None:
        self._work = work
        self._data = data  # kept alive until the work is done

    def wait(self, seconds: float) -> None:
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> OSError:
    reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]  # without gloo's source location
    kind = TimeoutError if "timed out" in reason.lower() else ConnectionError
    return kind(f"{reason:.200}")
