"""Quantised values and their scales: bound to each other wherever they are stored, and widened as they are opened."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.cobblestone import Cobblestone256Decryptor
from helpers import by_hand, engines
from helpers.cases import each
from helpers.messages import messages_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file as save_plain

import fastrack
from fastrack import AuthenticationError, FormatError, Key, SealedTensor
from fastrack._crypto import base, openssl
from fastrack._sealed import contexts, file_header, message_headers
from fastrack._sealed.metadata import _MEMBERS
from fastrack._sealed.scales import Scale, scale_of
from fastrack.format import CHUNK_SIZE, chunk_offset

SECRET = bytes(range(32))
VALUES = torch.arange(300 * 256).to(torch.uint8).view(torch.float8_e4m3fn).reshape(300, 256)  # five chunks
SCALES = torch.linspace(0.01, 3, 300).reshape(300, 1)
KINDS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
UNUSUAL = [0.0, -0.0, 1.0, 1e-41, -1e-45, 2.0**119, -(2.0**127), float("inf"), float("-inf"), float("nan"), 3.4e38, 0.3]


def named(cases):
    """Return cases, and their names, for `each`."""
    return {"cases": cases.values(), "ids": cases}


@pytest.fixture(scope="module")
def key():
    return Key.from_bytes(SECRET)


@pytest.fixture
def sealed(key):
    return fastrack.seal(VALUES, key, "w", scale=SCALES)


@pytest.fixture
def path(tmp_path, key):
    fastrack.save_file({"w": VALUES, "s": SCALES}, tmp_path / "x.safetensors", key, scales={"w": "s"})
    return tmp_path / "x.safetensors"


def widened_apart(values, scales, block):
    """Multiply values by their scales in float32, and convert the products, with torch."""
    rows = values.float().reshape(-1, values.shape[-1])
    grid = scales.float().reshape(-1, -(-rows.shape[1] // block[1]))
    spread = grid.repeat_interleave(block[0], 0)[: len(rows)].repeat_interleave(block[1], 1)[:, : rows.shape[1]]
    return (rows * spread).bfloat16().reshape(values.shape)


def words(tensor):
    """The words of BF16, with one NaN."""
    return torch.where(tensor.isnan(), 0x7FC0, tensor.view(torch.int16).int())


def require_equal(sealed, key, values, scales):
    found = fastrack.to_device(sealed, keys=key, dtype=torch.bfloat16)
    expected = widened_apart(values, scales, sealed.context.scale.block)
    assert torch.equal(found.view(torch.int16).int(), words(expected))
    assert torch.equal(_with_numpy(sealed, key).int(), words(expected).reshape(-1))


def _with_numpy(sealed, key):
    """Open by the engine without the native extension."""
    verdict, opened = _open_by(openssl.OpenSSLEngine(), sealed, key)
    assert verdict is None
    return torch.from_numpy(opened)


def _open_by(engine, sealed, key):
    """Return the verdict of an engine, and the words of the result."""
    parts, scale = (sealed.scale, sealed), sealed.context.scale
    opened = [np.zeros(sealed.scale.nbytes, np.uint8), np.ones(2 * sealed.nbytes, np.uint8)]
    memories = [base.HostMemory.of(each, writable=True) for each in opened]
    scaling = base.Scaling(memories[0], scale.dtype, sealed.dtype, (sealed.shape or (1,))[-1], *scale.block)
    keys = [message_headers.open_header(part, fastrack.KeyRing(key)) for part in parts]
    sizes, chunks = [part.nbytes for part in parts], [part.memory for part in parts]
    messages = messages_of(keys, sizes, memories, sealed=chunks, scalings=[None, scaling])
    return engine.open_jobs(messages), opened[1].view(np.int16)


@each(
    "shape,of",
    **named(
        {
            "one in all": ((300, 256), (1,)),
            "per row": ((300, 256), (300, 1)),
            "blocks, the last ones short": ((576, 384), (5, 3)),
            "groups": ((7, 16384), (7, 128)),
            "odd rows": ((64, 33), (64, 1)),
            "per column": ((20, 32), (1, 32)),
            "per matrix": ((4, 6, 10), (4, 1, 1)),
            "per row of each matrix": ((4, 6, 10), (4, 6, 1)),
            "a vector": ((1024,), (8,)),
            "one value": ((1, 1), (1, 1)),
        }
    ),
)
@pytest.mark.slow
def test_values_come_out_as_if_opened_and_widened_apart(key, shape, of):
    values = torch.arange(int(np.prod(shape))).to(torch.uint8).reshape(shape)
    for number, (kind, scale_kind) in enumerate((k, s) for k in KINDS for s in (torch.float32, torch.bfloat16)):
        scales = torch.tensor(np.resize(np.roll(UNUSUAL, number), of), dtype=torch.float32).to(scale_kind)
        require_equal(fastrack.seal(values.view(kind), key, scale=scales), key, values.view(kind), scales)


@each("kind", KINDS)
def test_all_values_by_all_unusual_scales_are_equal_bit_for_bit(key, kind):
    values = torch.arange(256).to(torch.uint8).repeat(len(UNUSUAL), 1).view(kind)
    scales = torch.tensor(UNUSUAL).reshape(-1, 1)
    require_equal(fastrack.seal(values, key, scale=scales), key, values, scales)


@each("kind", KINDS)
@each("of", [(1, 1), (4195, 1), (33, 8)])  # 8 blocks of 128 columns, the last of which has 105
@pytest.mark.slow
def test_large_results_are_equal_wherever_they_begin(key, kind, of):
    values = torch.randint(256, (4195, 1001), dtype=torch.uint8)
    scales = torch.tensor(np.resize(UNUSUAL, of), dtype=torch.float32)
    sealed = fastrack.seal(values.view(kind), key, scale=scales)
    expected = words(widened_apart(values.view(kind), scales, sealed.context.scale.block))
    for offset in (0, 1, 32):
        out = torch.zeros(values.numel() + 64, dtype=torch.bfloat16)[offset:][: values.numel()].view(values.shape)
        fastrack.to_device(sealed, keys=key, out=out, dtype="BF16")
        assert torch.equal(out.view(torch.int16).int(), expected)


@given(data=st.data())
@pytest.mark.slow
def test_any_shape_and_scale_is_equal_bit_for_bit(data):
    key, rows, columns = Key.from_bytes(SECRET), *(data.draw(st.integers(1, 300)) for _ in range(2))
    values = torch.randint(256, (rows, columns), dtype=torch.uint8).view(data.draw(st.sampled_from(KINDS)))
    of = data.draw(st.sampled_from([(1, 1), (rows, 1), (1, columns), (rows, columns)]))
    bits = torch.randint(-(2**31), 2**31, of, dtype=torch.int64).to(torch.int32)
    require_equal(fastrack.seal(values, key, scale=bits.view(torch.float32)), key, values, bits.view(torch.float32))


def test_values_are_opened_as_they_are_unless_a_dtype_is_given(key, path):
    with fastrack.load_file(path) as file:
        assert fastrack.to_device(file["w"], keys=key).dtype == torch.float8_e4m3fn
        assert file["w"].scale.name == "s"
        assert file["s"].scale is None
    apart = words(widened_apart(VALUES, SCALES, (1, 256)))
    opened = fastrack.load_tensors(path, keys=key, dtype="bfloat16")
    assert list(opened) == ["w"]
    assert torch.equal(words(opened["w"]), apart)
    with fastrack.safe_open(path, keys=key, dtype=torch.bfloat16) as file:
        assert file.keys() == ["w"]
        assert torch.equal(words(file.get_tensor("w")), apart)


def test_the_result_is_written_into_out_and_into_trees(key, sealed):
    out = torch.empty(VALUES.shape, dtype=torch.bfloat16)
    tree = {"a": [sealed], "b": torch.ones(2, dtype=torch.bfloat16)}
    with fastrack.Channel("cpu", keys=key) as channel:
        channel.to_device(sealed, out=out, dtype="BF16")
        opened = channel.to_device(tree, dtype="BF16")
        assert channel.stats.transfers == 3
    assert torch.equal(words(out), words(opened["a"][0]))


def test_other_tensors_must_have_the_dtype_already(key, sealed):
    plain = torch.ones(3)
    assert torch.equal(fastrack.to_device(plain, dtype=torch.float32), plain)
    for given_, dtype in ((plain, "BF16"), (sealed[2:4], "BF16"), (sealed, "F32"), ({"a": [sealed.scale]}, "BF16")):
        with pytest.raises(ValueError, match=r"dtype=: expected a tensor of (F32|BF16)"):
            fastrack.to_device(given_, keys=key, dtype=dtype)
    with pytest.raises(ValueError, match="Open the whole tensor, if it is of quantised values"):
        fastrack.to_device(sealed[2:4], keys=key, dtype="BF16")
    with pytest.raises(TypeError, match="dtype=: expected one of bool, "):
        fastrack.to_device(plain, dtype="half")
    assert fastrack.to_device(sealed[2:4], keys=key).dtype == torch.float8_e4m3fn


# What binds scales to values.


def test_values_and_scales_stay_together(tmp_path, key, sealed):
    other = Key.generate()
    fastrack.save_file({"w": sealed, "x": torch.ones(3)}, tmp_path / "a", key)
    fastrack.rekey_file(tmp_path / "a", tmp_path / "b", key, key=other)
    apart = words(widened_apart(VALUES, SCALES, (1, 256)))
    with fastrack.load_file(tmp_path / "a") as first, fastrack.load_file(tmp_path / "b") as second:
        copies = SealedTensor.from_bytes(sealed.to_bytes()), pickle.loads(pickle.dumps(sealed)), first["w"], second["w"]
        for copy in copies:
            opened = fastrack.to_device(copy, keys=[key, other], dtype=torch.bfloat16)
            assert torch.equal(words(opened), apart)
        assert sorted(first) == sorted(second) == ["w", "w_scale", "x"]


def test_an_altered_scale_is_refused_and_nothing_is_left(key, sealed):
    data = bytearray(sealed.to_bytes())
    data[-17] ^= 1  # of the scales, which come last
    altered = SealedTensor.from_bytes(data)
    out = torch.ones(VALUES.shape, dtype=torch.bfloat16)
    with pytest.raises(AuthenticationError, match="'w_scale', chunk 0"):
        fastrack.to_device(altered, keys=key, out=out, dtype="BF16")
    assert not out.view(torch.int16).any()


def test_an_altered_chunk_of_values_is_zeros_even_by_an_infinite_scale(key):
    sealed = fastrack.seal(VALUES, key, "w", scale=torch.tensor([float("inf")]))
    data = bytearray(sealed.message)
    data[chunk_offset(1) + 5] ^= 1
    bad = SealedTensor(sealed.context, np.frombuffer(bytes(data), np.uint8), key.id, scale=sealed.scale)
    with pytest.raises(AuthenticationError, match="'w', chunk 1"):
        fastrack.to_device(bad, keys=key, dtype="BF16")
    for engine in (engines.make(), openssl.OpenSSLEngine()):
        verdict, opened = _open_by(engine, bad, key)
        assert verdict == (1, 1)
        assert not opened[CHUNK_SIZE : 2 * CHUNK_SIZE].any()
        assert opened[:CHUNK_SIZE].any()


def test_scales_of_other_values_are_refused(key, sealed):
    other = fastrack.seal(VALUES, key, "w", scale=SCALES)
    for scale in (other.scale, sealed, None):
        with pytest.raises(FormatError, match="expected the scales that it was sealed with"):
            SealedTensor(sealed.context, sealed.read_message(0, sealed.message_size), key.id, scale=scale)
    with pytest.raises(ValueError, match="expected 'w_scale' to be the scales that it was sealed with"):
        fastrack.save_file({"w": sealed, "w_scale": SCALES}, "unwritten.safetensors", key)


@each(
    "change,error",
    **named(
        {
            "another association": (lambda entries: entries["w"]["scale"].update(name="t"), AuthenticationError),
            "another block": (lambda entries: entries["w"]["scale"].update(block=[1, 200]), FormatError),
            "values without scales": (lambda entries: entries["w"].pop("scale"), AuthenticationError),
            "scales that are not there": (lambda entries: entries["w"]["scale"].update(name="u"), FormatError),
            "scales of scales": (lambda entries: entries["s"].update(scale=entries["w"]["scale"]), FormatError),
            "another shape": (lambda entries: entries["w"]["scale"].update(shape=[1, 300]), FormatError),
            "an element too many": (lambda entries: entries["w"]["scale"].update(more=1), FormatError),
            "a block of nothing": (lambda entries: entries["w"]["scale"].update(block=[0, 256]), FormatError),
            "blocks that are no list": (lambda entries: entries["w"]["scale"].update(block="12"), FormatError),
            "a name that is no text": (lambda entries: entries["w"]["scale"].update(name=3), FormatError),
            "no object": (lambda entries: entries["w"].update(scale=[1]), FormatError),
        }
    ),
)
def test_an_altered_entry_is_refused(tmp_path, key, change, error):
    path = tmp_path / "x.safetensors"
    fastrack.save_file({"w": VALUES, "s": SCALES, "t": SCALES}, path, key, scales={"w": "s"})
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:stop])
    marks = header.pop("__metadata__")
    del header["fastrack.guard"]
    entries = json.loads(marks["fastrack.tensors"])
    change(entries)
    marks["fastrack.tensors"] = json.dumps(entries)
    named = {name: ("U8", tuple(entry["shape"])) for name, entry in header.items()}
    path.write_bytes(file_header.encode_header(named, marks) + data[stop:])
    with pytest.raises(error), fastrack.load_file(path) as file:
        fastrack.to_device(file["w"], keys=key)


@each(
    "shape,of",
    **named(
        {
            "two readings": ((192, 8), (2, 1)),
            "no reading": ((7, 8), (5, 1)),
            "other dimensions": ((8, 8), (8,)),
            "too many": ((8, 8), (16, 1)),
            "none": ((8, 8), (0, 1)),
            "no values": ((0, 8), (1,)),
            "blocks across matrices": ((2, 192, 8), (2, 2, 1)),
        }
    ),
)
def test_scales_that_do_not_fit_are_refused(key, shape, of):
    with pytest.raises(ValueError, match="Give one for all values, for each row, or for each block"):
        fastrack.seal(np.zeros(shape, np.int8), key, scale=np.ones(of, np.float32))


def test_values_and_scales_of_other_dtypes_are_refused(key, tmp_path):
    one = np.ones(1, np.float32)
    unlike = np.ones((3, 4), np.float32), np.ones((256, 1), np.float32)  # whose shapes do not fit either
    for values, scales in ((np.ones(2, np.int16), one), (np.ones(2, np.int8), np.ones(1)), unlike):
        with pytest.raises(ValueError, match="expected scales of F32 or BF16"):
            fastrack.seal(values, key, scale=scales)
    pair = {"w": np.ones((2, 2), np.int8), "s": np.ones(1, np.float32)}
    for scales, plain in (({"w": "t"}, []), ({"w": "s"}, ["s"]), ({"w": "s", "s": "w"}, [])):
        with pytest.raises(ValueError, match="scales=: expected values and scales to seal"):
            fastrack.save_file(pair, tmp_path / "x", key, plain=plain, scales=scales)


def test_a_block_that_is_given_is_taken():
    given_block = scale_of("I8", (192, 8), "F32", (2, 1), "s", (128, 8))
    assert given_block == Scale((128, 8), "F32", "s", (2, 1))


# Models.


def make_model(folder, **quantization):
    """Write a model of two weights in blocks of 128, one that is no product alone, and one that is not quantised."""
    folder.mkdir()
    weights = {"a.weight": VALUES[:192, :128].contiguous(), "a.weight_scale_inv": SCALES[:2].contiguous()}
    weights |= {"b.weight": VALUES.view(torch.int8), "b.weight_scale": SCALES, "norm.weight": torch.ones(4)}
    weights |= {"c.weight": VALUES.view(torch.int8), "c.weight_scale": SCALES, "c.weight_zero_point": torch.ones(1)}
    save_plain({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization} if quantization else {}))
    return weights


def test_the_weights_of_a_quantised_model_are_bound_to_their_scales(tmp_path, key):
    weights = make_model(tmp_path / "model", quant_method="fp8", weight_block_size=[128, 128])
    fastrack.seal_folder(tmp_path / "model", tmp_path / "sealed", key)
    with fastrack.load_folder(tmp_path / "sealed", key).open("model.safetensors") as file:
        assert {name: tensor.scale.name for name, tensor in file.items() if tensor.scale is not None} == {
            "a.weight": "a.weight_scale_inv"
        }
        assert torch.equal(fastrack.unseal(file["c.weight"], key), weights["c.weight"])
        require_equal(file["a.weight"], key, weights["a.weight"], weights["a.weight_scale_inv"])
    fastrack.unseal_folder(tmp_path / "sealed", tmp_path / "back", key)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_a_block_is_read_from_the_shapes_where_the_configuration_has_none(tmp_path, key):
    make_model(tmp_path / "model", quant_method="compressed-tensors")
    fastrack.seal_folder(tmp_path / "model", tmp_path / "sealed", key)
    with fastrack.load_folder(tmp_path / "sealed", key).open("model.safetensors") as file:
        assert file["b.weight"].context.scale.block == (1, 256)
        assert file["a.weight"].scale is None  # its 192 rows may be in blocks of 96 or of 128
        assert file["c.weight"].scale is None


def test_a_model_without_a_quantisation_is_sealed_as_it_was(tmp_path, key):
    make_model(tmp_path / "model")
    fastrack.seal_folder(tmp_path / "model", tmp_path / "sealed", key)
    with fastrack.load_folder(tmp_path / "sealed", key).open("model.safetensors") as file:
        assert all(tensor.scale is None for tensor in file.values())


# Other readers.


def test_the_context_is_that_of_the_page():
    scale = Scale((1, 4096), "F32", "s", (4096, 1))
    context = contexts.MessageContext("w", "F8_E4M3", (4096, 4096), "0" * 32, "tensor", scale)
    assert context.encode() == (
        b'fastrack/tensor@1\0{"dtype":"F8_E4M3","file":"' + b"0" * 32 + b'","name":"w","scale":{"block":[1,4096],'
        b'"dtype":"F32","name":"s","shape":[4096,1]},"shape":[4096,4096]}'
    )


def test_a_reader_of_0_1_refuses_the_entry(path):
    path.write_bytes(by_hand.drop_guard(path.read_bytes()))
    with safe_open(path, framework="numpy") as file:
        entries = json.loads(file.metadata()["fastrack.tensors"])
    assert entries["w"].keys() != _MEMBERS == {"dtype", "shape"}  # all that 0.1 knows, and it refuses any other
    assert entries["s"].keys() == _MEMBERS
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    assert "`entry of 'w': expected a dtype and a shape, got {…}; the metadata was altered`" in page  # as 0.1 said


def test_it_opens_without_fastrack(path):
    path.write_bytes(by_hand.drop_guard(path.read_bytes()))

    def open_one(name):
        with safe_open(path, framework="numpy") as file:
            metadata, message = file.metadata(), file.get_tensor(name)
        members = json.loads(metadata["fastrack.tensors"])[name]
        context = {**members, "file": metadata["fastrack.file"], "name": name}
        text = json.dumps(context, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        decryptor = Cobblestone256Decryptor(SECRET, b"fastrack/tensor@1\0" + text.encode())
        return members, decryptor.update(message) + decryptor.finalize()

    members, plain = open_one("w")
    values = np.frombuffer(plain, np.uint8).astype(np.uint16).reshape(members["shape"])
    scales = np.frombuffer(open_one(members["scale"]["name"])[1], np.float32).reshape(members["scale"]["shape"])
    exact = ((values & 0x80) << 8 | (values & 0x7F) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    exact[values & 0x7F == 0x7F] = np.nan
    assert members["scale"]["block"] == [1, 256]
    opened = torch.from_numpy(exact * scales).bfloat16()
    assert torch.equal(words(opened), words(widened_apart(VALUES, SCALES, (1, 256))))
