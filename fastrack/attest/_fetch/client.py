"""Ask a vendor's service for a document, again where that may help, with an end to all waiting."""

from __future__ import annotations

import errno
import ssl
import time
from http.client import HTTPException
from urllib.parse import urlsplit

from fastrack._net.addresses import is_loopback, require_service
from fastrack._net.connections import Answer, Connection
from fastrack._net.retries import AGAIN, TransientError, read_delay, retry

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
_UNTRUSTED = "The certificate of the service or of a proxy is not trusted; pass its authority's with --ca."
_UNREACHED = "Check the network and the proxy (https_proxy), or fetch on another machine and copy the folder."


class AbsentError(OSError):
    """A service that answers, and has not what it was asked for."""


class Client:
    """Ask services, through the proxies of the environment (``https_proxy``), with the certificates of the system.

    seconds : for one document, all attempts together; ca : a file of certificates in PEM, in place of the system's
    """

    def __init__(self, *, seconds: float = 120.0, ca: str | None = None) -> None:
        self._seconds = seconds
        try:
            self._tls = ssl.create_default_context(cafile=ca)
        except OSError:  # ssl.SSLError is one
            raise FileNotFoundError(errno.ENOENT, "expected a file of certificates in PEM. Check --ca", ca) from None
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2

    def ask(self, url: str, *, limit: int, body: bytes | None = None, kind: str | None = None) -> Answer:
        """Return an answer of up to `limit` bytes: to a GET, or to a POST of a `body` of a MIME type.

        Raise `OSError` if there is none: the message has the address without its query, and what to do.
        """
        address, end = require_service(url, "fetching", has_path=True), time.monotonic() + self._seconds
        headers = {} if kind is None else {"Content-Type": kind}
        is_local = is_loopback(address.hostname or "")

        def attempt() -> Answer:
            left = max(0.1, min(_TIMEOUT, end - time.monotonic()))
            try:
                connection = Connection(address, left, self._tls, is_direct=is_local)
                answer = connection.exchange(address, headers, body, limit=limit, end=end)
            except ssl.SSLError as error:
                raise OSError(_failure(url, "an answer", str(error), _UNTRUSTED)) from None
            except (OSError, HTTPException) as error:
                found = str(error) or type(error).__name__
                raise TransientError(_failure(url, "an answer", found, _UNREACHED)) from None
            if not 200 <= answer.status < 300:
                message, delay = _refusal(url, answer)
                if answer.status == 404:
                    raise AbsentError(message)
                raise TransientError(message, max(delay, _FIRST_WAIT)) if answer.status in AGAIN else OSError(message)
            if len(answer.body) > limit:
                raise OSError(_failure(url, f"up to {limit} bytes", "more", "Check it."))
            return answer

        try:
            return retry(attempt, attempts=_ATTEMPTS, first=_FIRST_WAIT, longest=_LONGEST_WAIT, end=end)
        except OSError as error:
            raise (AbsentError if isinstance(error, AbsentError) else OSError)(errno.EIO, str(error)) from None


def _refusal(url: str, answer: Answer) -> tuple[str, float]:
    """Return what a status means, and how many seconds the service asks to wait."""
    found, delay = f"status {answer.status}", read_delay(answer.headers.get("retry-after"))
    if request_id := answer.headers.get("request-id"):
        found += f" (request {request_id:.64})"
    advice = _REASONS.get(answer.status, "Try again later.")
    if 300 <= answer.status < 400:
        found, advice = f"{found}, a redirect", "Name the address that answers itself."
    elif delay:
        advice = f"The service asks to wait for {delay:.0f} seconds; what was fetched before is kept. Try again then."
    return _failure(url, "an answer", found, advice), delay


def _failure(url: str, wanted: str, found: str, advice: str) -> str:
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return f"fetching {place} failed: expected {wanted}, got {found}. {advice}"
