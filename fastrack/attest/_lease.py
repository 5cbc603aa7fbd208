"""Keys on a lease: the machine's side. One thread proves the machine again in time; without that the lease ends."""

from __future__ import annotations

import os
import random
import threading
import traceback
from collections.abc import Callable, Iterable
from datetime import datetime
from math import inf
from typing import NamedTuple, Self

from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._keys.leases import LeasePage, Moment, boottime
from fastrack._net.service import Service
from fastrack._util.fork import per_process, report
from fastrack._util.public import public
from fastrack.attest._client import ask_broker
from fastrack.attest._collect import collect_evidence
from fastrack.attest._exchange import Collector, open_lease
from fastrack.attest._log_head import QUARANTINE, Head
from fastrack.errors import AttestationError, FastrackError, FormatError, LeaseError
from fastrack.grants import Grants, Verifier

Exchange = Callable[[float], list[tuple[Grants, Callable[[], Key]]]]
"""A function that proves this machine within some seconds, and returns the grants that it got by `open_later`."""

_LOST = 2.0, 0.01  # what two clocks may differ by: whole seconds and a correction, and a share of the time
_NAP = 5.0  # seconds at most between two looks at the clock, which a wait does not see stepped or suspended
_PATIENCE = 5.0  # seconds at least for an answer, of those that are left
_PAUSE = 60.0  # seconds at most between two attempts that failed


@public
class Lease(KeyRing):
    """Keys of an owner for a time that is renewed in the background. `lease_keys` takes one.

    It is a key ring, and a context manager, whose end gives the keys back. A forked child has the same keys as long as
    its parent renews them. Another process of the same user gets them by `source`, as ``keys=`` or in
    ``FASTRACK_KEY_FILE``.

    Attributes
    ----------
    seconds : int or None
        The length of the lease; None if the owner gives the keys for ever.
    renewals : int
        How often it was renewed.
    failure : Exception or None
        Why the last attempt to renew it failed; None if it did not.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack import attest
    >>> issubclass(attest.Lease, fastrack.KeyRing)
    True
    """

    seconds: int | None = None
    renewals = 0
    failure: Exception | None = None
    _page: LeasePage | None = None

    def __init__(self, exchange: Exchange, on_expiry: Callable[[LeaseError], object] | None = None) -> None:
        super().__init__()
        self._exchange, self._on_expiry = exchange, on_expiry
        self._stop = per_process(self, "_stop", threading.Event)
        self._process = os.getpid()
        began = Moment.now()  # before the request, so that the lease ends here no later than for its owner
        granted = exchange(inf)
        self._take(began, _terms([grants for grants, _ in granted]))
        self._scopes = {_scope(grants) for grants, _ in granted}
        keys = [open_key() for _, open_key in granted]
        if self.seconds is not None:
            self._page = LeasePage.create(keys, began.after(self.seconds))
            self._page.on_end = self._tell
            keys = [*self._page.keys]
        super().__init__(keys)
        if self._page is not None:
            self._begin()

    @property
    def source(self) -> str:
        """The text by which another process of this user opens the keys, as long as this one lives.

        Raise LeaseError if the owner gave the keys for ever, which only this process has.
        """
        if self._page is None:
            raise LeaseError("sharing keys failed: expected a lease, got keys for ever. Fetch them in that process too")
        return self._page.source

    def close(self) -> None:
        """Give the keys back: no process can use them from now on. Do nothing in a forked child."""
        if os.getpid() == self._process:
            self._on_expiry = None
            self._stop.set()
            if self._page is not None:
                self._page.end("it was given back")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        assert self._page is not None
        self._page.require(*self._keys)  # it watches for the end from now on, whatever keeps the renewals
        threading.Thread(target=self._run, name="fastrack renewal", daemon=True).start()

    def _run(self) -> None:
        page = self._page
        assert page is not None
        while not page.is_over and not self._stop.wait(min(_NAP, max(0.0, (self._due - boottime()) / 1e9))):
            if boottime() >= self._due:
                self._renew()

    def _renew(self) -> bool:
        """Prove the machine anew, and prolong the lease. Return False if that failed."""
        page, began = self._page, Moment.now()
        assert page is not None
        try:
            # So that an answer that never comes leaves time for another try.
            granted = [grants for grants, _ in self._exchange(min(page.left, max(_PATIENCE, page.left / 2)))]
            terms = _terms(granted)
            self._check(page, terms, set(map(_scope, granted)))
            page.prolong(began.after(terms.seconds or 0))
        except Exception as error:  # noqa: BLE001 - tried again until the end
            self.failure = error
            _clear_frames(error)
            if not page.is_over:
                page.reason = f"the last renewal failed: {' '.join(str(error).split())[:300].rstrip('. ')}"
            if isinstance(error, AttestationError) and error.field == QUARANTINE:
                page.end()  # at once, as its owner wants it ended
            pause = min(_PAUSE, max(0.1, page.left / 8)) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            self._due = boottime() + int(pause * 1e9)
            return False
        self._take(began, terms)
        self.renewals, self.failure, page.reason = self.renewals + 1, None, ""
        return True

    def _take(self, began: Moment, terms: _Terms) -> None:
        self._began, self._issued, self.seconds = began, terms.issued, terms.seconds
        # Not all machines that began at one time come back at one time.
        self._due = began.boot + int(terms.renew_after * random.uniform(0.8, 1.0) * 1e9)  # noqa: S311 - no secret

    def _check(self, page: LeasePage, terms: _Terms, scopes: set[tuple[object, ...]]) -> None:
        """Require a lease of the same keys for the same files, and that this machine's clock went on meanwhile."""
        if terms.seconds is None or not self._scopes <= scopes:
            raise FastrackError(
                "renewing a lease failed: expected one of the same keys for the same files, got another. Take a new one"
            )
        own, of_broker = (boottime() - self._began.boot) / 1e9, (terms.issued - self._issued).total_seconds()
        if of_broker > own + _LOST[0] + _LOST[1] * own:  # its host may have stopped it
            page.end(f"the broker's clock went on by {of_broker:.0f} s, and this machine's by {own:.0f} s")

    def _tell(self) -> None:
        """Call `on_expiry`, once, in the process that took the lease."""
        tell, self._on_expiry = self._on_expiry, None
        self._stop.set()
        if tell is not None and self._page is not None:
            error = self._page.error(self.first.id)
            error.__cause__ = self.failure
            try:
                tell(error)
            except Exception as problem:  # noqa: BLE001 - no caller could handle it
                report(f"on_expiry= of a lease failed: {type(problem).__name__}")

    def __repr__(self) -> str:
        return f"<Lease of {self.seconds} s, {', '.join(self._keys)}>"


def _clear_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error have: an offer's secret key, and the grants which that opens."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Terms(NamedTuple):
    """Terms of all grants of one answer, and the time by the broker's clock when they were issued."""

    seconds: int | None
    renew_after: int
    issued: datetime


def _terms(granted: list[Grants]) -> _Terms:
    terms = {(each.seconds, each.renew_after or 0) for each in granted}
    if len(terms) != 1:
        raise FormatError("taking a lease failed: expected one length for all keys, got several; ask the owner")
    return _Terms(*terms.pop(), max(each.issued for each in granted))


def _scope(grants: Grants) -> tuple[object, ...]:
    return grants.key_id, grants.files, grants.lineage, grants.least_version, grants.require, grants.gpus


@public
def lease_keys(
    url: str,
    *,
    owner: Verifier | Iterable[Verifier],
    on_expiry: Callable[[LeaseError], object] | None = None,
    collect: Collector = collect_evidence,
    ca: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
) -> Lease:
    """Take an owner's keys on a lease from a broker: prove this machine, and prove it again before the lease ends.

    One thread renews the lease. If the owner's broker refuses, or is not reached until the end, no key of it opens or
    seals anything more, in this process and in those that share it, and each use raises LeaseError. What was opened
    before is the program's.

    Parameters
    ----------
    url, owner, collect, ca, timeout
        As for `fetch_keys`.
    on_expiry : callable, optional
        A function that is called once when the lease has ended, in a thread, with the `LeaseError` that uses raise. Not
        if the program gives the keys back.

    Returns
    -------
    Lease
        A key ring. Use it in a ``with`` statement, or `close` it. If the owner's broker gives keys for ever, it is a
        ring without an end.

    Raises
    ------
    AttestationError, DeviceError, SignatureError, GrantError, FormatError, OSError, ValueError
        As for `fetch_keys`. DeviceError also if the system has no memory that processes share for reading alone.

    Examples
    --------
    >>> from fastrack import attest
    >>> from fastrack.grants import Verifier
    >>> with attest.lease_keys("https://broker.example", owner=Verifier.load("owner.pub")) as keys:  # doctest: +SKIP
    ...     model = fastrack.load_model("model.safetensors", "cuda", keys=keys)
    """
    broker = Service(url, "the broker", "fetching keys", ca=ca)
    owners = (owner,) if isinstance(owner, Verifier) else tuple(owner)

    seen: Head | None = None

    def exchange(seconds: float) -> list[tuple[Grants, Callable[[], Key]]]:
        nonlocal seen
        pending, grants, head = ask_broker(broker, collect, max(0.001, min(timeout, seconds)), seen)
        granted = open_lease(pending, grants, owner=owners)
        seen = head  # only of an answer that the owner signed
        return granted

    return Lease(exchange, on_expiry)
