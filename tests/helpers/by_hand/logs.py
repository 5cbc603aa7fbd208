"""Logs of brokers and desks, and signed heads of them."""

import sqlite3
from contextlib import closing
from hashlib import sha256

from helpers.by_hand.documents import (
    canonical,
    is_hexadecimal,
    is_number,
    load_canonical,
    members,
    read_time,
    require,
)
from helpers.by_hand.signed import open_grants_envelope

HEAD = "application/vnd.fastrack.broker-head.v1+json"
VERSIONS = {0x46545242: 2, 0x46545454: 1}  # of the databases of brokers and of desks


def read_log(path):
    """Return the entries of a log, each an event with its details, and the head: number, time and hash of the last."""
    with closing(sqlite3.connect(path)) as database:
        application, version = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        rows = database.execute("SELECT number, time, event, details, hash FROM log ORDER BY number").fetchall()
    require(1 <= version <= VERSIONS[application], "a database of a version that is known")
    head = {"number": 0, "time": "", "hash": bytes(32).hex()}
    for number, time, event, details, digest in rows:
        read_time(time)
        entry = canonical({"details": details, "event": event, "number": number, "time": time})
        found = sha256(b"fastrack/audit@1\0" + bytes.fromhex(head["hash"]) + entry).digest()
        require((number, digest) == (head["number"] + 1, found), "the hash of an entry", "authentication")
        head = {"number": number, "time": time, "hash": found.hex()}
    return [(event, load_canonical(details.encode())) for _, _, event, details, _ in rows], head


def read_head(content, owners):
    """Return number, time and hash of the last entry of a log, as one of the owners signed them."""
    require(len(content) <= 64 << 10, "64 KiB at most")
    head = members(open_grants_envelope(content, HEAD, owners), "version number time hash")
    require(is_number(head["version"]) and head.pop("version") == 1, "version 1")
    require(is_number(head["number"]) and is_hexadecimal(head["hash"], 64), "a number and a hash")
    return head
