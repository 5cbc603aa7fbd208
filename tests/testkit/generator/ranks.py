"""Cases of messages between ranks, of their confirmations, and of blocks of KV caches."""

import hmac

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from generator.parts.case import Cases, canonical, draw, flip, sha256
from generator.parts.drafts import FILE, KEY, KEY128, OTHER_KEY
from generator.parts.messages import CHUNK, context_of, derive, seal

MESSAGE_RULES = {
    "message": ("messages-between-ranks", "A tensor is one message under the message secret."),
    "secrets": (
        "messages-between-ranks",
        "Both secrets are of the key, the number of ranks and the random bytes of each, in order.",
    ),
    "context": ("messages-between-ranks", "The context has operation, dtype, number, source, target and size."),
    "tag": ("the-message", "Commitment and tags hold."),
}

CONFIRMATION_RULES = {
    "mac": ("messages-between-ranks", "A confirmation is HMAC-SHA-256 under the MAC secret."),
    "secrets": ("messages-between-ranks", "The MAC secret is the 32 bytes behind the message secret."),
    "text": ("messages-between-ranks", "It is over the text and the rank of the sender."),
}

BLOCK_RULES = {
    "message": ("blocks-of-kv-caches", "A block is one message under the key of the servers."),
    "context": ("blocks-of-kv-caches", "The context has all five members of the block."),
    "size": ("blocks-of-kv-caches", "A message of another size is refused."),
    "tag": ("the-message", "Commitment and tags hold."),
}

RANDOM = [draw(f"random of rank {rank}", 32) for rank in range(4)]


def number(value: int) -> bytes:
    """Return a number of 8 bytes, perhaps with a sign."""
    return value.to_bytes(8, "big", signed=True)


def session(key: bytes, random: list[bytes]) -> tuple[bytes, bytes]:
    """Return the secret for messages and that for MACs."""
    info = b"fastrack/group@2\0" + number(len(random)) + b"".join(random)
    text = HKDF(SHA512(), len(key) + 32, None, info).derive(key)
    return text[: len(key)], text[len(key) :]


SENT = {"operation": "all_reduce sum", "dtype": "float32", "number": 7, "source": 1, "target": 2}
"""The route of most cases."""


def packed(route: dict[str, object], size: int) -> bytes:
    """Return the context of a message."""
    texts = b"\0".join(str(route[part]).encode() for part in ("operation", "dtype"))
    numbers = b"".join(number(int(str(route[part]))) for part in ("number", "source", "target"))
    return b"fastrack/group@2\0\0" + texts + b"\0" + numbers + number(size)


def sent(key: bytes, random: list[bytes], route: dict[str, object], data: bytes) -> bytes:
    """Return a message between ranks."""
    return seal(session(key, random)[0], draw(f"salt {route}", 24), packed(route, len(data)), data)


def fields(key: bytes, random: list[bytes], route: dict[str, object], size: int) -> list[tuple[str, str]]:
    """Return the lines of a case."""
    lines = [("key", key.hex()), *(("random", each.hex()) for each in random)]
    return lines + [(name, str(value)) for name, value in route.items()] + [("size", str(size))]


def messages() -> Cases:
    """Return the cases of messages."""
    made = Cases("message", MESSAGE_RULES)
    for name, change in {
        "all-reduce": {},
        "all-reduce-mean": {"operation": "all_reduce mean", "dtype": "bfloat16"},
        "reduce-scatter": {"operation": "reduce_scatter max"},
        "all-gather": {"operation": "all_gather", "target": -1},
        "broadcast": {"operation": "broadcast of 1", "dtype": "int64", "target": -1},
        "send": {"operation": "send", "source": 0, "target": 1, "number": 1},
        "number-of-40-bits": {"number": 1 << 40},
    }.items():
        route, data = SENT | change, draw(f"message {name}", 40)
        made.opens(
            name, "context", sent(KEY, RANDOM, route, data), {"sha256": sha256(data)}, fields(KEY, RANDOM, route, 40)
        )
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK * 2 + 8):
        data = draw(f"message of {size}", size)
        lines = fields(KEY, RANDOM, SENT, size)
        made.opens(f"size-{size}", "message", sent(KEY, RANDOM, SENT, data), {"sha256": sha256(data)}, lines)
    data = draw("message", 40)
    for name, key, random in (
        ("128-bits", KEY128, RANDOM),
        ("two-ranks", KEY, RANDOM[:2]),
        ("one-rank", KEY, RANDOM[:1]),
    ):
        route = SENT | {"source": 0, "target": 1 if len(random) > 1 else 0}
        result = {"sha256": sha256(data)}
        made.opens(name, "secrets", sent(key, random, route, data), result, fields(key, random, route, 40))
    _refused_messages(made, data)
    return made


def _refused_messages(made: Cases, data: bytes) -> None:
    good = sent(KEY, RANDOM, SENT, data)
    for name, change in {
        "operation": {"operation": "all_reduce max"},
        "dtype": {"dtype": "int32"},
        "replayed": {"number": 8},
        "number-minus-one": {"number": 6},
        "source": {"source": 0},
        "target": {"target": 3},
        "target-all": {"target": -1},
        "source-and-target": {"source": 2, "target": 1},
    }.items():
        made.fails(name, "context", "authentication", good, fields(KEY, RANDOM, SENT | change, 40))
    unsigned = SENT | {"target": 255}
    made.fails(
        "target-255",
        "context",
        "authentication",
        sent(KEY, RANDOM, unsigned, data),
        fields(KEY, RANDOM, SENT | {"target": -1}, 40),
    )
    lines = fields(KEY, RANDOM, SENT, 40)
    other = seal(session(KEY, RANDOM)[0], draw("salt", 24), packed(SENT, 10), data)
    made.fails("size-in-the-context", "context", "authentication", other, lines)
    order = [RANDOM[1], RANDOM[0], *RANDOM[2:]]
    made.fails("random-in-another-order", "secrets", "authentication", good, fields(KEY, order, SENT, 40))
    made.fails(
        "random-of-another-session", "secrets", "authentication", good, fields(KEY, [*RANDOM[:3], bytes(32)], SENT, 40)
    )
    made.fails("random-of-three", "secrets", "authentication", good, fields(KEY, RANDOM[:3], SENT, 40))
    made.fails("another-key", "secrets", "authentication", good, fields(OTHER_KEY, RANDOM, SENT, 40))
    plain = seal(KEY, draw("salt", 24), packed(SENT, 40), data)
    made.fails("under-the-key", "secrets", "authentication", plain, lines, "not under the secret of the session")
    confused = seal(session(KEY, RANDOM)[1], draw("salt", 24), packed(SENT, 40), data)
    made.fails("under-the-mac-secret", "secrets", "authentication", confused, lines)
    for name, index in (("salt", 0), ("commitment", 30), ("ciphertext", 60), ("tag", -1)):
        made.fails(f"{name}-bit", "tag", "authentication", flip(good, index), lines)


def confirmed(key: bytes, random: list[bytes], text: str, rank: int) -> bytes:
    """Return the MAC of a rank."""
    return hmac.digest(session(key, random)[1], text.encode() + number(rank), "sha256")


def confirmations() -> Cases:
    """Return the cases of confirmations."""
    made = Cases("confirmation", CONFIRMATION_RULES)

    def lines(text: str, rank: int, key: bytes = KEY, random: list[bytes] = RANDOM) -> list[tuple[str, str]]:
        return [("key", key.hex()), *(("random", one.hex()) for one in random), ("text", text), ("rank", str(rank))]

    for name, text, rank in (
        ("start", "start", 0),
        ("start-of-rank-3", "start", 3),
        ("all-reduce", "all_reduce sum 7", 1),
        ("broadcast", "broadcast of 2 12", 2),
        ("send", "send 3 from rank 0 to 2", 0),
    ):
        made.opens(name, "text", confirmed(KEY, RANDOM, text, rank), {}, lines(text, rank))
    text = "all_reduce sum 7"
    small = lines(text, 1, KEY128)
    made.opens("128-bits", "secrets", confirmed(KEY128, RANDOM, text, 1), {}, small, "its MAC secret has 32 bytes")
    made.opens("two-ranks", "secrets", confirmed(KEY, RANDOM[:2], text, 1), {}, lines(text, 1, random=RANDOM[:2]))
    good = confirmed(KEY, RANDOM, text, 1)
    for name, wrong in {
        "number": lines("all_reduce sum 8", 1),
        "operation": lines("all_reduce max 7", 1),
        "rank": lines(text, 2),
        "start-for-it": lines("start", 1),
    }.items():
        made.fails(f"another-{name}", "text", "authentication", good, wrong)
    joined = hmac.digest(session(KEY, RANDOM)[1], text.encode() + b"1", "sha256")
    made.fails("rank-as-text", "text", "authentication", joined, lines(text, 1))
    made.fails(
        "without-rank",
        "text",
        "authentication",
        hmac.digest(session(KEY, RANDOM)[1], text.encode(), "sha256"),
        lines(text, 1),
    )
    made.fails("another-key", "secrets", "authentication", good, lines(text, 1, OTHER_KEY))
    order = [RANDOM[1], RANDOM[0], *RANDOM[2:]]
    made.fails("random-in-another-order", "secrets", "authentication", good, lines(text, 1, random=order))
    wrong_secret = hmac.digest(session(KEY, RANDOM)[0], text.encode() + number(1), "sha256")
    made.fails("under-the-message-secret", "secrets", "authentication", wrong_secret, lines(text, 1))
    under_key = hmac.digest(KEY, text.encode() + number(1), "sha256")
    made.fails("under-the-key", "secrets", "authentication", under_key, lines(text, 1))
    short = session(KEY128, RANDOM)[1][:16]
    half = hmac.digest(short, text.encode() + number(1), "sha256")
    made.fails("under-half-the-secret", "secrets", "authentication", half, small)
    made.fails("first-bit", "mac", "authentication", flip(good, 0, 128), lines(text, 1))
    made.fails("last-bit", "mac", "authentication", flip(good, -1), lines(text, 1))
    made.fails("zeros", "mac", "authentication", bytes(32), lines(text, 1))
    return made


BLOCK = {"hash": "746f6b656e73", "layout": "bfloat16 [2, 16, 8, 64]", "model": "llama@1", "ranks": "0 of 1"}
BLOCK |= {"salt": "tenant-a"}


def block_name(key: bytes, block: dict[str, str]) -> str:
    """Return the name of a block in a store."""
    return derive(key, bytes(24), b"fastrack/kv-name@1\0" + canonical(block))[2].hex()


def blocks() -> Cases:
    """Return the cases of blocks."""
    made = Cases("block", BLOCK_RULES)

    def sealed(block: dict[str, str], data: bytes, key: bytes = KEY) -> bytes:
        return seal(key, draw(f"salt {block}", 24), b"fastrack/kv@1\0" + canonical(block), data)

    def lines(block: dict[str, str], size: int, key: bytes = KEY) -> list[tuple[str, str]]:
        return [("key", key.hex()), ("context", canonical(block).decode()), ("size", str(size))]

    def opens(name: str, rule: str, block: dict[str, str], data: bytes, key: bytes = KEY) -> None:
        result = {"name": block_name(key, block), "sha256": sha256(data)}
        made.opens(name, rule, sealed(block, data, key), result, lines(block, len(data), key))

    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK * 2):
        opens(f"size-{size}", "message", BLOCK, draw(f"block {size}", size))
    data = draw("block", 64)
    opens("128-bits", "message", BLOCK, data, KEY128)
    opens("empty-strings", "context", dict.fromkeys(BLOCK, ""), data)
    opens("unicode", "context", BLOCK | {"salt": "größe 🚀 \x7f \u2028", "model": '"\\/\b\t\n\x00'}, data)
    good = sealed(BLOCK, data)
    for member in BLOCK:
        other = BLOCK | {member: "ff" if member == "hash" else BLOCK[member] + " "}
        made.fails(f"another-{member}", "context", "authentication", good, lines(other, 64))
    made.fails("another-key", "context", "authentication", good, lines(BLOCK, 64, OTHER_KEY))
    for size in (63, 65, 0, CHUNK):
        text = "the message was sealed with 64 bytes, in the right context"
        made.fails(f"size-{size}-for-64", "size", "format", good, lines(BLOCK, size), text)
    made.fails("trailing", "size", "format", good + b"\0", lines(BLOCK, 64))
    made.fails("truncated", "size", "format", good[:-1], lines(BLOCK, 64))
    whole = sealed(BLOCK, draw("block", CHUNK))
    made.fails("without-last-chunk", "size", "format", whole[:-16], lines(BLOCK, CHUNK))
    made.fails("nothing", "size", "format", b"", lines(BLOCK, 64))
    escaped = BLOCK | {"salt": "größe"}
    utf8 = context_of("fastrack/kv@1", dict(escaped))
    made.fails(
        "context-in-utf-8", "context", "authentication", seal(KEY, draw("salt", 24), utf8, data), lines(escaped, 64)
    )
    odd = BLOCK | {"salt": "\ud800"}
    made.fails("context-lone-surrogate", "context", "format", sealed(odd, data), lines(odd, 64))
    named = seal(KEY, draw("salt", 24), b"fastrack/kv-name@1\0" + canonical(BLOCK), data)
    made.fails("purpose-name", "context", "authentication", named, lines(BLOCK, 64))
    tensor = context_of("fastrack/tensor@1", {"dtype": "U8", "file": FILE, "name": "a", "shape": [64]})
    made.fails(
        "purpose-tensor", "context", "authentication", seal(KEY, draw("salt", 24), tensor, data), lines(BLOCK, 64)
    )
    for name, index in (("salt", 0), ("commitment", 30), ("ciphertext", 60), ("tag", -1)):
        made.fails(f"{name}-bit", "tag", "authentication", flip(good, index), lines(BLOCK, 64))
    return made
