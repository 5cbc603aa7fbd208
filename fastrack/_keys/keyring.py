"""Find keys by their ids: in memory, in key files and folders, and at key providers.

Functions that open take a source of keys as ``keys=``, and functions that seal take one key as ``key=``. Both fall back
to the default of `use_keys`, then to the source in the environment variable ``FASTRACK_KEY_FILE``.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, Union, runtime_checkable

from fastrack._keys.keys import Key, key_file_id
from fastrack._util.fork import per_process
from fastrack._util.key_text import looks_secret
from fastrack._util.public import public
from fastrack._util.registry import KEY_SOURCES, WRAPPED, find
from fastrack.errors import UnknownKeyError

KEY_FILE_VARIABLE = "FASTRACK_KEY_FILE"
"""The environment variable with the source of keys, used without ``keys=`` and without `use_keys`."""

ENTRY_POINTS = "fastrack.key_providers"
"""The group of entry points that make key providers from texts like ``scheme:rest``, by scheme."""

CACHE_SIZE = 64
"""The number of provider keys in the cache of a ring."""

CACHE_SECONDS = 300.0
"""The seconds that a ring caches the key of a provider."""


@public
@runtime_checkable
class KeyProvider(Protocol):
    """An object that finds keys by their ids, such as a client of a vault.

    A provider may also have a method ``get_sealing_key()``, without arguments, which returns the `Key` that seals.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> class Vault:
    ...     def __init__(self, keys):
    ...         self._keys = {key.id: key for key in keys}
    ...
    ...     def get_key(self, key_id):
    ...         return self._keys[key_id]
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.ones(2), key)
    >>> fastrack.unseal(sealed, keys=Vault([key]), framework="numpy")
    array([1., 1.])
    """

    def get_key(self, key_id: str) -> Key:
        """Return the key with this id.

        Raise LookupError if the provider has no such key. The ring then asks the next source.
        """
        ...


KeySource: TypeAlias = Union[
    Key, KeyProvider, Callable[[str], Key | None], Mapping[str, Key], str, os.PathLike[str], "Iterable[KeySource]"
]
"""The type of ``keys=``.

A key; a provider, a function or a mapping that finds keys by id; the path of a key file or of a folder of key
files; ``-`` for standard input; ``fd:N`` for a file descriptor; ``scheme:rest`` for a provider by its scheme, such as
``kbs:///models/key/owner``; or an iterable of these.
"""
KeyLike: TypeAlias = Key | KeyProvider | str | os.PathLike[str]
"""The type of ``key=``: a key, or a source of keys that knows which key seals."""


@public
class KeyRing:
    """An ordered collection of sources of keys, searched by the ids in sealed tensors. The first key seals.

    The ring holds keys, and the keys of key files, for its whole life. It caches up to 64 keys of providers and folders
    for `ttl` seconds, and drops expired keys at the next look-up. The secret of a dropped key is overwritten after its
    last use. Several threads may use a ring; only one of them calls a provider at a time.

    Parameters
    ----------
    keys : KeySource
        A key; a `KeyProvider`, or a function or mapping from an id to a key or None; the path of a key file or of a
        key folder; ``"-"``, ``"fd:3"`` or ``"scheme:rest"``; a ring; or any iterable of these. Duplicates are
        dropped.
    ttl : float
        The seconds that the key of a provider is cached.

    Raises
    ------
    FormatError, KeyPermissionError, OSError
        If `Key.load` cannot load a key file.
    TypeError
        If `keys` contains anything else.

    Examples
    --------
    >>> import fastrack
    >>> first, second = fastrack.Key.generate(), fastrack.Key.generate(bits=128)
    >>> ring = fastrack.KeyRing([first, second])
    >>> ring[second.id] == second
    True
    >>> ring.first == first
    True
    >>> len(ring)
    2
    >>> fastrack.KeyRing({first.id: first}.get)[first.id] == first
    True
    """

    __slots__ = ("_keys", "_providers")

    def __init__(self, keys: KeySource = (), *, ttl: float = CACHE_SECONDS) -> None:
        self._keys: dict[str, Key] = {}
        self._providers: _Providers | None = None  # set first: a traceback may show the ring
        providers = []
        for source in _flatten(keys):
            if not isinstance(source, Key):
                providers.append(source)
            elif source.id not in self._keys or self._keys[source.id].is_wiped:
                self._keys[source.id] = source
        self._providers = _Providers(providers, ttl) if providers else None

    @classmethod
    def resolve(cls, keys: KeySource | None = None) -> KeyRing:
        """Return the ring of a ``keys=`` argument, falling back to `use_keys`, then to ``FASTRACK_KEY_FILE``.

        Raise UnknownKeyError without any source of keys, and FormatError, KeyPermissionError, OSError or TypeError from
        `KeyRing`.
        """
        if isinstance(keys, KeyRing):
            return keys
        if isinstance(keys, Key):  # each call that opens a small tensor makes a ring of one key
            ring = cls.__new__(cls)
            ring._keys, ring._providers = {keys.id: keys}, None  # noqa: SLF001 - its own
            return ring
        if keys is not None:
            return cls(keys)
        default = cls.default()
        if default is not None:
            return default
        source = os.environ.get(KEY_FILE_VARIABLE)
        if not source:
            raise UnknownKeyError(
                "no key was given: pass keys= (a Key, the path of a key file, a key provider), "
                f"call fastrack.use_keys, or set {KEY_FILE_VARIABLE}"
            )
        try:
            return cls(source)
        except Exception as error:
            error.add_note(f"it came from {KEY_FILE_VARIABLE}")
            raise

    @staticmethod
    def default() -> KeyRing | None:
        """Return the ring of `use_keys`. Not public."""
        default = _of_block.get() or _settled_default()
        return None if default is None else default.ring

    @property
    def first(self) -> Key:
        """The key that seals: the first key of the ring, else the sealing key of the first provider with one.

        Raise UnknownKeyError if there is no such key.
        """
        for key in self:
            return key
        if self._providers is not None:
            return self._providers.get_sealing_key()
        raise UnknownKeyError("expected a key to seal with, got an empty key ring")

    def get_key(self, key_id: str) -> Key:
        """Return the key with this id, like ``ring[key_id]``. A ring is itself a `KeyProvider`."""
        return self[key_id]

    def get_sealing_key(self) -> Key:
        """Return the key that seals: `first`."""
        return self.first

    def __getitem__(self, key_id: str) -> Key:
        if key_id in self._keys:
            return self._keys[key_id]
        own_ids = ", ".join(self._keys)
        if self._providers is None:
            raise UnknownKeyError(
                f"key {key_id} is needed but was not given (given: {own_ids or 'none'}); add it to keys="
            )
        return self._providers.get(key_id, own_ids)

    def __contains__(self, key: object) -> bool:
        """Return whether the ring holds this key, or a key with this id. Providers are not asked."""
        if isinstance(key, Key):
            return self._keys.get(key.id) == key
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        parts = [*self._keys, *([] if self._providers is None else self._providers.names)]
        return f"<KeyRing {', '.join(parts) or 'empty'}>"


class _Providers:
    """The providers of a ring, and a cache of their keys."""

    def __init__(self, providers: list[Any], ttl: float) -> None:
        self.names = [_name(provider) for provider in providers]
        self._providers = providers
        self._ttl = ttl
        self._cache: OrderedDict[str, tuple[Key, float]] = OrderedDict()  # the oldest first
        # Reentrant: a provider may open files sealed under other keys.
        self._lock = per_process(self, "_lock", threading.RLock)

    def get(self, key_id: str, given: str) -> Key:
        with self._lock:
            now = time.monotonic()
            while self._cache and next(iter(self._cache.values()))[1] <= now:
                self._cache.popitem(last=False)
            key = self._cache[key_id][0] if key_id in self._cache else None
            if key is not None and not key.is_wiped:
                return key
            key = self._ask(key_id, given)
            self._cache.pop(key_id, None)
            self._cache[key_id] = key, time.monotonic() + self._ttl
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
            return key

    def _ask(self, key_id: str, given: str) -> Key:
        reason: LookupError | None = None
        for provider, name in zip(self._providers, self.names, strict=True):
            try:
                key = _ask(provider)(key_id)
            except LookupError as error:
                reason = error
                continue
            except Exception as error:
                if not getattr(error, "is_refusal", False):  # which names whom it asked
                    error.add_note(f"the key provider {name} was asked for key {key_id}")
                raise
            if key is not None:
                return _checked(key, key_id, name)
        if isinstance(reason, UnknownKeyError) and not given and len(self.names) == 1:
            raise reason
        asked = ", ".join([*filter(None, [given]), *self.names])
        raise UnknownKeyError(f"key {key_id} is needed but was not found (asked: {asked}); add it to keys=") from reason

    def get_sealing_key(self) -> Key:
        for provider, name in zip(self._providers, self.names, strict=True):
            get_sealing_key = getattr(provider, "get_sealing_key", None)
            if get_sealing_key is not None:
                return _checked(get_sealing_key(), None, name)
        raise UnknownKeyError(
            "expected a key to seal with, got key providers without get_sealing_key() "
            f"({', '.join(self.names)}); pass key="
        )


def sealing_key(key: KeyLike | None = None) -> Key:
    """Return the key of a ``key=`` argument: the key itself, or the sealing key of its source.

    Raise TypeError if `key` is no key and no source of keys. Raise UnknownKeyError if the source has no sealing key, or
    there is no source. Raise FormatError, KeyPermissionError or OSError from `KeyRing`.
    """
    if isinstance(key, Key):
        return key
    try:
        return KeyRing.resolve(key).first
    except (TypeError, UnknownKeyError) as error:
        error.args = (str(error).replace("keys=", "key="),)  # as functions that seal name it
        raise


@dataclass(slots=True, eq=False)
class _Default:
    """The default set by one call of `use_keys`. While `owner` lives, its thread may be about to begin a block."""

    ring: KeyRing | None
    owner: Callable[[], use_keys | None]
    thread: int
    is_settled: bool = False  # True if the owner lives on without a block


@public
class use_keys:  # noqa: N801 - called like a function, such as torch.no_grad
    """Set the default for ``keys=`` and ``key=``, or use it as a context manager for one block.

    A plain call sets the default of the whole process, with all its threads and loaders. Forked workers inherit it,
    spawned workers do not. A ``with`` statement sets the keys for its block only: for its thread or task, for loaders
    of `wrap` that begin there and for workers that are forked there. The keys of a block take precedence over the
    default of the process, and the default over the environment variable ``FASTRACK_KEY_FILE``. Calls without key
    arguments use them, such as ``batch.to(device)`` in the trainers of Lightning, Transformers and Accelerate.

    Parameters
    ----------
    keys : KeySource or None
        The argument of `KeyRing`. None removes the default.
    ttl : float
        The seconds that the key of a provider is cached.

    Raises
    ------
    FormatError, KeyPermissionError, OSError, TypeError
        If `KeyRing` raises it. The default is not changed.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> def ask_vault(key_id):
    ...     return key if key_id == key.id else None
    >>> sealed = fastrack.seal(np.ones(2), key)
    >>> with fastrack.use_keys(ask_vault):
    ...     fastrack.unseal(sealed, framework="numpy")
    array([1., 1.])
    """

    def __init__(self, keys: KeySource | None, *, ttl: float = CACHE_SECONDS) -> None:
        global _default
        ring = keys if keys is None or isinstance(keys, KeyRing) else KeyRing(keys, ttl=ttl)
        self._own = _Default(ring, weakref.ref(self), threading.get_ident())
        self._tokens: list[Token[_Default | None]] = []
        with _lock:
            self._before, _default = _default, self._own
            _callers.add(self)

    def __enter__(self) -> Self:
        global _default  # noqa: PLW0603
        with _lock:  # undo the default of the call, also below later defaults of other threads
            if _default is self._own:
                _default = self._before
            for other in _callers:
                if other._before is self._own:  # noqa: SLF001 - of the same class
                    other._before = self._before  # noqa: SLF001
            _callers.discard(self)
            self._before = None
        self._tokens.append(_of_block.set(self._own))
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # a generator may end the block in another context, without the keys
            _of_block.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"<use_keys {self._own.ring!r}>"


def _settled_default() -> _Default | None:
    """Return the default of the process, without the keys of a ``with`` block that is about to begin elsewhere."""
    deadline = time.monotonic() + _BEGINNING
    while (default := _default) is not None and not default.is_settled and default.owner() is not None:
        if default.thread == threading.get_ident():
            break
        if time.monotonic() > deadline:  # a notebook, for example, keeps the object without a block
            default.is_settled = True
        time.sleep(0.001)
    return default


_BEGINNING = 0.5  # seconds; a block begins microseconds after its keys were given
_of_block: ContextVar[_Default | None] = ContextVar("fastrack keys", default=None)
_default: _Default | None = None
_callers: weakref.WeakSet[use_keys] = weakref.WeakSet()  # calls whose blocks have not begun
_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)


class KeyFolder:
    """A folder of key files, such as a mounted secret. Its files may change while it is in use."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_key(self, key_id: str) -> Key:
        for path in self._key_files():
            if _file_id(path) == key_id:
                return _load(path)
        raise UnknownKeyError(f"{self._path}: expected a key file with key {key_id}, found none; put its file there")

    def get_sealing_key(self) -> Key:
        files = [path for path in self._key_files() if _file_id(path) is not None]
        if len(files) != 1:
            raise UnknownKeyError(
                f"{self._path}: expected one key file to seal with, got {len(files)}; name the file itself"
            )
        return _load(files[0])

    def _key_files(self) -> list[Path]:
        return sorted(path for path in self._path.iterdir() if not path.name.startswith(".") and path.is_file())


_DIGITS = 32  # of a descriptor; more digits are a path, since a huge number takes long to parse
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")


def is_path(source: str | os.PathLike[str]) -> bool:
    """Return whether a source in text form is a path, rather than a descriptor or a provider."""
    return _opener(source) is None


def _open_source(source: str | os.PathLike[str]) -> Key | object:
    """Return the key in a key file, or the provider that a folder or a scheme names."""
    if not os.fspath(source):
        raise TypeError(
            f"keys= takes the path of a key file, got an empty string; omit it to use that in {KEY_FILE_VARIABLE}"
        )
    open_it = _opener(source)
    if open_it is not None:
        return open_it()
    path = Path(source).expanduser()
    if path.suffix in KEY_SOURCES:
        return find(KEY_SOURCES[path.suffix])(path)  # type: ignore[no-any-return]
    if path.is_dir():
        return KeyFolder(path)
    return find(WRAPPED["load"])(path) if is_wrapped(path) else Key.load(path)


def is_wrapped(path: Path) -> bool:
    """Return whether a path names a wrapped key file, by its suffix."""
    return path.suffix == ".wrapped"


def _file_id(path: Path) -> str | None:
    """Return the id of the key in a key file or a wrapped key file, or None if the file is neither."""
    key_id: str | None = find(WRAPPED["id"])(path) if is_wrapped(path) else key_file_id(path)
    return key_id


def _load(path: Path) -> Key:
    key: Key = find(WRAPPED["load"])(path).unwrap() if is_wrapped(path) else Key.load(path)
    return key


def _opener(source: str | os.PathLike[str]) -> Callable[[], Key | object] | None:
    """Return the function that opens a descriptor or a provider, or None for a path or an existing file."""
    if not isinstance(source, str) or os.path.lexists(source) or looks_secret(source):
        return None
    if source == "-":
        return lambda: Key.read(0)
    scheme, colon, rest = source.partition(":")
    if not colon or _SCHEME.fullmatch(scheme) is None:
        return None
    if scheme == "fd" and rest.isdecimal() and len(rest) <= _DIGITS:
        return lambda: Key.read(int(rest))
    make = _find_scheme(scheme)
    return None if make is None else lambda: make(source)


def _find_scheme(scheme: str) -> Callable[[str], object] | None:
    if scheme in KEY_SOURCES:
        return find(KEY_SOURCES[scheme])  # type: ignore[no-any-return]
    from importlib.metadata import entry_points  # deferred: it imports email, which takes some milliseconds

    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        loaded: Callable[[str], object] = entry.load()
        return loaded
    return None


def _flatten(keys: object) -> Iterator[Key | Any]:
    """Yield the keys and the providers of a source, in order."""
    if isinstance(keys, Key):
        yield keys
    elif isinstance(keys, KeyRing):
        yield from keys
        if keys._providers is not None or type(keys) is not KeyRing:  # noqa: SLF001 - of this module
            yield keys
    elif isinstance(keys, (str, os.PathLike)):
        opened = _open_source(keys)
        yield from _flatten(opened) if isinstance(opened, KeyRing) else (opened,)
    elif isinstance(keys, (bytes, bytearray, memoryview)):
        raise TypeError("keys= takes no bytes: Key.from_bytes() makes a key of them")
    elif type(keys) is dict and any(not isinstance(key, Key) or key.id != name for name, key in keys.items()):
        raise TypeError("keys= takes a mapping from ids to keys, got one from other names. Give a list of the keys")
    elif isinstance(keys, (KeyProvider, Mapping)) or callable(keys):
        yield keys
    elif isinstance(keys, Iterable) and not hasattr(keys, "__array__"):
        for key in keys:
            yield from _flatten(key)
    else:
        raise TypeError(
            "keys= takes a Key, the path of a key file, a key provider, or an iterable of these, got "
            f"{type(keys).__name__}"
        )


def _ask(provider: Any) -> Callable[[str], object]:
    """Return the function of a provider that finds a key by id."""
    if isinstance(provider, KeyProvider):
        return provider.get_key
    return provider.get if isinstance(provider, Mapping) else provider


def _name(provider: object) -> str:
    """Return the name of a provider for messages. Its repr might hold a secret."""
    name = getattr(provider, "__qualname__", None)
    return name if isinstance(name, str) else type(provider).__qualname__


def _checked(key: object, key_id: str | None, name: str) -> Key:
    if not isinstance(key, Key):
        raise TypeError(f"the key provider {name} failed: expected a fastrack.Key, got {type(key).__name__}")
    if key_id is not None and key.id != key_id:
        raise UnknownKeyError(f"the key provider {name} failed: expected key {key_id}, got key {key.id}")
    return key
