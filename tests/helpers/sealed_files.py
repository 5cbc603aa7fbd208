"""Sealed files that `save_file` does not write: of another kind, or of a given identity."""

from pathlib import Path

from fastrack._files import plain_tensor, writer


def write_file(tensors, path, key, *, plain=(), metadata=None, **options):
    """Write arrays into a sealed file, with the options of all writers of the library, such as `kind` and `file_id`."""
    described = {name: plain_tensor.PlainTensor.of(array) for name, array in tensors.items()}
    writer.write_sealed(described, Path(path), key, frozenset(plain), metadata or {}, None, **options)
