"""Judge the accesses of a block between two barriers: passes of shared memory, sectors, races, a digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from bench.gpu.ptx.memory import NOBODY, SEVERAL

WARP = 32
SECTOR = 32  # bytes


@dataclass(slots=True)
class Site:
    """An instruction that accesses memory, with its counts."""

    name: str
    line: int
    size: int  # bytes of a thread
    writes: bool
    constant: bool = False  # ld.global.nc
    atomic: bool = False
    requests: int = 0  # of warps
    passes: int = 0  # of shared memory, which serves 16 bytes to a quarter of a warp at a time
    sectors: int = 0  # of global memory, of 32 bytes

    def __str__(self):
        return f"{self.name} at line {self.line}"


@dataclass
class Report:
    """Counts and findings of a launch. `trace` is a digest of control flow, banks, passes, and addresses elsewhere.

    Rows of shared memory are not in it: a pass takes as long for one as for another.
    """

    places: Counter = field(default_factory=Counter)  # instructions that warps executed, by index in the code
    instructions: Counter = field(default_factory=Counter)  # by name
    sites: list[Site] = field(default_factory=list)  # that were reached
    violations: list[str] = field(default_factory=list)
    barriers: int = 0
    trace: str = ""

    def total(self, attribute, name=""):
        """Add up such a count of the sites whose instruction begins with a name."""
        return sum(getattr(site, attribute) for site in self.sites if site.name.startswith(name))

    def tell(self, text):
        if text not in self.violations:
            self.violations.append(text)


@dataclass(slots=True, eq=False)
class _Entry:
    site: Site
    offsets: np.ndarray
    lanes: np.ndarray
    times: np.ndarray  # how often each warp had met


class Log:
    """The accesses since the last barrier of the block, in the order in which they were interpreted."""

    def __init__(self, threads, shared, report):
        self._warps, self._shared, self._report = -(-threads // WARP), shared, report
        self._digest, self._entries = hashlib.blake2b(digest_size=16), {}

    def add(self, site, buffer, offsets, lanes, times):
        self._entries.setdefault(buffer, []).append(_Entry(site, offsets, lanes, times))

    def note(self, *what):
        for each in what:
            self._digest.update(np.ascontiguousarray(each).tobytes())

    def digest(self):
        return self._digest.hexdigest()

    def close(self, block):
        """Judge the accesses of an interval, all of which are done at its end."""
        for buffer, entries in self._entries.items():
            for size in sorted({entry.site.size for entry in entries}):
                self._count(buffer, size, [entry for entry in entries if entry.site.size == size])
            plain = [entry for entry in entries if not entry.site.atomic]
            if any(entry.site.writes for entry in plain):
                self._find_races(buffer, plain, block)
            if buffer is not self._shared:
                for entry in plain:
                    self._check_blocks(buffer, entry, block)
        self._entries = {}

    def _count(self, buffer, size, entries):
        sizes = [entry.lanes.size for entry in entries]
        starts = np.cumsum([0, *sizes[:-1]])
        number = np.repeat(np.arange(len(entries)), sizes)
        lanes, offsets = (np.concatenate([getattr(entry, name) for entry in entries]) for name in ("lanes", "offsets"))
        self.note([entry.site.line for entry in entries], sizes, lanes.astype(np.uint16))
        warps = number * self._warps + lanes // WARP
        requests = np.add.reduceat(np.diff(warps, prepend=-1) != 0, starts)
        if buffer is self._shared:
            passes = self._passes(size, number, lanes, offsets, requests)
            self.note((offsets // 4 % WARP).astype(np.uint8), passes)
        else:
            sectors = np.unique(warps << 40 | (buffer.pointer % SECTOR + offsets) // SECTOR) >> 40
            taken = np.bincount(sectors // self._warps, minlength=len(entries))
            self.note(np.frombuffer(buffer.name.encode(), np.uint8), offsets)
        for index, entry in enumerate(entries):
            entry.site.requests += int(requests[index])
            if buffer is self._shared:
                entry.site.passes += int(passes[index])
            else:
                entry.site.sectors += int(taken[index])

    def _passes(self, size, number, lanes, offsets, requests):
        """Return for each entry how often the busiest bank is asked, over the parts of warps that are served apart."""
        if size == 4 and (offsets // 4 % WARP == lanes % WARP).all():  # each lane has a bank for itself
            return requests
        parts = max(1, size // 4)
        group = (number * self._warps * WARP + lanes) * parts // WARP
        words = offsets[:, None] // 4 + np.arange(parts)
        keys = np.unique((group[:, None] * WARP + words % WARP) << 16 | words // WARP)
        banks, counts = np.unique(keys >> 16, return_counts=True)
        groups, first = np.unique(banks // WARP, return_index=True)
        most = np.maximum.reduceat(counts, first)
        return np.bincount(groups // (self._warps * parts), most, requests.size).astype(np.int64)

    def _find_races(self, buffer, entries, block):
        """Find a byte that a thread writes and another accesses, unless their warp has met in between."""
        written = np.zeros(buffer.bytes.size, bool)
        for entry in entries:
            if entry.site.writes:
                _rows(written, entry)[entry.offsets // entry.site.size] = True
        columns = []
        for index, entry in enumerate(entries):
            hit = _rows(written, entry)[entry.offsets // entry.site.size]
            if hit.any():
                row, byte = np.nonzero(hit)
                lanes = entry.lanes[row]
                times, number = entry.times[lanes // WARP], np.full(row.size, index)
                columns.append((entry.offsets[row] + byte, times, lanes, number))
        byte, time, lane, number = np.concatenate(columns, axis=1)
        warp = lane // WARP
        writes = np.array([entry.site.writes for entry in entries])[number]
        for group, who in ((byte, warp), (byte << 24 | time, lane)):
            order = np.argsort(group, kind="stable")
            starts = np.flatnonzero(np.diff(group[order], prepend=-1))
            several = np.minimum.reduceat(who[order], starts) != np.maximum.reduceat(who[order], starts)
            several &= np.logical_or.reduceat(writes[order], starts) | (who is warp)
            if several.any():
                first = int(np.flatnonzero(several)[0])
                members = order[starts[first] : [*starts, order.size][first + 1]]
                writer = members[np.flatnonzero(writes[members])[0]]
                other = members[np.flatnonzero(who[members] != who[writer])[0]]
                at = [f"{entries[number[each]].site} by thread {lane[each]}" for each in (writer, other)]
                self._report.tell(
                    f"a race for byte {byte[writer]} of {buffer.name}: {at[0]}, {at[1]}, of block {block}"
                )

    def _check_blocks(self, buffer, entry, block):
        """Find what two blocks access, and writes of what was read as constant."""
        site, where = entry.site, entry.offsets // entry.site.size
        writer, reader, constant = (_rows(each, entry) for each in (buffer.writer, buffer.reader, buffer.constant))
        wrote, read = writer[where], reader[where]
        if ((wrote != NOBODY) & (wrote != block)).any() or (site.writes and ((read != NOBODY) & (read != block)).any()):
            self._report.tell(f"a race: {site} of block {block}, with another block, {buffer.name}")
        if site.writes:
            writer[where] = block
        else:
            reader[where] = np.where((read == NOBODY) | (read == block), block, SEVERAL)
            constant[where] |= site.constant
        if (constant[where] & (writer[where] != NOBODY)).any():
            self._report.tell(f"{site}: ld.global.nc of what is written, {buffer.name}")


def _rows(array, entry):
    return array.reshape(-1, entry.site.size)
