"""Real connections between ranks on which one message arrives altered, again, elsewhere, swapped or not at all.

Messages keep their sizes: gloo ends a process that gets a longer one than it awaits.
"""

from helpers.network import Sent


class TamperedTransport:
    """A transport that does `kind` to a message that this rank sends, at which the test aims."""

    def __init__(self, inner, kind):
        self._inner = inner
        self._kind = kind
        self._victim = None
        self._count = 0
        self._held = None

    def aim(self, ahead):
        """Choose the message after the next `ahead` ones."""
        self._victim = self._count + ahead

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def send(self, data, target):
        number, self._count = self._count, self._count + 1
        is_victim = number == self._victim
        if is_victim:
            self._held = data.clone(), target
        if self._held is None:
            return self._inner.send(data, target)
        held, at = self._held
        if self._kind == "drop":  # and all that follow it, as a connection does
            return Sent() if target == at else self._inner.send(data, target)
        if self._kind != "flip":
            if is_victim and self._kind != "repeat":
                return Sent()
            # It is repeated, or swapped with the next message of its size: for its rank, or for another one.
            if is_victim or (target == at) == (self._kind == "misroute") or data.numel() != held.numel():
                return self._inner.send(data, target)
        self._held = None
        if self._kind == "flip":
            held[held.numel() // 2] ^= 1
        elif self._kind == "swap":
            self._inner.send(data, target)
        elif self._kind == "misroute":
            self._inner.send(held, target)
            held = data
        return self._inner.send(held, at)
