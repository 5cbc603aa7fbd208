"""What the kernels' tests share, on the host and on a GPU: a key of each size, and published cases."""

from __future__ import annotations

import pytest

from helpers import reference


@pytest.fixture(scope="session", params=[16, 32], ids=["aes-128", "aes-256"])
def key(request):
    return bytes(range(7, 7 + request.param))


@pytest.fixture(scope="session")
def nonce():
    return bytes(range(200, 212))


@pytest.fixture(scope="session")
def state(host, key, nonce):
    return host.prepare(key, nonce)


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
