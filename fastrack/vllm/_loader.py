"""The model loader of workers: weights of a sealed folder, opened one group ahead of vLLM."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from fastrack._keys.keyring import KeyRing
from fastrack._sealed.scales import WIDENED
from fastrack._sealed.tensor import SealedTensor
from fastrack._sets.folder import SealedFolder, is_widened, load_folder
from fastrack._tensors import arrays, dtypes
from fastrack._transfer.api import to_device
from fastrack._transfer.lazy_weights import lazy_weights
from fastrack.errors import FormatError, RollbackError
from fastrack.vllm._folders import authenticate, digest_of

_GROUP = 32 << 20  # bytes of weights that open in one call
_ALIGNMENT = 64


class SealedModelLoader(BaseModelLoader):
    """Load the weights of the sealed folder that the front end authenticated."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._settings: Mapping[str, Any] = load_config.model_loader_extra_config

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: weights are read where they are."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill a model with its weights."""
        if not self._is_own(model_config):
            raise FormatError(
                "load_format='fastrack': expected the model of the engine's arguments, which was authenticated, got "
                "another one, such as a draft model. Load that with a format of its own"
            )
        target: Any = model  # vLLM's models have the method, torch's modules have not
        loaded = target.load_weights(self.get_all_weights(model_config, model))
        missing = set() if loaded is None else {name for name, _ in model.named_parameters()} - loaded
        if missing and model_config.quantization is None:
            raise FormatError(
                f"{self._settings['folder']}: expected all weights of {type(model).__name__}, got none for "
                f"{', '.join(sorted(missing)):.300}. Seal the whole folder of the model"
            )

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield weights by name. vLLM calls it for another edition of the weights, too: ``reload_weights``."""
        ring = KeyRing.resolve(self._settings.get("keys"))
        folder = self._open_own(ring) if self._is_own(model_config) else self._open_next(model_config.model, ring)
        weights = folder.weights()
        device = next(model.parameters()).device
        if get_tensor_model_parallel_world_size() > 1:  # opened where a rank takes its rows
            return iter(lazy_weights(weights, _transfer(ring), str(device)).items())
        return _opened(weights, ring, str(device))

    def _is_own(self, model_config: ModelConfig) -> bool:
        copy = self._settings.get("copy")
        return copy is not None and model_config.model == copy

    def _open_own(self, ring: KeyRing) -> SealedFolder:
        folder = load_folder(self._settings["folder"], ring)  # the front end has compared this one with the anchor
        if folder.file_id != self._settings["file"]:
            raise RollbackError(
                f"{folder.path}: expected the folder that was authenticated when vLLM started, got another one, which "
                "took its place. Start vLLM again",
                path=folder.path,
            )
        return folder

    def _open_next(self, path: str, ring: KeyRing) -> SealedFolder:
        folder = load_folder(path, ring, anchor=self._settings["anchor"])
        authenticate(folder)
        if digest_of(folder) != self._settings["files"]:
            raise FormatError(
                f"{folder.path}: expected other weights of the same model, got another configuration, tokenizer or "
                "code. Start vLLM again with this folder"
            )
        return folder


def _transfer(ring: KeyRing) -> Any:
    def transfer(sealed: Any, device: Any, **options: Any) -> Any:
        return to_device(sealed, device, keys=ring, **options)

    return transfer


def _opened(weights: Mapping[str, SealedTensor], ring: KeyRing, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Open weights in groups, the next while vLLM copies those of one."""
    memories: list[Any] = []

    def open_group(names: list[str]) -> dict[str, torch.Tensor]:
        widened = {name for name in names if is_widened(weights[name], weights)}
        kinds = {name: WIDENED if name in widened else weights[name].dtype for name in names}
        parts = [{name: weights[name] for name in names if (name in widened) is wide} for wide in (False, True)]
        options: list[dict[str, Any]] = [{}, {"dtype": WIDENED}]
        opened: dict[str, torch.Tensor] = {}
        for part, option in zip(parts, options, strict=True):
            if not part:
                continue
            if device == "cpu":
                sizes = [dtypes.nbytes(kinds[name], weights[name].shape) for name in part]
                views = _views(memories, sizes)
                out = {
                    name: arrays.from_bytes(view, kinds[name], weights[name].shape, "torch")
                    for name, view in zip(part, views, strict=True)
                }
                opened |= to_device(part, "cpu", keys=ring, out=out, **option)
            else:
                opened |= to_device(part, device, keys=ring, framework="torch", **option)
        return opened

    with ThreadPoolExecutor(1, "fastrack-weights") as ahead:
        following: Future[dict[str, torch.Tensor]] | None = None
        for names in itertools.chain(_groups(weights), [None]):
            ready, following = following, None if names is None else ahead.submit(open_group, names)
            if ready is not None:
                group = ready.result()
                del ready
                while group:
                    name = next(iter(group))
                    yield name, group.pop(name)


def _groups(weights: Mapping[str, SealedTensor]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, tensor in weights.items():
        if group and size + tensor.nbytes > _GROUP:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor.nbytes
    if group:
        yield group


def _views(memories: list[Any], sizes: list[int]) -> list[Any]:
    """Return views for weights in one memory: one that was used before, if vLLM has kept none of its weights."""
    ends = list(itertools.accumulate(size + -size % _ALIGNMENT for size in sizes))
    total = ends[-1] + _ALIGNMENT
    # Measured, in the way that memories are looked at: the interpreter's own references are fewer since Python 3.14.
    unused = _references([np.empty(0)], 0)
    for number in range(len(memories)):  # no variable refers to a memory while its references are counted
        if memories[number].size >= total and _references(memories, number) == unused:
            memory = memories[number]
            break
    else:
        memory = np.empty(total + (4 << 20), np.uint8)
        memories[:] = [memory, *memories][:4]
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return [memory[start + end - (size + -size % _ALIGNMENT) :][:size] for end, size in zip(ends, sizes, strict=True)]


def _references(memories: list[Any], number: int) -> int:
    return sys.getrefcount(memories[number])
