"""Cases of `sealed`: messages, keys, and the file around them."""

import json
from collections.abc import Callable

from generator.case import Cases, canonical, draw, flip
from generator.drafts import (
    BITS,
    FILE,
    GUARD,
    KEY,
    KEY128,
    OTHER_FILE,
    OTHER_KEY,
    Draft,
    Stored,
    Tensor,
    assemble,
    draft,
    tensor,
)
from generator.messages import CHUNK, HEADER, TAG, context_of, derive, key_id, seal

RULES = {
    "message": (
        "the-message",
        "A message is salt, commitment and chunks, of which the last is shorter than the others.",
    ),
    "salt": ("the-message", "The salt is part of what keys are derived from."),
    "commitment": ("keys", "The commitment is compared, and nothing is opened if it differs."),
    "tag": ("the-message", "The tag of every chunk holds before anything of it is handed out."),
    "order": ("the-message", "A chunk opens at its own place alone, by the number in its nonce."),
    "nonce": ("the-message", "The number of a chunk is exclusive-ored with the base nonce in its last 38 bits."),
    "key-size": ("keys", "A key of 16 bytes means AES-128-GCM, and one of 32 AES-256-GCM."),
    "key-id": ("the-file", "A reader selects the key by the key id, and refuses a file whose key it does not have."),
    "context": ("context", "The context has dtype, file, name and shape in canonical form."),
    "purpose": ("context", "The context begins with the kind of the file."),
    "dtype": ("context", "The dtype is one of the table, and the tensor has whole bytes."),
    "header": ("what-a-reader-must-check", "The safetensors header has the right sizes, no gap and no overlap."),
    "header.duplicate": ("forms-of-values", "No object in the safetensors header has a member twice."),
    "metadata": ("the-file", "The owner's entries are those that do not begin with `fastrack.`."),
    "version": ("what-a-reader-must-check", "The version is `1`."),
    "ids": ("what-a-reader-must-check", "The file id and the key id are 32 lower-case hexadecimal digits."),
    "reserved": ("the-file", "Entries that begin with `fastrack.` and are not known are ignored."),
    "kind": ("what-a-reader-must-check", "There is no kind, or it is the one that the caller expects."),
    "guard": ("the-file", "Exactly the guard is ignored; any other entry of its name is a tensor."),
    "plain": ("the-file", "A tensor that is not listed is in plain; without any entry nothing is sealed."),
}

KEYS = [("key", KEY.hex()), ("as", "tensor")]


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("sealed", RULES)
    for add in (sizes, names, tampered, keys, headers, entries, kinds, guards):
        add(made)
    return made


def opened(made: Cases, name: str, rule: str, one: Draft, data: bytes | None = None, comment: str = "") -> None:
    """Add a file that opens, as what its draft says."""
    fields = [("key", one.key.hex()), ("as", one.kind or "tensor")]
    made.opens(name, rule, one.write() if data is None else data, one.result, fields, comment)


def sizes(made: Cases) -> None:
    """Add messages of all sizes, and tensors of all dtypes."""
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5):
        opened(made, f"size-{size}", "message", draft(tensor("a", shape=[size])))
    opened(made, "size-16385-128-bits", "key-size", draft(tensor("a", shape=[CHUNK + 1]), key=KEY128))
    many = draft(tensor("a", "F32", [5, CHUNK // 4]), tensor("b", "I64", [3]))
    opened(made, "six-chunks", "nonce", many, comment="wrong where the number takes the place of the last bits")
    for dtype in BITS:
        opened(made, f"dtype-{dtype.lower().replace('_', '-')}", "dtype", draft(tensor("a", dtype, [2, 4])))
    opened(made, "scalar", "context", draft(tensor("a", "F32", [])))
    opened(made, "empty", "context", draft(tensor("a", "F32", [3, 0, 2])))
    opened(made, "no-elements-of-many", "context", draft(Tensor("a", "F32", [0, 1 << 56], b"")))
    opened(made, "extents-64", "context", draft(tensor("a", "U8", [1] * 64)))
    opened(made, "extent-53-bits", "context", draft(Tensor("a", "U8", [(1 << 53) + 1, 0], b"")), comment="no float")
    everything = draft(
        tensor("a"), tensor("b", "BF16", [4, 4]), tensor("c", "I64", []), plain=(tensor("p", "F32", [2]),)
    )
    opened(made, "several-tensors", "plain", everything)


NAMES = {
    "quotes": '"quoted" \\ and / slash',
    "control": "\b\t\n\f\r\x00\x01\x1f\x7f",
    "latin": "größe",
    "decomposed": "gro\u0308\u00dfe",
    "astral": "weights 🚀 \U0010ffff",
    "separators": "a\u2028b\u2029c\ufeff",
    "empty": "",
    "proto": "__proto__",
    "constructor": "constructor",
    "number": "10",
    "spaces": " a ",
}


def names(made: Cases) -> None:
    """Add names that have to be written as the page says."""
    for name, text in NAMES.items():
        opened(made, f"name-{name}", "context", draft(tensor(text)))
    two = draft(tensor("ä"), tensor("a\u0308"))
    opened(made, "names-not-normalised", "context", two)
    for member, value in (("dtype", "I8"), ("name", "b"), ("shape", [4, 5]), ("file", OTHER_FILE)):
        one = draft(tensor("a"))
        one.reseal("a", **{member: value})
        made.fails(f"context-{member}", "context", "authentication", one.write(), KEYS, f"sealed with another {member}")
    one = draft(tensor("ä"))
    message = seal(
        KEY,
        one.salt("ä"),
        b"fastrack/tensor@1\0" + canonical({**one.entries["ä"], "file": FILE, "name": "ä"}),
        one.sealed[0].data,
    )
    one.stored["ä"].data = message
    made.fails("context-escaped", "context", "authentication", one.write(), KEYS, "the name in the context as ASCII")
    exchanged = draft(tensor("a"), tensor("b"))
    exchanged.stored["a"], exchanged.stored["b"] = exchanged.stored["b"], exchanged.stored["a"]
    made.fails("messages-exchanged", "context", "authentication", exchanged.write(), KEYS)
    renamed = draft(tensor("a"))
    renamed.listed = renamed.text().replace('"a"', '"b"')
    made.fails(
        "renamed", "context", "authentication", renamed.write(lambda text: text.replace('"a": {', '"b": {')), KEYS
    )
    retyped = draft(tensor("a"))
    retyped.listed = retyped.text().replace("U8", "BOOL")
    made.fails("retyped", "context", "authentication", retyped.write(), KEYS)
    reshaped = draft(tensor("a"))
    reshaped.listed = reshaped.text().replace("[20]", "[20, 1]")
    made.fails("reshaped", "context", "authentication", reshaped.write(), KEYS)


def chunk(data: bytes, number: int) -> slice:
    """Return where a chunk is in a message."""
    start = HEADER + number * (CHUNK + TAG)
    return slice(start, min(start + CHUNK + TAG, len(data)))


def swapped(data: bytes, one: int, other: int) -> bytes:
    """Return a message with two whole chunks exchanged."""
    first, second = chunk(data, one), chunk(data, other)
    return data[: first.start] + data[second] + data[first.stop : second.start] + data[first] + data[second.stop :]


def repeated(data: bytes) -> bytes:
    """Return a message whose second chunk is the first once more."""
    return data[: chunk(data, 1).start] + data[chunk(data, 0)] + data[chunk(data, 1).stop :]


def tampered(made: Cases) -> None:
    """Add messages that were altered, of three chunks each."""
    big = [CHUNK * 2 + 7]
    edits: list[tuple[str, str, Callable[[bytes], bytes]]] = [
        ("salt-first-bit", "salt", lambda data: flip(data, 0, 128)),
        ("salt-last-bit", "salt", lambda data: flip(data, 23)),
        ("commitment-first-bit", "commitment", lambda data: flip(data, 24, 128)),
        ("commitment-last-bit", "commitment", lambda data: flip(data, 55)),
        ("ciphertext-first-bit", "tag", lambda data: flip(data, 56, 128)),
        ("ciphertext-last-chunk", "tag", lambda data: flip(data, -17)),
        ("tag-first-chunk-last-byte", "tag", lambda data: flip(data, 56 + CHUNK + 15)),
        ("tag-middle-chunk", "tag", lambda data: flip(data, 56 + (CHUNK + 16) + CHUNK)),
        ("tag-last-bit", "tag", lambda data: flip(data, -1)),
        ("tag-last-chunk-first-bit", "tag", lambda data: flip(data, -16, 128)),
        ("chunks-swapped", "order", lambda data: swapped(data, 0, 1)),
        ("chunk-repeated", "order", repeated),
    ]
    for name, rule, edit in edits:
        one = draft(tensor("a", shape=big))
        one.alter("a", edit)
        made.fails(name, rule, "authentication", one.write(), KEYS)
    for size in (0, CHUNK):
        one = draft(tensor("a", shape=[size]))
        one.alter("a", lambda data: flip(data, -1))
        made.fails(f"tag-of-nothing-{size}", "tag", "authentication", one.write(), KEYS, "the last chunk is only a tag")
    plain = draft(tensor("a", shape=[40]))
    commitment = derive(KEY, plain.salt("a"), plain.context("a"))[2]
    plain.stored["a"].data = plain.salt("a") + commitment + plain.sealed[0].data + bytes(TAG)
    made.fails("not-encrypted", "tag", "authentication", plain.write(), KEYS, "plaintext behind a valid commitment")
    second = draft(tensor("a"), tensor("b"))
    second.alter("b", lambda data: flip(data, -1))
    made.fails("second-of-two", "tag", "authentication", second.write(), KEYS)


def keys(made: Cases) -> None:
    """Add files under one of several keys, or under none that is known."""
    one = draft(tensor("a"))
    made.opens("key-second-of-two", "key-id", one.write(), one.result, [("key", OTHER_KEY.hex()), *KEYS])
    made.opens("key-first-of-two", "key-id", one.write(), one.result, [KEYS[0], ("key", KEY128.hex()), KEYS[1]])
    small = draft(tensor("a"), key=KEY128)
    opened(made, "key-128-bits", "key-size", small)
    zeros = draft(tensor("a"), key=bytes(32))
    opened(made, "key-of-zeros", "key-size", zeros)
    other = [("key", OTHER_KEY.hex()), ("as", "tensor")]
    made.fails("key-unknown", "key-id", "unknown-key", one.write(), other)
    half = [("key", KEY128.hex()), ("as", "tensor")]
    made.fails("key-half", "key-size", "unknown-key", one.write(), half, "the first 16 bytes of the key")
    double = [("key", (KEY128 + bytes(16)).hex()), ("as", "tensor")]
    made.fails("key-padded", "key-size", "unknown-key", small.write(), double, "the key with zeros behind it")
    mixed = draft(tensor("a"))
    mixed.reseal("a", key=KEY128)
    both = [("key", KEY.hex()), ("key", KEY128.hex()), ("as", "tensor")]
    made.fails("key-of-another-size", "key-id", "authentication", mixed.write(), both, "sealed under the second key")
    claimed = draft(tensor("a"))
    claimed.metadata["fastrack.key"] = key_id(OTHER_KEY)
    made.fails("key-claimed", "key-id", "authentication", claimed.write(), [("key", OTHER_KEY.hex()), *KEYS])
    foreign = draft(tensor("a"), tensor("b"))
    foreign.reseal("b", key=OTHER_KEY)
    made.fails("key-of-one-tensor", "key-id", "authentication", foreign.write(), [*KEYS, ("key", OTHER_KEY.hex())])


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
    unlisted = draft(tensor("a"), tensor("b"))
    del unlisted.entries["b"]
    message = unlisted.stored["b"].data
    unlisted.sealed.pop()
    unlisted.plain.append(Tensor("b", "U8", [len(message)], message))
    opened(made, "not-listed", "plain", unlisted, comment="a message that is not listed is a plain tensor")


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
    index = draft(tensor("shards"), kind="index")
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
        "dtype": {"dtype": GUARD["dtype"].replace("by", "with")},  # type: ignore[attr-defined]
        "shape": {"shape": [0, 0]},
        "shape-1": {"shape": [1]},
        "offsets": {"data_offsets": [92, 92]},
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
