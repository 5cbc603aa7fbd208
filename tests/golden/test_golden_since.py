"""Files of forms that version 0.1 did not write open: of 0.2 and later. Some are of 0.3 and later."""

import base64
import json
from datetime import UTC, datetime

import golden_contents as contents
import numpy as np
import pytest
from golden_files import VERSIONS, cli, load_policy, opens, owner_key
from helpers.by_hand import grants as by_hand
from helpers.by_hand import logs
from make_golden import block_context, torch_tensor

import fastrack
from fastrack import attest, tour
from fastrack.errors import FastrackError
from fastrack.grants import Grants, Verifier
from fastrack.kv import BlockFolder

LATER = [*VERSIONS[1:], pytest.param("written now", marks=pytest.mark.nightly)]
of_0_2 = pytest.mark.parametrize("golden", LATER, indirect=True)
of_0_3 = pytest.mark.parametrize("golden", LATER[1:], indirect=True)


@of_0_2
@opens("sealed/guarded.safetensors")
def test_a_file_with_the_guard_opens(golden):
    with fastrack.load_file(golden("sealed/guarded.safetensors")) as file:
        assert file.metadata == {"format": "pt"}
        for name in file:
            opened = fastrack.unseal(file[name], owner_key(golden), framework="numpy")
            assert opened.tobytes() == contents.tensor_bytes(name, *contents.ARRAYS[name])


@of_0_2
@opens("sealed/quantised.safetensors")
def test_quantised_values_open_and_widen(golden):
    torch = pytest.importorskip("torch")
    with fastrack.load_file(golden("sealed/quantised.safetensors")) as file:
        for name, (dtype, shape) in contents.QUANTISED.items():
            scale, kind, extents, (height, width) = contents.SCALES[name]
            values = fastrack.unseal(file[name], owner_key(golden), framework="torch")
            wanted = torch_tensor(name, dtype, shape)
            assert torch.equal(values.view(torch.uint8), wanted.view(torch.uint8))
            scales = torch_tensor(scale, kind, extents).float().repeat_interleave(height, 0).repeat_interleave(width, 1)
            widened = fastrack.to_device(file[name], keys=owner_key(golden), dtype="bfloat16", framework="torch")
            assert torch.equal(widened.isnan(), (product := wanted.float() * scales).isnan())
            assert torch.equal(widened.nan_to_num(), product.to(torch.bfloat16).nan_to_num())


@of_0_2
@opens("training/later.safetensors")
def test_a_checkpoint_of_more_types_opens(golden):
    torch = pytest.importorskip("torch")
    found, wanted = fastrack.load_checkpoint(golden("training/later.safetensors"), owner_key(golden)), {}
    wanted = contents.later_state(torch)
    weight, expected = found.pop("weight"), wanted.pop("weight")
    assert (found, list(found)) == (wanted, list(wanted))
    assert {name: type(value) for name, value in found.items()} == {name: type(wanted[name]) for name in found}
    assert (type(weight), weight.requires_grad) == (torch.nn.Parameter, False)
    assert torch.equal(weight, expected)


@of_0_2
@opens("data/indexed/*")
def test_an_index_of_a_data_set_opens(golden):
    folder = golden("data/indexed")
    texts = fastrack.SealedDataset(folder, keys=owner_key(golden), transform=lambda sample: sample["text"])[:]
    assert [text.decode() for text in texts] == [contents.written(row)["text"] for row in range(contents.COUNT)]
    shards = sorted(folder.glob("shard-*"))
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(FastrackError):
        fastrack.SealedDataset(folder, keys=owner_key(golden), transform=len)[:]


@of_0_2
@opens("kv/blocks/*")
def test_blocks_of_a_cache_open(golden):
    folder = BlockFolder(golden("kv/blocks"), owner_key(golden))
    for tokens, size in contents.BLOCKS.items():
        block = bytearray(size)
        assert folder.get(block_context(tokens), block)
        assert block == contents.content(f"block {tokens}", size)
        assert not folder.has(block_context(tokens)._replace(salt="another"))


@of_0_2
@opens("tours/v?/*", "pairs/owner.signer.pub")
def test_a_tour_verifies_and_its_models_open(golden):
    owner = Verifier.load(golden("pairs/owner.signer.pub"))
    for version, rows in ((1, 1), (2, 2)):
        folder = golden(f"tours/v{version}")
        chain = tour.Chain.load(folder / "tour.chain", owner=owner)
        assert (len(chain.visits), chain.completion is None) == (version, version == 1)
        state = fastrack.load_checkpoint(folder / "model.safetensors", keys=tour.model_key(chain, owner_key(golden)))
        data = np.arange(8.0).reshape(2, 4)
        total = sum((data + 100 * holder).sum(0) for holder in range(rows))
        assert state["model"]["total"].tolist() == total.tolist()
        with pytest.raises(FastrackError):
            tour.Chain.from_bytes(b"".join(chain.to_bytes().splitlines(keepends=True)[1:]), owner=owner)


@of_0_3
@opens("tours/*.db", "tours/v2/tour.chain", "pairs/owner.signer.pub")
@pytest.mark.slow
def test_databases_of_a_tour_open(golden):
    chain = golden("tours/v2/tour.chain"), "--owner", golden("pairs/owner.signer.pub")
    shown = cli("tour", "verify", *chain, "--database", golden("tours/ada.db"))
    assert (shown["ok"], shown["attempts"]) == (True, [])  # none but those of the chain
    for desk in ("owner", "ada"):
        assert logs.read_log(golden(f"tours/{desk}.db"))[0]
        tour.TourLedger(golden(f"tours/{desk}.db")).close()


@of_0_3
@opens("attestation/policy-later.toml")
def test_a_policy_with_pinned_measurements_opens(golden):
    policy, added = load_policy(golden, "attestation/policy-later.toml")
    assert (policy.gpu.require, added) == ("proved", set())
    pinned = attest.PinnedMeasurements(datetime(2999, 12, 31, tzinfo=UTC), {7: b"\xa5" * 48})
    assert policy.gpu.measurements == {"GH100 610.10.01 96.00.9F.00.01": pinned}


@of_0_3
@opens("attestation/leased-snp.json", "attestation/machine-snp", "pairs/owner.signer.pub")
def test_an_answer_with_a_lease_opens(golden):
    document = json.loads(golden("attestation/leased-snp.json").read_bytes())
    (envelope,) = map(base64.b64decode, document["grants"])
    public = golden("pairs/owner.signer.pub")
    assert Grants.from_bytes(envelope, owner=Verifier.load(public)).seconds == 3600
    payload = by_hand.read_grants(envelope, [public.read_text().rstrip()], version=2)
    assert by_hand.unwrap(payload, golden("attestation/machine-snp").read_bytes()) == contents.SECRETS["owner256"]


@of_0_3
@opens("broker/leased.*", "pairs/owner.signer.pub")
@pytest.mark.slow
def test_a_log_with_leases_and_quarantines_opens(golden):
    database, head = golden("broker/leased.db"), golden("broker/leased.head")
    entries = cli("broker", "log", "--database", database, "--last", 0)["entries"]
    assert [entry["event"] for entry in entries] == [
        *("started", "offered", "granted", "offered", "renewed"),
        *(event for event, _, _ in contents.MARKS),
    ]
    assert [entry["details"] for entry in entries[5:]] == [{"name": name, **told} for _, name, told in contents.MARKS]
    line = golden("pairs/owner.signer.pub").read_text()
    read, last = logs.read_log(database)
    assert read == [(entry["event"], entry["details"]) for entry in entries]
    assert logs.read_head(head.read_bytes(), [line.split()[0]]) == last
    shown = cli("broker", "compare", head, database, "--owner", golden("pairs/owner.signer.pub"))
    assert shown["state"] == "same"
