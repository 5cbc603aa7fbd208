"""Keys wrapped by a PKCS#11 token: a smart card, a hardware security module, or SoftHSM."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote_from_bytes, unquote_to_bytes

from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicNumbers
from cryptography.hazmat.primitives.hashes import SHA1, SHA256

from fastrack._keys.keys import read_private
from fastrack._keys.wrapped import KeyWrapper, WrappedKey, import_client, require_algorithm, require_parameters
from fastrack._util.fork import per_process
from fastrack.errors import FormatError, ProviderError

MODULE_VARIABLE = "FASTRACK_PKCS11_MODULE"
PIN_VARIABLE = "FASTRACK_PKCS11_PIN"
TRY_VARIABLE = "FASTRACK_PKCS11_TRY"

_AES = "AES-KW"
_RSA_SHA256 = "RSA-OAEP-SHA256"
_RSA_SHA1 = "RSA-OAEP-SHA1"
_ALGORITHMS = (_RSA_SHA256, _RSA_SHA1, _AES)
# The attributes of a URI that are of a token, with those of the client's tokens.
_TOKEN = {"token": "label", "serial": "serial", "manufacturer": "manufacturer_id", "model": "model"}
_PATH = (*_TOKEN, "object", "id", "type")
_QUERY = ("module-path", "pin-source", "x-algorithm")
_TYPES = {"private": "RSA", "secret-key": "AES"}
_TEXT = re.compile(r"[!-~]{1,2048}")
_PIN_LIMIT = 256
_LEAST_MODULUS = 2048
_REASONS = {
    "MechanismInvalid": "the token does not support this algorithm",
    "MechanismParamInvalid": "the token does not support this hash function",
    "ArgumentsBad": "the token does not support this hash function",
    "PinIncorrect": "the PIN is wrong, and is not sent again; each attempt may count towards locking the token",
    "PinInvalid": "the PIN has characters that the token does not take",
    "PinLenRange": "the PIN is too short or too long",
    "PinLocked": "the PIN is locked after too many attempts",
    "PinExpired": "the PIN has expired",
    "UserPinNotInitialized": "the token has no user PIN yet",
    "UserNotLoggedIn": f"the token wants a PIN: name its file by pin-source, or set {PIN_VARIABLE}",
    "EncryptedDataInvalid": "the file was altered, or another key encrypted it; restore it from a copy",
    "EncryptedDataLenRange": "another key encrypted this file",
    "WrappedKeyInvalid": "the file was altered, or another key encrypted it; restore it from a copy",
    "WrappedKeyLenRange": "another key encrypted this file",
    "GeneralError": "the token gives no reason; the file may have been altered",
    "KeyFunctionNotPermitted": "the key on the token may not be used for this",
    "TemplateInconsistent": "the token keeps unwrapped keys to itself; use an RSA key, which decrypts",
    "AttributeSensitive": "the token keeps unwrapped keys to itself; use an RSA key, which decrypts",
    "TokenNotPresent": "the token was removed",
    "DeviceRemoved": "the token was removed",
}
_ASK = f"check the PIN, then log in with another tool, or for one run with {TRY_VARIABLE}"
_REFUSALS = {"PinIncorrect", "PinInvalid", "PinLenRange", "PinLocked", "PinExpired", "UserNotLoggedIn"}
_loaded: dict[str, int] = {}  # by the names of libraries, the process that initialised them
_lock = per_process(sys.modules[__name__], "_lock", threading.RLock)  # under which a login takes place


class Pkcs11(KeyWrapper):
    """A key on a PKCS#11 token, by the client python-pkcs11.

    An RSA key encrypts by RSA-OAEP; only decryption takes place on the token. An AES key wraps by RFC 3394, on the
    token. The user PIN comes from a file (`pin-source`) that only its owner may read, or from the environment variable
    ``FASTRACK_PKCS11_PIN``. Python's text cannot be overwritten, so the PIN stays in the memory of the process.

    A refused PIN is not sent again by this process and its forks. To a token that counts a wrong PIN since the last
    login, by *count low* or *final try*, none is sent unless ``FASTRACK_PKCS11_TRY`` is ``low`` or ``final``.

    Parameters
    ----------
    uri : str
        A URI (RFC 7512) with ``token`` or ``serial``, ``object`` or ``id``, and perhaps ``manufacturer``, ``model``
        and ``type``. In its query, ``module-path`` is the library of the token, by default the value of
        ``FASTRACK_PKCS11_MODULE``; ``pin-source`` is the file with the PIN; ``x-algorithm`` is the algorithm of an RSA
        key: by default "RSA-OAEP-SHA256", or "RSA-OAEP-SHA1" for tokens such as SoftHSM 2.6.

    Raises
    ------
    ValueError
        If it is no such URI, or contains a PIN. The message does not repeat it.

    Examples
    --------
    >>> from fastrack.providers import Pkcs11
    >>> Pkcs11("pkcs11:token=vault;object=owner?module-path=/usr/lib/softhsm/libsofthsm2.so")
    <Pkcs11 pkcs11:token=vault;object=owner>
    """

    provider: ClassVar[str] = "pkcs11"

    def __init__(self, uri: str) -> None:
        self._path, query = _parse(uri)
        self._module = query.get("module-path", "")
        self._pin_source = query.get("pin-source", "")
        self._algorithm = query.get("x-algorithm", "")
        if self._algorithm and self._algorithm not in _ALGORITHMS:
            raise ValueError(f"expected x-algorithm in a PKCS#11 URI to be {' or '.join(_ALGORITHMS)}, got another")
        if self._pin_source:
            self._pin_source = _pin_path(self._pin_source)

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Make a wrapper from a PKCS#11 URI."""
        return cls(uri)

    @classmethod
    def from_wrapped(cls, wrapped: WrappedKey) -> Self:
        """Make a wrapper from the parameters of a file and the environment. A file may name no library and no PIN."""
        uri = require_parameters(wrapped, frozenset({"uri"}))["uri"]
        try:
            if "?" in uri:
                raise ValueError("expected a PKCS#11 URI without a query, got one with a query")  # noqa: TRY301
            return cls(uri)
        except ValueError as error:
            raise FormatError(f"the wrapped file of key {wrapped.key_id} is wrong: {error}; restore it") from None

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        pkcs11 = import_client("pkcs11", "pkcs11")
        with self._open(pkcs11) as session:
            key, kind = self._find(pkcs11, session)
            if kind == "AES":
                algorithm, ciphertext = _AES, _wrap(pkcs11, session, key, secret)
            else:
                algorithm, ciphertext = self._algorithm or _RSA_SHA256, b""
                modulus, exponent = (key[getattr(pkcs11.Attribute, name)] for name in ("MODULUS", "PUBLIC_EXPONENT"))
        if self._algorithm not in {"", algorithm} or (algorithm == _AES) != (kind == "AES"):
            raise ProviderError(f"wrapping by {self!r} failed: {self._algorithm} needs another type of key than {kind}")
        if kind == "RSA":
            public = RSAPublicNumbers(int.from_bytes(exponent, "big"), int.from_bytes(modulus, "big")).public_key()
            if public.key_size < _LEAST_MODULUS:
                raise ProviderError(
                    f"wrapping by {self!r} failed: expected an RSA key of at least {_LEAST_MODULUS} bits, got "
                    f"{public.key_size}. Make a larger one"
                )
            hash_function = SHA1() if algorithm == _RSA_SHA1 else SHA256()  # noqa: S303 - OAEP needs no collision resistance
            ciphertext = public.encrypt(bytes(secret), OAEP(MGF1(hash_function), hash_function, None))
        return algorithm, ciphertext, {"uri": _format(self._path)}

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        algorithm = require_algorithm(wrapped, *_ALGORITHMS)
        pkcs11 = import_client("pkcs11", "pkcs11")
        with self._open(pkcs11) as session:
            key, kind = self._find(pkcs11, session)
            if (algorithm == _AES) != (kind == "AES"):
                raise ProviderError(
                    f"unwrapping key {wrapped.key_id} by {self!r} failed: {algorithm} needs another type of key than "
                    f"{kind}. Check the name of the key"
                )
            if algorithm == _AES:
                return _unwrap(pkcs11, key, wrapped.ciphertext)
            name = "SHA_1" if algorithm == _RSA_SHA1 else "SHA256"
            hash_function, mask = getattr(pkcs11.Mechanism, name), getattr(pkcs11.MGF, name.replace("_", ""))
            try:
                secret: bytes = key.decrypt(
                    wrapped.ciphertext,
                    mechanism=pkcs11.Mechanism.RSA_PKCS_OAEP,
                    mechanism_param=(hash_function, mask, None),
                )
            except (pkcs11.ArgumentsBad, pkcs11.MechanismParamInvalid, pkcs11.MechanismInvalid) as error:
                if algorithm == _RSA_SHA1:
                    raise
                raise ProviderError(
                    f"unwrapping key {wrapped.key_id} by {self!r} failed: {type(error).__name__}, the token does not "
                    f"support {algorithm}. Wrap a key with x-algorithm={_RSA_SHA1} in the query of the URI, or by AES"
                ) from None
            return secret

    @contextlib.contextmanager
    def _open(self, pkcs11: Any) -> Iterator[Any]:
        """Yield a session with the token, after login. A login is process-wide, so only one session runs at a time."""
        with _lock:
            try:
                with self._log_in(pkcs11, self._find_token(pkcs11)) as session:
                    yield session
            except RuntimeError as error:  # such as PKCS11Error
                name = type(error).__name__
                reason = _REASONS.get(name, "look the name of the error up in the manual of the token")
                raise self._failure(f"{name}, {reason}", refusal=name in _REFUSALS) from None

    def _find_token(self, pkcs11: Any) -> Any:
        name = self._module or os.environ.get(MODULE_VARIABLE, "")
        if not name:
            raise ProviderError(
                f"opening {self!r} failed: expected the library of the token, got none. Set {MODULE_VARIABLE}, or add "
                "module-path to the query of the URI; p11-kit-proxy.so has all tokens that the system knows"
            )
        library = _load(pkcs11, name)
        wanted = {_TOKEN[attribute]: value for attribute, value in self._path.items() if attribute in _TOKEN}
        tokens = []
        for slot in library.get_slots(token_present=True):
            with contextlib.suppress(pkcs11.TokenNotRecognised, pkcs11.TokenNotPresent):
                token = slot.get_token()
                if all(_to_bytes(getattr(token, attribute)) == value for attribute, value in wanted.items()):
                    tokens.append(token)
        if len(tokens) != 1:
            raise ProviderError(
                f"opening {self!r} failed: expected one such token, got {len(tokens)}. Check that it is plugged in, "
                "and its token= or serial="
            )
        return tokens[0]

    def _log_in(self, pkcs11: Any, token: Any) -> Any:
        pin = self._read_pin()
        if pin is None:
            protected = pkcs11.TokenFlag.PROTECTED_AUTHENTICATION_PATH in token.flags  # a keypad on the device
            return token.open(user_pin=pkcs11.PROTECTED_AUTH if protected else None)
        sent = (*map(repr, (token.manufacturer_id, token.model, token.serial, token.label)), pin)
        with _one_process():  # so that the next one sees that this PIN was wrong
            if self._was_refused(*sent):
                raise self._failure("this PIN was refused before, and is not sent again; correct it", refusal=True)
            flag, flags, asked = pkcs11.TokenFlag, token.slot.get_token().flags, os.environ.get(TRY_VARIABLE)
            if flag.USER_PIN_FINAL_TRY in flags and asked != "final":
                raise self._failure(f"a wrong PIN would lock the token, so none was sent; {_ASK}=final", refusal=True)
            if flag.USER_PIN_COUNT_LOW in flags and asked not in {"low", "final"}:
                raise self._failure(f"the token counts a wrong PIN, so none was sent; {_ASK}=low", refusal=True)
            try:
                return token.open(user_pin=pin)
            except pkcs11.UserAlreadyLoggedIn:  # another part of this process logged in
                return token.open()
            except RuntimeError as error:
                if type(error).__name__ in _REFUSALS:
                    self._note_refusal(*sent)
                raise

    def _read_pin(self) -> str | None:
        if not self._pin_source:
            return os.environ.get(PIN_VARIABLE, "").removeprefix("\ufeff").rstrip("\r\n") or None
        with read_private(self._pin_source, _PIN_LIMIT) as content:
            try:
                pin = content.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError:
                pin = ""
        if not pin.isprintable() or not 0 < len(pin) < _PIN_LIMIT:  # UTF-16, say, which would count as a wrong PIN
            raise ProviderError(
                f"{self._pin_source}: expected a PIN in UTF-8 of less than {_PIN_LIMIT} bytes, got none; write it there"
            )
        return pin

    def _find(self, pkcs11: Any, session: Any) -> tuple[Any, str]:
        """Return the key on the token, and its type."""
        attribute, classes = pkcs11.Attribute, pkcs11.ObjectClass
        template: dict[Any, Any] = {}
        if "object" in self._path:
            template[attribute.LABEL] = self._path["object"].decode("utf-8", "replace")
        if "id" in self._path:
            template[attribute.ID] = self._path["id"]
        kind = _TYPES.get(self._path.get("type", b"").decode())
        keys = []
        if kind != "AES":
            of_type = {attribute.CLASS: classes.PRIVATE_KEY, attribute.KEY_TYPE: pkcs11.KeyType.RSA}
            keys += [(key, "RSA") for key in session.get_objects(template | of_type)]
        if kind != "RSA":
            of_type = {attribute.CLASS: classes.SECRET_KEY, attribute.KEY_TYPE: pkcs11.KeyType.AES}
            keys += [(key, "AES") for key in session.get_objects(template | of_type)]
        if len(keys) != 1:
            has_pin = self._pin_source or os.environ.get(PIN_VARIABLE)
            hint = "" if has_pin else f". No PIN was given: name its file by pin-source, or set {PIN_VARIABLE}"
            raise ProviderError(
                f"opening {self!r} failed: expected one RSA or AES key of that name on the token, got {len(keys)}; "
                f"check object=, id= and type={hint}"
            )
        return keys[0]

    def __repr__(self) -> str:
        return f"<Pkcs11 {_format(self._path)}>"


def _load(pkcs11: Any, name: str) -> Any:
    try:
        library = pkcs11.lib(name)
        if _loaded.setdefault(name, os.getpid()) != os.getpid():  # the parent initialised it
            library.reinitialize()
            _loaded[name] = os.getpid()
    except (RuntimeError, OSError) as error:
        raise ProviderError(
            f"loading the PKCS#11 library {name} failed: {type(error).__name__}. Check the path, and the library's own "
            "configuration"
        ) from None
    return library


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Run a block in one process of this user at a time, if there is a folder for temporary files."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path = Path(tempfile.gettempdir(), f"fastrack-{os.getuid()}-pkcs11.lock")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid():  # the file of another user might be locked for ever
                fcntl.lockf(descriptor, fcntl.LOCK_EX)  # as no fork inherits
        yield


def _passing(pkcs11: Any) -> dict[Any, bool]:
    """Return the attributes of a temporary key, which is on the token only during a wrap or unwrap."""
    attribute = pkcs11.Attribute
    return {attribute.TOKEN: False, attribute.SENSITIVE: False, attribute.EXTRACTABLE: True}


def _wrap(pkcs11: Any, session: Any, key: Any, secret: memoryview) -> bytes:
    attribute = pkcs11.Attribute
    made = session.create_object(
        {
            **_passing(pkcs11),
            attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY,
            attribute.KEY_TYPE: pkcs11.KeyType.AES,
            attribute.VALUE: bytes(secret),
        }
    )
    try:
        ciphertext: bytes = key.wrap_key(made, mechanism=pkcs11.Mechanism.AES_KEY_WRAP)
    finally:
        made.destroy()
    return ciphertext


def _unwrap(pkcs11: Any, key: Any, ciphertext: bytes) -> bytes:
    made = key.unwrap_key(
        pkcs11.ObjectClass.SECRET_KEY,
        pkcs11.KeyType.AES,
        ciphertext,
        mechanism=pkcs11.Mechanism.AES_KEY_WRAP,
        template=_passing(pkcs11),
    )
    try:
        secret: bytes = made[pkcs11.Attribute.VALUE]
    finally:
        made.destroy()
    return secret


def _parse(uri: str) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the attributes of the path and of the query of a PKCS#11 URI."""
    path_text, _, query_text = uri.removeprefix("pkcs11:").partition("?")
    if not uri.startswith("pkcs11:") or _TEXT.fullmatch(uri) is None or "#" in uri:  # which would begin a fragment
        raise ValueError("expected a PKCS#11 URI of printable ASCII, such as pkcs11:token=T;object=O, got another text")
    if "pin-value" in uri:
        raise ValueError(
            "expected a PKCS#11 URI without a PIN, got pin-value, which others can read on a command line and in a "
            f"configuration. Write the PIN to a file of mode 0600 and name that by pin-source, or set {PIN_VARIABLE}; "
            "change the PIN if others may have seen it"
        )
    path = _attributes(path_text, ";", _PATH)
    query = {name: os.fsdecode(value) for name, value in _attributes(query_text, "&", _QUERY).items()}
    if not path.keys() & {"token", "serial"} or not path.keys() & {"object", "id"}:
        raise ValueError("expected a PKCS#11 URI with token= or serial=, and object= or id=, got one without")
    if path.get("type", b"private").decode("ascii", "replace") not in _TYPES:
        raise ValueError("expected type= of a PKCS#11 URI to be private or secret-key, got another")
    return path, query


def _attributes(text: str, separator: str, known: tuple[str, ...]) -> dict[str, bytes]:
    attributes: dict[str, bytes] = {}
    for part in filter(None, text.split(separator)):
        name, equals, value = part.partition("=")
        if not equals or not value or name not in known or name in attributes:
            raise ValueError(f"expected each of {', '.join(known)} once at most in a PKCS#11 URI, got others")
        attributes[name] = unquote_to_bytes(value)
    return attributes


def _format(path: dict[str, bytes]) -> str:
    safe = "-._~!$'()*+,:@&="  # characters that RFC 7512 allows in values
    parts = (f"{name}={quote_from_bytes(path[name], safe)}" for name in _PATH if name in path)
    return f"pkcs11:{';'.join(parts)}"


def _pin_path(source: str) -> str:
    path = source.removeprefix("file:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not Path(path).is_absolute():
        raise ValueError("expected pin-source of a PKCS#11 URI to be file: and an absolute path, got another text")
    return path


def _to_bytes(value: str | bytes) -> bytes:
    return (value.encode() if isinstance(value, str) else value).rstrip(b" \0")
