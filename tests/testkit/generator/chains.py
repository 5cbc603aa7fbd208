"""Cases of chains of tours."""

import base64

from generator.parts.case import Cases, base64_text, draw, flip, sha256
from generator.parts.drafts import FILE
from generator.parts.envelopes import (
    Envelope,
    changed,
    written,
)
from generator.parts.pairs import OWNER, OWNER_ML, STRANGER, pair
from generator.parts.tours import HOLDERS, ORDER, START, Tour, after

RULES = {
    "envelope": ("tours", "A document is an envelope in its one form, with one signature, and a line."),
    "type": ("tours", "The type of the payload is of the kind of the document, and is signed with it."),
    "payload": ("tours", "The payload is canonical JSON with exactly the members of its kind."),
    "plan": ("tours", "Each member of a plan has its form."),
    "plan.holders": ("tours", "Each name of `holders` is in `order`, and no other; no two have the same key."),
    "delegation": ("tours", "Each member of a delegation has its form."),
    "consent": ("tours", "Each member of a consent has its form."),
    "receipt": ("tours", "Each member of a receipt has its form."),
    "completion": ("tours", "Each member of a completion has its form."),
    "lines": ("the-chain", "A chain is the plan, receipts, and perhaps a completion, behind which no line follows."),
    "signature.plan": ("the-chain", "The plan is signed by the owner."),
    "signature.delegation": ("the-chain", "A delegation is signed by the owner."),
    "signature.receipt": ("the-chain", "A receipt is signed by the key that its delegation names."),
    "signature.consent": ("the-chain", "A consent is signed by the holder whose turn it is."),
    "signature.completion": ("the-chain", "The completion is signed by the owner."),
    "delegated": ("the-chain", "A delegation is of this plan, this visit, the receipt before and its model."),
    "consented": ("the-chain", "A consent is of the delegation of its receipt."),
    "attempt": ("the-chain", "The attempt is from 1 to `attempts` of the plan."),
    "code": ("the-chain", "The code of a receipt is the plan's."),
    "after": ("the-chain", "A visit makes the next version, and was not broken off."),
    "files": ("the-chain", "The files of a receipt are among the consent's."),
    "time": ("the-chain", "A visit ended in time, and its delegation ends with the plan."),
    "completed": (
        "the-chain",
        "A completion follows all visits of `order`, and has plan, head, visits and model of the chain before it.",
    ),
}

OWNED = [("owner", OWNER.line)]
DIGEST = sha256(b"")
DOCUMENTS = ("plan", "delegation.1", "consent.1", "receipt.1", "completion")


def cases() -> Cases:
    """Return the cases of chains."""
    made = Cases("chain", RULES)
    for add in (successes, signatures, lines, delegations, receipts, completions):
        add(made)
    return made


def opens(made: Cases, name: str, rule: str, tour: Tour) -> None:
    """Add a chain that is verified."""
    made.opens(name, rule, tour.written(), tour.result(), [("owner", tour.owner.line)])


def fails(made: Cases, name: str, rule: str, expect: str, tour: Tour) -> None:
    """Add a chain that is refused."""
    made.fails(name, rule, expect, tour.written(), OWNED)


def successes(made: Cases) -> None:
    """Add chains of all lengths."""
    for visits in (0, 1, 2):
        opens(made, f"visits-{visits}", "lines", Tour(visits))
    opens(made, "complete", "completed", Tour(complete=True))
    alone = {"holders": {ORDER[0]: HOLDERS[ORDER[0]].line}}
    opens(made, "complete-after-one", "completed", Tour(1, complete=True, order=ORDER[:1], changes={"plan": alone}))
    often = [ORDER[0], ORDER[1], ORDER[0], ORDER[0]]
    opens(made, "holder-often", "plan.holders", Tour(4, complete=True, order=often))
    opens(made, "owner-ml-dsa-65", "signature.plan", Tour(1, owner=OWNER_ML))
    third = {"delegation.0": {"attempt": 3}, "delegation.1": {"attempt": 2}}
    opens(made, "last-attempt", "attempt", Tour(changes=third))
    most = {"seconds": (1 << 31) - 1, "attempts": (1 << 16) - 1, "start": [1, sha256(b"")]}
    opens(made, "plan-at-its-limits", "plan", Tour(0, changes={"plan": most}))
    opens(
        made,
        "no-files",
        "files",
        Tour(changes={"receipt.0": {"files": []}, "consent.1": {"files": []}, "receipt.1": {"files": []}}),
    )
    end = {"receipt.0": {"ended": "2026-12-01T01:30:00Z"}, "receipt.1": {"started": "2026-12-01T01:00:00Z"}}
    opens(made, "ended-at-the-end", "time", Tour(changes=end))
    opens(
        made,
        "delegation-ends-with-the-plan",
        "time",
        Tour(1, changes={"delegation.0": {"expires": "2027-01-31T00:00:00Z"}}),
    )
    zero = {"receipt.0": {"chunks": 0, "scrubbed": 0}}
    opens(made, "no-chunks", "receipt", Tour(1, changes=zero))
    named = {"holders": {"a" * 64: HOLDERS[ORDER[0]].line}, "order": ["a" * 64]}
    opens(made, "name-of-64", "plan.holders", Tour(0, changes={"plan": named}))


def kind_of(document: str) -> str:
    return document.partition(".")[0]


def signatures(made: Cases) -> None:
    """Add documents that someone else signed, or that were altered."""
    for document in DOCUMENTS:
        kind = kind_of(document)
        rule = f"signature.{kind}"
        for name, signer in (("a-stranger", STRANGER), ("ml-dsa", pair("stranger", "ML-DSA-65"))):
            if name == "a-stranger" or kind == "plan":
                tour = Tour(complete=True, signers={document: signer})
                fails(made, f"{kind}-by-{name}", rule, "signature", tour)
        tour = Tour(complete=True, envelopes={document: _altered})
        fails(made, f"{kind}-altered", rule, "signature", tour)
        tour = Tour(complete=True, envelopes={document: _signature})
        fails(made, f"{kind}-signature-altered", rule, "signature", tour)
    owner, holder = OWNER, HOLDERS[ORDER[0]]
    for document, name, signer in (
        ("delegation.1", "the-holder", HOLDERS[ORDER[1]]),
        ("consent.1", "the-holder-before", holder),
        ("consent.1", "the-owner", owner),
        ("receipt.1", "the-owner", owner),
        ("receipt.1", "the-visit-before", pair("visit 0")),
        ("completion", "the-last-visit", pair("visit 1")),
        ("plan", "a-holder", holder),
    ):
        kind = kind_of(document)
        tour = Tour(complete=True, signers={document: signer})
        fails(made, f"{kind}-by-{name}", f"signature.{kind}", "signature", tour)


def _altered(members: Envelope) -> bytes:
    payload = base64.b64decode(str(members["payload"]))
    return written(members | {"payload": base64_text(payload.replace(b'"format":1', b'"format":2'))})


def _signature(members: Envelope) -> bytes:
    return written(changed(members, sig=base64_text(flip(OWNER.sign(b""), 0))))


def lines(made: Cases) -> None:
    """Add chains whose lines are missing, swapped or too many."""
    whole = Tour(complete=True).lines()
    plan, first, second, completion = whole
    for name, chain in {
        "empty": [],
        "empty-line": [b"\n"],
        "no-plan": [first, second],
        "receipt-before-plan": [first, plan, second],
        "plan-twice": [plan, plan],
        "completion-first": [completion],
        "line-behind-completion": [*whole, first],
        "plan-behind-completion": [*whole, plan],
        "completion-twice": [*whole, completion],
        "empty-line-last": [*whole, b"\n"],
        "empty-line-between": [plan, first, b"\n", second],
        "text-last": [*whole, b"end"],
        "cut-in-a-line": [plan, first, second[:-20]],
        "no-last-newline": [plan, first, second[:-1]],
        "delegation-as-line": [plan, Tour(1).document("delegation.0", {}, OWNER)],
    }.items():
        made.fails(f"lines-{name}", "lines", "format", b"".join(chain), OWNED)
    other = Tour(changes={"plan": {"tour": "0" * 32}}, complete=True).lines()
    for name, chain in {
        "receipts-exchanged": [plan, second, first],
        "receipt-missing": [plan, second],
        "receipt-twice": [plan, first, first],
        "last-receipt-twice": [plan, first, second, second],
        "receipt-of-another-tour": [plan, other[1]],
        "second-of-another-tour": [plan, first, other[2]],
    }.items():
        made.fails(f"lines-{name}", "delegated", "rollback", b"".join(chain), OWNED)
    for name, chain in {
        "completion-of-another-tour": [plan, first, second, other[3]],
        "completion-too-early": [plan, first, completion],
        "completion-alone": [plan, completion],
    }.items():
        made.fails(f"lines-{name}", "completed", "rollback", b"".join(chain), OWNED)
    fails(made, "more-visits-than-order", "delegated", "rollback", Tour(3))


def _changed(made: Cases, name: str, rule: str, document: str, **change: object) -> None:
    fails(made, name, rule, "rollback", Tour(complete=True, changes={document: change}))


def delegations(made: Cases) -> None:
    """Add delegations and consents that do not fit the chain."""
    for visit in (0, 1):
        document = f"delegation.{visit}"
        _changed(made, f"visit-{visit}-of-another-plan", "delegated", document, plan=DIGEST)
        _changed(made, f"visit-{visit}-of-another-number", "delegated", document, visit=2)
        _changed(made, f"visit-{visit}-after-another-receipt", "delegated", document, previous=DIGEST)
        model = START if visit == 0 else after(0)
        _changed(made, f"visit-{visit}-with-another-model", "delegated", document, before=[model[0], DIGEST])
        _changed(made, f"visit-{visit}-attempt-4", "attempt", document, attempt=4)
        _changed(made, f"visit-{visit}-for-another-delegation", "consented", f"consent.{visit}", delegation=DIGEST)
        _changed(made, f"visit-{visit}-past-the-plan", "time", document, expires="2027-01-31T00:00:01Z")
    swapped = [5, after(0)[1]]
    tour = Tour(complete=True, changes={"delegation.1": {"before": swapped}, "receipt.1": {"after": [6, DIGEST]}})
    fails(made, "visit-1-with-another-version", "delegated", "rollback", tour)
    replay = Tour(1)
    replay.lines()
    old = sha256(replay.payloads["delegation.0"])
    _changed(made, "consent-of-the-visit-before", "consented", "consent.1", delegation=old)


def receipts(made: Cases) -> None:
    """Add receipts of other code, models, files and times."""
    _changed(made, "other-code", "code", "receipt.1", code=DIGEST)
    fails(made, "broken-off-alone", "after", "rollback", Tour(1, changes={"receipt.0": {"after": None}}))
    _changed(made, "same-version", "after", "receipt.1", after=[4, DIGEST])
    _changed(made, "version-after-next", "after", "receipt.1", after=[6, DIGEST])
    _changed(made, "version-before", "after", "receipt.1", after=[3, DIGEST])
    _changed(made, "file-not-granted", "files", "receipt.1", files=[FILE, draw("a file", 16).hex()])
    fails(made, "file-of-none-granted", "files", "rollback", Tour(changes={"consent.1": {"files": []}}))
    _changed(made, "ended-after-consent", "time", "receipt.1", ended="2026-12-01T01:30:01Z")
    late = {"consent.1": {"expires": "2026-12-01T03:00:00Z"}, "receipt.1": {"ended": "2026-12-01T02:00:01Z"}}
    fails(made, "ended-after-delegation", "time", "rollback", Tour(changes=late))
    _changed(made, "ended-a-year-late", "time", "receipt.0", ended="2027-12-01T01:00:00Z")


def completions(made: Cases) -> None:
    """Add completions of another chain."""
    for name, change in {
        "of-another-plan": {"plan": DIGEST},
        "of-another-head": {"head": DIGEST},
        "of-one-visit": {"visits": 1},
        "of-three-visits": {"visits": 3},
        "of-another-model": {"model": [5, DIGEST]},
        "of-another-version": {"model": [6, after(1)[1]]},
        "of-the-model-before": {"model": after(0)},
    }.items():
        _changed(made, f"completion-{name}", "completed", "completion", **change)
    for visits in (0, 1):
        fails(made, f"completion-after-{visits}-of-two", "completed", "rollback", Tour(visits, complete=True))
