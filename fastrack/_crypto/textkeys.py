"""Files of key pairs: text that names an algorithm and holds a key, and is read in one form only.

A secret file has two lines, like a key file, and the same permissions; a public file has one::

    # fastrack secret key, Ed25519, id 3f0c...       (32 hexadecimal digits)
    fastrack-secret-1:Ed25519:9d41...                (the secret, in hexadecimal)

    fastrack-public-1:Ed25519:wRk0...= alice         (the public key in base64; a name may follow)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastrack._crypto.keys import read_private
from fastrack._util.atomic import new_file
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

_PUBLIC_LIMIT = 8192
_NAME = r"[!-~](?:[ -~]{0,62}[!-~])?"  # printable ASCII, up to 64 characters
_PUBLIC = re.compile(
    rf"fastrack-public-1:(?P<algorithm>[A-Za-z0-9_-]+):(?P<key>[A-Za-z0-9+/]+=*)(?: (?P<name>{_NAME}))?\n?"
)
_SECRET = re.compile(
    rb"# fastrack secret key, (?P<header>[A-Za-z0-9_-]+), id (?P<id>[0-9a-f]{32})\n"
    rb"fastrack-secret-1:(?P<algorithm>[A-Za-z0-9_-]+):(?P<secret>(?:[0-9a-f]{2})+)\n?"
)
_SECRET_LIMIT = 512


def public_id(algorithm: str, public: bytes) -> str:
    """Return the id of a public key: 32 hexadecimal digits of SHA-256 over a label, the algorithm and the key."""
    return hashlib.sha256(b"fastrack/public-key-id@1\0" + algorithm.encode() + b"\0" + public).hexdigest()[:32]


def format_public(algorithm: str, public: bytes, name: str) -> str:
    """Return the line of a public file.

    Raises
    ------
    ValueError
        If the name is not printable ASCII of up to 64 characters.
    """
    if name and re.fullmatch(_NAME, name) is None:
        raise ValueError(
            f"naming a public key failed: expected up to 64 characters of printable ASCII, got {name!r:.80}"
        )
    return f"fastrack-public-1:{algorithm}:{base64.b64encode(public).decode()}{' ' if name else ''}{name}"


def parse_public(text: str, source: str) -> tuple[str, bytes, str]:
    """Return the algorithm, the public key and the name in the line of a public file.

    Raises
    ------
    FormatError
        If it has another form.
    """
    match = _PUBLIC.fullmatch(text)
    if match is None:
        hint = "; it holds a secret key, of which the public file is wanted" if "fastrack-secret-1" in text else ""
        raise FormatError(
            f"{source} is not a fastrack public key: expected one line fastrack-public-1:ALGORITHM:KEY{hint}"
        )
    try:
        public = base64.b64decode(match["key"], validate=True)
    except binascii.Error as error:
        raise FormatError(f"{source} is not a fastrack public key: expected base64; {error}") from error
    if base64.b64encode(public).decode() != match["key"]:  # its last character has bits that are not decoded
        raise FormatError(f"{source} is not a fastrack public key: expected base64 in canonical form; get it again")
    return match["algorithm"], public, match["name"] or ""


def load_public(path: str | os.PathLike[str]) -> tuple[str, bytes, str]:
    """Return the algorithm, the public key and the name in a public file.

    Raises
    ------
    FormatError
        If it is not a public file.
    OSError
        If it cannot be read.
    """
    with open_regular(Path(path)) as file:
        content = file.read(_PUBLIC_LIMIT + 1)
    return parse_public(content.decode("ascii", "replace"), str(path))


def save_public(path: str | os.PathLike[str], line: str) -> None:
    """Write a new public file, atomically. No file is ever replaced.

    Raises
    ------
    OSError
        If it exists or cannot be written.
    """
    with new_file(Path(path), overwrite=False) as file:
        file.write(line.encode() + b"\n")


def save_secret(path: str | os.PathLike[str], algorithm: str, key_id: str, secret: bytes | bytearray) -> None:
    """Write a new secret file that only its owner may read, atomically. No file is ever replaced.

    Raises
    ------
    OSError
        If it exists or cannot be written.
    """
    head = f"# fastrack secret key, {algorithm}, id {key_id}\nfastrack-secret-1:{algorithm}:"
    with new_file(Path(path), mode=0o600, overwrite=False) as file:
        file.write(head.encode() + binascii.hexlify(secret) + b"\n")


def load_secret(path: str | os.PathLike[str]) -> tuple[str, str, bytes]:
    """Return the algorithm, the id and the secret in a secret file.

    Raises
    ------
    FormatError
        If it is not a secret file.
    KeyPermissionError
        If others may use it.
    OSError
        If it cannot be read.
    """
    with read_private(path, _SECRET_LIMIT) as content:
        match = _SECRET.fullmatch(content)
        if match is None or match["header"] != match["algorithm"]:
            raise FormatError(f"{path} is not a fastrack secret key file; `fastrack keygen --identity` makes one")
        return match["algorithm"].decode(), match["id"].decode(), binascii.unhexlify(match["secret"])


def load_pair(path: str | os.PathLike[str], readers: Mapping[str, Callable[[bytes], Any]]) -> tuple[str, Any, str]:
    """Return the algorithm, the secret key that the reader of that algorithm makes, and the id in a secret file.

    Raises
    ------
    FormatError
        If it is not a secret file of one of these algorithms, or damaged.
    KeyPermissionError
        If others may use it.
    OSError
        If it cannot be read.
    """
    algorithm, key_id, secret = load_secret(path)
    if algorithm not in readers:
        raise FormatError(f"{path}: expected a secret key of {' or '.join(readers)}, got one of {algorithm:.40}")
    try:
        key = readers[algorithm](secret)
    except ValueError as error:
        raise FormatError(f"{path} is damaged: expected a secret of {algorithm}; restore it from a copy") from error
    return algorithm, key, key_id


def check_id(path: str | os.PathLike[str], key_id: str, expected: str) -> None:
    """Refuse a secret file whose key has another id than its first line says.

    Raises
    ------
    FormatError
        If they differ.
    """
    if key_id != expected:
        raise FormatError(f"{path} was damaged: its key does not have its id; restore it from a copy")
