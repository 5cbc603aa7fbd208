"""A stand-in for the package python-pkcs11, with a token whose state is a file that several processes share.

It has the names of the package that fastrack uses, and behaves as PKCS #11 3.1 (OASIS, 2023) says: C_Login gives
CKR_PIN_INCORRECT for a wrong PIN, and CKR_PIN_LOCKED once no try is left. The flags of CK_TOKEN_INFO are
CKF_USER_PIN_COUNT_LOW after a wrong PIN since the last login, CKF_USER_PIN_FINAL_TRY if another one locks the token,
and CKF_USER_PIN_LOCKED then. The path of the library is that of the file.
"""

import contextlib
import enum
import fcntl
import json
import os
import time
from pathlib import Path

from cryptography.hazmat.primitives.keywrap import aes_key_unwrap, aes_key_wrap

PROTECTED_AUTH = object()
_AES = bytes(range(32))


class PKCS11Error(RuntimeError):
    """As in the package, a RuntimeError."""


_NAMES = "PinIncorrect PinLocked UserAlreadyLoggedIn TokenNotRecognised TokenNotPresent"
PinIncorrect, PinLocked, UserAlreadyLoggedIn, TokenNotRecognised, TokenNotPresent = (
    type(name, (PKCS11Error,), {}) for name in _NAMES.split()
)


class TokenFlag(enum.IntFlag):
    PROTECTED_AUTHENTICATION_PATH = 0x00000100
    USER_PIN_COUNT_LOW = 0x00010000
    USER_PIN_FINAL_TRY = 0x00020000
    USER_PIN_LOCKED = 0x00040000


Attribute = enum.Enum("Attribute", "TOKEN SENSITIVE EXTRACTABLE CLASS KEY_TYPE VALUE LABEL ID")
KeyType = enum.Enum("KeyType", "RSA AES")
ObjectClass = enum.Enum("ObjectClass", "SECRET_KEY PRIVATE_KEY")
Mechanism = enum.Enum("Mechanism", "AES_KEY_WRAP")


def make_token(path, *, pin="482913", tries=3, has_flags=True, seconds=0.0):
    """Write the file of a token; a login takes so many seconds."""
    state = {"pin": pin, "tries": tries, "left": tries, "sent": [], "has_flags": has_flags, "seconds": seconds}
    state["serial"] = os.urandom(8).hex()
    path.write_text(json.dumps(state))
    return path


def read_token(path):
    """Return the state: `sent` has the PIN of each login, `left` is the number of tries."""
    with _opened(path) as (_, state):
        return state


@contextlib.contextmanager
def _opened(path):
    """Yield the file of a token and its state, for one process at a time."""
    with Path(path).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file, json.load(file)


def lib(so):
    return _Library(so)


class _Library:
    def __init__(self, path):
        self.path = path

    def reinitialize(self):
        pass

    def get_slots(self, token_present=False):
        return [_Slot(self.path)]


class _Slot:
    def __init__(self, path):
        self._path = path

    def get_token(self):
        return _Token(self, self._path)


class _Token:
    label, manufacturer_id, model = "vault", "stand-in", "1"

    def __init__(self, slot, path):
        self.slot = slot
        self._path = path
        state = read_token(path)
        self.serial = state["serial"].encode()
        left, has_flags = state["left"], state["has_flags"]
        self.flags = TokenFlag(0)
        if has_flags and left < state["tries"]:
            self.flags |= TokenFlag.USER_PIN_COUNT_LOW
        if has_flags and left < 2:
            self.flags |= TokenFlag.USER_PIN_FINAL_TRY if left else TokenFlag.USER_PIN_LOCKED

    def open(self, rw=False, user_pin=None):
        if user_pin is not None:
            time.sleep(read_token(self._path)["seconds"])
            with _opened(self._path) as (file, state):
                error = self._log_in(state, user_pin)
                file.seek(0)
                file.truncate()
                json.dump(state, file)
            if error is not None:
                raise error
        return _Session()

    def _log_in(self, state, pin):
        state["sent"].append(pin)
        if not state["left"]:
            return PinLocked()
        if pin != state["pin"]:
            state["left"] -= 1
            return PinIncorrect()
        state["left"] = state["tries"]
        return None


class _Session(contextlib.nullcontext):
    def get_objects(self, template):
        return [_Key()] if template[Attribute.CLASS] is ObjectClass.SECRET_KEY else []

    def create_object(self, template):
        return _Object(template)

    def __enter__(self):
        return self


class _Object(dict):
    def destroy(self):
        self.clear()


class _Key:
    def wrap_key(self, key, *, mechanism):
        assert mechanism is Mechanism.AES_KEY_WRAP
        return aes_key_wrap(_AES, key[Attribute.VALUE])

    def unwrap_key(self, kind, of_type, ciphertext, *, mechanism, template):
        assert (kind, of_type, mechanism) == (ObjectClass.SECRET_KEY, KeyType.AES, Mechanism.AES_KEY_WRAP)
        return _Object({**template, Attribute.VALUE: aes_key_unwrap(_AES, ciphertext)})
