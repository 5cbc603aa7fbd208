"""libcuda as far as lists of commands call it, over host memory: real functions, by their addresses.

Everything happens at once. What was called is written down, and what is to be answered can be set.
"""

import ctypes

from fastrack._devices.cuda import captures, cupy_driver
from helpers.fake_kernels import SCALARS, TABLES, run_kernel

NOT_READY = 600
_OPERANDS = {
    "cuCtxPushCurrent": 1,
    "cuCtxPopCurrent": 1,
    "cuCtxGetCurrent": 1,
    "cuThreadExchangeStreamCaptureMode": 1,
    "cuStreamWaitEvent": 3,
    "cuEventRecord": 2,
    "cuMemcpyHtoDAsync": 4,
    "cuMemcpyDtoHAsync": 4,
    "cuMemsetD8Async": 4,
    "cuLaunchKernel": 11,
    "cuEventSynchronize": 1,
    "cuEventQuery": 1,
    "cuStreamQuery": 1,
    "cuStreamIsCapturing": 2,
}


class StubCuda:
    """Functions by name, as `find_functions` gives them.

    Attributes
    ----------
    functions : dict of str to int
        Their addresses.
    calls : list
        Name and operands of each call, but for those that only set a context or the mode of the thread.
    contexts : list
        Those that are current, the last on top.
    mode : int
        That of the thread towards captures, 0 at first. A call on a stream or an event in another mode than 1, in which
        a capture of another thread may forbid it, is a violation.
    status : dict of str to int
        What a function returns, if not 0. A list is used up, one answer a call.
    capturing : set
        Streams that are captured.
    kernels : dict of int to str
        Handles of kernels. Those of fastrack are run.
    """

    def __init__(self, space=None):
        self.calls, self.contexts, self.status, self.capturing, self.kernels = [], [], {}, set(), {}
        self.violations = []
        self.happened = None
        self.mode = 0
        self._space = space
        self._kept = {name: self._function(name, count) for name, count in _OPERANDS.items()}
        self.functions = {name: ctypes.cast(kept, ctypes.c_void_p).value for name, kept in self._kept.items()}

    def _function(self, name, count):
        act = getattr(self, f"_{name}", lambda *_: None)

        def call(*operands):
            try:
                answer = self.status.get(name, 0)
                answer = answer.pop(0) if isinstance(answer, list) else answer
                if not name.startswith(("cuCtx", "cuThread")):
                    self.calls.append((name, *operands))
                    assert self.mode == 1, "a capture of another thread may forbid this call"
                if answer == 0:
                    act(*operands)
            except BaseException as error:  # noqa: BLE001 - nothing may go through native code
                self.violations.append(f"{name}: {type(error).__name__}: {error}")
                return 999
            return answer

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * count)(call)

    def _cuCtxPushCurrent(self, context):  # noqa: N802
        self.contexts.append(context)

    def _cuCtxPopCurrent(self, place):  # noqa: N802
        ctypes.c_uint64.from_address(place).value = self.contexts.pop()

    def _cuCtxGetCurrent(self, place):  # noqa: N802
        ctypes.c_uint64.from_address(place).value = 4711

    def _cuThreadExchangeStreamCaptureMode(self, place):  # noqa: N802
        mode = ctypes.c_int.from_address(place)
        mode.value, self.mode = self.mode, mode.value

    def _cuStreamIsCapturing(self, stream, place):  # noqa: N802
        ctypes.c_int.from_address(place).value = int(stream in self.capturing)

    def _cuMemcpyHtoDAsync(self, target, source, size, stream):  # noqa: N802
        if self._space:
            ctypes.memmove(target, source, size)

    _cuMemcpyDtoHAsync = _cuMemcpyHtoDAsync  # noqa: N815

    def _cuMemsetD8Async(self, place, value, size, stream):  # noqa: N802
        if self._space:
            ctypes.memset(place, value, size)

    def _cuEventRecord(self, event, stream):  # noqa: N802
        if self.happened:
            self.happened(event)

    def _cuLaunchKernel(self, handle, *operands):  # noqa: N802
        name = self.kernels.get(handle, "none_")
        kernel = name.partition("_")[0]
        count = SCALARS.get(kernel, 3)
        *places, last = (ctypes.c_uint64 * (count + 1)).from_address(operands[8])
        arguments = [ctypes.c_uint64.from_address(place).value for place in places]
        if kernel in TABLES:
            arguments += (ctypes.c_uint64 * TABLES[kernel]).from_address(last)
        self.calls[-1] = ("cuLaunchKernel", handle, *operands[:8], arguments)
        if self._space:
            run_kernel(self._space, self.violations, name, arguments)


def install(monkeypatch, stub):
    """Have `CupyDriver` find this libcuda."""
    monkeypatch.setattr(cupy_driver, "find_functions", lambda: stub.functions)
    exchange = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(stub.functions[captures.EXCHANGE_MODE])
    monkeypatch.setattr(captures, "find_exchange", lambda: exchange)
