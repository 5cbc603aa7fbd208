"""Desks that are really served, over mutual TLS."""

import asyncio
import base64
import json
import logging
import ssl
import sys
from http.client import HTTPSConnection

import pytest
from broker.conftest import find_port, make_certificate
from helpers.tour_files import OFFSET, Served, Tour, trusted_roots

import fastrack
from fastrack import attest, tour
from fastrack._net.connections import Answer
from fastrack._service.limits import RateLimit
from fastrack.tour import _messages

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from fastrack.tour import _app

SAME = dict.fromkeys(["AuthenticationError", "FormatError", "GrantError", "SignatureError"], 400)
SAME["RollbackError"] = 409
OTHERS = ("KeyError", "UnknownKeyError")


class Holder(Served):
    """The desk of holder a of a tour, served with the certificate of the folder."""

    def __init__(self, folder):
        self.folder, self.port = folder, find_port()
        options = {"certificate": "tls.pem", "private_key": "tls.key", "ca": "ca.pem"}
        paths = {name: str(folder / path) for name, path in options.items()}
        given = {"name": "a", "offset": OFFSET.total_seconds(), "roots": trusted_roots()}
        (folder / "served.json").write_text(json.dumps({**given, "options": {**paths, "port": self.port}}))
        super().__init__("served_desk.py", folder / "served.json", log=folder / "a.log")

    def desk(self, **options):
        paths = {"certificate": "tls.pem", "private_key": "tls.key", "ca": "ca.pem"}
        given = {name: self.folder / path for name, path in paths.items()} | options
        return tour.RemoteDesk(f"https://127.0.0.1:{self.port}", **given)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    make_certificate(folder)
    return Tour(folder, "ab")


@pytest.fixture(scope="module")
def holder(made):
    served = Holder(made.folder)
    yield served
    served.kill()


@pytest.mark.slow
def test_a_visit_goes_on_at_a_desk_that_was_restarted_in_its_middle(made, holder):
    remote = holder.desk()

    class Killed:
        def ask(self, step, body=b""):
            if step == "begin":
                holder.kill()
                holder.start()  # which forgets its challenges
            return remote.ask(step, body)

    with pytest.raises(fastrack.RollbackError, match="of before a restart"):
        made.visit("v0", "v1", holder_desk=Killed())
    assert not (made.folder / "v1").exists()
    chain = made.visit("v0", "v1", holder_desk=remote)
    assert chain.visits[0].delegation.attempt == 2
    [(consent, receipt)] = made.desk("a").receipts()
    assert receipt.digest == chain.head
    assert receipt.files == consent.files
    logged = [line for line in holder.lines() if line["event"] == "asked"]
    assert [(line["step"], line["status"]) for line in logged[-3:]] == [
        ("challenge", 200),
        ("begin", 200),
        ("end", 200),
    ]


@pytest.mark.slow
def test_a_client_needs_a_certificate_of_an_authority_that_the_desk_trusts(holder, tmp_path):
    make_certificate(tmp_path)
    assert attest.Challenge.from_bytes(holder.desk().ask("challenge"))
    others = {"certificate": tmp_path / "tls.pem", "private_key": tmp_path / "tls.key"}
    for options in ({"certificate": None, "private_key": None}, others, {"ca": tmp_path / "ca.pem"}):
        with pytest.raises(ConnectionError, match=f"the desk at 127.0.0.1:{holder.port}"):
            holder.desk(**options).ask("challenge")
    context = ssl.create_default_context(cafile=holder.folder / "ca.pem")
    context.load_cert_chain(holder.folder / "tls.pem", holder.folder / "tls.key")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        HTTPSConnection("127.0.0.1", holder.port, timeout=20, context=context).request("POST", "/v1/tour/challenge")


@pytest.mark.parametrize("options", [{"certificate": "tls.pem"}, {"private_key": "tls.key"}])
def test_a_certificate_goes_with_its_key(made, options):
    paths = {name: made.folder / path for name, path in options.items()}
    with pytest.raises(ValueError, match="together"):
        tour.RemoteDesk("https://127.0.0.1:1", **paths)


def test_a_desk_elsewhere_has_tls_and_a_private_key_is_private(made):
    with pytest.raises(ValueError, match="https"):
        tour.RemoteDesk("http://192.0.2.1:80")
    key = made.folder / "shared.key"
    key.write_bytes((made.folder / "tls.key").read_bytes())
    key.chmod(0o644)
    with pytest.raises(fastrack.KeyPermissionError):
        tour.RemoteDesk("https://192.0.2.1", certificate=made.folder / "tls.pem", private_key=key)


@pytest.mark.parametrize(
    ("kind", "status"),
    {
        "RollbackError": 409,
        **dict.fromkeys(("GrantError", "SignatureError", "FormatError", "AuthenticationError"), 400),
    }.items(),
)
def test_an_error_of_a_desk_is_the_same_error_at_the_visitor(holder, kind, status):
    with pytest.raises(getattr(fastrack, kind)) as caught:
        holder.desk().ask(kind)
    assert type(caught.value).__name__ == kind
    text = str(caught.value)
    assert text.startswith(f"{kind}: expected this, got that.")
    assert text.isprintable()
    assert len(text) <= 1000
    assert caught.value.__notes__ == [f"asking the desk at 127.0.0.1:{holder.port} failed"]
    assert holder.lines()[-1]["status"] == status


def test_what_a_policy_allows_stays_at_the_desk(holder):
    with pytest.raises(fastrack.AttestationError, match="the mrtd of the TDX quote is not accepted") as caught:
        holder.desk().ask("AttestationError")
    error = caught.value
    assert (error.evidence, error.field, error.found, error.wanted) == ("TDX quote", "mrtd", "ab", None)
    assert "allows" not in f"{error} {vars(error)}"


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_error_says_only_that_the_desk_failed(holder, kind):
    with pytest.raises(ConnectionError, match="status 500: the desk failed; its log says more"):
        holder.desk().ask(kind)
    line = holder.lines()[-1]
    assert (line["level"], line["error"]) == ("error", kind)


class Answered:
    """A service whose answers are made up."""

    def __init__(self, status, content):
        self.answer = Answer(content, {}, status)
        self.address = tour.RemoteDesk("http://127.0.0.1:1")._service.address

    def exchange(self, *_, **__):
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        (400, b'{"error":{"type":"SystemExit","message":"x"}}'),
        (400, b'{"error":{"type":"ProviderError","message":"x"}}'),
        (400, b'{"error":{"type":["FormatError"],"message":"x"}}'),
        (400, b'{"error":[]}'),
        (502, b"<html>"),
        (200, b"x" * (_messages.SMALL_LIMIT + 1)),
    ],
)
def test_an_answer_of_a_false_desk_names_no_other_class(answer):
    desk = tour.RemoteDesk("http://127.0.0.1:1")
    object.__setattr__(desk, "_service", Answered(*answer))
    with pytest.raises(ConnectionError) as caught:
        desk.ask("challenge")
    assert type(caught.value) is ConnectionError


def test_steps_and_bodies_have_bounds(holder):
    desk = holder.desk()
    for step in ("finish", "nonsense"):
        with pytest.raises(fastrack.FormatError, match=f"expected a step of challenge, begin, end, got '{step}'"):
            desk.ask(step)
    for step, size in {"challenge": 1025, "end": (1 << 20) + 1}.items():
        with pytest.raises((fastrack.FormatError, ConnectionError)):  # it hangs up while the client sends
            desk.ask(step, b"x" * size)
        assert holder.lines()[-1]["status"] == 413
    with pytest.raises(fastrack.FormatError, match="at most"):
        desk.ask("begin", bytes(_messages.LIMIT + 1))
    with pytest.raises(fastrack.FormatError):
        desk.ask("../challenge")


def garbage():
    """Yield messages that are not in their form, by their step."""
    empty = _messages.pack("begin")
    for step in ("begin", "end"):
        yield from ((step, body) for body in (b"", b"{}", b"\xff" * 100, b"[" * 5000, empty, empty.replace(b"1", b"2")))
    envelope = {"payload": base64.b64encode(b"{}").decode(), "payloadType": "x", "signatures": []}
    yield "begin", _messages.pack("begin", chain=json.dumps(envelope).encode() + b"\n")
    yield "challenge", b"{}"


@pytest.mark.parametrize(("step", "body"), [*garbage()])
def test_a_message_that_is_not_in_its_form_is_refused_as_such(holder, step, body):
    with pytest.raises((fastrack.FormatError, fastrack.SignatureError)):
        holder.desk().ask(step, body)
    assert holder.lines()[-1]["status"] == 400


def test_a_desk_that_is_away_is_a_connection_error(caplog):
    with pytest.raises(ConnectionError, match="Start it, or try again") as caught:
        tour.RemoteDesk("http://127.0.0.1:9").ask("challenge")
    assert type(caught.value) is ConnectionRefusedError
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0", "insecure_loopback": True},
        {"ca": "ca.pem", "insecure_loopback": True},
        {"certificate": "tls.pem", "private_key": "tls.key"},
        {},
    ],
)
@pytest.mark.slow
def test_a_desk_is_served_over_mutual_tls_or_on_a_loopback_address_alone(options):
    with pytest.raises(ValueError, match="serving a desk failed"):
        tour.serve(None, **options)


@pytest.mark.slow
def test_packages_that_are_missing_are_named_with_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastrack.tour._app", None)
    with pytest.raises(fastrack.FastrackError, match=r"fastrack-io\[broker\]"):
        tour.serve(None, insecure_loopback=True)


@pytest.mark.slow
def test_bodies_of_one_address_take_bounded_memory():
    asyncio.run(crowd())


async def crowd():
    """Send a second large body while the first one waits, and again when that has its answer."""
    app = _app.make_app(Echo(), limit=RateLimit(1e6, 1000))
    part, going_on = bytes(_messages.LIMIT // 3), asyncio.Event()

    async def post(*waits):
        parts = iter(waits)

        async def receive():
            wait = next(parts, None)
            if wait is not None:
                await wait.wait()
            return {"type": "http.request", "body": part, "more_body": wait is not None}

        async def send(message):
            answered.append(message)

        answered = []
        await app({**SCOPE, "path": "/v1/tour/begin"}, receive, send)
        return answered[0]["status"]

    open_at_once = asyncio.Event()
    open_at_once.set()
    first = asyncio.create_task(post(open_at_once, going_on))
    await asyncio.sleep(0.01)
    assert await post(open_at_once, open_at_once) == 503  # all that an address may have, beside a third of it
    going_on.set()
    assert await first == 200
    assert await post(open_at_once, open_at_once) == 200


class Echo:
    def ask(self, step, body=b""):
        return step.encode()


SCOPE = {
    "type": "http",
    "method": "POST",
    "headers": [(b"content-type", b"application/json")],
    "query_string": b"",
    "client": ("192.0.2.1", 1),
}
