"""`to_device` and `to_host`, next to plain copies of as many bytes and to the bounce path. By the host's clock."""

import numpy as np

from bench.gpu.bounce import ParallelBounce, WholeBounce
from bench.gpu.channels import channel_on
from bench.gpu.gpu import WrongResultError
from bench.gpu.host_data import noise, plains_of, require_same, sets_of
from bench.gpu.plan import size_of
from bench.gpu.timing import rows, wall
from fastrack import Key, seal, unseal
from fastrack._crypto import memcpy as packing
from fastrack._crypto.workers import default_threads

LOCKED, PAGEABLE = "page-locked copy", "pageable copy"
LOCKED_BACK, PAGEABLE_BACK = "page-locked copy to the host", "pageable copy to the host"
SEALED, PLAIN, BACK = "to_device, sealed", "to_device, plain", "to_host"
BOUNCE, PARALLEL_BOUNCE = "bounce", "parallel bounce"
FILL = "host's copy into page-locked memory"


def measure(gpu, plan):
    key = Key.generate(256)
    stock = noise(max(plan.transfer_sizes) + (1 << 20))
    with channel_on(gpu.driver, key) as channel:
        for size in plan.transfer_sizes:
            print(f"    {size_of(size)}")
            case = _Case(gpu, channel, key, size, stock, plan)
            measured = list(rows("transfers", size, case.runs(), plan, bits=256))
            case.require_right()
            yield from measured
            del case
            gpu.tidy()


class _Case:
    def __init__(self, gpu, channel, key, size, stock, plan):
        self._gpu, self._channel, self._key = gpu, channel, key
        count = sets_of(size, plan, most=32)
        self._stream = gpu.driver.stream(high_priority=True)
        self._plains = plains_of(size, count, stock)
        self._sealed = [seal(plain, key) for plain in self._plains]
        self._out = [gpu.array(size) for _ in range(count)]
        self._pointers = [gpu.pointer(out) for out in self._out]
        self._locked = [gpu.driver.host(size) for _ in range(min(count, 4))]
        for number, locked in enumerate(self._locked):
            locked[:] = self._plains[number]
        self._staged = gpu.driver.host(self._sealed[0].chunks.size)
        self._pageable = np.zeros(size, np.uint8)
        bounces = {BOUNCE: WholeBounce, PARALLEL_BOUNCE: ParallelBounce}
        self._bounces = {name: kind(gpu, self._stream, size) for name, kind in bounces.items()}
        self._messages = {name: bounce.seal(self._plains[0]) for name, bounce in self._bounces.items()}

    def runs(self):
        return {
            LOCKED: lambda n: wall(self._upload, n, _at(self._locked, n)),
            PAGEABLE: lambda n: wall(self._upload, n, _at(self._plains, n)),
            FILL: lambda n: wall(self._fill, n),
            SEALED: lambda n: wall(self._channel.to_device, _at(self._sealed, n), out=_at(self._out, n)),
            PLAIN: lambda n: wall(self._channel.to_device, _at(self._plains, n), out=_at(self._out, n)),
            LOCKED_BACK: lambda n: wall(self._download, n, _at(self._locked, n)),
            PAGEABLE_BACK: lambda n: wall(self._download, n, self._pageable),
            BACK: lambda n: wall(self._channel.to_host, _at(self._out, n), key=self._key),
            **{
                name: lambda _, move=bounce.move, message=self._messages[name]: wall(move, message)
                for name, bounce in self._bounces.items()
            },
        }

    def require_right(self):
        for tensor in (self._sealed[-1], self._plains[-1]):
            self._gpu.fill(self._pointers[-1], 0x5A, self._plains[-1].size, self._stream)
            self._gpu.wait(self._stream)
            self._channel.to_device(tensor, out=self._out[-1])
            require_same("to_device", self._gpu, self._pointers[-1], self._plains[-1], self._stream)
        back = unseal(self._channel.to_host(self._out[-1], key=self._key), self._key, framework="numpy")
        if not np.array_equal(back, self._plains[-1]):
            raise WrongResultError("to_host: what it sealed is not what was on the device")

    def _upload(self, number, source):
        self._gpu.upload(_at(self._pointers, number), source, self._stream)
        self._gpu.wait(self._stream)

    def _download(self, number, target):
        self._gpu.download(target, _at(self._pointers, number), self._stream)
        self._gpu.wait(self._stream)

    def _fill(self, number):
        packing.copy(self._staged, _at(self._sealed, number).chunks, default_threads())


def _at(things, number):
    return things[number % len(things)]
