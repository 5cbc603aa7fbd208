"""Data that the kernels' tests share, on the host and on a GPU: a key of each size, and published cases."""

import pytest

from helpers import reference
from helpers.reference import noise
from helpers.runs import plan


@pytest.fixture(scope="session", params=[16, 32], ids=["aes-128", "aes-256"])
def key(request):
    return bytes(range(7, 7 + request.param))


@pytest.fixture(scope="session")
def nonce():
    return bytes(range(200, 212))


@pytest.fixture(scope="session")
def state(host, key, nonce):
    return host.prepare(key, nonce)


def remains_of_secrets(host, key, nonce):
    """Return where the kernels leave a part of a key, of a state or of the plaintext in shared memory, by kernel."""
    plain = noise(700).tobytes()
    sealed = reference.seal(key, nonce, plain)
    state = host.prepare(key, nonce)
    pieces, size = plan([(0, 700)])
    material = state.data.tobytes() + key + plain
    secrets = {material[start : start + 8] for start in range(0, len(material) - 8, 4)} - {bytes(8)}
    launches = {
        "open": lambda: host.open_run(state, sealed),
        "seal": lambda: host.seal_run(state, plain),
        "gather": lambda: host.gather(state, sealed, pieces, 700, size),
    }
    found = {}
    for name, launch in launches.items():
        launch()
        remains = host.remains()
        found[name] = [start for start in range(0, len(remains), 4) if remains[start : start + 8] in secrets]
    return found


def assert_last_chunk(host, state, key, nonce, length):
    """Open and seal a chunk of that length, at some offset."""
    plain = noise(length, seed=length).tobytes()
    sealed = reference.seal(key, nonce, plain, 3)
    assert host.open_run(state, sealed, 3, offset=length % 7) == (None, plain)
    assert host.seal_run(state, plain, 3, offset=length % 5) == sealed


def open_and_seal(host, cases, chunk):
    """Open every case as that chunk, and seal what opens. The published nonce is the one of that chunk."""
    assert cases
    for offset, case in enumerate(cases):
        state = host.prepare(case.key, reference.nonce_of(case.nonce, chunk))
        bad, plain = host.open_run(state, case.sealed, chunk, offset=offset % 16)
        if case.plain is None:
            assert (case.name, bad, plain) == (case.name, chunk, bytes(len(case.sealed) - 16))
        else:
            assert (case.name, bad, plain) == (case.name, None, case.plain)
            sealed = host.seal_run(state, case.plain, chunk, offset=offset % 16)
            assert (case.name, sealed) == (case.name, case.sealed)
