"""Ask an owner's broker for keys: the machine's side of the exchange over HTTPS, by the standard library."""

import json
import os
import socket
import ssl
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing, suppress
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from threading import Thread
from typing import Any
from urllib.parse import SplitResult, urlsplit

from fastrack._keys.keyring import KeyRing
from fastrack._util.public import attest_public
from fastrack._util.shown import shown
from fastrack.attest._collect import collect_evidence
from fastrack.attest._exchange import GRANTS_LIMIT, Collector, make_offer
from fastrack.attest._offer import CHALLENGE_LIMIT, Challenge
from fastrack.errors import AttestationError
from fastrack.grants import Verifier

_ERROR_LIMIT = 16 << 10
_SHOWN = 400  # characters of a broker's reason shown in a message


@attest_public
def fetch_keys(
    url: str,
    *,
    owner: Verifier | Iterable[Verifier],
    collect: Collector = collect_evidence,
    ca: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
    now: datetime | None = None,
) -> KeyRing:
    """Fetch an owner's keys from a broker: prove the identity of this machine, and open the grants.

    A challenge, fresh evidence and the grants are exchanged once. The broker's certificate protects the connection;
    keys are also encrypted to this process, and the owner's signature is verified.

    Parameters
    ----------
    url : str
        The address of the broker, ``https://HOST:PORT``. Plain HTTP is allowed only for a loopback address.
    owner : Verifier or iterable of Verifier
        The public keys of the trusted owners.
    collect : callable
        A function that takes an `OfferBinding` and returns `MachineEvidence`.
    ca : path-like, optional
        A file of trusted certificates in PEM for the broker. By default the system's certificates.
    timeout : float
        The time limit in seconds for the whole call. The time of `collect` counts, but `collect` is not
        interrupted.
    now : datetime.datetime, optional
        The time to check the grants' expiry against. By default the current time.

    Raises
    ------
    AttestationError
        If the broker refuses; the error has the evidence, the field and the value found.
    DeviceError
        If the machine cannot give evidence.
    SignatureError, GrantError, FormatError
        If an answer is invalid.
    OSError
        If the broker cannot be reached, or disconnects. TimeoutError if it takes too long.
    ValueError
        If `url` is not an allowed address.

    Examples
    --------
    >>> from fastrack import attest
    >>> from fastrack.grants import Signer
    >>> attest.fetch_keys("http://broker.example", owner=Signer.generate().verifier)
    Traceback (most recent call last):
        ...
    ValueError: fetching keys failed: expected an address as https://HOST:PORT, got 'http://broker.example'. ...
    """
    address = _parse_address(url)
    owners = (owner,) if isinstance(owner, Verifier) else tuple(owner)
    context = None
    if address.scheme == "https":
        context = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    end = time.monotonic() + timeout
    challenge = Challenge.from_bytes(_post(address, context, end, "/v1/challenges", b"", CHALLENGE_LIMIT))
    pending = make_offer(challenge, collect)
    grants = _post(address, context, end, "/v1/offers", pending.to_bytes(), GRANTS_LIMIT)
    return pending.unlock(grants, owner=owners, now=now)


def _parse_address(url: str) -> SplitResult:
    address = urlsplit(url)
    host = address.hostname or ""
    is_allowed = address.scheme == "https" or (address.scheme == "http" and _is_loopback(host))
    if not is_allowed or not host or address.path not in {"", "/"} or address.query or address.username is not None:
        raise ValueError(
            f"fetching keys failed: expected an address as https://HOST:PORT, got {shown(url)}. "
            "Without TLS only loopback addresses are allowed."
        )
    return address


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _post(
    address: SplitResult, context: ssl.SSLContext | None, end: float, path: str, body: bytes, limit: int
) -> bytes:
    """Send a document, and return the answer, before `end` on the monotonic clock.

    A thread does the work: the time limit of a socket holds only for each read, and name resolution has none.
    """
    connection: HTTPConnection
    host, seconds = address.hostname or "", max(end - time.monotonic(), 0.001)
    if context is not None:
        connection = HTTPSConnection(host, address.port, timeout=seconds, context=context)
    else:
        connection = HTTPConnection(host, address.port, timeout=seconds)
    answer: Future[tuple[int, bytes]] = Future()
    Thread(target=_ask, args=(answer, connection, path, body, max(limit, _ERROR_LIMIT) + 1), daemon=True).start()
    message = f"asking the broker at {address.netloc} failed: expected an answer"
    try:
        status, content = answer.result(seconds)
    except HTTPException as error:
        raise ConnectionError(f"{message} in HTTP, got {error!r:.80}. Check the address, and try again.") from error
    except TimeoutError:
        if connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)  # ends the thread
        raise TimeoutError(f"{message} in time, got none. Try again, or give it more with timeout=") from None
    if status == 200 and len(content) <= limit:
        return content
    raise _describe_refusal(path, status, content)


def _ask(answer: Future[tuple[int, bytes]], connection: HTTPConnection, path: str, body: bytes, limit: int) -> None:
    with closing(connection):
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:  # the socket stays open until the response is closed
                answer.set_result((response.status, response.read(limit)))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            answer.set_exception(error)


def _describe_refusal(path: str, status: int, content: bytes) -> AttestationError:
    """Make the error for an answer that is no document, with the broker's own reason."""
    reason: dict[str, Any] = {}
    with suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):  # for any other document
        reason = dict(json.loads(content[:_ERROR_LIMIT])["error"].items())
    evidence, named, found, message = (_text(reason.get(name)) for name in ("evidence", "field", "found", "message"))
    told = message or f"status {status} of HTTP"
    return AttestationError(
        f"asking the broker for keys failed: expected status 200 for {path}, got {status}: {told}",
        evidence=evidence or "exchange",
        field=named or "status",
        wanted=200 if named is None else "as the owner's policy has it",
        found=status if found is None else found,
    )


def _text(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    return "".join(char for char in value[:_SHOWN] if char.isprintable())
