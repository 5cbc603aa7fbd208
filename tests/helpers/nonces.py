"""Record each key, nonce and salt with which the ranks of a group seal."""

from collections import defaultdict

from fastrack.distributed import _link, _session
from fastrack.format import NONCE_SIZE, SALT_SIZE, SEALED_CHUNK_SIZE


class Recorder:
    """Whatever groups seal with while it is installed, down to the nonce of each chunk."""

    def __init__(self):
        self.sessions = []  # secrets, by rank and start
        self.salts = []
        self.uses = defaultdict(list)  # chunks by AES key and base nonce, a range for each call of the cipher
        self.starts = 0

    def install(self, monkeypatch):
        init, seal, find = _session.GroupSession.__init__, _session.GroupSession.seal, _link.get_engine

        def recording_init(session, *arguments):
            init(session, *arguments)
            self.sessions.append(bytes(session._secrets))

        def recording_seal(session, route):
            header, key = seal(session, route)
            self.salts.append(header[:SALT_SIZE])
            return header, key

        monkeypatch.setattr(_session.GroupSession, "__init__", recording_init)
        monkeypatch.setattr(_session.GroupSession, "seal", recording_seal)
        monkeypatch.setattr(_link, "get_engine", lambda: RecordingEngine(find(), self))
        return self

    def add(self, other):
        """Add what another process has recorded."""
        sessions, salts, uses, starts = other
        self.sessions += sessions
        self.salts += salts
        self.starts += starts
        for key, chunks in uses.items():
            self.uses[key] += chunks

    def content(self):
        return self.sessions, self.salts, dict(self.uses), self.starts

    @property
    def messages(self):
        return len(self.salts)

    def repeats(self):
        """Return the names of what was used twice."""
        found = []
        if len(set(self.sessions)) != self.starts:
            found.append("session")
        if len(set(self.salts)) != len(self.salts):
            found.append("salt")
        if len({material[:-NONCE_SIZE] for material in self.uses}) != len(self.salts):
            found.append("key")
        for ranges in self.uses.values():
            chunks = [chunk for each in ranges for chunk in each]
            if len(set(chunks)) != len(chunks):
                return [*found, "nonce"]
        return found


class RecordingEngine:
    """An engine whose every call to seal is recorded."""

    def __init__(self, engine, recorder):
        self._engine = engine
        self._recorder = recorder

    def expand_key(self, key):
        return Schedule(self._engine.expand_key(key), bytes(key.material))

    def seal_run(self, schedule, source, target, first):
        chunks = range(first, first - (-target.size // SEALED_CHUNK_SIZE))
        self._recorder.uses[schedule.material].append(chunks)
        return self._engine.seal_run(schedule.inner, source, target, first)

    def open_run(self, schedule, source, target, first):
        return self._engine.open_run(schedule.inner, source, target, first)


class Schedule:
    def __init__(self, inner, material):
        self.inner = inner
        self.material = material

    def wipe(self):
        self.inner.wipe()
