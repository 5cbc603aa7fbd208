"""Save and load a checkpoint in S3, sealed and plain by torch's own writer over fsspec, in turns: MB/s.

Start a server first, for example ``moto_server -p 5555``, and name it: ``AWS_ENDPOINT_URL=http://127.0.0.1:5555``.
"""

import contextlib
import statistics
import time
import warnings

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import fastrack
from fastrack.distributed import CheckpointReader, CheckpointWriter

TENSORS, ROWS, TURNS = 4, 4 << 20, 4  # float32: 64 MiB
KEY = fastrack.Key.generate()
KINDS = {
    "sealed": (lambda url: CheckpointWriter(url, key=KEY), lambda url: CheckpointReader(url, keys=KEY)),
    "plain": (FsspecWriter, FsspecReader),
}


def main() -> None:
    """Print a line for each kind: median, least and most of the turns."""
    warnings.simplefilter("ignore")
    with contextlib.suppress(FileExistsError):
        fsspec.filesystem("s3").mkdir("bench-checkpoints")
    state = {f"w{number}": torch.rand(ROWS) for number in range(TENSORS)}
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    speeds: dict[tuple[str, str], list[float]] = {}
    for turn in range(TURNS + 1):
        for kind, (writer, reader) in KINDS.items():
            url = f"s3://bench-checkpoints/{kind}-{turn}"
            start = time.perf_counter()
            dcp.save(state, storage_writer=writer(url), no_dist=True)
            saved = time.perf_counter()
            target = {name: torch.zeros(ROWS) for name in state}
            loading = time.perf_counter()
            dcp.load(target, storage_reader=reader(url), no_dist=True)
            loaded = time.perf_counter()
            assert all(torch.equal(target[name], state[name]) for name in state)
            if turn:  # the first one warms up
                speeds.setdefault((kind, "save"), []).append(size / (saved - start))
                speeds.setdefault((kind, "load"), []).append(size / (loaded - loading))
            fsspec.filesystem("s3").rm(url, recursive=True)
    for (kind, verb), each in speeds.items():
        print(f"{kind} {verb}: {statistics.median(each):.0f} MB/s ({min(each):.0f} to {max(each):.0f})")


if __name__ == "__main__":
    main()
