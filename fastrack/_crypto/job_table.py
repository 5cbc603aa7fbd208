"""The table of jobs that native code reads: a row of words for each message of a call."""

from __future__ import annotations

from array import array
from bisect import bisect_right

from fastrack._crypto.base import Jobs, chunks_between
from fastrack._crypto.cobblestone import DERIVED_SIZE
from fastrack.format import CHUNK_SIZE

WORDS = 9
"""The words of a row."""

KEY, BITS, SOURCE, TARGET, SIZE, FIRST, CHUNKS, STARTS, RANGES = range(WORDS)
"""The columns of the table.

Addresses of the key, of the source and of the result; bits of the key; bytes of plaintext of the message; the number of
chunks of the jobs before; and the addresses of a gather's plan, or `WHOLE` or `SEALS` in place of its chunks.
"""

WHOLE, SEALS = 0, 1  # no addresses


class JobTable:
    """The table of some jobs, after each was found to stay inside its message and its result.

    Attributes
    ----------
    address : of the table
    count : the number of chunks of all jobs
    keepalive : all that the addresses in the table point into
    """

    __slots__ = ("address", "count", "keepalive")

    def __init__(self, jobs: Jobs) -> None:
        words: list[int] = []
        count, key = 0, jobs.keys.address
        columns = zip(jobs.keys.bits, jobs.nbytes, jobs.memories, jobs.sealed, jobs.plain, jobs.plans, strict=True)
        for bits, nbytes, target, source, plain, plan in columns:
            if source is None:
                assert plain is not None
                words += (key, bits, plain.address, target.address, nbytes, count, SEALS, 0, 0)
                if plain.size != nbytes or target.size != nbytes:
                    raise ValueError(f"expected {nbytes} bytes to seal, and a result of that size, got others")
                count += nbytes // CHUNK_SIZE + 1
            elif plan is None:
                words += (key, bits, source.address, target.address, nbytes, count, WHOLE, 0, 0)
                if target.size != nbytes:
                    raise ValueError(f"expected a result of {nbytes} bytes, got {target.size}")
                count += chunks_between(source.size, nbytes)
            else:
                chunks, *places = plan.locate(source.size, nbytes, target.size)
                words += (key, bits, source.address, target.address, nbytes, count, *places)
                count += chunks
            key += DERIVED_SIZE
        table = array("q", words)
        self.address = table.buffer_info()[0]
        self.count = count
        self.keepalive = table, jobs

    def find(self, chunk: int) -> tuple[int, int]:
        """Return the job of a chunk, and its number in the message, given its number in the table."""
        table, jobs = self.keepalive
        firsts = table[FIRST::WORDS]
        number = bisect_right(firsts, chunk) - 1
        chunk -= firsts[number]
        plan = jobs.plans[number]
        return number, chunk if plan is None else int(plan.chunks[chunk])
