"""Ask an owner's broker for keys: the machine's side of the exchange over HTTPS."""

import os
import time
from collections.abc import Iterable
from datetime import datetime

from fastrack._keys.keyring import KeyRing
from fastrack._net.connections import Answer
from fastrack._net.service import Service, read_refusal
from fastrack._util.public import public
from fastrack.attest._collect import collect_evidence
from fastrack.attest._exchange import GRANTS_LIMIT, Collector, PendingOffer, make_offer
from fastrack.attest._log_head import HEADER, Head
from fastrack.attest._offer import CHALLENGE_LIMIT, Challenge
from fastrack.errors import AttestationError, RollbackError
from fastrack.grants import Verifier


@public
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
    broker = Service(url, "the broker", "fetching keys", ca=ca)
    owners = (owner,) if isinstance(owner, Verifier) else tuple(owner)
    pending, grants, _ = ask_broker(broker, collect, timeout)
    return pending.unlock(grants, owner=owners, now=now)


def ask_broker(
    broker: Service, collect: Collector, timeout: float, seen: Head | None = None
) -> tuple[PendingOffer, bytes, Head | None]:
    """Make an offer for a new challenge of a broker. Return it, the grants that answer it, and the head of the log.

    Raise RollbackError if the log is older than the head that was seen before.
    """
    end = time.monotonic() + timeout
    challenge = Challenge.from_bytes(_post(broker, "/v1/challenges", b"", CHALLENGE_LIMIT, end).body)
    pending = make_offer(challenge, collect)
    told = {} if seen is None else {HEADER: str(seen)}
    answer = _post(broker, "/v1/offers", pending.to_bytes(), GRANTS_LIMIT, end, told)
    text = answer.headers.get(HEADER.lower())
    head = None if text is None else Head.parse(text)
    if seen is not None and (head is None or head.number <= seen.number):
        raise RollbackError(
            f"asking the broker for keys failed: expected a log that goes on from entry {seen.number}, got "
            f"{'none' if head is None else f'one of {head.number}'}. It was set back; ask the owner"
        )
    return pending, answer.body, head


def _post(
    broker: Service, path: str, body: bytes, limit: int, end: float, headers: dict[str, str] | None = None
) -> Answer:
    """Post a document, and return the answer. One that is no document is raised, with the broker's own reason."""
    answer = broker.exchange(path, body, headers, limit=limit, end=end)
    if answer.status == 200 and len(answer.body) <= limit:
        return answer
    reason = read_refusal(answer.body)
    named, found = reason.get("field"), reason.get("found")
    told = reason.get("message") or f"status {answer.status} of HTTP"
    raise AttestationError(
        f"asking the broker for keys failed: expected status 200 for {path}, got {answer.status}: {told}",
        evidence=reason.get("evidence") or "exchange",
        field=named or "status",
        wanted=200 if named is None else "as the owner's policy has it",
        found=answer.status if found is None else found,
    )
