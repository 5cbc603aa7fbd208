"""Models of sealed folders, in memory that processes share.

A memory file has the tensors, words of what model they are and where each is, and the size of the words.
"""

import json
import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import nn

import fastrack
from examples.serving import causal
from examples.serving.model import Config, Transformer
from examples.serving.refusals import ModelError, refuse_missing, told

_ALIGNMENT = 64  # bytes, as torch aligns tensors: results may depend on it

Model = Transformer | causal.CausalModel


def open_model(path: Path, keys: fastrack.KeySource, memory: int, *, anchor: Path | None = None) -> str:
    """Open a sealed folder into a memory file. Return its edition, which is the id of its index.

    Raise ModelError if it has no model that a worker can use, and what `fastrack.load_folder` raises.
    """
    try:
        ring = fastrack.KeyRing(keys)
    except (fastrack.FastrackError, OSError) as error:
        raise ModelError("key", told(error)) from None
    folder = fastrack.load_folder(path, ring, anchor=anchor)
    try:
        content = folder.read("config.json")
    except KeyError:
        text = f"{path}: expected a model with config.json, got none. Seal the folder that save_pretrained writes"
        raise ModelError("incomplete", text) from None
    try:
        config = json.loads(content)  # authentic, and so are the sizes that it claims
        module, words = (causal.load if "model_type" in config else _load_own)(folder, ring, config)
        _write(module, words, memory)
        map_model(memory)(torch.zeros(1, dtype=torch.long))  # a worker does the same, and is spared what fails
    except fastrack.FormatError as error:
        raise ModelError("incomplete", told(error)) from None
    except (fastrack.FastrackError, ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - transformers raises many
        text = f"{path}: expected a model that its config.json describes, got {told(error)}. Save it again"
        raise ModelError("architecture", text) from None
    return folder.file_id


def map_model(memory: int) -> Model:
    """Return a model whose weights are those in a memory file, which no process can change any more."""
    # Private, since older kernels refuse a shared map of sealed memory. Pages that nobody writes to are shared anyway.
    content = mmap.mmap(memory, os.fstat(memory).st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    words = json.loads(content[-8 - int.from_bytes(content[-8:]) : -8])
    with torch.device("meta"):
        model = causal.build(words) if "tokenizer" in words else Transformer(Config(**words["config"]))
    module, numbers = model if isinstance(model, nn.Module) else model.module, _bytes_of(content)
    for name, place in words["tensors"].items():
        owner, _, leaf = name.rpartition(".")
        part, tensor = module.get_submodule(owner), _tensor_in(numbers, *place)
        is_parameter = isinstance(getattr(part, leaf), nn.Parameter)
        setattr(part, leaf, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)
    module.eval()
    return model


def _load_own(folder: fastrack.SealedFolder, ring: fastrack.KeyRing, config: dict) -> tuple[nn.Module, dict]:
    """Return the weights of a model of this example, and words to build it again."""
    if set(config) != set(Config.__slots__):
        text = f"{folder.path}: expected config.json to have a model_type of transformers, got none. Save it again"
        raise ModelError("architecture", text)
    with torch.device("meta"):
        model = Transformer(Config(**config))
    refuse_missing(folder, fastrack.load_model(model, folder, ring, strict=False, device="cpu").missing_keys)
    return model, {"config": config}


def _write(module: nn.Module, words: dict, memory: int) -> None:
    """Move the tensors of a model into a memory file. What two modules share is there once."""
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    places, end = {}, 0
    for tensor in tensors.values():
        if id(tensor) not in places:
            places[id(tensor)] = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end, tensor.nbytes
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    words = {**words, "tensors": {name: places[id(tensor)] for name, tensor in tensors.items()}}
    text = json.dumps(words).encode()
    os.ftruncate(memory, end + len(text) + 8)
    content = mmap.mmap(memory, end + len(text) + 8)
    content[end:] = text + len(text).to_bytes(8)
    numbers = _bytes_of(content)
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        tensor.data = _tensor_in(numbers, *places[id(tensor)]).copy_(tensor.data)  # and where it was is free again


def _bytes_of(content: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # as it is meant
        return torch.frombuffer(content, dtype=torch.uint8)


def _tensor_in(numbers: torch.Tensor, dtype: str, shape: list[int], start: int, size: int) -> torch.Tensor:
    return numbers[start : start + size].view(getattr(torch, dtype)).view(shape)
