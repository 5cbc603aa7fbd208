"""The ASGI application of a broker: ``POST /v1/challenges`` and ``POST /v1/offers``."""

import sqlite3
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fastrack._service.handlers import JSON, Handlers, RefusedError, members_of, require_json
from fastrack._service.limits import Quota, RateLimit
from fastrack.attest._broker.ledger import BusyError, ChallengeError, QuarantineError
from fastrack.attest._broker.service import Broker
from fastrack.attest._errors import CollateralFileError
from fastrack.attest._log_head import HEADER, Head
from fastrack.attest._offer import BEGINNING_SIZE, OFFER_LIMIT, read_challenge_id
from fastrack.errors import AttestationError, FormatError

_BODY_SECONDS = 30.0
_SHARE = 32 << 20  # bytes of bodies in memory for each address
_TOTAL = 128 << 20  # bytes of all bodies in memory


def make_app(broker: Broker, *, limit: RateLimit, body_seconds: float = _BODY_SECONDS) -> Any:
    """Make the application. `body_seconds` is the time limit for receiving a body."""
    shared = Handlers(limit, Quota(_SHARE, _TOTAL), _refuse, body_seconds=body_seconds)

    async def make_challenge(request: Request, fields: dict[str, Any]) -> bytes:
        async with shared.body(request, 1024, fields["address"]):
            pass
        challenge = await shared.work(broker.make_challenge)
        fields["challenge"] = challenge.id
        return challenge.to_bytes()

    async def answer_offer(request: Request, fields: dict[str, Any]) -> Response:
        require_json(request)
        told = request.headers.get(HEADER)
        seen = None if told is None else Head.parse(told)
        address = fields["address"]

        async def check(beginning: bytes) -> None:
            await shared.work(broker.require_challenge, read_challenge_id(beginning), address)

        async with shared.body(request, OFFER_LIMIT, address, check, BEGINNING_SIZE) as body:
            challenge, grants, head = await shared.judge(address, lambda: broker.answer(bytes(body), address, seen))
        fields |= {"challenge": challenge, "head": str(head)}
        return Response(grants, headers={HEADER: fields["head"]}, media_type=JSON)

    challenges = Route("/v1/challenges", shared.wrap("challenge", make_challenge), methods=["POST"])
    offers = Route("/v1/offers", shared.wrap("offer", answer_offer), methods=["POST"])
    return Starlette(routes=[challenges, offers])


def _refuse(error: Exception) -> RefusedError:
    """Return the answer to an error. Allowed values go only to the owner's log, never to the client."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, (BusyError, sqlite3.OperationalError)):  # the second: a full disk, or a held lock
        told = "the broker cannot write to its database; ask for a new challenge later"
        return RefusedError(503, str(error) if isinstance(error, BusyError) else told)
    if isinstance(error, AttestationError):
        members = members_of(error)
        if isinstance(error, ChallengeError):
            return RefusedError(409, str(error), **members)
        told = f"the {error.field} of the {error.evidence} is not accepted; the owner's log has what is expected"
        if isinstance(error, QuarantineError):  # not what is in it, and why only in the owner's words
            told, members["found"] = f"refused by the owner{f': {error.told}' if error.told else ''}", "refused"
        return RefusedError(403, told, **members)
    if isinstance(error, FormatError) and not isinstance(error, CollateralFileError):
        return RefusedError(400, str(error))
    return RefusedError(500, "the broker failed; its log says more")
