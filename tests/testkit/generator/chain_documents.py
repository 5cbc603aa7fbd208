"""Cases of `chain`: the documents, each as it stands."""

import base64
import json
from collections.abc import Callable

from generator.chains import DIGEST, RULES, fails, kind_of
from generator.parts.case import Cases, canonical
from generator.parts.drafts import FILE, OTHER_FILE
from generator.parts.envelopes import (
    Envelope,
    broken_envelopes,
    changed,
    envelope,
    other_forms,
    other_payloads,
    written,
)
from generator.parts.pairs import OWNER, RECIPIENT, Pair, pair
from generator.parts.tours import CODE, HOLDERS, ORDER, Tour


def cases() -> Cases:
    """Return the cases of this module."""
    made = Cases("chain", RULES)
    for add in (envelopes, payloads, values):
        add(made)
    return made


SHORT = ("plan", "delegation.0", "consent.0", "receipt.0", "completion")


def short(document: str) -> Tour:
    """Return a tour whose last line has this document in it."""
    if document == "plan":
        return Tour(0)
    alone: dict[str, object] = {"holders": {ORDER[0]: HOLDERS[ORDER[0]].line}}
    return Tour(1, complete=document == "completion", order=ORDER[:1], changes={"plan": alone})


def envelopes(made: Cases) -> None:
    """Add envelopes in other forms, and of other types."""
    good = envelope("tour.plan", canonical(Tour().plan()), OWNER)
    for name, data in (broken_envelopes(good) | other_forms(good)).items():
        tour = Tour(1, envelopes={"plan": lambda members, data=data: data})
        fails(made, f"plan-envelope-{name}", "envelope", "format", tour)
    edits: dict[str, Callable[[Envelope], bytes]] = {
        "no-newline": lambda members: written(members)[:-1],
        "spaces": lambda members: written(members).replace(b":", b": "),
        "two-signatures": lambda members: written(members | {"signatures": members["signatures"] * 2}),
        "keyid": lambda members: written(changed(members, keyid="0" * 32)),
    }
    for document in SHORT[1:]:
        for name, edit in edits.items():
            tour = short(document)
            tour.envelopes[document] = edit
            fails(made, f"{kind_of(document)}-envelope-{name}", "envelope", "format", tour)
    for document in SHORT:
        kind = kind_of(document)
        signer = {"consent": HOLDERS[ORDER[0]], "receipt": pair("visit 0")}.get(kind, OWNER)
        other = "consent" if kind != "consent" else "receipt"
        for name, expect, said in (("of", "format", other), ("signed-as", "signature", kind)):
            tour = short(document)
            tour.envelopes[document] = _typed(said, other, signer)
            fails(made, f"{kind}-{name}-another-type", "type", expect, tour)


def _typed(kind: str, signed_kind: str, signer: Pair) -> Callable[[Envelope], bytes]:
    """Return an edit that signs a payload as another kind, and says so or not."""

    def edit(members: Envelope) -> bytes:
        data = base64.b64decode(str(members["payload"]))
        return written(envelope(f"tour.{kind}", data, signer, signed_kind=f"tour.{signed_kind}"))

    return edit


def payloads(made: Cases) -> None:
    """Add payloads that were signed, and are not canonical or have other members."""
    few = ("spaces", "duplicate", "extra-member", "fraction", "true", "version-2")
    for document in SHORT:
        tour = short(document)
        tour.lines()
        payload = json.loads(tour.payloads[document])
        for name, data in other_payloads(payload, "format").items():
            if document == "plan" or name in few or name.startswith("without"):
                tour = short(document)
                tour.texts[document] = lambda _, data=data: data
                fails(made, f"{kind_of(document)}-payload-{name}", "payload", "format", tour)


def values(made: Cases) -> None:
    """Add members of another form."""
    tables: dict[str, dict[str, dict[str, object]]] = {"plan": _plan_values(), "delegation.0": _delegation_values()}
    tables |= {"consent.0": _consent_values(), "receipt.0": _receipt_values(), "completion": _completion_values()}
    for document, table in tables.items():
        kind = kind_of(document)
        for name, change in table.items():
            rule = "plan.holders" if {"holders", "order"} & change.keys() else kind
            tour = short(document)
            tour.changes[document] = change
            fails(made, f"{kind}-{name}", rule, "format", tour)


TIMES = {"offset": "2026-12-01T01:00:00+00:00", "no-such-day": "2026-11-31T01:00:00Z", "null": None}


def _plan_values() -> dict[str, dict[str, object]]:
    one, two = (HOLDERS[name].line for name in ORDER)
    made: dict[str, dict[str, object]] = {
        "tour-upper-case": {"tour": "AB" * 16},
        "tour-short": {"tour": "ab" * 15},
        "lineage-null": {"lineage": None},
        "start-digest-upper-case": {"start": [3, DIGEST.upper()]},
        "start-version-0": {"start": [0, DIGEST]},
        "start-version-fraction": {"start": [3.0, DIGEST]},
        "start-of-three": {"start": [3, DIGEST, 1]},
        "start-object": {"start": {"version": 3, "digest": DIGEST}},
        "holders-none": {"holders": {}, "order": []},
        "holders-with-one-key": {"holders": {ORDER[0]: one, ORDER[1]: one}},
        "holder-named": {"holders": {ORDER[0]: one + " name", ORDER[1]: two}},
        "holder-for-hpke": {"holders": {ORDER[0]: RECIPIENT.line, ORDER[1]: two}},
        "holder-with-newline": {"holders": {ORDER[0]: one + "\n", ORDER[1]: two}},
        "order-empty": {"order": []},
        "order-of-one": {"order": [ORDER[0]]},
        "order-with-another": {"order": [*ORDER, "other"]},
        "order-text": {"order": ORDER[0]},
        "order-of-10001": {"order": [*ORDER, *[ORDER[0]] * 9999]},
        "seconds-0": {"seconds": 0},
        "seconds-of-32-bits": {"seconds": 1 << 31},
        "seconds-fraction": {"seconds": 60.0},
        "attempts-0": {"attempts": 0},
        "attempts-of-17-bits": {"attempts": 1 << 16},
        "attempts-true": {"attempts": True},
        "code-short": {"code": CODE[:-1]},
        "issued-at-expires": {"issued": "2027-01-31T00:00:00Z"},
        "issued-after-expires": {"issued": "2027-01-31T00:00:01Z"},
    }
    for name, holder in {"empty": "", "of-65": "a" * 65, "dot-first": ".a", "space": "a b", "not-ascii": "é"}.items():
        made[f"name-{name}"] = {"holders": {holder: one}, "order": [holder]}
    return made | {f"expires-{name}": {"expires": time} for name, time in TIMES.items()}


def _delegation_values() -> dict[str, dict[str, object]]:
    line = pair("visit 0").line
    made: dict[str, dict[str, object]] = {
        "plan-upper-case": {"plan": DIGEST.upper()},
        "visit-fraction": {"visit": 0.0},
        "visit-false": {"visit": False},
        "visit-negative": {"visit": -1},
        "attempt-text": {"attempt": "1"},
        "attempt-0": {"attempt": 0},
        "previous-null": {"previous": None},
        "before-null": {"before": None},
        "signer-named": {"signer": line + " visit"},
        "signer-for-hpke": {"signer": RECIPIENT.line},
        "key-short": {"key": "ab" * 15},
        "salt-short": {"salt": "ab" * 31},
        "salt-upper-case": {"salt": "AB" * 32},
    }
    return made | {f"expires-{name}": {"expires": time} for name, time in TIMES.items()}


def _consent_values() -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {
        "delegation-short": {"delegation": DIGEST[:-1]},
        "policy-null": {"policy": None},
        "offer-upper-case": {"offer": DIGEST.upper()},
        "files-null": {"files": None},
        "files-text": {"files": FILE},
        "files-upper-case": {"files": [FILE, OTHER_FILE, "AB" * 16]},
        "files-of-4097": {"files": [FILE, OTHER_FILE, *(f"{number:032x}" for number in range(4095))]},
        "issued-null": {"issued": None},
    }
    return made | {f"expires-{name}": {"expires": time} for name, time in TIMES.items()}


def _receipt_values() -> dict[str, dict[str, object]]:
    made: dict[str, dict[str, object]] = {
        "code-upper-case": {"code": CODE.upper()},
        "after-of-one": {"after": [4]},
        "after-digest-short": {"after": [4, DIGEST[:-1]]},
        "after-version-fraction": {"after": [4.0, DIGEST]},
        "files-of-4097": {"files": [FILE] * 4097},
        "files-of-null": {"files": [None]},
        "chunks-negative": {"chunks": -1},
        "chunks-fraction": {"chunks": 12.0},
        "chunks-of-54-bits": {"chunks": 1 << 53},
        "scrubbed-null": {"scrubbed": None},
        "delegation-null": {"delegation": None},
        "delegation-no-base64": {"delegation": "*"},
        "consent-object": {"consent": {}},
        "ended-before-started": {"ended": "2026-12-01T00:39:59Z"},
    }
    return made | {f"started-{name}": {"started": time} for name, time in TIMES.items()}


def _completion_values() -> dict[str, dict[str, object]]:
    return {
        "head-upper-case": {"head": DIGEST.upper()},
        "visits-fraction": {"visits": 1.0},
        "visits-text": {"visits": "1"},
        "model-null": {"model": None},
        "issued-null": {"issued": None},
    }
