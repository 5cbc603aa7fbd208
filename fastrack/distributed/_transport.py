"""Bring bytes from one rank to another, with no care for who reads or alters them on the way."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Pending(Protocol):
    """A send or a receive that has begun."""

    def wait(self, seconds: float) -> None:
        """Return when the buffer may be used again. Raise OSError if it fails, or takes longer."""


class Transport(Protocol):
    """Point-to-point messages among the ranks of a group. Messages of two ranks arrive in the order they were sent."""

    rank: int
    size: int
    ranks: list[int]  # their global ranks

    def send(self, data: torch.Tensor, target: int) -> Pending:
        """Begin to send uint8 (n,) in host memory. Raise OSError if the connection is lost."""

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        """Begin to receive uint8 (n,) into host memory."""

    def close(self) -> None:
        """Give up all sends and receives, those of the other ranks with this one as well. It may be called twice."""


class PointToPoint:
    """`Transport` on a process group of its own, with the ranks of another one."""

    def __init__(self, group: dist.ProcessGroup | None, seconds: float) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        timeout = timedelta(seconds=seconds)
        own = dist.new_group(self.ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
        assert isinstance(own, dist.ProcessGroup)
        self._group: dist.ProcessGroup | None = own
        self.rank = own.rank()
        self.size = own.size()

    def send(self, data: torch.Tensor, target: int) -> Pending:
        return self._begin(dist.isend, data, group_dst=target)

    def receive(self, buffer: torch.Tensor, source: int) -> Pending:
        return self._begin(dist.irecv, buffer, group_src=source)

    def _begin(self, call: Any, data: torch.Tensor, **peer: int) -> Pending:
        if self._group is None:
            raise OSError("the connection was closed")
        try:
            return _Work(call(data, group=self._group, **peer), data)
        except RuntimeError as error:
            raise _lost(error) from error

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group._get_backend(torch.device("cpu")).abort()  # noqa: SLF001 - the public way waits for the others
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)


class _Work:
    """`Pending` on a work of torch."""

    def __init__(self, work: dist.Work, data: torch.Tensor) -> None:
        self._work = work
        self._data = data  # alive until it is done

    def wait(self, seconds: float) -> None:
        try:
            self._work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> OSError:
    kind = TimeoutError if "timed out" in str(error).lower() else ConnectionError
    return kind(str(error).strip().rsplit("\n", 1)[-1][:300])
