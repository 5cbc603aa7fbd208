"""Keys on a lease, from a broker that is really served: renewed in time, ended for all that use them."""

import os
import re
import threading
import time
from datetime import UTC, datetime

import numpy as np
import pytest
from helpers.foundry.authority import NOW
from helpers.foundry.machine import policy, roots, small

import fastrack
from fastrack import attest
from fastrack._net.service import Service
from fastrack.attest._broker.ledger import read_log
from fastrack.attest._client import ask_broker
from fastrack.attest._exchange import open_lease
from fastrack.attest._lease import Lease


@pytest.fixture
def start(serve):
    def begin(lease, **options):
        return serve(NOW - datetime.now(UTC), policy(1), roots(), lease=lease, **options)

    return begin


def take(server, on_expiry=None, of=None):
    """Take a lease as `lease_keys` does, by the clock of a broker whose evidence is made up."""
    broker, of = Service(server.url, "the broker", "fetching keys", ca=server.folder / "ca.pem"), of or small()

    seen = None

    def exchange(seconds):
        nonlocal seen
        pending, grants, seen = ask_broker(broker, of, min(60.0, seconds), seen)
        return open_lease(pending, grants, owner=server.signer.verifier, now=server.now())

    return Lease(exchange, on_expiry)


def sealed(server, folder):
    path = folder / "data.safetensors"
    fastrack.save_file({"x": np.arange(1000.0)}, path, server.key)
    return fastrack.load_file(path)["x"]


def is_open(tensor, keys):
    return fastrack.to_device(tensor, keys=keys, framework="numpy").sum() == 499_500


def use_up(tensor, keys):
    """Open a tensor until the lease ends, and return when it was opened last, and the error."""
    last = 0.0
    try:
        while True:
            assert is_open(tensor, keys)
            last = time.monotonic()
    except fastrack.LeaseError as error:
        return last, str(error)


@pytest.mark.slow
def test_a_lease_is_renewed_and_ends_once_its_broker_is_gone(start, tmp_path):
    server, ended, told = start(2), threading.Event(), []

    def on_expiry(error):
        told.append(error)
        ended.set()

    with take(server, on_expiry) as keys:
        tensor, first = sealed(server, tmp_path), keys.first
        assert (keys.seconds, first == server.key) == (2, True)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            assert is_open(tensor, keys)
            time.sleep(0.01)
        assert keys.renewals >= 3
        assert keys.first is first
        killed = time.monotonic()
        server.kill()
        last, error = use_up(tensor, keys)
        assert last - killed < 2
        assert re.match(f"using key {first.id} failed: .*, as the last renewal failed: .*", error)
        assert ended.wait(2)
        with pytest.raises(fastrack.LeaseError):
            fastrack.seal(np.zeros(3), keys)
        assert first.is_wiped
    assert [type(error) for error in told] == [fastrack.LeaseError]
    assert "\n" not in str(told[0])


@pytest.mark.slow
def test_a_lease_that_is_given_back_ends_in_forked_children_and_calls_nothing(start, tmp_path):
    server = start(60)
    told = []
    keys = take(server, told.append)
    tensor = sealed(server, tmp_path)
    assert is_open(tensor, keys)
    asked, answers = os.pipe(), os.pipe()
    if not os.fork():
        code = 1
        try:
            with keys:  # whose end in a child gives nothing back
                assert is_open(tensor, keys)
            keys.close()
            os.write(answers[1], b"opened")
            os.read(asked[0], 1)
            with pytest.raises(fastrack.LeaseError):
                is_open(tensor, keys)
            code = 0
        finally:
            os._exit(code)
    assert os.read(answers[0], 10) == b"opened"
    assert is_open(tensor, keys)
    keys.close()
    os.write(asked[1], b"x")
    assert os.wait()[1] == 0
    with pytest.raises(fastrack.LeaseError, match="given back"):
        is_open(tensor, keys)
    assert told == []


def test_the_owner_decides_whether_keys_are_on_a_lease(start):
    server = start(None)
    with take(server) as keys:
        assert (keys.seconds, keys.first == server.key) == (None, True)
        with pytest.raises(fastrack.LeaseError):
            keys.source  # noqa: B018 - it raises
    assert keys.first == server.key


def test_keys_on_a_lease_are_not_fetched_stored_or_granted(start, tmp_path):
    server = start(60)
    with pytest.raises(fastrack.GrantError, match="lease_keys"):
        attest.fetch_keys(
            server.url, owner=server.signer.verifier, collect=small(), ca=server.folder / "ca.pem", now=server.now()
        )
    with take(server) as keys:
        with pytest.raises(fastrack.GrantError, match="lease"):
            keys.first.save(tmp_path / "kept.key")
        recipient = fastrack.grants.Identity.generate().recipient
        with pytest.raises(fastrack.GrantError, match="lease"):
            fastrack.grants.Grants.issue(keys.first, [recipient], signer=server.signer)


@pytest.mark.slow
def test_a_renewal_is_a_short_entry_that_names_the_first(start):
    server = start(2)
    with take(server) as keys:
        while keys.renewals < 2:
            time.sleep(0.05)
    server.stop()
    entries = read_log(server.folder / "broker.db")
    events = [entry.event for entry in entries]
    assert events[:3] == ["started", "offered", "granted"]
    assert {*events[3:]} == {"offered", "renewed"}
    renewed = [entry for entry in entries if entry.event == "renewed"]
    assert {entry.details["as"] for entry in renewed} == {3}
    assert entries[2].details["lease"] == 2
    assert max(len(str(entry)) for entry in entries[3:]) < 512
