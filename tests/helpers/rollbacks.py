"""Random schedules of an owner who publishes, an attacker who serves old, forked and mixed files, and a reader.

The owner's key signs everything, so all of it is genuine. What the reader may accept is computed here from what was
published, without a look at any manifest.
"""

import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np

import fastrack
from fastrack import Anchor, AuthenticationError, FormatError, Key, SignatureError
from fastrack.grants import Signer

KEY = Key.from_bytes(bytes(range(32)))
OWNER, THIEF = Signer.generate(), Signer.generate()
SEALED, CONFIG = ("a.safetensors", "b.safetensors", "sub/c.safetensors"), "config.json"
NAMES = (*SEALED, CONFIG)
MANIFEST = "fastrack.manifest"
COPIES = 4  # of each file, all different
REFUSALS = (AuthenticationError, FormatError, SignatureError, FileNotFoundError)


class Violation(AssertionError):  # noqa: N818 - it is a finding
    """A wrong acceptance, or a wrong refusal."""


@cache
def pool():
    """Return the bytes of some sealed files for each name, and their content."""
    made = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(len(SEALED)):
            for copy in range(COPIES):
                content, path = 100 * number + copy, Path(temporary) / "one"
                fastrack.save_file({"x": np.array([content])}, path, KEY)
                made[path.read_bytes()] = content
        for copy in range(COPIES):
            made[b'{"size": %d}' % copy] = copy
    return made


def choices(name):
    """Return the contents that the pool has for a name."""
    number = 0 if name == CONFIG else 100 * SEALED.index(name)
    sealed = name != CONFIG
    return [
        data for data, content in pool().items() if content // 100 == number // 100 and (data[:1] != b"{") == sealed
    ]


@dataclass(eq=False)
class Version:
    """One manifest, the files that it lists, and the version before."""

    files: dict
    manifest: bytes
    parent: "Version | None"
    is_owners: bool

    def follows(self, other):
        version = self
        while version is not None and version.manifest != other.manifest:
            version = version.parent  # two manifests may be alike, if they have the same files, past and second
        return version is not None


class World:
    """One schedule."""

    def __init__(self, seed, folder):
        self.random = Random(seed)
        self.owner, self.served, self.anchor = folder / "owner", folder / "served", folder / "reader.anchor"
        self.versions, self.seen, self.accepted = [], None, 0
        Anchor.create(self.anchor, owner=OWNER.verifier)
        self.publish(None)

    def run(self, steps=5):
        for _ in range(steps):
            kind = self.random.random()
            if kind < 0.3:
                self.publish(self.versions[-1])
            elif kind < 0.4:
                self.publish(self.random.choice(self.versions))  # a fork, unless it is the last
            elif kind < 0.45:
                self.publish(None, signer=self.random.choice([OWNER, THIEF]))  # another set
            self.serve()
            for _ in range(self.random.choice([1, 1, 2])):
                self.read()
        return self.accepted

    def publish(self, parent, signer=OWNER):
        files = {} if parent is None else dict(parent.files)
        for name in NAMES:
            if name not in files or self.random.random() < 0.4:
                files[name] = self.random.choice(choices(name))
        if len(files) > 1 and self.random.random() < 0.1:
            del files[self.random.choice(sorted(files))]
        signer = signer if parent is None or parent.is_owners else THIEF
        manifest = None if parent is None else parent.manifest
        fill(self.owner, files, manifest)
        fastrack.publish(self.owner, signer=signer)
        version = Version(files, (self.owner / MANIFEST).read_bytes(), parent, signer is OWNER)
        self.versions.append(version)

    def serve(self):
        """Put the files of a version into the folder that the reader sees, and perhaps change some of them."""
        chosen = self.versions[-1] if self.random.random() < 0.5 else self.random.choice(self.versions)
        self.files, self.manifest = dict(chosen.files), chosen.manifest
        for _ in range(self.random.choice([0, 0, 1, 2])):
            self.attack()
        fill(self.served, self.files, self.manifest)

    def attack(self):
        kind, other = self.random.randrange(6), self.random.choice(self.versions)
        names = sorted(self.files)
        if kind == 0:
            self.manifest = other.manifest
        elif kind == 1:
            self.manifest = None if self.random.random() < 0.3 else self.manifest
        elif kind == 2 and names:
            del self.files[self.random.choice(names)]
        elif kind == 3 and len(names) > 1:
            one, two = self.random.sample(names, 2)
            self.files[one], self.files[two] = self.files[two], self.files[one]
        elif kind == 4:
            self.files |= {name: self.random.choice([data, *choices(name)]) for name, data in other.files.items()}
        elif any(self.files.values()):
            name = self.random.choice([name for name in names if self.files[name]])
            self.files[name] = self.files[name][: self.random.randrange(len(self.files[name]))]

    def read(self):
        """Open something, and compare the outcome with what is right."""
        listed = next((one for one in self.versions if one.manifest == self.manifest), None)
        sound = listed is not None and listed.is_owners and (self.seen is None or listed.follows(self.seen))
        name = self.random.choice(NAMES)
        wanted = {"all": NAMES, "some": SEALED[:2]}.get(
            kind := self.random.choice(["all", "some", "one", "one"]), [name]
        )
        if kind == "all":
            right = sound and self.files == listed.files
        else:
            right = sound and all(n in listed.files and self.files.get(n) == listed.files[n] for n in wanted)
        before = self.anchor.read_bytes()
        try:
            found = self.open(kind, wanted)
        except REFUSALS as error:
            if right:
                raise Violation(f"refused what is right: {error}") from error
            if self.anchor.read_bytes() != before:
                raise Violation("the anchor moved though nothing was opened") from error
            return
        if not right:
            raise Violation(f"accepted {kind} {wanted} that is not right")
        if found != [pool()[listed.files[n]] for n in wanted if n in listed.files]:
            raise Violation("opened something else")
        self.seen, self.accepted = listed, self.accepted + 1

    def open(self, kind, names):
        if kind == "all":
            manifest = Anchor(self.anchor).verify(self.served)
            names = [name for name in names if name in manifest.files]
            return [pool().get((self.served / name).read_bytes()) for name in names]
        if kind == "some":
            data = fastrack.SealedDataset([self.served / name for name in names], keys=KEY, anchor=self.anchor)
            return [fastrack.unseal(data[place]["x"], KEY, framework="numpy").item() for place in range(len(data))]
        path = self.served / names[0]
        if names[0] == CONFIG:
            return [pool().get(Anchor(self.anchor).read(path))]
        with fastrack.load_file(path, anchor=self.anchor) as file:
            return [fastrack.unseal(file["x"], KEY, framework="numpy").item()]


def fill(folder, files, manifest):
    """Let a folder hold exactly these files."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in {**files, **({} if manifest is None else {MANIFEST: manifest})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def run(seed):
    """Run one schedule, and return how often the reader accepted something."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where syncing a file takes no time
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        return World(seed, Path(folder)).run()
