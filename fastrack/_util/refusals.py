"""Remember which PINs and tokens were refused, in memory that this process shares with its forks."""

from __future__ import annotations

import hashlib
import mmap
import os

_SIZE = 16  # bytes of a digest
_page = mmap.mmap(-1, 256 * _SIZE)  # a place for each first byte of a digest, so that writers need no lock
_key = os.urandom(_SIZE)


def was_refused(*parts: str) -> bool:
    """Return whether these parts were noted: who was asked, and with what credential."""
    place, digest = _find(parts)
    return _page[place] == digest


def note_refusal(*parts: str) -> None:
    """Note that a credential was refused, as a keyed digest. Of two with one place the later one stays."""
    place, digest = _find(parts)
    _page[place] = digest


def _find(parts: tuple[str, ...]) -> tuple[slice, bytes]:
    digest = hashlib.blake2b("\0".join(parts).encode(), key=_key, digest_size=_SIZE).digest()
    return slice(_SIZE * digest[0], _SIZE * digest[0] + _SIZE), digest
