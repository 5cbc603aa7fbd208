"""Desks at the two ends of a connection: `serve` answers visitors over HTTPS, and `RemoteDesk` asks.

A step is ``POST /v1/tour/STEP`` with the message as its body. Keys are encrypted to the visitor's process and signed by
their owner anyway. Both ends have a certificate, so that only known machines can make a desk verify evidence.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial

from fastrack._net.addresses import is_loopback
from fastrack._net.connections import Answer
from fastrack._net.service import Service, read_refusal
from fastrack._service.limits import RateLimit
from fastrack._util.public import public
from fastrack.errors import AttestationError, FastrackError, FormatError
from fastrack.tour._messages import ANSWER_LIMITS, ERRORS, LIMIT, SMALL_LIMIT, Desk

_Location = str | os.PathLike[str]


@public
@dataclass(frozen=True, slots=True)
class RemoteDesk:
    """A desk that `serve` serves elsewhere, by its address.

    Several threads may ask at a time; each step has a connection of its own.

    Parameters
    ----------
    url : str
        The address, ``https://HOST:PORT``. Plain HTTP is allowed only for a loopback address.
    certificate, private_key : path-like, optional
        The client's certificate with its chain and its private key, in PEM, which desks ask for. Other users must
        neither own nor read the private key.
    ca : path-like, optional
        A file of trusted certificates in PEM for the desk. By default the system's certificates.
    timeout : float
        The time limit of each step in seconds. Of a desk that leases its keys, less than a quarter of the lease: an
        answer that never comes then leaves time to ask again.

    Raises
    ------
    ValueError
        If `url` is not an allowed address, or one of certificate and private key lacks the other.
    KeyPermissionError
        If others may read the private key.
    OSError
        If a file cannot be read or is not in its form.

    Examples
    --------
    >>> from fastrack import tour
    >>> desk = tour.RemoteDesk("http://127.0.0.1:9", timeout=5)
    >>> desk.ask("challenge")
    Traceback (most recent call last):
        ...
    ConnectionRefusedError: ...
    """

    url: str
    certificate: _Location | None = field(default=None, kw_only=True)
    private_key: _Location | None = field(default=None, kw_only=True, repr=False)
    ca: _Location | None = field(default=None, kw_only=True)
    timeout: float = field(default=60.0, kw_only=True)
    _service: Service = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError(
                "naming a desk failed: expected certificate= and private_key= together, got one of them. Give both"
            )
        paths = {"ca": self.ca, "certificate": self.certificate, "private_key": self.private_key}
        object.__setattr__(self, "_service", Service(self.url, "the desk", "naming a desk", **paths))

    def ask(self, step: str, body: bytes = b"") -> bytes:
        """Send a step to the desk, and return its answer.

        Raises
        ------
        RollbackError, GrantError, AttestationError, SignatureError, FormatError, AuthenticationError
            As the desk raised it, with its message. An `AttestationError` has the evidence, the field and the value
            found; what the desk expects is only in its log.
        ConnectionError, TimeoutError
            If the desk cannot be reached, fails, or takes too long.
        """
        if not step.isidentifier() or len(body) > LIMIT:
            raise FormatError(
                f"asking a desk: expected a step by its name and at most {LIMIT} bytes, got {step!r:.40} and "
                f"{len(body)} bytes"
            )
        limit = ANSWER_LIMITS.get(step, SMALL_LIMIT)
        end = time.monotonic() + self.timeout
        place = f"asking the desk at {self._service.address.netloc} failed"
        try:
            answer = self._service.exchange(f"/v1/tour/{step}", body, limit=limit, end=end)
        except (ConnectionError, TimeoutError) as error:
            if error.errno is None:  # `exchange` has said where
                raise
            raise type(error)(f"{place}: expected an answer, got {error}. Start it, or try again") from error
        except OSError as error:  # of TLS, and of name resolution
            raise ConnectionError(
                f"{place}: expected an answer, got {error}. Check address and certificates"
            ) from error
        if answer.status == 200 and len(answer.body) <= limit:
            return answer.body
        raise _error(answer, place)


def _error(answer: Answer, place: str) -> Exception:
    """Return the error of an answer, of a class in the table: no other class is looked up by its name."""
    reason = read_refusal(answer.body)
    kind = ERRORS.get(reason.get("type", ""))
    message = reason.get("message") or "no reason"
    if kind is None:
        return ConnectionError(f"{place}: expected an answer, got status {answer.status}: {message}")
    error = kind(message)
    if isinstance(error, AttestationError):
        error.evidence, error.field, error.found = (reason.get(name) for name in ("evidence", "field", "found"))
    error.add_note(place)
    return error


@public
def serve(
    desk: Desk,
    *,
    host: str = "127.0.0.1",
    port: int = 8443,
    certificate: _Location | None = None,
    private_key: _Location | None = None,
    ca: _Location | None = None,
    insecure_loopback: bool = False,
    rate: float = 60.0,
    burst: int = 30,
) -> None:
    """Serve a desk to visitors, until the process is asked to end. The log is on stderr, as lines of JSON.

    Parameters
    ----------
    desk : Desk
        An `OwnerDesk` or a `HolderDesk`. It is asked by several threads.
    host : str
        The IP address to listen on.
    port : int
        The port; 0 for any, which the first line of the log has.
    certificate, private_key : path-like
        The certificate of the server with its chain, and its private key, in PEM. Other users must neither own nor read
        the private key.
    ca : path-like
        A file of certificates in PEM. A visitor must have a certificate that one of them issued.
    insecure_loopback : bool
        With true, serve without TLS, only on a loopback address, such as behind a proxy that ends TLS.
    rate : float
        Requests a minute that an address may send. A visit needs two of its owner and three of its holder.
    burst : int
        Requests that an address may send at once.

    Raises
    ------
    ValueError
        If certificate, private key or CA are missing, or given with `insecure_loopback`.
    FastrackError
        If starlette or uvicorn is not installed.
    KeyPermissionError
        If others may read the private key.
    OSError
        If the address cannot be listened on, or a file not be read.

    Examples
    --------
    >>> from fastrack import tour
    >>> class Desk:
    ...     def ask(self, step, body=b""):
    ...         return b""
    >>> tour.serve(Desk(), host="0.0.0.0")
    Traceback (most recent call last):
        ...
    ValueError: serving a desk failed: expected certificate=, private_key= and ca=, got less. ...
    """
    given = [path for path in (certificate, private_key, ca) if path is not None]
    if insecure_loopback and (given or not is_loopback(host)):
        raise ValueError(
            f"serving a desk failed: expected a loopback address and no certificate with insecure_loopback=True, got "
            f"{host} and {len(given)} files"
        )
    if not insecure_loopback and len(given) < 3:
        raise ValueError(
            "serving a desk failed: expected certificate=, private_key= and ca=, got less. Visitors send evidence "
            "only over TLS, with a certificate of their own"
        )
    try:
        from fastrack._service.server import serve as serve_app
        from fastrack.tour._app import make_app
    except ImportError as error:
        raise FastrackError(
            f"serving a desk failed: expected starlette and uvicorn, got {error}. "
            "Run: pip install 'fastrack-io[broker]'"
        ) from None
    make = partial(make_app, desk, limit=RateLimit(rate, burst))
    serve_app(make, host=host, port=port, certificate=certificate, private_key=private_key, client_ca=ca)
