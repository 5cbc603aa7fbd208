"""The CUDA driver says what is missing, finds its kernels, and makes the calls it should: all that needs no GPU."""

import ctypes
import gc
import lzma
import sys
import types
from pathlib import Path

import numpy as np
import pynvml
import pytest
import torch
from helpers import stub_cuda
from helpers.cases import each
from helpers.fake_nvml import FakeNvml
from helpers.forking import in_forked_child
from helpers.stub_cuda import NOT_READY, StubCuda

import fastrack
from fastrack import DeviceError
from fastrack._devices import open_device
from fastrack._devices.cuda import cupy_driver, nvrtc
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import PageLockedMemoryError

FOLDER = Path(fastrack.__file__).parent.parent / "kernels"


class FakeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(f"cudaError {status}")


class NoMemoryError(MemoryError):
    pass


class Runtime:
    """`cupy.cuda.runtime` of a machine with two GPUs, that writes down what it is asked."""

    CUDARuntimeError = FakeError

    def __init__(self):
        self.local_sizes = {}  # by kernel
        self.attributes = {75: 9, 76: 0, 16: 132}
        self.count = 2
        self.current = 0
        self.calls = []
        self.kernels = {}
        self.full = False  # until a pool gives something back
        self.libcuda = StubCuda()
        self.loaded = []  # the architectures of files that the driver was given, and "nvrtc"
        self.refused = {}  # those that it refuses, with the status
        self._kept = {}

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, self.current, *arguments))
            return len(self.calls)

        return call

    def getDeviceCount(self):  # noqa: N802 - CUDA's name
        if isinstance(self.count, Exception):
            raise self.count
        return self.count

    def getDevice(self):  # noqa: N802
        return self.current

    def setDevice(self, index):  # noqa: N802
        self.current = index

    def deviceGetAttribute(self, number, index):  # noqa: N802
        return self.attributes[number]

    def hostAlloc(self, size, flags):  # noqa: N802
        block = ctypes.create_string_buffer(size)
        self._kept[ctypes.addressof(block)] = block
        self.calls.append(("hostAlloc", self.current, size, flags))
        return ctypes.addressof(block)

    def malloc(self, size):
        if self.full:
            raise FakeError(2)
        self.calls.append(("malloc", self.current, size))
        return 1 << 20


class Kernel:
    def __init__(self, runtime, name):
        self.kernel = self
        self.ptr = 1000 + nvrtc.KERNELS.index(name)
        self.max_dynamic_shared_size_bytes = self.preferred_shared_memory_carveout = None
        self.local_size_bytes = runtime.local_sizes.get(name, 0)
        runtime.kernels[name] = self


@pytest.fixture
def runtime(monkeypatch, tmp_path):
    """A machine with GPUs, and a CuPy that is no more than this file uses of it."""
    runtime = Runtime()
    image = nvrtc.Kernels.image
    runtime.images = tmp_path / "images"
    runtime.images.mkdir()
    monkeypatch.setattr(nvrtc.Kernels, "image", lambda *key: runtime.images / image(*key).name)
    cupy = types.ModuleType("cupy")
    cupy.ndarray = type("ndarray", (), {})
    cupy.cuda = types.SimpleNamespace(
        runtime=runtime,
        driver=types.SimpleNamespace(CUDADriverError=FakeError),
        nvrtc=types.SimpleNamespace(getVersion=lambda: (12, 4)),
        memory=types.SimpleNamespace(OutOfMemoryError=NoMemoryError),
        get_current_stream=lambda: types.SimpleNamespace(ptr=7),
    )

    def give_back():
        runtime.calls.append(("free_all_blocks",))
        runtime.full = False

    pool = types.SimpleNamespace(free_all_blocks=give_back)
    cupy.get_default_memory_pool = cupy.get_default_pinned_memory_pool = lambda: pool

    def module(*, path=None, code=None, options=None, backend=None):
        if path is not None:
            runtime.loaded.append(Path(path).read_text())
        else:
            runtime.compiled = (code, options, backend)
            runtime.loaded.append("nvrtc")
        if runtime.loaded[-1] in runtime.refused:
            raise FakeError(runtime.refused[runtime.loaded[-1]])
        return types.SimpleNamespace(get_function=lambda name: Kernel(runtime, name))

    cupy.RawModule = module
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    stub_cuda.install(monkeypatch, runtime.libcuda)
    monkeypatch.setattr(cupy_driver, "_dropped", {})
    return runtime


# What is missing.


def test_without_a_driver_it_says_that_and_not_to_install_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fails={"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}))
    with pytest.raises(DeviceError, match=r"^cuda:0 needs a GPU of NVIDIA, got no NVIDIA driver: .*device='cpu'$"):
        open_device("cuda:0")


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    with pytest.raises(DeviceError, match=r"(?s)\[cu13\].*\[cu12\].*device='cpu'"):
        open_device("cuda:0")
    with pytest.raises(DeviceError, match="needs CuPy"):
        fastrack.to_device(np.zeros(3), "cuda")


@each(
    ("count", "message"),
    [
        (FakeError(35), "driver.*device='cpu'"),
        (FakeError(100), "GPU.*device='cpu'"),
        (FakeError(999), "999.*device='cpu'"),
        (FakeError(802), "ready for CUDA, got cudaError 802. .*: nvidia-smi conf-compute -srs 1"),
        (0, "GPU.*device='cpu'"),
        (1, "'cuda:3'.* cuda:0$"),
        (2, "'cuda:3'.* cuda:1$"),
    ],
)
def test_a_gpu_that_is_not_there_is_said_so(runtime, count, message):
    runtime.count = count
    with pytest.raises(DeviceError, match=message):
        open_device("cuda:3")


def test_an_old_gpu_is_refused(runtime):
    for major in (8, 9, 12):
        runtime.attributes |= {75: major, 76: 0}
        assert open_device("cuda:1").name == "cuda:1"
    runtime.attributes |= {75: 7, 76: 5}
    with pytest.raises(DeviceError, match=r"7\.5.*8\.0.*device='cpu'"):
        open_device("cuda:1")


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("error", [RuntimeError("libnvrtc.so is missing"), OSError("libnvrtc.so is missing")])
def test_kernels_that_do_not_compile_are_said_so(monkeypatch, error):
    def module(**_):
        raise error

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", module)
    with pytest.raises(DeviceError, match=r"(?s)compile.*device='cpu'.*libnvrtc\.so"):
        open_device("cuda:0")


def test_a_gpu_that_is_not_ready_is_said_so_whichever_call_finds_it(runtime, monkeypatch):
    driver = cupy_driver.CupyDriver(0)
    runtime.libcuda.status["cuEventQuery"] = 802
    with pytest.raises(DeviceError, match="nvidia-smi conf-compute -srs 1"):
        driver.done(driver.event())

    def module(**_):
        raise FakeError(802)

    monkeypatch.setattr(sys.modules["cupy"], "RawModule", module)
    with pytest.raises(DeviceError, match="nvidia-smi conf-compute -srs 1"):
        open_device("cuda:0")


# Which kernels run.


def bring(*architectures):
    """Have fastrack come with kernels for these."""
    for architecture in architectures:
        nvrtc.find_kernels().image(architecture).write_bytes(lzma.compress(architecture.encode()))


@each(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_gpu_gets_what_was_compiled_for_it_and_nothing_is_compiled(runtime, capability, architecture):
    runtime.attributes |= dict(zip((75, 76), capability, strict=True))
    bring(*nvrtc.CUBINS, nvrtc.PTX)
    device = open_device("cuda:0")
    assert runtime.loaded.pop() == architecture
    assert runtime.loaded == []
    assert device.compiled_by == f"fastrack's build, for {architecture}"
    for name, kernel in runtime.kernels.items():
        assert kernel.max_dynamic_shared_size_bytes == nvrtc.find_kernels().shared(name)
        assert kernel.preferred_shared_memory_carveout == 100


@each(("capability", "missing"), [((11, 0), "sm_110"), ((13, 0), "sm_130")])
def test_another_gpu_gets_ptx(runtime, capability, missing):
    runtime.attributes |= dict(zip((75, 76), capability, strict=True))
    bring(*nvrtc.CUBINS, nvrtc.PTX)
    told = f"the driver, from fastrack's PTX for compute_100; fastrack brings no {missing}"
    assert (open_device("cuda:0").compiled_by, runtime.loaded.pop()) == (told, "compute_100")
    assert runtime.loaded == []


def test_what_the_driver_refuses_is_told_and_the_next_is_tried(runtime):
    bring(*nvrtc.CUBINS, nvrtc.PTX)
    runtime.refused = {"sm_90": 200}
    told = "the driver, from fastrack's PTX for compute_100; sm_90 was refused (cudaError 200)"
    assert open_device("cuda:0").compiled_by == told
    runtime.refused = {"sm_90": 200, "compute_100": 222}
    told = "NVRTC 12.4 on this machine; sm_90 was refused (cudaError 200); compute_100 was refused (cudaError 222)"
    assert open_device("cuda:0").compiled_by == told
    assert runtime.loaded[-3:] == ["sm_90", "compute_100", "nvrtc"]


@pytest.mark.usefixtures("runtime")
def test_a_file_that_is_damaged_is_told_and_the_next_is_tried():
    bring("sm_90", nvrtc.PTX)
    path = nvrtc.find_kernels().image("sm_90")
    for content in (b"", b"damaged", path.read_bytes()[:-5]):
        path.write_bytes(content)
        told = open_device("cuda:0").compiled_by
        assert told.startswith("the driver, from fastrack's PTX for compute_100; sm_90 cannot be read (")


def test_registers_that_a_compiler_spills_are_told(runtime):
    runtime.local_sizes = {"seal_128": 16, "gather_256": 8}
    assert open_device("cuda:0").compiled_by.startswith("NVRTC 12.4 on this machine; fastrack brings no sm_90; ")
    assert open_device("cuda:0").compiled_by.endswith(
        "; it spills up to 16 bytes of a thread to memory that nothing wipes"
    )


def test_kernels_of_other_sources_are_not_loaded(runtime):
    (runtime.images / "sm_90-00112233445566778899aabbccddeeff.cubin.xz").write_bytes(b"kernels")
    told = "NVRTC 12.4 on this machine; fastrack brings no sm_90; fastrack brings no compute_100"
    assert (open_device("cuda:0").compiled_by, runtime.loaded) == (told, ["nvrtc"])


def test_a_gpu_that_nothing_fits_is_told_with_each_reason(runtime):
    runtime.attributes |= {75: 10, 76: 0}
    bring("sm_100")
    runtime.refused = {"sm_100": 200, "nvrtc": 209}
    reasons = r"sm_100 was refused \(cudaError 200\); fastrack brings no compute_100; NVRTC 12\.4"
    with pytest.raises(DeviceError, match=rf"(?s)10\.0, got none: {reasons} .*12\.8 or later.*cudaError 209"):
        open_device("cuda:0")


@each("refused", [{"sm_90": 2}, {"sm_90": 200, "nvrtc": 2}])
def test_a_full_gpu_is_told_as_such_and_not_as_one_that_does_not_fit(runtime, refused):
    bring("sm_90")
    runtime.refused = refused
    with pytest.raises(DeviceError, match="no memory left"):
        open_device("cuda:0")
    assert runtime.loaded[-1] == list(refused)[-1]


@pytest.mark.usefixtures("runtime")
def test_a_share_is_passed_on():
    with pytest.raises(ValueError, match="share="):
        open_device("cuda:0", share=2.0)
    assert open_device("cuda:0", share=0.5).max_slab_size


@pytest.mark.usefixtures("runtime")
def test_a_device_opens_without_nvidia_ml_py(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    assert open_device("cuda:1").name == "cuda:1"
    assert cupy_driver.CupyDriver(1).confidential is False


# The kernels' sources.


def test_the_kernels_of_the_checkout_are_found_and_known():
    found = nvrtc.find_kernels()
    assert found.folder == FOLDER
    assert found.threads == 512
    assert found.constants["STATE_BYTES"] % 16 == 0
    for kernel in nvrtc.KERNELS:
        assert f" {kernel.partition('_')[0]}" in found.code
        assert 0 < found.shared(kernel) <= 99 * 1024  # what every GPU from 8.0 on gives a block
    assert f"-I{FOLDER}" in found.options
    assert f"-DFASTRACK_SOURCES={found.digest}" in found.options


def test_the_kernels_of_an_installed_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "fastrack"
    for folder, threads in ((package / "kernels", 1), (tmp_path / "kernels", 2)):
        folder.mkdir(parents=True)
        (folder / "fastrack.cu").write_text(f"#define FASTRACK_THREADS {threads}\n")
    monkeypatch.setattr(nvrtc, "files", lambda name: package)
    assert nvrtc.find_kernels().threads == 1
    (package / "kernels" / "fastrack.cu").unlink()
    with pytest.raises(DeviceError, match="install"):
        nvrtc.find_kernels()  # what stands beside the package is another one's
    (tmp_path / "pyproject.toml").touch()  # only a checkout has kernels of its own beside the package
    assert (nvrtc.find_kernels().threads, nvrtc.find_kernels().folder) == (2, tmp_path / "kernels")
    (tmp_path / "kernels" / "fastrack.cu").unlink()
    with pytest.raises(DeviceError, match="install"):
        nvrtc.find_kernels()


def test_a_header_that_changes_changes_the_digest_and_a_number_must_be_plain(tmp_path):
    main, header = tmp_path / "fastrack.cu", tmp_path / "aes.cuh"
    main.write_text('#include "aes.cuh"\n')
    digests = []
    for content in ("", "// a", "// b"):
        header.write_text(content)
        digests.append(nvrtc.read_kernels(tmp_path).digest)
    header.rename(tmp_path / "ghash.cuh")
    digests.append(nvrtc.read_kernels(tmp_path).digest)
    assert len(set(digests)) == 4
    main.write_text("#define FASTRACK_THREADS 64 // not a plain line\n")
    with pytest.raises(DeviceError, match="FASTRACK_THREADS"):
        _ = nvrtc.read_kernels(tmp_path).threads


# Calls.


@pytest.mark.slow
def test_a_list_is_issued_in_the_context_of_its_device(runtime):
    driver = cupy_driver.CupyDriver(1)
    assert runtime.compiled == ((FOLDER / "fastrack.cu").read_text(), nvrtc.find_kernels().options, "nvrtc")
    assert (driver.name, driver.multiprocessors) == ("cuda:1", 132)
    stream, event, memory, host = driver.stream(high_priority=True), driver.event(), driver.memory(64), driver.host(32)
    del runtime.calls[:]
    seen, libcuda = [], runtime.libcuda
    libcuda.happened = lambda _: seen.append(list(libcuda.contexts))
    commands = Commands()
    commands.upload(memory.pointer + 8, host[4:20], stream)
    commands.launch(driver.functions["gather_256"], 3, list(range(9)), stream, bytes(4000))
    commands.record(event, stream)
    libcuda.kernels[driver.functions["gather_256"].handle] = "gather_256"
    driver.issue(commands)
    gather, shared = driver.functions["gather_256"].handle, nvrtc.find_kernels().shared("gather_256")
    assert libcuda.calls[-3:] == [
        ("cuMemcpyHtoDAsync", memory.pointer + 8, host.ctypes.data + 4, 16, stream.ptr),
        ("cuLaunchKernel", gather, 3, 1, 1, 512, 1, 1, shared, stream.ptr, [*range(9), *[0] * 500]),
        ("cuEventRecord", event.ptr, stream.ptr),
    ]
    assert seen == [[4711]]
    assert libcuda.contexts == []
    assert runtime.calls == []  # CuPy, each of whose calls gives up the interpreter's lock, has no part in it
    assert libcuda.violations == []


def test_all_memory_of_a_multiprocessor_may_be_shared_and_page_locked_memory_has_its_size(runtime):
    host = cupy_driver.CupyDriver(0).host(16401)
    assert (host.size, host.dtype, host.flags.writeable) == (16401, np.uint8, True)
    assert ("hostAlloc", 0, 16401, 1) in runtime.calls
    assert {kernel.preferred_shared_memory_carveout for kernel in runtime.kernels.values()} == {100}
    for name, kernel in runtime.kernels.items():
        assert kernel.max_dynamic_shared_size_bytes == nvrtc.find_kernels().shared(name)


def test_streams_do_not_wait_for_the_default_one_and_differ_in_priority(runtime):
    driver = cupy_driver.CupyDriver(0)
    del runtime.calls[:]
    streams = driver.stream(high_priority=True), driver.stream(high_priority=False), driver.event()
    assert [call[2:] for call in runtime.calls] == [(1, -5), (1, 0), (3,)]  # and a thread that waits sleeps
    assert len({handle.ptr for handle in streams}) == 3


def test_what_is_dropped_is_given_back_once_and_not_by_a_child(runtime):
    driver = cupy_driver.CupyDriver(1)
    things = [driver.stream(high_priority=True), driver.event(), driver.memory(64), driver.host(32)[3:]]
    pointers = [thing.ptr for thing in things[:3]] + [things[3].ctypes.data - 3]
    del runtime.calls[:]

    def child():
        things.clear()
        gc.collect()
        return runtime.calls

    assert in_forked_child(child) == []
    things.clear()
    gc.collect()
    assert runtime.calls == []  # not where it is dropped: that may be a thread that the device waits for
    driver.reclaim()
    names = ["streamDestroy", "eventDestroy", "free", "freeHost"]
    assert sorted(runtime.calls) == sorted(zip(names, [1] * 4, pointers, strict=True))
    assert runtime.current == 0


def test_an_event_happened_or_not(runtime):
    driver = cupy_driver.CupyDriver(0)
    runtime.libcuda.status["cuEventQuery"] = [0, NOT_READY]
    assert [driver.done(driver.event()) for _ in range(2)] == [True, False]


def test_the_time_between_two_timed_events_is_in_seconds(runtime, monkeypatch):
    driver = cupy_driver.CupyDriver(1)
    del runtime.calls[:]
    before, after = driver.event(timed=True), driver.event(timed=True)
    assert [call[1:] for call in runtime.calls] == [(1, 0), (1, 0)]
    monkeypatch.setattr(runtime, "eventElapsedTime", lambda *events: 2500.0 if events == (before.ptr, after.ptr) else 0)
    assert driver.elapsed(before, after) == 2.5


def test_what_cuda_says_is_said_again(runtime):
    driver = cupy_driver.CupyDriver(1)
    runtime.libcuda.status["cuEventQuery"] = 700
    with pytest.raises(DeviceError, match=r"cuda:1 .*cuEventQuery: .*700"):
        driver.done(driver.event())
    commands = Commands()
    commands.record(driver.event(), driver.stream(high_priority=True))
    runtime.libcuda.status["cuEventRecord"] = 719
    with pytest.raises(DeviceError, match=r"cuda:1 .*cuEventRecord: .*719"):
        driver.issue(commands)
    for error in (NoMemoryError("none"), FakeError(2)):
        with pytest.raises(DeviceError, match="no memory"), cupy_driver._Current(driver):
            raise error
    with pytest.raises(KeyError), cupy_driver._Current(driver):
        raise KeyError
    assert runtime.current == 0


def test_no_call_is_forbidden_while_another_thread_captures(runtime, monkeypatch):
    modes = []

    def record(name):
        def call(*_):
            modes.append((name, runtime.libcuda.mode))
            if runtime.full and name == "malloc":
                raise FakeError(2)
            return 1 << 20

        return call

    names = ["malloc", "hostAlloc", "free", "streamCreateWithPriority", "eventCreateWithFlags"]  # of CUDA's runtime
    for name in names:
        monkeypatch.setattr(runtime, name, record(name), raising=False)
    monkeypatch.setattr(sys.modules["cupy"].get_default_memory_pool(), "free_all_blocks", record("free_all_blocks"))
    driver = cupy_driver.CupyDriver(1)
    assert all([driver.stream(high_priority=True), driver.event(), driver.memory(64), driver.host(64).size])
    runtime.full = True
    with pytest.raises(DeviceError, match="no memory"):
        driver.memory(64)
    assert {name for name, _ in modes} == {*names, "free_all_blocks"}
    assert {mode for _, mode in modes} == {1}
    with pytest.raises(KeyError), cupy_driver._Current(driver):
        raise KeyError
    assert runtime.libcuda.mode == 0


def test_page_locked_memory_that_there_is_none_of_is_not_called_the_gpus(runtime, monkeypatch):
    driver, asked = cupy_driver.CupyDriver(0), []

    def refuse(*call):
        asked.append(call)
        raise FakeError(2)

    monkeypatch.setattr(runtime, "hostAlloc", refuse)
    with pytest.raises(PageLockedMemoryError, match=r"page-locked memory for cuda:0 .* of the host's, .*`ulimit -l`"):
        driver.host(64)
    assert asked == [(64, 1)] * 2
    assert ("free_all_blocks",) in runtime.calls


def test_memory_that_pools_keep_is_asked_back_before_there_is_none(runtime, monkeypatch):
    driver = cupy_driver.CupyDriver(0)
    emptied = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    runtime.full = True
    assert driver.memory(64).pointer
    assert ("free_all_blocks",) in runtime.calls
    assert emptied == [True]
    monkeypatch.setattr(sys.modules["cupy"].get_default_memory_pool(), "free_all_blocks", lambda: None)
    runtime.full = True
    with pytest.raises(DeviceError, match="no memory"):
        driver.memory(64)


def test_a_list_that_keeps_the_lock_gives_it_up_where_it_would_block(runtime):
    driver = cupy_driver.CupyDriver(0)
    stream, event = driver.stream(high_priority=True), driver.event()
    commands = Commands()
    commands.require_idle(stream)
    commands.record(event, stream)
    commands.poll(event, 0, stop=True)
    commands.synchronize(event)
    held = []
    run = driver._native.run
    driver._native.run = lambda *arguments, **options: (
        held.append(options.get("hold", False)) or run(*arguments, **options)
    )
    for idle, done, expected in ((0, 0, [True]), (0, NOT_READY, [True, False]), (NOT_READY, 0, [True, False])):
        runtime.libcuda.status |= {"cuStreamQuery": idle, "cuEventQuery": done}
        del runtime.libcuda.calls[:], held[:]
        driver.issue(commands, hold=True)
        assert held == expected
        names = [name for name, *_ in runtime.libcuda.calls]
        assert names.count("cuEventRecord") == names.count("cuEventSynchronize") == 1


# Arrays.


class CupyArray:
    def __init__(self, *, index=0, contiguous=True):
        self.device = types.SimpleNamespace(id=index)
        self.flags = types.SimpleNamespace(c_contiguous=contiguous)
        self.data = types.SimpleNamespace(ptr=4096)
        self.nbytes = 12


@pytest.fixture
def cupy(runtime, monkeypatch):
    assert runtime.count
    cupy = sys.modules["cupy"]
    monkeypatch.setattr(cupy, "ndarray", CupyArray)
    copy = CupyArray()
    copy.data.ptr = 8192
    cupy.ascontiguousarray = lambda array: array if array.flags.c_contiguous else copy
    return cupy


@pytest.mark.usefixtures("cupy")
def test_a_view_of_a_cupy_array_knows_the_callers_stream():
    view = cupy_driver.CupyDriver(0).view(CupyArray(), writable=True)
    assert (view.address, view.size, view.stream.ptr) == (4096, 12, 7)


def test_a_stream_that_is_captured_is_refused_before_anything_is_put_on_it(runtime, cupy):
    driver = cupy_driver.CupyDriver(0)
    runtime.libcuda.capturing.add(7)
    cupy.empty = lambda *_: pytest.fail("memory was allocated during a capture")
    del runtime.libcuda.calls[:]
    for use in (lambda: driver.view(CupyArray(), writable=True), lambda: driver.empty("U8", [3], "cupy")):
        with pytest.raises(DeviceError, match=r"captured.*before"):
            use()
    assert {name for name, *_ in runtime.libcuda.calls} == {"cuStreamIsCapturing"}
    runtime.libcuda.capturing.clear()
    runtime.libcuda.status["cuStreamIsCapturing"] = 906  # of the default stream, while another one is captured
    with pytest.raises(DeviceError, match="captured"):
        driver.view(CupyArray(), writable=True)
    runtime.libcuda.status["cuStreamIsCapturing"] = 700
    with pytest.raises(DeviceError, match="cuStreamIsCapturing"):
        driver.view(CupyArray(), writable=True)


@pytest.mark.usefixtures("cupy")
def test_an_array_that_is_not_contiguous_is_copied_there_or_refused():
    driver = cupy_driver.CupyDriver(0)
    assert driver.view(CupyArray(contiguous=False), writable=False).address == 8192
    with pytest.raises(ValueError, match="contiguous"):
        driver.view(CupyArray(contiguous=False), writable=True)


@pytest.mark.usefixtures("cupy")
@each("array", [np.zeros(3), CupyArray(index=1), torch.zeros(3), 5])
def test_an_array_elsewhere_is_refused(array):
    with pytest.raises(TypeError, match="expected a"):
        cupy_driver.CupyDriver(0).view(array, writable=True)


def test_cupy_makes_arrays_of_the_dtypes_it_has(cupy):
    made = []

    def empty(shape, dtype):
        if dtype.name == "bfloat16":
            raise ValueError
        made.append((shape, dtype))

    cupy.empty = empty
    driver = cupy_driver.CupyDriver(0)
    driver.empty("F32", [2, 3], "cupy")
    assert made == [((2, 3), np.dtype("float32"))]
    for dtype in ("BF16", "F4"):
        with pytest.raises(TypeError, match="framework='torch'"):
            driver.empty(dtype, [2], "cupy")


@pytest.mark.usefixtures("runtime")
def test_a_torch_without_cuda_is_said_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"torch .* cuda:0.*'cupy'"):
        cupy_driver.CupyDriver(0).empty("F32", [2], "torch")
