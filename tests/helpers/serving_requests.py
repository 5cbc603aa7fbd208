"""Requests to examples/serving, and the skip of tests where its server cannot run."""

import os
import signal
import time
from pathlib import Path

import pytest

if not (Path(__file__).parents[2] / "examples").exists():
    pytest.skip("the tests run without the examples", allow_module_level=True)
torch = pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
if not hasattr(os, "memfd_create") or not hasattr(signal, "sigtimedwait"):
    pytest.skip("the server takes Linux", allow_module_level=True)

from examples.serving import sealing  # noqa: E402

TOKENS = torch.arange(7)
HEAD, WRAPPED = 64, 1168  # bytes of the first two parts of a request


def sealed(recipient, tokens=TOKENS, *, edition="", age=0):
    return sealing.seal_request(tokens, recipient, edition=edition, now=int(time.time()) - age)
