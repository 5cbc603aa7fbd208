"""Report the results as tables for people and as a document for programs."""

from dataclasses import asdict
from datetime import UTC, datetime

from bench.peers.catalog import MEASURE, PEERS
from bench.peers.child import MIB, TENSORS

HEAD = ["", "seal, s", "seal, on disk, s", "open, s", "seal, GB/s", "open, GB/s", "seal, memory MiB"]
HEAD += ["open, memory MiB", "overhead, bytes", "overhead, %", "seal, times fastrack's", "on disk, times fastrack's"]
HEAD += ["open, times fastrack's"]
FEATURES = ["", "a bit changed", "a page cut off", "random access", "cut or reordered", "commits to its key"]
FEATURES += ["bounded memory", "decrypts on the GPU", "read by other tools", "names, dtypes, shapes"]
NOTES = """\
Medians, the peers in turns, each after it has touched as much memory as it will need and given it back: a virtual
machine may have to ask its host for memory first. Files are in the page cache when they are opened. "on disk": with an
fsync after what the peer does; fastrack does one itself, so both columns are the same thing for it. GB/s: 1e9 bytes of
tensors a second.
Memory: what the process holds for itself, at most, beyond what it held before: when sealing beyond the tensors, when
opening beyond the tensors, where those are fresh memory. Looked up about every millisecond, in a run that is not
timed; pages of a mapped file do not count. "times fastrack's": above 1, fastrack was faster."""


class Report:
    def __init__(self, results, *, size, rounds, machine):
        self.results, self._size, self._rounds, self._machine = results, size, rounds, machine
        self._now = datetime.now(UTC)
        self._base = next((result for result in results if result.slug == MEASURE and result.is_whole), None)

    def as_dict(self):
        return {
            "version": 1,
            "suite": "peers",
            "date": self._now.isoformat(timespec="seconds"),
            "bytes": self._size * MIB,
            "tensors": TENSORS,
            "rounds": self._rounds,
            "machine": self._machine,
            "peers": [{**asdict(result), "features": PEERS[result.slug].features._asdict()} for result in self.results],
        }

    def title(self):
        cpu, software = self._machine["cpu"], self._machine["software"]
        return (
            f"{self._size} MiB as {TENSORS} tensors of float32, {self._rounds} rounds; {cpu['model']}, "
            f"{cpu['threads']} CPUs, {self._machine['memory']['total'] / 2**30:.0f} GiB; {self._machine['system']}, "
            f"Python {software['python']}, torch {software.get('torch')}; {self._now:%Y-%m-%d}"
        )

    def figures(self):
        """Return the rows of the table of figures; a peer without figures says why."""
        return [self._figures(result) for result in self.results]

    def settings(self):
        return [(result.name, result.version or "not here", result.settings) for result in self.results]

    def features(self):
        """The rows of the table of features: one for each way to keep tensors."""
        rows = {}
        for result in self.results:
            features = PEERS[result.slug].features
            tried = (result.flip or "not tried", result.cut or "not tried")
            rows.setdefault(features, (result.name.partition(",")[0], *tried, *features))
        return list(rows.values())

    def markdown(self):
        figures = _pipes(HEAD, self.figures())
        settings = _pipes(("", "version", "settings"), self.settings(), left=3)
        features = _pipes(FEATURES, self.features(), left=10)
        return f"{self.title()}.\n\n{figures}\n\n{NOTES}\n\n{settings}\n\n{features}\n"

    def _figures(self, result):
        if not result.is_whole:
            return (result.name, f"not measured: {result.error or 'no round was run'}", *[""] * (len(HEAD) - 2))
        nbytes = self._size * MIB
        over = result.bytes - nbytes
        seconds = {what: result.median(what) for what in ("seal", "synced", "open")}
        return (
            result.name,
            *(f"{value:.3f}" for value in seconds.values()),
            f"{nbytes / seconds['seal'] / 1e9:.2f}",
            f"{nbytes / seconds['open'] / 1e9:.2f}" if result.is_read else "reads nothing",
            f"{result.seal_owned / MIB:.0f}",
            f"{_beyond(result, nbytes) / MIB:.0f}",
            f"{over}",
            f"{100 * over / nbytes:.3f}",
            *(self._factor(result, what) for what in seconds),
        )

    def _factor(self, result, what):
        if self._base is None or (what == "open" and not result.is_read):
            return ""
        return f"{result.median(what) / self._base.median(what):.2f}"


def _beyond(result, nbytes):
    """Return the memory of an opening beyond its tensors, which are subtracted only if they are fresh memory."""
    return max(0, result.open_owned - nbytes * PEERS[result.slug].is_fresh)


def _pipes(head, rows, left=1):
    rule = [":--" if at < left else "--:" for at in range(len(head))]
    lines = [head, rule, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
