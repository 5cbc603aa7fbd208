"""Read messages on the host: `OpenMessage`, and `open_whole`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from fastrack._crypto import cobblestone
from fastrack._crypto.engine import get_engine
from fastrack._crypto.gather import Ranges
from fastrack._keys.keyring import KeyRing
from fastrack._sealed.message_headers import discard, fetch, open_header
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location
from fastrack.errors import AuthenticationError
from fastrack.format import HEADER_SIZE, SEALED_CHUNK_SIZE


class OpenMessage:
    """Message with an authenticated header, to be read on the host. As a context manager, it wipes its key."""

    def __init__(self, sealed: SealedTensor, keys: KeyRing) -> None:
        self._sealed = sealed
        self._storage, start = sealed.location
        self._start, self._end = start + HEADER_SIZE, start + sealed.message_size
        self._engine = get_engine()
        message_key = open_header(sealed, keys)
        self._schedule = self._engine.expand_key(message_key)
        message_key.wipe()

    def read(self, memory: Bytes, first: int = 0) -> None:
        """Authenticate and decrypt the whole chunks from `first` on that fill `memory`.

        If a chunk was altered, fill `memory` with zeros, and raise AuthenticationError.
        """
        start, stop = self._span(first, memory.size)
        bad = self._attempt(
            lambda: self._engine.open_run(self._schedule, self._storage.view(start, stop), memory, first),
            lambda: self._storage.discard([(start, stop)]),
        )
        if bad is not None:
            memory.fill(0)
            raise bad_chunk(self._sealed.name, bad, path=self._sealed.path)

    def gather(self, ranges: Ranges, memory: Bytes) -> None:
        """Authenticate and decrypt parts of the message into `memory`, like `read`."""
        pieces = ranges.pieces()
        parts = [(self._sealed, lambda: ranges)]

        def gather() -> int | None:
            [sealed] = fetch(parts) or [self._sealed]
            assert sealed is not None
            return self._engine.open_gather(self._schedule, sealed.chunks, memory, pieces)

        bad = self._attempt(gather, lambda: discard(parts))
        if bad is not None:
            memory.fill(0)
            raise bad_chunk(self._sealed.name, bad, path=self._sealed.path)

    def verify_run(self, first: int, size: int) -> int | None:
        """Return the first chunk with a wrong tag in `size` bytes from chunk `first` on, or None."""
        start, stop = self._span(first, size)

        def verify() -> int | None:
            part = self._storage.view(start, stop)
            self._storage.prefetch([(stop, min(2 * stop - start, self._end))])  # downloads during this run
            return self._engine.verify_run(self._schedule, part, first)

        return self._attempt(verify, lambda: self._storage.discard([(start, stop)]))

    def _attempt(self, function: Callable[[], int | None], forget: Callable[[], bool]) -> int | None:
        """Call a function on chunks, and once more if a chunk from the cache of a remote file is wrong."""
        bad = function()
        if bad is not None and bad >= 0 and forget():
            bad = function()
        return bad

    def _span(self, first: int, size: int) -> tuple[int, int]:
        """Return the start and stop in the storage of the chunks of `size` bytes."""
        start = self._start + first * SEALED_CHUNK_SIZE
        return start, start + cobblestone.segment_size(first, size, self._sealed.nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._schedule.wipe()


def open_whole(sealed: SealedTensor, keys: KeyRing) -> Bytes:
    """Return the plaintext of a message, authenticated."""
    with OpenMessage(sealed, keys) as message:
        memory = arrays.empty_bytes(sealed.nbytes)
        message.read(memory)
    return memory


def bad_chunk(
    name: str | None, chunk: int, outcome: str = "nothing of the tensor was handed out", *, path: Location | None = None
) -> AuthenticationError:
    """Return the error for an altered chunk, an altered gather plan (-1), or a call that was not run whole (-2)."""
    advice = "get the file again from its owner"
    if path is None:
        advice = "get the message again from its owner, and run `fastrack verify` on the file it came in"
    message = f"tensor {name!r:.200}, chunk {chunk}: the ciphertext or its tag was altered, so {outcome}; {advice}"
    if chunk < -1:
        message = (
            f"tensor {name!r:.200}: the device has not run, or not told, all of its call, so {outcome}; move all "
            "tensors of the call again, and if that fails too, distrust the machine"
        )
    elif chunk < 0:
        message = (
            f"rows of tensor {name!r:.200}: the list of their places was altered on its way to the device, so "
            f"{outcome}; move them again, and if that fails too, distrust the machine"
        )
    prefix = "" if path is None else f"{path}: "
    return AuthenticationError(f"{prefix}{message}", tensor=name, chunk=chunk if chunk >= 0 else None, path=path)
