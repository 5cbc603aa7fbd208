"""Ask a service for a document over HTTPS, again where that may help, with an end to all waiting."""

from __future__ import annotations

import errno
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPMessage
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any, NoReturn
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request, build_opener

from fastrack._util.shown import shown
from fastrack.attest._http import is_loopback

_AGAIN = {408, 429, 500, 502, 503, 504}  # what NVIDIA's own client asks again after, and AMD's service answers with
_ATTEMPTS = 5
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0  # seconds; doubled each time, with jitter
_TIMEOUT = 30.0  # seconds that a connection may be silent
_REASONS = {
    400: "The service knows no such parameter; check what the machine reported.",
    401: "The service wants a key; name a mirror that has one, or none.",
    403: "The service wants a key; name a mirror that has one, or none.",
    404: "The service has none for this version; check it, or wait until the vendor has published one.",
    410: "The service has withdrawn it; ask for a newer one.",
    429: "The service asks to wait; what was fetched before is kept. Try again in an hour.",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, and its headers by their names in lower case."""

    body: bytes
    headers: Mapping[str, str]


class _RefusedError(OSError):
    """An answer that would be the same when asked for again."""


class _NoRedirect(HTTPRedirectHandler):
    """Follow no redirect: a document is asked of the service that was named."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Client:
    """Ask services, through the proxies of the environment (``https_proxy``), with the certificates of the system.

    seconds : for one document, all attempts together; ca : a file of certificates in PEM, in place of the system's
    """

    seconds: float = 120.0
    ca: str | None = None
    _openers: dict[bool, OpenerDirector] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make what opens addresses of this machine, which no proxy is asked for, and others."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError):
            raise FileNotFoundError(
                errno.ENOENT, "expected a file of certificates in PEM. Check --ca", self.ca
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        proxies = {True: ProxyHandler({}), False: ProxyHandler()}
        openers = {
            is_local: build_opener(_NoRedirect, HTTPSHandler(context=context), proxy)
            for is_local, proxy in proxies.items()
        }
        object.__setattr__(self, "_openers", openers)

    def ask(self, url: str, *, limit: int, body: bytes | None = None, kind: str | None = None) -> Answer:
        """Return an answer of up to `limit` bytes: to a GET, or to a POST of a `body` of a MIME type.

        Raise `OSError` if there is none: the message has the address without its query, and what to do.
        """
        require_address(url)
        request = Request(url, data=body, headers={} if kind is None else {"Content-Type": kind})  # noqa: S310 - see above
        end = time.monotonic() + self.seconds
        for attempt in range(_ATTEMPTS):
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)  # noqa: S311 - no secret
            try:
                return _within(end, lambda: self._open(request, limit, end))
            except HTTPError as error:
                error.close()
                if error.code not in _AGAIN or attempt == _ATTEMPTS - 1:
                    _refuse(url, error)
                wait = max(wait, _read_delay(error.headers))
                if time.monotonic() + wait > end:
                    _refuse(url, error)
            except _RefusedError:
                raise
            except (OSError, HTTPException) as error:
                reason = error.reason if isinstance(error, URLError) else error
                if isinstance(reason, ssl.SSLError) or attempt == _ATTEMPTS - 1 or time.monotonic() + wait > end:
                    raise _failure(url, "an answer", str(reason) or type(reason).__name__, _advice(reason)) from None
            time.sleep(wait)
        raise AssertionError

    def _open(self, request: Request, limit: int, end: float) -> Answer:
        left = max(0.1, min(_TIMEOUT, end - time.monotonic()))
        is_local = is_loopback(urlsplit(request.full_url).hostname or "")
        with self._openers[is_local].open(request, timeout=left) as answer:
            body = bytearray()
            while part := answer.read1(64 << 10):
                body += part
                if len(body) > limit:
                    raise _RefusedError(*_failure(request.full_url, f"up to {limit} bytes", "more", "Check it.").args)
                if time.monotonic() > end:
                    raise TimeoutError("the answer came too slowly")
            length = answer.headers.get("Content-Length")
            if length is not None and length != str(len(body)):
                raise ConnectionError(f"{len(body)} bytes of {length:.20}")
            return Answer(bytes(body), {name.lower(): value for name, value in answer.headers.items()})


def _within(end: float, work: Callable[[], Answer]) -> Answer:
    """Do work in a thread, which is left alone at the end of the time: a timeout of a socket ends with each byte."""
    outcome: Queue[Answer | BaseException] = Queue()

    def run() -> None:
        try:
            outcome.put(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            outcome.put(error)

    Thread(target=run, daemon=True).start()
    try:
        found = outcome.get(timeout=max(0.0, end - time.monotonic()) + 1)
    except Empty:
        raise TimeoutError("the answer came too slowly") from None
    if isinstance(found, BaseException):
        raise found
    return found


def require_address(url: str) -> None:
    """Raise `ValueError` unless an address is one of TLS, or of this machine, without a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port, (parts.hostname or "").encode("idna")
    except ValueError:  # UnicodeError is one
        raise ValueError(f"fetching failed: expected an address as https://HOST, got {shown(url)}.") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("fetching failed: expected an address without a password, got one with it. Use a proxy.")
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        return
    raise ValueError(
        f"fetching failed: expected an address as https://HOST, got {shown(url)}. "
        "Without TLS only loopback addresses are allowed."
    )


def _read_delay(headers: Any) -> float:
    """Return the seconds that a service asks to wait; 0 if it does not say, or not in seconds."""
    text = (headers.get("Retry-After") or "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def _refuse(url: str, error: HTTPError) -> NoReturn:
    found = f"status {error.code}"
    if request_id := error.headers.get("Request-ID"):
        found += f" (request {request_id:.64})"
    if 300 <= error.code < 400:
        raise _failure(url, "an answer", f"{found}, a redirect", "Name the address that answers itself.") from None
    delay = _read_delay(error.headers)
    wait = f"The service asks to wait for {delay:.0f} seconds; what was fetched before is kept. Try again then."
    raise _failure(url, "an answer", found, wait if delay else _REASONS.get(error.code, "Try again later.")) from None


def _advice(reason: object) -> str:
    if isinstance(reason, ssl.SSLError):
        return "The certificate of the service or of a proxy is not trusted; pass its authority's with --ca."
    return "Check the network and the proxy (https_proxy), or fetch on another machine and copy the folder."


def _failure(url: str, wanted: str, found: str, advice: str) -> OSError:
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return OSError(errno.EIO, f"fetching {place} failed: expected {wanted}, got {found}. {advice}")
