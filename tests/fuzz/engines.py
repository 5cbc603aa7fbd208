"""Engines beside pyca/cryptography, on runs and plans made at random, in memory that ends at an inaccessible page.

Native code that reads or writes one byte too many there ends the process with SIGSEGV.
"""

import numpy as np
from helpers import engines, reference
from helpers.buffers import Guarded, as_array
from helpers.messages import messages_of, raw_key
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE

from fastrack._crypto import cobblestone, gather
from fastrack.format import COMMITMENT_SIZE, MAX_CHUNKS, SALT_SIZE
from fuzz.common import require

LONGEST = 4  # chunks of a run
ENDS = [0, 1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 255, 256, 511, 512, 513, 1023, 1024, 4095, 8191]
ENDS += range(16366, CHUNK_SIZE)
WILD = [-1, 1, -(2**63), 2**63 - 1, 2**62, CHUNK_SIZE, CHUNK_SIZE + 1, 2**32, 2**59]


class Engines:
    """Every engine of this machine. The input is nothing but the seed of what is made at random."""

    name = "engine"

    def __init__(self):
        self._engines = [engines.make(name, 1) for name in engines.NAMES]
        self._source, self._target = (Guarded((LONGEST + 1) * SEALED_CHUNK_SIZE) for _ in range(2))

    def seeds(self):
        return [bytes([number]) for number in range(8)]

    @staticmethod
    def mutate(_data, random):
        return random.randbytes(8)

    def run(self, data):
        random = np.random.default_rng([len(data), *data])
        case = Case(random)
        for engine in self._engines:
            schedule = engine.expand_key(raw_key(case.key, case.nonce))
            try:
                self._seal(engine, schedule, case)
                self._open(engine, schedule, case)
                self._pass(engine, case)
                if case.is_message and case.plain.size:
                    self._gather(engine, schedule, case)
                self._derive(engine, case)
            finally:
                schedule.wipe()

    def _put(self, content, case):
        source = self._source.take(content.size, at_end=case.flip())
        source[:] = content
        return source

    def _take(self, size, case):
        target = self._target.take(size, at_end=case.flip())
        target[:] = 0x5A
        return target

    def _seal(self, engine, schedule, case):
        target = self._take(case.sealed.size, case)
        engine.seal_run(schedule, self._put(case.plain, case), target, case.first)
        require(np.array_equal(target, case.sealed), f"{engine.name} sealed something else")

    def _open(self, engine, schedule, case):
        source = self._put(case.sealed, case)
        bad, expected = case.damage(source, case.plain)
        wrong = case.first + min(bad) if bad else None
        target = self._take(case.plain.size, case)
        require(engine.open_run(schedule, source, target, case.first) == wrong, f"{engine.name} misjudged a run")
        require(np.array_equal(target, expected), f"{engine.name} opened a run to something else")
        require(engine.verify_run(schedule, source, case.first) == wrong, f"{engine.name} misjudged what it verified")

    def _pass(self, engine, case):
        target = self._take(case.plain.size, case)
        source, key = self._put(case.plain, case), raw_key(case.key, case.nonce)
        bad = engine.open_jobs(messages_of([key], [source.size], [target], plain=[source]))
        require(bad is None and np.array_equal(target, case.plain), f"{engine.name} passed something else")

    def _derive(self, engine, case):
        headers, contexts, rows, keys = case.derivations()
        target = self._take(cobblestone.DERIVED_SIZE * len(rows), case)
        pairs = enumerate(zip(headers, keys, strict=True))
        bad = [place for place, (header, key) in pairs if header[SALT_SIZE:] != key[-COMMITMENT_SIZE:]]
        found = engine.derive_keys(case.key, headers, contexts, rows, target.data)
        require(found == min(bad, default=None), f"{engine.name} misjudged a commitment")
        for row, key in zip(rows, keys, strict=True):
            derived = target[cobblestone.DERIVED_SIZE * row :][: len(key)].tobytes()
            require(derived == key, f"{engine.name} derived something else")

    def _gather(self, engine, schedule, case):
        pieces, size = case.plan()
        source = self._put(case.message, case)
        bad, plain = case.damage(source, case.plain)
        target = self._take(size, case)
        is_sound = stays_inside(pieces, case.plain.size, size)
        try:
            found = engine.open_gather(schedule, source, target, pieces)
        except ValueError:
            require(not is_sound, f"{engine.name} refused a plan that is sound")
            require((target == 0x5A).all(), f"{engine.name} wrote before it refused a plan")
            return
        require(is_sound, f"{engine.name} followed a plan that is not sound")
        require(
            found == min(bad.intersection(pieces.chunks.tolist()), default=None), f"{engine.name} misjudged a gather"
        )
        expected = np.full(size, 0x5A, np.uint8)
        for place, chunk in enumerate(pieces.chunks.tolist()):
            for offset, there, length in pieces.table[pieces.starts[place] : pieces.starts[place + 1]].tolist():
                start = chunk * CHUNK_SIZE + offset
                expected[there : there + length] = plain[start : start + length]
        require(np.array_equal(target, expected), f"{engine.name} gathered something else")


class Case:
    """A run of chunks and its key. `message` is the same as a message of its own, from chunk 0 on."""

    def __init__(self, random):
        self._random = random
        self.key, self.nonce = random.bytes(int(random.choice([16, 32]))), random.bytes(12)
        self.is_message = bool(random.random() < 0.8)  # or a run that whole chunks end
        whole = int(random.integers(0, LONGEST))
        size = whole * CHUNK_SIZE + self._end() if self.is_message else (whole + 1) * CHUNK_SIZE
        self.count = whole + 1
        last = MAX_CHUNKS - self.count
        self.first = int(random.choice([0, 1, 2**32 - 1, 2**32, last, random.integers(0, last)]))
        self.plain = random.integers(1, 256, size, np.uint8)
        self.sealed, self.message = (
            as_array(reference.seal(self.key, self.nonce, self.plain.tobytes(), first, ends=self.is_message))
            for first in (self.first, 0)
        )

    def _end(self):
        return int(self._random.choice(ENDS) if self.flip() else self._random.integers(0, CHUNK_SIZE))

    def flip(self):
        return bool(self._random.random() < 0.5)

    def derivations(self):
        """Make headers and contexts, rows in any order, and the keys with their commitments. Some bits are flipped."""
        random, count = self._random, int(self._random.integers(1, 20))
        headers, contexts, keys = [], [], []
        for length in random.integers(0, 400, count):
            salt, context = random.bytes(SALT_SIZE), random.bytes(int(length))
            keys.append(reference.derive(self.key, salt, context))
            header = bytearray(salt + keys[-1][-COMMITMENT_SIZE:])
            if random.random() < 0.05:
                header[int(random.integers(SALT_SIZE, len(header)))] ^= 1 << int(random.integers(0, 8))
            headers.append(bytes(header))
            contexts.append(context)
        return headers, contexts, random.permutation(count).tolist(), keys

    def damage(self, sealed, plain):
        """Flip up to two bits: the chunks they are in, and what the plaintext is then."""
        places = self._random.integers(0, sealed.size, int(self._random.integers(0, 3)))
        before = sealed.copy()
        for place in places:
            sealed[place] ^= 1 << int(self._random.integers(0, 8))
        bad = {int(place) // SEALED_CHUNK_SIZE for place in np.flatnonzero(before != sealed)}
        plain = plain.copy()
        for chunk in bad:
            plain[chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE] = 0
        return bad, plain

    def plan(self):
        """Make a plan and the size of its result. In two of five a number is another one."""
        random, table, starts = self._random, [], [0]
        chunks = random.permutation(self.count)[: int(random.integers(1, self.count + 1))].astype(np.int64)
        size = 0
        for chunk in chunks.tolist():
            inner = min(CHUNK_SIZE, self.plain.size - chunk * CHUNK_SIZE)
            for _ in range(int(random.integers(0, 4)) if random.random() < 0.9 else 40):
                if not inner or size > LONGEST * CHUNK_SIZE:
                    break
                offset = int(random.integers(0, inner)) if random.random() < 0.85 else 0
                length = int(random.integers(0, inner - offset + 1)) if self.flip() else inner - offset
                table.append((offset, size, length))
                size += length
            starts.append(len(table))
        arrays = [chunks, np.array(starts, np.int64), np.array(table, np.int64).reshape(-1, 3)]
        if random.random() < 0.4:
            self._spoil(arrays[int(random.integers(0, 3))].reshape(-1), [*WILD, self.count, size, size + 1])
        return gather.GatherPlan(*arrays), size

    def _spoil(self, numbers, wild):
        if numbers.size:
            place, value = int(self._random.integers(0, numbers.size)), wild[int(self._random.integers(0, len(wild)))]
            moved = value if self.flip() else int(numbers[place]) + value
            numbers[place] = (moved + 2**63) % 2**64 - 2**63


def stays_inside(pieces, plain, target):
    """Return whether a plan stays inside its message and its result, by Python's unbounded integers."""
    chunks, starts, table = (array.tolist() for array in (pieces.chunks, pieces.starts, pieces.table))
    if starts[0] != 0 or starts[-1] != len(table) or starts != sorted(starts):
        return False
    for place, chunk in enumerate(chunks):
        inner = min(CHUNK_SIZE, plain - chunk * CHUNK_SIZE)
        if not 0 <= chunk <= plain // CHUNK_SIZE:
            return False
        for offset, there, length in table[starts[place] : starts[place + 1]]:
            if min(offset, there, length) < 0 or offset + length > inner or there + length > target:
                return False
    return True
