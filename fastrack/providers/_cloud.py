"""The base class of the wrappers that call a key management service through a vendor's client."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any, ClassVar, Self

from fastrack._documents.canonical import parsing
from fastrack._keys.wrapped import KeyWrapper, WrappedKey, require_parameters
from fastrack._util.shown import shown


class CloudKey(KeyWrapper):
    """A key of a service, by its name, with a client that is made on first use."""

    _pattern: ClassVar[re.Pattern[str]]
    _wanted: ClassVar[str]
    """The form of a name, for errors."""

    def __init__(self, key: str, *, client: Any = None) -> None:
        if self._pattern.fullmatch(key) is None:
            raise ValueError(f"expected {self._wanted}, got {shown(key)}")
        self._key = key
        self._client = client

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Make a wrapper from ``SCHEME:NAME`` with the name of the key."""
        return cls(uri.removeprefix(f"{cls.provider}:"))

    @classmethod
    def from_wrapped(cls, wrapped: WrappedKey) -> Self:
        """Make a wrapper from the key name in a file, which must be a name of this service."""
        key = require_parameters(wrapped, frozenset({"key"}))["key"]
        with parsing(f"the wrapped file of key {wrapped.key_id} is wrong", "restore it"):
            cls._check_file(key)
            return cls(key)

    @classmethod
    def _check_file(cls, key: str) -> None:
        """Raise ValueError for a name that a program may use but a file may not."""

    @abstractmethod
    def _make_client(self) -> Any:
        """Make a client of the service."""

    def _get_client(self) -> Any:
        if self._client is None:
            self._client = self._make_client()
        return self._client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key}>"
