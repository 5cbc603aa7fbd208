"""Cases of offers."""

import base64
import copy
import hashlib
from collections.abc import Callable

from generator.exchange import CHALLENGE, EXPIRES, FORM_RULES, ID, SECTION, TIME, Document, document, forms, text_of
from generator.parts.case import Cases, draw, sha256
from generator.parts.pairs import RECIPIENT

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
    return parts(parts(*(decoded(one) for one in responses)))


def bound(made: Document, challenge: bytes) -> tuple[list[str], str]:
    """Return the nonces of the devices, and the report data."""
    public = decoded(made["public"])
    manifests = [parts(decoded(one["data"]), ocsp_part(one["ocsp"])) for one in made["manifests"]]
    nonces, devices = [], []
    for index, one in enumerate(made["devices"]):
        text = b"fastrack/gpu@1" + parts(challenge, public, index.to_bytes(4, "big"))
        nonces.append(sha256(text))
        listed = parts(*(manifests[place] for place in one["manifests"]))
        devices.append(parts(decoded(one["report"]), decoded(one["chain"]), ocsp_part(one["ocsp"]), listed))
    gpus = hashlib.sha384(b"fastrack/gpus@1" + parts(*devices)).digest()
    return nonces, hashlib.sha512(b"fastrack/offer@1" + parts(challenge, public, gpus)).hexdigest()


OFFERED = [("challenge", text_of(document(CHALLENGE))), ("time", TIME)]


def cases() -> Cases:
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
    cpu = one["cpu"]["type"]
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
    tdx, snp = dict(full["cpu"]), dict(SNP)
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
        "snp-crl-empty": snp | {"crl": ""},
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
        listed = [device(number, places) for number, places in enumerate(devices)]
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
