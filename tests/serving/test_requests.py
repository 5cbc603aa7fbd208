"""Requests, answers and offers of examples/serving, without a server."""

import asyncio
import itertools
import json
import os
import signal
import time
from datetime import datetime

import pytest
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots
from helpers.serving_requests import HEAD, TOKENS, WRAPPED, sealed, torch

import fastrack
from examples.serving import sealing, shared, worker
from examples.serving.sealing import RefusedError
from fastrack import attest
from fastrack.grants import Identity


@pytest.fixture(scope="module")
def machine():
    return Identity.generate()


def opened(body, machine, admit=lambda head: None):
    return sealing.open_request(bytes(body), machine, admit)


def reason_of(*arguments):
    with pytest.raises(RefusedError) as caught:
        opened(*arguments)
    return caught.value.reason


# Requests and answers.


def test_a_request_and_its_answer_open_on_the_other_side(machine):
    body, head, key = sealed(machine.recipient)
    admitted = []
    found, theirs, tokens = opened(body, machine, admitted.append)
    assert admitted == [head] == [found]
    assert theirs == key
    assert torch.equal(tokens, TOKENS)
    answer = sealing.seal_answer(torch.arange(3.0), head, key, "ab" * 16)
    logits, edition = sealing.open_answer(answer, head, key)
    assert edition == "ab" * 16
    assert torch.equal(logits, torch.arange(3.0))


def test_every_cut_of_a_request_is_refused(machine):
    body, _, _ = sealed(machine.recipient)
    for size in range(len(body)):
        assert reason_of(body[:size], machine, pytest.fail) in {"malformed", "altered"}, size
    assert reason_of(body + b"\0", machine, pytest.fail) == "malformed"


def test_every_flipped_byte_of_a_request_is_refused_or_says_nothing(machine):
    body, head, _ = sealed(machine.recipient)
    kept = 0
    for place in range(len(body)):
        altered = bytearray(body)
        altered[place] ^= 1 << place % 8
        try:
            found, _, tokens = opened(altered, machine)
        except RefusedError:
            continue
        kept += 1  # as a field of the tensor's file that nothing reads
        assert place > HEAD + WRAPPED
        assert found == head
        assert torch.equal(tokens, TOKENS)
    assert kept < 64


def test_parts_of_requests_are_not_exchanged(machine):
    one, two = (sealed(machine.recipient)[0] for _ in range(2))
    parts = [[body[:HEAD], body[HEAD : HEAD + WRAPPED], body[HEAD + WRAPPED :]] for body in (one, two)]
    for chosen in itertools.product((0, 1), repeat=3):
        if len(set(chosen)) == 2:
            mixed = b"".join(parts[body][part] for part, body in enumerate(chosen))
            assert reason_of(mixed, machine, pytest.fail) == "altered"
    for order in list(itertools.permutations(range(3)))[1:]:
        mixed = b"".join(parts[0][part] for part in order)
        assert reason_of(mixed, machine, pytest.fail) in {"altered", "machine", "malformed"}


def test_fields_of_a_head_are_not_exchanged(machine):
    body, head, _ = sealed(machine.recipient, edition="12" * 16)
    fields = [body[8:24], body[24:40], body[40:56]]
    for order in list(itertools.permutations(range(3)))[1:]:
        mixed = body[:8] + b"".join(fields[place] for place in order) + body[56:]
        assert reason_of(mixed, machine, pytest.fail) in {"machine", "altered"}
    assert sealing.Head.from_bytes(body[:HEAD]) == head


def test_a_request_for_another_machine_is_refused(machine):
    other = Identity.generate()
    body, _, _ = sealed(other.recipient)
    assert reason_of(body, machine, pytest.fail) == "machine"
    claimed = body[:8] + bytes.fromhex(machine.recipient.id) + body[24:]
    assert reason_of(claimed, machine, pytest.fail) == "altered"


def test_an_answer_is_no_request(machine):
    body, head, key = sealed(machine.recipient)
    answer = sealing.seal_answer(TOKENS, head, key, "ab" * 16)
    assert reason_of(body[: HEAD + WRAPPED] + answer, machine, pytest.fail) == "malformed"


@each("tokens", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(3), torch.zeros(3, dtype=torch.int32)])
def test_tensors_of_another_form_are_refused(machine, tokens):
    assert reason_of(sealed(machine.recipient, tokens)[0], machine, pytest.fail) == "malformed"


def test_an_answer_to_another_request_or_of_another_edition_is_refused(machine):
    _, head, key = sealed(machine.recipient, edition="12" * 16)
    _, other, strange = sealed(machine.recipient)
    good = sealing.seal_answer(TOKENS, head, key, "12" * 16)
    assert sealing.open_answer(good, head, key)[1] == "12" * 16
    for answer in (
        sealing.seal_answer(TOKENS, head, key, "34" * 16),
        sealing.seal_answer(TOKENS, other, key, "12" * 16),
        fastrack.seal(TOKENS, key, "request").to_bytes(),
    ):
        with pytest.raises(fastrack.AuthenticationError):
            sealing.open_answer(answer, head, key)
    with pytest.raises(fastrack.UnknownKeyError):
        sealing.open_answer(sealing.seal_answer(TOKENS, head, strange, "12" * 16), head, key)
    for place in range(len(good) - 80, len(good)):
        altered = bytearray(good)
        altered[place] ^= 1
        with pytest.raises(fastrack.AuthenticationError):
            sealing.open_answer(bytes(altered), head, key)


# Replays.


def head_of(machine, number, age=0):
    return sealing.Head(machine.recipient.id, "", number.to_bytes(16).hex(), int(time.time()) - age)


def test_a_request_is_admitted_once_by_all_processes_together(machine):
    replays = shared.Replays(buckets=1, ways=4)
    for number in range(3):
        replays.admit(head_of(machine, number))
        with pytest.raises(RefusedError, match="replayed"):
            replays.admit(head_of(machine, number))

    def admit():
        with pytest.raises(RefusedError, match="replayed"):
            replays.admit(head_of(machine, 0))
        replays.admit(head_of(machine, 3))

    in_forked_child(admit)
    with pytest.raises(RefusedError, match="replayed"):
        replays.admit(head_of(machine, 3))


@each("age", [61, 3600, -62])
def test_a_stale_request_is_refused(machine, age):
    with pytest.raises(RefusedError, match="stale"):
        shared.Replays().admit(head_of(machine, 0, age))


def test_no_request_is_forgotten_for_another(machine, monkeypatch):
    replays = shared.Replays(buckets=1, ways=4)
    for number in range(4):
        replays.admit(head_of(machine, number))
    with pytest.raises(RefusedError, match="crowded"):
        replays.admit(head_of(machine, 4))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + shared.WINDOW + 2)
    replays.admit(head_of(machine, 4))


def test_a_clock_that_goes_back_admits_nothing_again(machine, monkeypatch):
    replays, now = shared.Replays(buckets=1, ways=1), time.time()
    first = head_of(machine, 0)
    replays.admit(first)
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now + 2 * shared.WINDOW)
        replays.admit(head_of(machine, 1))  # in the place of the first
    with pytest.raises(RefusedError, match="stale"):
        replays.admit(first)


def test_a_process_that_is_killed_with_the_lock_blocks_nobody(machine):
    replays = shared.Replays()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with replays._locked():
            os.write(writing, b"x")
            time.sleep(60)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    replays.admit(head_of(machine, 0))
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


# Offers.


def offer_of(identity, collect, challenge):
    server = worker.Worker(0, identity, collect, shared.Replays(buckets=1), shared.Counters(1))
    return asyncio.run(server._offer_to(challenge))


class Clock(datetime):
    """A clock at the time of the evidence that the tests make."""

    @classmethod
    def now(cls, tz=None):  # noqa: ARG003
        return NOW


def test_an_offer_binds_the_key_of_the_workers_to_evidence_and_challenge(machine, monkeypatch):
    monkeypatch.setattr(sealing, "datetime", Clock)
    challenge = attest.Challenge.generate(now=NOW)
    offer = offer_of(machine, Machine("tdx", 0), challenge)
    verify = sealing.verify_offer(attest.Policy.from_toml(policy(0)), roots=roots())
    assert verify(offer, challenge) == (machine.recipient, challenge.expires)
    with pytest.raises(fastrack.AttestationError):
        sealing.trust_nothing(offer, challenge)
    exchanged = json.loads(offer) | {
        "public": json.loads(offer_of(Identity.generate(), Machine("tdx", 0), challenge))["public"]
    }
    text = json.dumps(exchanged, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    with pytest.raises(fastrack.AttestationError):
        verify(text, challenge)


def test_an_offer_without_evidence_is_accepted_by_nobody_who_does_not_ask_for_it(machine):
    challenge, other = (attest.Challenge.generate(now=NOW) for _ in range(2))
    offer = offer_of(machine, sealing.collect_nothing, challenge)
    assert sealing.trust_nothing(offer, challenge) == (machine.recipient, challenge.expires)
    with pytest.raises(fastrack.AttestationError):
        sealing.trust_nothing(offer, other)
    with pytest.raises(fastrack.FastrackError):
        sealing.verify_offer(attest.Policy.from_toml(policy(0)), roots=roots())(offer, challenge)
