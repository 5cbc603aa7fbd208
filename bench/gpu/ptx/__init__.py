"""The kernels' PTX, interpreted without a GPU: answers, races, wrong accesses, counts, and a digest of timing.

`parse` reads the PTX that NVRTC makes, and `machine` runs it with NumPy, a vector for each register of a block's
threads. `PtxGpu` stands in for `bench.gpu.gpu.Gpu`. All this sees what the compiler made of the sources, which the same
sources on the host do not show; not what ptxas makes of that, nor other blocks at the same time.
"""

from bench.gpu.ptx.gpu import PtxGpu
from bench.gpu.ptx.memory import Violation

__all__ = ["PtxGpu", "Violation"]
