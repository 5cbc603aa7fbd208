"""A broker that is really served, over TLS."""

import importlib
import json
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.client import HTTPException

import pytest
from helpers.foundry.authority import NOW
from helpers.foundry.machine import change, machine, policy, roots, small, spots

import fastrack
from fastrack import attest
from fastrack.attest._broker.ledger import Ledger, read_log
from fastrack.grants import Identity, Signer

THREADS = 16


@pytest.fixture
def start(serve):
    def begin(gpus=1, **options):
        return serve(NOW - datetime.now(UTC), policy(gpus), roots(), **options)

    return begin


def fetch(server, of, **options):
    given = {"owner": server.signer.verifier, "ca": server.folder / "ca.pem", "now": server.now(), **options}
    return attest.fetch_keys(server.url, collect=of, **given)


def ask(server):
    """Return a new challenge."""
    status, body, _ = server.post("/v1/challenges")
    assert status == 200, body
    return attest.Challenge.from_bytes(body)


def reason(answer):
    return json.loads(answer[1])["error"]


# What libraries have to say.
OTHERS = """
import logging, warnings
from fastrack._service.server import _log_as_json

_log_as_json()
warnings.warn("of a library")
logging.getLogger("a.library").warning("of another")
logging.getLogger("a.library").info("unimportant")
"""


def test_warnings_and_what_libraries_log_are_json_too():
    pytest.importorskip("uvicorn")
    done = subprocess.run([sys.executable, "-W", "default", "-c", OTHERS], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert ["of a library" in lines[0]["event"], lines[1]["event"], len(lines)] == [True, "of another", 2]


def test_a_start_that_fails_makes_no_broker(start, tmp_path, monkeypatch):
    running, made = start(), []
    module = importlib.import_module("fastrack._service.server")  # which needs uvicorn, as `start` does
    monkeypatch.setattr(module, "_log_as_json", int)
    (tmp_path / "none.pem").write_text("no certificate")
    (tmp_path / "none.key").touch(0o600)
    options = {"certificate": tmp_path / "none.pem", "private_key": tmp_path / "none.key"}
    for port, files in ((running.port, dict.fromkeys(options)), (0, options)):
        with pytest.raises(OSError, match=r"in use|PEM"):  # the second is an SSLError
            module.serve(lambda: made.append(1), host="127.0.0.1", port=port, **files)
    assert not made  # which would upgrade the database of one that runs, and write into its log


@pytest.mark.parametrize(("cpu", "gpus"), [("tdx", 0), ("tdx", 1), ("snp", 1), ("tdx", 8)])
def test_a_machine_fetches_the_keys(start, cpu, gpus):
    server = start(gpus)
    assert list(fetch(server, machine(cpu, gpus))) == [server.key]
    server.stop()
    entries = read_log(server.folder / "broker.db")
    assert [entry.event for entry in entries] == ["started", "offered", "granted"]
    assert entries[2].details["cpu"]["type"] == cpu
    assert len(entries[2].details["devices"]) == gpus
    lines = server.lines()
    assert [line["event"] for line in lines] == ["listening", "challenge", "offer"]
    assert [line["status"] for line in lines[1:]] == [200, 200]
    text = server.log.read_text() + (server.folder / "broker.db").read_bytes().decode("latin-1")
    assert bytes(server.key.material()).hex() not in text
    assert (server.folder / "broker.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_wrong_client_is_refused(start):
    server = start()
    with pytest.raises(ssl.SSLCertVerificationError):
        fetch(server, machine(), ca=None)
    with pytest.raises(fastrack.SignatureError):
        fetch(server, machine(), owner=Signer.generate().verifier)
    with pytest.raises(fastrack.AttestationError, match="the number of GPUs of the GPU evidence") as caught:
        fetch(server, machine("tdx", 0))
    error = caught.value
    assert (error.evidence, error.field, error.found) == ("GPU evidence", "number of GPUs", "0")
    with pytest.raises(ValueError, match="https"):
        attest.fetch_keys(f"http://example.org:{server.port}", owner=server.signer.verifier)
    context = ssl.create_default_context(cafile=server.folder / "ca.pem")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    server.context = context
    with pytest.raises(ssl.SSLError):
        server.post("/v1/challenges")
    entry = read_log(server.folder / "broker.db")[-1]
    assert (entry.event, entry.details["field"]) == ("refused", "number of GPUs")
    assert "gpu.count" in entry.details["wanted"]  # which only the owner is told


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",  # with which the answer owns the socket
    ],
)
def test_a_broker_that_drips_its_answer_is_waited_for_no_longer_than_told(answer):
    ended = threading.Event()

    def drip():
        with suppress(OSError), listener.accept()[0] as connection:
            connection.sendall(answer)
            while not ended.wait(0.1):
                connection.sendall(b"x" if answer else b"")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        threads = threading.active_count()
        begin = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError, match="timeout="):
            attest.fetch_keys(url, owner=Signer.generate().verifier, timeout=1)
        assert 0.9 < time.monotonic() - begin < 3
        while threading.active_count() > threads:  # and no thread waits on
            assert time.monotonic() - begin < 5
            time.sleep(0.01)
        ended.set()
        thread.join()


@pytest.mark.slow
def test_requests_have_bounds(start):
    server = start(body_seconds=1)
    assert server.post("/v1/challenges", b"x" * 2000)[0] == 413
    assert server.post("/v1/offers", b"{}")[0] == 400
    assert server.post("/v1/offers", b"{}", headers={"Content-Type": "text/plain"})[0] == 415
    assert server.post("/v1/other")[0] == 404
    challenge = ask(server)
    beginning = f'{{"challenge":"{challenge.id}"'.encode()
    with suppress(OSError):  # as the broker hangs up while the client goes on
        server.post("/v1/offers", iter([beginning, *[b"x" * (1 << 20)] * 64]))
    assert server.lines()[-1]["status"] == 413
    with server.open() as connection:
        connection.sendall(b"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Length: 900000000\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    with server.open() as connection:  # which sends no more
        connection.sendall(b"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    with server.open() as connection:  # which breaks off
        connection.sendall(b"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n" + beginning)
    pending = attest.make_offer(challenge, machine())  # for the challenge of those two
    assert server.post("/v1/offers", pending.to_bytes())[0] == 200
    assert reason(server.post("/v1/offers", pending.to_bytes()))["field"] == "challenge"


@pytest.mark.slow
def test_the_rate_is_limited(start):
    server = start(per_minute=60, burst=3)
    answers = [server.post("/v1/challenges") for _ in range(5)]
    assert [answer[0] for answer in answers][:3] == [200, 200, 200]
    assert 429 in {answer[0] for answer in answers}
    assert int(next(answer[2]["Retry-After"] for answer in answers if answer[0] == 429)) in {1, 2}
    time.sleep(1.5)
    assert server.post("/v1/challenges")[0] == 200


# Many clients.


class Clients:
    """Threads that exchange rightly and wrongly, and note every answer. An exchange has a connection of its own."""

    def __init__(self, server, count):
        self.server = server
        self.count = count
        self.lock = threading.Lock()
        self.granted = Counter()  # by challenge
        self.kinds = Counter()
        self.refused = Counter()  # by kind and status
        self.done = 0
        self.problems = []
        self.ledger = Ledger(server.folder / "broker.db")
        self.own = threading.local()

    def post(self, path, body=b""):
        return self.server.post(path, body, connection=self.own.connection)

    def send(self, data):
        """Send an offer; if the broker is away meanwhile, wait for it, and send the same again."""
        for _ in range(600):
            try:
                status, body, _ = self.post("/v1/offers", data)
            except (OSError, HTTPException):  # an SSLError is an OSError
                time.sleep(0.1)
                continue
            if status == 200:
                with self.lock:
                    self.granted[json.loads(body)["challenge"]] += 1
            return status, body
        raise AssertionError("the broker did not come back")

    def challenge(self):
        for _ in range(600):
            try:
                return ask(self)
            except (OSError, HTTPException):  # an SSLError is an OSError
                time.sleep(0.1)
        raise AssertionError("the broker did not come back")

    def refuse(self, kind, data, *statuses):
        status, body = self.send(data)
        with self.lock:
            self.refused[kind, status] += 1
        assert status in statuses, (kind, status, body)
        assert json.loads(body)["error"]["message"], (kind, body)

    def exchange(self, number):
        kind = ("good", "good", "good", "replayed", "expired", "foreign", "altered", "half")[number % 8]
        try:
            with closing(self.server.connect()) as self.own.connection:
                getattr(self, kind)(random.Random(number))
        except Exception as error:  # noqa: BLE001
            self.problems.append(f"{kind}: {error!r}")
        with self.lock:
            self.kinds[kind] += 1
            self.done += 1

    def good(self, _):
        while True:  # the challenge may be used up by an offer whose answer was lost with the broker
            pending = attest.make_offer(self.challenge(), small())
            status, body = self.send(pending.to_bytes())
            if status == 200:
                ring = pending.unlock(body, owner=self.server.signer.verifier, now=self.server.now())
                assert ring.first == self.server.key
                return
            assert status == 409, body

    def replayed(self, _):
        data = attest.make_offer(self.challenge(), small()).to_bytes()
        self.send(data)
        for _ in range(2):
            self.refuse("replayed", data, 409)

    def expired(self, _):
        now = self.server.now()
        end = now.replace(microsecond=0) - timedelta(seconds=1)
        challenge = replace(attest.Challenge.generate(now=now), expires=end)
        self.ledger.add_challenge(challenge, now=now)
        self.refuse("expired", attest.make_offer(challenge, small()).to_bytes(), 409)

    def foreign(self, picks):
        challenge, other = self.challenge(), self.challenge()
        offer = attest.make_offer(challenge, small()).offer
        forged = replace(offer, challenge_id=other.id)
        if picks.random() < 0.5:
            forged = replace(offer, recipient=Identity.generate().recipient)
        self.refuse("foreign", forged.to_bytes(), 403, 409)

    def altered(self, picks):
        data = attest.make_offer(self.challenge(), small()).to_bytes()
        path = picks.choice(spots(json.loads(data)))
        self.refuse("altered", change(data, path, lambda text: alter(text, picks)), 400, 403, 409)

    def half(self, picks):
        data = attest.make_offer(self.challenge(), small()).to_bytes()
        try:
            with self.server.open() as connection:
                head = f"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())
                connection.sendall(data[: picks.randrange(len(data))])
        except OSError:
            pass
        assert self.send(data)[0] in {200, 409}


def alter(text, picks):
    at = picks.randrange(max(len(text) - 4, 1))
    return text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]


def run_clients(server, count, kills):
    clients = Clients(server, count)
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(clients.exchange, number) for number in range(count)]
        for part in range(1, kills + 1):
            while clients.done < part * count // (kills + 1):
                time.sleep(0.01)
            server.kill()
            server.start()
        for future in futures:
            future.result()
    clients.ledger.close()
    return clients


@pytest.mark.parametrize(
    ("count", "kills"), [(80, 1), pytest.param(1000, 3, marks=[pytest.mark.nightly, pytest.mark.timeout(280)])]
)
@pytest.mark.slow
def test_exchanges_of_many_clients_with_a_broker_that_is_killed(start, count, kills):
    server = start()
    clients = run_clients(server, count, kills)
    assert clients.problems == []
    assert clients.done == count
    assert set(clients.granted.values()) == {1}
    assert clients.kinds["good"] == count * 3 // 8
    assert {kind for kind, _ in clients.refused} == {"replayed", "expired", "foreign", "altered"}
    server.kill()
    entries = read_log(server.folder / "broker.db")
    events = "offered", "granted"
    offered, granted = (Counter(e.details["challenge"] for e in entries if e.event == event) for event in events)
    assert set(offered.values()) == set(granted.values()) == {1}  # no challenge is used twice
    assert set(clients.granted) <= set(granted) <= set(offered)
    lost = len(granted) - len(clients.granted)
    assert lost <= kills * THREADS
    assert sum(entry.event == "started" for entry in entries) == kills + 1
    assert all(isinstance(line, dict) for line in server.lines())


@pytest.mark.slow
def test_ranks_on_different_machines_that_prove_what_they_are_become_a_group(start):
    torch = pytest.importorskip("torch")
    from helpers.network import Network, on_ranks

    server = start(0)
    rings = [fetch(server, machine(cpu, 0)) for cpu in ("tdx", "snp")]
    assert rings[0].first == rings[1].first == server.key
    results = on_ranks(Network(2), rings, lambda group: group.all_reduce(torch.ones(3)).tolist())
    assert results == [[2, 2, 2]] * 2
