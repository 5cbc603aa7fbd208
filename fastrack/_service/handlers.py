"""Parts that the handlers of a service share: limits by address, bodies in memory, threads, refusals and the log."""

import asyncio
import json
import logging
import math
import mmap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio.to_thread import run_sync
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from fastrack._service.limits import Quota, RateLimit, network_of
from fastrack._util.cpus import usable_cpus
from fastrack.errors import AttestationError

T = TypeVar("T")

JSON = "application/json"
_SHOWN = 200  # characters of a value shown in an answer
_REST = 4.0  # of the time that a document has taken, until the next one of its address

log = logging.getLogger("fastrack.broker")


class RefusedError(Exception):
    """An answer other than a document."""

    def __init__(self, status: int, message: str, **members: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.members = {"message": message, **members}
        self.headers: dict[str, str] = {}


class Handlers:
    """Parts that all handlers of one service share. `refuse` returns the answer to an error."""

    def __init__(
        self, limit: RateLimit, bodies: Quota, refuse: Callable[[Exception], RefusedError], *, body_seconds: float
    ) -> None:
        self._limit = limit
        self._bodies = bodies
        self._refuse = refuse
        self._body_seconds = body_seconds
        self._threads: anyio.CapacityLimiter | None = None
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def wrap(
        self, event: str, handle: Callable[[Request, dict[str, Any]], Awaitable[bytes | Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that counts the request, answers refusals, and writes one line of the log."""

        async def run(request: Request) -> Response:
            address = request.client.host if request.client else "unknown"
            fields: dict[str, Any] = {"address": address}
            start = time.perf_counter()
            try:
                self._admit(address)
                answer = await handle(request, fields)
                response = answer if isinstance(answer, Response) else Response(answer, media_type=JSON)
            except ClientDisconnect:
                fields["error"] = "the client broke off"
                response = Response(status_code=400)
            except Exception as error:  # noqa: BLE001 - every error gets an answer
                refusal = self._refuse(error)
                fields["error"] = str(error)[:400] if refusal.status != 500 else type(error).__name__
                body = json.dumps({"error": refusal.members}).encode() + b"\n"
                response = Response(body, refusal.status, refusal.headers, JSON)
            response.headers["Cache-Control"] = "no-store"
            fields |= {"status": response.status_code, "milliseconds": round(1e3 * (time.perf_counter() - start), 1)}
            level = logging.ERROR if response.status_code >= 500 else logging.INFO
            log.log(level, event, extra={"fields": fields})
            return response

        return run

    def _admit(self, address: str) -> None:
        wait = self._limit.admit(address)
        if wait > 0:
            refusal = RefusedError(429, "too many requests from this address; try again later")
            refusal.headers["Retry-After"] = str(math.ceil(wait))
            raise refusal

    @asynccontextmanager
    async def body(
        self,
        request: Request,
        limit: int,
        address: str,
        check: Callable[[bytes], Awaitable[None]] | None = None,
        check_at: int = 0,
    ) -> AsyncIterator[memoryview]:
        """Yield a body of up to `limit` bytes, counted while in memory. `check` may refuse its first `check_at` bytes.

        It is called once, before the rest is read.
        """
        announced = request.headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > limit:
            raise RefusedError(413, f"expected a body of at most {limit} bytes")
        body = mmap.mmap(-1, limit)  # takes what is written, where blocks of the heap that grow together take thrice it
        taken = 0
        try:
            try:
                with anyio.fail_after(self._body_seconds):
                    async for part in request.stream():
                        if not self._bodies.take(address, len(part)):
                            raise RefusedError(503, "too many requests at a time; try again later")
                        taken += len(part)
                        if taken > limit:
                            raise RefusedError(413, f"expected a body of at most {limit} bytes")
                        body.write(part)
                        if check is not None and taken >= check_at:
                            await check(body[:taken])
                            check = None
            except TimeoutError:
                raise RefusedError(408, f"expected a body within {self._body_seconds:.0f} seconds") from None
            with memoryview(body)[:taken] as written:
                yield written
        finally:
            body.close()
            self._bodies.give_back(address, taken)

    async def work(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, so that the loop goes on. Use at most one thread per CPU, but two on one CPU."""
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(max(2, usable_cpus()))
        return await run_sync(function, *arguments, limiter=self._threads)

    async def judge(self, address: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on a document in a thread: one at a time for an address, and for a fifth of the time at most.

        Parsers hold the interpreter's lock for most of that time, which others would wait for.
        """
        turn = self._turns.setdefault(network_of(address), asyncio.Lock())
        await turn.acquire()
        begin = time.monotonic()

        def timed() -> T:
            nonlocal begin
            begin = time.monotonic()  # in its thread, as the wait for one is the time of other addresses
            return function(*arguments)

        try:
            return await self.work(timed)
        finally:
            asyncio.get_running_loop().call_later(_REST * (time.monotonic() - begin), turn.release)


def members_of(error: AttestationError) -> dict[str, str | None]:
    """Return what an answer tells of refused evidence, each cut to a length."""
    found = {name: getattr(error, name) for name in ("evidence", "field", "found")}
    return {name: None if value is None else str(value)[:_SHOWN] for name, value in found.items()}


def require_json(request: Request) -> None:
    """Refuse a body of another type."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise RefusedError(415, f"expected a body of the type {JSON}")
