"""Messages between ranks, and blocks of KV caches."""

import hmac
import re
from hashlib import sha256

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from helpers.by_hand import messages
from helpers.by_hand.documents import load_canonical, members, require

LABEL = b"fastrack/group@3\0"


def number(value):
    return value.to_bytes(8, "big", signed=True)


def secrets_of(key, within, run, name, members, random):
    """Return the secrets of a session for messages and for MACs."""
    info = LABEL + b"".join(number(len(text)) + text for text in (run, name))
    info += number(len(members)) + b"".join(map(number, members)) + b"".join(random)
    secrets = HKDF(SHA512(), len(key) + 64, None, info).derive(key + within)
    return secrets[: len(key)], secrets[len(key) : -32]


def read_message(content, session, operation, dtype, route, size, cipher=messages):
    """Open a tensor that goes between ranks; `route` has the number of the operation, source and target."""
    secret, _ = secrets_of(*session)
    context = LABEL + b"\0" + operation.encode() + b"\0" + dtype.encode() + b"\0"
    context += b"".join(map(number, [*route, size]))
    return {"sha256": sha256(messages.open_message(cipher, secret, context, content, size)).hexdigest()}


def read_confirmation(content, session, text, rank):
    _, secret = secrets_of(*session)
    expected = hmac.digest(secret, text.encode("ascii") + number(rank), "sha256")
    require(hmac.compare_digest(expected, content), "the MAC of this text and rank", "authentication")
    return {}


def read_block(content, key, block, size, cipher=messages):
    """Open a block; `block` is the JSON that describes it."""
    described = members(load_canonical(block), "hash layout model ranks salt")
    require(all(isinstance(value, str) for value in described.values()), "strings")
    require(re.fullmatch("([0-9a-f]{2})*", described["hash"]), "a hash in hexadecimal")
    plain = messages.open_message(cipher, key, b"fastrack/kv@1\0" + block, content, size)
    name = cipher.derive(key, bytes(24), b"fastrack/kv-name@1\0" + block)[len(key) + 12 :]
    return {"name": name.hex(), "sha256": sha256(plain).hexdigest()}
