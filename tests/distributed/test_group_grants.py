"""A group whose ranks have identities of their own, and get the secret of the group by grants."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.network import Network, on_ranks
from helpers.ranks import run_ranks

import fastrack
from fastrack import AuthenticationError, Key
from fastrack.distributed import SecureGroup
from fastrack.distributed._transport import PointToPoint
from fastrack.errors import GrantError, SignatureError
from fastrack.grants import Grants, Identity, Signer

OWNER = Signer.generate(name="owner")
RANKS = [Identity.generate(name=f"rank{rank}") for rank in range(2)]


def issue(key, *, to=RANKS, **options):
    return Grants.issue(key, [identity.recipient for identity in to], signer=OWNER, **options)


def add(group):
    return group.all_reduce(torch.full((3,), group.rank + 1.0)).tolist()


def test_ranks_with_identities_of_their_own_are_one_group():
    grants = issue(Key.generate())
    assert on_ranks(Network(2), [grants.unlock(identity) for identity in RANKS], add) == [[3, 3, 3]] * 2


def test_ranks_that_were_granted_other_keys_are_refused():
    rings = [issue(Key.generate()).unlock(identity) for identity in RANKS]
    results = on_ranks(Network(2), rings, add, timeout=5)
    assert all(isinstance(result, AuthenticationError) for result in results)


def test_a_rank_without_a_grant_has_no_key():
    with pytest.raises(GrantError):
        issue(Key.generate(), to=RANKS[:1]).unlock(RANKS[1])
    with pytest.raises(GrantError):
        issue(Key.generate(), expires=datetime.now(UTC) + timedelta(days=1)).unlock(
            RANKS[0], now=datetime.now(UTC) + timedelta(days=2)
        )


def test_a_default_for_the_process_is_the_key_of_its_group():
    grants = issue(Key.generate())
    with fastrack.use_keys(grants.unlock(RANKS[0])):
        group = SecureGroup.over(Network(1).transports()[0])
    assert add(group) == [1, 1, 1]
    group.close()


def test_a_rank_without_a_key_raises_that_also_where_another_has_gone(monkeypatch, tmp_path):
    def among(_, seconds):
        tried.append(seconds)
        raise RuntimeError("Connection closed by peer")

    tried = []
    monkeypatch.setattr(PointToPoint, "among", among)
    with pytest.raises(FileNotFoundError):
        SecureGroup(tmp_path / "absent.key", timeout=5)
    assert tried == [5]  # which ends the wait of the others


def start_rank(folder):
    """Be a rank that has the secret file of its identity, the public file of the owner, and the grants."""
    rank = dist.get_rank()
    os.environ["FASTRACK_IDENTITY"] = f"{folder}/rank{rank}"
    os.environ["FASTRACK_OWNER"] = f"{folder}/owner.pub"
    with SecureGroup(f"{folder}/session.grants") as group:
        assert add(group) == [3, 3, 3]
    dist.barrier()
    os.environ["FASTRACK_OWNER"] = f"{folder}/other.pub"
    with pytest.raises(SignatureError):
        SecureGroup(f"{folder}/session.grants")


@pytest.mark.nightly
def test_each_process_opens_a_grants_file_by_its_own_identity(tmp_path):
    for rank, identity in enumerate(RANKS):
        identity.save(tmp_path / f"rank{rank}")
    for name, signer in (("owner", OWNER), ("other", Signer.generate())):
        Path(tmp_path / f"{name}.pub").write_text(f"{signer.verifier}\n")
    issue(Key.generate()).save(tmp_path / "session.grants")
    run_ranks((2, start_rank, tmp_path))
