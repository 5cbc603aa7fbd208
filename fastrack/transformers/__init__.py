"""Sealed model folders for Hugging Face's transformers: `from_pretrained` and `load_adapter`.

Weights are opened on the device that they go to, one by one, when transformers asks for them. Configurations and
tokenizers are read from a private copy of the authenticated files. No sealed file touches a disk unencrypted.
"""

from fastrack.transformers._loading import from_pretrained, load_adapter

__all__ = ["from_pretrained", "load_adapter"]

for _name in __all__:
    globals()[_name].__module__ = __name__
