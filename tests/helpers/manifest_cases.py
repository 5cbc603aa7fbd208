"""Failures of manifests and anchors, for the table of messages. Each case runs in a folder of all."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import fastrack
from fastrack import Anchor, Key, load_file, load_manifest, publish
from fastrack.grants import Signer

KEY, OWNER = Key.from_bytes(bytes(range(32))), Signer.generate()
NAME = "set.safetensors"


def anchor(**options):
    """Return a new anchor."""
    Path("set.anchor").unlink(missing_ok=True)
    return Anchor.create("set.anchor", owner=options.pop("owner", OWNER.verifier), **options)


def published():
    """Publish a file anew, as the first version of a set."""
    fastrack.save_file({"x": np.ones(3), "y": np.ones(2)}, NAME, KEY, plain=["y"])
    Path(f"{NAME}.manifest").unlink(missing_ok=True)
    publish(NAME, signer=OWNER)
    return NAME


def resealed(name=NAME):
    fastrack.save_file({"x": np.ones(3)}, name, KEY)
    return name


def other_history():
    """Publish two first versions of one set."""
    first = anchor(lineage="5" * 32)
    for _ in range(2):
        resealed()
        Path(f"{NAME}.manifest").unlink(missing_ok=True)
        publish(NAME, signer=OWNER, anchor=Anchor.create(_new("anchor"), owner=OWNER.verifier, lineage="5" * 32))
        load_file(NAME, anchor=Anchor(first.path)).close()


def checked(**changes):
    """Compare the file with an entry that was changed."""
    with load_file(published()) as file:
        entry = fastrack.load_manifest(f"{NAME}.manifest", owner=OWNER.verifier).files[NAME]
        replace(entry, **changes).check(file)


def read_altered():
    path = Path(published())
    path.write_bytes(path.read_bytes().replace(np.ones(2).tobytes(), np.zeros(2).tobytes()))
    _ = load_file(path, anchor=anchor()).plain["y"]


def config(content="{}", listed="{}"):
    Path("config.json").write_text(listed)
    Path("config.json.manifest").unlink(missing_ok=True)
    publish("config.json", signer=OWNER)
    Path("config.json").write_text(content)
    return "config.json"


def written(name, content, mode=0o600):
    Path(name).write_bytes(content)
    Path(name).chmod(mode)
    return name


def _new(suffix):
    return Path(tempfile.mkdtemp(dir=".")) / f"new.{suffix}"


def lacking():
    folder = Path("lacking")
    folder.mkdir()
    fastrack.save_file({"x": np.ones(3)}, folder / "a.safetensors", KEY)
    (folder / "b").touch()
    publish(folder, signer=OWNER)
    (folder / "b").unlink()
    anchor().verify(folder)


def empty():
    folder = Path("empty")
    folder.mkdir()
    publish(folder, signer=OWNER)


SHAPES = {"x": ["F64", [4], "A" * 75 + "="]}
HEADERS = {"x": ["F64", [3], "A" * 75 + "="]}

CASES = {
    "Anchor: altered": lambda: Anchor(written("altered.anchor", b"{}")),
    "Anchor: missing": lambda: Anchor("no.anchor"),
    "Anchor: others may write to it": lambda: Anchor(written("open.anchor", anchor().path.read_bytes(), 0o666)),
    "Anchor.create: a lineage that is none": lambda: Anchor.create("a", owner=OWNER.verifier, lineage="x"),
    "Anchor.create: a negative version": lambda: Anchor.create("a", owner=OWNER.verifier, least_version=-1),
    "Anchor.read: a sealed file": lambda: anchor().read(published()),
    "Anchor.read: altered": lambda: anchor().read(config("[]")),
    "Anchor.verify: a missing file": lacking,
    "load_file: anchor=, a file in which nothing is sealed": lambda: load_file(config(), anchor=anchor()),
    "load_file: anchor=, a file that is not listed": lambda: load_file(
        resealed("other.safetensors"), anchor=Anchor(anchor().path, manifest=f"{published()}.manifest")
    ),
    "load_file: anchor=, a forked manifest": other_history,
    "load_file: anchor=, a manifest of another owner": lambda: load_file(
        published(), anchor=anchor(owner=Signer.generate().verifier)
    ),
    "load_file: anchor=, a manifest of another set": lambda: load_file(published(), anchor=anchor(lineage="0" * 32)),
    "load_file: anchor=, a plain tensor that was altered": read_altered,
    "load_file: anchor=, a tensor less": lambda: checked(sealed={**HEADERS, "z": HEADERS["x"]}),
    "load_file: anchor=, a tensor more": lambda: checked(sealed={}),
    "load_file: anchor=, an older manifest": lambda: load_file(published(), anchor=anchor(least_version=2)),
    "load_file: anchor=, another file": lambda: published() and load_file(resealed(), anchor=anchor()),
    "load_file: anchor=, another message": lambda: checked(sealed=HEADERS),
    "load_file: anchor=, another shape": lambda: checked(sealed=SHAPES),
    "load_file: anchor=, no manifest": lambda: load_file(resealed("alone.safetensors"), anchor=anchor()),
    "load_manifest: another file": lambda: load_manifest(written("junk.manifest", b"junk"), owner=OWNER.verifier),
    "publish: a file in another folder": lambda: publish(resealed(), signer=OWNER, manifest="elsewhere/a.manifest"),
    "publish: an empty folder": empty,
    "publish: several paths": lambda: publish(["a", "b"], signer=OWNER),
}
