from functools import partial

import pytest
from helpers import engines


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    """Leave forms that no CPU chooses, with wide code on narrow instructions, to the night."""
    for item in items:
        if any(name in item.name for name in engines.EMULATED):
            item.add_marker(pytest.mark.nightly)


@pytest.fixture(scope="session", params=engines.NAMES)
def make_engine(request):
    """Makes the engine under test for a number of threads; the test runs once for each engine."""
    return partial(engines.make, request.param)


@pytest.fixture(scope="session")
def engine_under_test(make_engine):
    return make_engine()


@pytest.fixture(scope="session", params=[16, 32], ids=["aes-128", "aes-256"])
def key(request):
    return bytes(range(7, 7 + request.param))
