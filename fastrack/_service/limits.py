"""Limit the request rate and the resources in use, by client address."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from fastrack._util.fork import per_process

_MOST_ADDRESSES = 65_536


class RateLimit:
    """A token bucket for each address, as `network_of` counts them.

    An address may send a burst of `burst` requests, then `per_minute`. `clock` never goes back.
    """

    def __init__(self, per_minute: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._burst = float(burst)
        self._clock = clock
        self._lock = per_process(self, "_lock", threading.Lock)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, time of count

    def admit(self, address: str) -> float:
        """Count a request. Return 0 if it is within the limit, else the seconds until the next may come."""
        key, now = network_of(address), self._clock()
        with self._lock:
            tokens, since = self._buckets.pop(key, (self._burst, now))
            tokens = min(self._burst, tokens + (now - since) * self._rate)
            admitted = tokens >= 1
            self._buckets[key] = (tokens - 1 if admitted else tokens), now
            while len(self._buckets) > _MOST_ADDRESSES:
                self._buckets.popitem(last=False)
        return 0.0 if admitted else (1 - tokens) / self._rate


class Quota:
    """A limit on the amount in use: `share` for each address, `total` for all. Not for several threads."""

    def __init__(self, share: int, total: int) -> None:
        self._share = share
        self._total = total
        self._used: Counter[str] = Counter()

    def take(self, address: str, amount: int = 1) -> bool:
        """Take an amount and return True, or return False if it would exceed a limit."""
        key = network_of(address)
        if self._used[key] + amount > self._share or self._used.total() + amount > self._total:
            return False
        self._used[key] += amount
        return True

    def give_back(self, address: str, amount: int = 1) -> None:
        """Give an amount back."""
        key = network_of(address)
        self._used[key] -= amount
        if not self._used[key]:
            del self._used[key]


def network_of(address: str) -> str:
    """Return what an address counts as: itself, or the first 64 bits of one of IPv6."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return parsed.packed[:8].hex()
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
