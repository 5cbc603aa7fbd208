"""Measure sealed collectives next to plain ones: ``python -m bench.collectives``, some minutes on an idle machine.

All-reduce of one bucket among processes of this machine, over gloo on loopback:

- gloo: `torch.distributed.all_reduce`, unencrypted
- plain: fastrack's algorithm and transport with a copy in place of the cipher
- sealed: `SecureGroup.all_reduce`
- naive: a ring in which every hop decrypts, adds and encrypts again, each by one call of OpenSSL's AES-256-GCM

The ways take turns. A figure is the median of the slowest rank's times.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack import Key
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack.distributed import SecureGroup

MIB = 1 << 20
WAYS = ("gloo", "plain", "sealed", "naive")


def main():
    options = _options()
    report = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_run, (size, folder, options.mib, options.rounds), size)
            report += json.loads((Path(folder) / "report").read_text())
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(_table(report))


def _options():
    parser = argparse.ArgumentParser(prog="python -m bench.collectives", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 5, 25, 100], help="sizes of the bucket")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _run(rank, size, folder, mib, rounds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    key = Key.from_bytes(bytes(range(32)))
    with SecureGroup(key) as sealed, SecureGroup(key) as plain:
        plain._link.engine = CopyEngine()
        ring = NaiveRing(rank, size)
        calls = dict(zip(WAYS, (dist.all_reduce, plain.all_reduce, sealed.all_reduce, ring.all_reduce), strict=True))
        report = [_measure(calls, size, each, rounds) for each in mib]
    if rank == 0:
        (Path(folder) / "report").write_text(json.dumps(report))
    dist.destroy_process_group()


def _measure(calls, size, mib, rounds):
    given = torch.randn(mib * MIB // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = given.clone()
    dist.all_reduce(expected)
    seconds = {way: [] for way in calls}
    for _ in range(rounds + 1):
        for way, call in calls.items():
            bucket = given.clone()
            dist.barrier()
            start = time.perf_counter()
            call(bucket)
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[way].append(took.item())
            torch.testing.assert_close(bucket, expected)
    medians = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    return {"ranks": size, "mib": mib, "rounds": rounds, "seconds": medians}


def _table(report):
    lines = ["ranks  MiB    gloo ms   plain ms  sealed ms   naive ms  sealed/plain  sealed/gloo  naive/sealed\n"]
    for one in report:
        gloo, plain, sealed, naive = (one["seconds"][way] * 1e3 for way in WAYS)
        lines.append(
            f"{one['ranks']:5} {one['mib']:4} {gloo:10.2f} {plain:10.2f} {sealed:10.2f} {naive:10.2f} "
            f"{sealed / plain:13.2f} {sealed / gloo:12.2f} {naive / sealed:13.2f}\n"
        )
    return "".join(lines)


class CopyEngine:
    """Moves chunks as an engine does, without a cipher."""

    def expand_key(self, _key):
        return self

    def wipe(self):
        pass

    def seal_run(self, _schedule, source, target, _first):
        _copy(source, CHUNK_SIZE, target, SEALED_CHUNK_SIZE, source.size)

    def open_run(self, _schedule, source, target, _first):
        _copy(source, SEALED_CHUNK_SIZE, target, CHUNK_SIZE, target.size)


def _copy(source, source_stride, target, target_stride, size):
    full, rest = divmod(size, CHUNK_SIZE)
    into = target[: full * target_stride].reshape(full, target_stride)
    np.copyto(into[:, :CHUNK_SIZE], source[: full * source_stride].reshape(full, source_stride)[:, :CHUNK_SIZE])
    target[full * target_stride :][:rest] = source[full * source_stride :][:rest]


class NaiveRing:
    """A ring all-reduce that encrypts each shard anew for every hop. All memory is made beforehand."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.cipher = AESGCM(bytes(range(32)))
        self.counter = 0
        self.buffers = {}

    def all_reduce(self, tensor):
        shards = [shard.view(torch.uint8) for shard in tensor.view(self.size, -1).unbind()]
        nbytes = shards[0].numel()
        if nbytes not in self.buffers:
            self.buffers[nbytes] = [torch.zeros(extra + nbytes, dtype=torch.uint8) for extra in (16, 16, 0)]
        out, arrived, plain = self.buffers[nbytes]
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for step in range(2 * (self.size - 1)):
            gather = step >= self.size - 1
            leaving = shards[(self.rank - step) % self.size]  # after size - 1 steps the shard is complete
            target = shards[(self.rank - step - 1) % self.size]
            self.counter += 1
            nonce = self.counter.to_bytes(8, "big")
            self.cipher.encrypt_into(self.rank.to_bytes(4, "big") + nonce, leaving.numpy(), None, out.numpy())
            pending = [dist.irecv(arrived, left), dist.isend(out, right)]
            for each in pending:
                each.wait()
            sink = target if gather else plain
            self.cipher.decrypt_into(left.to_bytes(4, "big") + nonce, arrived.numpy(), None, sink.numpy())
            if not gather:
                target.view(tensor.dtype).add_(plain.view(tensor.dtype))


if __name__ == "__main__":
    main()
