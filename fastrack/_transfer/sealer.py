"""Seal the plain tensors of a call into staging buffers, each under the key of its message."""

from __future__ import annotations

from typing import Any, Self

from fastrack._crypto.base import Bytes, Engine
from fastrack._devices.base import Messages, Slab


class PlainSealer:
    """The host's sealer of the plain messages of a call. As a context manager, it wipes its key schedules."""

    def __init__(self, engine: Engine, messages: Messages) -> None:
        self._engine = engine
        self._messages = messages
        self._schedules: dict[int, Any] = {}

    def concerns(self, slab: Slab) -> bool:
        """Return whether a slab has segments of plain messages."""
        plain = self._messages.plain
        return any(plain[segment.message] is not None for segment in slab.segments)

    def fill(self, slab: Slab, buffer: Bytes) -> None:
        """Seal the segments of plain messages into a staging buffer."""
        for number, first, start, stop, size, offset, _ in slab.segments:
            plain = self._messages.plain[number]
            if plain is None:
                continue
            schedule = self._schedules.get(number)
            if schedule is None:
                key = self._messages.keys.key(number)
                try:
                    schedule = self._schedules[number] = self._engine.expand_key(key)
                finally:
                    key.wipe()
            self._engine.seal_run(schedule, plain.array[start:stop], buffer[offset : offset + size], first)
            if stop == self._messages.nbytes[number]:
                self._schedules.pop(number).wipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._schedules:
            self._schedules.popitem()[1].wipe()
