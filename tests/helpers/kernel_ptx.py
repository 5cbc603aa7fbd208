"""The CUDA kernels as PTX, for the interpreter of `bench.gpu.ptx`."""

from helpers import kernel_host
from helpers.kernel_nvrtc import Nvrtc


def compile_ptx(library, options=()):
    """Compile the kernels with that libnvrtc, for sm_90: the text of their PTX."""
    source = kernel_host.SOURCE  # which is another one for mutants
    text, _ = Nvrtc.load(library).compile(source, "compute_90", source.parent, options, "PTX")
    return text.rstrip(b"\0").decode()
