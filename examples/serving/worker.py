"""A process that answers requests: an ASGI application, and the model that it maps."""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

import fastrack
from examples.serving.refusals import REASONS, RefusedError, told
from examples.serving.sealing import LIMIT, open_request, seal_answer, tensor_to_text, text_to_tensor
from examples.serving.shared import Counters, Replays
from examples.serving.weights import Model, map_model
from fastrack import attest
from fastrack.grants import Identity

MESSAGE = 256  # bytes of the supervisor's words about a model

_BODY_SECONDS = 30.0
_RETRY_SECONDS = 5.0
_PAUSE = 0.5  # seconds without accepting after an error
_TURN = 0.0005  # seconds without accepting for each open connection
_BYTES = "application/octet-stream"

log = logging.getLogger("serving")


@dataclass(frozen=True, slots=True)
class Served:
    """A model in use, with the edition that it is of."""

    model: Model
    edition: str


class Worker:
    """The application of one worker. What it computes runs on one thread, so that its loop is always free."""

    def __init__(
        self,
        number: int,
        identity: Identity,
        collect: Callable[[attest.OfferBinding], attest.MachineEvidence],
        replays: Replays,
        counters: Counters,
    ) -> None:
        counters.row = number
        self._number = number
        self._identity, self._collect = identity, collect
        self._replays, self._counters = replays, counters
        self._served: Served | None = None
        self._can_offer = False
        self._answers, self._offers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.app = Starlette(
            routes=[
                Route("/ask", self.ask, methods=["POST"]),
                Route("/offer", self.offer, methods=["POST"]),
                Route("/live", self.live),
                Route("/ready", self.ready),
                Route("/metrics", self.metrics),
            ]
        )

    def run(self, listener: socket.socket, supervisor: socket.socket, first: tuple[bytes, int] | None) -> None:
        """Serve until the supervisor ends. `first` is the model in use as this worker is started, if there is one."""
        torch.set_num_threads(1)  # workers are the parallelism; and results do not depend on the number
        torch.seed()  # or all workers draw the same tokens
        if first is not None:
            self._swap(*first)
        config = uvicorn.Config(
            self.app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=512,
            timeout_graceful_shutdown=10,
        )
        config.load()
        asyncio.run(self._serve(_Server(config), listener, supervisor))

    async def _serve(self, server: uvicorn.Server, listener: socket.socket, supervisor: socket.socket) -> None:
        def receive() -> None:
            try:
                message, descriptors, _, _ = socket.recv_fds(supervisor, MESSAGE, 1)
                if message:
                    self._swap(message, descriptors[0])
                    return
            except Exception as error:  # noqa: BLE001 - of a worker that does not follow, another one takes the place
                log.error("worker %d cannot take over a model: %s", self._number, told(error))
            server.should_exit = True  # and without a supervisor nobody would start another, or end this one
            asyncio.get_running_loop().remove_reader(supervisor)

        asyncio.get_running_loop().add_reader(supervisor, receive)
        rehearsal = asyncio.create_task(self._rehearse())
        await server.serve(sockets=[listener])
        rehearsal.cancel()

    def _swap(self, message: bytes, memory: int) -> None:
        """Use another model from now on. A request that has begun goes on with the one that it took."""
        words, model = json.loads(message), map_model(memory)
        os.close(memory)  # the map keeps the memory, and ends with the model
        self._served = Served(model, words["edition"])
        self._counters.set_generation(words["generation"])

    async def _rehearse(self) -> None:
        """Make an offer to nobody, so that a machine that cannot is never ready."""
        while not self._can_offer:
            try:
                await self._offer_to(attest.Challenge.generate(now=datetime.now(UTC)))
                self._can_offer = True
            except Exception as error:  # noqa: BLE001
                log.error("worker %d cannot make an offer: %s", self._number, told(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _offer_to(self, challenge: attest.Challenge) -> bytes:
        """Bind the machine's key, which is that of all workers, to a challenge by evidence of the machine."""
        recipient = self._identity.recipient
        binding = attest.OfferBinding(challenge, recipient)
        evidence = await asyncio.get_running_loop().run_in_executor(self._offers, self._collect, binding)
        return attest.Offer(challenge.id, recipient, evidence).to_bytes()

    async def offer(self, request: Request) -> Response:
        """Answer a challenge of a client with an offer."""
        try:
            challenge = attest.Challenge.from_bytes(await _read(request, 1024))
            return Response(await self._offer_to(challenge), media_type="application/json")
        except (RefusedError, fastrack.FormatError) as error:
            return self._refuse(error if isinstance(error, RefusedError) else RefusedError("malformed"))
        except Exception as error:  # noqa: BLE001
            return self._fail("making an offer", error)

    async def ask(self, request: Request) -> Response:
        """Answer a sealed request."""
        begun = time.perf_counter()
        try:
            body = await _read(request, LIMIT)
            answer = await asyncio.get_running_loop().run_in_executor(self._answers, self._answer, body)
        except RefusedError as error:
            return self._refuse(error)
        except Exception as error:  # noqa: BLE001 - an error's text may have values, and its traceback too
            return self._fail("answering", error)
        self._counters.answered(time.perf_counter() - begun)
        return self._respond(Response(answer, media_type=_BYTES))

    def _answer(self, body: bytes) -> bytes:
        served = self._served  # read once: all weights, and the edition that is named, are of one model
        if served is None:
            raise RefusedError(self._counters.cause)
        head, key, tokens = open_request(body, self._identity, self._replays.admit)
        if head.edition not in {"", served.edition}:
            raise RefusedError("edition")
        if tokens.dtype == torch.uint8:
            answer = text_to_tensor(served.model.write(tensor_to_text(tokens)))
        elif served.model.takes(tokens):
            answer = served.model(tokens)
        else:
            raise RefusedError("tokens")
        return seal_answer(answer, head, key, served.edition)

    async def live(self, _: Request) -> Response:
        return PlainTextResponse("live\n")

    async def ready(self, _: Request) -> Response:
        no_model = f"a model ({self._counters.cause})"
        missing = no_model if self._served is None else "an offer" if not self._can_offer else ""
        text = f"waiting for {missing}\n" if missing else f"ready, edition {self._served.edition}\n"
        return self._respond(PlainTextResponse(text, 503 if missing else 200))

    async def metrics(self, _: Request) -> Response:
        text = self._counters.expose(self._served.edition if self._served else "")
        return Response(text, media_type="text/plain; version=0.0.4")

    def _refuse(self, error: RefusedError) -> Response:
        self._counters.add(f"refused {error.reason}")
        log.debug("worker %d refused a request: %s", self._number, error.reason)
        return self._respond(PlainTextResponse(error.reason, REASONS[error.reason]))

    def _fail(self, action: str, error: Exception) -> Response:
        self._counters.add("failed")
        log.error("worker %d: %s failed: %s", self._number, action, told(error))
        return self._respond(PlainTextResponse("failed", 500))

    def _respond(self, response: Response) -> Response:
        response.headers["Worker"] = str(self._number)
        response.headers["Cache-Control"] = "no-store"
        return response


class _Server(uvicorn.Server):
    """A server that accepts one connection at a time. That of asyncio takes all that wait, and the others get none."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._accept(*sockets or ()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        given = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it on its own alone
                    await loop.connect_accepted_socket(lambda: H11Protocol(**given), connection)
                except OSError as error:  # as without descriptors: connections wait meanwhile
                    log.error("accepting failed: %s", told(error))
                    await asyncio.sleep(_PAUSE)
                # One that has more waits longer, so that a new connection is for a worker that has fewer.
                await asyncio.sleep(_TURN * len(self.server_state.connections))
        finally:
            self.should_exit = True  # a worker that accepts nothing ends, and another takes its place


async def _read(request: Request, limit: int) -> bytes:
    """Return the body of a request of up to `limit` bytes, all of which have to come within a time."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise RefusedError("large")
    except TimeoutError:
        raise RefusedError("slow") from None
    except ClientDisconnect:
        raise RefusedError("broken") from None
    return bytes(body)
