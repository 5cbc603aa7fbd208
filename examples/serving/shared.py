"""Memory that the supervisor and its workers share: requests that were admitted, and counters.

Both are anonymous maps, made before the workers are forked. A worker that is killed at any line leaves them usable.
"""

import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from examples.serving.refusals import REASONS, RefusedError
from examples.serving.sealing import Head

WINDOW = 60  # seconds in which a request has to arrive
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)  # seconds


class Replays:
    """Requests of the window, by their ids: each is admitted once, whichever worker gets it.

    A table of buckets with a lock is the simplest thing that all workers see at once, has a bound, and needs no server
    and no disk. It lives as long as the machine's key pair: requests of an earlier start are for another machine.
    """

    _ENTRY = struct.Struct("<16sq")  # id, and the last second at which its request is not stale

    def __init__(self, *, buckets: int = 4096, ways: int = 32) -> None:
        self._buckets, self._size = buckets, ways * self._ENTRY.size
        self._memory = mmap.mmap(-1, 8 + buckets * self._size)
        self._secret = os.urandom(32)  # or a client could fill the bucket of its choice
        # Locks of records end with the process that holds them. Those of multiprocessing stay after a kill, and those
        # of flock are shared by forked processes.
        self._lock = os.memfd_create("replays", os.MFD_CLOEXEC)

    def admit(self, head: Head) -> None:
        """Remember an authentic request. Refuse one that is stale, or is here."""
        request = bytes.fromhex(head.request)
        digest = hashlib.blake2b(request, key=self._secret, digest_size=8).digest()
        start = 8 + int.from_bytes(digest) % self._buckets * self._size
        with self._locked():
            # Entries are dropped by this clock, so it never goes back: else an old request would be fresh again.
            now = max(int(time.time()), *struct.unpack_from("<q", self._memory))
            struct.pack_into("<q", self._memory, 0, now)
            if not now - WINDOW <= head.time <= now + WINDOW:
                raise RefusedError("stale")
            free = None
            for place in range(start, start + self._size, self._ENTRY.size):
                found, end = self._ENTRY.unpack_from(self._memory, place)
                if end < now:
                    free = place if free is None else free
                elif found == request:
                    raise RefusedError("replayed")
            if free is None:  # to forget one that is not stale would admit it again
                raise RefusedError("crowded")
            self._ENTRY.pack_into(self._memory, free, request, head.time + WINDOW)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


class Counters:
    """Numbers of all processes: a row for each worker and one for the supervisor, each written only by its process."""

    _NAMES = (
        "answered",
        "failed",
        *(f"refused {reason}" for reason in REASONS),
        *(f"reload {result}" for result in ("ok", "refused", "failed")),
        "restarts",
        "generation",  # of the model in use; not a count
        "cause",  # why there is no model, as a place in REASONS; not a count
        *(f"within {bound}" for bound in BOUNDS),
        "microseconds",
    )

    def __init__(self, workers: int) -> None:
        self._columns = {name: number for number, name in enumerate(self._NAMES)}
        self._numbers = memoryview(mmap.mmap(-1, 8 * (workers + 1) * len(self._NAMES))).cast("q")
        self._workers = workers
        self.row = workers  # the supervisor's; a worker sets its own

    def add(self, name: str, count: int = 1) -> None:
        self._numbers[self.row * len(self._NAMES) + self._columns[name]] += count

    def total(self, name: str) -> int:
        return sum(self._numbers[self._columns[name] :: len(self._NAMES)])

    def generation(self, row: int) -> int:
        return self._numbers[row * len(self._NAMES) + self._columns["generation"]]

    @property
    def cause(self) -> str:
        """The reason why there is no model, for all who ask. The supervisor sets it."""
        return list(REASONS)[self.total("cause")]

    @cause.setter
    def cause(self, reason: str) -> None:
        self._numbers[self.row * len(self._NAMES) + self._columns["cause"]] = list(REASONS).index(reason)

    def set_generation(self, number: int, row: int | None = None) -> None:
        row = self.row if row is None else row
        self._numbers[row * len(self._NAMES) + self._columns["generation"]] = number

    def answered(self, seconds: float) -> None:
        """Count an answer, and the time that it took."""
        self.add("answered")
        self.add("microseconds", round(1e6 * seconds))
        for bound in BOUNDS:
            if seconds <= bound:
                self.add(f"within {bound}")

    def expose(self, edition: str) -> str:
        """Return all numbers in the text format of Prometheus. The edition is this worker's own."""
        lines = [
            "# TYPE fastrack_requests_total counter",
            f'fastrack_requests_total{{result="answered"}} {self.total("answered")}',
            f'fastrack_requests_total{{result="failed"}} {self.total("failed")}',
            f'fastrack_requests_total{{result="refused"}} {sum(self.total(f"refused {each}") for each in REASONS)}',
            "# TYPE fastrack_refused_total counter",
            *(f'fastrack_refused_total{{reason="{each}"}} {self.total(f"refused {each}")}' for each in REASONS),
            "# TYPE fastrack_reloads_total counter",
            *(
                f'fastrack_reloads_total{{result="{each}"}} {self.total(f"reload {each}")}'
                for each in ("ok", "refused", "failed")
            ),
            "# TYPE fastrack_worker_restarts_total counter",
            f"fastrack_worker_restarts_total {self.total('restarts')}",
            "# TYPE fastrack_worker_generation gauge",
            *(f'fastrack_worker_generation{{worker="{row}"}} {self.generation(row)}' for row in range(self._workers)),
            "# TYPE fastrack_edition_info gauge",
            *([f'fastrack_edition_info{{edition="{edition}"}} 1'] if edition else []),
            "# TYPE fastrack_answer_seconds histogram",
            *(f'fastrack_answer_seconds_bucket{{le="{each}"}} {self.total(f"within {each}")}' for each in BOUNDS),
            f'fastrack_answer_seconds_bucket{{le="+Inf"}} {self.total("answered")}',
            f"fastrack_answer_seconds_sum {self.total('microseconds') / 1e6}",
            f"fastrack_answer_seconds_count {self.total('answered')}",
        ]
        return "\n".join(lines) + "\n"
