"""Message keys that are kept for the next call: they are used for what they were authenticated for, and overwritten."""

import gc
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.derivations import replace
from helpers.forking import in_forked_child

import fastrack
from fastrack import AuthenticationError, Channel, ClosedError, Key, SealedDataset, SealedTensor
from fastrack._crypto import derivation, message_keys, secret_bytes

TABLE = np.random.default_rng(0).integers(0, 256, (300, 200), np.uint8)


class Message:
    pass


@pytest.fixture
def kept():
    return message_keys.MessageKeyCache()


@pytest.fixture
def row():
    """Message keys with one that is not zero."""
    keys = message_keys.MessageKeys(1)
    keys.put(0, bytearray(range(1, 45)))
    return keys


@pytest.fixture
def derivations(monkeypatch):
    """Collect the contexts of all derivations."""
    seen = []
    replace(monkeypatch, lambda derive_rows, *given: seen.extend(given[2]) or derive_rows(*given))
    return seen


@pytest.fixture
def own_key():
    return Key.generate()


@pytest.fixture
def original(own_key):
    return fastrack.seal(TABLE, own_key, name="table")


@pytest.fixture
def message(original):
    """The message of `sealed`, which can be written to."""
    return np.array(original.message)


@pytest.fixture
def sealed(original, message):
    return SealedTensor(original.context, message, original.key_id)


@pytest.fixture
def channel(own_key):
    with Channel("cpu", keys=own_key) as channel:
        yield channel


def secrets_of(kept):
    return [entry.secret for entry in kept._entries.values()]


def test_wiped_message_keys_take_no_others(row):
    row.wipe()
    assert not any(row._flat)
    with pytest.raises(TypeError, match="read-only"):
        row.put(0, bytearray(range(1, 45)))
    with pytest.raises((BufferError, TypeError, ValueError)):
        derivation.derive_rows(bytearray(32), [bytes(56)], [b"context"], [0], row.reserve([0], 256))
    row.wipe()
    assert not any(row._flat)


class TestKeptKeys:
    def test_are_found_for_the_same_message_and_an_equal_proof_alone(self, kept, row):
        message, twin, copy = Message(), Message(), message_keys.MessageKeys(1)
        kept.store(message, (b"header", "context"), row, 0)
        assert not kept.load(twin, (b"header", "context"), copy, 0)
        assert not kept.load(message, (b"healer", "context"), copy, 0)
        assert copy.bits == [0]  # and so no key, which would be of zeros
        assert kept.load(message, (b"header", "context"), copy, 0)
        assert copy.material(0) == row.material(0)

    def test_are_not_found_for_another_object_at_the_same_address(self, kept, row):
        message, later = Message(), Message()
        kept.store(message, b"", row, 0)
        kept._entries[id(later)] = kept._entries.pop(id(message))
        assert not kept.load(later, b"", message_keys.MessageKeys(1), 0)

    @pytest.mark.parametrize("size", [28, 44])
    def test_have_the_size_that_they_had(self, kept, size):
        keys, copy, message = message_keys.MessageKeys(1), message_keys.MessageKeys(1), Message()
        keys.put(0, bytearray(range(1, size + 1)))
        kept.store(message, b"", keys, 0)
        assert kept.load(message, b"", copy, 0)
        assert (copy.bits, copy.material(0)) == (keys.bits, keys.material(0))

    def test_go_with_their_message(self, kept, row):
        message = Message()
        kept.store(message, b"", row, 0)
        del message
        gc.collect()
        assert not len(kept)

    def test_are_overwritten_when_they_go(self, kept, row, monkeypatch):
        wiped = []

        class Watched(secret_bytes.SecretBytes):
            def __del__(self):
                super().__del__()
                wiped.append(bytes(self))

        monkeypatch.setattr(message_keys.MessageKeys, "material", lambda keys, number: Watched(range(1, 45)))
        message = Message()
        kept.store(message, b"", row, 0)
        kept.store(message, b"another proof", row, 0)
        assert wiped == [bytes(44)]
        del message
        gc.collect()
        assert wiped == [bytes(44)] * 2

    def test_are_as_many_as_the_limit_says_and_those_used_last(self, kept, row, limited):
        limited(message_keys_kept=3)
        messages = [Message() for _ in range(5)]
        for message in messages[:3]:
            kept.store(message, b"", row, 0)
        assert kept.load(messages[0], b"", row, 0)
        for message in messages[3:]:
            kept.store(message, b"", row, 0)
        assert [kept.load(message, b"", row, 0) for message in messages] == [True, False, False, True, True]

    def test_are_overwritten_in_place_by_wipe_and_none_is_kept_afterwards(self, kept, row):
        messages = [Message() for _ in range(3)]
        for message in messages:
            kept.store(message, b"", row, 0)
        secrets = secrets_of(kept)
        kept.wipe()
        assert not any(map(any, secrets))
        kept.store(messages[0], b"", row, 0)
        assert not len(kept)
        assert not kept.load(messages[0], b"", row, 0)

    def test_that_are_wiped_during_a_copy_are_not_used(self, kept, row, monkeypatch):
        message, original = Message(), message_keys.MessageKeys.put
        kept.store(message, b"", row, 0)

        def wipe_and_put(keys, number, material):
            kept.wipe()
            original(keys, number, material)

        monkeypatch.setattr(message_keys.MessageKeys, "put", wipe_and_put)
        assert not kept.load(message, b"", message_keys.MessageKeys(1), 0)

    def test_survive_no_fork_and_no_pickle(self, kept, row, monkeypatch):
        message = Message()
        kept.store(message, b"", row, 0)
        copy = message_keys.MessageKeys(1)
        assert in_forked_child(lambda: (len(kept), kept.load(message, b"", copy, 0))) == (0, False)
        with pytest.raises(TypeError, match="derive"):
            pickle.dumps(kept)
        monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork that Python did not detect
        assert not kept.load(message, b"", row, 0)


class TestRowsOfATensor:
    def test_take_one_derivation_however_often_they_are_read(self, channel, sealed, own_key, derivations):
        for row in range(5):
            assert np.array_equal(channel.to_device(sealed[[row, 7]], framework="numpy"), TABLE[[row, 7]])
        assert len(derivations) == 1
        assert len(own_key.message_keys) == 1

    def test_keep_nothing_of_a_tensor_that_is_read_whole(self, channel, sealed, own_key):
        channel.to_device(sealed)
        assert not len(own_key.message_keys)

    def test_keep_nothing_of_a_tensor_whose_header_is_false(self, channel, sealed, own_key, message):
        message[30] ^= 1
        with pytest.raises(AuthenticationError):
            channel.to_device(sealed[:3])
        assert not len(own_key.message_keys)

    def test_are_refused_with_each_altered_byte_of_the_header_after_it_was_authenticated(
        self, channel, sealed, message
    ):
        channel.to_device(sealed[:3])
        for place in range(56):
            message[place] ^= 1
            with pytest.raises(AuthenticationError, match="table"):
                channel.to_device(sealed[:3])
            message[place] ^= 1
            assert np.array_equal(channel.to_device(sealed[:3], framework="numpy"), TABLE[:3])

    def test_are_refused_with_an_altered_chunk_each_time(self, channel, sealed, message):
        channel.to_device(sealed[:3])
        for place in (56, 56 + 16384, 56 + 16399):  # ciphertext and both ends of the tag
            message[place] ^= 1
            for _ in range(3):
                with pytest.raises(AuthenticationError) as caught:
                    channel.to_device(sealed[:3])
                assert caught.value.chunk == 0
            message[place] ^= 1
            assert np.array_equal(channel.to_device(sealed[:3], framework="numpy"), TABLE[:3])

    def test_are_refused_under_another_context(self, channel, sealed):
        channel.to_device(sealed[:3])
        sealed.context = type(sealed.context)("chair", sealed.dtype, sealed.shape, sealed.context.file)
        with pytest.raises(AuthenticationError, match="chair"):
            channel.to_device(sealed[:3])

    def test_are_kept_for_the_context_they_were_derived_for(self, channel, sealed, monkeypatch):
        chair = type(sealed.context)("chair", sealed.dtype, sealed.shape, sealed.context.file)

        def replace_meanwhile(derive_rows, *arguments):
            sealed.context = chair
            return derive_rows(*arguments)

        replace(monkeypatch, replace_meanwhile)
        channel.to_device(sealed[:3])
        monkeypatch.undo()
        with pytest.raises(AuthenticationError, match="chair"):
            channel.to_device(sealed[:3])

    def test_are_refused_by_a_key_that_was_restricted_afterwards(self, channel, sealed, own_key):
        channel.to_device(sealed[:3])
        own_key.restrict(["00" * 16])
        with pytest.raises(fastrack.GrantError):
            channel.to_device(sealed[:3])

    def test_are_refused_by_a_key_that_was_wiped_afterwards(self, channel, sealed, own_key):
        channel.to_device(sealed[:3])
        secrets = secrets_of(own_key.message_keys)
        own_key.wipe()
        assert not any(map(any, secrets))
        with pytest.raises(ClosedError):
            channel.to_device(sealed[:3])
        assert not len(own_key.message_keys)

    def test_are_derived_again_by_another_object_for_the_same_key(self, channel, sealed, own_key, derivations):
        channel.to_device(sealed[:3])
        again = Key.from_bytes(own_key.material())
        channel.to_device(sealed[:3], keys=again)
        assert derivations.count(sealed.context.encode()) <= 2
        with pytest.raises(fastrack.UnknownKeyError):
            channel.to_device(sealed[:3], keys=Key.generate())

    def test_keep_a_key_that_a_wipe_at_any_time_does_not_turn_into_zeros(self, sealed):
        """Under a key of zeros, which anyone knows, other chunks would be authentic."""
        for _ in range(20):
            key = Key.from_bytes(bytes(range(32)))
            tensor = fastrack.seal(TABLE, key)
            with Channel("cpu", keys=key) as channel:
                channel.to_device(tensor[:3])
                wiper = threading.Thread(target=key.wipe)
                wiper.start()
                try:
                    while True:
                        assert np.array_equal(channel.to_device(tensor[:3], framework="numpy"), TABLE[:3])
                except ClosedError:
                    pass
                wiper.join()

    def test_share_a_key_between_threads(self, channel, sealed, derivations):

        def read(start):
            rows = range(start, 300, 4)
            return [channel.to_device(sealed[row], framework="numpy") for row in rows]

        with ThreadPoolExecutor(4) as pool:
            for start, read_rows in enumerate(pool.map(read, range(4))):
                assert np.array_equal(read_rows, TABLE[start::4])
        assert len(derivations) <= 4


def test_the_keys_of_a_data_set_go_with_it(tmp_path, own_key, channel, derivations):
    fastrack.save_file({"x": TABLE, "y": TABLE[::-1]}, tmp_path / "s.safetensors", key=own_key)
    data = SealedDataset(tmp_path / "s.safetensors")
    del derivations[:]
    for row in range(4):
        channel.to_device(data[row])
    assert len(derivations) == 4  # the shape of each column is authenticated, once
    assert len(own_key.message_keys) == 2
    del data
    gc.collect()
    assert not len(own_key.message_keys)


def test_a_bound_tensor_is_authenticated_once_for_its_file(tmp_path, own_key, channel, derivations):
    fastrack.save_file({"x": fastrack.seal(TABLE, own_key, name="x")}, tmp_path / "s.safetensors", key=own_key)
    with fastrack.load_file(tmp_path / "s.safetensors") as file:
        tensor = file["x"]
    assert tensor.binding is not None
    del derivations[:]
    for _ in range(3):
        channel.to_device(tensor[5])
    assert len(derivations) == 2
    tensor.binding = type(tensor.binding)(tensor.binding.file, bytes(56))
    with pytest.raises(AuthenticationError, match="binding"):
        channel.to_device(tensor[5])
