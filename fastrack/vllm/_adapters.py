"""LoRA adapters beside a sealed model: workers of vLLM open those that are sealed, and refuse others."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from fastrack._keys.keyring import KeyRing
from fastrack._models.mounts import Mount
from fastrack._patches.attributes import replace
from fastrack._sets.folder import INDEX, load_folder
from fastrack.errors import FormatError

FORMAT = "fastrack"


def install() -> None:
    """Have workers whose model was loaded with ``load_format="fastrack"`` take adapters from sealed folders only."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    for method, wrap in (("__init__", _with_settings), ("_load_adapter", _with_sealed)):
        original = getattr(WorkerLoRAManager, method)
        if not hasattr(original, "fastrack_original"):
            wrapped: Any = functools.wraps(original)(wrap(original))
            wrapped.fastrack_original = original
            replace(WorkerLoRAManager, method, wrapped)


def _with_settings(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        load = vllm_config.load_config
        self.fastrack_settings = load.model_loader_extra_config if load.load_format == FORMAT else None
        original(self, vllm_config, *args, **kwargs)

    return init


def _with_sealed(original: Any) -> Any:
    def load(self: Any, lora_request: Any) -> Any:
        if self.fastrack_settings is None:
            return original(self, lora_request)
        place = Path(lora_request.lora_path).expanduser()
        if not (place / INDEX).is_file():
            raise FormatError(
                f"{place}: expected a sealed adapter beside a sealed model, got another folder, which nothing "
                f"authenticates. Seal it with `fastrack seal {place} SEALED`"
            )
        ring = KeyRing.resolve(self.fastrack_settings["keys"])
        with Mount(load_folder(place, ring, anchor=self.fastrack_settings["anchor"]), ring) as mount:
            request = copy.copy(lora_request)
            request.lora_path = str(mount.path)
            return original(self, request)

    return load
