"""Cache results that depend only on bytes, so that data shared by all devices is verified once."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, TypeVar

from fastrack.errors import FastrackError

T = TypeVar("T")


class Cache(Generic[T]):
    """A function with cached results. Only errors depend on the name of the evidence, its last argument.

    All arguments must be hashable. `size` results are kept; errors are not.
    """

    def __init__(self, function: Callable[..., T], size: int) -> None:
        self._function = function
        self._kept: Callable[..., T] = lru_cache(maxsize=size)(lambda *arguments: function(*arguments, ""))
        self.cache_clear: Callable[[], None] = self._kept.cache_clear

    def __call__(self, *arguments: Hashable, evidence: str) -> T:
        try:
            return self._kept(*arguments)
        except FastrackError:
            return self._function(*arguments, evidence)  # raises again, with the name
