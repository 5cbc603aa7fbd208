"""The model loader of workers: weights of a sealed folder, opened where vLLM copies them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from fastrack._devices import canonical, confidential
from fastrack._keys.keyring import KeyRing
from fastrack._models.lazy_weights import lazy_weights
from fastrack._models.mapped_pages import open_once
from fastrack._sets.folder import SealedFolder, load_folder
from fastrack.errors import FormatError, RollbackError
from fastrack.vllm._folders import authenticate, digest_of


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
        """Yield weights by name. vLLM calls it for another version of the weights, too: ``reload_weights``.

        Each opens where vLLM copies it to, of a rank only the rows that it takes, and else where it is first used.
        """
        ring = KeyRing.resolve(self._settings.get("keys"))
        folder = self._open_own(ring) if self._is_own(model_config) else self._open_next(model_config.model, ring)
        weights = folder.weights()
        device = next(model.parameters()).device
        confidential.check(canonical(device), self._settings.get("require"))
        return iter(lazy_weights(weights, partial(open_once, keys=ring), str(device)).items())

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
