"""Ranks on different machines that get the secret of their group from a broker, each for its own evidence."""

from datetime import UTC, datetime

import pytest
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

from fastrack import attest

pytest.importorskip("torch")

import torch
from helpers.network import Network, on_ranks


@pytest.mark.slow
def test_ranks_that_prove_what_they_are_become_a_group(serve):
    server = serve(NOW - datetime.now(UTC), policy(0), roots())
    given = {"owner": server.signer.verifier, "ca": server.folder / "ca.pem", "now": server.now()}
    rings = [attest.fetch_keys(server.url, collect=Machine(cpu, 0), **given) for cpu in ("tdx", "snp")]
    assert rings[0].first == rings[1].first == server.key
    results = on_ranks(Network(2), rings, lambda group: group.all_reduce(torch.ones(3)).tolist())
    assert results == [[2, 2, 2]] * 2
