"""The CUDA kernels as PTX, for the interpreter of `bench.gpu.ptx`."""

from bench.gpu.ptx import PtxGpu
from bench.gpu.ptx.memory import Buffer
from helpers import kernel_host
from helpers.buffers import LIVING
from helpers.kernel_nvrtc import OPTIONS, Nvrtc


def compile_ptx(library, options=()):
    """Compile the kernels with that libnvrtc, for sm_90: the text of their PTX."""
    source = kernel_host.SOURCE  # which is another one for mutants
    given = (*OPTIONS, f"-I{source.parent}", "-arch=compute_90", *options)
    _, text, _ = Nvrtc.load(library).compile_program(source.name, source.read_bytes(), {}, given)
    return text.rstrip(b"\0").decode()


class PtxLibrary:
    """Interprets kernels in the place of `kernel_host.Library`. Memory is what stands between fences."""

    def __init__(self, text):
        self._gpu = PtxGpu(text)

    def launch(self, kernel, *arguments, grid=1, threads=512, shared=0):
        """Run a kernel on copies of the memory, as large as the kernels themselves say."""
        memory = {address: array for address, array in LIVING.items() if array.size}
        buffers = [self._gpu.space.keep(_copy(address, array)) for address, array in memory.items()]
        values = [each if isinstance(each, int) else each.ctypes.data for each in arguments]
        has_table = kernel not in {"prepare", "unwrap"}
        table = arguments[-1].tobytes() if has_table else b""
        self._gpu.launch(kernel, grid, values[:-1] if has_table else values, None, table)
        for buffer, array in zip(buffers, memory.values(), strict=True):
            if array.flags.writeable:
                array[:] = buffer.bytes[buffer.first : buffer.size].view(array.dtype)


def _copy(address, array):
    """Make a buffer at the address of an array. One that holds only guard bytes was never written."""
    first = address % 16
    content = bytes(first) + array.tobytes()
    options = {"first": first, "writable": array.flags.writeable}
    buffer = Buffer(f"the buffer at {address:#x}", address - first, len(content), content, **options)
    buffer.written[first:] = (array != 0xA5).any()
    return buffer
