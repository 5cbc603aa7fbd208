"""One sealed tensor takes a shorter way than a list of tensors, with the same results, errors, totals and traces."""

import numpy as np
import pytest
from helpers import derivations
from helpers.messages import messages_of, raw_key

from fastrack import AuthenticationError, Channel, FormatError, Key, SealedTensor, UnknownKeyError, seal
from fastrack._crypto import vector
from fastrack._transfer import channel as channels
from fastrack._transfer import timeline, trace_file
from fastrack.format import ciphertext_size

SIZE = 40_000


@pytest.fixture(scope="module")
def key():
    return Key.generate()


@pytest.fixture(scope="module")
def plain():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


def altered(sealed, place):
    message = np.frombuffer(sealed.message, np.uint8).copy()
    message[place] ^= 1
    return SealedTensor(sealed.context, message, sealed.key_id)


def shared(plain, key):
    """A sealed tensor, and an output in the memory of its message."""
    sealed = seal(plain, key)
    memory = np.frombuffer(sealed.message, np.uint8).copy()
    return SealedTensor(sealed.context, memory, sealed.key_id), memory[56 : 56 + SIZE]


def outcome(run, out):
    try:
        return np.asarray(run()).tobytes(), None, out.tobytes()
    except (AuthenticationError, UnknownKeyError, ValueError, TypeError) as error:
        return None, (type(error), str(error).removeprefix("leaf [0]: ")), out.tobytes()


CASES = {
    "whole": (seal, None),
    "a chunk altered": (lambda plain, key: altered(seal(plain, key), 20_000), AuthenticationError),
    "the header altered": (lambda plain, key: altered(seal(plain, key), 3), AuthenticationError),
    "another key": (lambda plain, _: seal(plain, Key.generate()), UnknownKeyError),
    "another shape": (lambda plain, key: seal(plain[:100], key), ValueError),
    "empty": (lambda plain, key: seal(plain[:0], key), ValueError),
}


@pytest.mark.parametrize("name", CASES)
def test_one_tensor_comes_as_in_a_list(name, plain, key):
    make, error = CASES[name]
    sealed = make(plain, key)
    with Channel("cpu", keys=key) as channel:
        found = []
        for tree in (lambda x: x, lambda x: [x]):
            out = np.full(SIZE, 7, np.uint8)
            found.append(outcome(lambda: channel.to_device(tree(sealed), out=tree(out)), out))  # noqa: B023 - run at once
        assert found[0] == found[1]
        assert found[0][1] is None if error is None else found[0][1][0] is error


def test_an_output_in_the_memory_of_its_message_is_refused_and_left_alone(plain, key):
    sealed, out = shared(plain, key)
    before = out.tobytes()
    with Channel("cpu", keys=key) as channel:
        with pytest.raises(ValueError, match="memory of its own"):
            channel.to_device(sealed, out=out)
        assert out.tobytes() == before
        assert channel.to_device(sealed, framework="numpy").tobytes() == plain.tobytes()


def test_nothing_is_allocated_for_a_header_that_is_not_authentic(plain, key, monkeypatch):
    sealed = altered(seal(plain, key), 3)
    with Channel("cpu", keys=key) as channel:
        monkeypatch.setattr(channel._device, "empty", lambda *_: pytest.fail("memory for a claim"), raising=False)
        with pytest.raises(AuthenticationError):
            channel.to_device(sealed, framework="numpy")


@pytest.mark.parametrize(("target", "source"), [(-1, 0), (1, 0), (0, -1), (0, 16_400)])
def test_the_table_of_one_message_reaches_past_no_memory(target, source):
    memory = [np.zeros(size, np.uint8) for size in (SIZE + target, ciphertext_size(SIZE) + source)]
    messages = messages_of([raw_key(bytes(32))], [SIZE], memory[:1], sealed=memory[1:])
    with pytest.raises((ValueError, FormatError)):
        vector.JobTable(messages)


def test_the_key_of_a_result_that_cannot_be_derived_is_wiped(plain, key, monkeypatch, derived_keys):
    derivations.replace(monkeypatch, lambda *_: 1 / 0)
    with Channel("cpu", keys=key) as channel, pytest.raises(ZeroDivisionError):
        channel.to_host(plain, key=key)
    assert [keys._is_wiped for keys in derived_keys] == [True]


def test_a_torch_tensor_is_filled_too(plain, key):
    torch = pytest.importorskip("torch")
    out = torch.zeros(SIZE, dtype=torch.uint8)
    with Channel("cpu", keys=key) as channel:
        assert channel.to_device(seal(plain, key), out=out) is out
    assert np.array_equal(out.numpy(), plain)


def test_an_empty_output_is_apart_from_all_memory(key):
    sealed = seal(np.empty(0, np.uint8), key)
    memory = np.frombuffer(sealed.message, np.uint8).copy()
    sealed = SealedTensor(sealed.context, memory, sealed.key_id)
    with Channel("cpu", keys=key) as channel:
        assert channel.to_device(sealed, out=memory[60:60]).size == 0


def test_a_chunk_that_fails_leaves_zeros_and_names_the_tensor(plain, key):
    out = np.full(SIZE, 7, np.uint8)
    with Channel("cpu", keys=key) as channel, pytest.raises(AuthenticationError) as caught:
        channel.to_device(altered(seal(plain, key, name="w"), 20_000), out=out)
    assert (caught.value.tensor, caught.value.chunk) == ("w", 1)
    assert not out.any()


def test_it_is_counted_and_traced_like_a_list(plain, key):
    sealed = seal(plain, key)
    with Channel("cpu", keys=key) as channel:
        spans = []
        for tree in (sealed, [sealed]):
            with timeline.recording() as recorded:
                channel.to_device(tree, framework="numpy")
            spans.append([span.name for span in trace_file.spans_of(recorded)])
        assert spans[0] == spans[1]
        assert (channel.stats.transfers, channel.stats.bytes) == (2, 2 * SIZE)


def test_it_is_the_way_of_one_tensor_alone(plain, key, monkeypatch):
    with Channel("cpu", keys=key) as channel:
        with monkeypatch.context() as patch:
            patch.setattr(channels, "Inputs", lambda *_: pytest.fail("a list was made"))
            assert channel.to_device(seal(plain, key), framework="numpy").tobytes() == plain.tobytes()
        assert channel.to_device([seal(plain, key)], framework="numpy")[0].tobytes() == plain.tobytes()
