"""Put fastrack's functions in the place of those of safetensors that have the same names."""

import safetensors
import safetensors.numpy
import safetensors.torch

import fastrack

KEY = fastrack.Key.generate()


class SafeOpen(fastrack.safe_open):
    def __init__(self, filename, framework=None, device="cpu", **options):
        options.pop("backend", None)  # how safetensors reads
        super().__init__(filename, framework, device, keys=KEY, **options)


def save_file(tensors, filename, metadata=None):
    fastrack.save_file(tensors, filename, KEY, metadata=metadata)


def load_file_of(framework):
    def load_file(filename, device="cpu", **options):
        options.pop("backend", None)
        return fastrack.load_tensors(filename, device, keys=KEY, framework=framework)

    return load_file


safetensors.safe_open = SafeOpen
for module, framework in ((safetensors.torch, "pt"), (safetensors.numpy, "np")):
    module.save_file, module.safe_open, module.load_file = save_file, SafeOpen, load_file_of(framework)
