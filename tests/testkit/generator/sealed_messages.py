"""Cases of `sealed`: messages, and the keys and contexts that they are sealed under."""

from collections.abc import Callable

from generator.parts.case import Cases, canonical, flip
from generator.parts.drafts import (
    BITS,
    FILE,
    KEY,
    KEY128,
    OTHER_FILE,
    OTHER_KEY,
    Draft,
    Tensor,
    draft,
    tensor,
)
from generator.parts.messages import CHUNK, HEADER, TAG, derive, key_id, seal

RULES = {
    "message": (
        "the-message",
        "A message is salt, commitment and chunks, of which the last is shorter than the others.",
    ),
    "salt": ("the-message", "The salt is part of what keys are derived from."),
    "commitment": ("keys", "The commitment is compared, and nothing is opened if it differs."),
    "tag": ("the-message", "The tag of every chunk holds before anything of it is handed out."),
    "order": ("the-message", "A chunk opens only at its own place, by the number in its nonce."),
    "nonce": ("the-message", "The number of a chunk is exclusive-ored with the base nonce in its last 38 bits."),
    "key-size": ("keys", "A key of 16 bytes means AES-128-GCM, and one of 32 AES-256-GCM."),
    "key-id": ("the-file", "A reader selects the key by the key id, and refuses a file whose key it does not have."),
    "context": ("context", "The context has dtype, file, name and shape in canonical form."),
    "dtype": ("context", "The dtype is one of the table, and the tensor has whole bytes."),
    "plain": ("the-file", "A tensor that is not listed is unencrypted; without any entry nothing is sealed."),
}

KEYS = [("key", KEY.hex()), ("as", "tensor")]


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("sealed", RULES)
    for add in (sizes, names, tampered, keys):
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
    """Return a message with two whole chunks swapped."""
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
