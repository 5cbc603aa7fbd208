"""Test the emulator itself: it does what CUDA documents, and reports violations."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

INVALID_VALUE, INVALID_CONTEXT, INVALID_HANDLE, NOT_READY = 1, 201, 400, 600
OUT_OF_RESOURCES = 701
UNSUPPORTED, INVALIDATED, IMPLICIT, CAPTURED_EVENT = 900, 901, 906, 907
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
VERSION = 13000
LONG = 256 << 20  # bytes whose fill takes a stream some ten milliseconds
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
ADD = """
struct Array { unsigned char* data; long long size, shape, stride; };
extern "C" __global__ void __launch_bounds__(64) cupy_add__test(Array source, unsigned char addend, Array target) {
    if (threadIdx.x < source.size) target.data[threadIdx.x] = source.data[threadIdx.x] + addend;
}
"""


class Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("size", "shape", "stride")))


class Arguments(ctypes.Structure):
    _fields_ = (("source", Array), ("addend", ctypes.c_uint8), ("target", Array))


@pytest.fixture
def cupy(emulator):
    import cupy

    yield cupy
    cupy.cuda.runtime.setDevice(0)
    assert emulator.violations == 0


@pytest.fixture
def violating(emulator):
    """Require that the test causes a violation."""
    yield emulator
    assert emulator.violations
    emulator.reset()


@pytest.fixture
def runtime(cupy):
    return cupy.cuda.runtime


@pytest.fixture
def driver(emulator):
    """Find functions of the driver API by the addresses that it gives for their names."""

    def find(name, version=VERSION):
        address, status = ctypes.c_void_p(), ctypes.c_int()
        results = ctypes.byref(address), version, ctypes.c_uint64(0), ctypes.byref(status)
        assert emulator.library.cuGetProcAddress_v2(name.encode(), *results) == 0
        assert (status.value == 0) == bool(address.value)
        return address.value and ctypes.CFUNCTYPE(ctypes.c_int)(address.value)

    return find


def status_of(action, *arguments):
    """Return the status that CuPy raises, or 0."""
    try:
        action(*arguments)
    except RuntimeError as error:
        return error.status
    return 0


def fill_slowly(runtime, memory, stream):
    """Fill memory again and again with zeros, and with ones at last."""
    for value in (0, 0, 0, 0, 0, 0, 0, 1):
        runtime.memsetAsync(memory.data.ptr, value, memory.nbytes, stream)


def in_thread(action, *arguments):
    """Return what an action gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action, *arguments).result()


def pointer(value):
    return ctypes.c_void_p(value)


class TestDriver:
    def test_its_library_is_found_by_name(self, emulator):
        assert ctypes.CDLL("libcuda.so.1")._handle == emulator.library._handle

    def test_functions_are_found_by_their_names_without_suffix(self, driver):
        for name in ("cuMemcpyHtoDAsync", "cuCtxPushCurrent", "cuLaunchKernel", "cuStreamIsCapturing"):
            assert driver(name)
        for name in ("cuMemcpyHtoDAsync_v2", "cuNoSuchFunction"):
            assert driver(name) is None

    def test_a_name_may_mean_another_function_in_a_later_version(self, driver):
        before, after = (ctypes.cast(driver("cuCtxSynchronize", v), ctypes.c_void_p).value for v in (12080, 13000))
        assert before != after

    def test_the_current_device_is_that_of_the_context_pushed_last(self, driver, runtime):
        context, popped = ctypes.c_void_p(), ctypes.c_void_p()
        runtime.setDevice(0)
        assert driver("cuDevicePrimaryCtxRetain")(ctypes.byref(context), 1) == 0
        assert driver("cuCtxPushCurrent")(context) == 0
        assert runtime.getDevice() == 1
        assert driver("cuCtxPopCurrent")(ctypes.byref(popped)) == 0
        assert popped.value == context.value
        assert runtime.getDevice() == 0
        assert driver("cuDevicePrimaryCtxRelease")(1) == 0

    def test_a_thread_without_a_context_is_refused(self, driver, cupy):
        stream = cupy.cuda.Stream(non_blocking=True)
        assert in_thread(driver("cuStreamSynchronize"), pointer(stream.ptr)) == INVALID_CONTEXT

    def test_events_and_streams_of_the_runtime_are_those_of_the_driver(self, driver, cupy, runtime):
        stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
        memory = cupy.zeros(LONG, np.uint8)
        cupy.cuda.Device().synchronize()
        size, byte = ctypes.c_size_t(LONG), ctypes.c_ubyte(7)
        fill_slowly(runtime, memory, stream.ptr)
        assert driver("cuMemsetD8Async")(pointer(memory.data.ptr), byte, size, pointer(stream.ptr)) == 0
        assert driver("cuEventRecord")(pointer(event.ptr), pointer(stream.ptr)) == 0
        assert driver("cuEventQuery")(pointer(event.ptr)) == NOT_READY == runtime.eventQuery(event.ptr)
        assert driver("cuEventSynchronize")(pointer(event.ptr)) == 0 == runtime.eventQuery(event.ptr)
        assert int(memory[-1].get()) == 7


class TestKernels:
    @pytest.fixture
    def kernel(self, cupy):
        return cupy.RawModule(code=ADD, backend="nvrtc").get_function("cupy_add__test").kernel

    def arguments(self, cupy, addend):
        source, target = cupy.asarray(np.arange(50, dtype=np.uint8)), cupy.zeros(50, np.uint8)
        arrays = [Array(each.data.ptr, 50, 50, 1) for each in (source, target)]
        return Arguments(arrays[0], addend, arrays[1]), source, target

    def launch(self, driver, kernel, threads, parameters=None, extra=None, stream=None):
        sizes = (1, 1, 1, threads, 1, 1, 0)
        return driver("cuLaunchKernel")(pointer(kernel.ptr), *sizes, stream, parameters, extra)

    def test_arguments_come_one_by_one_or_in_a_buffer(self, driver, kernel, cupy):
        given, _, target = self.arguments(cupy, 3)
        fields = [ctypes.byref(given, getattr(Arguments, name).offset) for name in ("source", "addend", "target")]
        each = (ctypes.c_void_p * 3)(*(ctypes.cast(field, ctypes.c_void_p) for field in fields))
        assert self.launch(driver, kernel, 64, parameters=each) == 0
        assert target.get().tolist() == list(range(3, 53))
        given, _, target = self.arguments(cupy, 5)
        size = ctypes.c_size_t(ctypes.sizeof(given))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(given), 2, ctypes.addressof(size), None)
        assert self.launch(driver, kernel, 64, extra=extra) == 0
        assert target.get().tolist() == list(range(5, 55))

    def test_the_carveout_is_kept(self, driver, kernel):
        value = ctypes.c_int()
        assert driver("cuFuncSetAttribute")(pointer(kernel.ptr), CARVEOUT, 100) == 0
        assert driver("cuFuncGetAttribute")(ctypes.byref(value), CARVEOUT, pointer(kernel.ptr)) == 0
        assert value.value == 100
        assert driver("cuFuncSetAttribute")(pointer(kernel.ptr), CARVEOUT, 101) == INVALID_VALUE

    def test_more_threads_than_the_launch_bounds_are_refused(self, driver, kernel, cupy, violating):
        each = (ctypes.c_void_p * 3)()
        assert self.launch(driver, kernel, 65, parameters=each) == OUT_OF_RESOURCES

    def test_a_stream_of_another_device_is_refused(self, driver, kernel, cupy, runtime, violating):
        with cupy.cuda.Device(1):
            stream = cupy.cuda.Stream(non_blocking=True)
        each = (ctypes.c_void_p * 3)()
        assert self.launch(driver, kernel, 64, each, stream=pointer(stream.ptr)) == INVALID_HANDLE
        assert violating.calls()["on the wrong device"] == 1


class TestStreams:
    @pytest.mark.parametrize(("non_blocking", "waits"), [(False, True), (True, False)])
    def test_the_legacy_stream_waits_for_blocking_streams_only(self, cupy, runtime, non_blocking, waits):
        stream = cupy.cuda.Stream(non_blocking=non_blocking)
        memory, host = cupy.zeros(LONG, np.uint8), cupy.cuda.alloc_pinned_memory(1)
        cupy.cuda.Device().synchronize()
        fill_slowly(runtime, memory, stream.ptr)
        last = memory.data.ptr + LONG - 1
        runtime.memcpyAsync(host.ptr, last, 1, runtime.memcpyDeviceToHost, 0)
        runtime.streamSynchronize(1)
        assert ctypes.c_uint8.from_address(host.ptr).value == waits
        stream.synchronize()

    def test_a_blocking_stream_waits_for_the_legacy_stream(self, cupy, runtime):
        stream = cupy.cuda.Stream()
        memory, host = cupy.zeros(LONG, np.uint8), cupy.cuda.alloc_pinned_memory(1)
        fill_slowly(runtime, memory, 0)
        runtime.memcpyAsync(host.ptr, memory.data.ptr + LONG - 1, 1, runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()
        assert ctypes.c_uint8.from_address(host.ptr).value == 1

    def test_a_per_thread_default_stream_is_another_one_in_each_thread(self, cupy, runtime):
        memory = cupy.zeros(LONG, np.uint8)
        cupy.cuda.Device().synchronize()
        fill_slowly(runtime, memory, 2)
        assert in_thread(runtime.streamQuery, 2) == 0
        assert runtime.streamQuery(2) == NOT_READY
        runtime.streamSynchronize(2)

    def test_a_destroyed_stream_is_not_used(self, cupy, runtime, violating):
        stream = runtime.streamCreate()
        runtime.streamDestroy(stream)
        assert status_of(runtime.streamSynchronize, stream) == INVALID_HANDLE

    def test_an_event_is_recorded_on_its_own_device(self, cupy, runtime, violating):
        event = cupy.cuda.Event()
        with cupy.cuda.Device(1):
            stream = cupy.cuda.Stream()
            assert status_of(runtime.eventRecord, event.ptr, stream.ptr) == INVALID_HANDLE

    def test_host_memory_is_no_target_on_the_device(self, cupy, runtime, violating):
        host = np.zeros(100, np.uint8)
        arguments = (host.ctypes.data, host.ctypes.data, 100, runtime.memcpyHostToDevice, 0)
        assert status_of(runtime.memcpyAsync, *arguments) == INVALID_VALUE


class TestCaptures:
    @pytest.fixture
    def stream(self, cupy):
        return cupy.cuda.Stream(non_blocking=True)

    def test_what_is_captured_runs_when_the_graph_is_launched(self, cupy, stream):
        x = cupy.zeros(10, np.uint8)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            x += 1
            x += 1
            graph = stream.end_capture()
            assert not x.get().any()
            for _ in range(3):
                graph.launch(stream)
            assert set(x.get().tolist()) == {6}

    def test_another_stream_joins_by_an_event(self, cupy, stream, runtime):
        other, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
        stream.begin_capture()
        event.record(stream)
        other.wait_event(event)
        assert other.is_capturing()
        event.record(other)
        stream.wait_event(event)
        stream.end_capture()
        assert not other.is_capturing()

    def test_a_captured_event_is_not_asked_for(self, cupy, stream, runtime):
        event = cupy.cuda.Event(disable_timing=True)
        stream.begin_capture()
        event.record(stream)
        assert runtime.eventQuery(event.ptr) == CAPTURED_EVENT
        assert status_of(stream.end_capture) == INVALIDATED

    @pytest.mark.parametrize(("mode", "status"), [(GLOBAL, UNSUPPORTED), (THREAD_LOCAL, 0), (RELAXED, 0)])
    def test_another_thread_must_not_allocate_during_a_global_capture(self, stream, runtime, mode, status):
        stream.begin_capture(mode)
        assert in_thread(status_of, runtime.malloc, 1000) == status
        assert status_of(stream.end_capture) == (INVALIDATED if status else 0)

    @pytest.mark.parametrize(
        ("mode", "beside", "within"),
        [(GLOBAL, UNSUPPORTED, UNSUPPORTED), (THREAD_LOCAL, 0, UNSUPPORTED), (RELAXED, 0, 0)],
    )
    def test_the_mode_of_a_thread_says_whose_captures_forbid_it_to_allocate(
        self, driver, runtime, stream, mode, beside, within
    ):
        exchange = driver("cuThreadExchangeStreamCaptureMode")

        def allocate():
            place = ctypes.c_int(mode)
            assert exchange(ctypes.byref(place)) == 0
            assert place.value == GLOBAL  # as every thread begins
            status = status_of(runtime.malloc, 1000)
            assert exchange(ctypes.byref(place)) == 0
            assert place.value == mode
            return status

        for run, status in ((in_thread, beside), (lambda action: action(), within)):
            stream.begin_capture(GLOBAL)
            assert run(allocate) == status
            assert status_of(stream.end_capture) == (INVALIDATED if status else 0)

    def test_there_is_no_fourth_mode(self, driver):
        assert driver("cuThreadExchangeStreamCaptureMode")(ctypes.byref(ctypes.c_int(3))) == INVALID_VALUE

    def test_the_legacy_stream_is_not_used_beside_the_capture_of_a_blocking_one(self, cupy, runtime):
        x, stream = cupy.zeros(10, np.uint8), cupy.cuda.Stream()
        stream.begin_capture()
        assert status_of(runtime.memsetAsync, x.data.ptr, 1, 10, 0) == IMPLICIT
        assert status_of(stream.end_capture) == INVALIDATED


@pytest.mark.parametrize(("confidential", "behind"), [("1", True), ("0", False)])
def test_a_copy_blocks_its_caller_in_confidential_mode_only(run_case, confidential, behind):
    found = {"behind": behind, "other": True, "pageable": False, "managed": behind, "negative": behind}
    assert run_case("blocking_copy", EMU_CONFIDENTIAL=confidential) == found
