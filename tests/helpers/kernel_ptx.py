"""The CUDA kernels as PTX, for the interpreter of `bench.gpu.ptx`."""

from helpers import kernel_host
from helpers.kernel_nvrtc import OPTIONS, Nvrtc


def compile_ptx(library, options=()):
    """Compile the kernels with that libnvrtc, for sm_90: the text of their PTX."""
    source = kernel_host.SOURCE  # which is another one for mutants
    given = (*OPTIONS, f"-I{source.parent}", "-arch=compute_90", *options)
    _, text, _ = Nvrtc.load(library).compile_program(source.name, source.read_bytes(), {}, given)
    return text.rstrip(b"\0").decode()
