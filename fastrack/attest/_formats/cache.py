"""Keep what depends on bytes alone, so that what all devices of a machine have in common is verified once."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, TypeVar

from fastrack.errors import FastrackError

T = TypeVar("T")


class Cache(Generic[T]):
    """A function whose results are kept whatever name is given to the evidence, which only its errors have.

    The name is the last argument, and all can be hashed. `size` results are kept, and no error.
    """

    def __init__(self, function: Callable[..., T], size: int) -> None:
        self._function = function
        self._kept: Callable[..., T] = lru_cache(maxsize=size)(lambda *arguments: function(*arguments, ""))
        self.cache_clear: Callable[[], None] = self._kept.cache_clear

    def __call__(self, *arguments: Hashable, evidence: str) -> T:
        try:
            return self._kept(*arguments)
        except FastrackError:
            return self._function(*arguments, evidence)  # which fails again, with the name
