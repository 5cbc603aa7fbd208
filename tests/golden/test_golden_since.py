"""Files of forms that version 0.1 did not write open: of 0.2 and later."""

import golden_contents as contents
import numpy as np
import pytest
from golden_files import VERSIONS, opens, owner_key
from make_golden import block_context, torch_tensor

import fastrack
from fastrack import tour
from fastrack.errors import FastrackError
from fastrack.grants import Verifier
from fastrack.kv import BlockFolder

LATER = [*VERSIONS[1:], pytest.param("written now", marks=pytest.mark.nightly)]
pytestmark = pytest.mark.parametrize("golden", LATER, indirect=True)


@opens("sealed/guarded.safetensors")
def test_a_file_with_the_guard_opens(golden):
    with fastrack.load_file(golden("sealed/guarded.safetensors")) as file:
        assert file.metadata == {"format": "pt"}
        for name in file:
            opened = fastrack.unseal(file[name], owner_key(golden), framework="numpy")
            assert opened.tobytes() == contents.tensor_bytes(name, *contents.ARRAYS[name])


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


@opens("data/indexed/*")
def test_an_index_of_a_data_set_opens(golden):
    folder = golden("data/indexed")
    texts = fastrack.SealedDataset(folder, keys=owner_key(golden), transform=lambda sample: sample["text"])[:]
    assert [text.decode() for text in texts] == [contents.written(row)["text"] for row in range(contents.COUNT)]
    shards = sorted(folder.glob("shard-*"))
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(FastrackError):
        fastrack.SealedDataset(folder, keys=owner_key(golden), transform=len)[:]


@opens("kv/blocks/*")
def test_blocks_of_a_cache_open(golden):
    folder = BlockFolder(golden("kv/blocks"), owner_key(golden))
    for tokens, size in contents.BLOCKS.items():
        block = bytearray(size)
        assert folder.get(block_context(tokens), block)
        assert block == contents.content(f"block {tokens}", size)
        assert not folder.has(block_context(tokens)._replace(salt="another"))


@opens("tours/*", "pairs/owner.signer.pub")
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
