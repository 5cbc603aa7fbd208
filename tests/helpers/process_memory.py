"""Searches the memory of another process for secrets. Linux only."""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_SPECIAL = ("[vvar]", "[vvar_vclock]", "[vsyscall]")


def find_in_process(pid, needles):
    """Return `{(name, region)}` of the needles in the writable memory of a process: in its stack, heap or other."""
    found = set()
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            name = fields[5] if len(fields) > 5 else ""
            if not fields[1].startswith("rw") or name in _SPECIAL:
                continue
            start, stop = (int(part, 16) for part in fields[0].split("-"))
            try:
                memory.seek(start)
                data = memory.read(stop - start)
            except (OSError, ValueError):
                continue
            region = re.sub(r"^(?!stack|heap).*", "other", name.strip("[]"))
            found |= {(needle, region) for needle, value in needles.items() if value in data}
    return found


def round_keys(key):
    """Return the round keys of FIPS 197, section 5.2, by the S-box of its section 5.1.1."""
    words = [key[i : i + 4] for i in range(0, len(key), 4)]
    count, constant = len(words), 1
    for index in range(count, 4 * (count + 7)):
        last = words[-1]
        if index % count == 0:
            last = bytes(_S_BOX[byte] for byte in last[1:] + last[:1])
            last = bytes([last[0] ^ constant]) + last[1:]
            constant = constant << 1 ^ (0x11B if constant & 0x80 else 0)
        elif count > 6 and index % count == 4:
            last = bytes(_S_BOX[byte] for byte in last)
        words.append(bytes(left ^ right for left, right in zip(words[-count], last, strict=True)))
    return [b"".join(words[start : start + 4]) for start in range(0, len(words), 4)]


def hash_key(key):
    """Return the hash key H of GCM (SP 800-38D, section 7.1)."""
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16))


def _make_s_box():
    box, p, q = [0x63] * 256, 1, 1
    while True:
        p ^= p << 1 & 0xFF ^ (0x1B if p & 0x80 else 0)
        for shift in (1, 2, 4):
            q = (q ^ q << shift) & 0xFF
        q ^= 0x09 if q & 0x80 else 0
        rotated = (q << shift | q >> 8 - shift for shift in range(1, 5))
        value = q ^ 0x63
        for turn in rotated:
            value ^= turn & 0xFF
        box[p] = value
        if p == 1:
            return box


_S_BOX = _make_s_box()
