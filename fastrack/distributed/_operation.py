"""The messages of one operation of a group."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Literal, Self

import torch

from fastrack._transfer.timeline import span
from fastrack.distributed._link import Link
from fastrack.distributed._messages import Incoming, Outgoing, Slabs
from fastrack.distributed._places import Place
from fastrack.distributed._session import Route
from fastrack.errors import AuthenticationError

Reduction = Literal["sum", "mean", "max", "min"]

_ADDERS: dict[str, Any] = {"max": torch.maximum, "min": torch.minimum}  # other reductions add

_ALIGNMENT = 64  # elements: shards of a tensor begin at whole cache lines


class CollectiveOperation:
    """The messages of one operation. If its `with` block succeeds, all participants have confirmed success.

    All tensors are on one device. Messages are bound to the operation, to its `detail`, such as the reduction, and to
    the caller of the link: all ranks must agree on these. `source` and `target` are the ranks of a `send`; all ranks
    take part in other operations.
    """

    def __init__(
        self, link: Link, place: Place, operation: str, detail: str = "", *, source: int = -1, target: int = -1
    ) -> None:
        self._link = link
        self._place = place
        self._operation = " ".join(filter(None, (operation, detail, link.caller)))
        self._ranks = link.others if source < 0 else [target if source == link.rank else source]
        self._number = link.next_number(source, target)
        pair = "" if source < 0 else f" from rank {source} to {target}"
        self._name = f"{self._operation} {self._number}{pair}"  # unique to the operation; its ranks confirm it
        self._deadline = link.deadline()
        self._all: list[Incoming | Outgoing] = []
        self._span = span(operation)

    def _route(self, source: int, target: int, tensor: torch.Tensor) -> Route:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Route(self._operation, self._number, source, target, dtype, tensor.nbytes)

    def make(self, target: int, tensor: torch.Tensor) -> Outgoing:
        """Return an unsent message with a tensor."""
        message = Outgoing(self._link, self._place, self._route(self._link.rank, target, tensor), tensor)
        self._all.append(message)
        return message

    def receive(self, source: int, target: int, tensor: torch.Tensor) -> Incoming:
        """Begin to receive a message of a tensor's dtype and size."""
        message = Incoming(self._link, self._place, self._route(source, target, tensor))
        self._all.append(message)
        return message

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Seal and send messages, slab by slab in turn."""
        for slab in range(max((len(message.slabs) for message in messages), default=0)):
            for message in messages:
                if slab < len(message.slabs):
                    message.send(slab)

    def open(self, messages: Sequence[Incoming], targets: Sequence[torch.Tensor]) -> None:
        """Open messages, slab by slab in turn."""
        memories = [self._place.bytes_of(target) for target in targets]
        for slab in range(max((len(message.slabs) for message in messages), default=0)):
            for message, memory in zip(messages, memories, strict=True):
                if slab < len(message.slabs):
                    message.open(slab, memory[message.slabs.plain(slab)], self._deadline)

    def add(self, slab: int, parts: Sequence[Incoming], own: torch.Tensor, total: torch.Tensor, op: Reduction) -> None:
        """Open a slab of all parts, and reduce them and `own` in rank order into `total`, which may be `own`."""
        link = self._link
        plain = Slabs(own.nbytes).plain(slab)
        elements = slice(plain.start // own.itemsize, plain.stop // own.itemsize)
        target = total[elements]
        terms = []
        for part in parts:
            buffer = self._place.buffer(f"slab {part.route.source}", plain.stop - plain.start)
            part.open(slab, self._place.bytes_of(buffer), self._deadline)
            terms.append(buffer.view(own.dtype))
        terms.insert(link.rank, own[elements])
        running = terms[0]
        adder = _ADDERS.get(op, torch.add)
        with span("add"):
            for rank, term in enumerate(terms[1:], 1):
                # `target` may be the memory of `own`, so it is not written before `own` is added.
                running = adder(running, term, out=target if rank >= link.rank else terms[0])
            if len(terms) == 1:
                target.copy_(running)
            if op == "mean":
                target.div_(len(terms))

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        with ExitStack() as stack:
            stack.push(self._span)
            self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        for message in self._all:
            message.wipe()
        try:
            if error is not None:
                raise error
            with span("drain"):
                for message in self._all:
                    if isinstance(message, Outgoing):
                        message.wait(self._deadline)
                self._place.synchronize()
        except OSError as lost:
            raise AuthenticationError(
                f"{self._name}: expected the messages of all ranks in time, got {lost}. A rank or the connection "
                "failed; start the ranks again"
            ) from lost
        with span("confirm"):
            self._link.confirm(self._name, self._deadline, self._ranks)


def split(count: int, ranks: int) -> list[slice]:
    """Return the elements of each rank's shard. The last may be shorter than the others, or empty."""
    size = -(-count // (ranks * _ALIGNMENT)) * _ALIGNMENT
    return [slice(min(rank * size, count), min((rank + 1) * size, count)) for rank in range(ranks)]
