"""Transfers to a device and back: what comes out is what went in, or an error and zeros, in the streams' order."""

import collections
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.tampering import tampered

import fastrack
from bench.gpu import known
from bench.gpu.channels import channel_on
from fastrack import AuthenticationError, Channel, DeviceError, Key
from fastrack._devices.cuda.link import STATE_SIZE
from fastrack.format import CHUNK_SIZE

SMALL = {"slab": 4 * CHUNK_SIZE, "lead": CHUNK_SIZE}
SIZES = [0, 1, 15, 16, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 4 * CHUNK_SIZE, 5 * (1 << 20) + 7]
LARGE = (70 << 20) + 7  # eleven slabs, through six staging buffers
SHARED = 2_000_000  # of each thread
MIDDLE = 3_000_000  # of each call that is not waited for


def data(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.fixture(scope="module", params=[{}, SMALL], ids=["slabs as they are", "small slabs"])
def channel(request, gpu, owner):
    with channel_on(gpu.driver, owner, **request.param) as channel:
        yield channel


@pytest.fixture(scope="module")
def move(channel, frame):
    """To the device, as an array of the frame."""
    return lambda obj, **options: channel.to_device(obj, framework=frame.name, **options)


def test_the_cases_of_the_gcm_specification_open_and_are_sealed(gpu):
    assert known.check(gpu) >= 3 * len(known.CASES)


class TestToDevice:
    def test_sealed_and_plain_tensors_arrive(self, move, frame, owner):
        for size in (*SIZES, LARGE):
            plain = data(size)
            assert np.array_equal(frame.read(move(fastrack.seal(plain, owner))), plain), size
            assert np.array_equal(frame.read(move(plain)), plain), size

    @pytest.mark.parametrize("bits", [128, 256])
    def test_keys_of_both_sizes_will_do(self, move, frame, bits):
        key, plain = Key.generate(bits), data(100_001)
        assert np.array_equal(frame.read(move(fastrack.seal(plain, key), keys=key)), plain)

    def test_keeps_dtype_and_shape(self, move, frame, owner):
        plain = np.random.default_rng(0).standard_normal((37, 5, 11)).astype(np.float32)
        moved = move(fastrack.seal(plain, owner))
        assert tuple(moved.shape) == plain.shape
        assert np.array_equal(frame.read(moved), plain)

    def test_keeps_what_numpy_has_no_name_for(self, real, channel, owner):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this torch cannot use a GPU")
        tensor = torch.randn(50, 20).to(torch.bfloat16)
        moved = channel.to_device(fastrack.seal(tensor, owner))
        assert moved.dtype == torch.bfloat16
        assert str(moved.device) == real
        assert torch.equal(moved.cpu(), tensor)
        assert torch.equal(channel.to_device(tensor).cpu(), tensor)

    def test_numpy_keeps_no_arrays_there(self, channel):
        with pytest.raises(DeviceError, match="NumPy keeps no arrays"):
            channel.to_device(data(3), framework="numpy")

    def test_a_nest_comes_back_as_it_was(self, move, frame, owner):
        Batch = collections.namedtuple("Batch", ["x", "y"])  # noqa: PYI024
        moved = move({"b": Batch(data(5), [fastrack.seal(data(9), owner), "text"]), "n": None})
        assert type(moved["b"]) is Batch
        assert np.array_equal(frame.read(moved["b"].x), data(5))
        assert np.array_equal(frame.read(moved["b"].y[0]), data(9))
        assert moved["b"].y[1] == "text"
        assert moved["n"] is None

    def test_a_sealed_file_arrives(self, move, frame, owner, tmp_path):
        pytest.importorskip("safetensors")
        path = tmp_path / "x.safetensors"
        fastrack.save_file({"a": data(100_000), "b": data(5)}, path, owner)
        with fastrack.load_file(path) as file:
            moved = move(file)
        assert np.array_equal(frame.read(moved["a"]), data(100_000))
        assert np.array_equal(frame.read(moved["b"]), data(5))

    def test_the_function_of_that_name_and_a_public_channel_lead_there_too(self, real, frame, owner):
        plain = data(100_000)
        moved = fastrack.to_device(fastrack.seal(plain, owner), real, keys=owner, framework=frame.name)
        assert np.array_equal(frame.read(moved), plain)
        with Channel(real, keys=owner) as channel:
            assert channel.device == real
            moved = channel.to_device(fastrack.seal(plain, owner), framework=frame.name)
            assert np.array_equal(frame.read(moved), plain)
            assert channel.stats.bytes == plain.size


class TestRows:
    @pytest.mark.parametrize("width", [1, 7, 100, CHUNK_SIZE, 3 * CHUNK_SIZE + 5])
    def test_arrive_in_the_order_asked_for(self, move, frame, owner, width):
        plain = data(60 * width).reshape(60, width)
        rows = np.random.default_rng(1).integers(-60, 60, 2000 if width < CHUNK_SIZE else 90)
        sealed = fastrack.seal(plain, owner)
        assert np.array_equal(frame.read(move(sealed[rows])), plain[rows])
        assert np.array_equal(frame.read(move(sealed[::-7])), plain[::-7])
        assert np.array_equal(frame.read(move(sealed[59])), plain[59])

    def test_of_many_chunks_or_none_arrive(self, move, frame, owner):
        plain = data(50 * CHUNK_SIZE + 77).reshape(-1, 1)
        assert np.array_equal(frame.read(move(fastrack.seal(plain, owner)[::3])), plain[::3])
        assert frame.read(move(fastrack.seal(data(100), owner)[3:3])).size == 0

    def test_of_an_altered_chunk_are_refused_and_no_others(self, move, frame, owner):
        plain = data(10 * CHUNK_SIZE).reshape(10, CHUNK_SIZE)
        sealed = tampered(fastrack.seal(plain, owner), 56 + 3 * 16400)
        assert np.array_equal(frame.read(move(sealed[[0, 9]])), plain[[0, 9]])
        with pytest.raises(AuthenticationError) as caught:
            move(sealed[[0, 3, 9]])
        assert caught.value.chunk == 3


class TestOut:
    def test_is_filled_and_returned(self, channel, frame, owner):
        plain = data(100_000)
        out = frame.make(np.full(plain.size, 7, np.uint8))
        assert channel.to_device(fastrack.seal(plain, owner), out=out) is out
        assert np.array_equal(frame.read(out), plain)

    @pytest.mark.parametrize("start", [1, 3, 8, 13])
    def test_may_lie_anywhere_in_another_array(self, channel, frame, owner, start):
        plain = data(3 * CHUNK_SIZE + 11)
        around = frame.make(np.full(plain.size + 32, 7, np.uint8))
        out = frame.part(around, start, start + plain.size)
        channel.to_device(fastrack.seal(plain, owner), out=out)
        found = frame.read(around)
        assert np.array_equal(found[start : start + plain.size], plain)
        assert set(found[:start]) | set(found[start + plain.size :]) == {7}
        assert np.array_equal(fastrack.unseal(channel.to_host(out), owner, framework="numpy"), plain)

    @pytest.mark.parametrize("place", [0, 30, 56, 56 + 16400 + 5, -1], ids=["salt", "commitment", "0", "1", "last tag"])
    def test_holds_zeros_after_a_refusal(self, channel, frame, owner, place):
        out = frame.make(np.full(40_000, 7, np.uint8))
        with pytest.raises(AuthenticationError) as caught:
            channel.to_device(tampered(fastrack.seal(data(40_000), owner, name="images"), place), out=out)
        assert not frame.read(out).any()
        assert caught.value.tensor == "images"
        assert caught.value.chunk == {0: None, 30: None, 56: 0, 56 + 16400 + 5: 1, -1: 2}[place]

    def test_that_does_not_fit_or_lies_on_the_host_is_refused(self, channel, frame):
        with pytest.raises(ValueError, match="dtype and shape"):
            channel.to_device(data(3), out=frame.make(data(4)))
        with pytest.raises(TypeError, match="expected an array on"):
            channel.to_device(data(3), out=np.zeros(3, np.uint8))

    def test_a_bit_of_any_place_counts(self, channel, frame, owner):
        plain = data(2 * CHUNK_SIZE + 100)
        sealed, out = fastrack.seal(plain, owner), frame.make(plain)
        for place in np.random.default_rng(2).integers(56, len(sealed.message), 50).tolist():
            with pytest.raises(AuthenticationError):
                channel.to_device(tampered(sealed, place), out=out)
            assert not frame.read(out).any()
        channel.to_device(sealed, out=out)
        assert np.array_equal(frame.read(out), plain)


class TestNonBlocking:
    def test_transfers_arrive_in_the_order_of_the_stream(self, move, frame, owner):
        plains = [data(MIDDLE + n, n) for n in range(6)]
        moved = [move(fastrack.seal(plain, owner), non_blocking=True) for plain in plains]
        later = [frame.plus_one(x) for x in moved]
        for plain, x, y in zip(plains, moved, later, strict=True):
            assert np.array_equal(frame.read(y), plain + np.uint8(1))
            assert np.array_equal(frame.read(x), plain)

    def test_a_refusal_is_told_later_and_zeros_until_then(self, channel, move, frame, owner):
        plain = data(5 * CHUNK_SIZE)
        bad = tampered(fastrack.seal(plain, owner, name="images"), 56 + 2 * 16400)
        moved = move(bad, non_blocking=True)
        found = frame.read(moved)
        assert not found[2 * CHUNK_SIZE : 3 * CHUNK_SIZE].any()
        with pytest.raises(AuthenticationError) as caught:
            channel.synchronize()
        assert (caught.value.tensor, caught.value.chunk) == ("images", 2)
        channel.synchronize()
        assert np.array_equal(frame.read(move(fastrack.seal(plain, owner))), plain)

    def test_what_the_caller_still_reads_is_not_overwritten(self, channel, frame, owner):
        before, after = data(MIDDLE, 1), data(MIDDLE, 2)
        sealed, out = fastrack.seal(after, owner), frame.make(before)
        for _ in range(3):
            channel.to_device(fastrack.seal(before, owner), out=out)
            busy = frame.keep_busy()
            copy = frame.plus_one(out)
            channel.to_device(sealed, out=out, non_blocking=True)
            assert np.array_equal(frame.read(copy), before + np.uint8(1))
            assert np.array_equal(frame.read(out), after)
            channel.synchronize()
            del busy

    def test_a_side_stream_sees_what_it_asked_for(self, move, frame, owner):
        plain = data(MIDDLE)
        sealed = fastrack.seal(plain, owner)
        for _ in range(5):
            with frame.side_stream():
                busy = frame.keep_busy()
                found = frame.read(frame.plus_one(move(sealed, non_blocking=True)))
                del busy
            assert np.array_equal(found, plain + np.uint8(1))


class TestToHost:
    @pytest.mark.parametrize("size", [*SIZES, None])
    def test_leaves_the_device_sealed_and_opens_on_the_host(self, channel, frame, owner, size):
        plain = data(LARGE if size is None else size)
        sealed = channel.to_host(frame.make(plain), key=owner, name="weights")
        assert sealed.name == "weights"
        assert np.array_equal(fastrack.unseal(sealed, owner, framework="numpy"), plain)
        moved = fastrack.to_device(sealed, "cpu", keys=owner, framework="numpy")
        assert np.array_equal(moved, plain)

    def test_and_back_again(self, channel, frame, move, owner):
        plain = np.random.default_rng(0).standard_normal((999, 33)).astype(np.float32)
        x = frame.make(plain)
        for _ in range(5):
            x = move(channel.to_host(x, key=owner))
        assert np.array_equal(frame.read(x), plain)

    def test_waits_for_what_makes_the_tensor(self, channel, frame, owner):
        plain = data(MIDDLE)
        for _ in range(5):
            with frame.side_stream():
                x = frame.make(plain)
                busy = frame.keep_busy()
                sealed = channel.to_host(frame.plus_one(x), key=owner)
                del busy
            assert np.array_equal(fastrack.unseal(sealed, owner, framework="numpy"), plain + np.uint8(1))


class TestVault:
    def test_arrays_wait_sealed_and_come_back_in_any_order(self, real, frame):
        plains = [data(size, seed) for seed, size in enumerate(SIZES)]
        with fastrack.Vault() as vault:
            tickets = [vault.put("block", frame.make(plain)) for plain in plains]
            assert {ticket.device for ticket in tickets} == {real}
            for ticket, plain in zip(tickets[::-1], plains[::-1], strict=True):
                assert np.array_equal(frame.read(vault.get(ticket)), plain)
                out = frame.make(np.full(plain.size, 7, np.uint8))
                assert np.array_equal(frame.read(vault.get(ticket, out=out)), plain)
            assert np.array_equal(np.asarray(vault.get(tickets[3], device="cpu")), plains[3])
            back = vault.get(vault.put("host", plains[3]), device=real)
            if frame.name == "cupy":
                assert np.array_equal(frame.read(back), plains[3])

    def test_what_was_altered_meanwhile_leaves_zeros(self, real, frame):
        vault = fastrack.Vault()
        ticket, out = vault.put("block", frame.make(data(SHARED))), frame.make(np.full(SHARED, 7, np.uint8))
        ticket._place[SHARED // 2] ^= 1
        with pytest.raises(AuthenticationError, match="'block', chunk"):
            vault.get(ticket, out=out)
        assert not frame.read(out).any()

    def test_places_are_used_again_when_nothing_reads_from_them(self, real, frame):
        vault, plains = fastrack.Vault(), [data(SHARED, seed) for seed in range(4)]

        def work(seed):
            return all(
                np.array_equal(frame.read(vault.get(vault.put("block", frame.make(plains[seed])))), plains[seed])
                for _ in range(4)
            )

        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(work, range(4)))
        assert vault.nbytes <= 4 * 2 * SHARED


class TestChannel:
    def test_eight_threads_share_one(self, channel, frame, owner):
        plains = [data(SHARED + seed, seed) for seed in range(8)]
        sealed = [fastrack.seal(plain, owner) for plain in plains]
        start = threading.Barrier(8)

        def work(index):
            start.wait(60)
            good = True
            for _ in range(3):
                x = channel.to_device(sealed[index], framework=frame.name)
                good &= np.array_equal(frame.read(x), plains[index])
                back = channel.to_host(channel.to_device(plains[index], framework=frame.name), key=owner)
                good &= np.array_equal(fastrack.unseal(back, owner, framework="numpy"), plains[index])
                rows = channel.to_device(sealed[index][100:90_000:7], framework=frame.name)
                good &= np.array_equal(frame.read(rows), plains[index][100:90_000:7])
            return good

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))

    def test_no_key_stays_on_the_device(self, gpu, channel, frame, owner):
        frame.read(channel.to_device(fastrack.seal(data(100_000), owner), framework=frame.name))
        channel.to_host(channel.to_device(data(100_000), framework=frame.name), key=owner)
        channel.to_device([fastrack.seal(data(size), owner) for size in (20_000, 20, 0)], framework=frame.name)
        channel.synchronize()
        states = [state for block in channel._device._states._blocks for state in block.states]
        assert {state.slots > 1 for state in states} == {False, True}  # for one message, and for many
        stream = gpu.driver.stream(high_priority=False)
        for state in states:
            expanded = gpu.driver.host(STATE_SIZE * state.slots)
            gpu.download(expanded, state.states, stream)
            gpu.wait(stream)
            assert not expanded.any()

    def test_closing_wipes_the_ring(self, gpu, frame, owner):
        with channel_on(gpu.driver, owner, **SMALL) as channel:
            frame.read(channel.to_device(data(300_000), framework=frame.name))
            slots = [slot for pool in channel._pools for slot in pool._returned]
            assert slots
            assert any(slot.memory.any() for slot in slots)
        stream = gpu.driver.stream(high_priority=False)
        for slot in slots:
            assert not slot.memory.any()
            there = gpu.driver.host(slot.memory.size)
            gpu.download(there, slot.device_ptr, stream)
            gpu.wait(stream)
            assert not there.any()

    def test_gives_back_the_memory_it_took(self, gpu, frame, owner):
        sealed = fastrack.seal(data(20_000_000), owner)

        def use():
            with channel_on(gpu.driver, owner) as channel:
                x = channel.to_device(sealed, framework=frame.name)
                channel.to_host(x, key=owner)
                with pytest.raises(AuthenticationError):
                    channel.to_device(tampered(sealed, -1), framework=frame.name)
            gc.collect()

        for _ in range(3):
            use()
        before = gpu.in_use()
        for _ in range(12):
            use()
        assert gpu.in_use() - before < 48 << 20  # each had staging buffers
