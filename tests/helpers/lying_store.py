"""A rendezvous store of an attacker, which answers a rank with the addresses of another group's ranks."""

from datetime import timedelta

import torch.distributed as dist


class LyingStore(dist.Store):
    """A store that looks up the addresses of other ranks under another prefix.

    `crossed` has the prefix that is looked up by the prefix that was asked for. `own` is the rank in the group, whose
    own address is answered as it is.
    """

    def __init__(self, inner, own, crossed=()):
        super().__init__()
        self.inner = inner
        self.own = own
        self.crossed = dict(crossed)
        self.lies = 0

    def _find(self, key):
        for asked, other in self.crossed.items():
            if key.startswith(asked) and "/fastrack/" in key and int(key.rpartition("/")[2]) != self.own:
                self.lies += 1
                return other + key.removeprefix(asked)
        return key

    def get(self, key):
        return self.inner.get(self._find(key))

    def wait(self, keys, timeout=timedelta(seconds=60)):
        self.inner.wait([self._find(key) for key in keys], timeout)

    def check(self, keys):
        return self.inner.check([self._find(key) for key in keys])

    def set(self, key, value):
        self.inner.set(key, value)

    def add(self, key, amount):
        return self.inner.add(key, amount)

    @property
    def timeout(self):
        return timedelta(seconds=60)
