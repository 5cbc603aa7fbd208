"""`PagedSealer`: blocks of a device's paged memory as sealed messages, stored and loaded while the server goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from fastrack._crypto import derivation
from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices.paged.base import PagedBlock, Pages
from fastrack._keys.keyring import KeyLike
from fastrack._tensors.arrays import Bytes
from fastrack._util.fork import per_process
from fastrack.errors import ClosedError, DeviceError
from fastrack.format import HEADER_SIZE, NONCE_SIZE, SALT_SIZE
from fastrack.kv._sealer import REFUSED, BlockContext, BlockSealer


class PagedSealer:
    """Store and load blocks of paged memory as the messages of `BlockSealer`, on a thread for each of both.

    No call raises for what a device or a message does. A block that could not be stored leaves a message that does not
    open. A block that did not open holds zeros, unless the device failed.

    Parameters
    ----------
    pages : Pages
        The paged memory, which `close` closes.
    key : KeyLike, optional
        As for `BlockSealer`.
    """

    def __init__(self, pages: Pages, key: KeyLike | None = None) -> None:
        self.sealer = BlockSealer(key)
        self._pages = pages
        self._store_thread = per_process(self, "_store_thread", partial(ThreadPoolExecutor, 1, "fastrack-kv-store"))
        self._load_thread = per_process(self, "_load_thread", partial(ThreadPoolExecutor, 1, "fastrack-kv-load"))

    def store(
        self, contexts: Sequence[BlockContext], blocks: Sequence[PagedBlock], messages: Sequence[Bytes]
    ) -> Future[list[bool]]:
        """Seal blocks into messages of their sizes, once the caller's work so far is done, and say which are sealed."""
        return self._submit(self._store_thread, partial(self._store, contexts, blocks, messages), len(blocks))

    def load(
        self, contexts: Sequence[BlockContext], blocks: Sequence[PagedBlock], messages: Sequence[Bytes]
    ) -> Future[list[bool]]:
        """Open messages into blocks, once the caller's work so far is done, and say which are open."""
        return self._submit(self._load_thread, partial(self._load, contexts, blocks, messages), len(blocks))

    def close(self) -> None:
        """Wait for all blocks, end the threads, and release what the device keeps for them."""
        self._store_thread.shutdown()
        self._load_thread.shutdown()
        self._pages.close()

    def _submit(self, thread: ThreadPoolExecutor, work: Callable[[Any], list[bool]], count: int) -> Future[list[bool]]:
        try:
            after = self._pages.mark()
        except (ClosedError, DeviceError) as error:  # a server goes on without these blocks
            self.sealer.count("failed", f"blocks were not moved: {type(error).__name__}", count)
            failed: Future[list[bool]] = Future()
            failed.set_result([False] * count)
            return failed
        return thread.submit(work, after)

    def _store(
        self, contexts: Sequence[BlockContext], blocks: Sequence[PagedBlock], messages: Sequence[Bytes], after: Any
    ) -> list[bool]:
        keys = MessageKeys(0)  # wiped in any case, also where there is no memory for more
        try:
            keys = MessageKeys(len(blocks))
            for message in messages:
                message[:HEADER_SIZE] = 0  # a message that is written by half does not open
            headers = [derivation.new_header(os.urandom(SALT_SIZE)) for _ in blocks]
            self._derive(keys, headers, contexts)
            self._pages.seal(keys, blocks, [message[HEADER_SIZE:] for message in messages], after)
            for row, (header, message) in enumerate(zip(headers, messages, strict=True)):
                message[:HEADER_SIZE] = np.frombuffer(header[:SALT_SIZE] + keys.commitment(row), np.uint8)
        except Exception as error:  # noqa: BLE001 - a server goes on without these blocks
            self.sealer.count("unstored", f"blocks were not stored: {type(error).__name__}", len(blocks))
            return [False] * len(blocks)
        finally:
            keys.wipe()
        self.sealer.count("sealed", number=len(blocks))
        return [True] * len(blocks)

    def _load(
        self, contexts: Sequence[BlockContext], blocks: Sequence[PagedBlock], messages: Sequence[Bytes], after: Any
    ) -> list[bool]:
        keys = MessageKeys(0)
        try:
            keys = MessageKeys(len(blocks))
            headers = [message[:HEADER_SIZE].tobytes() for message in messages]
            self._derive(keys, headers, contexts)
            is_own = [keys.commitment(row) == header[SALT_SIZE:] for row, header in enumerate(headers)]
            for row in [row for row, each in enumerate(is_own) if not each]:
                keys.put(row, bytearray(os.urandom(keys.bits[row] // 8 + NONCE_SIZE)))  # no tag is right: it is cleared
            is_open = self._pages.open(keys, blocks, [message[HEADER_SIZE:] for message in messages], after)
        except Exception as error:  # noqa: BLE001 - a server computes these blocks anew
            self.sealer.count("failed", f"blocks were not loaded: {type(error).__name__}", len(blocks))
            return [False] * len(blocks)
        finally:
            keys.wipe()
        found = [own and right for own, right in zip(is_own, is_open, strict=True)]
        if opened := sum(found):
            self.sealer.count("opened", number=opened)
        if refused := len(found) - opened:
            self.sealer.count("refused", REFUSED, refused)
        return found

    def _derive(self, keys: MessageKeys, headers: Sequence[bytes], contexts: Sequence[BlockContext]) -> None:
        rows, secret = range(len(keys)), self.sealer.key.material()
        encoded = [context.encode() for context in contexts]
        derivation.derive_rows(secret, headers, encoded, rows, keys.reserve(rows, 8 * len(secret)))
