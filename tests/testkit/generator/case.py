"""The form of a case, and the values that all of them are made of."""

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

CLASSES = ("format", "unknown-key", "authentication", "signature", "rollback", "grant", "attestation")

Fields = Iterable[tuple[str, str]]
Rules = dict[str, tuple[str, str]]
"""From the name of a rule, without its kind, to the section of the page and a sentence."""


@dataclass(frozen=True, slots=True)
class Case:
    """Hold one case, as the README describes it."""

    kind: str
    name: str
    rule: str
    expect: str
    payload: bytes
    fields: tuple[tuple[str, str], ...]
    result: object
    comment: str

    def encode(self) -> bytes:
        """Return the file."""
        lines = [("kit", "1"), ("kind", self.kind), ("rule", self.rule), ("expect", self.expect)]
        if self.expect == "success":
            lines.append(("result", canonical(self.result).decode()))
        lines.append(("sha256", sha256(self.payload)))
        if self.comment:
            lines.append(("comment", self.comment))
        lines += self.fields
        if any("\n" in value for _, value in lines):
            raise ValueError(f"a line of {self.kind}/{self.name} has a newline")
        return "".join(f"{name}: {value}\n" for name, value in lines).encode() + b"\n" + self.payload


@dataclass(slots=True)
class Cases:
    """Collect the cases of one kind, each under one of its rules."""

    kind: str
    rules: Rules
    all: list[Case] = field(default_factory=list)

    def opens(
        self, name: str, rule: str, payload: bytes, result: object, fields: Fields = (), comment: str = ""
    ) -> None:
        """Add a case that a reader opens, and what it reads."""
        self._add(name, rule, "success", payload, fields, result, comment)

    def fails(self, name: str, rule: str, expect: str, payload: bytes, fields: Fields = (), comment: str = "") -> None:
        """Add a case that a reader refuses, and the class of its failure."""
        if expect not in CLASSES:
            raise ValueError(f"{expect} is no class of failures")
        self._add(name, rule, expect, payload, fields, None, comment)

    def _add(
        self, name: str, rule: str, expect: str, payload: bytes, fields: Fields, result: object, comment: str
    ) -> None:
        if rule not in self.rules:
            raise ValueError(f"{self.kind} has no rule {rule}")
        if any(case.name == name for case in self.all):
            raise ValueError(f"{self.kind}/{name} is there already")
        self.all.append(Case(self.kind, name, f"{self.kind}.{rule}", expect, payload, tuple(fields), result, comment))


def joined(files: dict[str, bytes]) -> tuple[list[tuple[str, str]], bytes]:
    """Return the lines and the payload of several files."""
    lines = [("file", f"{len(data)} {name}") for name, data in files.items()]
    return lines, b"".join(files.values())


def draw(label: str, size: int) -> bytes:
    """Return bytes that look random and are always the same: SHAKE-256 of a label."""
    return hashlib.shake_256(b"fastrack-testkit " + label.encode()).digest(size)


def flip(data: bytes, index: int, bit: int = 1) -> bytes:
    """Return the bytes with one bit of one of them changed."""
    index %= len(data)
    return data[:index] + bytes([data[index] ^ bit]) + data[index + 1 :]


def sha256(data: bytes) -> str:
    """Return the digest in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: object) -> bytes:
    """Return canonical JSON: ASCII only, sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def base64_text(data: bytes) -> str:
    """Return canonical base64."""
    return base64.b64encode(data).decode("ascii")
