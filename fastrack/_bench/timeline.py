"""A trace of one transfer of each kind."""

from pathlib import Path


def trace_transfers(nbytes: int, path: Path, *, device: str, bits: int) -> None:
    """Write a trace of one transfer of each kind, once the memory and the code of all of them are warm."""
    import numpy as np

    from fastrack._crypto.keys import Key
    from fastrack._sealed.tensor import seal
    from fastrack._transfer.channel import Channel
    from fastrack._util.trace import trace

    key = Key.generate(bits)
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    sealed = seal(plain, key)
    with Channel(device, keys=key) as channel:
        out = channel.to_device(plain)

        def move() -> None:
            channel.to_device(sealed, out=out)
            channel.to_device(plain, out=out)
            channel.to_host(out)

        move()
        with trace(path):
            move()
