"""Transfers: what comes out is what went in, or an error and zeros. To a device that shares the host's memory, and to
one that has everything staged and works later."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.cuda_on_host import in_confidential_mode
from helpers.forking import in_forked_child
from helpers.staged import StagedWork, staged_channel
from helpers.tampering import tampered
from hypothesis import given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import AuthenticationError, Channel, ClosedError, DeviceError, Key, SealedTensor, UnknownKeyError
from fastrack._crypto import engine as aead
from fastrack._devices.cpu import CpuOperation
from fastrack._devices.cuda.operation import CudaOperation
from fastrack._transfer.staging import PlainSealer

CHUNK_SIZE = 16384
SIZES = [0, 1, 15, 16, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE, 5 * (1 << 20) + 7]


DEVICES = [pytest.param(Channel, id="cpu"), pytest.param(staged_channel, id="staged")]


@pytest.fixture(scope="module", params=[*DEVICES, *in_confidential_mode(pytest.mark.slow)])
def new_channel(request):
    return request.param


@pytest.fixture(scope="module")
def channel(new_channel, key):
    with new_channel(keys=key) as channel:
        yield channel


def require_wiped(keys):
    assert keys
    for message_keys in keys:
        assert not any(message_keys._flat)


def failing(monkeypatch, error):
    """Have the operations of both devices raise when they are given a slab."""
    for operation in (CpuOperation, StagedWork, CudaOperation):
        monkeypatch.setattr(operation, "open", Mock(side_effect=error))


def moved_in_a_child(channel, nest):
    """Move a list in a forked child. On CUDA, which does not survive a fork, return an empty list."""
    if channel.device == "cuda:0":
        with pytest.raises(DeviceError, match="forked"):
            channel.to_device(nest)
        return []
    return channel.to_device(nest, framework="numpy")


def data(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class TestSealedTensors:
    @each("size", SIZES)
    def test_arrive_as_they_were_sealed(self, channel, key, size):
        plain = data(size)
        assert np.array_equal(channel.to_device(fastrack.seal(plain, key), framework="numpy"), plain)

    @pytest.mark.parametrize("bits", [128, 256])
    @pytest.mark.parametrize("engine", ["vaes-512", "vaes-256", "openssl"])
    def test_arrive_through_every_engine(self, new_channel, monkeypatch, bits, engine):
        if engine not in aead.available_engines():
            pytest.skip(f"this CPU has no {engine}")
        key, plain = Key.generate(bits), data(100_000)
        sealed = fastrack.seal(plain, key)
        chosen = aead.get_engine(engine)
        for module in ("_devices.cpu", "_transfer.channel"):
            monkeypatch.setattr(f"fastrack.{module}.get_engine", lambda name=None, threads=None: chosen)
        with new_channel(keys=key) as channel:
            assert np.array_equal(channel.to_device(sealed, framework="numpy"), plain)
            assert np.array_equal(channel.to_device(plain), plain)
            assert np.array_equal(channel.to_device(sealed[5:70_000:3], framework="numpy"), plain[5:70_000:3])
            assert np.array_equal(fastrack.unseal(channel.to_host(plain), key, framework="numpy"), plain)

    def test_become_torch_tensors_where_torch_is_installed(self, channel, key):
        tensor = torch.randn(50, 20).to(torch.bfloat16)
        moved = channel.to_device(fastrack.seal(tensor, key))
        assert moved.dtype == torch.bfloat16
        assert torch.equal(moved, tensor)

    def test_become_numpy_arrays_where_it_is_not(self, channel, key, hide):
        hide("torch")
        assert isinstance(channel.to_device(fastrack.seal(np.arange(3), key)), np.ndarray)

    def test_find_their_key_in_the_call(self, channel):
        other = Key.generate()
        moved = channel.to_device(fastrack.seal(np.arange(3), other), keys=other, framework="numpy")
        assert moved.tolist() == [0, 1, 2]

    def test_find_their_key_in_the_environment(self, new_channel, tmp_path, monkeypatch):
        key = Key.generate()
        key.save(tmp_path / "key")
        monkeypatch.setenv("FASTRACK_KEY_FILE", str(tmp_path / "key"))
        with new_channel() as channel:
            assert channel.to_device(fastrack.seal(np.arange(3), key), framework="numpy").tolist() == [0, 1, 2]


class TestRows:
    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.integers(-300, 299), max_size=60))
    def test_arrive_in_the_order_asked_for(self, channel, key, rows):
        plain = data(300 * 784).reshape(300, 784)
        moved = channel.to_device(fastrack.seal(plain, key)[rows], framework="numpy")
        assert np.array_equal(moved, plain[rows])

    @each("width", [1, 100, CHUNK_SIZE, 3 * CHUNK_SIZE + 5])
    def test_may_be_many_and_the_same(self, channel, key, width):
        plain = data(40 * width).reshape(40, width)
        rows = np.random.default_rng(1).integers(0, 40, 5000 if width == 1 else 300)
        assert np.array_equal(channel.to_device(fastrack.seal(plain, key)[rows], framework="numpy"), plain[rows])
        rows[:] = 39
        assert np.array_equal(channel.to_device(fastrack.seal(plain, key)[rows], framework="numpy"), plain[rows])

    @each(
        ("shape", "rows"),
        [((50 * CHUNK_SIZE + 77, 1), slice(None, None, 3)), ((100,), slice(3, 3)), ((30, 100), 7)],
        ids=["of many chunks", "none", "of one integer"],
    )
    def test_have_the_shape_that_numpy_gives_them(self, channel, key, shape, rows):
        plain = data(math.prod(shape)).reshape(shape)
        moved = channel.to_device(fastrack.seal(plain, key)[rows], framework="numpy")
        assert moved.shape == plain[rows].shape
        assert np.array_equal(moved, plain[rows])

    def test_do_not_look_at_chunks_that_hold_none_of_them(self, channel, key):
        plain = data(10 * CHUNK_SIZE).reshape(10, CHUNK_SIZE)
        sealed = tampered(fastrack.seal(plain, key), 56 + 3 * 16400)
        assert np.array_equal(channel.to_device(sealed[[0, 9]], framework="numpy"), plain[[0, 9]])
        with pytest.raises(AuthenticationError) as caught:
            channel.to_device(sealed[[0, 3, 9]])
        assert caught.value.chunk == 3


class TestPartsOfSeveralTensors:
    @pytest.fixture
    def tables(self):
        return [data(30 * 1000, seed).reshape(30, 1000) for seed in range(3)]

    def batch(self, sealed):
        return fastrack.collate([sealed[which][row] for which, row in [(2, 29), (0, 0), (1, 17), (2, 3)]])

    def test_arrive_in_one_array(self, channel, key, tables):
        moved = channel.to_device(self.batch([fastrack.seal(table, key) for table in tables]), framework="numpy")
        assert np.array_equal(moved, np.stack([tables[2][29], tables[0][0], tables[1][17], tables[2][3]]))

    @pytest.mark.parametrize("bad", [0, 1, 2])
    def test_arrive_all_or_not_at_all(self, channel, key, tables, bad):
        sealed = [fastrack.seal(table, key, f"table {index}") for index, table in enumerate(tables)]
        sealed[bad] = tampered(sealed[bad], 56 + 16400 if bad else 56)
        out = np.full((4, 1000), 7, np.uint8)
        with pytest.raises(AuthenticationError) as caught:
            channel.to_device(self.batch(sealed), out=out)
        assert (caught.value.tensor, caught.value.chunk) == (f"table {bad}", int(bad > 0))
        assert not out.any()

    def test_need_every_key_before_anything_is_moved(self, channel, key, tables):
        sealed = [fastrack.seal(table, Key.generate() if index == 1 else key) for index, table in enumerate(tables)]
        out = np.full((4, 1000), 7, np.uint8)
        with pytest.raises(UnknownKeyError):
            channel.to_device(self.batch(sealed), out=out)
        assert (out == 7).all()

    def test_leave_zeros_and_no_key_after_any_other_fault(self, channel, key, tables, monkeypatch, derived_keys):
        failing(monkeypatch, MemoryError("no slab"))
        out = np.full((4, 1000), 7, np.uint8)
        with pytest.raises(MemoryError):
            channel.to_device(self.batch([fastrack.seal(table, key) for table in tables]), out=out)
        assert not out.any()
        assert [len(keys) for keys in derived_keys] == [3]
        require_wiped(derived_keys)


class TestRefusedHeaders:
    """Nothing is allocated, planned or cleared for a claim that turns out to be false."""

    @pytest.fixture(params=["tensor", "rows", "rows of a batch"])
    def forged(self, request, key):
        good = fastrack.seal(data(300).reshape(100, 3), key, "good")
        bad = tampered(fastrack.seal(data(300).reshape(100, 3), key, "bad"), 30)
        return {"tensor": bad, "rows": bad[::2], "rows of a batch": fastrack.collate([good[::2], bad[::2]])}[
            request.param
        ]

    @pytest.mark.parametrize("where", ["device", "host"])
    def test_cost_no_memory(self, channel, key, forged, monkeypatch, where):
        refuse = Mock(side_effect=AssertionError("done before the header was opened"))
        ranges = fastrack._crypto.gather
        planning = (ranges.ByteRanges, "pieces"), (ranges.EvenRanges, "pieces"), (ranges.EvenRanges, "expand")
        for step in (*planning, (fastrack._tensors.arrays, "empty_bytes")):
            monkeypatch.setattr(*step, refuse)
        with pytest.raises(AuthenticationError) as caught:
            channel.to_device(forged) if where == "device" else fastrack.unseal(forged, key)
        assert (caught.value.tensor, caught.value.chunk) == ("bad", None)

    def test_leave_zeros_in_what_was_to_be_filled_and_no_key(self, channel, forged, derived_keys):
        out = np.full(forged.shape, 7, np.uint8)
        with pytest.raises(AuthenticationError):
            channel.to_device(forged, out=out)
        assert not out.any()
        require_wiped(derived_keys)


class TestPlainTensors:
    @each("size", [*SIZES, 70 << 20])
    @pytest.mark.slow
    def test_arrive_as_they_are(self, channel, size):
        plain = data(min(size, 20 << 20) if channel.device == "cuda:0" else size)
        moved = channel.to_device(plain)
        assert np.array_equal(moved, plain)
        assert not np.shares_memory(moved, plain)

    def test_are_sealed_under_a_key_of_their_own(self, channel, monkeypatch):
        seen = []
        original = type(channel._session).next_keys

        def spy(session, keys, rows):
            original(session, keys, rows)
            seen.extend(bytes(keys.material(row)) for row in rows)

        monkeypatch.setattr(type(channel._session), "next_keys", spy)
        channel.to_device([np.arange(3), np.arange(3)])
        channel.to_device(np.arange(3))
        assert len(set(seen)) == 3

    def test_tampered_with_on_the_way_are_refused(self, key, monkeypatch):
        original = PlainSealer.fill

        def fill(sealer, slab, buffer):
            original(sealer, slab, buffer)
            buffer[slab.sealed_size - 1] ^= 1

        monkeypatch.setattr(PlainSealer, "fill", fill)
        out = np.full(100, 7, np.uint8)
        with staged_channel(keys=key) as channel, pytest.raises(AuthenticationError):
            channel.to_device(data(100), out=out)
        assert not out.any()

    def test_become_another_frameworks_on_request(self, channel):
        assert isinstance(channel.to_device(np.arange(3), framework="torch"), torch.Tensor)
        assert isinstance(channel.to_device(torch.arange(3), framework="numpy"), np.ndarray)


NO_NUMBERS = [np.array(["a", "bc"]), np.array([b"a"]), np.array([{}, None]), np.array(["2026-01-01"], "M8[D]")]
NO_NUMBERS += [np.array([3], "m8[s]"), np.array([(1, 2.0)], "i4,f4"), np.array([b"1234"], "V4")]


class TestNests:
    def test_come_back_as_they_were(self, channel, key):
        Batch = collections.namedtuple("Batch", ["x", "y"])  # noqa: PYI024

        @dataclasses.dataclass
        class Sample:
            image: object
            label: str

        nest = {"batch": Batch(np.arange(3), [fastrack.seal(np.arange(4), key), "text"]), "s": Sample(np.ones(2), "l")}
        moved = channel.to_device(nest, framework="numpy")
        assert type(moved["batch"]) is Batch
        assert moved["batch"].y[0].tolist() == [0, 1, 2, 3]
        assert moved["batch"].y[1] == "text"
        assert moved["s"].image.tolist() == [1, 1]
        assert moved["s"].label == "l"

    def test_leaves_that_are_no_tensors_pass_untouched(self, channel):
        marker = object()
        moved = channel.to_device([marker, None, 3, "x", b"y", np.arange(3)])
        assert moved[:-1] == [marker, None, 3, "x", b"y"]

    @each("leaf", NO_NUMBERS, ids=lambda leaf: leaf.dtype.str)
    def test_arrays_of_other_things_than_numbers_pass_untouched(self, channel, leaf):
        moved = channel.to_device({"id": leaf, "x": np.arange(3)}, out=None)
        assert moved["id"] is leaf
        assert moved["x"].tolist() == [0, 1, 2]

    @each(
        ("leaf", "match"),
        [
            (lambda: torch.zeros(2, dtype=torch.complex128), "complex128.*view_as_real"),
            (lambda: np.zeros(2, complex), "complex128.*array.imag"),
            (lambda: np.zeros(2, ">i4"), "newbyteorder"),
            (lambda: np.ma.array([1, 2], mask=[0, 1]), "mask"),
            (lambda: torch.eye(3).to_sparse(), "sparse_coo.*to_dense"),
            (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
            (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "to_padded_tensor"),
            (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "qint8.*dequantize"),
            (lambda: torch.ones(2, device="meta"), "meta.*no values"),
        ],
        ids=["complex", "NumPy complex", "byte order", "mask", "coo", "csr", "nested", "quantised", "meta"],
    )
    @pytest.mark.filterwarnings("ignore::UserWarning")  # torch's: sparse, nested and quantised tensors may change
    def test_an_error_says_where_in_the_nest_its_leaf_stands(self, channel, leaf, match):
        leaf = leaf()
        with pytest.raises(TypeError, match=rf"^leaf \['image'\]\[1\]: .*{match}"):
            channel.to_device({"image": [np.arange(3), leaf]})
        with pytest.raises(TypeError, match=match) as caught:
            channel.to_device(leaf)
        assert "leaf" not in str(caught.value)

    def test_a_sealed_file_becomes_a_dict_of_tensors(self, tmp_path, channel, key):
        fastrack.save_file({"a": np.arange(3), "b": np.ones(2)}, tmp_path / "f.safetensors", key, plain=["b"])
        with fastrack.load_file(tmp_path / "f.safetensors") as file:
            moved, plain = channel.to_device([file, file.plain], framework="numpy")
        assert {name: value.tolist() for name, value in moved.items()} == {"a": [0, 1, 2]}
        assert {name: value.tolist() for name, value in plain.items()} == {"b": [1, 1]}


class Box(torch.Tensor):
    """A tensor with an attribute that torch's functions do not keep, and that notices when they are called on it."""

    def __repr__(self):
        return "Box"


class Stored(torch.Tensor):
    """A tensor whose elements are elsewhere."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        raise NotImplementedError


class TestTheFormOfATensor:
    def test_of_channels_last_is_kept(self, channel):
        image = torch.rand(2, 3, 8, 5).to(memory_format=torch.channels_last)
        moved = channel.to_device(image)
        assert moved.is_contiguous(memory_format=torch.channels_last)
        assert moved.stride() == image.stride()
        assert torch.equal(moved, image)
        assert moved.data_ptr() != image.data_ptr()

    @each("order", [(1, 0, 2), (2, 1, 0), (2, 0, 1)])
    def test_of_a_transposed_tensor_is_kept(self, channel, order):
        plain = torch.arange(24).reshape(2, 3, 4).permute(order)
        moved = channel.to_device(plain)
        assert moved.stride() == plain.stride()
        assert torch.equal(moved, plain)
        assert np.array_equal(channel.to_device(plain, framework="numpy"), plain.numpy())

    @each(
        "plain",
        [
            torch.arange(6).expand(4, 6),
            torch.arange(24).reshape(4, 6)[:, ::2],
            torch.arange(12).reshape(3, 4)[1:, 1:].T,
            torch.ones(1, 3, 1).expand(2, 3, 4),
            torch.ones(3, 2, dtype=torch.complex64).T.conj(),
            torch.tensor(3.0),
            torch.empty(0, 4).T,
            torch.zeros(0, 3),
        ],
        ids=["one row again", "every other", "part", "one for all", "conjugated", "scalar", "empty", "empty rows"],
    )
    def test_of_other_views_is_that_of_a_fresh_tensor(self, channel, plain):
        moved = channel.to_device(plain)
        assert torch.equal(moved, plain)
        assert moved.shape == plain.shape

    @each("shape", [(4, 4), (2, 3, 4, 5)])
    def test_keeps_a_subclass_and_its_attributes(self, channel, shape):
        box = torch.rand(shape).transpose(0, 1).as_subclass(Box)
        box.format = "XYXY"
        moved = channel.to_device([box])[0]
        assert type(moved) is Box
        assert moved.format == "XYXY"
        assert torch.equal(moved.as_subclass(torch.Tensor), box.as_subclass(torch.Tensor))
        assert type(channel.to_device(box, framework="numpy")) is np.ndarray

    @each("kind", [torch.nn.Parameter, torch.Tensor.requires_grad_])
    def test_makes_a_plain_tensor_of_one_with_a_gradient(self, channel, kind):
        tensor = kind(torch.rand(3))
        moved = channel.to_device(tensor)
        assert type(moved) is torch.Tensor
        assert torch.equal(moved, tensor)
        assert not moved.requires_grad

    def test_of_a_subclass_without_elements_of_its_own_is_refused(self, channel):
        with pytest.raises(TypeError, match=r"^leaf \[0\]: .*Stored"):
            channel.to_device([Stored(torch.ones(2))])
        with pytest.raises(TypeError, match="Stored"):
            fastrack.seal(Stored(torch.ones(2)), Key.generate())


class TestOut:
    def test_is_filled_and_returned(self, channel, key):
        plain, out = data(50_000), np.zeros(50_000, np.uint8)
        assert channel.to_device(fastrack.seal(plain, key), out=out) is out
        assert np.array_equal(out, plain)

    def test_may_be_a_nest(self, channel):
        out = {"a": np.zeros(3, np.int64), "b": [torch.zeros(2)]}
        moved = channel.to_device({"a": np.arange(3), "b": [torch.ones(2)]}, out=out)
        assert moved["a"] is out["a"]
        assert moved["b"][0] is out["b"][0]
        assert out["a"].tolist() == [0, 1, 2]

    @each(
        ("out", "match"),
        [
            (np.zeros(4, np.int64), "shape"),
            (np.zeros(3, np.int32), "shape"),
            (np.zeros((3, 1), np.int64), "shape"),
            (np.zeros(6, np.int64)[::2], "contiguous"),
            (np.broadcast_to(np.zeros(1, np.int64), 3), "contiguous"),
        ],
    )
    def test_that_does_not_fit_is_refused(self, channel, out, match):
        with pytest.raises(ValueError, match=match):
            channel.to_device(np.arange(3), out=out)

    @each("place", [0, 30, 56, 56 + 16400 + 5, -1], ids=["salt", "commitment", "0", "1", "last tag"])
    def test_holds_zeros_after_a_refusal(self, channel, key, place):
        plain = data(40_000)
        out = np.full(40_000, 7, np.uint8)
        with pytest.raises(AuthenticationError) as caught:
            channel.to_device(tampered(fastrack.seal(plain, key, name="images"), place), out=out)
        assert not out.any()
        assert caught.value.tensor == "images"
        assert caught.value.chunk == {0: None, 30: None, 56: 0, 56 + 16400 + 5: 1, -1: 2}[place]

    def test_that_does_not_fit_somewhere_is_touched_nowhere(self, channel):
        out = [np.full(3, 7), np.full(4, 7)]
        with pytest.raises(ValueError, match="shape"):
            channel.to_device([np.arange(3), np.arange(3)], out=out)
        assert out[0].tolist() == [7, 7, 7]

    def test_in_the_memory_of_its_source_is_refused(self, channel, key):
        buffer = data(100_000)
        before = buffer.copy()
        with pytest.raises(ValueError, match="memory"):
            channel.to_device(buffer[:90_000], out=buffer[4096:94_096])
        assert np.array_equal(buffer, before)
        sealed = fastrack.seal(buffer, key)
        message = np.frombuffer(bytes(sealed.message), np.uint8).copy()
        inside = SealedTensor(sealed.context, message, sealed.key_id)
        with pytest.raises(ValueError, match="memory"):
            channel.to_device(inside, out=message[:100_000])
        assert bytes(message) == bytes(sealed.message)

    def test_with_a_gradient_is_filled_only_where_torch_records_nothing(self, channel):
        weight = torch.nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match="gradient"):
            channel.to_device(torch.ones(3), out=weight)
        assert not weight.any()
        with torch.no_grad():
            assert channel.to_device(torch.ones(3), out=weight) is weight
        assert weight.requires_grad
        assert weight.tolist() == [1, 1, 1]

    def test_that_autograd_has_saved_is_known_to_have_changed(self, channel):
        weight, saved = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
        loss = (weight * saved).sum()
        channel.to_device(torch.full((3,), 100.0), out=saved)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()

    def test_every_byte_of_a_small_message_counts(self, channel, key):
        plain = data(100)
        sealed = fastrack.seal(plain, key)
        for place in range(len(sealed.message)):
            with pytest.raises(AuthenticationError):
                channel.to_device(tampered(sealed, place))


class TestToHost:
    @each("size", SIZES)
    def test_leaves_the_device_sealed(self, channel, key, size):
        plain = data(size)
        sealed = channel.to_host(plain, key=key, name="weights")
        assert sealed.name == "weights"
        assert np.array_equal(fastrack.unseal(sealed, key, framework="numpy"), plain)

    def test_takes_a_tensor_of_torch_and_the_channels_first_key(self, channel, key):
        tensor = torch.randn(10, 10).to(torch.float8_e4m3fn)
        sealed = channel.to_host(tensor)
        assert sealed.key_id == key.id
        assert torch.equal(channel.to_device(sealed).view(torch.uint8), tensor.view(torch.uint8))


class TestChannel:
    @pytest.mark.parametrize("device", [None, torch.device("cpu")])
    def test_says_where_it_leads(self, device):
        with Channel(*([device] if device else [])) as channel:
            assert channel.device == "cpu"
            assert repr(channel) == "<Channel to cpu>"
        assert repr(channel) == "<Channel to cpu, closed>"

    @each("device", ["cuda", "cuda:1", "tpu", "cpu:1", ""])
    def test_to_a_device_that_is_not_there_is_refused(self, device):
        with pytest.raises(DeviceError, match=r"cpu"):
            Channel(device)

    def test_once_closed_moves_nothing(self, new_channel, key):
        channel, array = new_channel(keys=key), np.arange(3)
        channel.close()
        channel.close()
        for call in (lambda: channel.to_device(array), lambda: channel.to_host(array), channel.synchronize):
            with pytest.raises(ClosedError):
                call()

    def test_closing_wipes_the_session_and_the_ring(self, new_channel, key):
        channel = new_channel(keys=key)
        channel.to_device(data(100))
        secret = channel._session._secret
        buffers = [buffer for pool in channel._pools for buffer in pool._returned]
        assert all(buffer.memory.any() for buffer in buffers)
        assert bool(buffers) == (channel.device != "cpu")
        channel.close()
        assert not any(secret)
        assert not any(buffer.memory.any() for buffer in buffers)
        assert channel._keys is None

    def test_closing_waits_for_the_transfers_of_other_threads(self, new_channel, key, monkeypatch):
        inside, go_on = threading.Event(), threading.Event()
        for operation in (CpuOperation, StagedWork, CudaOperation):

            def open_later(*arguments, original=operation.open):
                inside.set()
                assert go_on.wait(60)
                original(*arguments)

            monkeypatch.setattr(operation, "open", open_later)
        channel, plain = new_channel(keys=key), data(100_000)
        with ThreadPoolExecutor(2) as pool:
            moving = pool.submit(channel.to_device, plain)
            assert inside.wait(60)
            closing = pool.submit(channel.close)
            with pytest.raises(TimeoutError):
                closing.result(0.1)
            go_on.set()
            assert np.array_equal(moving.result(60), plain)
            closing.result(60)

    def test_counts_what_went_through(self, new_channel, key):
        with new_channel(keys=key) as channel:
            channel.to_device([data(1000), fastrack.seal(data(500), key)])
            channel.to_host(data(100))
            with pytest.raises(UnknownKeyError):
                channel.to_device(fastrack.seal(data(500), Key.generate()))
            stats = channel.stats
        assert (stats.transfers, stats.bytes) == (3, 1600)
        assert 0 < stats.fill + stats.open + stats.seal <= stats.seconds
        assert stats.as_dict()["gbps"] == pytest.approx(1600 / stats.seconds / 1e9)

    @pytest.mark.slow
    def test_sixteen_threads_share_one(self, channel, key):
        plains = [data(3_000_000 + seed, seed) for seed in range(16)]
        sealed = [fastrack.seal(plain, key) for plain in plains]
        start = threading.Barrier(16)

        def work(index):
            start.wait()
            good = True
            for _ in range(1 if channel.device == "cuda:0" else 4):
                good &= np.array_equal(channel.to_device(sealed[index], framework="numpy"), plains[index])
                good &= np.array_equal(channel.to_device(plains[index]), plains[index])
                good &= np.array_equal(
                    channel.to_device(sealed[index][100:90_000:7], framework="numpy"), plains[index][100:90_000:7]
                )
            return good

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(16)))

    def test_a_forked_child_uses_it_after_its_parent(self, channel, new_channel, key):
        plain = data(20 << 20)
        sealed = fastrack.seal(plain, key)
        channel.to_device([plain, sealed])

        def child():
            moved = moved_in_a_child(channel, [plain, sealed])
            with new_channel(keys=key) as fresh:
                moved.append(fresh.to_device(sealed, framework="numpy"))
            moved.append(fastrack.to_device(plain))
            return all(np.array_equal(array, plain) for array in moved)

        assert in_forked_child(child)
        assert np.array_equal(channel.to_device(plain), plain)

    @pytest.mark.slow
    def test_a_fork_in_the_middle_of_transfers_blocks_nobody(self, channel, key):
        plain = data(3_000_000)
        sealed = fastrack.seal(plain, key)
        stop = threading.Event()

        def keep_moving():
            while not stop.is_set():
                channel.to_device([plain, sealed])

        threads = [threading.Thread(target=keep_moving) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert in_forked_child(
                    lambda: all(np.array_equal(array, plain) for array in moved_in_a_child(channel, [plain]))
                )
        finally:
            stop.set()
            for thread in threads:
                thread.join()
