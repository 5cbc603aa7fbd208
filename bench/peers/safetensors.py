"""Plain safetensors: the limit, for it neither encrypts nor authenticates.

Features: the safetensors README (format, lazy loading, checks), and the trials of every run.
"""

from bench.peers.peer import Features, Peer, as_torch


class Safetensors(Peer):
    """Read, by the library's own reading."""

    name, package = "safetensors, read", "safetensors"
    settings = 'safetensors.torch.save_file; load_file(backend="pread")'
    features = Features(
        "slices",
        "cut: refused; reordered: no",
        "not encrypted",
        "reading, not writing",
        "not encrypted",
        "every safetensors reader",
        "in the clear",
    )

    def __init__(self):
        import safetensors.torch

        self._files = safetensors.torch

    def seal(self, arrays, path):
        self._files.save_file(as_torch(arrays), path)

    def open(self, path):
        return self._files.load_file(path, backend="pread")


class SafetensorsClone(Safetensors):
    """Read, by copying mapped memory."""

    name = "safetensors, mapped and copied"
    settings = "safetensors.torch.save_file; load_file, then clone() of each tensor"

    def open(self, path):
        return {name: tensor.clone() for name, tensor in self._files.load_file(path).items()}


class SafetensorsMapped(Safetensors):
    """Not read."""

    name, is_read, is_fresh = "safetensors, mapped only", False, False
    settings = "safetensors.torch.save_file; load_file, which maps the file and reads nothing of it"

    def open(self, path):
        return self._files.load_file(path)
