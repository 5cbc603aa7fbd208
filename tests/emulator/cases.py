"""Cases that tests run in a process of their own: ``python -m emulator emulator.cases CASE`` prints a line of JSON."""

import gc
import json
import os
import statistics
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import cupy
import numpy as np
from helpers.fake_nvml import FakeNvml
from helpers.forking import in_forked_child
from helpers.foundry import nvidia

import fastrack
from bench.gpu import known
from bench.gpu.gpu import Gpu
from bench.gpu.widened import places
from bench.gpu.widened import widened as known_widened
from emulator.__main__ import emulator
from fastrack import Channel, DeviceError, Key
from fastrack._cli.commands import doctor
from fastrack._devices.cuda import nvrtc
from fastrack._transfer.timeline import recording
from fastrack._transfer.trace_file import spans_of
from fastrack.format import chunk_offset

MIB = 1 << 20
GLOBAL, THREAD_LOCAL = 0, 1  # cudaStreamCaptureMode

_key = Key.generate()


def _data(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def _sealed(size):
    return fastrack.seal(_data(size), _key)


def known_answers():
    """Check the kernels on both devices."""
    return [known.check(Gpu(f"cuda:{index}")) for index in range(2)]


def kernels():
    """Examine the machine as doctor does, with the kernels in the folder `CASE_PACKAGE`, and return what it tells."""
    nvrtc.files = lambda _: Path(os.environ["CASE_PACKAGE"])
    told = dict(doctor._sections(doctor.gather())["GPU"])
    files = emulator.calls().get("cuModuleLoad", 0)
    compiler = "libnvrtc" in Path("/proc/self/maps").read_text()
    return {"self-test": told["self-test"], "kernels": told.get("kernels"), "files": files, "compiler": compiler}


def busy_thread():
    """Measure transfers alone and beside a thread that computes in Python, in milliseconds."""
    sizes = {"large": (64 * MIB, 7), "small": (4096, 30)}
    result = {}
    stop = threading.Event()

    def compute():
        number = 0
        while not stop.is_set():
            number += 1

    with Channel("cuda:0", keys=_key, threads=1) as channel:
        moves = {name: (_sealed(size), cupy.empty(size, np.uint8), n) for name, (size, n) in sizes.items()}

        def measure():
            return {name: _median(channel, *move) for name, move in moves.items()}

        measure()
        result["alone"] = measure()
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            result["beside"] = measure()
        finally:
            stop.set()
            thread.join()
    result["times"] = {name: result["beside"][name] / result["alone"][name] for name in sizes}
    return result


def _median(channel, sealed, out, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        channel.to_device(sealed, out=out)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def calls():
    """Count the calls of messages of 4 KiB to the second device, from a thread whose current one is the first."""
    count = 50
    with Channel("cuda:1", keys=_key) as channel:
        with cupy.cuda.Device(1):
            out = cupy.empty(4096, np.uint8)
        sealed = _sealed(4096)
        channel.to_device(sealed, out=out)
        emulator.reset()
        for _ in range(count):
            channel.to_device(sealed, out=out)
        found = emulator.calls()
        current = cupy.cuda.runtime.getDevice()
    wrong = found.pop("on the wrong device", 0)
    each = {name: number / count for name, number in found.items()}
    asked = sum(each.pop(name, 0) for name in ("cudaEventQuery", "cuEventQuery", "cuStreamQuery"))
    return {"wrong_device": wrong, "each": each, "queries": asked, "all": sum(each.values()), "current": current}


def fork():
    """Fork with an open channel, and use it in both processes."""
    sealed, plain = _sealed(100_000), _data(100_000)
    with Channel("cuda:0", keys=_key) as channel:

        def use():
            try:
                channel.to_device(sealed, framework="cupy")
            except DeviceError as error:
                return str(error), emulator.calls_after_fork
            return "", emulator.calls_after_fork

        channel.to_device(sealed, framework="cupy")
        message, touched = in_forked_child(use)
        good = np.array_equal(cupy.asnumpy(channel.to_device(sealed, framework="cupy")), plain)
    return {"child": message, "calls_of_child": touched, "parent": good}


def leave():
    """End the process while transfers are under way and the channel is open."""
    channel = Channel("cuda:0", keys=_key)
    sealed = _sealed(MIB)
    leave.kept = channel, [channel.to_device(sealed, framework="cupy", non_blocking=True) for _ in range(5)]
    return "left"


def _free_memory():
    return cupy.cuda.runtime.memGetInfo()[0]


def pooled_memory():
    """Move to a device of which CuPy's pool holds all memory unused, and return the error or None."""
    # In many blocks: one of which a part is used again cannot be given back.
    hog = [cupy.empty(16 * MIB, np.uint8) for _ in range(_free_memory() // (16 * MIB))]
    del hog
    with Channel("cuda:0", keys=_key) as channel:
        return _refusal(channel)


def one_free_block():
    """Move to a device most of whose memory is one unused block of CuPy's pool, and return the error or None."""
    with Channel("cuda:0", keys=_key) as channel:
        hog = cupy.empty(_free_memory() - 6 * MIB, np.uint8)
        del hog
        return _refusal(channel)


def no_memory():
    """Move to a device that is full, and again when it is not."""
    hog = cupy.empty(_free_memory() - 2 * MIB, np.uint8)
    with Channel("cuda:0", keys=_key) as channel:
        full = _refusal(channel)
        del hog
        cupy.get_default_memory_pool().free_all_blocks()
        return {"full": full, "freed": _refusal(channel) is None}


def loop():
    """Run a training loop whose stream is busy for a while in each step, and return when things happened, in seconds.

    `asked` and `given` are of each batch: when the loop asked for it and had it. `steps` is when the stream's work of
    each step began and ended; `copied` and `opened` when that was over on the device, batch after batch.
    """
    busy, sizes = 0.4, [300_000] * 6  # the emulated kernels take some 50 ms for a batch
    batches = [fastrack.seal(_data(size, n), _key, name=str(n)) for n, size in enumerate(sizes)]
    stream = cupy.cuda.Stream(non_blocking=True)
    result = {"asked": [], "given": [], "steps": []}
    zero = time.perf_counter()
    with recording() as spans, stream:
        iterator = iter(fastrack.wrap(batches, "cuda:0", keys=_key))
        for _ in batches:
            result["asked"].append(time.perf_counter() - zero)
            batch = next(iterator)
            result["given"].append(time.perf_counter() - zero)
            step = [0.0, 0.0]
            result["steps"].append(step)
            stream.launch_host_func(_work, (step, zero, busy))
            batch += 1
        stream.synchronize()
        found = spans_of(spans)
    for name, key in (("copy", "copied"), ("open", "opened")):
        mine = sorted(span.stop for span in found if span.process == "cuda:0" and span.name == name)
        result[key] = [stop / 1e9 + spans.zero / 1e9 - zero for stop in mine]
    return result


def widening():
    """Widen values by scales of each row and of each group, then with a bad chunk of values, and one of scales."""
    values = _data(300 * 208).view(np.int8).reshape(300, 208)  # four chunks
    scales = [np.random.default_rng(1).normal(0, 1, (300, count)).astype(np.float32) for count in (1, 13)]
    sealed = [fastrack.seal(values, _key, f"w{count}", scale=each) for count, each in enumerate(scales)]
    result, made = {"right": [], "refused": [], "left": []}, []
    with Channel("cuda:1", keys=_key) as channel:
        driver = channel._device._pipeline.driver
        empty = driver.empty

        def keep(dtype, *options):
            made.append(empty("U16" if dtype == "BF16" else dtype, *options))  # CuPy keeps no arrays of BF16
            return made[-1]

        driver.empty = keep
        opened = channel.to_device(sealed, framework="cupy", dtype="BF16")
        for scale, found in zip(scales, opened, strict=True):
            indices = places(values.size, 208, 1, 208 // scale.shape[1])
            wanted = known_widened(values.tobytes(), "I8", scale.ravel(), indices)
            result["right"].append(cupy.asnumpy(found).tobytes() == wanted)
        result["right"].append(np.array_equal(cupy.asnumpy(channel.to_device(sealed[0], framework="cupy")), values))
        for bad in (_altered(sealed[1], chunk_offset(1) + 5), _altered(sealed[1], -17)):
            made.clear()
            try:
                channel.to_device([sealed[0], bad], framework="cupy", dtype="BF16")
            except fastrack.AuthenticationError as error:
                result["refused"].append(str(error))
            result["left"].append(max(int(cupy.asnumpy(array).max()) for array in made))
    return result


def _altered(sealed, place):
    """Flip a bit of a message, or of that of its scales by a place from the end."""
    data, header = (
        bytearray(sealed.to_bytes()),
        len(sealed.to_bytes()) - sealed.message_size - sealed.scale.message_size,
    )
    data[place + header if place > 0 else place] ^= 1
    return fastrack.SealedTensor.from_bytes(data)


def _work(argument):
    step, zero, seconds = argument
    step[0] = time.perf_counter() - zero
    time.sleep(seconds)
    step[1] = time.perf_counter() - zero


def batches_given_back():
    """Use batches on a stream that is late, drop them at once, and return whether any was overwritten meanwhile."""
    count, size = 12, 200_000
    batches = [fastrack.seal(np.full(size, n, np.uint8), _key, name=str(n)) for n in range(count)]
    stream = cupy.cuda.Stream(non_blocking=True)
    sums = [cupy.empty(size, np.uint8) for _ in batches]
    with stream:
        for batch, target in zip(fastrack.wrap(batches, "cuda:0", keys=_key), sums, strict=True):
            stream.launch_host_func(time.sleep, 0.03)
            target.data.copy_from_device_async(batch.data, size, stream)
            del batch
        stream.synchronize()
    return [int(cupy.asnumpy(target).max()) for target in sums] == list(range(count))


def memory_given_back():
    """Open, use and close channels, and return the bytes in use after each."""
    sealed, used = _sealed(MIB), []
    for _ in range(6):
        with Channel("cuda:0", keys=_key) as channel:
            moved = channel.to_device(sealed, framework="cupy")
            channel.to_host(moved, key=_key)
            del moved
        del channel
        gc.collect()
        free, total = cupy.cuda.runtime.memGetInfo()
        used.append(total - free)
    return used


def capture():
    """Ask for a transfer on a stream whose work is being captured into a graph."""
    result = {}
    stream = cupy.cuda.Stream(non_blocking=True)
    counter = cupy.zeros(1000, np.uint8)
    sealed, out = _sealed(100_000), cupy.empty(100_000, np.uint8)
    with Channel("cuda:0", keys=_key) as channel, stream:
        counter += 1
        channel.to_device(sealed, out=out)
        stream.begin_capture(THREAD_LOCAL)
        try:
            counter += 1
            result["refused"] = _refusal(channel, 100_000, out=out)
            counter += 1
            graph = stream.end_capture()
        except RuntimeError as error:
            result["invalidated"] = str(error)
            return result
        graph.launch(stream)
        result["counter"] = sorted(set(cupy.asnumpy(counter).tolist()))
        channel.to_device(sealed, out=out)
        result["arrives"] = np.array_equal(cupy.asnumpy(out), _data(100_000))
    return result


@contextmanager
def _capture_elsewhere():
    """Have another thread capture a graph in global mode, as torch does by default, during the block.

    The dictionary has then what the graph computes, or why it was invalidated.
    """
    stream, counter = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1000, np.uint8)
    began, end, found = threading.Event(), threading.Event(), {}
    with stream:
        counter += 1  # before the capture, in which CuPy cannot compile
    stream.synchronize()

    def capture():
        with stream:
            stream.begin_capture(GLOBAL)
            began.set()
            end.wait()
            try:
                cupy.add(counter, 1, out=counter)
                found["graph"] = stream.end_capture()
            except RuntimeError as error:
                found["invalidated"] = str(error)

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait()
    try:
        yield found
    finally:
        end.set()
        thread.join()
    if "graph" in found:
        found.pop("graph").launch(stream)
        stream.synchronize()
        found["counter"] = sorted(set(cupy.asnumpy(counter).tolist()))


def _filled(count, size):
    """Return sealed tensors of ones, of twos, and so on."""
    return [fastrack.seal(np.full(size, n + 1, np.uint8), _key, name=str(n)) for n in range(count)]


def _are_right(arrays):
    return [np.unique(cupy.asnumpy(array)).tolist() for array in arrays] == [[n + 1] for n in range(len(arrays))]


def wrap_beside_capture():
    """Prefetch while another thread captures. The device is opened meanwhile, too."""
    batches = _filled(8, 200_000)
    with _capture_elsewhere() as found:
        moved = list(fastrack.wrap(batches, "cuda:0", keys=_key))
    return found | {"arrives": _are_right(moved)}


def reuse_beside_capture():
    """Prefetch into the memory of batches that were given back, while another thread captures."""
    batches = _filled(12, 200_000)
    copies = [cupy.zeros(200_000, np.uint8) for _ in batches]
    stream = cupy.cuda.Stream(non_blocking=True)

    def use():
        with stream:
            for batch, target in zip(fastrack.wrap(batches, "cuda:0", keys=_key), copies, strict=True):
                target.data.copy_from_device_async(batch.data, batch.nbytes, stream)
                del batch

    use()
    with _capture_elsewhere() as found:
        use()
    stream.synchronize()
    return found | {"arrives": _are_right(copies)}


def channels_beside_capture():
    """Open and close channels and move both ways, also without blocking, while another thread captures."""
    sealed, backs = _filled(3, 9 * MIB), []
    with _capture_elsewhere() as found:
        with Channel("cuda:0", keys=_key) as channel:
            moved = [channel.to_device(each, framework="cupy", non_blocking=True) for each in sealed]
            channel.synchronize()
            backs += [channel.to_host(array, key=_key) for array in moved]
        del channel
        gc.collect()
        with Channel("cuda:0", keys=_key) as channel:
            channel.to_device(sealed[0], out=moved[0])
    plain = [fastrack.unseal(back, _key, framework="numpy") for back in backs]
    return found | {"arrives": _are_right(moved) and _are_right(plain)}


def full_beside_capture():
    """Move to a device of which CuPy's pool holds all memory unused, while another thread captures."""
    hog = [cupy.empty(16 * MIB, np.uint8) for _ in range(_free_memory() // (16 * MIB))]
    del hog
    with _capture_elsewhere() as found:
        moved = fastrack.to_device(_filled(1, 5 * MIB)[0], "cuda:0", keys=_key, framework="cupy")
    return found | {"arrives": _are_right([moved])}


def _refusal(channel, size=5 * MIB, **options):
    """Move so many bytes, and return the error or None."""
    try:
        moved = channel.to_device(_sealed(size), **(options or {"framework": "cupy"}))
    except DeviceError as error:
        return str(error)
    assert np.array_equal(cupy.asnumpy(moved), _data(size))
    return None


def confidential():
    """Ask the driver for confidential mode, and move a tensor there and back."""
    from fastrack._devices.graphics import read_graphics

    with Channel("cuda:0", keys=_key) as channel:
        moved = channel.to_device(_sealed(3 * MIB), framework="cupy")
        back = channel.to_host(moved, key=_key)
    good = np.array_equal(fastrack.unseal(back, _key, framework="numpy"), _data(3 * MIB))
    mode, driver = read_graphics().confidential, channel._device._pipeline.driver
    seen = {"enabled": mode.enabled, "multi_gpu": mode.multi_gpu, "good": good}
    return seen | {"threaded": driver.confidential, "compared": driver.copy_speeds is not None}


def pageable_staging():
    """Move a tensor there and back where a probe has found pageable memory to be faster."""
    from fastrack._devices.cuda import cupy_driver, driver

    cupy_driver.measure_copies = lambda _: driver.CopySpeeds(*[driver.Speeds((1, 1), (2, 2))] * 2)
    counts = confidential()
    calls = emulator.calls()
    return {"good": counts["good"], "pageable": [calls.get(f"copy {way} pageable memory", 0) for way in ("from", "to")]}


def short_of_page_locked_memory():
    """Move a tensor there and back where page-locked memory is short, and return what is said of it and how."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            good = confidential()["good"]
        except DeviceError as error:
            good = str(error)
    calls = emulator.calls()
    used = [calls.get(f"copy {way} pageable memory", 0) > 0 for way in ("from", "to")]
    return {"good": good, "pageable": used, "said": [str(each.message) for each in said]}


def not_ready():
    """Open a GPU that was not set ready, and return the error, and what doctor tells."""
    told = dict(doctor._sections(doctor.gather())["GPU"])
    try:
        Channel("cuda:0", keys=_key)
    except DeviceError as error:
        return {"error": str(error), "told": told["ready"], "self-test": told["self-test"]}
    return {}


def required():
    """Open GPUs that have to be confidential, under answers of drivers, and return what was told and what was done."""
    from fastrack._crypto import derivation
    from fastrack._devices import confidential

    chains = [nvidia.device(serial=serial) for serial in ("41E23D711E1C4FBFAC", "41E23D711E1C4FBFAD")]
    places = {f"FFFE:00:0{number}.0": chain.pem for number, chain in enumerate(chains, 1)}
    derived, derive = [], derivation.derive_rows
    derivation.derive_rows = lambda *arguments: derived.append(1) or derive(*arguments)
    sealed, found = _sealed(3 * MIB), {}
    states = {
        "on": {},
        "dev-tools": {"devtools": 1},
        "off": {"feature": 0},
        "NVLink only": {"feature": 0, "multi_gpu": 2},
        "unknown": {"fails": {"nvmlInit": 12}},
        "not ready": {"ready": 0},
        "another GPU": {},
    }
    for name, state in states.items():
        sys.modules["pynvml"] = FakeNvml(chains=places, **state)
        confidential._process = confidential._Process()
        is_other = name == "another GPU"
        if is_other:  # the key was granted for the first
            confidential.bind_key(_key.id, "confidential", ["41E23D711E1C4FBFAC"])
        emulator.reset()
        derived.clear()
        try:
            with Channel(f"cuda:{int(is_other)}", keys=_key, require=None if is_other else "confidential") as own:
                told = np.array_equal(cupy.asnumpy(own.to_device(sealed, framework="cupy")), _data(3 * MIB))
        except DeviceError as error:
            told = str(error)
        found[name] = {"told": told, "derived": len(derived), "launched": emulator.calls().get("cuLaunchKernel", 0)}
    with Channel("cuda:0", keys=_key) as own:
        found["its own GPU"] = own.to_device(sealed, framework="cupy").nbytes == 3 * MIB
    return found


def blocking_copy():
    """Copy behind long fills, and return whether the stream is done when the call returns, and whether another is."""
    runtime = cupy.cuda.runtime
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    target = cupy.empty(256 * MIB, np.uint8)
    source = cupy.cuda.alloc_pinned_memory(1024)
    for _ in range(8):
        runtime.memsetAsync(target.data.ptr, 1, target.nbytes, stream.ptr)
    runtime.memcpyAsync(target.data.ptr, source.ptr, 1024, runtime.memcpyHostToDevice, stream.ptr)
    pinned = {"behind": stream.done, "other": other.done}
    for _ in range(8):
        runtime.memsetAsync(target.data.ptr, 1, target.nbytes, stream.ptr)
    pageable = np.ones(1024, np.uint8)
    runtime.memcpyAsync(target.data.ptr, pageable.ctypes.data, 1024, runtime.memcpyHostToDevice, stream.ptr)
    found = pinned | {"pageable": stream.done}
    stream.synchronize()
    events = [cupy.cuda.Event() for _ in range(2)]
    for event in events:
        event.record(stream)
    events[1].synchronize()
    kind = runtime.pointerGetAttributes(source.ptr).type
    return found | {"managed": kind == 3, "negative": cupy.cuda.get_elapsed_time(*events) < 0}


def main():
    result = globals()[sys.argv[1]]()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
