"""Cases of messages between ranks, of their confirmations, and of blocks of KV caches."""

import hmac
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from generator.parts.case import Cases, canonical, draw, flip, sha256
from generator.parts.drafts import FILE, KEY, KEY128, OTHER_KEY
from generator.parts.messages import CHUNK, context_of, derive, seal

MESSAGE_RULES = {
    "message": ("messages-between-ranks", "A tensor is one message under the message secret."),
    "secrets": (
        "messages-between-ranks",
        "The secrets are of the key, the run, the group's name, its ranks in order, and the random bytes of each.",
    ),
    "later": ("messages-between-ranks", "Those of a later group are of a secret of the default group, too."),
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


@dataclass(frozen=True)
class Session:
    """Hold what the secrets of a session are of."""

    key: bytes = KEY
    random: tuple[bytes, ...] = tuple(RANDOM)
    members: tuple[int, ...] = (0, 1, 2, 3)
    name: str = "0 1"
    run: str = "sweep-7"
    within: bytes = b""

    def secrets(self) -> tuple[bytes, bytes, bytes]:
        """Return the secrets for messages, for MACs and for later groups."""
        texts = b"".join(number(len(text.encode())) + text.encode() for text in (self.run, self.name))
        ranks = number(len(self.members)) + b"".join(map(number, self.members))
        info = b"fastrack/group@3\0" + texts + ranks + b"".join(self.random)
        whole = HKDF(SHA512(), len(self.key) + 64, None, info).derive(self.key + self.within)
        return whole[: len(self.key)], whole[len(self.key) : -32], whole[-32:]

    def of(self, count: int) -> "Session":
        """Return the session of the first ranks."""
        return replace(self, members=self.members[:count], random=self.random[:count])

    def lines(self) -> list[tuple[str, str]]:
        """Return the lines of a case."""
        lines = [("key", self.key.hex()), ("run", self.run), ("group", self.name)]
        lines += [("within", self.within.hex())] if self.within else []
        lines += [("member", str(rank)) for rank in self.members]
        return lines + [("random", each.hex()) for each in self.random]


FIRST = Session()
"""The session of most cases: of a default group."""
LATER = Session(members=(2, 3), random=tuple(RANDOM[:2]), name="3 1", within=FIRST.secrets()[2])
"""The session of two of its ranks, in a group that was made later."""
TURNED = replace(FIRST, random=(RANDOM[1], RANDOM[0], *RANDOM[2:]))

SENT = {"operation": "all_reduce sum", "dtype": "float32", "number": 7, "source": 1, "target": 2}
"""The route of most cases."""


def packed(route: dict[str, object], size: int) -> bytes:
    """Return the context of a message."""
    texts = b"\0".join(str(route[part]).encode() for part in ("operation", "dtype"))
    numbers = b"".join(number(int(str(route[part]))) for part in ("number", "source", "target"))
    return b"fastrack/group@3\0\0" + texts + b"\0" + numbers + number(size)


def sent(session: Session, route: dict[str, object], data: bytes) -> bytes:
    """Return a message between ranks."""
    return seal(session.secrets()[0], draw(f"salt {route}", 24), packed(route, len(data)), data)


def fields(session: Session, route: dict[str, object], size: int) -> list[tuple[str, str]]:
    """Return the lines of a case."""
    return session.lines() + [(name, str(value)) for name, value in route.items()] + [("size", str(size))]


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
        "barrier": {"operation": "barrier sum"},
        "reduce": {"operation": "reduce to 2 sum"},
        "gather": {"operation": "gather to 2", "target": -1},
        "scatter": {"operation": "scatter of 1", "target": -1},
        "number-of-40-bits": {"number": 1 << 40},
    }.items():
        route, data = SENT | change, draw(f"message {name}", 40)
        made.opens(name, "context", sent(FIRST, route, data), {"sha256": sha256(data)}, fields(FIRST, route, 40))
    for size in (0, 1, CHUNK - 1, CHUNK, CHUNK * 2 + 8):
        data = draw(f"message of {size}", size)
        lines = fields(FIRST, SENT, size)
        made.opens(f"size-{size}", "message", sent(FIRST, SENT, data), {"sha256": sha256(data)}, lines)
    data = draw("message", 40)
    for name, rule, session in (
        ("128-bits", "secrets", replace(FIRST, key=KEY128)),
        ("two-ranks", "secrets", FIRST.of(2)),
        ("one-rank", "secrets", FIRST.of(1)),
        ("ranks-of-others", "secrets", replace(FIRST, members=(9, 3, 1 << 40, 0))),
        ("no-run", "secrets", replace(FIRST, run="")),
        ("spaces-in-names", "secrets", replace(FIRST, run=" a run  of mine ", name=" ")),
        ("later-group", "later", LATER),
        ("later-group-128-bits", "later", replace(LATER, key=KEY128)),
    ):
        route = SENT | {"source": 0, "target": 1 if len(session.random) > 1 else 0}
        made.opens(name, rule, sent(session, route, data), {"sha256": sha256(data)}, fields(session, route, 40))
    _refused_messages(made, data)
    return made


def _refused_messages(made: Cases, data: bytes) -> None:
    good = sent(FIRST, SENT, data)
    for name, change in {
        "operation": {"operation": "all_reduce max"},
        "barrier-for-all-reduce": {"operation": "barrier sum"},
        "reduce-for-all-reduce": {"operation": "reduce to 1 sum"},
        "dtype": {"dtype": "int32"},
        "replayed": {"number": 8},
        "number-minus-one": {"number": 6},
        "source": {"source": 0},
        "target": {"target": 3},
        "target-all": {"target": -1},
        "source-and-target": {"source": 2, "target": 1},
    }.items():
        made.fails(name, "context", "authentication", good, fields(FIRST, SENT | change, 40))
    unsigned = SENT | {"target": 255}
    lines = fields(FIRST, SENT | {"target": -1}, 40)
    made.fails("target-255", "context", "authentication", sent(FIRST, unsigned, data), lines)
    lines = fields(FIRST, SENT, 40)
    other = seal(FIRST.secrets()[0], draw("salt", 24), packed(SENT, 10), data)
    made.fails("size-in-the-context", "context", "authentication", other, lines)
    for name, session in _others(FIRST).items():
        made.fails(name, "secrets", "authentication", good, fields(session, SENT, 40))
    route = SENT | {"source": 0, "target": 1}
    later = sent(LATER, route, data)
    for name, session in {
        "without-the-default-group": replace(LATER, within=b""),
        "of-another-default-group": replace(LATER, within=TURNED.secrets()[2]),
        "of-the-message-secret": replace(LATER, within=FIRST.secrets()[0]),
        "of-the-mac-secret": replace(LATER, within=FIRST.secrets()[1]),
    }.items():
        made.fails(name, "later", "authentication", later, fields(session, route, 40))
    plain = seal(KEY, draw("salt", 24), packed(SENT, 40), data)
    made.fails("under-the-key", "secrets", "authentication", plain, lines, "not under the secret of the session")
    confused = seal(FIRST.secrets()[1], draw("salt", 24), packed(SENT, 40), data)
    made.fails("under-the-mac-secret", "secrets", "authentication", confused, lines)
    for name, index in (("salt", 0), ("commitment", 30), ("ciphertext", 60), ("tag", -1)):
        made.fails(f"{name}-bit", "tag", "authentication", flip(good, index), lines)


def _others(session: Session) -> dict[str, Session]:
    """Return sessions that differ from one in one thing, by the name of a case."""
    return {
        "another-key": replace(session, key=OTHER_KEY),
        "another-run": replace(session, run="sweep-8"),
        "another-name": replace(session, name="0 2"),
        "run-and-name-moved": replace(session, run="sweep-70", name=" 1"),
        "ranks-of-another-group": replace(session, members=(4, 5, 6, 7)),
        "ranks-in-another-order": replace(session, members=(1, 0, 2, 3)),
        "random-in-another-order": TURNED,
        "random-of-another-session": replace(session, random=(*RANDOM[:3], bytes(32))),
        "random-of-three": session.of(3),
    }


def confirmed(session: Session, text: str, rank: int) -> bytes:
    """Return the MAC of a rank."""
    return hmac.digest(session.secrets()[1], text.encode() + number(rank), "sha256")


def confirmations() -> Cases:
    """Return the cases of confirmations."""
    made = Cases("confirmation", CONFIRMATION_RULES)

    def lines(text: str, rank: int, session: Session = FIRST) -> list[tuple[str, str]]:
        return [*session.lines(), ("text", text), ("rank", str(rank))]

    for name, text, rank in (
        ("start", "start", 0),
        ("start-of-rank-3", "start", 3),
        ("all-reduce", "all_reduce sum 7", 1),
        ("barrier", "barrier sum 7", 1),
        ("broadcast", "broadcast of 2 12", 2),
        ("send", "send 3 from rank 0 to 2", 0),
    ):
        made.opens(name, "text", confirmed(FIRST, text, rank), {}, lines(text, rank))
    text = "all_reduce sum 7"
    small = replace(FIRST, key=KEY128)
    mac = confirmed(small, text, 1)
    made.opens("128-bits", "secrets", mac, {}, lines(text, 1, small), "its MAC secret has 32 bytes")
    for name, session in (("two-ranks", FIRST.of(2)), ("later-group", LATER)):
        made.opens(name, "secrets", confirmed(session, text, 1), {}, lines(text, 1, session))
    good = confirmed(FIRST, text, 1)
    for name, wrong in {
        "number": lines("all_reduce sum 8", 1),
        "operation": lines("all_reduce max 7", 1),
        "kind": lines("barrier sum 7", 1),
        "rank": lines(text, 2),
        "start-for-it": lines("start", 1),
    }.items():
        made.fails(f"another-{name}", "text", "authentication", good, wrong)
    for name, rank_text in (("rank-as-text", b"1"), ("without-rank", b"")):
        joined = hmac.digest(FIRST.secrets()[1], text.encode() + rank_text, "sha256")
        made.fails(name, "text", "authentication", joined, lines(text, 1))
    for name, session in _others(FIRST).items():
        made.fails(name, "secrets", "authentication", good, lines(text, 1, session))
    for name, secret in (("under-the-message-secret", FIRST.secrets()[0]), ("under-the-key", KEY)):
        wrong_mac = hmac.digest(secret, text.encode() + number(1), "sha256")
        made.fails(name, "secrets", "authentication", wrong_mac, lines(text, 1))
    half = hmac.digest(small.secrets()[1][:16], text.encode() + number(1), "sha256")
    made.fails("under-half-the-secret", "secrets", "authentication", half, lines(text, 1, small))
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
