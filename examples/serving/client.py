"""A client that trusts no network, no host and no other client: only a machine whose offer it has verified."""

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

import torch

from examples.serving.refusals import REASONS, RefusedError
from examples.serving.sealing import open_answer, seal_request, tensor_to_text, text_to_tensor
from fastrack import attest
from fastrack.grants import Recipient

Verify = Callable[[bytes, attest.Challenge], tuple[Recipient, datetime]]


@dataclass(frozen=True, slots=True)
class Answer:
    """Authentic logits or text, the edition that computed them, and the worker that says so of itself."""

    logits: torch.Tensor | None
    text: str
    edition: str
    worker: str


class Client:
    """One connection to a server. It asks for an offer when it has none that is valid."""

    def __init__(self, url: str, verify: Verify) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._verify = verify
        self._machine: Recipient | None = None
        self._valid_until = datetime.min.replace(tzinfo=UTC)

    @property
    def machine(self) -> Recipient:
        """The key of the machine, whose offer was verified for a challenge of this client."""
        if self._machine is None or datetime.now(UTC) >= self._valid_until:
            challenge = attest.Challenge.generate(now=datetime.now(UTC))
            status, offer, _ = self.send("/offer", challenge.to_bytes())
            if status != 200:
                raise ConnectionError(f"asking for an offer failed: expected status 200, got {status}. Ask later")
            self._machine, self._valid_until = self._verify(offer, challenge)
        return self._machine

    def ask(self, asked: torch.Tensor | str, edition: str = "") -> Answer:
        """Return the answer to tokens or to a text, of this edition of the model or of any.

        Raise RefusedError if the server refuses the request: anybody on the way can say that, and no more.
        """
        tokens = text_to_tensor(asked) if isinstance(asked, str) else asked
        for is_last in (False, True):
            body, head, key = seal_request(tokens, self.machine, edition=edition, now=int(time.time()))
            try:
                status, answer, worker = self.send("/ask", body)
                break
            except ConnectionError:  # it was idle, or its worker has ended; the same request would be a replay
                self.close()
                if is_last:
                    raise
        if status != 200:
            reason = answer.decode("ascii", "replace")
            raise RefusedError(reason if reason in REASONS else "unknown")
        opened, edition = open_answer(answer, head, key)
        is_text = opened.dtype == torch.uint8
        return Answer(None if is_text else opened, tensor_to_text(opened) if is_text else "", edition, worker)

    def send(self, path: str, body: bytes | None = None) -> tuple[int, bytes, str]:
        """Send bytes as they are. Return the status, the content and the worker."""
        self._connection.request("GET" if body is None else "POST", path, body)
        response = self._connection.getresponse()
        return response.status, response.read(), response.headers.get("Worker", "")

    def close(self) -> None:
        self._connection.close()
