"""Keys on a lease: their secrets lie in one page that several processes map, and that one of them renews and clears.

The page is anonymous memory with a descriptor (memfd), sealed so that who maps it later only reads it. A forked child
has the mapping of its parent; another process opens ``/proc/PID/fd/N``. Each use of a key looks at the page, which has
the end of the lease: so it ends in all processes, whether or not the one that renews it still runs. Only the process
that took the lease writes to the page; at the end each other one puts empty memory in its place.

A page has, in the byte order of the machine: 16 bytes of `_MAGIC`; the end by CLOCK_BOOTTIME, which counts the time
that a guest was suspended, and the end by CLOCK_REALTIME, in nanoseconds, both zero once it is over; the number of
keys, and of the bytes of JSON; padding up to 64 bytes; 32 bytes for each secret; and JSON with the id and the
restrictions of each key.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol
from weakref import WeakSet, finalize

from fastrack._crypto.message_keys import MessageKeyCache
from fastrack._documents import fields
from fastrack._documents.canonical import encode, parsing, require
from fastrack._documents.strict import parse_strict
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key, derive_id
from fastrack._util.fork import per_process, report
from fastrack._util.registry import PLACES, find
from fastrack._util.rights import require_own
from fastrack._util.shown import shown
from fastrack.errors import DeviceError, FormatError, GrantError, LeaseError

_MAGIC = b"fastrack/lease@1"
_HEAD, _SECRET = 64, 32  # bytes
_LIMIT = 8 << 20  # bytes of a page
_ENDS, _COUNTS = slice(2, 4), slice(4, 6)  # words of the page
_SEALS = 0x1 | 0x2 | 0x4 | 0x10  # F_SEAL_SEAL, SHRINK, GROW and FUTURE_WRITE, which Python's fcntl does not name
_MAP_FIXED = 0x10  # of Linux, which Python's mmap does not name
_LOOK = 1.0  # seconds at most until a process that uses no key notices the end, and forgets what it derived
_SOURCE = re.compile(r"lease:(/proc/[1-9][0-9]{0,9}/fd/[0-9]{1,9})")
_LINKS = "fastrack._devices.cuda.link"  # which a process without a GPU has not loaded
_FORM: fields.Fields = {
    "id": fields.ID.of("key_id"),
    "bits": fields.BITS,
    "files": fields.or_none(fields.list_of(fields.ID)),
    "lineage": fields.or_none(fields.ID),
    "least_version": fields.NUMBER,
    "bound": fields.or_none(fields.list_of(fields.or_none(fields.list_of(fields.TEXT)), 1)),  # to GPUs, as of `Key`
}
_KEYS = fields.list_of(fields.record(lambda **members: members, _FORM))

boottime: Callable[[], int] = time.monotonic_ns
if hasattr(time, "CLOCK_BOOTTIME"):
    boottime = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
realtime: Callable[[], int] = time.time_ns


class Moment(NamedTuple):
    """A moment by both clocks, in nanoseconds. Either may say that a lease is over: the host may set one of them."""

    boot: int
    real: int

    @classmethod
    def now(cls) -> Moment:
        return cls(boottime(), realtime())

    def after(self, seconds: float) -> Moment:
        """Return the moment that is some seconds later by both clocks."""
        return Moment(self.boot + int(seconds * 1e9), self.real + int(seconds * 1e9))


class Wipeable(Protocol):
    """A secret that was derived from a leased key."""

    def wipe(self) -> None: ...


class LeasePage:
    """The secrets of a lease, and its end. `create` makes one, and `open_page` maps that of another process.

    The process that made it may prolong it. Threads of all processes may use its keys.
    """

    def __init__(self, descriptor: int, size: int, *, is_own: bool) -> None:
        memory = _Memory(descriptor, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_own else 0))
        memory.require_in_force = lambda: self.require(*(key.id for key in self.keys))
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_DONTDUMP)
        view = memoryview(memory)
        self._descriptor, self._memory, self._words = descriptor, view, view[:_HEAD].cast("Q")
        if is_own:  # not closed at the end: another process could open another file by its number
            finalize(self, _close, descriptor, os.getpid())
        self._place = _place_of(os.fstat(descriptor))
        self.ends = self._words[_ENDS]
        self._owner = os.getpid() if is_own else None
        self._has_ended = False
        self.is_watched = per_process(self, "is_watched", lambda: False)  # and was not found over
        self._lock = per_process(self, "_lock", threading.RLock)
        self._stop = per_process(self, "_stop", threading.Event)
        self._derived: WeakSet[Wipeable] = WeakSet()
        self.reason = ""  # of the end, where it is known
        self.on_end: Callable[[], None] | None = None
        self.keys: list[LeasedKey] = []

    @classmethod
    def create(cls, keys: Sequence[Key], ends: Moment) -> LeasePage:
        """Move the secrets of keys into a new page, and wipe the keys. Raise DeviceError if the system has no pages."""
        described = encode([_describe(key) for key in keys])
        size = _HEAD + _SECRET * len(keys) + len(described)
        try:
            import fcntl  # not on every system

            descriptor = os.memfd_create("fastrack lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(descriptor, 0o400)
            os.ftruncate(descriptor, size)
            page = cls(descriptor, size, is_own=True)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except (ImportError, AttributeError, OSError) as error:
            raise DeviceError(
                f"making a lease failed: expected memory that others map for reading (Linux 5.1), got {error}. Use a "
                "newer system"
            ) from None
        page._memory[size - len(described) :] = described
        page._memory[: len(_MAGIC)] = _MAGIC
        page._words[4], page._words[5] = len(keys), len(described)
        for place, key in zip(page._places(len(keys)), keys, strict=True):
            secret = key.material()
            place[: len(secret)] = secret
            key.wipe()
        page.ends[0], page.ends[1] = ends
        page.read_keys()
        return page

    @property
    def source(self) -> str:
        """The text that opens the page in another process of this user, as ``keys=`` or ``FASTRACK_KEY_FILE``."""
        return f"lease:/proc/{self._owner}/fd/{self._descriptor}"

    @property
    def is_own(self) -> bool:
        """Return whether this process took the lease. Only it writes to the page."""
        return os.getpid() == self._owner

    @property
    def is_over(self) -> bool:
        """Return whether the lease is over. Once it was found over, it stays so, whatever the clocks say later."""
        if not self._has_ended and boottime() < self.ends[0] and realtime() < self.ends[1]:
            return False
        self.end()
        return True

    @property
    def left(self) -> float:
        """The seconds until the end by the clock that comes there first."""
        return max(0.0, min(self.ends[0] - boottime(), self.ends[1] - realtime()) / 1e9)

    def require(self, *ids: str) -> None:
        """Raise LeaseError, which names these keys, unless the lease is in force, and watch for its end."""
        if self.is_over:
            raise self.error(", ".join(ids))
        self._begin_watch()

    def error(self, key_id: str) -> LeaseError:
        """Return the error of a use after the end."""
        reason = f", as {self.reason}" if self.reason else ""
        return LeaseError(
            f"using key {key_id} failed: expected a lease in force, got one that ended{reason}. Take a new one; if "
            "none is given, the owner's log says why"
        )

    def prolong(self, ends: Moment) -> None:
        """Set another end. Raise LeaseError if the lease is over, which nothing brings back."""
        with self._lock:
            if self.is_over:
                raise self.error(self.keys[0].id)
            self.ends[0], self.ends[1] = ends

    def watch(self, derived: Wipeable) -> None:
        """Wipe a secret that was derived from a key of the page when the lease ends, as long as it exists."""
        with self._lock:
            self._derived.add(derived)
        if self._has_ended:
            derived.wipe()

    def end(self, reason: str = "") -> None:
        """End the lease in all processes: clear the page, and forget what was derived in this one."""
        with self._lock:
            if self._has_ended:
                return
            self.reason = self.reason or reason
            if self.is_own:
                self.ends[0] = self.ends[1] = 0  # first: who looks now sees that it is over
                secrets = self._memory[_HEAD : _HEAD + _SECRET * self._words[4]]
                secrets[:] = bytes(len(secrets))
            else:  # its process may be about to prolong it, with what it has
                _forget(self._memory)
            self._has_ended, self.is_watched = True, False  # last: after an interrupt the next look does all of it
            derived = (*self.keys, *self._derived)
        self._stop.set()
        for each in derived:
            each.wipe()
        _pages.pop(self._place, None)
        # Message keys that are wrapped under the key of a device's link outlive the page.
        for link in tuple(getattr(sys.modules.get(_LINKS), "links", ())):
            try:
                link.renew()
            except Exception as error:  # noqa: BLE001 - it is replaced at the next call
                report(f"replacing the key of a device at the end of a lease failed: {type(error).__name__}")
        if self.on_end is not None and self.is_own:
            self._tell(self.on_end)

    @staticmethod
    def _tell(on_end: Callable[[], None]) -> None:
        """Call a function of the program's outside of the call that found the end."""
        with suppress(RuntimeError):  # at the end of the process there are no new threads
            threading.Thread(target=on_end, name="fastrack lease ended", daemon=True).start()

    def read_keys(self) -> None:
        """Read the keys of the page. Raise FormatError if it is none, and LeaseError if it is over."""
        with parsing("the memory of a lease is no page of keys", "name that of a process which holds one"):
            count, size = self._words[_COUNTS]
            begin = _HEAD + _SECRET * count
            require(bytes(self._memory[: len(_MAGIC)]) == _MAGIC and begin + size == len(self._memory), "size")
            described = _KEYS.read(parse_strict(bytes(self._memory[begin:]).decode()))
            require(len(described) == count, "keys")
        for place, members in zip(self._places(count), described, strict=True):
            if self.is_over:
                raise self.error(members["key_id"])
            if members["bound"]:
                find(PLACES["bind"])(members["key_id"], "confidential", *members["bound"])
            self.keys.append(LeasedKey(self, place, **members))
        _pages[self._place] = self

    def _places(self, count: int) -> list[memoryview]:
        return [self._memory[start : start + _SECRET] for start in range(_HEAD, _HEAD + _SECRET * count, _SECRET)]

    def _begin_watch(self) -> None:
        with self._lock:
            if not self.is_watched and not self._has_ended:
                threading.Thread(target=self._look, name="fastrack lease", daemon=True).start()
                self.is_watched = True

    def _look(self) -> None:
        while not self.is_over and not self._stop.wait(min(_LOOK, self.left + 0.001)):
            pass


class LeasedKey(Key):
    """A key whose secret lies in the page of a lease. It stays one object over all renewals."""

    __slots__ = ("_ends", "_view", "page")

    def __init__(
        self, page: LeasePage, place: memoryview, key_id: str, bits: int, bound: Any, **restrictions: Any
    ) -> None:
        self._bound = bound
        self._wiped, self._files, self._lineage, self._least_version = False, None, None, 0
        self._message_keys: MessageKeyCache | None = None
        self.page, self._ends = page, page.ends
        self._secret = place[: bits // 8]  # type: ignore[assignment]
        self._view = place[: bits // 8].toreadonly()
        self._id = derive_id(self._secret)
        if self._id != key_id:
            raise FormatError(f"the memory of a lease was damaged: expected key {key_id}, got another; take a new one")
        self.restrict(**restrictions)

    @property
    def is_wiped(self) -> bool:
        """True after the lease ended, or the secret was overwritten."""
        return self._wiped or self.page.is_over

    def material(self) -> memoryview:
        """Return a read-only view of the secret. Raise LeaseError if the lease is over. Not public."""
        ends = self._ends  # each use looks at the page, so in few steps
        if self._wiped or not self.page.is_watched or boottime() >= ends[0] or realtime() >= ends[1]:
            self.page.require(self._id)
            super().material()
        return self._view

    @property
    def message_keys(self) -> MessageKeyCache:
        """The cache of message keys derived from this key. Raise LeaseError if the lease is over. Not public."""
        self.material()
        return super().message_keys

    def require_unrestricted(self) -> None:
        """Raise GrantError: a key that was stored or granted to others would outlive its lease. Not public."""
        raise GrantError(
            f"storing key {self.id} failed: expected one for ever, got one on a lease, which a file would outlive. Use "
            "it in this program, or ask its owner for one to keep"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key on a lease stays in its process and cannot be pickled or copied; pass the `source` of the lease to "
            "processes that are started anew, as keys= or in FASTRACK_KEY_FILE"
        )

    def wipe(self) -> None:
        """End the use of the key in this process, and the whole lease if it is the one that took it."""
        self._wiped = True
        if self._message_keys is not None:
            self._message_keys.wipe()
        if self.page.is_own:  # other processes would find zeros in its place, and a lease in force
            self.page.end("a key of it was wiped")


def open_page(source: str) -> KeyRing:
    """Open the page that a process shows as ``lease:/proc/PID/fd/N``, and return its keys.

    Raise FormatError if it is no page of a lease, KeyPermissionError if it is another user's, LeaseError if the lease
    is over, and OSError if it cannot be read.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise FormatError(f"opening a lease failed: expected lease:/proc/PID/fd/N, got {shown(source)}. Copy the whole")
    try:
        descriptor = os.open(match[1], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise LeaseError(
            f"opening {source} failed: expected a lease in force, got none: its process ended, or the lease did. Take "
            "a new one, in a process that lives as long as those which use it"
        ) from None
    try:
        status = os.fstat(descriptor)
        known = _pages.get(_place_of(status))
        if known is None or known.is_over:
            require_own(Path(match[1]), status)
            _require_page(descriptor, status, source)
            known = LeasePage(descriptor, status.st_size, is_own=False)
            known.read_keys()
        return KeyRing(known.keys)
    finally:
        os.close(descriptor)


class _Memory(mmap.mmap):
    """The memory of a page. A view of a secret leads to it: who finds zeros there asks it whether the lease ended."""

    require_in_force: Callable[[], None]


def _require_page(descriptor: int, status: os.stat_result, source: str) -> None:
    """Raise FormatError unless a file is memory that cannot be cut, and that only its maker can write to."""
    import fcntl

    with suppress(OSError):  # of what has no seals
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if is_sealed and stat.S_ISREG(status.st_mode) and _HEAD <= status.st_size <= _LIMIT:
            return
    raise FormatError(f"opening {source} failed: expected the page of a lease, got something else. Copy the whole text")


def _forget(memory: memoryview) -> None:
    """Put empty memory in the place of a mapping that others have too. Views of it stay valid, and see zeros."""
    import ctypes

    import numpy as np

    address, size = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data), ctypes.c_size_t(len(memory))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    replace = ctypes.CDLL(None).mmap
    replace.restype = ctypes.c_void_p
    if replace(address, size, mmap.PROT_READ, flags, -1, ctypes.c_long(0)) != address.value:
        report("forgetting the memory of a lease failed: it is not used any more, but stays until the process ends")


def _close(descriptor: int, process: int) -> None:
    if os.getpid() == process:
        os.close(descriptor)


def _place_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _describe(key: Key) -> dict[str, Any]:
    files = None if key.files is None else sorted(key.files)
    described = {"id": key.id, "bits": key.bits, "files": files, "lineage": key.lineage, "bound": key._bound}  # noqa: SLF001 - of this package
    return {**described, "least_version": key.least_version}


_pages: dict[tuple[int, int], LeasePage] = {}  # of this process and, in a forked child, of its parent
