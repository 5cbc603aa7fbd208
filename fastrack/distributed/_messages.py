"""Messages in transit: sealed and sent, or received and opened, slab by slab."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from fastrack._crypto.base import Bytes
from fastrack._transfer.timeline import span
from fastrack.distributed._link import Link
from fastrack.distributed._places import SLAB_CHUNKS, Place
from fastrack.distributed._session import EVERYONE, Route
from fastrack.distributed._transport import Pending
from fastrack.errors import AuthenticationError
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE, chunk_count, message_size


class Slabs:
    """The byte ranges of slabs, in plaintext and in the message. The first slab has the header."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.size = message_size(nbytes)
        self._chunks = chunk_count(nbytes)

    def __len__(self) -> int:
        return (self._chunks - 1) // SLAB_CHUNKS + 1

    def plain(self, slab: int) -> slice:
        """Return the plaintext range of a slab."""
        start = slab * SLAB_CHUNKS * CHUNK_SIZE
        return slice(start, min(start + SLAB_CHUNKS * CHUNK_SIZE, self.nbytes))

    def chunks(self, slab: int) -> slice:
        """Return the range of a slab's chunks."""
        start = HEADER_SIZE + slab * SLAB_CHUNKS * SEALED_CHUNK_SIZE
        return slice(start, min(start + SLAB_CHUNKS * SEALED_CHUNK_SIZE, self.size))

    def sent(self, slab: int) -> slice:
        """Return the range to send for a slab: the first includes the header."""
        chunks = self.chunks(slab)
        return slice(0, chunks.stop) if slab == 0 else chunks


class Outgoing:
    """A message that is sealed once and sent to the rank of its route, or to all others.

    A slab of the tensor may change until `send` seals it.
    """

    def __init__(self, link: Link, place: Place, route: Route, tensor: torch.Tensor) -> None:
        self.slabs = Slabs(route.nbytes)
        self._transport = link.transport
        self._place = place
        self._plain: Any = place.bytes_of(tensor)
        self._buffer = link.buffer(f"out {route.target}", self.slabs.size)
        self._memory: Bytes = self._buffer.numpy()
        self._ranks = link.others if route.target == EVERYONE else [route.target]
        self._pending: list[Pending] = []
        header, key = link.session.seal(route)
        self._memory[:HEADER_SIZE] = np.frombuffer(header, np.uint8)
        self._schedule = place.expand_key(key)
        key.wipe()

    def send(self, slab: int) -> None:
        """Seal a slab, and begin to send it."""
        chunks = self._memory[self.slabs.chunks(slab)]
        with span("seal"):
            self._place.seal_run(self._schedule, self._plain[self.slabs.plain(slab)], chunks, slab * SLAB_CHUNKS)
        sent = self._buffer[self.slabs.sent(slab)]
        self._pending += [self._transport.send(sent, rank) for rank in self._ranks]

    def wait(self, deadline: float) -> None:
        """Wait until all is sent."""
        for pending in self._pending:
            pending.wait(deadline - time.monotonic())

    def wipe(self) -> None:
        """Overwrite the expanded key."""
        self._schedule.wipe()


class Incoming:
    """A message from one rank, which is received from now on."""

    def __init__(self, link: Link, place: Place, route: Route) -> None:
        self.slabs = Slabs(route.nbytes)
        self.route = route
        self._session = link.session
        self._place = place
        buffer = link.buffer(f"in {route.source} {route.target}", self.slabs.size)
        self._memory: Bytes = buffer.numpy()
        self._pending = [
            link.transport.receive(buffer[self.slabs.sent(slab)], route.source) for slab in range(len(self.slabs))
        ]
        self._schedule: Any = None

    def open(self, slab: int, target: Any, deadline: float) -> None:
        """Wait for a slab, and open it into `target`, bytes of a tensor on its device. Call it slab by slab.

        Raise AuthenticationError if the slab was altered; a bad chunk leaves zeros in `target`. Raise OSError if the
        slab is lost.
        """
        with span("wait"):
            self._pending[slab].wait(deadline - time.monotonic())
        if self._schedule is None:
            key = self._session.open(self._memory[:HEADER_SIZE].tobytes(), self.route)
            self._schedule = self._place.expand_key(key)
            key.wipe()
        chunks = self._memory[self.slabs.chunks(slab)]
        with span("open"):
            bad = self._place.open_run(self._schedule, chunks, target, slab * SLAB_CHUNKS)
        if bad is not None:
            raise AuthenticationError(
                f"the message of {self.route}, chunk {bad}: expected the tag that was sealed, got another; it was "
                "altered on its way. Start the ranks again",
                chunk=bad,
            )

    def wipe(self) -> None:
        """Overwrite the expanded key."""
        if self._schedule is not None:
            self._schedule.wipe()
