"""Post documents to a service over HTTPS, by the standard library, within a time limit."""

import json
import os
import socket
import ssl
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import ip_address
from threading import Thread
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from fastrack._keys.keys import read_private
from fastrack._util.shown import shown

_ERROR_LIMIT = 16 << 10
_SHOWN = 1000  # characters of a service's reason shown in a message


@dataclass(frozen=True, slots=True)
class Service:
    """A service by its address. `name` stands for it in errors."""

    address: SplitResult
    name: str
    context: ssl.SSLContext | None = field(repr=False)

    @classmethod
    def at(
        cls,
        url: str,
        name: str,
        action: str,
        *,
        ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        private_key: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Return the service at ``https://HOST:PORT``. Plain HTTP is allowed only for a loopback address.

        `ca` has the trusted certificates, by default the system's; `certificate` and `private_key` are the client's
        own, if the service asks for them. Raise ValueError for another address, with the `action` that it was for.
        """
        address = urlsplit(url)
        host = address.hostname or ""
        is_allowed = address.scheme == "https" or (address.scheme == "http" and is_loopback(host))
        if not is_allowed or not host or address.path not in {"", "/"} or address.query or address.username is not None:
            raise ValueError(
                f"{action} failed: expected an address as https://HOST:PORT, got {shown(url)}. "
                "Without TLS only loopback addresses are allowed."
            )
        context = None
        if address.scheme == "https":
            context = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if certificate is not None and private_key is not None:
                with read_private(private_key, 0):  # refuses a key that others may read; OpenSSL opens it again
                    pass
                context.load_cert_chain(certificate, private_key)
        return cls(address, name, context)

    def post(self, path: str, body: bytes, *, limit: int, end: float) -> tuple[int, bytes]:
        """Send a document, and return the status and the content of the answer, before `end` on the monotonic clock.

        The content has at most a byte more than `limit`, or than an error may have. A thread does the work: the time
        limit of a socket holds only for each read, and name resolution has none.
        """
        connection: HTTPConnection
        host, seconds = self.address.hostname or "", max(end - time.monotonic(), 0.001)
        if self.context is not None:
            connection = HTTPSConnection(host, self.address.port, timeout=seconds, context=self.context)
        else:
            connection = HTTPConnection(host, self.address.port, timeout=seconds)
        answer: Future[tuple[int, bytes]] = Future()
        Thread(target=_ask, args=(answer, connection, path, body, max(limit, _ERROR_LIMIT) + 1), daemon=True).start()
        message = f"asking {self.name} at {self.address.netloc} failed: expected an answer"
        try:
            return answer.result(seconds)
        except HTTPException as error:
            raise ConnectionError(f"{message} in HTTP, got {error!r:.80}. Check the address, and try again.") from error
        except TimeoutError:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # ends the thread
            raise TimeoutError(f"{message} in time, got none. Try again, or give it more with timeout=") from None


def read_refusal(content: bytes) -> dict[str, str]:
    """Return the members of a service's reason that are text, printable and short; nothing for another document."""
    reason: dict[str, Any] = {}
    with suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):  # for any other document
        reason = dict(json.loads(content[:_ERROR_LIMIT])["error"].items())
    texts = {name: value[:_SHOWN] for name, value in reason.items() if isinstance(value, str)}
    return {name: "".join(filter(str.isprintable, text)) for name, text in texts.items()}


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _ask(answer: Future[tuple[int, bytes]], connection: HTTPConnection, path: str, body: bytes, limit: int) -> None:
    with closing(connection):
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:  # the socket stays open until the response is closed
                answer.set_result((response.status, response.read(limit)))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            answer.set_exception(error)
