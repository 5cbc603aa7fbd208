"""Signed documents, in DSSE envelopes."""

from helpers.by_hand.documents import load, load_canonical, load_line, read_base64, require
from helpers.by_hand.keys import is_signed, pair_id, read_public

MEBIBYTE = 1 << 20


def encode(kind, payload):
    return f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload


def open_grants_envelope(content, kind, owners):
    """Return a payload that one of the owners signed, whoever else did."""
    envelope = load(content)
    require(envelope["payloadType"] == kind, f"the type {kind}")
    payload = read_base64(envelope["payload"])
    signatures = [read_base64(each["sig"]) for each in envelope["signatures"]]
    text = encode(kind, payload)
    is_good = any(is_signed(owner, each, text) for each in signatures for owner in owners)
    require(is_good, "the signature of an owner", "signature")
    return load_canonical(payload)


def open_envelope(content, kind, owner, limit=MEBIBYTE):
    """Return the payload of an envelope in the one form of manifests and tours, as bytes."""
    envelope = load_line(content, limit)
    (signature,) = envelope["signatures"]
    form = {"payload": envelope["payload"], "payloadType": kind}
    form["signatures"] = [{"keyid": signature["keyid"], "sig": signature["sig"]}]
    require(envelope == form, f"an envelope of {kind}")
    payload = read_base64(envelope["payload"])
    is_good = is_signed(owner, read_base64(signature["sig"]), encode(kind, payload))
    require(is_good, "the signature of the owner", "signature")
    require(signature["keyid"] == pair_id(*read_public(owner)), "the id of the signer")
    return payload


def kind_of(content):
    return load(content)["payloadType"]
