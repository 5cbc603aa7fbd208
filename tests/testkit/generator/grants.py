"""Cases of grants."""

import base64
import json
from itertools import product

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from generator.parts.case import Cases, base64_text, canonical, draw, flip, spelled
from generator.parts.drafts import FILE, KEY, KEY128, OTHER_FILE, OTHER_KEY
from generator.parts.envelopes import Envelope, broken_envelopes, changed, envelope, other_payloads, written
from generator.parts.hpke import encrypt
from generator.parts.messages import key_id
from generator.parts.pairs import (
    OTHER_RECIPIENT,
    OWNER,
    OWNER_ML,
    RECIPIENT,
    RECIPIENT_P384,
    STRANGER,
    Pair,
    malleated,
    pair,
)

RULES = {
    "envelope": (
        "grants",
        "A grants file is a DSSE envelope in JSON, in any spelling; members that DSSE does not name are ignored.",
    ),
    "type": ("grants", "The type of the payload is that of grants, and is signed with it."),
    "signature": ("grants", "One signature by a trusted key holds over type and payload."),
    "payload": ("grants", "The payload is canonical JSON with exactly its members."),
    "values": ("grants", "Each member has its form."),
    "recipients": ("grants", "There are 1 to 4096 recipients, with different ids, each with its members."),
    "recipient": ("grants", "A grant is for those it names."),
    "constraints": ("grants", "A ciphertext opens under the constraints that it was made for."),
    "info": ("grants", "`info` has at most 65,535 bytes if an entry is of MLKEM768_X25519."),
    "expires": ("grants", "A grant has ended when `expires` has come."),
    "key": ("grants", "The opened key has the id `key` and the size `bits`."),
    "passphrase": ("grants", "A passphrase is a recipient: Argon2id within its limits, then AES-256-GCM."),
}

TIME = "2026-12-01T00:00:00Z"
LINEAGE = draw("lineage", 16).hex()
CONSTRAINTS = ("bits", "expires", "files", "key", "least_version", "lineage", "version")

Payload = dict[str, object]


def constraints(under: bytes = KEY, /, **changes: object) -> Payload:
    """Return the members that bind a ciphertext."""
    made: Payload = {"version": 1, "key": key_id(under), "bits": len(under) * 8, "files": None, "lineage": None}
    return made | {"least_version": 0, "expires": None} | changes


def entry(recipient: Pair, bound: Payload, key: bytes = KEY, name: str = "") -> Payload:
    """Return the entry of a recipient."""
    info = b"fastrack/grant@1\0" + canonical(bound)
    sealed = encrypt(recipient.algorithm, recipient.public, info, key, f"grant to {recipient.id} {bound}")
    return {"algorithm": recipient.algorithm, "ciphertext": base64_text(sealed), "id": recipient.id, "name": name}


def payload_of(*recipients: Pair, under: bytes = KEY, **changes: object) -> Payload:
    """Return the payload of a valid grant."""
    bound = constraints(under, **changes)
    entries = [entry(one, bound, under) for one in recipients or (RECIPIENT,)]
    return bound | {"issued": "2026-11-28T12:00:00Z", "serial": 1, "recipients": entries}


def granted(payload: Payload, *owners: Pair) -> bytes:
    """Return a grants file."""
    return written(envelope("grants", canonical(payload), *(owners or (OWNER,))))


def secret(recipient: Pair) -> tuple[str, str]:
    """Return the line of a recipient's secret file."""
    return "secret", base64_text(recipient.secret_file.encode())


OWNED = ("owner", OWNER.line)
FIELDS = [OWNED, secret(RECIPIENT), ("time", TIME)]


def result(payload: Payload, key: bytes = KEY) -> Payload:
    """Return what a reader reads."""
    return {"key": key.hex()} | {name: payload[name] for name in ("files", "lineage", "least_version", "expires")}


def cases() -> Cases:
    """Return the cases of grants."""
    made = Cases("grants", RULES)
    for add in (successes, signatures, payloads, values, recipients, constrained, infos, ends, passphrases):
        add(made)
    return made


def successes(made: Cases) -> None:
    """Add grants of all kinds of recipients and constraints."""

    def opens(name: str, rule: str, payload: Payload, recipient: Pair = RECIPIENT, key: bytes = KEY) -> None:
        fields = [OWNED, secret(recipient), ("time", TIME)]
        made.opens(name, rule, granted(payload), result(payload, key), fields)

    opens("to-mlkem768-x25519", "recipient", payload_of())
    opens("to-p-384", "recipient", payload_of(RECIPIENT_P384), RECIPIENT_P384)
    opens("of-128-bits", "key", payload_of(under=KEY128), key=KEY128)
    opens("to-the-second", "recipient", payload_of(OTHER_RECIPIENT, RECIPIENT_P384, RECIPIENT))
    later = payload_of()
    unknown = {"algorithm": "MLKEM1024_P521", "ciphertext": base64_text(b"later"), "id": "f" * 32, "name": ""}
    later["recipients"] = [unknown, entry(RECIPIENT, constraints())]
    opens("beside-an-unknown-algorithm", "recipients", later)
    unknown |= {"salt": base64_text(bytes(16)), "rounds": {"least": [7, None]}}
    later["recipients"] = [unknown, entry(RECIPIENT, constraints())]
    opens("beside-an-unknown-algorithm-with-members", "recipients", later)
    bound = {"files": [FILE, OTHER_FILE], "lineage": LINEAGE, "least_version": 7, "expires": "2027-01-31T00:00:00Z"}
    opens("with-all-constraints", "constraints", payload_of(**bound))
    opens("of-no-file", "constraints", payload_of(files=[]))
    opens("version-of-53-bits", "values", payload_of(least_version=(1 << 53) - 1))
    named = payload_of()
    named["recipients"] = [entry(RECIPIENT, constraints(), name="Gr\u00f6\u00dfe \U0001f600 \x7f")]
    opens("name-in-unicode", "payload", named)
    large = payload_of()
    large["serial"] = (1 << 53) - 1
    opens("serial-of-53-bits", "values", large)


def signatures(made: Cases) -> None:
    """Add signatures by one of several owners, by others, and over something else."""
    payload = payload_of()
    data, read = canonical(payload), result(payload)
    good = envelope("grants", data, OWNER)
    spaced = json.dumps(good, indent=2).encode()
    made.opens("envelope-spaced", "envelope", spaced, read, FIELDS)
    turned = json.dumps({name: good[name] for name in ("signatures", "payloadType", "payload")}).encode()
    made.opens("envelope-turned", "envelope", turned.replace(b"application/", b"application\\/"), read, FIELDS)
    both = [("owner", STRANGER.line), *FIELDS]
    made.opens("owner-second-of-two", "signature", written(good), read, both)
    made.opens(
        "two-signatures", "signature", granted(payload, STRANGER, OWNER), read, FIELDS, "the second is the owner's"
    )
    ml = [("owner", OWNER_ML.line), *FIELDS[1:]]
    made.opens("owner-ml-dsa-65", "signature", granted(payload, OWNER_ML), read, ml)
    made.opens("keyid-is-a-hint", "signature", written(changed(good, keyid=STRANGER.id)), read, FIELDS)
    nameless = good | {"signatures": [{"sig": good["signatures"][0]["sig"]}]}
    made.opens("envelope-no-keyid", "envelope", written(nameless), read, FIELDS)
    more = {"extension": [1.5, {"a": None}], "payloads": "", "version": 2}
    made.opens("envelope-extra-member", "envelope", written(good | more), read, FIELDS)
    made.opens("envelope-extra-member-of-signature", "envelope", written(changed(good, cert="")), read, FIELDS)
    for name, value in {"nan": "NaN", "infinity": "-Infinity", "lone-surrogate": '"\\ud800"'}.items():
        odd = canonical(good)[:-1] + f',"more":{value}}}\n'.encode()
        made.fails(f"envelope-{name}", "envelope", "format", odd, FIELDS)
    padded = next(
        one for one in (payload | {"serial": 10**digits} for digits in range(3)) if len(canonical(one)) % 3 == 1
    )
    for name, text in broken_envelopes(envelope("grants", canonical(padded), OWNER)).items():
        made.fails(f"envelope-{name}", "envelope", "format", text, FIELDS)
    made.fails("by-a-stranger", "signature", "signature", granted(payload, STRANGER), FIELDS)
    posing = written(changed(envelope("grants", data, STRANGER), keyid=OWNER.id))
    made.fails("by-a-stranger-with-the-keyid", "signature", "signature", posing, FIELDS)
    made.fails("of-ml-dsa-by-a-stranger", "signature", "signature", granted(payload, pair("x", "ML-DSA-65")), ml)
    made.fails("by-ml-dsa-for-ed25519", "signature", "signature", granted(payload, OWNER_ML), FIELDS)
    made.fails("no-signature", "signature", "signature", written(good | {"signatures": []}), FIELDS)
    sig = envelope("grants", data, OWNER)["signatures"][0]["sig"]
    for name, index in (("first", 0), ("last", -1)):
        wrong = base64_text(flip(base64.b64decode(sig), index))
        made.fails(f"signature-{name}-bit", "signature", "signature", written(changed(good, sig=wrong)), FIELDS)
    other_s = base64_text(malleated(base64.b64decode(sig)))
    made.fails("signature-malleated", "signature", "signature", written(changed(good, sig=other_s)), FIELDS)
    short = base64_text(base64.b64decode(sig)[:-1])
    made.fails("signature-short", "signature", "signature", written(changed(good, sig=short)), FIELDS)
    late = canonical(payload | {"serial": 2})
    made.fails("payload-altered", "signature", "signature", written(good | {"payload": base64_text(late)}), FIELDS)
    other = envelope("manifest", data, OWNER)
    made.fails("of-another-type", "type", "format", written(other), FIELDS, "signed as a manifest")
    made.fails("of-a-later-type", "type", "format", written(_typed(data, "grants.v2+json")), FIELDS)
    crossed = envelope("grants", data, OWNER, signed_kind="manifest")
    made.fails("signed-as-another-type", "type", "signature", written(crossed), FIELDS)
    bare = envelope("grants", data, OWNER)
    bare["signatures"] = [{"keyid": OWNER.id, "sig": base64_text(OWNER.sign(data))}]
    made.fails("signed-without-type", "signature", "signature", written(bare), FIELDS)


def _typed(data: bytes, end: str) -> Envelope:
    text = f"application/vnd.fastrack.{end}"
    sig = OWNER.sign(b"DSSEv1 %d %s %d %s" % (len(text), text.encode(), len(data), data))
    signature = {"keyid": OWNER.id, "sig": base64_text(sig)}
    return {"payload": base64_text(data), "payloadType": text, "signatures": [signature]}


def payloads(made: Cases) -> None:
    """Add payloads that the owner signed, and that are not canonical or have other members."""
    for name, data in other_payloads(payload_of(), "version").items():
        made.fails(f"payload-{name}", "payload", "format", written(envelope("grants", data, OWNER)), FIELDS)
    odd = payload_of() | {"recipients": [entry(RECIPIENT, constraints(), name="\ud800")]}
    made.fails("name-lone-surrogate", "payload", "format", granted(odd), FIELDS)


def values(made: Cases) -> None:
    """Add members of another form; the ciphertext was made for them."""
    for name, change in {
        "bits-192": {"bits": 192},
        "bits-text": {"bits": "256"},
        "key-upper-case": {"key": key_id(KEY).upper()},
        "key-short": {"key": key_id(KEY)[:-1]},
        "files-of-upper-case": {"files": [OTHER_FILE.upper()]},
        "files-text": {"files": FILE},
        "files-of-short": {"files": [FILE[:-1]]},
        "files-of-null": {"files": [None]},
        "lineage-upper-case": {"lineage": LINEAGE.upper()},
        "lineage-long": {"lineage": LINEAGE + "00"},
        "lineage-empty": {"lineage": ""},
        "least-version-negative": {"least_version": -1},
        "least-version-fraction": {"least_version": 1.0},
        "least-version-true": {"least_version": True},
        "least-version-null": {"least_version": None},
        "least-version-of-54-bits": {"least_version": 1 << 53},
        "expires-offset": {"expires": "2027-01-31T00:00:00+00:00"},
        "expires-fraction": {"expires": "2027-01-31T00:00:00.0Z"},
        "expires-lower-case": {"expires": "2027-01-31t00:00:00z"},
        "expires-day": {"expires": "2027-01-31"},
        "expires-no-such-day": {"expires": "2027-02-29T00:00:00Z"},
        "expires-no-such-hour": {"expires": "2027-01-31T25:00:00Z"},
        "expires-number": {"expires": 1800000000},
        "expires-local": {"expires": "2027-01-31T00:00:00"},
        "expires-one-digit": {"expires": "2027-1-31T00:00:00Z"},
    }.items():
        made.fails(name, "values", "format", granted(payload_of(**change)), FIELDS)
    for name, change in {
        "issued-null": {"issued": None},
        "issued-offset": {"issued": "2026-11-28T12:00:00+00:00"},
        "serial-fraction": {"serial": 1.0},
        "serial-negative": {"serial": -1},
        "serial-null": {"serial": None},
    }.items():
        made.fails(name, "values", "format", granted(payload_of() | change), FIELDS)


def recipients(made: Cases) -> None:
    """Add other recipients, and entries that are none."""
    good = entry(RECIPIENT, constraints())
    made.fails("to-another", "recipient", "grant", granted(payload_of(OTHER_RECIPIENT)), FIELDS)
    made.fails("to-p-384-alone", "recipient", "grant", granted(payload_of(RECIPIENT_P384)), FIELDS)
    for name, algorithm in (("another", "P-384"), ("an-unknown", "MLKEM1024_P521")):
        other = payload_of() | {"recipients": [good | {"algorithm": algorithm}]}
        made.fails(f"id-of-the-recipient-{name}-algorithm", "recipient", "grant", granted(other), FIELDS)
    posing = entry(OTHER_RECIPIENT, constraints()) | {"id": RECIPIENT.id}
    made.fails("to-another-by-this-id", "recipient", "grant", granted(payload_of() | {"recipients": [posing]}), FIELDS)
    for name, entries in {
        "none": [],
        "twice": [good, good],
        "twice-with-another": [good, entry(OTHER_RECIPIENT, constraints()) | {"id": RECIPIENT.id}],
        "object": good,
        "of-null": [good, None],
        "extra-member": [good | {"more": 1}],
        "without-name": [{name: good[name] for name in ("algorithm", "ciphertext", "id")}],
        "without-ciphertext": [{name: good[name] for name in ("algorithm", "name", "id")}],
        "id-upper-case": [good | {"id": RECIPIENT.id.upper()}],
        "name-null": [good | {"name": None}],
        "ciphertext-no-padding": [good | {"ciphertext": str(good["ciphertext"]).rstrip("=")}],
        "ciphertext-url": [good | {"ciphertext": str(good["ciphertext"]).replace("/", "_")}],
    }.items():
        made.fails(
            f"recipients-{name}", "recipients", "format", granted(payload_of() | {"recipients": entries}), FIELDS
        )
    sealed = base64.b64decode(str(good["ciphertext"]))
    for name, data in {
        "empty": b"",
        "of-the-encapsulated-key-alone": sealed[:1120],
        "first-bit": flip(sealed, 0),
        "last-bit": flip(sealed, -1),
        "encapsulated-point": flip(sealed, 1088),
        "key": flip(sealed, 1120),
    }.items():
        wrong = payload_of() | {"recipients": [good | {"ciphertext": base64_text(data)}]}
        made.fails(f"ciphertext-{name}", "recipient", "grant", granted(wrong), FIELDS)
    curve = entry(RECIPIENT_P384, constraints())
    sealed = base64.b64decode(str(curve["ciphertext"]))
    fields = [OWNED, secret(RECIPIENT_P384), ("time", TIME)]
    for name, data in {
        "off-the-curve": flip(sealed, 96),
        "empty": b"",
        "of-zeros": bytes(97) + sealed[97:],
        "last-bit": flip(sealed, -1),
    }.items():
        wrong = payload_of() | {"recipients": [curve | {"ciphertext": base64_text(data)}]}
        made.fails(f"p-384-{name}", "recipient", "grant", granted(wrong), fields)


def constrained(made: Cases) -> None:
    """Add ciphertexts that were made for other constraints, and keys of another id."""
    changes = {
        "bits": 128,
        "expires": "2027-01-31T00:00:00Z",
        "files": [FILE],
        "key": key_id(OTHER_KEY),
        "least_version": 1,
        "lineage": LINEAGE,
        "version": 2,
    }
    for member in CONSTRAINTS:
        other = entry(RECIPIENT, constraints(**{member: changes[member]}))
        data = granted(payload_of() | {"recipients": [other]})
        made.fails(f"made-for-another-{member.replace('_', '-')}", "constraints", "grant", data, FIELDS)
    bare = encrypt(RECIPIENT.algorithm, RECIPIENT.public, b"fastrack/grant@1\0", KEY, "bare")
    bare_entry = entry(RECIPIENT, constraints()) | {"ciphertext": base64_text(bare)}
    data = granted(payload_of() | {"recipients": [bare_entry]})
    made.fails("made-for-no-constraints", "constraints", "grant", data, FIELDS)
    another = payload_of() | {"recipients": [entry(RECIPIENT, constraints(), OTHER_KEY)]}
    made.fails("another-key", "key", "grant", granted(another), FIELDS)
    small = constraints(KEY128, bits=256)
    claimed = payload_of() | small | {"recipients": [entry(RECIPIENT, small, KEY128)]}
    made.fails("bits-256-of-128", "key", "grant", granted(claimed), FIELDS)
    padded = payload_of() | {"recipients": [entry(RECIPIENT, constraints(), KEY + b"\0")]}
    made.fails("key-of-33-bytes", "key", "grant", granted(padded), FIELDS)


def long_constraints(size: int) -> Payload:
    """Return the constraints, mostly ids of files, that make an `info` of that many bytes."""
    ids = [draw(f"file {number}", 16).hex() for number in range(size // 35)]  # each of 35 bytes in JSON
    ends = (None, "2027-01-31T00:00:00Z")
    for less, digits, lineage, expires in product(range(4, 9), range(16), (None, LINEAGE), ends):
        bound = {"files": ids[less:], "least_version": 10**digits, "lineage": lineage, "expires": expires}
        if len(b"fastrack/grant@1\0" + canonical(constraints(**bound))) == size:
            return bound
    raise ValueError("no such constraints")


def infos(made: Cases) -> None:
    """Add grants of as many files as there may be, and of more: what a reader opens that cuts their number short."""
    curve = [OWNED, secret(RECIPIENT_P384), ("time", TIME)]
    most = payload_of(**long_constraints(65535))
    made.opens("info-of-65535", "info", granted(most), result(most), FIELDS)
    more = payload_of(**long_constraints(65536))
    made.fails("info-of-65536", "info", "format", granted(more), FIELDS)
    files = [draw(f"file {number}", 16).hex() for number in range(2000)]
    made.fails("files-of-2000", "info", "format", granted(payload_of(files=files)), FIELDS)
    many = payload_of(RECIPIENT_P384, files=files)
    made.opens("files-of-2000-to-p-384", "info", granted(many), result(many), curve)
    both = payload_of(RECIPIENT_P384, RECIPIENT, files=files)
    made.fails("files-of-2000-to-p-384-beside-another", "info", "format", granted(both), curve)


def ends(made: Cases) -> None:
    """Add grants a second before their end, at it, and after it."""
    for name, end, open_ in (
        ("a-second-before-the-end", "2026-12-01T00:00:01Z", True),
        ("at-the-end", TIME, False),
        ("after-the-end", "2026-11-30T23:59:59Z", False),
        ("a-year-after-the-end", "2025-12-31T23:59:59Z", False),
        ("in-ten-years", "2036-01-01T00:00:00Z", True),
    ):
        payload = payload_of(expires=end)
        if open_:
            made.opens(name, "expires", granted(payload), result(payload), FIELDS)
        else:
            made.fails(name, "expires", "grant", granted(payload), FIELDS)


def by_passphrase(text: str, **changes: object) -> Payload:
    """Return the entry of a passphrase."""
    salt, info = draw("salt of a passphrase", 16), b"fastrack/grant@1\0" + canonical(constraints())
    derived = Argon2id(salt=salt, length=32, iterations=3, lanes=1, memory_cost=65536).derive(text.encode())
    sealed = AESGCM(derived).encrypt(bytes(12), KEY, info)
    made: Payload = {"algorithm": "Argon2id", "ciphertext": base64_text(sealed), "id": "0" * 32, "name": "passphrase"}
    return made | {"iterations": 3, "lanes": 1, "memory": 65536, "salt": base64_text(salt)} | changes


def passphrases(made: Cases) -> None:
    """Add passphrases. Three cases derive, which takes long in some languages."""
    words = 'Grüße "an" alle'
    good = by_passphrase(words)
    fields = [OWNED, ("passphrase", json.dumps(words)), ("time", TIME)]
    payload = payload_of() | {"recipients": [good]}
    made.opens("passphrase", "passphrase", granted(payload), result(payload), fields)
    wrong = [OWNED, ("passphrase", json.dumps('grüße "an" alle')), ("time", TIME)]
    made.fails("passphrase-wrong", "passphrase", "grant", granted(payload), wrong)
    both = payload_of() | {"recipients": [good, entry(RECIPIENT, constraints())]}
    made.opens("passphrase-beside-a-key", "recipient", granted(both), result(both), FIELDS)
    made.fails("passphrase-for-a-key", "recipient", "grant", granted(payload), FIELDS)
    made.fails("key-for-a-passphrase", "recipient", "grant", granted(payload_of()), fields)
    for name, change in {
        "iterations-2": {"iterations": 2},
        "iterations-17": {"iterations": 17},
        "iterations-fraction": {"iterations": 3.0},
        "lanes-0": {"lanes": 0},
        "lanes-17": {"lanes": 17},
        "memory-small": {"memory": 65535},
        "memory-large": {"memory": (1 << 20) + 1},
        "salt-short": {"salt": base64_text(bytes(15))},
        "salt-unused-bits": {"salt": spelled(bytes(16))["unused-bits"]},
        "id": {"id": "1" * 32},
        "extra-member": {"more": 1},
    }.items():
        data = granted(payload_of() | {"recipients": [good | change]})
        made.fails(f"passphrase-{name}", "passphrase", "format", data, fields)
    plain = entry(RECIPIENT, constraints())
    named = [plain, good | {"id": OTHER_RECIPIENT.id}]
    made.fails("passphrase-id-of-a-key", "passphrase", "format", granted(payload_of() | {"recipients": named}), FIELDS)
    nameless = [plain, entry(OTHER_RECIPIENT, constraints()) | {"id": "0" * 32}]
    made.fails("key-with-id-of-zeros", "passphrase", "format", granted(payload_of() | {"recipients": nameless}), FIELDS)
    lacking = {name: value for name, value in good.items() if name != "lanes"}
    data = granted(payload_of() | {"recipients": [lacking]})
    made.fails("passphrase-without-lanes", "passphrase", "format", data, fields)
