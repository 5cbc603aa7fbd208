"""A broker among clients that hold connections, send without end, or come when the disk is full."""

import errno
import json
import os
import resource
import socket
import subprocess
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

from fastrack import attest
from fastrack._service.limits import Quota
from fastrack.attest._broker.ledger import read_log

OTHER = "127.0.0.2"  # the address of who crowds; who exchanges honestly has 127.0.0.1
SHARE = 64  # connections of an address


@pytest.fixture
def start(serve):
    def begin(**options):
        return serve(NOW - datetime.now(UTC), policy(1), roots(), **options)

    return begin


def measure(server, name):
    """Return a figure of the status of a server's process: VmRSS or VmHWM, in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1]) >> 10


def count_descriptors(server):
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def connect(server, address=OTHER):
    return socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(address, 0))


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def exchange(server):
    """Exchange as an honest client does, and return the seconds of the slower of its two requests."""
    times = []
    with closing(server.connect()) as connection:
        begin = time.perf_counter()
        status, body, _ = server.post("/v1/challenges", connection=connection)
        times.append(time.perf_counter() - begin)
        assert status == 200
        pending = attest.make_offer(attest.Challenge.from_bytes(body), Machine("tdx", 1, is_small=True))
        begin = time.perf_counter()
        status, body, _ = server.post("/v1/offers", pending.to_bytes(), connection=connection)
        times.append(time.perf_counter() - begin)
    assert status == 200
    assert pending.unlock(body, owner=server.signer.verifier, now=server.now()).first == server.key
    return max(times)


@contextmanager
def descriptors_for(count):
    """Allow this process as many descriptors more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < count + 512:
        pytest.skip(f"expected {count + 512} descriptors, got {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], count + 512), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("count", "exchanges"), [(300, 3), pytest.param(2000, 40, marks=[pytest.mark.nightly, pytest.mark.timeout(200)])]
)
@pytest.mark.slow
def test_half_open_connections_of_one_address_disturb_no_other(start, count, exchanges):
    server = start()
    exchange(server)
    memory, descriptors = measure(server, "VmRSS"), count_descriptors(server)
    with descriptors_for(count), ExitStack() as stack:
        held = []
        for number in range(count):
            held.append(stack.enter_context(connect(server)))
            if number % 3 == 1:
                held[-1].sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a handshake
        times = [exchange(server) for _ in range(exchanges)]
        grown, opened = measure(server, "VmHWM") - memory, count_descriptors(server) - descriptors
        assert max(times) < 1
        assert sum(map(is_open, held)) <= SHARE
        assert opened <= SHARE + 8
        assert grown <= 64
    assert server.log.stat().st_size < 64 << 10
    refused = [line for line in server.lines() if line["event"] == "connection refused"]
    assert refused[0]["address"] == OTHER
    assert sum(line["count"] for line in refused) <= count


@pytest.mark.slow
def test_a_handshake_and_a_head_have_a_deadline(start):
    server = start(head_seconds=1)
    with ExitStack() as stack:
        bare = stack.enter_context(connect(server))
        idle, dripping, between = (stack.enter_context(server.open()) for _ in range(3))
        between.sendall(b"POST /v1/challenges HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert between.recv(100).startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        dripping.sendall(b"POST /v1/challenges HTTP/1.1\r\nHost: x\r\nX-")
        between.sendall(b"POST /v1/challenges")
        with pytest.raises(OSError, match=r"EOF|reset|Broken pipe"):  # noqa: PT012 - either fails
            while time.monotonic() < begin + 5:
                dripping.sendall(b"x")
                time.sleep(0.1)
            assert dripping.recv(1)
        for one in (bare, idle, between):
            one.settimeout(5)
            with suppress(ConnectionError):  # it may be reset
                while one.recv(1000):  # the rest of an answer, up to the end
                    pass
        assert time.monotonic() < begin + 5
    exchange(server)
    assert all(line["event"] for line in server.lines())


@pytest.mark.slow
def test_an_answer_has_a_deadline_however_much_comes_meanwhile(start):
    server = start(request_seconds=1)
    with server.open() as connection:
        connection.sendall(b"POST /v1/challenges HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"EOF|reset|Broken pipe"):  # noqa: PT012 - either fails
            while time.monotonic() < begin + 5:
                connection.sendall(b"x")
                time.sleep(0.1)
            assert connection.recv(1)
    exchange(server)


@pytest.mark.slow
def test_a_process_without_descriptors_waits_and_says_so_in_few_lines(start):
    server = start()
    exchange(server)  # it listens before its event loop is made, which needs descriptors too
    open_now = count_descriptors(server)
    for limit in (open_now + 1, 4096):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, hard))
        if limit == 4096:
            assert exchange(server) < 10
            break
        with ExitStack() as stack:
            for _ in range(50):
                stack.enter_context(connect(server))
            before = sum(os.times()[:2]), read_ticks(server)
            time.sleep(2)
            assert read_ticks(server) - before[1] < os.sysconf("SC_CLK_TCK")  # it does not turn in circles
    assert server.log.stat().st_size < 4096
    failed = [line for line in server.lines() if line["event"] == "accepting failed"]
    assert failed[0]["error"] == os.strerror(errno.EMFILE)


def read_ticks(server):
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def begin_offer(server, beginning, size=8 << 20):
    """Send an offer but for its last byte, and return its connection."""
    plain = connect(server)
    connection = server.context.wrap_socket(plain, server_hostname="127.0.0.1")
    connection.sendall(b"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    connection.sendall(b"Content-Length: %d\r\n\r\n" % size + beginning)
    with suppress(OSError):  # as the broker hangs up after its answer
        connection.sendall(b"[" * (size - len(beginning) - 1))
    return connection


def answer_of(connection):
    connection.settimeout(20)
    try:
        return int(connection.recv(100).split()[1])
    except (OSError, IndexError):
        return None


def test_an_offer_for_a_challenge_that_is_not_open_is_refused_at_its_beginning(start):
    server = start()
    with server.open() as connection:
        connection.sendall(b"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n" + b'{"challenge":"' + b"a" * 32)
        assert connection.recv(100).startswith(b"HTTP/1.1 409")  # and nothing more was sent
    with server.open() as connection:
        connection.sendall(b"POST /v1/offers HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n")
        connection.sendall(b"Content-Type: application/json\r\n\r\n" + b"[" * 100)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    large = b'{"challenge":"' + b"a" * 32 + b"[" * (4 << 20)
    assert server.post("/v1/offers", large)[0] == 409  # which a client that sends on reads too
    assert [entry.event for entry in read_log(server.folder / "broker.db")] == ["started"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_bodies_of_many_offers_take_bounded_memory(start):
    server = start()
    exchange(server)
    memory = measure(server, "VmRSS")
    opened = attest.Challenge.from_bytes(server.post("/v1/challenges")[1]).id.encode()
    with ExitStack() as stack:
        unknown = [stack.enter_context(begin_offer(server, b'{"challenge":"' + b"a" * 32)) for _ in range(10)]
        assert {answer_of(one) for one in unknown} <= {409, None}
        grown = measure(server, "VmHWM") - memory
        assert grown < 24
        known = [stack.enter_context(begin_offer(server, b'{"challenge":"' + opened)) for _ in range(12)]
        assert exchange(server) < 2
        grown = measure(server, "VmHWM") - memory
        assert grown < 64
        assert len(known) == 12
    assert 503 in {line.get("status") for line in server.lines()}
    assert exchange(server) < 2


def test_addresses_have_a_share_of_a_quota():
    quota = Quota(3, 5)
    assert quota.take("192.0.2.1", 3)
    assert not quota.take("192.0.2.1")
    assert not quota.take("::ffff:192.0.2.1")
    assert quota.take("2001:db8::1")
    assert not quota.take("2001:db8:1::1", 2)
    quota.give_back("192.0.2.1", 3)
    assert quota.take("2001:db8::2", 2)
    assert not quota.take("2001:db8::3")
    assert quota.take("192.0.2.1", 2)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_grants_nothing_and_loses_nothing(start, tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", tmp_path], check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    server = None
    try:
        server = start(database=tmp_path / "broker.db")
        exchange(server)
        filler = tmp_path / "filler"
        challenges = [attest.Challenge.from_bytes(server.post("/v1/challenges")[1]) for _ in range(4)]
        offers = [attest.make_offer(challenge, Machine("tdx", 1, is_small=True)).to_bytes() for challenge in challenges]
        fill(filler)
        answers = [(status, json.loads(body)["error"]["message"]) for status, body, _ in map(post(server), offers)]
        assert {status for status, _ in answers} == {503}
        assert all("database" in told for _, told in answers)
        assert server.post("/v1/challenges")[0] == 503
        filler.unlink()
        granted = [status for status, _, _ in map(post(server), offers)]
        assert set(granted) == {200}  # nothing of a failed attempt was kept, so each can be made again
        assert {status for status, _, _ in map(post(server), offers)} == {409}
        exchange(server)
        server.kill()
        entries = read_log(tmp_path / "broker.db")
        assert sum(entry.event == "granted" for entry in entries) == len(offers) + 2
    finally:
        if server is not None:
            server.kill()
        subprocess.run(["umount", tmp_path], check=True)


def post(server):
    return lambda body: server.post("/v1/offers", body)


def fill(path):
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017


_BOTH = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
_AMBIGUOUS = [
    b"POST /v1/challenges HTTP/1.1\r\n" + _BOTH,
    b"POST /v1/offers HTTP/1.1\r\nContent-Type: application/json\r\n" + _BOTH,
    b"GET /v1/other HTTP/1.1\r\nTransfer-Encoding: chunked\r\ncontent-length: 0\r\n",
    b"POST /v1/challenges HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n",
    b"POST /v1/challenges HTTP/1.1\r\nTransfer-Encoding : chunked\r\n",
    b"POST /v1/challenges HTTP/1.1\r\nContent-Length: +4\r\n",
    b"POST /v1/challenges HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n",
]


@pytest.mark.slow
def test_a_request_whose_body_has_two_lengths_is_refused_and_its_connection_closed(start):
    server = start()
    for head in _AMBIGUOUS:
        with server.open() as connection:
            second = b"POST /v1/challenges HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(head + b"Host: x\r\n\r\n0\r\n\r\n" + second)
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
        assert answer.count(b"HTTP/1.1") == 1, head
        assert int(answer.split()[1]) in {400, 501}, head
    assert not [line for line in server.lines() if line["event"] == "challenge"]
    assert server.post("/v1/challenges")[0] == 200
