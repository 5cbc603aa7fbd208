"""Limit the rate of requests, and what is in use at a time, by client address."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

_MOST_ADDRESSES = 65_536


class RateLimit:
    """A token bucket for each address. The networks of IPv6 count by their first 64 bits.

    An address may send `burst` requests at once, and `per_minute` for long; `clock` never goes back.
    """

    def __init__(self, per_minute: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._burst = float(burst)
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when they were counted

    def admit(self, address: str) -> float:
        """Count a request; return 0 if it is within the limit, else the seconds after which the next one is."""
        key, now = _network(address), self._clock()
        with self._lock:
            tokens, since = self._buckets.pop(key, (self._burst, now))
            tokens = min(self._burst, tokens + (now - since) * self._rate)
            admitted = tokens >= 1
            self._buckets[key] = (tokens - 1 if admitted else tokens), now
            while len(self._buckets) > _MOST_ADDRESSES:
                self._buckets.popitem(last=False)
        return 0.0 if admitted else (1 - tokens) / self._rate


class Quota:
    """An amount that may be in use at a time, `total`, of which each address has a `share`. Not for several threads.

    The networks of IPv6 count by their first 64 bits.
    """

    def __init__(self, share: int, total: int) -> None:
        self._share = share
        self._total = total
        self._used: Counter[str] = Counter()

    def take(self, address: str, amount: int = 1) -> bool:
        """Count an amount as used, and return True; or return False if that would be too much."""
        key = _network(address)
        if self._used[key] + amount > self._share or self._used.total() + amount > self._total:
            return False
        self._used[key] += amount
        return True

    def give_back(self, address: str, amount: int = 1) -> None:
        """Count an amount as used no more."""
        key = _network(address)
        self._used[key] -= amount
        if not self._used[key]:
            del self._used[key]


def _network(address: str) -> str:
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return found.packed[:8].hex()
    return str(getattr(found, "ipv4_mapped", None) or found)
