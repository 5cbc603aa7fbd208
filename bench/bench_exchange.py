"""A whole offer, verified on one core: TDX, GPUs, manifests, OCSP responses. The tests' foundry makes all of it.

"Cold" clears all caches before each round: links of chains, opened manifests, responses and certificates. Every call
checks validity periods. "Warm" is a broker that has seen collateral and chains before, with evidence for a new
challenge in each round.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

import fastrack
from fastrack import attest
from fastrack.grants import Signer

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from bench_attest import forget
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

GPUS = 8
ROUNDS = 20


@cache
def machine(cpu, own_manifests):
    return Machine(cpu, GPUS, own_manifests=own_manifests)


def make(of):
    challenge = attest.Challenge.generate(now=NOW)
    return challenge, attest.make_offer(challenge, of).to_bytes()


@pytest.mark.benchmark(group="a whole offer with 8 GPUs")
@pytest.mark.parametrize("own_manifests", [False, True], ids=["2 manifests", "16 manifests"])
@pytest.mark.parametrize("is_cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_verify_offer(benchmark, cpu, is_cold, own_manifests):
    accepted, trusted = attest.Policy.from_toml(policy(GPUS)), roots()
    of = machine(cpu, own_manifests)

    def prepare():
        challenge, data = make(of)
        if is_cold:
            forget()
        return (data, challenge, accepted), {"now": NOW, "roots": trusted}

    verified = benchmark.pedantic(attest.verify_offer, setup=prepare, rounds=ROUNDS, warmup_rounds=2)
    assert len(verified.devices) == GPUS
    benchmark.extra_info["bytes"] = len(make(of)[1])


@pytest.mark.benchmark(group="the parts around it")
def test_parse_offer(benchmark):
    data = make(machine("tdx", own_manifests=True))[1]
    assert benchmark(attest.Offer.from_bytes, data).evidence.devices


@pytest.mark.benchmark(group="the parts around it")
def test_issue_grants(benchmark):
    challenge, data = make(machine("tdx", own_manifests=False))
    verified = attest.verify_offer(data, challenge, attest.Policy.from_toml(policy(GPUS)), now=NOW, roots=roots())
    key, owner = fastrack.Key.generate(), Signer.generate()
    assert benchmark(attest.issue_grants, verified, key, signer=owner, now=NOW)
