"""Cases of challenges, offers and grants for machines."""

import base64
import copy
import hashlib
from collections.abc import Callable

from generator.case import Cases, base64_text, canonical, draw, sha256
from generator.drafts import KEY, KEY128
from generator.envelopes import other_payloads
from generator.grants import FIELDS, granted, payload_of
from generator.pairs import OTHER_RECIPIENT, RECIPIENT, STRANGER

SECTION = "challenges-offers-and-grants-for-machines"

FORM_RULES = {
    "form": (SECTION, "A document is canonical JSON and a newline, with exactly the members of its kind."),
    "values": (SECTION, "Each member has its form."),
    "limit": (SECTION, "A document has its limit."),
}

OFFER_RULES = FORM_RULES | {
    "cpu": (SECTION, "The evidence of the CPU has the members of its type, each within its limits."),
    "devices": (SECTION, "There are at most 32 devices, each with its members within their limits."),
    "manifests": (
        SECTION,
        "Manifests are different, in the order in which devices first name them, and none is unused.",
    ),
    "binding": (SECTION, "Nonces and report data are of challenge, public key and all evidence of devices."),
    "challenge": (SECTION, "An offer answers the challenge that the owner made."),
    "time": (SECTION, "At `expires` of the challenge, and after it, an offer is late."),
}

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
    made = Cases("challenge", FORM_RULES)
    result = {"id": ID, "nonce": NONCE.hex(), "expires": EXPIRES}
    made.opens("challenge", "form", document(CHALLENGE), result)
    zeros = CHALLENGE | {"id": "0" * 32, "nonce": text_of(bytes(32)), "expires": "9999-12-31T23:59:59Z"}
    made.opens("zeros", "values", document(zeros), {"id": "0" * 32, "nonce": "00" * 32, "expires": zeros["expires"]})
    leap = CHALLENGE | {"expires": "2028-02-29T23:59:59Z"}
    made.opens("leap-day", "values", document(leap), result | {"expires": leap["expires"]})
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
        "expires-lower-case": {"expires": "2026-12-01t00:10:00z"},
        "expires-spaces": {"expires": " 2026-12-01T00:10:00Z"},
        "expires-number": {"expires": 1796083800},
    }.items():
        made.fails(name, "values", "format", document(CHALLENGE | change))
    padded = document(CHALLENGE | {"more": "x" * 900})
    made.fails("past-1-kib", "limit", "format", padded)
    return made


def device(number: int, manifests: list[int], ocsp: list[bytes] | None = None) -> Document:
    """Return the evidence of a device."""
    chain = b"-----BEGIN CERTIFICATE-----\n%d\n-----END CERTIFICATE-----\n" % number
    responses = None if ocsp is None else [text_of(one) for one in ocsp]
    report = draw(f"report of device {number}", 100 + number)
    return {"report": text_of(report), "chain": text_of(chain), "ocsp": responses, "manifests": manifests}


def reference(number: int, ocsp: list[bytes] | None = None) -> Document:
    """Return a reference manifest."""
    responses = None if ocsp is None else [text_of(one) for one in ocsp]
    return {"data": text_of(b"<manifest %d/>" % number), "ocsp": responses}


PARTS = ("tcb_info", "tcb_info_signature", "tcb_info_issuer_chain", "qe_identity", "qe_identity_signature")
PARTS += ("qe_identity_issuer_chain", "root_ca_crl", "pck_crl", "pck_crl_issuer_chain")
TDX: Document = {"type": "tdx", "quote": text_of(draw("quote", 500)), "collateral": None}
COLLATERAL = {part: text_of(part.encode()) for part in PARTS}
SNP: Document = {"type": "snp", "report": text_of(draw("report", 1184)), "leaf": None, "issuers": None, "crl": None}


def offer(
    cpu: Document = TDX, devices: list[Document] | None = None, manifests: list[Document] | None = None
) -> Document:
    """Return the members of an offer."""
    made: Document = {"kind": "fastrack/offer", "version": 1, "challenge": ID, "public": text_of(RECIPIENT.public)}
    return made | {"cpu": cpu, "devices": devices or [], "manifests": manifests or []}


def part(data: bytes) -> bytes:
    """Return a part behind its length."""
    return len(data).to_bytes(4, "big") + data


def parts(*each: bytes) -> bytes:
    """Return parts of a hash, each behind its length."""
    return b"".join(part(one) for one in each)


def decoded(text: object) -> bytes:
    """Return the bytes of base64."""
    return base64.b64decode(str(text))


def ocsp_part(responses: object) -> bytes:
    """Return what a hash has of OCSP responses."""
    if responses is None:
        return b""
    return parts(parts(*(decoded(one) for one in responses)))  # type: ignore[attr-defined]


def bound(made: Document, challenge: bytes) -> tuple[list[str], str]:
    """Return the nonces of the devices, and the report data."""
    public = decoded(made["public"])
    manifests = [parts(decoded(one["data"]), ocsp_part(one["ocsp"])) for one in made["manifests"]]  # type: ignore[attr-defined]
    nonces, devices = [], []
    for index, one in enumerate(made["devices"]):  # type: ignore[arg-type, var-annotated]
        text = parts(b"fastrack/gpu@1", challenge, public, index.to_bytes(4, "big"))
        nonces.append(sha256(text))
        listed = parts(*(manifests[place] for place in one["manifests"]))
        devices.append(parts(decoded(one["report"]), decoded(one["chain"]), ocsp_part(one["ocsp"]), listed))
    gpus = hashlib.sha384(parts(b"fastrack/gpus@1", *devices)).digest()
    return nonces, hashlib.sha512(parts(b"fastrack/offer@1", challenge, public, gpus)).hexdigest()


OFFERED = [("challenge", text_of(document(CHALLENGE))), ("time", TIME)]


def offers() -> Cases:
    """Return the cases of offers."""
    made = Cases("offer", OFFER_RULES)
    two = [device(0, [0, 1], [b"r0", b"r1"]), device(1, [1], [])]
    full = offer(
        TDX | {"collateral": COLLATERAL, "event_log": text_of(b"log")}, two, [reference(0, [b"x"]), reference(1)]
    )
    for name, rule, one in (
        ("tdx", "cpu", offer()),
        ("tdx-with-all", "binding", full),
        ("snp", "cpu", offer(SNP)),
        ("snp-with-all", "cpu", offer(SNP | {"leaf": "AA==", "issuers": "AAA=", "crl": "AAAA"})),
        ("device", "binding", offer(devices=[device(0, [])])),
        ("device-with-empty-ocsp", "binding", offer(devices=[device(0, [], [])])),
        ("device-with-an-empty-manifest-ocsp", "binding", offer(SNP, [device(0, [0])], [reference(0, [])])),
        ("devices-32", "devices", offer(devices=[device(number, []) for number in range(32)])),
        ("device-twice", "devices", offer(devices=[device(0, []), device(0, [])])),
        (
            "manifests-shared",
            "manifests",
            offer(devices=[device(0, [0]), device(1, [1, 0])], manifests=[reference(0), reference(1)]),
        ),
        ("report-of-16384", "devices", offer(devices=[device(0, []) | {"report": text_of(b"most", 16384)}])),
        ("ocsp-16", "devices", offer(devices=[device(0, [], [b"%d" % number for number in range(16)])])),
    ):
        _opens_offer(made, name, rule, one)
    last = [OFFERED[0], ("time", "2026-12-01T00:09:59Z")]
    _opens_offer(made, "a-second-before-the-end", "time", offer(), last)
    for name, time in (
        ("at-the-end", EXPIRES),
        ("after-the-end", "2026-12-01T00:10:01Z"),
        ("a-day-late", "2026-12-02T00:00:00Z"),
    ):
        made.fails(name, "time", "attestation", document(full), [OFFERED[0], ("time", time)])
    other = document(full | {"challenge": "0" * 32})
    made.fails("of-another-challenge", "challenge", "attestation", other, OFFERED)
    again = document(CHALLENGE | {"id": "f" * 32})
    made.fails(
        "for-another-challenge", "challenge", "attestation", document(full), [("challenge", text_of(again)), OFFERED[1]]
    )
    forms(made, full, OFFERED)
    for add in (_public, _cpu, _devices, _manifests):
        add(made, full)
    return made


def _opens_offer(made: Cases, name: str, rule: str, one: Document, fields: list[tuple[str, str]] = OFFERED) -> None:
    nonces, report_data = bound(one, document(CHALLENGE))
    cpu = one["cpu"]["type"]  # type: ignore[index]
    result = {"public": sha256(decoded(one["public"])), "cpu": cpu, "nonces": nonces, "report_data": report_data}
    made.opens(name, rule, document(one), result, fields)


def _edited(made: Cases, name: str, rule: str, full: Document, edit: Callable[[Document], object]) -> None:
    one = copy.deepcopy(full)
    edit(one)
    made.fails(name, rule, "format", document(one), OFFERED)


def _public(made: Cases, full: Document) -> None:
    key = RECIPIENT.public
    for name, public in {
        "short": text_of(key[:-1]),
        "long": text_of(key + b"\0"),
        "null": None,
        "no-padding": text_of(key).rstrip("="),
        "of-p-384": text_of(key[:97]),
    }.items():
        _edited(made, f"public-{name}", "values", full, lambda one, public=public: one.update(public=public))
    _edited(made, "challenge-upper-case", "values", full, lambda one: one.update(challenge=ID.upper()))
    _edited(made, "challenge-null", "values", full, lambda one: one.update(challenge=None))
    _edited(made, "devices-null", "values", full, lambda one: one.update(devices=None, manifests=[]))
    _edited(made, "manifests-null", "values", full, lambda one: one.update(devices=[], manifests=None))


def _cpu(made: Cases, full: Document) -> None:
    tdx, snp = dict(full["cpu"]), dict(SNP)  # type: ignore[call-overload]
    for name, cpu in {
        "null": None,
        "type-unknown": tdx | {"type": "sev"},
        "type-upper-case": tdx | {"type": "TDX"},
        "no-type": {name: value for name, value in tdx.items() if name != "type"},
        "extra-member": tdx | {"more": None},
        "quote-empty": tdx | {"quote": ""},
        "quote-null": tdx | {"quote": None},
        "quote-past-65536": tdx | {"quote": text_of(bytes(65537))},
        "no-quote": {name: value for name, value in tdx.items() if name != "quote"},
        "no-collateral": {name: value for name, value in tdx.items() if name != "collateral"},
        "collateral-of-eight": tdx | {"collateral": {part: COLLATERAL[part] for part in PARTS[1:]}},
        "collateral-of-ten": tdx | {"collateral": COLLATERAL | {"more": "AA=="}},
        "collateral-part-empty": tdx | {"collateral": COLLATERAL | {"pck_crl": ""}},
        "collateral-part-null": tdx | {"collateral": COLLATERAL | {"pck_crl": None}},
        "event-log-null": tdx | {"event_log": None},
        "event-log-empty": tdx | {"event_log": ""},
        "tdx-with-a-report": tdx | {"report": "AA=="},
        "snp-report-empty": snp | {"report": ""},
        "snp-report-past-16384": snp | {"report": text_of(bytes(16385))},
        "snp-no-leaf": {name: value for name, value in snp.items() if name != "leaf"},
        "snp-no-crl": {name: value for name, value in snp.items() if name != "crl"},
        "snp-leaf-empty": snp | {"leaf": ""},
        "snp-issuers-past-65536": snp | {"issuers": text_of(bytes(65537))},
        "snp-with-event-log": snp | {"event_log": "AA=="},
    }.items():
        _edited(made, f"cpu-{name}", "cpu", full, lambda one, cpu=cpu: one.update(cpu=cpu))


def _devices(made: Cases, full: Document) -> None:
    many = [device(number, []) for number in range(33)]
    _edited(made, "devices-33", "devices", full, lambda one: one.update(devices=many, manifests=[]))
    good = device(0, [])
    for name, one in {
        "extra-member": good | {"more": None},
        "without-ocsp": {name: value for name, value in good.items() if name != "ocsp"},
        "without-manifests": {name: value for name, value in good.items() if name != "manifests"},
        "report-empty": good | {"report": ""},
        "report-past-16384": good | {"report": text_of(bytes(16385))},
        "chain-empty": good | {"chain": ""},
        "chain-null": good | {"chain": None},
        "chain-past-65536": good | {"chain": text_of(bytes(65537))},
        "ocsp-17": good | {"ocsp": ["AA=="] * 17},
        "ocsp-empty-response": good | {"ocsp": [""]},
        "ocsp-response-past-16384": good | {"ocsp": [text_of(bytes(16385))]},
        "ocsp-text": good | {"ocsp": "AA=="},
        "manifests-null": good | {"manifests": None},
        "null": None,
    }.items():
        _edited(made, f"device-{name}", "devices", full, lambda made, one=one: made.update(devices=[one], manifests=[]))


def _manifests(made: Cases, full: Document) -> None:
    def failing(name: str, devices: list[list[object]], manifests: list[object]) -> None:
        listed = [device(number, places) for number, places in enumerate(devices)]  # type: ignore[arg-type]
        change = {"devices": listed, "manifests": manifests}
        _edited(made, f"manifests-{name}", "manifests", full, lambda one: one.update(change))

    first, second = reference(0), reference(1)
    failing("unused", [[0]], [first, second])
    failing("unused-of-no-device", [], [first])
    failing("out-of-order", [[1], [0]], [first, second])
    failing("out-of-order-in-a-device", [[1, 0]], [first, second])
    failing("alike", [[0], [1]], [first, first])
    failing("place-twice", [[0, 0]], [first])
    failing("place-past-the-end", [[0, 1]], [first])
    failing("place-negative", [[-1]], [first])
    failing("place-fraction", [[0.0]], [first])
    failing("place-false", [[False]], [first])
    failing("65", [list(range(65))], [reference(number) for number in range(65)])
    failing("data-empty", [[0]], [first | {"data": ""}])
    failing("without-ocsp", [[0]], [{"data": first["data"]}])
    failing("extra-member", [[0]], [first | {"more": None}])
    failing("ocsp-17", [[0]], [first | {"ocsp": ["AA=="] * 17}])


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
