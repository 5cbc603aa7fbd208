"""The chain of a tour."""

import re
from hashlib import sha256

from helpers.by_hand.documents import (
    canonical,
    described,
    is_hexadecimal,
    is_number,
    load_canonical,
    load_line,
    members,
    read_base64,
    read_time,
    require,
)
from helpers.by_hand.keys import SIGNING, read_public
from helpers.by_hand.signed import MEBIBYTE, kind_of, open_envelope

KINDS = {
    "plan": "attempts code expires holders issued lineage order seconds start tour",
    "delegation": "attempt before expires key plan previous salt signer visit",
    "consent": "delegation expires files issued offer policy",
    "receipt": "after chunks code consent delegation ended files scrubbed started",
    "completion": "head issued model plan visits",
}
TYPE = "application/vnd.fastrack.tour.{}.v1+json"
HEXADECIMAL = {
    32: "tour lineage key",
    64: "code plan previous delegation policy offer salt head",
}
TIMES = "issued expires started ended"
NUMBERS = "seconds attempts visit attempt chunks scrubbed visits"


def read_tour(content, owner):
    plan, visits, completion = read_chain(content, owner)
    last = visits[-1] if visits else None
    return {
        "visits": len(visits),
        "head": last["digest"] if last else sha256(canonical(plan)).hexdigest(),
        "model": last["receipt"]["after"] if last else plan["start"],
        "complete": completion is not None,
    }


@described
def read_chain(content, owner):
    """Return the plan, the visits and the completion or None, all verified. `owner` is the line of a public key."""
    require(content.endswith(b"\n") and len(content) <= 64 * MEBIBYTE, "lines, of 64 MiB at most")
    first, *lines = [line + b"\n" for line in content[:-1].split(b"\n")]
    plan, head = read_document(first, "plan", owner)
    check_plan(plan)
    digest, model, visits, completion = head, plan["start"], [], None
    for line in lines:
        require(completion is None, "nothing behind the completion")
        if kind_of(line) == TYPE.format("completion"):
            completion, _ = read_document(line, "completion", owner)
            found = tuple(completion[name] for name in ("plan", "head", "visits", "model"))
            require(found == (digest, head, len(visits), model), "a completion of this chain", "rollback")
            require(len(visits) == len(plan["order"]), "all visits before the completion", "rollback")
            continue
        visit = read_receipt(line, plan, digest, owner)
        found = tuple(visit["delegation"][name] for name in ("visit", "previous", "before"))
        require(found == (len(visits), head, model), "the next visit", "rollback")
        head, model = visit["digest"], visit["receipt"]["after"]
        visits.append(visit)
    return plan, visits, completion


def check_plan(plan):
    holders, order = plan["holders"], plan["order"]
    require(all(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) for name in holders), "names")
    require(isinstance(order, list) and 1 <= len(order) <= 10000 and len(holders) <= 1024, "1 to 10,000 visits")
    require(set(order) == set(holders), "the order of the holders")
    require(len(set(holders.values())) == len(holders), "a key for each holder")
    require(all(read_public(line)[0] in SIGNING for line in holders.values()), "keys that sign")
    require(0 < plan["seconds"] < 2**31 and 0 < plan["attempts"] < 2**16, "limits")
    require(read_time(plan["issued"]) < read_time(plan["expires"]), "an end after the beginning")


def read_receipt(line, plan, plan_digest, owner):
    """Return a verified receipt with its digest, delegation and consent, but for its place in the chain."""
    unverified = load_line(read_base64(load_line(line, MEBIBYTE)["payload"]) + b"\n", MEBIBYTE)
    envelopes = {name: read_base64(unverified[name]) for name in ("delegation", "consent")}
    delegation, delegated = read_document(envelopes["delegation"], "delegation", owner)
    receipt, digest = read_document(line, "receipt", delegation["signer"])
    require(delegation["visit"] < len(plan["order"]), "a visit of the plan", "rollback")
    holder = plan["order"][delegation["visit"]]
    consent, _ = read_document(envelopes["consent"], "consent", plan["holders"][holder])
    require(delegation["plan"] == plan_digest, "a delegation of the plan", "rollback")
    require(consent["delegation"] == delegated, "a consent to the delegation", "rollback")
    require(receipt["code"] == plan["code"], "the code of the plan", "rollback")
    end = min(read_time(document["expires"]) for document in (delegation, consent))
    kept = {
        "an attempt of the plan": delegation["attempt"] <= plan["attempts"],
        "an end within the plan": read_time(delegation["expires"]) <= read_time(plan["expires"]),
        "a visit that ended": receipt["after"] is not None,
        "the next version": receipt["after"] is not None and receipt["after"][0] == delegation["before"][0] + 1,
        "granted files": set(receipt["files"]) <= set(consent["files"]),
        "an end in time": read_time(receipt["ended"]) <= end,
    }
    for expected, is_kept in kept.items():
        require(is_kept, expected, "rollback")
    return {"holder": holder, "receipt": receipt, "digest": digest, "delegation": delegation, "consent": consent}


def read_document(envelope, kind, owner):
    """Return the members of a signed document and its digest, the SHA-256 of its payload."""
    payload = open_envelope(envelope, TYPE.format(kind), owner)
    document = members(load_canonical(payload), f"{KINDS[kind]} format")
    check_members({name: document[name] for name in document.keys() - {"delegation", "consent"}})
    require(kind != "consent" or is_hexadecimal(document["delegation"], 64), "a digest")
    return document, sha256(payload).hexdigest()


def check_members(document):
    require(is_number(document["format"]) and document["format"] == 1, "format 1")
    for length, names in HEXADECIMAL.items():
        for name in document.keys() & set(names.split()):
            require(is_hexadecimal(document[name], length), name)
    for name in document.keys() & set(TIMES.split()):
        read_time(document[name])
    for name in document.keys() & set(NUMBERS.split()):
        require(is_number(document[name]), name)
    for name in document.keys() & {"start", "before", "after", "model"}:
        if document[name] is not None or name != "after":
            number, digest = document[name]
            require(is_number(number, 1) and is_hexadecimal(digest, 64), name)
    require(len(document.get("files", [])) <= 4096, "files")
    require(all(is_hexadecimal(file, 32) for file in document.get("files", [])), "files")
    require(document.get("attempt") != 0, "an attempt from 1 on")
    if "ended" in document:
        require(read_time(document["started"]) <= read_time(document["ended"]), "an end after the beginning")
    if "signer" in document:
        require(read_public(document["signer"])[0] in SIGNING, "a key that signs")
