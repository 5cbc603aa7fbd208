"""Keys under a passphrase, by Argon2id (RFC 9106) and AES-256-GCM, and where passphrases come from."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from getpass import getpass
from pathlib import Path
from typing import Any, ClassVar, Self

from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._documents.canonical import decode_bytes, encode_bytes, parsing
from fastrack._keys.keys import read_private
from fastrack._keys.recipients import PassphraseParameters, decrypt_with_passphrase, encrypt_to_passphrase
from fastrack._keys.wrapped import KeyWrapper, WrappedKey, require_algorithm, require_parameters
from fastrack._util.fork import per_process
from fastrack.errors import FormatError, GrantError

Passphrases = str | bytes | Callable[[], str | bytes]

VARIABLE = "FASTRACK_PASSPHRASE_FILE"
"""The environment variable with the path of a private file, whose first line is the passphrase."""

_ALGORITHM = "Argon2id-AES-256-GCM"
_COSTS = ("iterations", "lanes", "memory")
_COST = re.compile(r"[1-9]\d{0,6}")
_MOST = 1 << 20  # KiB of memory times iterations: at most 341 MiB, and five times the work of a new file
_LEAST = 12  # characters of a new passphrase
_FILE_LIMIT = 1024
_unlocked: dict[bytes, SecretBytes] = {}  # by the digest of the file, which is another one under another passphrase
_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)


class Passphrase(KeyWrapper):
    """A passphrase. A guess costs 64 MiB of memory and about 0.1 s, so choose a long one.

    It is in no repr and in no pickle: another process asks for it anew.

    Parameters
    ----------
    passphrase : str, bytes or callable, optional
        The passphrase, or a function without arguments that returns it. By default it is the first line of the file
        that ``FASTRACK_PASSPHRASE_FILE`` names, or is asked for at the terminal, once for a file in a process and the
        workers that it forks.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.providers import Passphrase
    >>> key = fastrack.Key.generate()
    >>> wrapped = Passphrase("correct horse battery staple").wrap(key)
    >>> wrapped.unwrap(Passphrase(lambda: "correct horse battery staple")) == key
    True
    """

    provider: ClassVar[str] = "passphrase"

    def __init__(self, passphrase: Passphrases | None = None) -> None:
        self._passphrase = passphrase

    def __reduce__(self) -> Any:
        return type(self), ()

    def __repr__(self) -> str:
        return "<Passphrase>"

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Make a wrapper from ``passphrase:``, without the passphrase, which other users could read."""
        if uri != "passphrase:":
            raise ValueError("expected passphrase: and no more, got more. Write the passphrase into a private file")
        return cls()

    @classmethod
    def from_wrapped(cls, wrapped: WrappedKey) -> Self:
        """Make a wrapper that asks for the passphrase of a file."""
        _read_parameters(wrapped)
        return cls()

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        if self._passphrase is None:
            self._passphrase = new_passphrase()  # kept for the check that it opens
        costs, ciphertext = encrypt_to_passphrase(secret, self._given(self._passphrase), _info(key_id))
        parameters = {name: str(getattr(costs, name)) for name in _COSTS}
        return _ALGORITHM, ciphertext, parameters | {"salt": encode_bytes(costs.salt)}

    def _decrypt(self, wrapped: WrappedKey) -> SecretBytes:
        costs = _read_parameters(wrapped)  # before anything is asked or derived
        if self._passphrase is not None:
            return self._open(wrapped, costs, self._given(self._passphrase))
        digest = hashlib.sha256(wrapped.to_bytes()).digest()
        with _lock:  # so that threads ask once
            if digest not in _unlocked:
                try:
                    given = _read_file() or ask(f"Passphrase of key {wrapped.key_id}: ")
                except ValueError as error:
                    raise self._failure(str(error), refusal=True) from None
                _unlocked[digest] = self._open(wrapped, costs, given)
            return SecretBytes(_unlocked[digest])

    def _given(self, passphrase: Passphrases) -> str | bytes:
        given: Any = passphrase() if callable(passphrase) else passphrase
        if not isinstance(given, (str, bytes)) or not given:
            raise self._failure(f"expected a passphrase as text or bytes, got {type(given).__name__}, or an empty one")
        return given

    def _open(self, wrapped: WrappedKey, costs: PassphraseParameters, given: str | bytes) -> SecretBytes:
        try:
            return decrypt_with_passphrase(wrapped.ciphertext, given, costs, _info(wrapped.key_id))
        except GrantError:
            reason = f"expected the passphrase of key {wrapped.key_id}, got another, or the file was altered; try again"
            raise self._failure(reason, refusal=True) from None


def _info(key_id: str) -> bytes:
    return f"fastrack-key:{key_id}".encode()


def _read_parameters(wrapped: WrappedKey) -> PassphraseParameters:
    require_algorithm(wrapped, _ALGORITHM)
    found = require_parameters(wrapped, frozenset({*_COSTS, "salt"}))
    with parsing(f"the wrapped file of key {wrapped.key_id} is wrong", "restore it"):
        if not all(_COST.fullmatch(found[name]) for name in _COSTS):
            raise FormatError("expected numbers, got others")
        costs = PassphraseParameters(decode_bytes(found["salt"]), *(int(found[name]) for name in _COSTS))
        costs.check(_MOST)
        return costs


def new_passphrase(*, is_change: bool = False) -> str:
    """Return a new passphrase: from the terminal, asked for twice, or a file, which has the old one for a change.

    Raise ValueError if there is none, or a short one.
    """
    passphrase = None if is_change else _read_file()
    if passphrase is None:
        passphrase = ask("New passphrase: ")
        if passphrase != ask("The same again: "):
            raise ValueError("expected the same passphrase twice, got two")
    if len(passphrase) < _LEAST:
        raise ValueError(f"expected a passphrase of {_LEAST} characters or more, got {len(passphrase)}")
    return passphrase


def _read_file() -> str | None:
    """Return the first line of the private file that the environment names, or None if it names none."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    if not os.path.lexists(path):
        raise FormatError(
            f"reading the passphrase failed: expected {VARIABLE} to name a file, got a text that names none, which is "
            "not repeated here. Write the passphrase into a file of mode 0600"
        )
    with read_private(path, _FILE_LIMIT) as content:
        line = re.split(rb"\r?\n", content, maxsplit=1)[0]
    if len(line) > _FILE_LIMIT:  # others with the same beginning would open the key too
        raise FormatError(
            f"{path}: expected a passphrase of up to {_FILE_LIMIT} bytes, got more; shorten its first line"
        )
    with suppress(UnicodeDecodeError):  # of UTF-16, say; the error has the content
        return line.decode("utf-8-sig")
    raise FormatError(f"{path}: expected a passphrase in UTF-8, got other bytes; write it there again")


def ask(prompt: str) -> str:
    """Return what is typed, unseen, at the terminal of the process, even if standard input is redirected.

    Raise ValueError where no answer would come: without a terminal, in the background and in workers.
    """
    workers = sys.modules.get("multiprocessing.process")
    with suppress(OSError, EOFError, UnicodeError), Path("/dev/tty").open() as terminal:
        # Jobs in the background would be stopped, and workers ask at once.
        if os.tcgetpgrp(terminal.fileno()) == os.getpgrp() and (workers is None or not workers.parent_process()):
            return getpass(prompt)
    raise ValueError(
        "expected a terminal to ask for the passphrase on, got none. Write it into a file of mode 0600, and name "
        f"that in {VARIABLE}"
    )
