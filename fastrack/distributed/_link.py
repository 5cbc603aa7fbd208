"""The session, transport, buffers and counters that the operations of a group share."""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

import torch

from fastrack._crypto.engine import get_engine
from fastrack._keys.keys import Key
from fastrack._keys.leases import LeasedKey
from fastrack._util.fork import per_process
from fastrack.distributed._places import CudaPlace, HostPlace, Place, reuse
from fastrack.distributed._session import RANDOM_SIZE, GroupSession
from fastrack.distributed._transport import Transport
from fastrack.errors import AuthenticationError


class Link:
    """A session of this rank with all others. All ranks start it together.

    Raise AuthenticationError if another rank has another key, is of another group or run, or is silent.
    """

    def __init__(
        self, transport: Transport, key: Key, timeout: float, run: str = "", within: GroupSession | None = None
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.others = [rank for rank in range(transport.size) if rank != self.rank]
        self._timeout = timeout
        self.caller = ""  # of the operation that runs: the thread that made the group, or another one
        self._numbers: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._buffers: dict[str, torch.Tensor] = {}  # of messages
        self._host = HostPlace(get_engine())
        self._gpus: dict[torch.device, CudaPlace] = {}
        self._opening = per_process(self, "_opening", threading.Lock)
        random = os.urandom(RANDOM_SIZE)
        deadline = self.deadline()
        try:
            randoms = {self.rank: random, **self._exchange(random, deadline, self.others)}
        except OSError as error:
            raise AuthenticationError(
                f"starting a group: expected random bytes of every rank, got none of one: {error}. Start all ranks"
            ) from error
        ordered = [randoms[rank] for rank in range(transport.size)]
        self.session = GroupSession(key.material(), ordered, transport.ranks, transport.name, run, within)
        if isinstance(key, LeasedKey):
            self.session.require = key.material
            key.page.watch(self.session)
        self.confirm("start", deadline, self.others)

    def deadline(self) -> float:
        """Return the monotonic time when an operation that begins now times out."""
        return time.monotonic() + self._timeout

    def next_number(self, source: int, target: int) -> int:
        """Return the number of an operation, from 1. Each pair of ranks and the whole group count apart."""
        self._numbers[source, target] += 1
        return self._numbers[source, target]

    def buffer(self, name: str, size: int) -> torch.Tensor:
        """Return uint8 (size,) in host memory for a message. Operations share the buffer."""
        return reuse(self._buffers, name, size, "cpu")

    def place(self, device: torch.device) -> Place:
        """Return the place of tensors on a device. Raise DeviceError if the device cannot be opened."""
        if device.type == "cpu":
            return self._host
        with self._opening:
            if device not in self._gpus:
                self._gpus[device] = CudaPlace(device)
            return self._gpus[device]

    def confirm(self, text: str, deadline: float, ranks: Sequence[int]) -> None:
        """Confirm success to other ranks, and wait for their confirmations."""
        content = text.encode()
        try:
            macs = self._exchange(self.session.mac(content, self.rank), deadline, ranks)
        except OSError as error:
            raise AuthenticationError(
                f"{text}: expected every rank to confirm it, got nothing from one: {error}. A rank or the connection "
                "failed; start the ranks again"
            ) from error
        for rank, mac in macs.items():
            if not hmac.compare_digest(mac, self.session.mac(content, rank)):
                raise AuthenticationError(
                    f"{text}: expected the MAC of rank {rank} in this session, got another. It has another key, "
                    "is of another group or run=, or calls another operation, or its message was altered; start the "
                    "ranks again with one key"
                )

    def _exchange(self, data: bytes, deadline: float, ranks: Sequence[int]) -> dict[int, bytes]:
        """Send bytes to other ranks, and return their bytes."""
        buffers = {rank: torch.zeros(len(data), dtype=torch.uint8) for rank in ranks}
        pending = [self.transport.receive(buffer, rank) for rank, buffer in buffers.items()]
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pending += [self.transport.send(message, rank) for rank in ranks]
        for transfer in pending:
            transfer.wait(deadline - time.monotonic())
        return {rank: buffer.numpy().tobytes() for rank, buffer in buffers.items()}

    def close(self) -> None:
        """Cancel pending messages, wipe the secrets and the staged plaintext, and close the devices."""
        self.transport.close()
        if hasattr(self, "session"):
            self.session.wipe()
        self._buffers.clear()
        self._host.close()
        while self._gpus:
            self._gpus.popitem()[1].close()
