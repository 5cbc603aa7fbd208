"""A second implementation of the chain of a tour, from docs/format.md alone: the standard library and cryptography."""

import base64
import json
import re
from datetime import datetime
from hashlib import sha256

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519, mldsa

KEYS = {"Ed25519": ed25519.Ed25519PublicKey, "ML-DSA-65": mldsa.MLDSA65PublicKey}
KINDS = {
    "plan": "attempts code expires holders issued lineage order seconds start tour",
    "delegation": "attempt before expires key plan previous salt signer visit",
    "consent": "delegation expires files issued offer policy",
    "receipt": "after chunks code consent delegation ended files scrubbed started",
    "completion": "head issued model plan visits",
}
HEXADECIMAL = {
    32: "tour lineage key",
    64: "code plan previous delegation policy offer salt head",
}
TIMES = "issued expires started ended"
NUMBERS = "seconds attempts visit attempt chunks scrubbed visits"


class RefusedError(Exception):
    pass


def require(holds, reason):
    if not holds:
        raise RefusedError(reason)


def read_chain(content, owner):
    """Return the plan, the visits and the completion or None, all verified. `owner` is the line of a public key."""
    try:
        return _read_chain(content, owner)
    except (ValueError, KeyError, TypeError, AttributeError, InvalidSignature) as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from None


def _read_chain(content, owner):
    require(content.endswith(b"\n"), "an end")
    first, *lines = [line + b"\n" for line in content[:-1].split(b"\n")]
    plan, head = read_document(first, "plan", owner)
    check_plan(plan)
    digest, model, visits, completion = head, plan["start"], [], None
    for line in lines:
        require(completion is None, "nothing behind the completion")
        if kind_of(line) == "completion":
            completion, _ = read_document(line, "completion", owner)
            found = tuple(completion[name] for name in ("plan", "head", "visits", "model"))
            require(found == (digest, head, len(visits), model), "a completion of this chain")
            continue
        visit = read_receipt(line, plan, digest, owner)
        delegation = visit["delegation"]
        found = tuple(delegation[name] for name in ("visit", "previous", "before"))
        require(found == (len(visits), head, model), "the next visit")
        require(visit["receipt"]["after"] is not None, "a visit that ended")
        head, model = visit["digest"], visit["receipt"]["after"]
        visits.append(visit)
    return plan, visits, completion


def check_plan(plan):
    holders = plan["holders"]
    require(all(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) for name in holders), "names")
    require(set(plan["order"]) == set(holders) and holders, "the order of the holders")
    require(len(set(holders.values())) == len(holders), "a key for each holder")
    require(0 < plan["seconds"] < 2**31 and 0 < plan["attempts"] < 2**16, "limits")
    require(read_time(plan["issued"]) < read_time(plan["expires"]), "an end after the beginning")


def read_receipt(line, plan, plan_digest, owner):
    """Return a verified receipt with its digest, delegation and consent, but for its place in the chain."""
    unverified = json.loads(payload_of(line))
    envelopes = {name: read_base64(unverified[name]) for name in ("delegation", "consent")}
    delegation, delegated = read_document(envelopes["delegation"], "delegation", owner)
    receipt, digest = read_document(line, "receipt", delegation["signer"])
    require(delegation["visit"] < len(plan["order"]), "a visit of the plan")
    holder = plan["order"][delegation["visit"]]
    consent, _ = read_document(envelopes["consent"], "consent", plan["holders"][holder])
    require(delegation["plan"] == plan_digest, "a delegation of the plan")
    require(consent["delegation"] == delegated, "a consent to the delegation")
    require(receipt["code"] == plan["code"], "the code of the plan")
    require(0 < delegation["attempt"] <= plan["attempts"], "an attempt of the plan")
    require(read_time(delegation["expires"]) <= read_time(plan["expires"]), "an end within the plan")
    after = receipt["after"]
    require(after is None or after[0] == delegation["before"][0] + 1, "the next version")
    require(set(receipt["files"]) <= set(consent["files"]), "granted files")
    end = min(read_time(document["expires"]) for document in (delegation, consent))
    require(read_time(receipt["started"]) <= read_time(receipt["ended"]) <= end, "an end in time")
    return {"holder": holder, "receipt": receipt, "digest": digest, "delegation": delegation, "consent": consent}


def read_document(envelope, kind, public_line):
    """Return the members of a signed document and its digest, the SHA-256 of its payload."""
    require(len(envelope) <= 1 << 20, "a document of a size")
    parsed, payload = json.loads(envelope), payload_of(envelope)
    named = f"application/vnd.fastrack.tour.{kind}.v1+json"
    signature = parsed["signatures"][0]["sig"]
    label, algorithm, encoded = public_line.split(":")
    require(label == "fastrack-public-1", "a public key")
    public = read_base64(encoded)
    key_id = sha256(b"fastrack/public-key-id@1\0" + algorithm.encode() + b"\0" + public).hexdigest()[:32]
    form = {"payload": parsed["payload"], "payloadType": named, "signatures": [{"keyid": key_id, "sig": signature}]}
    require(canonical(form) + b"\n" == envelope, "an envelope in its form")
    signed = f"DSSEv1 {len(named)} {named} {len(payload)} ".encode() + payload
    KEYS[algorithm].from_public_bytes(public).verify(read_base64(signature), signed)
    document = json.loads(payload)
    require(canonical(document) == payload, "a payload in its form")
    require(document.keys() == {*KINDS[kind].split(), "format"}, "its members")
    check_members(document)
    return document, sha256(payload).hexdigest()


def check_members(document):
    require(document["format"] == 1 and type(document["format"]) is int, "format 1")
    if "previous" not in document and "after" in document:  # a receipt, whose two envelopes have such names
        document = {name: value for name, value in document.items() if name not in {"delegation", "consent"}}
    for length, names in HEXADECIMAL.items():
        for name in document.keys() & set(names.split()):
            require(re.fullmatch(f"[0-9a-f]{{{length}}}", document[name]), name)
    for name in document.keys() & set(TIMES.split()):
        read_time(document[name])
    for name in document.keys() & set(NUMBERS.split()):
        require(is_number(document[name]), name)
    for name in document.keys() & {"start", "before", "after", "model"}:
        if document[name] is not None or name != "after":
            number, digest = document[name]
            require(is_number(number) and number and re.fullmatch("[0-9a-f]{64}", digest), name)
    require(len(document.get("files", [])) <= 4096, "files")
    for file in document.get("files", []):
        require(re.fullmatch("[0-9a-f]{32}", file), "files")


def is_number(value):
    return type(value) is int and 0 <= value < 2**53


def kind_of(line):
    return json.loads(line)["payloadType"].removeprefix("application/vnd.fastrack.tour.").removesuffix(".v1+json")


def payload_of(envelope):
    return read_base64(json.loads(envelope)["payload"])


def read_base64(text):
    content = base64.b64decode(text, validate=True)
    require(base64.b64encode(content).decode() == text, "base64 in canonical form")
    return content


def read_time(text):
    time = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")  # noqa: DTZ007 - all are in UTC
    require(time.strftime("%Y-%m-%dT%H:%M:%SZ") == text, "a time")
    return time


def canonical(document):
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
