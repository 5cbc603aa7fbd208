"""Exchange documents with a service over HTTPS, within a time limit."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from fastrack._keys.keys import read_private
from fastrack._net.addresses import require_service
from fastrack._net.connections import Answer, Connection
from fastrack._net.retries import TransientError

_Location = str | os.PathLike[str]

_ERROR_LIMIT = 16 << 10
_SHOWN = 1000  # characters of a service's reason shown in a message


class Service:
    """A service that has documents, by its address ``https://HOST:PORT``. `name` stands for it in errors.

    `ca` has the trusted certificates, by default the system's; `certificate` and `private_key` are the client's own, if
    the service asks for them. `action` is what the address is for, in the ValueError for one that is not allowed.
    """

    def __init__(
        self,
        url: str,
        name: str,
        action: str,
        *,
        ca: _Location | None = None,
        certificate: _Location | None = None,
        private_key: _Location | None = None,
    ) -> None:
        self.address = require_service(url, action, has_path=False)
        self._name = name
        self._tls = None
        if self.address.scheme == "https":
            self._tls = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_3
            if certificate is not None and private_key is not None:
                with read_private(private_key, 0):  # refuses a key that others may read; OpenSSL opens it again
                    pass
                self._tls.load_cert_chain(certificate, private_key)

    def exchange(
        self, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, limit: int, end: float
    ) -> Answer:
        """Post a document, or get one if there is none to send, and return the answer before `end`, a monotonic time.

        Its body has at most a byte more than `limit`, or than an error may have. No proxy is asked, and no redirect
        followed.
        """
        address = self.address._replace(path=path)
        message = f"asking {self._name} at {address.netloc} failed: expected an answer"
        told = {} if body is None else {"Content-Type": "application/json", **(headers or {})}
        connection = Connection(address, max(end - time.monotonic(), 0.001), self._tls, is_direct=True)
        try:
            return connection.exchange(address, told, body, limit=max(limit, _ERROR_LIMIT), end=end)
        except (HTTPException, TransientError) as error:
            raise ConnectionError(f"{message} in HTTP, got {error!r:.80}. Check the address, and try again.") from error
        except TimeoutError:
            raise TimeoutError(f"{message} in time, got none. Try again, or give it more with timeout=") from None


def read_refusal(content: bytes) -> dict[str, str]:
    """Return the members of a service's reason that are text, printable and short; nothing for another document."""
    reason: dict[str, Any] = {}
    with suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):  # for any other document
        reason = dict(json.loads(content[:_ERROR_LIMIT])["error"].items())
    texts = {name: value[:_SHOWN] for name, value in reason.items() if isinstance(value, str)}
    return {name: "".join(filter(str.isprintable, text)) for name, text in texts.items()}
