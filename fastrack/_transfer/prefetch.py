"""Tensors that open ahead of their use: what `safe_open.prefetch` and `Vault.prefetch` return."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, Self, TypeVar

from fastrack._util.endings import report_at_end
from fastrack._util.fork import register_fork_reset
from fastrack._util.shown import shown
from fastrack.errors import ClosedError

Plan = Mapping[str, slice | None]
Name = TypeVar("Name", bound=Hashable)
_AHEAD = 64 << 20  # bytes that are open and not taken, but for one tensor of any size


class TensorMeta(NamedTuple):
    """Header entry of a tensor, by the names of safetensors.

    `data_offsets` are those that it would have in a plain file of the same tensors, in the order of this file.
    """

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class PrefetchLoader(Generic[Name]):
    """Tensors that a thread opens ahead, each handed out once, by `take` or by iterating, like safetensors' own."""

    def __init__(self, parts: Mapping[Name, Any], open_part: Callable[[Any], Any]) -> None:
        self._parts, self._open = dict(parts), open_part
        self._waiting = deque(self._parts)
        self._is_open = True
        self.reset_after_fork()
        register_fork_reset(self)
        with self._lock:
            self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "fastrack-prefetch")
            self._submit()
        own = vars(self)  # which does not refer to the loader
        report_at_end(self, lambda: next(_failures(own["_ahead"].values()), None))

    def reset_after_fork(self) -> None:
        """Open nothing ahead in a child, which does not have the thread."""
        self._lock = threading.Lock()
        self._ahead: dict[Name, Future[Any]] = {}
        self._size = 0  # bytes of those ahead
        self._pool = None

    def names(self) -> list[Name]:
        """Return the names of the tensors that were not taken, in the order of the file."""
        return list(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def take(self, name: Name) -> Any:
        """Return a tensor, and wait until it is open. Raise KeyError if it was taken, or is not in the plan."""
        with self._lock:
            if not self._is_open:
                raise ClosedError("expected an open loader, got a closed one; call prefetch again")
            if name not in self._parts:
                wanted = shown(getattr(name, "name", name))  # of a ticket too
                raise KeyError(f"tensor {wanted}: expected one of the plan that was not taken, got another one")
            part, ready = self._parts.pop(name), self._ahead.pop(name, None)
            self._size -= 0 if ready is None else part.nbytes
        try:
            with self._lock:
                self._submit()
            return self._open(part) if ready is None or ready.cancel() else ready.result()
        except (KeyboardInterrupt, SystemExit):  # of a signal: the tensor was not handed out, nor its error told
            with self._lock:
                self._parts = {name: part, **self._parts}
            raise

    def __iter__(self) -> Iterator[tuple[Name, Any]]:
        while self._parts:
            name = next(iter(self._parts))
            yield name, self.take(name)

    def close(self) -> None:
        """Stop opening, and release what was not taken. Raise the first error of what was opened and not taken."""
        with self._lock:
            pool, self._pool, self._is_open = self._pool, None, False
            self._parts.clear()
            ahead, self._ahead = self._ahead, {}
        if pool is not None:
            pool.shutdown(cancel_futures=True)
            for ready in ahead.values():
                if not ready.cancelled():
                    ready.result()

    def _submit(self) -> None:
        while self._waiting and self._pool is not None:
            part = self._parts.get(self._waiting[0])
            if part is not None and self._ahead and self._size + part.nbytes > _AHEAD:
                break
            name = self._waiting.popleft()
            if part is not None:  # else it was taken before its turn
                try:
                    self._ahead[name] = self._pool.submit(self._open, part)
                except RuntimeError:  # the interpreter ends
                    return
                self._size += part.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*() if kind is None else (Exception,)):  # the block's own error comes first
            self.close()


def _failures(ahead: Iterable[Future[Any]]) -> Iterator[str]:
    """Yield what is to be said of tensors that failed and that nothing can take any more."""
    for ready in ahead:
        if ready.done() and not ready.cancelled() and ready.exception() is not None:
            yield f"a tensor that was opened ahead failed ({ready.exception()})"
