"""References for collectives, for measurement only: an engine without a cipher, and a ring that encrypts each hop."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto.base import Bytes
from fastrack._transfer.timeline import span
from fastrack.distributed._operation import split
from fastrack.distributed._transport import Pending, Transport
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE

_TIMEOUT = 300.0  # seconds for one hop


class CopyEngine:
    """Moves chunks like an engine, without a cipher. It is its own key schedule."""

    def expand_key(self, _key: object) -> CopyEngine:
        return self

    def wipe(self) -> None:
        """Do nothing: there is no key."""

    def seal_run(self, _schedule: object, source: Bytes, target: Bytes, _first: int) -> None:
        _copy(source, CHUNK_SIZE, target, SEALED_CHUNK_SIZE, source.size)

    def open_run(self, _schedule: object, source: Bytes, target: Bytes, _first: int) -> None:
        _copy(source, SEALED_CHUNK_SIZE, target, CHUNK_SIZE, target.size)


def _copy(source: Bytes, source_stride: int, target: Bytes, target_stride: int, size: int) -> None:
    full, rest = divmod(size, CHUNK_SIZE)
    into = target[: full * target_stride].reshape(full, target_stride)
    np.copyto(into[:, :CHUNK_SIZE], source[: full * source_stride].reshape(full, source_stride)[:, :CHUNK_SIZE])
    target[full * target_stride :][:rest] = source[full * source_stride :][:rest]


class NaiveRing:
    """A ring all-reduce that encrypts each shard anew for every hop, each by one call of OpenSSL's AES-GCM.

    The first half of the 2 (n - 1) hops adds, and the second half passes the sums on. Buffers are reused.
    """

    def __init__(self, transport: Transport, key: bytes) -> None:
        self._transport = transport
        self._rank, self._size = transport.rank, transport.size
        self._cipher = AESGCM(key)
        self._hops = 0
        self._buffers: Sequence[torch.Tensor] = ()
        self._thread = ThreadPoolExecutor(1, "naive-ring")  # like a group's thread, to run during a backward pass

    def all_reduce(self, tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Replace a contiguous tensor by the sum over all ranks; with `async_op`, return a future."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                with torch.no_grad(), span("all_reduce"):
                    self._all_reduce(tensor.view(-1))
            except Exception as error:  # noqa: BLE001 - it is raised where the operation was started
                self._transport.close()  # the other ranks must not wait
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(tensor)

        self._thread.submit(run)
        return future if async_op else future.wait()

    def _all_reduce(self, flat: torch.Tensor) -> None:
        shards = [flat[part] for part in split(flat.numel(), self._size)]
        out, arrived, plain = self._memory(shards[0].nbytes)
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        for hop in range(2 * (self._size - 1)):
            leaving = _bytes(shards[(self._rank - hop) % self._size])
            target = shards[(self._rank - hop - 1) % self._size]
            sums = hop >= self._size - 1
            opened = _bytes(target) if sums else plain[: target.nbytes]
            self._hops += 1
            with span("seal"):
                sealed = out[: leaving.numel() + TAG_SIZE]
                self._cipher.encrypt_into(self._nonce(self._rank), leaving.numpy().data, None, sealed.numpy().data)
            message = arrived[: opened.numel() + TAG_SIZE]
            pending: list[Pending] = [self._transport.receive(message, left), self._transport.send(sealed, right)]
            with span("wait"):
                for transfer in pending:
                    transfer.wait(_TIMEOUT)
            with span("open"):
                self._cipher.decrypt_into(self._nonce(left), message.numpy().data, None, opened.numpy().data)
            if not sums:
                with span("add"):
                    target.add_(opened.view(target.dtype))

    def _memory(self, nbytes: int) -> Sequence[torch.Tensor]:
        """Return buffers for an outgoing message, an incoming one, and its plaintext."""
        if not self._buffers or self._buffers[2].numel() < nbytes:
            self._buffers = [torch.zeros(nbytes + extra, dtype=torch.uint8) for extra in (TAG_SIZE, TAG_SIZE, 0)]
        return self._buffers

    def _nonce(self, rank: int) -> bytes:
        return rank.to_bytes(4, "big") + self._hops.to_bytes(8, "big")

    def close(self) -> None:
        """Close the connections."""
        self._thread.shutdown()
        self._transport.close()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
