"""Trees of sealed tensors beside arrays that hold no numbers, which stay as they are."""

import numpy as np
import pytest
from helpers import engines
from helpers.cases import each
from helpers.messages import raw_key

import fastrack
from fastrack import ClosedError, Key, SealedTensor, seal, to_device
from fastrack._crypto.message_keys import MessageKeys

PLAIN = np.arange(5000, dtype=np.float32)
BESIDE = [np.array(["a", "b"]), np.array([None, {}]), np.array(["2026-01-01"], "datetime64[D]")]


def sealed_under_zeros(sealed):
    """Return the tensor with other content, sealed by somebody who has no key, under a key and a nonce of zeros."""
    data = bytearray(sealed.to_bytes())
    chunks = np.empty(len(sealed.message) - 56, np.uint8)
    engine = engines.make()
    engine.seal_run(engine.expand_key(raw_key(bytes(32))), (PLAIN + 1).view(np.uint8), chunks, 0)
    data[-chunks.size :] = chunks.tobytes()
    return SealedTensor.from_bytes(data)


@each("beside", BESIDE)
def test_a_sealed_tensor_opens_beside_an_array_without_numbers(key, beside):
    sealed = seal(PLAIN, key)
    for tree in ([beside, sealed, sealed[:10]], [sealed[:10], beside, sealed], {"id": beside, "a": sealed[:10]}):
        found = to_device(tree, keys=key, framework="numpy")
        values = list(found.values()) if isinstance(found, dict) else found
        for value in values:
            if value is not beside:
                np.testing.assert_array_equal(value, PLAIN[: value.size])


@each("beside", BESIDE)
def test_all_sealed_tensors_beside_it_are_of_one_framework(key, beside):
    pytest.importorskip("torch")
    found = to_device([beside, seal(PLAIN, key), seal(PLAIN, key)], keys=key)
    assert type(found[1]) is type(found[2]) is type(to_device(seal(PLAIN, key), keys=key))


@each("beside", [*BESIDE, "text", PLAIN])
@each("keys", ["own", "none", "another"])
def test_a_message_under_a_key_of_zeros_is_never_opened(key, beside, keys):
    forged = sealed_under_zeros(seal(PLAIN, key))
    given = {"own": key, "none": None, "another": Key.generate()}[keys]
    for leaf in (forged, forged[2:5]):
        for tree in ([beside, leaf], [leaf, beside], [beside, PLAIN, leaf]):
            with pytest.raises((fastrack.AuthenticationError, fastrack.UnknownKeyError)):
                to_device(tree, keys=given, framework="numpy")


def test_a_row_without_a_key_is_not_used():
    keys = MessageKeys(2)
    keys.put(1, bytearray(range(1, 45)))
    assert keys.material(1) == bytearray(range(1, 45))
    for use in (lambda: keys.address, lambda: keys.memory, lambda: keys.material(0), lambda: keys.key(0)):
        with pytest.raises(ClosedError, match="a row without one"):
            use()
