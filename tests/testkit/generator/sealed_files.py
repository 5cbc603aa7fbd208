"""Cases of `sealed`: the file around the messages."""

import json
import zlib

from generator import sealed_messages
from generator.parts.case import Cases, canonical, draw
from generator.parts.drafts import (
    FILE,
    GUARD,
    KEY,
    OTHER_FILE,
    OTHER_KEY,
    Draft,
    Stored,
    Tensor,
    assemble,
    draft,
    tensor,
)
from generator.parts.messages import context_of, key_id, seal
from generator.sealed_messages import KEYS, opened

RULES = {
    "purpose": ("context", "The context begins with the kind of the file."),
    "header": (
        "what-a-reader-must-check",
        "The safetensors header has the right sizes, no gap and no overlap, and entries of three members.",
    ),
    "header.duplicate": ("forms-of-values", "No object in the safetensors header has a member twice."),
    "metadata": ("the-file", "The owner's entries are those that do not begin with `fastrack.`."),
    "version": ("what-a-reader-must-check", "The version is `1`."),
    "ids": ("what-a-reader-must-check", "The file id and the key id are 32 lower-case hexadecimal digits."),
    "reserved": ("the-file", "Entries that begin with `fastrack.` and are not known are ignored."),
    "kind": ("what-a-reader-must-check", "There is no kind, or it is the one that the caller expects."),
    "guard": ("the-file", "Exactly the guard is ignored; any other entry of its name is a tensor."),
}
RULES |= {rule: sealed_messages.RULES[rule] for rule in ("context", "plain")}


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("sealed", RULES)
    for add in (headers, entries, kinds, guards):
        add(made)
    return made


def headers(made: Cases) -> None:
    """Add files with other safetensors headers."""
    one = draft(tensor("a"), owner={"title": "grüße", "note": ""})
    opened(made, "header-owner", "metadata", one)
    text = json.dumps(one.header())
    opened(made, "header-escaped", "header", one, assemble(text.encode(), one.data()), "ASCII with escapes")
    spaced = json.dumps(one.header(), indent=1, ensure_ascii=False).encode()
    opened(made, "header-spaced", "header", one, assemble(spaced, one.data()))
    opened(made, "header-padded", "header", one, assemble(text.encode() + b" " * 4096, one.data()))
    reverse = json.dumps(dict(reversed(one.header().items())), ensure_ascii=False).encode()
    opened(made, "header-metadata-last", "header", one, assemble(reverse, one.data()))
    unpadded = len(text).to_bytes(8, "little") + text.encode() + one.data()
    opened(made, "header-not-padded", "header", one, unpadded)
    two = draft(tensor("a", shape=[0]), tensor("b"), plain=(tensor("p", shape=[0]), tensor("q")))
    entries = two.header()
    mixed = {name: entries[name] for name in ("q", "__metadata__", "p", "b", "a")}
    opened(made, "header-other-order", "header", two, assemble(json.dumps(mixed).encode(), two.data()))
    for name, data in broken(one).items():
        made.fails(f"header-{name}", "header", "format", data, KEYS)
    for name, (old, new) in {
        "tensor": ('"a": {', '"a": {"dtype": "U8", "shape": [92], "data_offsets": [0, 92]}, "a": {'),
        "metadata": ('"__metadata__": {', '"__metadata__": {}, "__metadata__": {'),
        "entry": ('"fastrack.key":', f'"fastrack.key": "{key_id(OTHER_KEY)}", "fastrack.key":'),
        "owner": ('"title":', '"title": "", "title":'),
        "member": ('"dtype": "U8"', '"dtype": "F32", "dtype": "U8"'),
        "guard": ('"a": {', f'"fastrack.guard": {json.dumps(GUARD)}, "fastrack.guard": {json.dumps(GUARD)}, "a": {{'),
    }.items():
        data = one.write(lambda text, old=old, new=new: text.replace(old, new))
        made.fails(f"header-duplicate-{name}", "header.duplicate", "format", data, KEYS)


def broken(one: Draft) -> dict[str, bytes]:
    """Return files whose safetensors header is wrong."""
    good, size = one.write(), len(one.data())

    def offsets(start: str, end: str) -> bytes:
        return one.write(lambda text: text.replace(f"[0, {size}]", f"[{start}, {end}]"))

    unsorted = json.dumps(one.header()).encode()
    gap = one.write(lambda text: text.replace(f"[0, {size}]", f"[8, {size + 8}]")) + bytes(8)
    number = one.write(lambda text: text.replace('"note": ""', '"note": 1'))
    return {
        "nothing": b"",
        "short": good[:7],
        "size-past-the-end": (len(good)).to_bytes(8, "little") + good[8:],
        "size-of-63-bits": (1 << 63).to_bytes(8, "little") + good[8:],
        "size-0": bytes(8) + good[8:],
        "trailing": good + b"\0",
        "truncated": good[:-1],
        "gap": gap,
        "overlap": overlap(),
        "end-before-start": offsets(str(size), "0"),
        "negative": offsets("-1", str(size - 1)),
        "offset-fraction": offsets("0.0", str(size)),
        "offset-exponent": offsets("0e0", str(size)),
        "offset-of-minus-zero": offsets("-0", str(size)),
        "shape-fraction": one.write(lambda text: text.replace(f"[{size}]", f"[{size}.0]")),
        "shape-wrong": one.write(lambda text: text.replace(f"[{size}]", f"[{size - 1}]")),
        "dtype-unknown": one.write(lambda text: text.replace('"U8", "shape"', '"U9", "shape"', 1)),
        "not-utf-8": assemble(json.dumps(one.header(), ensure_ascii=False).encode("latin-1"), one.data()),
        "leading-space": assemble(b" " + unsorted, one.data()),
        "leading-mark": assemble(b"\xef\xbb\xbf" + unsorted, one.data()),
        "array": assemble(b"[" + unsorted + b"]", one.data()),
        "trailing-comma": assemble(unsorted[:-1] + b",}", one.data()),
        "two-objects": assemble(unsorted + b"{}", one.data()),
        "metadata-number": number,
        "metadata-null": one.write(lambda text: text.replace('"__metadata__": {', '"__metadata__": null, "x": {')),
        "metadata-array": one.write(lambda text: text.replace('"note": ""', '"note": []')),
        "metadata-lone-surrogate": one.write(lambda text: text.replace('"note": ""', '"note": "\\udc00"')),
        "metadata-raw-newline": one.write(lambda text: text.replace('"note": ""', '"note": "\n"')),
        "padded-with-zeros": assemble(unsorted + bytes(8), one.data()),
        "deep": assemble(unsorted[:-1] + b', "b": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", one.data()),
        "tensor-null": one.write(lambda text: text.replace('"a": {', '"b": null, "a": {')),
        "tensor-extra-member": one.write(
            lambda text: text.replace('"dtype": "U8", "shape"', '"more": 1, "dtype": "U8", "shape"')
        ),
        "tensor-without-dtype": one.write(lambda text: text.replace('"dtype": "U8", "shape"', '"shape"')),
        "tensor-without-shape": one.write(lambda text: text.replace(f'"shape": [{size}], ', "")),
        "tensor-without-offsets": one.write(lambda text: text.replace(f', "data_offsets": [0, {size}]', "")),
        "offsets-of-one": one.write(lambda text: text.replace(f"[0, {size}]", f"[{size}]")),
        "offsets-of-three": one.write(lambda text: text.replace(f"[0, {size}]", f"[0, {size}, {size}]")),
    }


def overlap() -> bytes:
    """Return a file of which two plain tensors have the same bytes."""
    two = draft(tensor("a"), plain=(tensor("p"), tensor("q")))
    size = len(two.stored["a"].data)
    text = json.dumps(two.header()).replace(f"[{size + 20}, {size + 40}]", f"[{size}, {size + 20}]")
    return assemble(text.encode(), two.data()[:-20])


def entries(made: Cases) -> None:
    """Add files with other entries of `fastrack.`."""
    for member in ("version", "file", "key", "tensors"):
        lacking = draft(tensor("a"))
        del lacking.metadata[f"fastrack.{member}"]
        rule = "version" if member == "version" else "ids"
        made.fails(f"no-{member}", rule, "format", lacking.write(), KEYS)
    for name, version in {"2": "2", "0": "0", "01": "01", "1.0": "1.0", "space": "1 ", "empty": ""}.items():
        later = draft(tensor("a"))
        later.metadata["fastrack.version"] = version
        made.fails(f"version-{name}", "version", "format", later.write(), KEYS)
    for member in ("file", "key"):
        letters = {"file": FILE, "key": key_id(KEY)}[member]
        for name, text in {
            "upper-case": letters.upper(),
            "short": letters[:-1],
            "long": letters + "0",
            "space": letters[:-1] + " ",
            "empty": "",
            "no-hexadecimal": letters[:-1] + "g",
        }.items():
            wrong = draft(tensor("a"))
            wrong.metadata[f"fastrack.{member}"] = text
            if member == "file":
                wrong.reseal("a", file=text)
            made.fails(f"{member}-{name}", "ids", "format", wrong.write(), KEYS)
    altered = draft(tensor("a"))
    altered.metadata["fastrack.file"] = OTHER_FILE
    made.fails("file-altered", "context", "authentication", altered.write(), KEYS)
    for name, entry, value in (("entry", "fastrack.later", "x"), ("entry-of-kinds", "fastrack.kinds", "checkpoint")):
        more = draft(tensor("a"), owner={"fastrackless": "1"})
        more.metadata[entry] = value
        opened(made, f"unknown-{name}", "reserved", more)
    none = draft(plain=(tensor("p"), tensor("q", "F32", [2, 2])), owner={"format": "pt"})
    none.metadata = {}
    opened(made, "nothing-sealed", "plain", none, comment="a safetensors file of others")
    bare = draft(plain=(tensor("p"),))
    bare.metadata = {}
    text = json.dumps({"p": bare.header()["p"]}).encode()
    opened(made, "nothing-sealed-no-metadata", "plain", bare, assemble(text, bare.data()))
    null = json.dumps({"__metadata__": None, "p": bare.header()["p"]}).encode()
    opened(made, "nothing-sealed-metadata-null", "plain", bare, assemble(null, bare.data()))
    unlisted = draft(tensor("a"), tensor("b"))
    del unlisted.entries["b"]
    message = unlisted.stored["b"].data
    unlisted.sealed.pop()
    unlisted.plain.append(Tensor("b", "U8", [len(message)], message))
    opened(made, "not-listed", "plain", unlisted, comment="a message that is not listed is a plain tensor")


def data_set_index() -> Draft:
    """Return the index of a dataset of one file, in a form of zlib that every version writes."""
    one = draft(tensor("a"))
    members: dict[str, object] = {"format": 1, "tensors": [["a", "U8", []]], "names": ["a.safetensors"]}
    members |= {"sizes": [len(one.write())], "files": FILE, "rows": [[20]]}
    data = zlib.compress(canonical(members), 0)
    return draft(Tensor("shards", "U8", [len(data)], data), kind="index", file=OTHER_FILE)


def state(text: str) -> Tensor:
    """Return the skeleton of a checkpoint."""
    data = text.encode()
    return Tensor("skeleton", "U8", [len(data)], data)


SKELETON = '{"checkpoint":1,"state":["dict",[["a",["numpy",0]]]]}'


def kinds(made: Cases) -> None:
    """Add files of the kinds that are known, of others, and of another than is expected."""
    checkpoint = draft(tensor("0", "F32", [3]), state(SKELETON), kind="checkpoint")
    opened(made, "kind-checkpoint", "kind", checkpoint)
    listing = canonical({"files": {}, "format": 1})
    folder = draft(Tensor("files", "U8", [len(listing)], listing), kind="folder")
    opened(made, "kind-folder", "kind", folder)
    index = data_set_index()
    opened(made, "kind-index", "kind", index)
    one = draft(tensor("a"))
    for name, written, asked in (
        ("checkpoint-as-tensor", checkpoint, "tensor"),
        ("tensor-as-checkpoint", one, "checkpoint"),
        ("folder-as-tensor", folder, "tensor"),
        ("folder-as-checkpoint", folder, "checkpoint"),
        ("folder-as-index", folder, "index"),
        ("index-as-tensor", index, "tensor"),
        ("index-as-folder", index, "folder"),
        ("tensor-as-folder", one, "folder"),
        ("tensor-as-index", one, "index"),
        ("checkpoint-as-folder", checkpoint, "folder"),
    ):
        made.fails(name, "kind", "format", written.write(), [KEYS[0], ("as", asked)])
    mixed = draft(tensor("0", "F32", [3]), state(SKELETON), plain=(tensor("p"),), kind="checkpoint")
    made.fails("checkpoint-with-plain", "kind", "format", mixed.write(), [KEYS[0], ("as", "checkpoint")])
    for name, kind in {"unknown": "model", "tensor": "tensor", "empty": "", "upper-case": "Checkpoint"}.items():
        other = draft(tensor("a"))
        other.metadata["fastrack.kind"] = kind
        made.fails(f"kind-{name}", "kind", "format", other.write(), KEYS)
    forged = draft(tensor("0", "F32", [3]), state(SKELETON))
    forged.metadata["fastrack.kind"] = "checkpoint"
    fields = [KEYS[0], ("as", "checkpoint")]
    made.fails("purpose-tensor-in-checkpoint", "purpose", "authentication", forged.write(), fields)
    stripped = draft(tensor("0", "F32", [3]), state(SKELETON), kind="checkpoint")
    del stripped.metadata["fastrack.kind"]
    made.fails("purpose-checkpoint-as-tensors", "purpose", "authentication", stripped.write(), KEYS)
    wrong = draft(Tensor("files", "U8", [len(listing)], listing), kind="folder")
    context = context_of("fastrack/tensor@1", {"dtype": "U8", "shape": [len(listing)], "file": FILE, "name": "files"})
    wrong.stored["files"].data = seal(KEY, draw("salt", 24), context, listing)
    made.fails("purpose-folder", "purpose", "authentication", wrong.write(), [KEYS[0], ("as", "folder")])


def guards(made: Cases) -> None:
    """Add the guard, and entries that look like it."""
    for name, owner in (("guard", {"format": "pt"}), ("guard-without-format", {})):
        one = draft(tensor("a"), owner=owner)
        one.extra["fastrack.guard"] = GUARD
        opened(made, name, "guard", one)
    opened(made, "no-guard", "guard", draft(tensor("a"), owner={"format": "pt"}), comment="as of version 0.1")
    last = draft(tensor("a"), owner={"format": "pt"})
    header = json.dumps(last.header() | {"fastrack.guard": dict(reversed(GUARD.items()))}).encode()
    opened(made, "guard-last", "guard", last, assemble(header, last.data()), "its members in another order, too")
    real = draft(tensor("a"), plain=(tensor("fastrack.guard", shape=[0]),))
    opened(made, "guard-is-a-tensor", "guard", real)
    sealed = draft(tensor("a"), tensor("fastrack.guard", "F32", [2]))
    opened(made, "guard-is-sealed", "guard", sealed)
    for name, edit in {
        "dtype": {"dtype": GUARD["dtype"].replace("by", "with")},
        "shape": {"shape": [0, 0]},
        "shape-1": {"shape": [1]},
        "offsets": {"data_offsets": [92, 92]},
        "extra-member": {"more": 1},
    }.items():
        one = draft(tensor("a"), owner={"format": "pt"})
        one.extra["fastrack.guard"] = GUARD | edit
        made.fails(f"guard-{name}", "guard", "format", one.write(), KEYS)
    listed = draft(tensor("a"))
    listed.extra["fastrack.guard"] = GUARD
    listed.entries["fastrack.guard"] = {"dtype": "U8", "shape": [0]}
    made.fails("guard-listed", "guard", "format", listed.write(), KEYS, "a tensor that is listed and not there")
    taken = draft(tensor("a"))
    taken.extra["fastrack.guard2"] = GUARD
    made.fails("guard-of-another-name", "guard", "format", taken.write(), KEYS)
    stored = Stored("U8", [4], b"abcd")
    hidden = draft(tensor("a"))
    hidden.stored["fastrack.guard"] = stored
    hidden.plain.append(Tensor("fastrack.guard", "U8", [4], b"abcd"))
    opened(made, "guard-with-bytes", "guard", hidden)
