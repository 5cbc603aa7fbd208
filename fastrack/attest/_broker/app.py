"""The ASGI application of a broker: ``POST /v1/challenges`` and ``POST /v1/offers``."""

import json
import logging
import math
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fastrack._util.cpus import usable_cpus
from fastrack.attest._broker.ledger import BusyError, ChallengeError
from fastrack.attest._broker.limits import Quota, RateLimit
from fastrack.attest._broker.service import Broker
from fastrack.attest._errors import CollateralFileError
from fastrack.attest._offer import BEGINNING_SIZE, OFFER_LIMIT, read_challenge_id
from fastrack.errors import AttestationError, FormatError

T = TypeVar("T")

LOGGER = "fastrack.broker"

_JSON = "application/json"
_BODY_SECONDS = 30.0
_SHARE = 32 << 20  # bytes of bodies in memory for each address
_TOTAL = 128 << 20  # bytes of all bodies in memory
_SHOWN = 200  # characters of a value shown in an answer

log = logging.getLogger(LOGGER)


class _RefusedError(Exception):
    """An answer other than a document."""

    def __init__(self, status: int, message: str, **members: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.members = {"message": message, **members}
        self.headers: dict[str, str] = {}


def make_app(broker: Broker, *, limit: RateLimit, body_seconds: float = _BODY_SECONDS) -> Any:
    """Make the application. `body_seconds` is the time limit for receiving a body."""
    handlers = _Handlers(broker, limit, body_seconds)
    routes = [
        Route("/v1/challenges", handlers.wrap("challenge", handlers.make_challenge), methods=["POST"]),
        Route("/v1/offers", handlers.wrap("offer", handlers.answer_offer), methods=["POST"]),
    ]
    return Starlette(routes=routes)


class _Handlers:
    def __init__(self, broker: Broker, limit: RateLimit, body_seconds: float) -> None:
        self._broker = broker
        self._limit = limit
        self._body_seconds = body_seconds
        self._in_flight = Quota(_SHARE, _TOTAL)
        self._threads: anyio.CapacityLimiter | None = None

    def wrap(
        self, event: str, handle: Callable[[Request, dict[str, Any]], Awaitable[bytes]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that counts the request, answers refusals, and writes one line of the log."""

        async def run(request: Request) -> Response:
            address = request.client.host if request.client else "unknown"
            fields: dict[str, Any] = {"address": address}
            start = time.perf_counter()
            try:
                self._admit(address)
                response = Response(await handle(request, fields), media_type=_JSON)
            except ClientDisconnect:
                fields["error"] = "the client broke off"
                response = Response(status_code=400)
            except Exception as error:  # noqa: BLE001 - every error gets an answer
                refusal = _refuse(error)
                fields["error"] = str(error)[:400] if refusal.status != 500 else type(error).__name__
                body = json.dumps({"error": refusal.members}).encode() + b"\n"
                response = Response(body, refusal.status, refusal.headers, _JSON)
            response.headers["Cache-Control"] = "no-store"
            fields |= {"status": response.status_code, "milliseconds": round(1e3 * (time.perf_counter() - start), 1)}
            level = logging.ERROR if response.status_code >= 500 else logging.INFO
            log.log(level, event, extra={"fields": fields})
            return response

        return run

    async def make_challenge(self, request: Request, fields: dict[str, Any]) -> bytes:
        """Answer with a challenge."""
        async with self._body(request, 1024, fields["address"]):
            pass
        challenge = await self._work(self._broker.make_challenge)
        fields["challenge"] = challenge.id
        return challenge.to_bytes()

    async def answer_offer(self, request: Request, fields: dict[str, Any]) -> bytes:
        """Answer an offer with grants."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _JSON:
            raise _RefusedError(415, f"expected a body of the type {_JSON}")
        address = fields["address"]

        async def check(beginning: bytearray) -> None:
            await self._work(self._broker.require_challenge, read_challenge_id(beginning), address)

        async with self._body(request, OFFER_LIMIT, address, check) as body:
            fields["challenge"], grants = await self._work(lambda: self._broker.answer(bytes(body), address))
        return grants

    def _admit(self, address: str) -> None:
        wait = self._limit.admit(address)
        if wait > 0:
            refusal = _RefusedError(429, "too many requests from this address; try again later")
            refusal.headers["Retry-After"] = str(math.ceil(wait))
            raise refusal

    @asynccontextmanager
    async def _body(
        self, request: Request, limit: int, address: str, check: Callable[[bytearray], Awaitable[None]] | None = None
    ) -> AsyncIterator[bytearray]:
        """Yield a body of up to `limit` bytes, counted while in memory. `check` may refuse its beginning."""
        announced = request.headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > limit:
            raise _RefusedError(413, f"expected a body of at most {limit} bytes")
        body = bytearray()
        taken = 0
        try:
            try:
                with anyio.fail_after(self._body_seconds):
                    async for part in request.stream():
                        if not self._in_flight.take(address, len(part)):
                            raise _RefusedError(503, "too many offers at a time; try again later")
                        taken += len(part)
                        if taken > limit:
                            raise _RefusedError(413, f"expected a body of at most {limit} bytes")
                        body += part
                        if check is not None and taken >= BEGINNING_SIZE:
                            await check(body)
                            check = None
            except TimeoutError:
                raise _RefusedError(408, f"expected a body within {self._body_seconds:.0f} seconds") from None
            yield body
        finally:
            self._in_flight.give_back(address, taken)

    async def _work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, so that the loop goes on. Use at most one thread per CPU."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(usable_cpus())
        result: T = await run_sync(function, *arguments, limiter=self._threads)
        return result


def _refuse(error: Exception) -> _RefusedError:
    """Return the answer to an error. Allowed values go only to the owner's log, never to the client."""
    if isinstance(error, _RefusedError):
        return error
    if isinstance(error, (BusyError, sqlite3.OperationalError)):  # the second: a full disk, or a held lock
        told = "the broker cannot write to its database; ask for a new challenge later"
        return _RefusedError(503, str(error) if isinstance(error, BusyError) else told)
    if isinstance(error, AttestationError):
        members = {name: _text(getattr(error, name)) for name in ("evidence", "field", "found")}
        if isinstance(error, ChallengeError):
            return _RefusedError(409, str(error), **members)
        told = f"the {error.field} of the {error.evidence} is not accepted; the owner's log has what is expected"
        return _RefusedError(403, told, **members)
    if isinstance(error, FormatError) and not isinstance(error, CollateralFileError):
        return _RefusedError(400, str(error))
    return _RefusedError(500, "the broker failed; its log says more")


def _text(value: object) -> str | None:
    return None if value is None else str(value)[:_SHOWN]
