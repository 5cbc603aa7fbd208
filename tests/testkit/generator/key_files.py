"""Cases of key files, secret files and public files."""

from generator.parts.case import Cases, base64_text, draw, spelled
from generator.parts.drafts import KEY, KEY128, OTHER_KEY
from generator.parts.messages import key_id
from generator.parts.pairs import OWNER, OWNER_ML, RECIPIENT, RECIPIENT_P384, SIZES, STRANGER, Pair, pair

KEY_RULES = {
    "lines": ("key-files", "A key file has two lines of ASCII, of which the last newline may be missing."),
    "id": ("key-files", "The id is the key's, or the file is damaged."),
    "zeros": ("key-files", "A key of only zeros is none: a wiped one leaves them."),
    "bits": ("key-files", "A key has 256 or 128 bits, as many as its first line says."),
}

SECRET_RULES = {
    "lines": ("key-pairs", "A secret file has two lines of ASCII, of which the last newline may be missing."),
    "id": ("key-pairs", "The id is that of the public key."),
    "algorithm": ("key-pairs", "The algorithm is one of four, the same in both lines, with a secret of its size."),
}

PUBLIC_RULES = {
    "line": ("key-pairs", "A public file has one line, of which the newline may be missing."),
    "name": ("key-pairs", "A name is 1 to 64 characters of printable ASCII, no space first or last."),
    "algorithm": ("key-pairs", "The algorithm is one of four, and the public key has its size."),
    "modulus": ("key-pairs", "Coefficients of a key of ML-KEM-768 are below 3329."),
    "base64": ("key-pairs", "The public key is in canonical base64."),
}


def key_file(key: bytes) -> str:
    """Return the key file of a key."""
    return f"# fastrack key, {len(key) * 8} bits, id {key_id(key)}\nfastrack-key-1:{key.hex()}\n"


def lines(text: str) -> dict[str, str]:
    """Return texts of two lines that are no file of keys."""
    first, second, _ = text.split("\n")
    return {
        "empty": "",
        "first-line-alone": first + "\n",
        "second-line-alone": second + "\n",
        "exchanged": f"{second}\n{first}\n",
        "third-line": text + second + "\n",
        "empty-line": text + "\n",
        "empty-line-first": "\n" + text,
        "empty-line-between": f"{first}\n\n{second}\n",
        "carriage-returns": text.replace("\n", "\r\n"),
        "space-at-end": f"{first}\n{second} \n",
        "space-in-front": f"{first}\n {second}\n",
        "mark": "\ufeff" + text,
        "other-label": text.replace("-1:", "-2:"),
        "upper-case-label": text.replace("fastrack-", "Fastrack-"),
        "upper-case": f"{first}\n{second[:-16]}{second[-16:].upper()}\n",
        "no-hexadecimal": text[:-2] + "g\n",
        "odd-digits": f"{first}\n{second}0\n",
        "spaces-between": f"{first}\n{second[:-2]} {second[-2:]}\n",
        "zero-byte": text + "\0",
    }


def keys() -> Cases:
    """Return the cases of key files."""
    made = Cases("key-file", KEY_RULES)
    for name, key in {"256-bits": KEY, "128-bits": KEY128, "any": draw("any key", 32)}.items():
        result = {"key": key.hex(), "id": key_id(key)}
        made.opens(name, "lines", key_file(key).encode(), result)
        made.opens(f"{name}-no-newline", "lines", key_file(key)[:-1].encode(), result)
    for name, text in lines(key_file(draw("another key file", 32))).items():
        made.fails(name, "lines", "format", text.encode())
    text = key_file(KEY)
    for name, wrong in {
        "of-another-key": key_id(OTHER_KEY),
        "upper-case": key_id(KEY).upper(),
        "short": key_id(KEY)[:-1],
        "empty": "",
    }.items():
        made.fails(f"id-{name}", "id", "format", text.replace(key_id(KEY), wrong).encode())
    digit = text.replace("fastrack-key-1:0001", "fastrack-key-1:0000")
    made.fails("id-digit-of-the-key", "id", "format", digit.encode(), comment="one digit of the key was altered")
    for name, bits in {"128": "128", "0256": "0256", "empty": "", "512": "512"}.items():
        made.fails(f"bits-{name}", "bits", "format", text.replace("256 bits", f"{bits} bits").encode())
    text128 = key_file(KEY128)
    made.fails("bits-256-of-128", "bits", "format", text128.replace("128 bits", "256 bits").encode())
    long = f"# fastrack key, 192 bits, id {key_id(KEY[:24])}\nfastrack-key-1:{KEY[:24].hex()}\n"
    made.fails("bits-192", "bits", "format", long.encode())
    for size in (16, 32):
        zeros = key_file(bytes(size)).encode()
        made.fails(f"zeros-{size * 8}-bits", "zeros", "format", zeros, comment="a key that was wiped")
    made.fails("not-ascii", "lines", "format", text.replace("# ", "# é").encode())
    return made


ALGORITHMS = {"ed25519": OWNER, "ml-dsa-65": OWNER_ML, "mlkem768-x25519": RECIPIENT, "p-384": RECIPIENT_P384}


def secrets() -> Cases:
    """Return the cases of secret files."""
    made = Cases("secret-file", SECRET_RULES)
    for name, one in ALGORITHMS.items():
        result = {"algorithm": one.algorithm, "id": one.id, "public": base64_text(one.public)}
        made.opens(name, "lines", one.secret_file.encode(), result)
        made.opens(f"{name}-no-newline", "lines", one.secret_file[:-1].encode(), result)
        other = pair("other secret", one.algorithm).id
        made.fails(f"{name}-id-of-another", "id", "format", one.secret_file.replace(one.id, other).encode())
        for size, secret in (("short", one.secret[:-1]), ("long", one.secret + b"\1")):
            text = one.secret_file.replace(one.secret.hex(), secret.hex())
            made.fails(f"{name}-{size}", "algorithm", "format", text.encode())
    small = Pair("P-384", bytes(47) + b"\5")
    result = {"algorithm": small.algorithm, "id": small.id, "public": base64_text(small.public)}
    made.opens("p-384-small-scalar", "algorithm", small.secret_file.encode(), result)
    stripped = small.secret_file.replace(small.secret.hex(), "05")
    made.fails("p-384-stripped-scalar", "algorithm", "format", stripped.encode())
    for name, text in lines(STRANGER.secret_file).items():
        made.fails(name, "lines", "format", text.encode())
    text = OWNER.secret_file
    made.fails("id-upper-case", "id", "format", text.replace(OWNER.id, OWNER.id.upper()).encode())
    made.fails("first-line-of-another", "algorithm", "format", text.replace("key, Ed25519", "key, ML-DSA-65").encode())
    for name, algorithm in {"unknown": "Ed448", "lower-case": "ed25519", "alias": "X25519"}.items():
        made.fails(f"algorithm-{name}", "algorithm", "format", text.replace("Ed25519", algorithm).encode())
    as_ml = Pair("ML-DSA-65", OWNER.secret)
    mixed = as_ml.secret_file.replace("key, ML-DSA-65", "key, Ed25519").encode()
    made.fails("second-line-of-another", "algorithm", "format", mixed)
    return made


class Known(Pair):
    """Hold only a public key, in the place of the secret."""

    @property
    def public(self) -> bytes:  # type: ignore[override]
        """The public key."""
        return self.secret


def publics() -> Cases:
    """Return the cases of public files."""
    made = Cases("public-file", PUBLIC_RULES)

    def opens(name: str, rule: str, one: Pair, owner: str, text: str) -> None:
        made.opens(name, rule, text.encode(), {"algorithm": one.algorithm, "id": one.id, "name": owner})

    for name, one in ALGORITHMS.items():
        opens(name, "line", one, "", one.line + "\n")
        opens(f"{name}-named", "name", one, "owner", one.line + " owner\n")
        for size, public in (("short", one.public[:-1]), ("long", one.public + b"\0")):
            text = f"fastrack-public-1:{one.algorithm}:{base64_text(public)}\n"
            made.fails(f"{name}-{size}", "algorithm", "format", text.encode())
    _add_coefficients(made)
    point = RECIPIENT_P384.public
    for name, public in {
        "compressed": b"\2" + point[1:49],
        "compressed-and-long": b"\2" + point[1:],
        "off-the-curve": point[:-1] + bytes([point[-1] ^ 1]),
        "infinite": bytes(97),
    }.items():
        made.fails(f"p-384-{name}", "algorithm", "format", f"fastrack-public-1:P-384:{base64_text(public)}\n".encode())
    line = OWNER.line
    opens("no-newline", "line", OWNER, "", line)
    for name, owner in {"one": "x", "64": "n" * 64, "spaces": "A  B, ~!", "like-a-key": "fastrack-public-1:a"}.items():
        opens(f"name-{name}", "name", OWNER, owner, f"{line} {owner}\n")
    for name, end in {
        "65": " " + "n" * 65,
        "empty": " ",
        "space-first": "  owner",
        "space-last": " owner ",
        "tab": "\towner",
        "control": " a\x1fb",
        "delete": " a\x7f",
        "not-ascii": " größe",
    }.items():
        made.fails(f"name-{name}", "name", "format", f"{line}{end}\n".encode())
    for name, text in {
        "empty": "",
        "two-lines": f"{line}\n{line}\n",
        "empty-line": f"{line}\n\n",
        "carriage-return": f"{line}\r\n",
        "space-in-front": f" {line}\n",
        "mark": f"\ufeff{line}\n",
        "comment": f"# key\n{line}\n",
        "other-label": line.replace("-1:", "-2:") + "\n",
        "secret": OWNER.secret_file,
    }.items():
        made.fails(name, "line", "format", text.encode())
    for name, algorithm in {"unknown": "Ed448", "lower-case": "ed25519", "alias": "X25519"}.items():
        made.fails(f"algorithm-{name}", "algorithm", "format", (line.replace("Ed25519", algorithm) + "\n").encode())
    for name, key in spelled(OWNER.public).items():
        made.fails(f"base64-{name}", "base64", "format", f"fastrack-public-1:Ed25519:{key}\n".encode())
    return made


def _add_coefficients(made: Cases) -> None:
    for coefficient in (3328, 3329, 4095):
        name = f"mlkem768-coefficient-of-{coefficient}"
        first = coefficient | RECIPIENT.public[1] >> 4 << 12  # of 12 bits each
        one = Known("MLKEM768_X25519", first.to_bytes(2, "little") + RECIPIENT.public[2:])
        if coefficient < 3329:
            read = {"algorithm": one.algorithm, "id": one.id, "name": ""}
            made.opens(name, "modulus", f"{one.line}\n".encode(), read)
        else:
            made.fails(name, "modulus", "format", f"{one.line}\n".encode())


if set(SIZES) != {one.algorithm for one in ALGORITHMS.values()}:
    raise ValueError("an algorithm has no cases")
