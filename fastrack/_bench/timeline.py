"""Transfers whose timelines `fastrack bench` draws."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastrack._util.units import size_of

if TYPE_CHECKING:
    from fastrack._util.trace import Span

_RUNS = 7


def record_transfers(nbytes: int, device: str, bits: int) -> "list[tuple[str, list[Span]]]":
    """One transfer of each kind, with what it is called: of several in a row, the one of the median time."""
    import numpy as np

    from fastrack._crypto.keys import Key
    from fastrack._sealed.tensor import seal
    from fastrack._transfer.channel import Channel

    key = Key.generate(bits)
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    sealed = seal(plain, key)
    with Channel(device, keys=key) as channel:
        there = channel.to_device(plain)
        kinds: dict[str, Callable[[], Any]] = {
            "to_device, sealed": lambda: channel.to_device(sealed, out=there),
            "to_device, plain": lambda: channel.to_device(plain, out=there),
            "to_host": lambda: channel.to_host(there),
        }
        return [(f"{kind}, {size_of(nbytes)}, {device}", _median(move)) for kind, move in kinds.items()]


def _median(move: Callable[[], Any]) -> "list[Span]":
    from fastrack._util.trace import recording

    found = []
    for _ in range(_RUNS):
        with recording() as timeline:
            move()
        found.append(timeline.spans())
    return sorted(found, key=_duration)[_RUNS // 2]


def _duration(spans: "list[Span]") -> int:
    return max(span.stop for span in spans) - min(span.start for span in spans)
