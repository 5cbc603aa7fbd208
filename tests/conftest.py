import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

# Makes `helpers` importable from every test folder.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # and `bench`, which opens a GPU for tests/gpu

from helpers import absent, limits
from helpers.own_environment import take_over

_remove_folders = take_over()  # before a library looks at what the machine has

from helpers.foreign import mark, take_back  # noqa: E402 - not before

from fastrack import Key  # noqa: E402
from fastrack._devices import confidential  # noqa: E402
from fastrack._tensors import arrays  # noqa: E402

if importlib.util.find_spec("hypothesis"):  # which a machine that is lent with its GPU may lack
    from hypothesis import settings

    # A machine that others use too takes longer than 200 ms for an example now and then.
    # Where the checkout cannot be written, examples that failed are not kept.
    more = {} if os.access(Path(__file__).parents[1], os.W_OK) else {"database": None}
    settings.register_profile("anew", deadline=None, **more)
    # A change is tried with the same examples each time, so that what fails is of it. Others are tried at night.
    settings.register_profile("fastrack", deadline=None, derandomize=True)
    settings.load_profile("fastrack")

# What a shell starts in the background ignores interrupts, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules and the list of tests are millions of objects that live as long as the process. They are left out of garbage
# collections, which many tests ask for, and so is before each module what those before it have imported and kept.
gc.disable()


def pytest_collection_finish():
    _leave_out_of_collections()
    gc.enable()


def _leave_out_of_collections():
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    _remove_folders()


def pytest_addoption(parser, pluginmanager):
    parser.addoption("--gpu", metavar="DEVICE", help="the GPU for tests/gpu and tests/kernels: cuda:N, or stand-in")
    parser.addoption("--accept-messages", action="store_true", help="write tests/project/messages.txt as it is now")
    if not pluginmanager.has_plugin("timeout"):  # as on a machine that is lent with its GPU
        parser.addini("timeout", "seconds a test, which only pytest-timeout enforces")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items):
    # Modules with the most slow tests first, so that processes that run side by side end at about the same time.
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="module", autouse=True)
def _other_libraries_as_they_were_before_a_module():
    _leave_out_of_collections()
    before, handlers = mark(), {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    take_back(before)
    for each, handler in handlers.items():  # Ray leaves one that ends the process
        if signal.getsignal(each) is not handler:
            signal.signal(each, handler or signal.SIG_DFL)  # None for one that is not of Python


@pytest.fixture(autouse=True)
def _other_libraries_as_they_were():
    before, variables = mark(), dict(os.environ)
    yield
    take_back(before)
    if os.environ != variables:
        os.environ.clear()
        os.environ |= variables


@pytest.fixture(autouse=True)
def _no_key_of_another_test_requires_a_gpu():
    before = confidential._process.keys.copy()
    yield
    confidential._process.keys = before


@pytest.fixture(scope="session")
def key():
    return Key.generate()


@pytest.fixture
def hide():
    """Return a function that has packages not be installed until the test ends."""
    with pytest.MonkeyPatch.context() as patch:
        yield partial(absent.hide, patch)
    arrays.installed.cache_clear()


@pytest.fixture
def limited():
    """Set limits of the code until the test ends: `limited(attempts=1)`. `helpers.limits` has their names."""
    with ExitStack() as stack:
        yield lambda **values: stack.enter_context(limits.limited(**values))
