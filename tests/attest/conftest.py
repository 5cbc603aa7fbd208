from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

EVIDENCE = Path(os.environ.get("FASTRACK_EVIDENCE") or Path(__file__).parents[3] / "shared" / "evidence")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("attestation opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture
def evidence():
    """The folder of evidence from real machines, if it is there."""
    if not EVIDENCE.is_dir():
        pytest.skip("no folder of real evidence; FASTRACK_EVIDENCE names it")
    return EVIDENCE
