"""Collect the reports of failures and losses that no call is left to raise."""

import logging
import warnings
from contextlib import contextmanager


@contextmanager
def reports():
    """Collect what is logged, and check that each of it was a `ResourceWarning` too."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logger = logging.getLogger("fastrack")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield logged
    finally:
        logger.removeHandler(handler)
    assert [(one.category, str(one.message)) for one in warned] == [(ResourceWarning, message) for message in logged]
