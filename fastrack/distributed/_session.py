"""The secrets of a session, new at each start, and the keys of messages."""

from __future__ import annotations

import hmac
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fastrack._crypto import cobblestone, derivation
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._util.fork import register_fork_reset
from fastrack.errors import AuthenticationError, ClosedError
from fastrack.format import HEADER_SIZE, SALT_SIZE

RANDOM_SIZE = 32  # bytes that each rank contributes
MAC_SIZE = 32
LATER_SIZE = 32  # bytes of the secret that sessions of later groups are derived from
EVERYONE = -1  # the destination of a message for all ranks

_CONTEXT = b"fastrack/group@3\0"
_RUN_VARIABLE = "TORCHELASTIC_RUN_ID"  # torchrun sets it, to the same text on all ranks


@dataclass(frozen=True, slots=True)
class Route:
    """The identity of a message of a group: operation with its reduction, number, sender, receiver, dtype and size."""

    operation: str
    number: int
    source: int
    target: int
    dtype: str
    nbytes: int

    def context(self) -> bytes:
        """Return the context for deriving the message's key."""
        numbers = struct.pack(">QqqQ", self.number, self.source, self.target, self.nbytes)
        return b"\0".join((_CONTEXT, self.operation.encode(), self.dtype.encode(), numbers))

    def __str__(self) -> str:
        return f"{self.operation} {self.number} from rank {self.source}"


class GroupSession:
    """Three secrets that all ranks have, for message keys, MACs and later groups. None survives a fork or a pickle.

    They are derived (HKDF-SHA-512, RFC 5869) from the shared secret of the ranks, from `randoms`, 32 new random bytes
    of each rank, and from the identity of the group: its global `ranks` in order, its name and its run. If any rank
    restarts, its bytes and so all secrets change. The session of a later group is also derived from the session of the
    default group, `within`: ranks of two runs, or of two starts of one run, never share it.

    Each message also has a random salt in its header, so its key is new even if a route were used twice.
    """

    def __init__(
        self,
        secret: cobblestone.Bytes,
        randoms: Sequence[bytes],
        ranks: Sequence[int],
        name: str,
        run: str,
        within: GroupSession | None = None,
    ) -> None:
        self.run = run
        self._process = os.getpid()
        self.require: Callable[[], object] | None = None  # raises once the lease of the shared secret is over
        self._secrets = SecretBytes(len(secret) + MAC_SIZE + LATER_SIZE)
        self._size = len(secret)
        numbers = struct.pack(f">{len(ranks) + 1}Q", len(ranks), *ranks)
        info = b"".join((_CONTEXT, _sized(run), _sized(name), numbers, *randoms))
        material = SecretBytes(len(secret) + (LATER_SIZE if within else 0))
        try:
            material[: len(secret)] = secret
            if within:
                material[len(secret) :] = within._view()[-LATER_SIZE:]  # noqa: SLF001 - of its own class
            HKDF(SHA512(), len(self._secrets), salt=None, info=info).derive_into(material, self._secrets)
        finally:
            material.wipe()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Wipe the secrets: a child must not act as the rank."""
        self.wipe()

    def wipe(self) -> None:
        """Overwrite the secrets with zeros. All later calls raise ClosedError."""
        self._secrets.wipe()
        self._process = 0

    def seal(self, route: Route) -> tuple[bytes, MessageKey]:
        """Return the header of a new message, and its key. Raise ClosedError if the session was wiped."""
        salt = os.urandom(SALT_SIZE)
        key = derivation.derive(self._view()[: self._size], salt, route.context())
        return salt + key.commitment, key

    def open(self, header: cobblestone.Bytes, route: Route) -> MessageKey:
        """Return the key of a message. Raise AuthenticationError if the header is of another route."""
        try:
            return derivation.open_header(header[:HEADER_SIZE], self._view()[: self._size], route.context())
        except AuthenticationError:
            raise AuthenticationError(
                f"the message of {route}: expected the header that this rank sealed for this operation, got another; "
                "it was altered, repeated or misrouted, or the ranks do not call the same operations in the same order"
            ) from None

    def mac(self, text: bytes, rank: int) -> bytes:
        """Return the MAC, 32 bytes, of a text and of the rank that confirms it."""
        return hmac.digest(self._view()[self._size : -LATER_SIZE], text + struct.pack(">Q", rank), "sha256")

    def _view(self) -> memoryview:
        if self.require is not None:
            self.require()
        if self._process != os.getpid():
            raise ClosedError(
                "expected an open group, got one that, or whose default group, was closed or made in another process; "
                "make another"
            )
        return memoryview(self._secrets)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a session stays in its process and cannot be pickled; make a group in each process")


def run_id(run: str | None, within: GroupSession | None) -> str:
    """Return the run that a session is bound to: that given, else of the default group, else of torchrun, else ""."""
    if run is None:
        return os.environ.get(_RUN_VARIABLE, "") if within is None else within.run
    if not isinstance(run, str):
        raise TypeError(f"run=: expected the name of a run as text, got {type(run).__name__}. Pass text on all ranks")
    return run


def _sized(text: str) -> bytes:
    """Return a text behind its size in bytes, so that no two pairs of texts are the same bytes."""
    content = text.encode(errors="surrogatepass")
    return struct.pack(">Q", len(content)) + content
