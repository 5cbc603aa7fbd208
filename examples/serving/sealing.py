"""Offers, sealed requests and sealed answers, which the client and the server have in common.

A request is three parts, one after the other::

    head      label, machine, edition, request, time: 64 bytes that anyone can read
    key       a key of the client for only this request, encrypted by HPKE to the machine; its info is the head
    tokens    a sealed tensor under that key, named "request": tokens, or the bytes of a text

The answer is a sealed tensor under the same key, whose name says what it answers. So the head is authenticated with the
key, and a name with its tensor.
"""

import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

import fastrack
from examples.serving.refusals import RefusedError
from fastrack import attest
from fastrack.grants import Identity, Recipient

LIMIT = 1 << 20  # bytes of a request
_HEAD = struct.Struct(">8s16s16s16sQ")
_LABEL = b"ft-ask@1"
_KEY_SIZE = 32
_WRAPPED_SIZE = 1120 + _KEY_SIZE + 16  # an encapsulated key of MLKEM768_X25519, a key, a tag
_REQUEST = "request"
_ANY = bytes(16)
_DEVELOPMENT = b"no evidence, for development alone: "


@dataclass(frozen=True, slots=True)
class Head:
    """The readable part of a request. Machine, edition and request are ids; no edition means any."""

    machine: str
    edition: str
    request: str
    time: int

    def to_bytes(self) -> bytes:
        ids = (bytes.fromhex(each) or _ANY for each in (self.machine, self.edition, self.request))
        return _HEAD.pack(_LABEL, *ids, self.time)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Head":
        label, machine, edition, request, time = _HEAD.unpack(data)
        if label != _LABEL:
            raise RefusedError("malformed")
        return cls(machine.hex(), "" if edition == _ANY else edition.hex(), request.hex(), time)


def seal_request(
    tokens: torch.Tensor, machine: Recipient, *, edition: str = "", now: int
) -> tuple[bytes, Head, fastrack.Key]:
    """Seal tokens for a machine. Return the request, with the head and the key that open its answer."""
    head, secret = Head(machine.id, edition, os.urandom(16).hex(), now), bytearray(os.urandom(_KEY_SIZE))
    key, wrapped = fastrack.Key.from_bytes(secret), machine.encrypt(secret, head.to_bytes())
    secret[:] = bytes(_KEY_SIZE)
    return head.to_bytes() + wrapped + fastrack.seal(tokens, key, _REQUEST).to_bytes(), head, key


def open_request(
    body: bytes, identity: Identity, admit: Callable[[Head], None]
) -> tuple[Head, fastrack.Key, torch.Tensor]:
    """Authenticate a request. `admit` refuses one that is stale or was seen before; an altered one never reaches it."""
    head = Head.from_bytes(body[: _HEAD.size]) if len(body) > _HEAD.size + _WRAPPED_SIZE else None
    if head is None:
        raise RefusedError("malformed")
    if head.machine != identity.recipient.id:
        raise RefusedError("machine")
    wrapped, sealed = body[_HEAD.size : _HEAD.size + _WRAPPED_SIZE], body[_HEAD.size + _WRAPPED_SIZE :]
    try:
        key = fastrack.Key.from_bytes(identity.decrypt(wrapped, body[: _HEAD.size]))
        tensor = fastrack.SealedTensor.from_bytes(sealed)
        # Nothing is decrypted of an answer that is sent back, nor into more memory than the request has.
        if tensor.name != _REQUEST or tensor.dtype not in {"I64", "U8"} or len(tensor.shape) != 1:
            raise RefusedError("malformed")
        tokens = fastrack.unseal(tensor, key, framework="torch")
    except fastrack.FormatError:
        raise RefusedError("malformed") from None
    except (fastrack.FastrackError, ValueError):  # the second: of keys of X25519 of low order
        raise RefusedError("altered") from None
    admit(head)
    return head, key, tokens


def seal_answer(answer: torch.Tensor, head: Head, key: fastrack.Key, edition: str) -> bytes:
    """Seal an answer to a request, bound to the edition of the model that computed it."""
    return fastrack.seal(answer, key, f"answer {head.machine} {head.request} {edition}").to_bytes()


def text_to_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode(errors="replace")), dtype=torch.uint8)


def tensor_to_text(tensor: torch.Tensor) -> str:
    try:
        return bytes(tensor.tolist()).decode()
    except UnicodeDecodeError:
        raise RefusedError("malformed") from None


def open_answer(body: bytes, head: Head, key: fastrack.Key) -> tuple[torch.Tensor, str]:
    """Return an authentic answer to this request, and the edition of the model that computed it."""
    sealed = fastrack.SealedTensor.from_bytes(body)
    answer = fastrack.unseal(sealed, key, framework="torch")
    match = re.fullmatch(f"answer {head.machine} {head.request} ([0-9a-f]{{32}})", sealed.name)
    if match is None or head.edition not in {"", match[1]}:
        raise fastrack.AuthenticationError(
            "opening the answer failed: expected one to this request, of the edition that was asked for, got another. "
            "Ask again"
        )
    return answer, match[1]


# Machines without confidential hardware have no evidence. These two stand in for it, and prove nothing.


def collect_nothing(binding: attest.OfferBinding) -> attest.MachineEvidence:
    """Make what `attest.collect_evidence` makes, of a machine that has no evidence."""
    return attest.MachineEvidence(attest.TdxEvidence(_DEVELOPMENT + binding.report_data(())))


def trust_nothing(data: bytes, challenge: attest.Challenge) -> tuple[Recipient, datetime]:
    """Do what `verify_offer` does, but accept the offer of any machine that has no evidence."""
    offer = attest.Offer.from_bytes(data)
    expected = collect_nothing(attest.OfferBinding(challenge, offer.recipient))
    if offer.challenge_id != challenge.id or offer.evidence != expected:
        raise fastrack.AttestationError(
            "verifying the offer failed: expected one of a server for development, for this challenge, got another. "
            "Give the policy of the machine with --policy"
        )
    return offer.recipient, challenge.expires


def verify_offer(policy: attest.Policy, **options: object) -> Callable[..., tuple[Recipient, datetime]]:
    """Return a function that verifies offers under a policy, and returns the machine's key with its end."""

    def verify(data: bytes, challenge: attest.Challenge) -> tuple[Recipient, datetime]:
        verified = attest.verify_offer(data, challenge, policy, now=datetime.now(UTC), **options)
        return verified.recipient, verified.valid_until

    return verify
