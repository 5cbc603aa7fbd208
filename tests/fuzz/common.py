"""The helpers of all targets: a folder, errors that may come, findings, and random bytes that are the same."""

import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from unittest import mock

_TEMPORARY = tempfile.TemporaryDirectory(prefix="fastrack-fuzz-")
FOLDER = Path(_TEMPORARY.name)  # for the files that targets read


class Violation(AssertionError):  # noqa: N818 - it is a finding
    """A breach of an invariant."""


def attempt(action, *errors):
    """Return what `action` gives, or None after one of the errors that may come."""
    with suppress(*errors):
        return action()


def require(condition, message):
    if not condition:
        raise Violation(message)


def put(name, data):
    path = FOLDER / name
    path.write_bytes(data)
    return path


def clear():
    for path in FOLDER.iterdir():
        path.unlink()


def same_salts():
    """Return a context in which random bytes are the same in every run."""
    return mock.patch("os.urandom", Random(1).randbytes)
