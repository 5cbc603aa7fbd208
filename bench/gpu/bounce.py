"""The bounce path with a GPU at its end, at its best: the host's part, and the copy. The GPU's part is left out.

Today's GPUs authenticate one long chain before they decrypt, and no kernel here does so. Without it the bounce path
looks better than it is.
"""

from fastrack._bench.paths import BouncePath, ParallelBouncePath


class _ToGpu:
    def __init__(self, gpu, stream, size):
        super().__init__(size)
        self._gpu, self._stream = gpu, stream
        self._bounce, self._there = gpu.driver.host(self._bounce.size), gpu.driver.memory(self._bounce.size)

    def move(self, message):
        self.sealed_to_device(message, None)

    def _deliver(self, *_):
        self._gpu.upload(self._there.pointer, self._bounce, self._stream)
        self._gpu.wait(self._stream)


class WholeBounce(_ToGpu, BouncePath):
    """Have OpenSSL open the owner's message on one thread, and seal it on one for the GPU; then copy it."""


class ParallelBounce(_ToGpu, ParallelBouncePath):
    """Bounce chunks with all threads and fastrack's engine, so that only the detour differs."""
