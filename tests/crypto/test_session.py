"""Every transfer has a key of its own, and none outlives its process."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.forking import in_forked_child

from fastrack._crypto.session import Session
from fastrack.errors import ClosedError


def draw(session):
    key = session.next_key()  # kept alive: it wipes its material when it goes
    return bytes(key.material)


@pytest.mark.parametrize("bits", [128, 256])
def test_keys_differ_between_transfers_threads_and_sessions(bits):
    sessions = [Session(bits), Session(bits)]
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(draw, sessions * 800))
    assert len(keys) == 1600
    assert {len(key) for key in keys} == {bits // 8 + 12}


def test_a_forked_child_draws_other_keys_than_its_parent():
    session = Session()
    secret = bytes(session._secret)
    child = in_forked_child(lambda: draw(session))
    assert child != draw(session)
    assert bytes(session._secret) == secret
    assert in_forked_child(lambda: bytes(session._secret)) != secret


def test_a_fork_that_python_was_not_told_of_is_noticed(monkeypatch):
    session = Session()
    secret = bytes(session._secret)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    session.next_key()
    assert bytes(session._secret) != secret


def test_wiping_overwrites_the_secret_for_forked_children_too():
    session = Session()
    secret = session._secret
    session.wipe()
    assert not any(secret)
    for where in (lambda draw: draw(), in_forked_child):
        assert where(lambda: refused(session))


def refused(session):
    with pytest.raises(ClosedError):
        session.next_key()
    return True


def test_a_session_is_not_pickled_and_shows_no_secret():
    session = Session()
    with pytest.raises(TypeError, match="session"):
        pickle.dumps(session)
    assert bytes(session._secret).hex() not in repr(session)


def test_copies_of_a_process_draw_different_keys():
    first, second = Session(), Session()
    second._secret[:] = first._secret  # as in two machines that were started from one snapshot
    assert draw(first)[:-12] != draw(second)[:-12]
