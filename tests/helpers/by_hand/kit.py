"""Cases of tests/testkit, read by hand."""

import base64
import json

from helpers.by_hand import data, exchange, grants, group, keys, messages, sealed, sets, tours
from helpers.by_hand.documents import described


@described
def read(case, cipher=messages):
    """Return the result of a case, or raise a `RefusedError`."""
    return READERS[case.kind](case, cipher)


def _bytes(case, name):
    return bytes.fromhex(case.get(name))


def _all(case, name):
    return [bytes.fromhex(value) for value in case.all(name)]


def _owner(case):
    return case.get("owner").partition(" ")[0]


def _sealed(case, cipher):
    return sealed.read_sealed(case.payload, _all(case, "key"), case.get("as"), cipher)


def _widened(case, cipher):
    return sealed.read_widened(case.payload, _bytes(case, "key"), json.loads(case.get("tensor")), cipher)


def _wrapped(case, _):
    if case.get("wrapping") is None:
        return keys.read_wrapped_key(case.payload, decrypted=_bytes(case, "decrypted"))
    return keys.read_wrapped_key(case.payload, base64.b64decode(case.get("wrapping")))


def _grants(case, _):
    if case.get("passphrase") is None:
        opener = {"secret_file": base64.b64decode(case.get("secret"))}
    else:
        opener = {"passphrase": json.loads(case.get("passphrase"))}
    return grants.read_granted(case.payload, case.all("owner"), case.get("time"), **opener)


def _manifest(case, _):
    return sets.read_manifest(case.files(), case.get("anchor") or sets.new_anchor(_owner(case)))


def _offer(case, _):
    return exchange.read_offer(case.payload, base64.b64decode(case.get("challenge")), case.get("time"))


def _answer(case, _):
    secret = base64.b64decode(case.get("secret"))
    return exchange.read_answer(case.payload, case.get("challenge"), case.all("owner"), secret, case.get("time"))


def _message(case, cipher):
    number, source, target, size = (int(case.get(name)) for name in ("number", "source", "target", "size"))
    names = case.get("operation"), case.get("dtype")
    return group.read_message(case.payload, _session(case), *names, (number, source, target), size, cipher)


def _confirmation(case, _):
    return group.read_confirmation(case.payload, _session(case), case.get("text"), int(case.get("rank")))


def _session(case):
    """Return key, secret of the default group, run, name, members and random bytes, of which the secrets are."""
    within = bytes.fromhex(case.get("within") or "")
    members = [int(value) for value in case.all("member")]
    return (
        _bytes(case, "key"),
        within,
        case.get("run").encode(),
        case.get("group").encode(),
        members,
        _all(case, "random"),
    )


def _block(case, cipher):
    return group.read_block(
        case.payload, _bytes(case, "key"), case.get("context").encode(), int(case.get("size")), cipher
    )


READERS = {
    "sealed": _sealed,
    "widened": _widened,
    "key-file": lambda case, _: keys.read_key_file(case.payload),
    "secret-file": lambda case, _: keys.read_secret_file(case.payload),
    "public-file": lambda case, _: keys.read_public_file(case.payload),
    "wrapped": _wrapped,
    "grants": _grants,
    "manifest": _manifest,
    "folder": lambda case, cipher: sets.read_folder(case.files(), _bytes(case, "key"), cipher),
    "data-set": lambda case, cipher: data.read_data_set(case.files(), _bytes(case, "key"), cipher),
    "challenge": lambda case, _: exchange.read_challenge(case.payload),
    "offer": _offer,
    "answer": _answer,
    "chain": lambda case, _: tours.read_tour(case.payload, _owner(case)),
    "message": _message,
    "confirmation": _confirmation,
    "block": _block,
}
