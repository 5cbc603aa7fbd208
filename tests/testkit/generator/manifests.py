"""Cases of `manifest`: the signed document, and the anchors of its readers. Section "Manifests" of the page."""

from generator.parts.case import Cases, base64_text, canonical, draw, flip, joined, sha256
from generator.parts.drafts import OTHER_FILE, Draft, draft, tensor
from generator.parts.envelopes import broken_envelopes, changed, envelope, other_forms, other_payloads, written
from generator.parts.messages import HEADER
from generator.parts.pairs import OWNER, OWNER_ML, RECIPIENT, STRANGER, Pair, malleated

RULES = {
    "envelope": ("manifests", "A manifest is an envelope in its one form, with one signature."),
    "type": ("manifests", "The type of the payload is that of manifests, and is signed with it."),
    "signature": ("manifests", "The owner's signature holds over type and payload."),
    "payload": ("manifests", "The payload is canonical JSON with exactly its members."),
    "values": ("manifests", "Each member has its form."),
    "history": ("manifests", "The history has the digests of all versions before, but 1024 at most."),
    "names": ("manifests", "Names are relative, of 1 to 1024 characters, with no part empty, `.` or `..`."),
    "anchor": ("anchors", "An anchor is one line of canonical JSON with its members."),
    "follows": (
        "anchors",
        "A reader accepts the manifest of its anchor's digest and version, and any that follows it.",
    ),
    "least": (
        "anchors",
        "A new anchor accepts no version below the least, and of another lineage none if it names one.",
    ),
}

LINEAGE = draw("lineage", 16).hex()
MANIFEST = "fastrack.manifest"

Payload = dict[str, object]
Folder = dict[str, bytes]


def sealed_entry(one: Draft, digests: bool = True) -> Payload:
    """Return the entry of a sealed file."""
    stored = {each.name: one.stored[each.name].data for each in one.sealed}
    entry: Payload = {
        "file": one.file,
        "key": one.metadata["fastrack.key"],
        "kind": one.kind or "tensor",
        "sealed": {each.name: [each.dtype, each.shape, base64_text(stored[each.name][:HEADER])] for each in one.sealed},
        "origins": {name: each["file"] for name, each in one.entries.items() if "file" in each},
        "plain": {each.name: [each.dtype, each.shape, sha256(each.data)] for each in one.plain},
        "metadata": sha256(canonical(one.owner)),
        "digests": {name: sha256(data) for name, data in stored.items()} if digests else {},
    }
    return entry


def other_entry(data: bytes) -> Payload:
    """Return the entry of any other file."""
    return {"size": len(data), "sha256": sha256(data)}


def model() -> Draft:
    """Return the sealed file of most cases."""
    one = draft(tensor("a"), tensor("b", "F32", [2, 3]), plain=(tensor("p", "F32", [2]),), owner={"format": "pt"})
    one.move("b", OTHER_FILE)
    return one


CONFIG = b'{"layers": 2}\n'


def earlier(version: int) -> str:
    """Return the digest of an earlier version."""
    return sha256(b"version %d" % version)


def payload_of(files: dict[str, Payload], version: int = 1, /, **changes: object) -> Payload:
    """Return the payload of a manifest."""
    history = [earlier(each) for each in range(version - 1, max(0, version - 1025), -1)]
    made: Payload = {"format": 1, "lineage": LINEAGE, "version": version, "history": history}
    return made | {"issued": "2026-11-28T12:00:00Z", "files": files} | changes


def usual(version: int = 1, /, **changes: object) -> Payload:
    """Return the payload for the usual folder."""
    entries = {"config.json": other_entry(CONFIG), "model.safetensors": sealed_entry(model())}
    return payload_of(entries, version, **changes)


def folder(manifest: bytes) -> Folder:
    """Return the usual folder with a manifest."""
    return {"config.json": CONFIG, MANIFEST: manifest, "model.safetensors": model().write()}


def manifest_of(payload: Payload, owner: Pair = OWNER) -> bytes:
    """Return a manifest."""
    return written(envelope("manifest", canonical(payload), owner))


def anchor(version: int, digest: str | None, lineage: str | None = LINEAGE, owner: Pair = OWNER) -> str:
    """Return the line of an anchor."""
    members = {"anchor": 1, "digest": digest, "lineage": lineage, "owner": owner.line, "version": version}
    return canonical(members).decode()


def result(payload: Payload, owner: Pair = OWNER) -> Payload:
    """Return what a reader reads."""
    digest, version = sha256(canonical(payload)), int(str(payload["version"]))
    lineage = str(payload["lineage"])
    log = f"fastrack/manifest@1\n{lineage}\n{version}\n{digest}\n"
    made: Payload = {"version": version, "digest": digest, "files": len(payload["files"]), "log": log}
    return made | {"anchor": anchor(version, digest, lineage, owner)}


OWNED = [("owner", OWNER.line)]


def opens(made: Cases, name: str, rule: str, files: Folder, payload: Payload, fields: list[tuple[str, str]]) -> None:
    """Add a folder that is as its manifest says."""
    lines, data = joined(files)
    owner = OWNER_ML if OWNER_ML.line in str(fields) else OWNER
    made.opens(name, rule, data, result(payload, owner), [*fields, *lines])


def fails(made: Cases, name: str, rule: str, expect: str, files: Folder, fields: list[tuple[str, str]] = OWNED) -> None:
    """Add a folder that is refused."""
    lines, data = joined(files)
    made.fails(name, rule, expect, data, [*fields, *lines])


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("manifest", RULES)
    for add in (documents, values, histories, names, followers, anchors):
        add(made)
    return made


def documents(made: Cases) -> None:
    """Add envelopes and signatures."""
    payload = usual()
    good = envelope("manifest", canonical(payload), OWNER)
    opens(made, "first-version", "signature", folder(written(good)), payload, OWNED)
    ml = [("owner", OWNER_ML.line)]
    opens(made, "owner-ml-dsa-65", "signature", folder(manifest_of(payload, OWNER_ML)), payload, ml)
    for name, data in (broken_envelopes(good) | other_forms(good)).items():
        fails(made, f"envelope-{name}", "envelope", "format", folder(data))
    fails(made, "by-a-stranger", "signature", "signature", folder(manifest_of(payload, STRANGER)))
    posing = changed(envelope("manifest", canonical(payload), STRANGER), keyid=OWNER.id)
    fails(made, "by-a-stranger-with-the-keyid", "signature", "signature", folder(written(posing)))
    other_s = changed(good, sig=base64_text(malleated(OWNER.sign(_signed(payload)))))
    fails(made, "signature-malleated", "signature", "signature", folder(written(other_s)))
    flipped = changed(good, sig=base64_text(flip(OWNER.sign(b""), 0)))
    fails(made, "signature-of-something-else", "signature", "signature", folder(written(flipped)))
    altered = good | {"payload": base64_text(canonical(usual(issued="2026-11-28T12:00:01Z")))}
    fails(made, "payload-altered", "signature", "signature", folder(written(altered)))
    crossed = envelope("manifest", canonical(payload), OWNER, signed_kind="grants")
    fails(made, "signed-as-another-type", "type", "signature", folder(written(crossed)))
    other = envelope("grants", canonical(payload), OWNER)
    fails(made, "of-another-type", "type", "format", folder(written(other)))
    for name, data in other_payloads(payload, "format").items():
        fails(made, f"payload-{name}", "payload", "format", folder(written(envelope("manifest", data, OWNER))))
    twice = canonical(payload).replace(b'"config.json":', b'"config.json":{"sha256":"","size":0},"config.json":')
    fails(made, "payload-file-twice", "payload", "format", folder(written(envelope("manifest", twice, OWNER))))


def _signed(payload: Payload) -> bytes:
    """Return what a signature of a manifest is over."""
    data = canonical(payload)
    return b"DSSEv1 41 application/vnd.fastrack.manifest.v1+json %d %s" % (len(data), data)


def values(made: Cases) -> None:
    """Add members of another form."""
    for name, change in {
        "lineage-upper-case": {"lineage": LINEAGE.upper()},
        "lineage-short": {"lineage": LINEAGE[:-1]},
        "lineage-null": {"lineage": None},
        "version-0": {"version": 0, "history": []},
        "version-negative": {"version": -1, "history": []},
        "version-fraction": {"version": 1.0},
        "version-true": {"version": True},
        "version-text": {"version": "1"},
        "issued-offset": {"issued": "2026-11-28T12:00:00+00:00"},
        "issued-fraction": {"issued": "2026-11-28T12:00:00.000Z"},
        "issued-no-such-day": {"issued": "2026-11-31T12:00:00Z"},
        "issued-null": {"issued": None},
        "files-array": {"files": []},
        "history-null": {"history": None},
        "history-object": {"history": {}},
    }.items():
        fails(made, name, "values", "format", folder(manifest_of(usual(**change))))
    none = payload_of({})
    opens(made, "no-files", "values", {MANIFEST: manifest_of(none)}, none, OWNED)


def histories(made: Cases) -> None:
    """Add histories of all lengths, and of wrong ones."""
    for version in (2, 7, 1025, 1026):
        payload = usual(version)
        opens(made, f"version-{version}", "history", folder(manifest_of(payload)), payload, OWNED)
    for name, version, history in (
        ("missing", 3, []),
        ("one-less", 3, [earlier(2)]),
        ("one-more", 2, [earlier(1), earlier(0)]),
        ("of-the-first", 1, [earlier(0)]),
        ("of-1025", 1026, [earlier(each) for each in range(1025, 0, -1)]),
        ("upper-case", 2, [earlier(1).upper()]),
        ("short", 2, [earlier(1)[:-1]]),
        ("of-null", 2, [None]),
    ):
        fails(made, f"history-{name}", "history", "format", folder(manifest_of(usual(version, history=history))))


def names(made: Cases) -> None:
    """Add names of files."""
    good = {
        "long": "/".join(["n" * 99] * 10 + ["m" * 24]),
        "deep": "/".join("abcdefghijkl"),
        "dots": ".hidden/..a/...",
        "spaces": " a /b c",
        "quotes": 'it\'s "a" <file>',
    }
    for name, path in good.items():
        payload = payload_of({path: other_entry(CONFIG)})
        opens(made, f"name-{name}", "names", {MANIFEST: manifest_of(payload), path: CONFIG}, payload, OWNED)
    for name, path in {
        "empty": "",
        "dot": ".",
        "parent": "..",
        "parent-first": "../config.json",
        "parent-between": "a/../config.json",
        "dot-between": "./config.json",
        "absolute": "/config.json",
        "slash-last": "config.json/",
        "two-slashes": "a//config.json",
        "backslash": "a\\config.json",
        "control": "a\x1fb",
        "delete": "a\x7fb",
        "c1": "a\x85b",
        "c1-last": "a\x9fb",
        "newline": "config.json\n",
        "zero": "config.json\0",
        "too-long": "/".join(["n" * 99] * 10 + ["m" * 25]),
        "lone-surrogate": "\ud800",
    }.items():
        fails(made, f"name-{name}", "names", "format", folder(manifest_of(payload_of({path: other_entry(CONFIG)}))))


def followers(made: Cases) -> None:
    """Add manifests for readers that have seen another version."""
    for name, version, seen in (("next", 4, 3), ("three-later", 6, 3), ("last-of-1024", 1025, 1)):
        payload = usual(version)
        fields = [("anchor", anchor(seen, earlier(seen)))]
        opens(made, f"anchored-{name}", "follows", folder(manifest_of(payload)), payload, fields)
    same = usual(4)
    fields = [("anchor", anchor(4, sha256(canonical(same))))]
    opens(made, "anchored-same", "follows", folder(manifest_of(same)), same, fields)
    digest = sha256(canonical(same))
    for name, payload, line in (
        ("fork", usual(4, issued="2026-11-28T13:00:00Z"), anchor(4, digest)),
        ("older", usual(3), anchor(4, digest)),
        ("first", usual(1), anchor(4, digest)),
        ("next-of-a-fork", usual(5), anchor(4, digest)),
        ("later-of-a-fork", usual(7), anchor(4, digest)),
        ("digest-at-another-place", usual(6), anchor(3, earlier(4))),
        ("digest-one-place-late", usual(6), anchor(4, earlier(3))),
        ("past-the-history", usual(1026), anchor(1, earlier(1))),
        ("another-lineage", usual(4, lineage="0" * 32), anchor(3, earlier(3))),
        ("same-of-a-lower-version", usual(4), anchor(3, digest)),
        ("same-of-a-higher-version", usual(4), anchor(5, digest)),
        ("same-with-another-lineage", usual(4, lineage="0" * 32), anchor(4, digest)),
    ):
        fails(made, f"anchored-{name}", "follows", "rollback", folder(manifest_of(payload)), [("anchor", line)])
    by_other = manifest_of(usual(4), STRANGER)
    fails(
        made, "anchored-by-a-stranger", "signature", "signature", folder(by_other), [("anchor", anchor(3, earlier(3)))]
    )


def anchors(made: Cases) -> None:
    """Add new anchors, and lines that are no anchor."""
    payload = usual(4)
    good = folder(manifest_of(payload))
    for name, line in {
        "new": anchor(0, None, None),
        "least": anchor(4, None, None),
        "lineage": anchor(0, None),
        "lineage-and-least": anchor(3, None),
    }.items():
        opens(made, f"anchor-{name}", "least", good, payload, [("anchor", line)])
    for name, line in {
        "least-higher": anchor(5, None, None),
        "least-higher-of-lineage": anchor(5, None),
        "of-another-lineage": anchor(0, None, "0" * 32),
    }.items():
        fails(made, f"anchor-{name}", "least", "rollback", good, [("anchor", line)])
    line = anchor(3, earlier(3))
    for name, wrong in {
        "later": line.replace('"anchor":1', '"anchor":2'),
        "spaces": line.replace(",", ", "),
        "extra-member": line.replace('"digest"', '"count":1,"digest"'),
        "without-version": line.replace(',"version":3', ""),
        "digest-upper-case": line.replace(earlier(3), earlier(3).upper()),
        "version-fraction": line.replace('"version":3', '"version":3.0'),
        "version-negative": anchor(-1, None),
        "owner-named": line.replace(OWNER.line, OWNER.line + " owner"),
        "owner-for-hpke": line.replace(OWNER.line, RECIPIENT.line),
        "duplicate": line.replace('"anchor":1', '"anchor":1,"anchor":1'),
        "lineage-upper-case": anchor(0, None, LINEAGE.upper()),
        "lineage-short": anchor(0, None, LINEAGE[:-1]),
        "digest-without-lineage": anchor(3, earlier(3), None),
        "digest-of-version-0": anchor(0, earlier(3)),
    }.items():
        fails(made, f"anchor-{name}", "anchor", "format", good, [("anchor", wrong)])
