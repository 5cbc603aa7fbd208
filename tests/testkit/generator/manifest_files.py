"""Cases of `manifest`: entries of files, and files that are not as their entries say."""

from collections.abc import Callable

from generator.case import Cases, base64_text, draw, flip
from generator.drafts import FILE, KEY128, OTHER_FILE, Draft, Stored, draft, scaled, tensor
from generator.manifests import (
    CONFIG,
    MANIFEST,
    OWNED,
    Payload,
    fails,
    folder,
    manifest_of,
    model,
    opens,
    other_entry,
    payload_of,
    sealed_entry,
    usual,
)
from generator.messages import seal

RULES = {
    "entry.members": ("manifests", "The entry of a file has exactly its members."),
    "entry.values": ("manifests", "Each member of an entry has its form."),
    "entry.origins": ("manifests", "Origins are of names in `sealed`, and are not the file's own id."),
    "entry.digests": ("manifests", "Digests are of all names in `sealed`, or of none."),
    "file.missing": ("manifests", "Each file that is listed is there."),
    "file.bytes": ("manifests", "Any other file has its size and hash."),
    "file.ids": ("manifests", "A sealed file has the file id, key id and kind of its entry."),
    "file.tensors": ("what-a-reader-must-check", "A file has exactly the tensors of its entry."),
    "file.header": ("manifests", "Each message has the header that its entry pins."),
    "file.origins": ("manifests", "Each message is of the file that its entry says."),
    "file.plain": ("manifests", "Each plain tensor has the hash, dtype and shape of its entry."),
    "file.metadata": ("manifests", "The owner's metadata has the hash of the entry."),
    "file.digests": ("manifests", "Each message has the hash of the entry, if that has hashes."),
}


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("manifest", RULES)
    for add in (kinds, members, sealed_values, altered, exchanged):
        add(made)
    return made


def kinds(made: Cases) -> None:
    """Add folders of all kinds of files."""
    files = {
        "m.safetensors": model(),
        "quarter.safetensors": draft(tensor("a"), key=KEY128, file="1" * 32),
        "sub/unicode.safetensors": draft(tensor("\uff01"), tensor("\U0001f600"), tensor("é"), file="2" * 32),
        "checkpoint.safetensors": draft(tensor("0"), kind="checkpoint", file="3" * 32),
    }
    values = draft(tensor("w", "I8", [2, 4]), tensor("s", "F32", [2, 1]), file="4" * 32, owner={"größe": "ä\n\x7f"})
    scaled(values, "w", "s", [1, 4])
    files["quantised.safetensors"] = values
    for name, digests in (("all-kinds", True), ("without-digests", False)):
        payload = payload_of({path: sealed_entry(one, digests) for path, one in files.items()})
        there = {path: one.write() for path, one in files.items()}
        opens(made, name, "file.digests", there | {MANIFEST: manifest_of(payload)}, payload, OWNED)
    payload = usual()
    more = folder(manifest_of(payload)) | {"notes.txt": b"not listed", "other.manifest": b"{}"}
    opens(made, "more-files", "file.missing", more, payload, OWNED)
    empty = payload_of({"empty": other_entry(b"")})
    opens(made, "empty-file", "file.bytes", {MANIFEST: manifest_of(empty), "empty": b""}, empty, OWNED)
    whole = payload_of({"model.safetensors": other_entry(model().write())})
    there = {MANIFEST: manifest_of(whole), "model.safetensors": model().write()}
    opens(made, "sealed-file-as-any", "file.bytes", there, whole, OWNED)


def entered(made: Cases, name: str, rule: str, path: str, entry: object) -> None:
    """Add a manifest with an entry that is none, over the usual folder."""
    payload = usual()
    payload["files"][path] = entry  # type: ignore[index]
    fails(made, f"entry-{name}", f"entry.{rule}", "format", folder(manifest_of(payload)))


def members(made: Cases) -> None:
    """Add entries with other members."""
    good, config = sealed_entry(model()), other_entry(CONFIG)
    for member in good:
        lacking = {name: value for name, value in good.items() if name != member}
        entered(made, f"without-{member}", "members", "model.safetensors", lacking)
    entered(made, "extra-member", "members", "model.safetensors", good | {"more": 1})
    entered(made, "both", "members", "model.safetensors", good | other_entry(model().write()))
    entered(made, "other-extra-member", "members", "config.json", config | {"more": 1})
    entered(made, "other-without-size", "members", "config.json", {"sha256": config["sha256"]})
    entered(made, "other-without-hash", "members", "config.json", {"size": config["size"]})
    entered(made, "null", "members", "config.json", None)
    for name, size in {"negative": -1, "fraction": 14.0, "text": "14", "true": True, "54-bits": 1 << 53}.items():
        entered(made, f"other-size-{name}", "values", "config.json", config | {"size": size})
    digest = str(config["sha256"])
    for name, text in {"upper-case": digest.upper(), "short": digest[:-1], "null": None}.items():
        entered(made, f"other-hash-{name}", "values", "config.json", config | {"sha256": text})


def sealed_values(made: Cases) -> None:
    """Add values of entries that have another form."""
    good = sealed_entry(model())
    sealed, plain = dict(good["sealed"]), dict(good["plain"])  # type: ignore[call-overload]
    header = str(sealed["a"][2])
    for name, a in {
        "of-two": ["U8", [20]],
        "of-four": ["U8", [20], header, 1],
        "object": {"dtype": "U8", "shape": [20], "header": header},
        "dtype-lower-case": ["u8", [20], header],
        "extent-fraction": ["U8", [20.0], header],
        "extent-negative": ["U8", [-20], header],
        "extent-true": ["U8", [20, True], header],
        "shape-number": ["U8", 20, header],
        "header-short": ["U8", [20], base64_text(bytes(55))],
        "header-long": ["U8", [20], base64_text(bytes(57))],
        "header-no-padding": ["U8", [20], header.rstrip("=")],
        "header-hexadecimal": ["U8", [20], "00" * 56],
    }.items():
        entered(made, f"sealed-{name}", "values", "model.safetensors", good | {"sealed": sealed | {"a": a}})
    for name, change in {
        "file-upper-case": {"file": "AB" * 16},
        "file-short": {"file": FILE[:-1]},
        "key-upper-case": {"key": "AB" * 16},
        "kind-unknown": {"kind": "model"},
        "kind-null": {"kind": None},
        "sealed-array": {"sealed": []},
        "metadata-short": {"metadata": "00"},
        "metadata-upper-case": {"metadata": str(good["metadata"]).upper()},
        "plain-hash-short": {"plain": plain | {"p": ["F32", [2], "00"]}},
        "plain-hash-base64": {"plain": plain | {"p": ["F32", [2], base64_text(bytes(32))]}},
    }.items():
        entered(made, name, "values", "model.safetensors", good | change)
    digests = dict(good["digests"])  # type: ignore[call-overload]
    entered(
        made, "origins-of-none", "origins", "model.safetensors", good | {"origins": {"b": OTHER_FILE, "c": OTHER_FILE}}
    )
    upper = {"b": OTHER_FILE.upper()}
    entered(made, "origins-upper-case", "origins", "model.safetensors", good | {"origins": upper})
    entered(made, "digests-of-some", "digests", "model.safetensors", good | {"digests": {"a": digests["a"]}})
    entered(made, "digests-of-more", "digests", "model.safetensors", good | {"digests": digests | {"c": digests["a"]}})
    entered(made, "digests-short", "digests", "model.safetensors", good | {"digests": digests | {"a": "00"}})


def altered(made: Cases) -> None:
    """Add folders whose files were altered."""
    good = folder(manifest_of(usual()))
    for path in ("config.json", "model.safetensors"):
        fails(
            made,
            f"missing-{path.split('.')[0]}",
            "file.missing",
            "rollback",
            {k: v for k, v in good.items() if k != path},
        )
    for name, data in {
        "bit": flip(CONFIG, 3),
        "longer": CONFIG + b" ",
        "shorter": CONFIG[:-1],
        "empty": b"",
    }.items():
        fails(made, f"other-file-{name}", "file.bytes", "authentication", good | {"config.json": data})

    entries = {"config.json": other_entry(CONFIG), "model.safetensors": sealed_entry(model(), digests=False)}
    pinned = folder(manifest_of(payload_of(entries)))

    def edited(name: str, rule: str, expect: str, edit: Callable[[Draft], object]) -> None:
        one = model()
        edit(one)
        # Without digests of the messages, whose failure would be of another class.
        there = pinned if expect == "rollback" else good
        fails(made, name, f"file.{rule}", expect, there | {"model.safetensors": one.write()})

    edited("plain-altered", "plain", "authentication", lambda one: one.alter("p", lambda data: flip(data, 0)))
    edited("metadata-altered", "metadata", "authentication", lambda one: one.owner.update(format="np"))
    edited("metadata-added", "metadata", "authentication", lambda one: one.owner.update(note=""))
    edited("metadata-removed", "metadata", "authentication", lambda one: one.owner.clear())
    edited("message-tag", "digests", "authentication", lambda one: one.alter("a", lambda data: flip(data, -1)))
    edited("message-ciphertext", "digests", "authentication", lambda one: one.alter("b", lambda data: flip(data, 60)))
    edited("message-salt", "header", "rollback", lambda one: one.alter("a", lambda data: flip(data, 0)))
    edited("message-commitment", "header", "rollback", lambda one: one.alter("a", lambda data: flip(data, 55)))
    edited("plain-removed", "tensors", "rollback", lambda one: one.stored.pop("p"))
    edited("plain-added", "tensors", "rollback", lambda one: one.stored.update(q=Stored("U8", [1], b"q")))
    edited("plain-empty-added", "tensors", "rollback", lambda one: one.stored.update(q=Stored("U8", [0], b"")))
    edited("plain-of-another-dtype", "plain", "rollback", _retype)
    edited("plain-of-another-shape", "plain", "rollback", _reshape)
    edited("sealed-added", "tensors", "rollback", _add)
    edited("sealed-removed", "tensors", "rollback", _remove)
    edited("sealed-unlisted", "tensors", "rollback", lambda one: one.entries.pop("a"))
    edited("file-id-altered", "ids", "rollback", lambda one: one.metadata.update({"fastrack.file": "f" * 32}))
    edited("key-id-altered", "ids", "rollback", lambda one: one.metadata.update({"fastrack.key": "f" * 32}))
    edited("kind-added", "ids", "rollback", lambda one: one.metadata.update({"fastrack.kind": "checkpoint"}))
    edited("origin-altered", "origins", "rollback", lambda one: one.entries["b"].update(file="f" * 32))
    edited("origin-removed", "origins", "rollback", _own)
    edited("dtype-altered", "tensors", "rollback", lambda one: one.entries["a"].update(dtype="I8"))
    edited("shape-altered", "tensors", "rollback", lambda one: one.entries["a"].update(shape=[4, 5]))
    edited("version-altered", "ids", "format", lambda one: one.metadata.update({"fastrack.version": "2"}))
    guard = {"dtype": "sealed by fastrack", "shape": [0], "data_offsets": [0, 0]}
    edited("not-the-guard", "tensors", "format", lambda one: one.extra.update({"fastrack.guard": guard}))


def _retype(one: Draft) -> None:
    one.stored["p"].dtype = "I32"


def _reshape(one: Draft) -> None:
    one.stored["p"].shape = [2, 1]


def _add(one: Draft) -> None:
    one.sealed.append(tensor("c"))
    one.entries["c"] = {"dtype": "U8", "shape": [20]}
    one.reseal("c")


def _remove(one: Draft) -> None:
    del one.entries["a"], one.stored["a"]


def _own(one: Draft) -> None:
    del one.entries["b"]["file"], one.entries["b"]["binding"]


def exchanged(made: Cases) -> None:
    """Add folders whose files took one another's places, or are older ones."""
    one, other = draft(tensor("a"), file="1" * 32), draft(tensor("a"), file="2" * 32)
    payload = payload_of(
        {"1.safetensors": sealed_entry(one, digests=False), "2.safetensors": sealed_entry(other, digests=False)}
    )
    signed = manifest_of(payload)
    both = {"1.safetensors": one.write(), "2.safetensors": other.write(), MANIFEST: signed}
    opens(made, "two-files", "file.ids", both, payload, OWNED)
    turned = {"1.safetensors": other.write(), "2.safetensors": one.write(), MANIFEST: signed}
    fails(made, "files-exchanged", "file.ids", "rollback", turned)
    fails(made, "file-twice", "file.ids", "rollback", both | {"2.safetensors": one.write()})
    older = draft(tensor("a"), file="1" * 32)
    older.stored["a"].data = _under(older, draw("an older salt", 24))
    fails(made, "message-older", "file.header", "rollback", both | {"1.safetensors": older.write()})
    plain = draft(plain=(tensor("a"),))
    plain.metadata = {}
    fails(made, "file-in-plain", "file.ids", "rollback", both | {"1.safetensors": plain.write()})
    kind = draft(tensor("a"), kind="checkpoint", file="1" * 32)
    claimed: Payload = sealed_entry(kind, digests=False) | {"kind": "tensor"}
    wrong = payload_of({"1.safetensors": claimed})
    there = {"1.safetensors": kind.write(), MANIFEST: manifest_of(wrong)}
    fails(made, "kind-of-another", "file.ids", "rollback", there)
    late = dict(both)
    late["1.safetensors"] = both["1.safetensors"][:-1]
    fails(made, "file-truncated", "file.tensors", "format", late)


def _under(one: Draft, salt: bytes) -> bytes:
    return seal(one.key, salt, one.context("a"), one.sealed[0].data)
