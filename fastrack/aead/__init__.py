"""Opens and seals runs of chunks on the host, with the fastest engine this CPU has."""

from __future__ import annotations

from functools import lru_cache

from fastrack.aead.base import Bytes, Engine, Pieces
from fastrack.aead.crew import default_threads

ENGINES = ("vaes-512", "vaes-256", "openssl")


def available() -> tuple[str, ...]:
    """Names of the engines this machine can run, the fastest first."""
    from fastrack.aead.vaes import supported_width

    width = supported_width()
    return tuple(name for name in ENGINES if not name.startswith("vaes") or int(name[5:]) <= width * 8)


def engine(name: str | None = None, *, threads: int | None = None) -> Engine:
    """The engine of that name, or the fastest one there is; made once for each number of threads.

    Raises
    ------
    ValueError
        If this machine cannot run it.
    """
    return _make(name, threads or default_threads())


@lru_cache(maxsize=32)
def _make(name: str | None, threads: int) -> Engine:
    names = available()
    name = name or names[0]
    if name not in names:
        raise ValueError(f"this machine has no engine {name!r}; it has {', '.join(names)}")
    if name == "openssl":
        from fastrack.aead.openssl import OpenSSLEngine

        return OpenSSLEngine()
    from fastrack.aead.vaes import VaesEngine

    return VaesEngine(int(name.removeprefix("vaes-")) // 8, threads)


__all__ = ["ENGINES", "Bytes", "Engine", "Pieces", "available", "default_threads", "engine"]
