"""Cases of challenges, offers and grants for machines."""

from generator.grants import FIELDS, granted, payload_of
from generator.parts.case import Cases, base64_text, canonical, draw
from generator.parts.drafts import KEY, KEY128
from generator.parts.envelopes import other_payloads
from generator.parts.pairs import OTHER_RECIPIENT, STRANGER

SECTION = "challenges-offers-and-grants-for-machines"

FORM_RULES = {
    "form": (SECTION, "A document is canonical JSON and a newline, with exactly the members of its kind."),
    "values": (SECTION, "Each member has its form."),
}

CHALLENGE_RULES = FORM_RULES | {"limit": (SECTION, "A challenge has 1 KiB at most.")}

ANSWER_RULES = FORM_RULES | {
    "challenge": (SECTION, "An answer is for the challenge of the offer."),
    "grants": (SECTION, "There are 1 to 1024 grants, each of 64 KiB at most, and each of them opens."),
}

ID = draw("challenge", 16).hex()
NONCE = draw("nonce", 32)
EXPIRES = "2026-12-01T00:10:00Z"
TIME = "2026-12-01T00:00:00Z"

Document = dict[str, object]


def document(members: Document) -> bytes:
    """Return a document."""
    return canonical(members) + b"\n"


def text_of(data: bytes, size: int | None = None) -> str:
    """Return base64, of that many bytes if that is said."""
    return base64_text(data if size is None else draw(data.decode(), size))


CHALLENGE: Document = {
    "kind": "fastrack/challenge",
    "version": 1,
    "id": ID,
    "nonce": text_of(NONCE),
    "expires": EXPIRES,
}


def forms(made: Cases, members: Document, fields: list[tuple[str, str]] = []) -> None:  # noqa: B006
    """Add documents in another form."""
    for name, data in other_payloads(members, "version").items():
        if name != "newline":
            made.fails(f"form-{name}", "form", "format", data + b"\n", fields)
    good = document(members)
    for name, data in {
        "no-newline": good[:-1],
        "two-newlines": good + b"\n",
        "carriage-return": good[:-1] + b"\r\n",
        "space-in-front": b" " + good,
        "another-kind": document(members | {"kind": "fastrack/challenges"}),
        "kind-null": document(members | {"kind": None}),
    }.items():
        made.fails(f"form-{name}", "form", "format", data, fields)


def challenges() -> Cases:
    """Return the cases of challenges."""
    made = Cases("challenge", CHALLENGE_RULES)
    result = {"id": ID, "nonce": NONCE.hex(), "expires": EXPIRES}
    made.opens("challenge", "form", document(CHALLENGE), result)
    zeros = CHALLENGE | {"id": "0" * 32, "nonce": text_of(bytes(32)), "expires": "9999-12-31T23:59:59Z"}
    made.opens("zeros", "values", document(zeros), {"id": "0" * 32, "nonce": "00" * 32, "expires": zeros["expires"]})
    leap = CHALLENGE | {"expires": "2028-02-29T23:59:59Z"}
    made.opens("leap-day", "values", document(leap), result | {"expires": leap["expires"]})
    for year in ("0001", "0999"):
        early = CHALLENGE | {"expires": f"{year}-12-01T00:10:00Z"}
        made.opens(f"year-{year}", "values", document(early), result | {"expires": early["expires"]})
    forms(made, CHALLENGE)
    nonce = str(CHALLENGE["nonce"])
    for name, change in {
        "id-upper-case": {"id": ID.upper()},
        "id-short": {"id": ID[:-1]},
        "id-long": {"id": ID + "0"},
        "id-null": {"id": None},
        "nonce-short": {"nonce": text_of(NONCE[:-1])},
        "nonce-long": {"nonce": text_of(NONCE + b"\0")},
        "nonce-empty": {"nonce": ""},
        "nonce-hexadecimal": {"nonce": NONCE.hex()},
        "nonce-no-padding": {"nonce": nonce.rstrip("=")},
        "nonce-url-alphabet": {"nonce": text_of(bytes([255] * 32)).replace("/", "_")},
        "nonce-line": {"nonce": nonce + "\n"},
        "nonce-unused-bits": {"nonce": "A" * 42 + "B="},
        "expires-null": {"expires": None},
        "expires-offset": {"expires": "2026-12-01T00:10:00+00:00"},
        "expires-fraction": {"expires": "2026-12-01T00:10:00.5Z"},
        "expires-no-such-day": {"expires": "2027-02-29T00:00:00Z"},
        "expires-no-such-minute": {"expires": "2027-02-28T00:60:00Z"},
        "expires-year-0000": {"expires": "0000-12-01T00:10:00Z"},
        "expires-leap-second": {"expires": "2026-12-31T23:59:60Z"},
        "expires-hour-24": {"expires": "2026-12-01T24:00:00Z"},
        "expires-lower-case": {"expires": "2026-12-01t00:10:00z"},
        "expires-spaces": {"expires": " 2026-12-01T00:10:00Z"},
        "expires-number": {"expires": 1796083800},
    }.items():
        made.fails(name, "values", "format", document(CHALLENGE | change))
    padded = document(CHALLENGE | {"more": "x" * 900})
    made.fails("past-1-kib", "limit", "format", padded)
    return made


def answer(*grants: bytes, **changes: object) -> Document:
    """Return the members of an answer."""
    made: Document = {"kind": "fastrack/grants", "version": 1, "challenge": ID}
    return made | {"grants": [text_of(one) for one in grants]} | changes


def answers() -> Cases:
    """Return the cases of grants for machines."""
    made = Cases("answer", ANSWER_RULES)
    fields = [("challenge", ID), *FIELDS]
    good, small = granted(payload_of()), granted(payload_of(under=KEY128))
    made.opens("one", "grants", document(answer(good)), {"keys": [KEY.hex()]}, fields)
    made.opens("two", "grants", document(answer(small, good)), {"keys": [KEY128.hex(), KEY.hex()]}, fields)
    widest = good[:-1] + b" " * (65536 - len(good)) + b"\n"
    made.opens("grants-of-64-kib", "grants", document(answer(widest)), {"keys": [KEY.hex()]}, fields)
    made.fails("of-another-challenge", "challenge", "attestation", document(answer(good, challenge="0" * 32)), fields)
    asked = [("challenge", "f" * 32), *FIELDS]
    made.fails("for-another-challenge", "challenge", "attestation", document(answer(good)), asked)
    made.fails(
        "to-another-recipient", "grants", "grant", document(answer(granted(payload_of(OTHER_RECIPIENT)))), fields
    )
    late = granted(payload_of(expires=TIME))
    made.fails("second-has-ended", "grants", "grant", document(answer(good, late)), fields)
    stranger = granted(payload_of(), STRANGER)
    made.fails("second-by-a-stranger", "grants", "signature", document(answer(good, stranger)), fields)
    forms(made, answer(good), fields)
    for name, rule, change in (
        ("none", "grants", {"grants": []}),
        ("null", "grants", {"grants": None}),
        ("of-null", "grants", {"grants": [None]}),
        ("object", "grants", {"grants": {"0": text_of(good)}}),
        ("empty-grants", "grants", {"grants": [""]}),
        ("past-64-kib", "grants", {"grants": [text_of(good + b" " * (65537 - len(good)))]}),
        ("1025", "grants", {"grants": ["AA=="] * 1025}),
        ("no-base64", "values", {"grants": ["*" + text_of(good)]}),
        ("base64-line", "values", {"grants": [text_of(good)[:76] + "\n" + text_of(good)[76:]]}),
        ("not-encoded", "values", {"grants": [good.decode()]}),
        ("challenge-upper-case", "values", {"challenge": ID.upper()}),
        ("challenge-null", "values", {"challenge": None}),
    ):
        made.fails(name, rule, "format", document(answer(good, **change)), fields)
    return made
