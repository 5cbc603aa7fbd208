"""Every transfer has a key of its own, and none outlives its process."""

from __future__ import annotations

import os
import pickle
import threading

import pytest
from helpers.forking import in_forked_child

from fastrack._crypto.session import Session
from fastrack.errors import ClosedError


def draw(session):
    key = session.next_key()  # kept alive: it wipes its material when it goes
    return bytes(key.material)


@pytest.mark.parametrize("bits", [128, 256])
def test_keys_differ_from_one_transfer_to_the_next(bits):
    session = Session(bits)
    keys = {draw(session) for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {bits // 8 + 12}


def test_two_sessions_share_no_key():
    assert draw(Session()) != draw(Session())


def test_threads_never_draw_the_same_key():
    session, drawn = Session(), []

    def work():
        drawn.extend(draw(session) for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 1600


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


def test_wiping_overwrites_the_secret():
    session = Session()
    secret = session._secret
    session.wipe()
    assert not any(secret)
    with pytest.raises(ClosedError, match="open another channel"):
        session.next_key()


def test_a_session_cannot_be_pickled():
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(Session())


def test_its_repr_shows_no_secret():
    session = Session()
    assert bytes(session._secret).hex() not in repr(session)


def test_a_wiped_session_stays_wiped_in_a_forked_child():
    session = Session()
    session.wipe()

    def child():
        try:
            session.next_key()
        except ClosedError:
            return True
        return False

    assert in_forked_child(child)


def test_copies_of_a_process_draw_different_keys():
    first, second = Session(), Session()
    second._secret[:] = first._secret  # as in two machines that were started from one snapshot
    assert draw(first)[:-12] != draw(second)[:-12]
