"""The ASGI application of a desk: ``POST /v1/tour/STEP``."""

from __future__ import annotations

import sqlite3
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route

from fastrack._service.handlers import Handlers, RefusedError, members_of, require_json
from fastrack._service.limits import Quota, RateLimit
from fastrack._util.gate import most_bytes
from fastrack.attest._errors import CollateralFileError
from fastrack.errors import AttestationError, RollbackError
from fastrack.tour._documents import KIND as DOCUMENT
from fastrack.tour._messages import ERRORS, LIMIT, Desk

_BODY_SECONDS = 60.0
_SHARE = LIMIT  # bytes of bodies in memory for each address
_TOTAL = 2 * LIMIT  # bytes of all bodies in memory
_BODY_LIMITS = {"challenge": 1024, "begin": LIMIT, "end": most_bytes(DOCUMENT), "finish": LIMIT}
_STATUS = {RollbackError: 409, AttestationError: 403}
_SHOWN = 1000  # characters of a message


def make_app(desk: Desk, *, limit: RateLimit, body_seconds: float = _BODY_SECONDS) -> Any:
    """Make the application. `body_seconds` is the time limit for receiving a body."""
    shared = Handlers(limit, Quota(_SHARE, _TOTAL), _refuse, body_seconds=body_seconds)

    async def answer(request: Request, fields: dict[str, Any]) -> bytes:
        require_json(request)
        step = request.path_params["step"]
        fields["step"] = step[:40]
        address = fields["address"]
        async with shared.body(request, _BODY_LIMITS.get(step, 1024), address) as body:
            return await shared.judge(address, lambda: desk.ask(step, bytes(body)))

    return Starlette(routes=[Route("/v1/tour/{step}", shared.wrap("asked", answer), methods=["POST"])])


def _refuse(error: Exception) -> RefusedError:
    """Return the answer to an error. What a policy allows goes only to the desk's own database, never to a visitor."""
    if isinstance(error, RefusedError):
        if error.status in {413, 415}:  # the same message again has the same answer
            error.members["type"] = "FormatError"
        return error
    if isinstance(error, sqlite3.OperationalError):  # a full disk, or a held lock
        return RefusedError(503, "the desk cannot write to its database; begin again later")
    name = next((kind.__name__ for kind in type(error).__mro__ if ERRORS.get(kind.__name__) is kind), None)
    if name is None or isinstance(error, CollateralFileError):
        return RefusedError(500, "the desk failed; its log says more")
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 400)
    if not isinstance(error, AttestationError):
        return RefusedError(status, str(error)[:_SHOWN], type=name)
    told = f"the {error.field or 'content'} of the {error.evidence or 'evidence'} is not accepted; the log of the desk "
    return RefusedError(status, f"{told}has what is expected", type=name, **members_of(error))
