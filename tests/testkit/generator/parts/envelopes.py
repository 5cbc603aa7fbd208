"""Signed documents, and what is wrong with those that are none: DSSE and canonical JSON."""

import base64
import copy
import json

from generator.parts.case import base64_text, canonical, spelled
from generator.parts.pairs import Pair

Envelope = dict[str, object]


def envelope(kind: str, payload: bytes, *signers: Pair, signed_kind: str | None = None) -> Envelope:
    """Return the members of an envelope. `signed_kind` is the type that was signed, if it is another."""
    type_ = f"application/vnd.fastrack.{kind}.v1+json"
    text = f"application/vnd.fastrack.{signed_kind or kind}.v1+json"
    data = b"DSSEv1 %d %s %d %s" % (len(text), text.encode(), len(payload), payload)
    signatures = [{"keyid": signer.id, "sig": base64_text(signer.sign(data))} for signer in signers]
    return {"payload": base64_text(payload), "payloadType": type_, "signatures": signatures}


def written(members: Envelope) -> bytes:
    """Return the one form of an envelope."""
    return canonical(members) + b"\n"


def signed(kind: str, payload: object, *signers: Pair) -> bytes:
    """Return a valid document."""
    return written(envelope(kind, canonical(payload), *signers))


def changed(members: Envelope, **signature: str) -> Envelope:
    """Return an envelope whose first signature has other members."""
    made = copy.deepcopy(members)
    made["signatures"][0] |= signature
    return made


def broken_envelopes(members: Envelope) -> dict[str, bytes]:
    """Return envelopes that lack what every envelope has."""
    text = canonical(members).decode()
    payload, sig = str(members["payload"]), members["signatures"][0]["sig"]
    made = {f"no-{member.lower()}": written({k: v for k, v in members.items() if k != member}) for member in members}
    made |= {
        "empty": b"",
        "array": f"[{text}]\n".encode(),
        "truncated": text[:-1].encode(),
        "two": (text + text).encode(),
        "mark": b"\xef\xbb\xbf" + text.encode(),
        "payload-duplicate": text.replace('{"payload":', '{"payload":"e30=","payload":', 1).encode() + b"\n",
        "payload-no-base64": written(members | {"payload": "*" + payload}),
        "payload-line": written(members | {"payload": payload[:40] + "\n" + payload[40:]}),
        "payload-object": written(members | {"payload": {}}),
        "signatures-object": written(members | {"signatures": members["signatures"][0]}),
        "deep": b"[" * 20_000,
        "deep-in-a-member": text[:-1].encode() + b',"more":' + b"[" * 20_000,
        "sig-no-base64": written(changed(members, sig="*" + sig)),
    }
    for name in ("unused-bits", "no-padding"):
        made[f"sig-{name}"] = written(changed(members, sig=spelled(_decoded(sig))[name]))
    if payload.endswith("="):
        made["payload-unused-bits"] = written(members | {"payload": spelled(_decoded(payload))["unused-bits"]})
        made["payload-no-padding"] = written(members | {"payload": payload.rstrip("=")})
    return made


def other_forms(members: Envelope) -> dict[str, bytes]:
    """Return other forms of the same envelope: only one is allowed where the page says so."""
    text = canonical(members).decode()
    signature = members["signatures"][0]
    turned = {name: members[name] for name in sorted(members, reverse=True)}
    twice = members | {"signatures": [signature, signature]}
    return {
        "spaces": json.dumps(members, sort_keys=True).encode() + b"\n",
        "no-newline": text.encode(),
        "two-newlines": text.encode() + b"\n\n",
        "carriage-return": text.encode() + b"\r\n",
        "space-in-front": b" " + text.encode() + b"\n",
        "members-turned": json.dumps(turned, separators=(",", ":")).encode() + b"\n",
        "escaped": text.replace('"payload"', '"\\u0070ayload"').encode() + b"\n",
        "escaped-slash": text.replace("application/", "application\\/").encode() + b"\n",
        "extra-member": written(members | {"version": 1}),
        "extra-member-of-signature": written(changed(members, more="")),
        "signature-twice": written(twice),
        "keyid-of-another": written(changed(members, keyid="0" * 32)),
        "keyid-upper-case": written(changed(members, keyid=str(signature["keyid"]).upper())),
        "keyid-duplicate": text.replace('"keyid":', '"keyid":"","keyid":').encode() + b"\n",
    }


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)


def other_payloads(payload: dict[str, object], number: str) -> dict[str, bytes]:
    """Return payloads that are not canonical, or lack a member or have one more; `number` is a member that is 1."""
    text = canonical(payload).decode()
    plain = f'"{number}":1'
    if plain not in text:
        raise ValueError(f"{number} is not 1")
    turned = dict(sorted(payload.items(), reverse=True))
    made = {
        f"without-{name.replace('_', '-')}": canonical({k: v for k, v in payload.items() if k != name})
        for name in payload
    }
    made |= {
        "spaces": json.dumps(payload, sort_keys=True).encode(),
        "newline": text.encode() + b"\n",
        "turned": json.dumps(turned, separators=(",", ":")).encode(),
        "escaped": text.replace(f'"{number}"', f'"\\u{ord(number[0]):04x}{number[1:]}"').encode(),
        "duplicate": text.replace(plain, f"{plain},{plain}").encode(),
        "extra-member": canonical(payload | {"zzz": None}),
        "not-ascii": text.replace(plain, plain + ',"\u00e9":0').encode(),
        "fraction": text.replace(plain, plain + ".0").encode(),
        "exponent": text.replace(plain, plain + "e0").encode(),
        "true": text.replace(plain, f'"{number}":true').encode(),
        "text": text.replace(plain, f'"{number}":"1"').encode(),
        "version-2": text.replace(plain, f'"{number}":2').encode(),
        "version-0": text.replace(plain, f'"{number}":0').encode(),
        "array": f"[{text}]".encode(),
        "empty": b"",
    }
    return made
