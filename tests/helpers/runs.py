"""One engine, one key: runs of chunks in and out as bytes, checked on the way."""

import numpy as np
from hypothesis import strategies as st

from fastrack._crypto.gather import GatherPlan
from fastrack._sealed.indexing import plan_rows
from helpers.buffers import Fenced, as_array
from helpers.messages import messages_of, raw_key
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE


class Runs:
    """Runs an engine under one key. Every target has a fence, and every source must come out as it went in."""

    def __init__(self, engine, key, nonce=bytes(12)):
        self.engine = engine
        self.key = raw_key(key, nonce)
        self.schedule = engine.expand_key(raw_key(key, nonce))

    def seal(self, plain, first=0, *, ends=True, offset=0):
        """Seal; `ends` adds the empty last chunk where the message needs one."""
        count = len(plain) // CHUNK_SIZE + 1 if ends else max(1, -(-len(plain) // CHUNK_SIZE))
        source = Fenced.holding(plain, offset)
        target = Fenced(len(plain) + count * TAG_SIZE, offset)
        assert self.engine.seal_run(self.schedule, source.data, target.data, first) is None
        assert target.stands
        assert source.data.tobytes() == bytes(plain)
        return target.data.tobytes()

    def open(self, sealed, first=0, *, offset=0):
        """Open and verify; gives the first bad chunk and the bytes, which hold what the target must hold."""
        source = Fenced.holding(sealed, offset)
        target = Fenced(plain_size_of(len(sealed)), 63 - offset)
        bad = self.engine.open_run(self.schedule, source.data, target.data, first)
        assert target.stands
        assert source.data.tobytes() == bytes(sealed)
        assert self.engine.verify_run(self.schedule, source.data, first) == bad
        return bad, target.data.tobytes()

    def pass_through(self, plain, *, offset=0):
        """Seal every chunk and open it from there; gives the first bad chunk and the bytes that came out."""
        source, target = Fenced.holding(plain, offset), Fenced(len(plain), 63 - offset)
        messages = messages_of([self.key], [len(plain)], [target.data], plain=[source.data])
        bad = self.engine.open_jobs(messages)
        assert target.stands
        assert source.data.tobytes() == bytes(plain)
        return None if bad is None else bad[1], target.data.tobytes()

    def gather(self, sealed, ranges):
        """Open slices of the plaintext, given as (start, length): the first bad chunk, and the bytes of each."""
        pieces, size = plan(ranges)
        target = Fenced(size)
        bad = self.engine.open_gather(self.schedule, as_array(sealed), target.data, pieces)
        assert target.stands
        ends = np.cumsum([length for _, length in ranges], dtype=int)
        return bad, [target.data[end - length : end].tobytes() for end, (_, length) in zip(ends, ranges, strict=True)]


def plan(ranges):
    """Lay slices of the plaintext, given as (start, length), end to end: the plan, and the size of the result."""
    table = {}
    size = 0
    for start, length in ranges:
        stop = start + length
        for chunk in range(start // CHUNK_SIZE, -(-stop // CHUNK_SIZE) if length else 0):
            low, high = max(start, chunk * CHUNK_SIZE), min(stop, (chunk + 1) * CHUNK_SIZE)
            table.setdefault(chunk, []).append((low - chunk * CHUNK_SIZE, size + low - start, high - low))
        size += length
    rows = [row for chunk in table.values() for row in chunk]
    starts = np.cumsum([0, *map(len, table.values())], dtype=np.int64)
    return GatherPlan(np.array(list(table), np.int64), starts, np.array(rows, np.int64).reshape(-1, 3)), size


def plan_of_rows(rows, shape, nbytes):
    """Plan the gather of rows of an array, which lies in so many bytes, as a sealed tensor does."""
    return plan_rows(rows, shape, nbytes)


def as_pieces(chunks, starts, table):
    """Make a plan of lists."""
    rows = np.array(table, np.int64) if len(table) else np.empty((0, 3), np.int64)
    return GatherPlan(np.array(chunks, np.int64), np.array(starts, np.int64), rows)


def ranges_within(size, count):
    """Draw at most so many slices of so many bytes, as (start, length)."""
    lengths = st.integers(0, 300) | st.just(CHUNK_SIZE) | st.integers(0, size)
    pairs = st.tuples(st.integers(0, size - 1), lengths)
    return st.lists(pairs.map(lambda pair: (pair[0], min(pair[1], size - pair[0]))), max_size=count)


def zeroed(plain, chunks):
    """The plaintext with zeros in the places of these chunks."""
    parts = (plain[start : start + CHUNK_SIZE] for start in range(0, len(plain), CHUNK_SIZE))
    return b"".join(bytes(len(part)) if chunk in chunks else part for chunk, part in enumerate(parts))


def plain_size_of(sealed):
    return sealed - -(-sealed // SEALED_CHUNK_SIZE) * TAG_SIZE


def flip(sealed, *bits):
    """Turn over those bits, counted from the first bit of the first byte."""
    altered = bytearray(sealed)
    for bit in bits:
        altered[bit // 8] ^= 1 << bit % 8
    return bytes(altered)
