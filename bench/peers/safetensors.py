"""Plain safetensors: the limit, for it neither encrypts nor authenticates.

Features: the safetensors README (format, lazy loading, what is checked), and the trials of every run.
"""

from bench.peers.peer import Features

FEATURES = Features(
    random_access="slices",
    order_and_end="cut: refused; reordered: no",
    key_commitment="not encrypted",
    bounded_memory="reading, not writing",
    gpu="not encrypted",
    other_tools="every safetensors reader",
    metadata="in the clear",
)


class _Torch:
    """What the three ways of reading share: how it is written."""

    def __init__(self):
        import safetensors.torch
        import torch

        self._save, self._load, self._torch = safetensors.torch.save_file, safetensors.torch.load_file, torch

    def save(self, arrays, path):
        self._save({name: self._torch.from_numpy(array) for name, array in arrays.items()}, path)

    def load(self, path, **options):
        return self._load(path, **options)


class Safetensors:
    """Read, by the library's own reading."""

    name, package, is_read, features = "safetensors, read", "safetensors", True, FEATURES
    is_fresh, is_synced = True, False
    settings = 'safetensors.torch.save_file; load_file(backend="pread")'

    def __init__(self):
        self._torch = _Torch()
        self.seal = self._torch.save

    def open(self, path):
        return self._torch.load(path, backend="pread")


class SafetensorsClone:
    """Read, by copying what was mapped."""

    name, package, is_read, features = "safetensors, mapped and copied", "safetensors", True, FEATURES
    is_fresh, is_synced = True, False
    settings = "safetensors.torch.save_file; load_file, then clone() of each tensor"

    def __init__(self):
        self._torch = _Torch()
        self.seal = self._torch.save

    def open(self, path):
        return {name: tensor.clone() for name, tensor in self._torch.load(path).items()}


class SafetensorsMapped:
    """Not read."""

    name, package, is_read, features = "safetensors, mapped only", "safetensors", False, FEATURES
    is_fresh, is_synced = False, False
    settings = "safetensors.torch.save_file; load_file, which maps the file and reads nothing of it"

    def __init__(self):
        self._torch = _Torch()
        self.seal = self._torch.save

    def open(self, path):
        return self._torch.load(path)
