"""Cases of wrapped key files."""

import hashlib

from cryptography.hazmat.primitives.asymmetric.rsa import (
    RSAPrivateNumbers,
    RSAPublicNumbers,
    rsa_crt_dmp1,
    rsa_crt_dmq1,
    rsa_crt_iqmp,
)
from cryptography.hazmat.primitives.keywrap import aes_key_wrap
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from generator.case import Cases, base64_text, canonical, draw, flip
from generator.drafts import KEY, KEY128, OTHER_KEY
from generator.envelopes import other_payloads
from generator.key_files import spelled
from generator.messages import key_id

RULES = {
    "form": ("wrapped-key-files", "A wrapped key file is one line of canonical JSON with exactly its members."),
    "values": ("wrapped-key-files", "Each member has its form, and parameters and ciphertext their limits."),
    "algorithm": ("wrapped-key-files", "The algorithm is one of the provider's, with its parameters."),
    "oaep": ("wrapped-key-files", "RSAES-OAEP has MGF1 of the same hash function, and no label."),
    "key-wrap": ("wrapped-key-files", "AES key wrap is that of RFC 3394, with its integrity check."),
    "key": ("wrapped-key-files", "The opened key has the id `key` and the size `bits`."),
}

# The primes of the RSA key.
P = int(
    "ff34185b1aaa7d468cfc75655e6cb6845fe7804dc827c3ab84e338177dc9a604a748676b63f9f93e7e245e04af2207e2"
    "7b3b3ec3f9f6f160392b717b243e29633c8f7d7a91df59bf7c8c137181a388197394003c91cc13e419a3d313d98cc4bc"
    "7c7bd4dff0d711efa87cdb9a932bda7c271aecc5cb4e172cdd94f8ce7e393a27",
    16,
)
Q = int(
    "d750f11425824a2bc30003e596ff9d72ada07a8568d2d2b61b481d549f4edf9bdbe6ee7b0fae8f6363f2e41928c4bdfa"
    "2bb9b3a9d77c09011053fd0725501cdcd66bbc69ee95418835561d21ea6a19d15b8f83c638654c94a06dfadda02753fb"
    "637466fb749f1a357dd3a88603b32f380bacc7abc6762ba6813bb4503dabcc0d",
    16,
)
EXPONENT = 65537

Members = dict[str, object]


def rsa_key() -> bytes:
    """Return the private key of the cases, as PKCS #8 in DER."""
    d = pow(EXPONENT, -1, (P - 1) * (Q - 1))
    numbers = RSAPrivateNumbers(
        P, Q, d, rsa_crt_dmp1(d, P), rsa_crt_dmq1(d, Q), rsa_crt_iqmp(P, Q), RSAPublicNumbers(EXPONENT, P * Q)
    )
    return numbers.private_key().private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def mask(seed: bytes, size: int, name: str) -> bytes:
    """Return MGF1 (RFC 8017, B.2.1)."""
    blocks = (hashlib.new(name, seed + number.to_bytes(4, "big")).digest() for number in range(size // 20 + 1))
    return b"".join(blocks)[:size]


def oaep(plaintext: bytes, name: str = "sha256", mask_name: str | None = None, label: bytes = b"") -> bytes:
    """Return RSAES-OAEP (RFC 8017, 7.1.1) with a seed that is drawn."""
    hashed = hashlib.new(name, label).digest()
    size = len(hashed)
    block = hashed + bytes(256 - len(plaintext) - 2 * size - 2) + b"\1" + plaintext
    seed = draw(f"seed {name} {mask_name} {plaintext.hex()}", size)
    masked = _xor(block, mask(seed, len(block), mask_name or name))
    masked_seed = _xor(seed, mask(masked, size, mask_name or name))
    number = int.from_bytes(b"\0" + masked_seed + masked, "big")
    return pow(number, EXPONENT, P * Q).to_bytes(256, "big")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


URI = {"uri": "pkcs11:token=fastrack;object=wrapping"}


def members(key: bytes, ciphertext: bytes, **changes: object) -> Members:
    """Return the members of a wrapped key file."""
    made: Members = {"version": 1, "key": key_id(key), "bits": len(key) * 8, "provider": "pkcs11"}
    made |= {"algorithm": "RSA-OAEP-SHA256", "parameters": URI, "ciphertext": base64_text(ciphertext)}
    return made | changes


def line(made: Members) -> bytes:
    """Return the file."""
    return canonical(made) + b"\n"


RSA = [("wrapping", base64_text(rsa_key()))]
DECRYPTED = [("decrypted", KEY.hex())]


def cases() -> Cases:
    """Return the cases of wrapped key files."""
    made = Cases("wrapped", RULES)
    for add in (oaeps, wraps, services, forms, values):
        add(made)
    return made


def opens(made: Cases, name: str, rule: str, file: Members, key: bytes, fields: list[tuple[str, str]]) -> None:
    """Add a file that opens to a key."""
    result = {"key": key.hex(), "id": key_id(key), "provider": file["provider"], "algorithm": file["algorithm"]}
    made.opens(name, rule, line(file), result, fields)


def oaeps(made: Cases) -> None:
    """Add keys that are wrapped by RSAES-OAEP."""
    azure = {"provider": "azure-keyvault", "parameters": {"key": "https://v.vault.azure.net/keys/k/0123"}}
    opens(made, "rsa-oaep-sha256", "oaep", members(KEY, oaep(KEY)), KEY, RSA)
    opens(made, "rsa-oaep-sha256-128-bits", "oaep", members(KEY128, oaep(KEY128)), KEY128, RSA)
    sha1 = members(KEY, oaep(KEY, "sha1"), algorithm="RSA-OAEP-SHA1")
    opens(made, "rsa-oaep-sha1", "oaep", sha1, KEY, RSA)
    opens(made, "azure-rsa-oaep-sha256", "oaep", members(KEY, oaep(KEY), **azure), KEY, RSA)
    for name, ciphertext in {
        "sha1-as-sha256": oaep(KEY, "sha1"),
        "mask-of-sha1": oaep(KEY, "sha256", "sha1"),
        "label": oaep(KEY, label=b"fastrack"),
        "bit": flip(oaep(KEY), -1),
        "zeros": bytes(256),
    }.items():
        made.fails(f"rsa-{name}", "oaep", "authentication", line(members(KEY, ciphertext)), RSA)
    other = members(KEY, oaep(OTHER_KEY))
    made.fails("rsa-another-key", "key", "unknown-key", line(other), RSA)
    half = members(KEY128, oaep(KEY128), bits=256)
    made.fails("rsa-bits-256-of-128", "key", "unknown-key", line(half), RSA)


def wraps(made: Cases) -> None:
    """Add keys that are wrapped by AES key wrap."""
    for size in (16, 24, 32):
        wrapping = draw(f"wrapping {size}", size)
        fields = [("wrapping", base64_text(wrapping))]
        file = members(KEY, aes_key_wrap(wrapping, KEY), algorithm="AES-KW")
        opens(made, f"aes-kw-{size * 8}", "key-wrap", file, KEY, fields)
    opens(
        made,
        "aes-kw-of-128",
        "key-wrap",
        members(KEY128, aes_key_wrap(wrapping, KEY128), algorithm="AES-KW"),
        KEY128,
        fields,
    )
    for name, ciphertext in {
        "first-bit": flip(aes_key_wrap(wrapping, KEY), 0),
        "last-bit": flip(aes_key_wrap(wrapping, KEY), -1),
        "of-another": aes_key_wrap(OTHER_KEY, KEY),
    }.items():
        file = members(KEY, ciphertext, algorithm="AES-KW")
        made.fails(f"aes-kw-{name}", "key-wrap", "authentication", line(file), fields)
    other = members(KEY, aes_key_wrap(wrapping, OTHER_KEY), algorithm="AES-KW")
    made.fails("aes-kw-another-key", "key", "unknown-key", line(other), fields)


SERVICES: dict[str, tuple[str, str, Members]] = {
    "tpm": ("tpm", "TPM2-SEALED", {"parent": "000b" + "ab" * 32, "pcrs": "sha256:0,7"}),
    "tpm-without-pcrs": ("tpm", "TPM2-SEALED", {"parent": "000b" + "ab" * 32}),
    "vault": ("vault-transit", "transit", {"mount": "transit", "name": "seed"}),
    "aws": ("aws-kms", "SYMMETRIC_DEFAULT", {"key": "arn:aws:kms:eu-central-1:111122223333:key/1234abcd"}),
    "gcp": ("gcp-kms", "GOOGLEXPONENTSYMMETRIC_ENCRYPTION", {"key": "projects/p/locations/l/keyRings/r/cryptoKeys/k"}),
}


def services(made: Cases) -> None:
    """Add keys that something else decrypts."""
    for name, (provider, algorithm, parameters) in SERVICES.items():
        text = b"vault:v1:AAAA" if name == "vault" else draw(name, 120)
        file = members(KEY, text, provider=provider, algorithm=algorithm, parameters=parameters)
        opens(made, name, "algorithm", file, KEY, DECRYPTED)
    aws = SERVICES["aws"]
    file = members(KEY, b"x" * 64, provider=aws[0], algorithm=aws[1], parameters=aws[2])
    for name, opened in {
        "another-key": OTHER_KEY,
        "a-key-of-128-bits": KEY[:16],
        "nothing": b"",
        "33-bytes": KEY + b"\0",
    }.items():
        fields = [("decrypted", opened.hex())]
        made.fails(f"opens-to-{name}", "key", "unknown-key", line(file), fields)


def forms(made: Cases) -> None:
    """Add files in another form."""
    good = members(KEY, oaep(KEY))
    for name, data in other_payloads(good, "version").items():
        if name != "newline":
            made.fails(f"form-{name}", "form", "format", data + b"\n", RSA)
    made.fails("form-two-newlines", "form", "format", line(good) + b"\n", RSA)
    made.fails("form-carriage-return", "form", "format", line(good)[:-1] + b"\r\n", RSA)
    made.fails("form-space-in-front", "form", "format", b" " + line(good), RSA)
    twice = line(good).replace(b'"uri":', b'"uri":"pkcs11:","uri":')
    made.fails("form-duplicate-parameter", "form", "format", twice, RSA)


def values(made: Cases) -> None:
    """Add members at their limits and past them."""
    good = members(KEY, oaep(KEY))
    parameters = {f"p{number}": "~" * 2048 for number in range(16)}
    parameters |= {"p0": " "}
    most: Members = {"provider": "aws-kms", "algorithm": "SYMMETRIC_DEFAULT", "parameters": SERVICES["aws"][2]}
    opens(made, "ciphertext-of-8192", "values", members(KEY, draw("most", 8192), **most), KEY, DECRYPTED)
    opens(made, "ciphertext-of-1", "values", members(KEY, b"x", **most), KEY, DECRYPTED)
    for name, change in {
        "ciphertext-of-8193": most | {"ciphertext": base64_text(bytes(8193))},
        "ciphertext-of-0": most | {"ciphertext": ""},
        "parameters-17": most | {"parameters": parameters | {"p16": "a"}},
        "parameter-of-2049": most | {"parameters": {"key": "a" * 2049}},
        "parameter-empty": most | {"parameters": {"key": ""}},
        "parameter-control": most | {"parameters": {"key": "a\nb"}},
        "parameter-not-ascii": most | {"parameters": {"key": "é"}},
        "parameter-number": most | {"parameters": {"key": 1}},
        "parameters-array": most | {"parameters": ["key"]},
        "algorithm-space": most | {"algorithm": "SYMMETRIC DEFAULT"},
        "algorithm-empty": most | {"algorithm": ""},
        "algorithm-dot": most | {"algorithm": "SYMMETRIC.DEFAULT"},
        "provider-null": {"provider": None},
        "bits-192": {"bits": 192},
        "bits-text": {"bits": "256"},
        "bits-fraction": {"bits": 256.0},
        "key-upper-case": {"key": key_id(KEY).upper()},
        "key-short": {"key": key_id(KEY)[:-1]},
        "ciphertext-unused-bits": {"ciphertext": spelled(oaep(KEY))["unused-bits"]},
        "ciphertext-no-padding": {"ciphertext": spelled(oaep(KEY))["no-padding"]},
        "ciphertext-line": {"ciphertext": base64_text(oaep(KEY))[:64] + "\n" + base64_text(oaep(KEY))[64:]},
    }.items():
        fields = DECRYPTED if "algorithm" in change or "ciphertext" in change or "parameters" in change else RSA
        made.fails(name, "values", "format", line(good | change), fields)
    for name, change in {
        "algorithm-unknown": {"algorithm": "RSA-PKCS1"},
        "algorithm-lower-case": {"algorithm": "rsa-oaep-sha256"},
        "uri-missing": {"parameters": {}},
        "uri-of-another-scheme": {"parameters": {"uri": "file:///dev/null"}},
        "uri-with-a-query": {"parameters": {"uri": URI["uri"] + "?pin-value=1234"}},
    }.items():
        made.fails(name, "algorithm", "format", line(good | change), RSA)
