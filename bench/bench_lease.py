"""Opening under a key on a lease, which is asked about its end at each use, beside the same under a key for ever."""

import pytest
from conftest import size_name

from fastrack import Channel, Key, KeyRing, seal
from fastrack._keys.leases import LeasePage, Moment


@pytest.mark.parametrize("size", [4 << 10, 64 << 10], ids=size_name)
@pytest.mark.parametrize("kind", ["key", "lease"])
def test_open_under(rate, benchmark, size, kind, key, plain, out):
    benchmark.group = f"to_device under a key and a lease, {size_name(size)}"
    page = LeasePage.create([Key.from_bytes(bytes(key.material()))], Moment.now().after(3600))
    with Channel("cpu", keys=key if kind == "key" else KeyRing(page.keys)) as channel:
        rate(size, channel.to_device, seal(plain[:size], key), out=out[:size])
    page.end()
