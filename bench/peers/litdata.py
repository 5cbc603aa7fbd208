"""litdata with its Fernet encryption.

Features: litdata's page "Encrypt data" and litdata/utilities/encryption.py: a Fernet token for each sample or chunk.
Fernet is AES-128-CBC and HMAC-SHA256 under two halves of a key. Tried: with two tokens of a chunk swapped, the
samples come in the other order and nothing is noticed.
"""

import os

from bench.peers.peer import Features, Peer


class Litdata(Peer):
    """A sample for each tensor, encrypted as its documentation shows, and a worker for each CPU both ways.

    Opening took 0.29 s with two workers and 0.35 s with none, 64 MiB on two CPUs; 8 MiB took 0.09 s with one worker
    and 0.05 s with none.
    """

    name, package = "litdata", "litdata"
    settings = (
        'FernetEncryption(level="sample"); optimize(chunk_bytes="64MB") with a forked worker for each CPU; '
        "StreamingDataLoader of its samples one by one, with a worker for each CPU"
    )
    features = Features(
        "samples",
        "samples can be exchanged",
        "to half of it",
        "sample by sample",
        "no",
        "no",
        "names encrypted, index in the clear",
    )

    def __init__(self):
        import litdata
        import torch
        from litdata.utilities.encryption import FernetEncryption

        self._litdata, self._torch = litdata, torch
        self._workers = len(os.sched_getaffinity(0))
        self._encryption = FernetEncryption(password="of the bench", level="sample")

    def seal(self, arrays, path):
        self._litdata.optimize(
            fn=lambda name: {"name": name, "tensor": self._torch.from_numpy(arrays[name])},
            inputs=list(arrays),
            output_dir=str(path),
            num_workers=self._workers,
            chunk_bytes="64MB",
            encryption=self._encryption,
            start_method="fork",
            verbose=False,
        )

    def open(self, path):
        samples = self._litdata.StreamingDataset(str(path), encryption=self._encryption)
        loader = self._litdata.StreamingDataLoader(samples, num_workers=self._workers, collate_fn=_only)
        return {sample["name"]: sample["tensor"] for sample in loader}


def _only(samples):
    """The sample of a batch of one, without a copy of it."""
    (sample,) = samples
    return sample
