"""Real connections between ranks on which one message arrives altered, again, elsewhere, exchanged or not at all.

Messages keep their sizes: gloo ends a process that gets a longer one than it awaits.
"""


class TamperedTransport:
    """A transport that does `kind` to a message that this rank sends, at which the test aims."""

    def __init__(self, inner, kind):
        self._inner = inner
        self._act = getattr(self, f"_{kind}")
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
        if number == self._victim:
            self._held = data.clone(), target
        if self._held is None:
            return self._inner.send(data, target)
        held, at = self._held
        return self._act(held, at, data, target, number == self._victim)

    def _pass(self, data, target):
        """Send the last message that is altered."""
        self._held = None
        return self._inner.send(data, target)

    def _flip(self, held, at, _data, _target, _first):
        held[held.numel() // 2] ^= 1
        return self._pass(held, at)

    def _drop(self, _held, at, data, target, _first):
        """Drop it and all that follow it, as a connection does."""
        return Sent() if target == at else self._inner.send(data, target)

    def _repeat(self, held, at, data, target, first):
        """Have it arrive again, in place of the next of its size."""
        if first or target != at or data.numel() != held.numel():
            return self._inner.send(data, target)
        return self._pass(held, at)

    def _swap(self, held, at, data, target, first):
        """Have the next of its size arrive before it."""
        if first:
            return Sent()
        if target != at or data.numel() != held.numel():
            return self._inner.send(data, target)
        self._inner.send(data, target)
        return self._pass(held, at)

    def _misroute(self, held, at, data, target, first):
        """Exchange it with the next of its size for another rank."""
        if first:
            return Sent()
        if target == at or data.numel() != held.numel():
            return self._inner.send(data, target)
        self._inner.send(held, target)
        return self._pass(data, at)


class Sent:
    def wait(self, seconds):
        pass
