"""Weights that a device map leaves on the disk: they stay sealed, and open when they are needed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastrack._crypto.base import HostMemory
from fastrack._keys.keyring import KeyRing
from fastrack._models.mounts import Mount
from fastrack._models.offload import Opener, Weights, guard, openers_of
from fastrack._patches.safetensors import add_handler
from fastrack._sealed.scales import WIDENED
from fastrack._sealed.tensor import SealedTensor
from fastrack._sets.folder import SealedFolder, is_widened, own_tensors
from fastrack._tensors import arrays
from fastrack._transfer.vault import Ticket, Vault

_taken: dict[str, Changed] = {}  # by the paths of the folders that transformers would write to


class Changed:
    """Weights that transformers changes while it loads them, such as experts that it merges. They go to a vault."""

    def __init__(self, folder: str, vault: Vault) -> None:
        self.folder, self._vault = folder, vault
        self.tickets: dict[str, Ticket] = {}  # by the paths of the files that transformers would have written

    def put(self, path: str, tensors: Mapping[str, Any]) -> None:
        """Put the one tensor of a file into the vault."""
        [(name, spec)] = tensors.items()
        memory = HostMemory(spec.data_ptr, spec.data_len, spec).array
        self.tickets[path] = self._vault.put(name, arrays.from_bytes(memory, spec.dtype, spec.shape, "torch"))

    def opener(self, path: str, device: str) -> Opener | None:
        """Return what opens the weight of a file, or None if it was not changed."""
        ticket = self.tickets.get(path)
        return None if ticket is None else partial(self._vault.get, ticket, device=device)


@contextlib.contextmanager
def taking_changed(folder: str | os.PathLike[str] | None) -> Iterator[Changed | None]:
    """Yield what takes the weights that transformers would write unencrypted to a folder, which is made if missing.

    Its own folder in that is what transformers has to be given. Without a folder, yield None.
    """
    if folder is None:
        yield None
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fastrack-", dir=folder) as own:
        path = str(Path(own).resolve())
        _taken[path] = Changed(path, Vault(folder))
        add_handler("serialize_file", _save)
        try:
            yield _taken[path]
        finally:
            del _taken[path]


def _save(tensors: Any, filename: Any, *_: Any, **__: Any) -> Any:
    path = os.path.realpath(os.fsdecode(filename)) if _taken else ""
    changed = _taken.get(str(Path(path).parent))
    return NotImplemented if changed is None else changed.put(path, tensors)


def attach(model: Any, mount: Mount, keys: KeyRing, changed: Changed | None) -> None:
    """Have Accelerate's hooks on a model open its weights from the sealed folder, one ahead."""
    weights: dict[int, Weights] = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            loader = getattr(getattr(each, "weights_map", None), "dataset", None)
            if loader is not None and loader.index:
                if id(loader) not in weights:
                    weights[id(loader)] = Weights(_openers(loader, mount, keys, changed))
                each.weights_map.dataset = weights[id(loader)]
    if weights:
        guard(model)


def _openers(loader: Any, mount: Mount, keys: KeyRing, changed: Changed | None) -> dict[str, Opener]:
    """Return what opens each weight of an ``OffloadedWeightsLoader``."""
    device = name_of(loader.device)
    sealed: dict[str, tuple[SealedTensor, str]] = {}
    found: dict[str, Opener] = {}
    files: dict[str, dict[str, SealedTensor]] = {}
    for name, entry in loader.index.items():
        path = entry["safetensors_file"]
        opener = None if changed is None else changed.opener(os.path.realpath(path), device)
        if opener is not None:
            found[name] = opener
            continue
        if path not in files:
            files[path] = _tensors(mount.folder, os.path.relpath(path, mount.path))
        tensor = files[path][entry.get("weight_name", name)]
        sealed[name] = tensor, WIDENED if is_widened(tensor, files[path]) else tensor.context.dtype
    found |= openers_of(sealed, keys, device)
    ordered = {name: partial(_convert, found[name], entry.get("dtype")) for name, entry in loader.index.items()}
    return {**ordered, **{name: partial(loader.state_dict.__getitem__, name) for name in loader.state_dict}}


def name_of(device: object) -> str:
    """Return the name of a device of a device map, where a number is that of a GPU."""
    return "cpu" if device is None else f"cuda:{device}" if isinstance(device, int) else str(device)


def _convert(opener: Opener, dtype: str | None) -> Any:
    """Return a weight in the dtype that the model was loaded in, as Accelerate's own loader does."""
    import torch

    weight = opener()
    return weight if dtype is None else weight.to(getattr(torch, dtype))


def _tensors(folder: SealedFolder, name: str) -> dict[str, SealedTensor]:
    with folder.open(name) as file:
        return own_tensors(folder, name, file)
